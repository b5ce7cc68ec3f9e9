// One clock for a picture, and frames while it is on the screen.

import { useEffect, useRef, useState } from "preact/hooks";

export const isStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Calls `frame` with the seconds since the last frame while the element is on the screen. */
export function useFrames(frame: (seconds: number) => void) {
  const element = useRef<HTMLDivElement>(null);
  const latest = useRef(frame);
  latest.current = frame;
  useEffect(() => {
    let id = 0;
    let last = 0;
    const run = (now: number) => {
      latest.current(Math.min((now - (last || now)) / 1000, 0.1));
      last = now;
      id = requestAnimationFrame(run);
    };
    const watcher = new IntersectionObserver(([entry]) => {
      cancelAnimationFrame(id);
      last = 0;
      if (entry!.isIntersecting) id = requestAnimationFrame(run);
    });
    watcher.observe(element.current!);
    return () => {
      watcher.disconnect();
      cancelAnimationFrame(id);
    };
  }, []);
  return element;
}

/** The width of an element, px. */
export function useWidth<T extends HTMLElement>() {
  const element = useRef<T>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const look = () => setWidth(element.current!.clientWidth);
    look();
    const watcher = new ResizeObserver(look);
    watcher.observe(element.current!);
    return () => watcher.disconnect();
  }, []);
  return [element, width] as const;
}

export const clock = (ms: number) =>
  `${Math.floor(ms / 60_000)}:${String(Math.floor(ms / 1000) % 60).padStart(2, "0")}`;

export const seconds = (ms: number) => `${(ms / 1000).toFixed(ms < 995 ? 2 : ms < 9950 ? 1 : 0)} s`;
export const tokens = (n: number) => n.toLocaleString("en");

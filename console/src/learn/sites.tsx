// The picture of two sites as a component; recorded, simulated and live prompts alike.

import { useEffect, useRef } from "preact/hooks";
import type { Prompt } from "./prompts";
import { Scene, type Sight } from "./scene";
import { useFrames } from "./time";

interface Props {
  /** What is seen now; called for each frame. */
  sight: (elapsed: number) => [Sight, number];
  label: string;
  small?: boolean;
  onPull?: (tokens: number) => void;
  onPick?: (prompt: Prompt) => void;
  /** Draws once more when it changes, also without frames. */
  stamp?: unknown;
}

export function Sites({ sight, label, small, onPull, onPick }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const scene = useRef<Scene>(null);
  const pulled = useRef(false);
  const element = useFrames((elapsed) => {
    if (!scene.current) return;
    const [seen, at] = sight(elapsed);
    scene.current.draw(seen, at, elapsed);
  });
  useEffect(() => {
    scene.current = new Scene(canvas.current!, small ?? false);
    const fit = () => scene.current!.fit();
    const sizes = new ResizeObserver(fit);
    sizes.observe(canvas.current!);
    const themes = new MutationObserver(fit);
    themes.observe(document.documentElement, { attributes: true });
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", fit);
    return () => {
      sizes.disconnect();
      themes.disconnect();
      dark.removeEventListener("change", fit);
    };
  }, []);
  const point = (event: PointerEvent): [number, number] => {
    const box = canvas.current!.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const pull = (event: PointerEvent) => onPull?.(scene.current!.lengthAt(point(event)[1]));
  return (
    <div ref={element} class={`sites ${small ? "small" : ""}`}>
      <canvas
        ref={canvas}
        role="img"
        aria-label={label}
        class={onPull ? "pulls" : ""}
        onPointerDown={(event) => {
          const [x, y] = point(event);
          if (onPull && x < scene.current!.gate + 24) {
            pulled.current = true;
            canvas.current!.setPointerCapture(event.pointerId);
            pull(event);
          } else if (onPick) {
            const found = scene.current!.promptAt(x, y);
            if (found) onPick(found);
          }
        }}
        onPointerMove={(event) => pulled.current && pull(event)}
        onPointerUp={() => (pulled.current = false)}
        onPointerCancel={() => (pulled.current = false)}
      />
    </div>
  );
}

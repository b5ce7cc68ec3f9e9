// uPlot as a component: made once, given new data, fitted to its place.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { clock } from "./format";
import "uplot/dist/uPlot.min.css";

export interface Line {
  label: string;
  colour: string;
  width?: number;
  dash?: number[];
  fill?: string;
  format?: (value: number | null) => string;
}

interface Props {
  title: string;
  lines: Line[];
  data: uPlot.AlignedData;
  /** Seconds since 1970 along x, or plain numbers. */
  time?: boolean;
  height?: number;
  yLabel?: string;
  xLabel?: string;
  /** Highest y that is shown. */
  top?: number;
  xFormat?: (value: number) => string;
  yFormat?: (value: number) => string;
  /** A vertical line. */
  mark?: number | null;
}

export function Chart(props: Props) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot>(null);
  const mark = useRef<number | null>(null);
  mark.current = props.mark ?? null;
  const height = props.height ?? 180;
  const key = JSON.stringify([props.lines.map((l) => [l.label, l.colour]), height, props.top]);

  useEffect(() => {
    const element = place.current!;
    const made = new uPlot(options(props, element, height, mark), props.data, element);
    plot.current = made;
    const watcher = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height }));
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [key]);

  useEffect(() => plot.current?.setData(props.data), [props.data, props.mark]);

  return (
    <figure class="chart">
      <figcaption>{props.title}</figcaption>
      <div ref={place} role="img" aria-label={props.title} />
    </figure>
  );
}

/** A style variable as a colour that a canvas understands: light-dark() is settled by the browser. */
function colourOf(element: HTMLElement, variable: string): string {
  const probe = document.createElement("i");
  probe.style.color = `var(${variable})`;
  element.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function options(
  props: Props,
  element: HTMLElement,
  height: number,
  mark: { current: number | null },
): uPlot.Options {
  const ink = colourOf(element, "--quiet");
  const grid = { stroke: colourOf(element, "--line"), width: 1 };
  const font = "12px system-ui, sans-serif";
  const top = props.top;
  const axis = (format?: (value: number) => string, label?: string): uPlot.Axis => ({
    stroke: ink,
    grid,
    ticks: grid,
    font,
    labelFont: font,
    ...(label ? { label, labelSize: 18 } : {}),
    ...(format ? { values: (_: uPlot, values: number[]) => values.map(format) } : {}),
  });
  const time: uPlot.Axis = {
    ...axis((seconds) => clock(seconds)),
    space: 76,
  };
  return {
    width: element.clientWidth,
    height,
    cursor: { y: false },
    legend: { show: props.lines.length > 1 },
    scales: {
      x: { time: props.time ?? false },
      y: { range: (_, __, max) => [0, top ?? (max > 0 ? max * 1.1 : 1)] },
    },
    axes: [
      props.time ? time : axis(props.xFormat, props.xLabel),
      { ...axis(props.yFormat, props.yLabel), size: 84 },
    ],
    series: [
      props.time ? { value: (_, v) => (v == null ? "–" : clock(v)) } : { value: (_, v) => (v == null ? "–" : (props.xFormat ?? String)(v)) },
      ...props.lines.map((line) => ({
        label: line.label,
        stroke: line.colour,
        width: line.width ?? 1.5,
        points: { show: false },
        ...(line.dash ? { dash: line.dash } : {}),
        ...(line.fill ? { fill: line.fill } : {}),
        ...(line.format
          ? { value: (_: uPlot, v: number | null) => line.format!(v) }
          : { value: (_: uPlot, v: number | null) => (v == null ? "–" : v.toFixed(2)) }),
      })),
    ],
    hooks: {
      draw: [
        (u) => {
          if (mark.current == null) return;
          const x = u.valToPos(mark.current, "x", true);
          if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
          u.ctx.save();
          u.ctx.strokeStyle = "#d55e00";
          u.ctx.lineWidth = 2;
          u.ctx.beginPath();
          u.ctx.moveTo(x, u.bbox.top);
          u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
          u.ctx.stroke();
          u.ctx.restore();
        },
      ],
    },
  };
}

// uPlot as a component: made once, given new data, fitted to its place.

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { clock, whole } from "./format";
import { drawMarks, type Mark, MarkLinks, openMark, useMarks } from "./marks";
import "uplot/dist/uPlot.min.css";

/** Colours of lines, told apart by the colour-blind too; style variables, for light and dark. */
export const COLOURS = ["--blue", "--amber", "--green", "--pink", "--sky", "--red"];

export interface Line {
  label: string;
  /** A style variable. */
  colour: string;
  width?: number;
  dash?: number[];
  fill?: boolean;
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
  /** Highest y that is shown while all is zero; 1 without it. */
  least?: number;
  xFormat?: (value: number) => string;
  yFormat?: (value: number) => string;
  /** Figures beside the names of lines; as along y without it. */
  format?: (value: number) => string;
  /** Distances of marks along y, where those of ten do not fit. */
  steps?: number[];
  /** A vertical line. */
  mark?: number | null;
  /** Charts of one name have one cursor. */
  sync?: string;
  /** Called with a stretch of x that was marked by dragging. */
  onSelect?: (from: number, to: number) => void;
  /** Points are drawn too: there may be gaps on both sides of one. */
  dots?: boolean;
  /** Whose figures are shown while no cursor is in the chart, counted along x. */
  place?: number;
}

export function Chart(props: Props) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot>(null);
  const mark = useRef<number | null>(null);
  const [hovered, setHovered] = useState<number | null>(null);
  mark.current = props.mark ?? null;
  const incidents = useMarks(props.time ?? false);
  const marks = useRef<Mark[]>([]);
  marks.current = incidents;
  const selected = useRef(props.onSelect);
  selected.current = props.onSelect;
  const height = props.height ?? 160;
  const key = JSON.stringify([props.lines.map((l) => [l.label, l.colour]), height, props.top]);

  useEffect(() => {
    const element = place.current!;
    const made = new uPlot(
      options(props, element, height, mark, marks, setHovered, selected),
      props.data,
      element,
    );
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
  useEffect(() => plot.current?.redraw(false), [incidents]);
  const times = props.data[0];

  return (
    <figure class="chart">
      <figcaption>{props.title}</figcaption>
      <Legend chart={props} index={hovered ?? props.place ?? null} isHovered={hovered != null} />
      <div
        ref={place}
        role="img"
        aria-label={props.title}
        onClick={() => plot.current && openMark(plot.current, incidents)}
      />
      <MarkLinks marks={incidents} from={times[0] ?? 0} to={times[times.length - 1] ?? 0} />
    </figure>
  );
}

interface LegendProps {
  chart: Props;
  index: number | null;
  isHovered: boolean;
}

/** What each line is, and its figure at one place. */
function Legend({ chart, index, isHovered }: LegendProps) {
  const format = chart.format ?? chart.yFormat ?? ((value: number) => value.toFixed(2));
  const x = index == null ? null : chart.data[0][index];
  const xFormat = chart.time ? clock : (chart.xFormat ?? String);
  return (
    <p class="legend">
      {chart.lines.map((line, number) => {
        const value = index == null ? null : chart.data[number + 1]?.[index];
        return (
          <span key={line.label}>
            <i style={{ background: `var(${line.colour})`, height: `${(line.width ?? 1.5) + 1.5}px` }} />
            {chart.lines.length > 1 && line.label}
            <b>{value == null ? "" : format(value)}</b>
          </span>
        );
      })}
      {x != null && isHovered && <span class="at">at {xFormat(x)}</span>}
    </p>
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
  marks: { current: Mark[] },
  onHover: (index: number | null) => void,
  selected: { current: Props["onSelect"] },
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
    ...(format
      ? { values: (_: uPlot, values: number[]) => values.map((v) => format(v).replace(/\.0+\b/, "")) }
      : {}),
  });
  const across = props.time ? axis(clock) : axis(props.xFormat, props.xLabel);
  return {
    width: element.clientWidth,
    height,
    cursor: {
      y: false,
      ...(props.sync ? { sync: { key: props.sync } } : {}),
      ...(props.onSelect ? { drag: { x: true, y: false, setScale: false } } : {}),
    },
    legend: { show: false },
    scales: {
      x: { time: props.time ?? false },
      y: { range: (_, __, max) => [0, top ?? (max > 0 ? max * 1.1 : (props.least ?? 1))] },
    },
    axes: [
      { ...across, size: 32, ...(props.time ? { space: 76 } : {}) },
      {
        ...axis(props.yFormat, props.yLabel),
        size: props.sync ? 64 : props.yLabel ? 40 : props.yFormat === whole ? 56 : 84,
        ...(props.steps ? { incrs: props.steps } : {}),
      },
    ],
    series: [
      {},
      ...props.lines.map((line) => {
        const stroke = colourOf(element, line.colour);
        return {
          label: line.label,
          stroke,
          width: line.width ?? 1.5,
          points: props.dots ? { show: true, size: 4, fill: stroke } : { show: false },
          ...(line.dash ? { dash: line.dash } : {}),
          ...(line.fill ? { fill: stroke.replace("rgb(", "rgba(").replace(")", ", 0.14)") } : {}),
        };
      }),
    ],
    hooks: {
      setCursor: [(u) => onHover(u.cursor.idx ?? null)],
      setSelect: [
        (u) => {
          const { left, width } = u.select;
          if (!selected.current || width < 4) return;
          selected.current(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        },
      ],
      draw: [
        (u) => {
          drawMarks(u, marks.current, (variable) => colourOf(element, variable));
          if (mark.current == null) return;
          const x = u.valToPos(mark.current, "x", true);
          if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
          u.ctx.save();
          u.ctx.strokeStyle = colourOf(element, "--red");
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

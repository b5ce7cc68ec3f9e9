// The picture of two sites: prompts arrive, pass the threshold, are read here or there, are answered.
// It draws where each prompt is; it computes nothing of its own.

import { newTokens, stageOf, type Prompt } from "./prompts";
import { tokens as inTokens } from "./time";

export interface Sight {
  prompts: Prompt[];
  threshold: number;
  numThere: number;
  numHere: number;
  slots: number;
  /** What is wrong at this instant: "cut", "half", "engine". */
  trouble: string;
  /** ms that a prompt is seen before it arrives. */
  lead: number;
  /** How fast the clock runs. */
  speed: number;
}

interface Box {
  x: number;
  y: number;
  w: number;
  h: number;
}

interface Place {
  x: number;
  y: number;
  r: number;
}

const SHORTEST = 250;
const LONGEST = 131_072;
const CELL = 15;
const BLOCK_TOKENS = 8192;
const BLOCK_S = 0.9;

export class Scene {
  private places = new Map<Prompt, Place>();
  private seats = new Map<Prompt, number>();
  private colours: Record<string, string> = {};
  private width = 0;
  private height = 0;
  private isNarrow = false;

  constructor(
    private canvas: HTMLCanvasElement,
    private isSmall: boolean,
  ) {}

  /** Takes size and colours from the page. */
  fit() {
    const { clientWidth, clientHeight } = this.canvas;
    const scale = Math.min(devicePixelRatio || 1, 2);
    this.canvas.width = clientWidth * scale;
    this.canvas.height = clientHeight * scale;
    this.canvas.getContext("2d")!.setTransform(scale, 0, 0, scale, 0, 0);
    if (clientWidth !== this.width) this.places.clear();
    [this.width, this.height, this.isNarrow] = [clientWidth, clientHeight, clientWidth < 620];
    const style = getComputedStyle(this.canvas);
    const probe = document.createElement("i");
    this.canvas.parentElement!.append(probe);
    for (const name of ["ground", "card", "ink", "quiet", "line", "remote", "local", "good", "bad"]) {
      probe.style.color = `var(--${name})`;
      this.colours[name] = getComputedStyle(probe).color;
    }
    probe.remove();
    this.font = style.fontFamily;
  }

  private font = "sans-serif";

  /** Radius of a machine, px. */
  private get machineRadius(): number {
    return this.isSmall || this.isNarrow ? 14 : 17;
  }

  /** Height of a length on the scale of arrivals. */
  private level(n: number): number {
    const share = Math.log(Math.max(n, SHORTEST) / SHORTEST) / Math.log(LONGEST / SHORTEST);
    const { y, h } = this.field;
    return y + h - Math.min(share, 1) * h;
  }

  /** The length at a height. */
  lengthAt(y: number): number {
    const share = (this.field.y + this.field.h - y) / this.field.h;
    return SHORTEST * (LONGEST / SHORTEST) ** Math.min(Math.max(share, 0), 1);
  }

  get gate(): number {
    return this.field.x + this.field.w;
  }

  private get field(): Box {
    const w = this.isNarrow ? this.width * 0.25 : this.width * 0.22;
    return { x: 0, y: 34, w, h: this.height - 60 };
  }

  private get boxes(): { there: Box; here: Box; write: Box } {
    const { width: w, height: h, isNarrow } = this;
    if (isNarrow) {
      const x = w * 0.34;
      const wide = w - x - 34;
      return {
        there: { x, y: 26, w: wide, h: h * 0.26 },
        here: { x, y: h * 0.44, w: wide, h: h * 0.26 },
        write: { x, y: h * 0.79, w: w - x - 8, h: h * 0.21 - 14 },
      };
    }
    const x = w * 0.29;
    return {
      there: { x, y: 26, w: w * 0.4, h: h * 0.37 },
      here: { x, y: h * 0.57, w: w * 0.4, h: h * 0.37 },
      write: { x: w * 0.75, y: h * 0.57, w: w * 0.25 - 10, h: h * 0.37 },
    };
  }

  /** Corners of the line between the sites. */
  private get pipe(): [number, number][] {
    const { there, write } = this.boxes;
    const y = there.y + there.h / 2;
    if (this.isNarrow) {
      const x = this.width - 16;
      return [
        [there.x + there.w, y],
        [x, y],
        [x, write.y],
      ];
    }
    const x = write.x + write.w / 2;
    return [
      [there.x + there.w, y],
      [x, y],
      [x, write.y],
    ];
  }

  private along(share: number): [number, number] {
    const [a, b, c] = this.pipe as [[number, number], [number, number], [number, number]];
    const first = b[0] - a[0];
    const second = c[1] - b[1];
    const way = share * (first + second);
    return way < first ? [a[0] + way, a[1]] : [b[0], b[1] + way - first];
  }

  private radius(n: number): number {
    return Math.max(0.042 * Math.sqrt(n) * (this.isSmall || this.isNarrow ? 0.8 : 1), 2.2);
  }

  /** The prompt at a point, for a click. */
  promptAt(x: number, y: number): Prompt | null {
    let best: Prompt | null = null;
    let near = 16;
    for (const [prompt, place] of this.places) {
      const far = Math.hypot(place.x - x, place.y - y) - place.r;
      if (far < near) [best, near] = [prompt, far];
    }
    return best;
  }

  draw(sight: Sight, at: number, elapsed: number) {
    const context = this.canvas.getContext("2d")!;
    if (!this.width) this.fit();
    context.clearRect(0, 0, this.width, this.height);
    const groups = this.sort(sight, at);
    this.furniture(context, sight, groups);
    this.line(context, sight, groups);
    const eased = elapsed > 0 ? 1 - Math.exp(-elapsed * 9) : 1;
    const seen = new Set<Prompt>();
    for (const [prompt, target, colour, share] of this.targets(sight, groups)) {
      let place = this.places.get(prompt);
      if (!place) {
        place = { ...target };
        this.places.set(prompt, place);
      }
      place.x += (target.x - place.x) * eased;
      place.y += (target.y - place.y) * eased;
      place.r += (target.r - place.r) * eased;
      seen.add(prompt);
      this.disc(context, prompt, place, colour);
      if (share > 0) this.progress(context, target, colour, share);
    }
    this.labels(context, sight);
    for (const prompt of this.places.keys()) if (!seen.has(prompt)) this.places.delete(prompt);
    for (const prompt of this.seats.keys()) if (!seen.has(prompt)) this.seats.delete(prompt);
  }

  private sort(sight: Sight, at: number) {
    const groups = {
      coming: [] as [Prompt, number][],
      waitHere: [] as [Prompt, number][],
      waitThere: [] as [Prompt, number][],
      readHere: [] as [Prompt, number][],
      readThere: [] as [Prompt, number][],
      way: [] as [Prompt, number][],
      write: [] as [Prompt, number][],
    };
    for (const prompt of sight.prompts) {
      if (prompt.at > at) {
        if (prompt.at > at + sight.lead) break;
        groups.coming.push([prompt, 1 - (prompt.at - at) / sight.lead]);
        continue;
      }
      const stage = stageOf(prompt, at);
      if (!stage) continue;
      const isThere = prompt.path === "remote" || stage[0] === "lost";
      const name =
        stage[0] === "write" || stage[0] === "way"
          ? stage[0]
          : stage[0] === "read"
            ? isThere
              ? "readThere"
              : "readHere"
            : isThere
              ? "waitThere"
              : "waitHere";
      if (name === "way" && !isThere) groups.write.push([prompt, 0]);
      else groups[name].push([prompt, stage[1]]);
    }
    return groups;
  }

  private *targets(
    sight: Sight,
    groups: ReturnType<Scene["sort"]>,
  ): Generator<[Prompt, Place, string, number]> {
    const { there, here, write } = this.boxes;
    const { remote, local, good, quiet, bad } = this.colours as Record<string, string>;
    for (const [prompt, share] of groups.coming) {
      const r = this.radius(newTokens(prompt));
      yield [prompt, { x: share * (this.gate - r), y: this.level(newTokens(prompt)), r }, quiet!, 0];
    }
    yield* this.queue(groups.waitThere, there, sight.numThere, (p) => (p.path === "fell" ? bad! : remote!));
    yield* this.queue(groups.waitHere, here, sight.numHere, (p) => (p.path === "fell" ? bad! : local!));
    yield* this.machines(groups.readThere, there, sight.numThere, remote!);
    yield* this.machines(groups.readHere, here, sight.numHere, local!);
    for (const [prompt, share] of groups.way) {
      const [x, y] = this.along(share);
      yield [prompt, { x, y, r: Math.min(this.radius(newTokens(prompt)), 8) }, remote!, 0];
    }
    const cell = this.isSmall ? 9 : 11;
    const columns = Math.max(Math.floor((write.w - 16) / cell), 1);
    for (const [prompt] of groups.write) {
      const seat = this.seat(prompt, groups.write, 0);
      const x = write.x + 12 + (seat % columns) * cell;
      const y = write.y + (this.isNarrow ? 24 : 30) + Math.floor(seat / columns) * cell;
      yield [prompt, { x, y: Math.min(y, write.y + write.h - 4), r: cell / 2 - 1.6 }, good!, 0];
    }
  }

  private *queue(
    group: [Prompt, number][],
    box: Box,
    numMachines: number,
    colour: (prompt: Prompt) => string,
  ): Generator<[Prompt, Place, string, number]> {
    const right = this.machineX(box, numMachines) - this.machineRadius - 12;
    const rows = Math.max(Math.floor((box.h - 36) / CELL), 1);
    const columns = Math.max(Math.floor((right - box.x - 8) / CELL), 1);
    for (const [index, [prompt]] of group.entries()) {
      // What has no room is in the count; the queue winds, so that a step of it is short.
      if (index >= rows * columns) break;
      const column = Math.floor(index / rows);
      const row = column % 2 ? rows - 1 - (index % rows) : index % rows;
      const x = right - column * CELL;
      const y = box.y + 34 + row * CELL;
      const r = Math.min(this.radius(newTokens(prompt)), CELL / 2 - 0.5);
      yield [prompt, { x, y, r }, colour(prompt), 0];
    }
  }

  private *machines(
    group: [Prompt, number][],
    box: Box,
    count: number,
    colour: string,
  ): Generator<[Prompt, Place, string, number]> {
    for (const [prompt, share] of group) {
      const seat = this.seat(prompt, group, 1000) - 1000;
      const [x, y] = this.machine(box, count, Math.min(seat, count - 1));
      yield [prompt, { x, y, r: Math.min(this.radius(newTokens(prompt)), this.machineRadius - 5) }, colour, share];
    }
  }

  /** A place that a prompt keeps while it is in a stage. */
  private seat(prompt: Prompt, group: [Prompt, number][], base: number): number {
    const held = this.seats.get(prompt);
    if (held != null && held >= base && held < base + 1000) return held;
    const taken = new Set(group.map(([other]) => this.seats.get(other)));
    let seat = base;
    while (taken.has(seat)) seat++;
    this.seats.set(prompt, seat);
    return seat;
  }

  private machineX(box: Box, count: number): number {
    const columns = count > 4 || box.h < 130 ? 2 : 1;
    return box.x + box.w - this.machineRadius - 10 - (columns - 1) * (2 * this.machineRadius + 6);
  }

  private machine(box: Box, count: number, index: number): [number, number] {
    const columns = count > 4 || box.h < 130 ? 2 : 1;
    const rows = Math.ceil(count / columns);
    const step = Math.min((box.h - 30) / rows, 2 * this.machineRadius + 8);
    const x = this.machineX(box, count) + (index % columns) * (2 * this.machineRadius + 6);
    const top = box.y + 26 + (box.h - 30 - step * rows) / 2;
    return [x, top + step * (Math.floor(index / columns) + 0.5)];
  }

  private furniture(context: CanvasRenderingContext2D, sight: Sight, groups: ReturnType<Scene["sort"]>) {
    const { there, here, write } = this.boxes;
    const { remote, local, good, line, ink, bad } = this.colours as Record<string, string>;
    const field = this.field;
    const level = this.level(sight.threshold);
    tint(context, remote!, 0.09, 0, field.y - 10, field.w, Math.max(level - field.y + 10, 0));
    tint(context, local!, 0.09, 0, level, field.w, field.y + field.h + 10 - level);
    this.text(context, this.isNarrow ? "prompts" : "prompts arrive", 0, 14, ink!, 12.5, 600);
    // The two homes.
    this.box(context, there, remote!, crowd(groups.waitThere.length));
    this.box(context, here, local!, crowd(groups.waitHere.length));
    this.box(context, write, good!, 0);
    const small = this.isNarrow || this.isSmall;
    this.title(context, there, "Remote site", "reads fast", remote!);
    this.title(context, here, "Local site", small ? "reads" : "reads slower", local!);
    this.title(context, write, "Local site", "writes", good!);
    this.slots(context, there, sight.numThere, remote!, sight.trouble === "engine");
    this.slots(context, here, sight.numHere, local!, false);
    // Ways from the gate.
    context.strokeStyle = line!;
    context.lineWidth = 1.5;
    const gap = there.x - this.gate;
    for (const [box, y] of [
      [there, Math.max(level - 24, field.y)],
      [here, Math.min(level + 24, field.y + field.h)],
    ] as const) {
      context.beginPath();
      context.moveTo(this.gate + 5, y);
      const to = box.y + box.h / 2;
      context.bezierCurveTo(this.gate + gap * 0.6, y, this.gate + gap * 0.4, to, box.x - 3, to);
      context.stroke();
    }
    if (!this.isNarrow) {
      context.beginPath();
      context.moveTo(here.x + here.w + 3, here.y + here.h / 2);
      context.lineTo(write.x - 3, here.y + here.h / 2);
      context.stroke();
    } else {
      context.beginPath();
      context.moveTo(here.x + here.w / 2, here.y + here.h + 2);
      context.lineTo(here.x + here.w / 2, write.y - 2);
      context.stroke();
    }
    // The gate.
    context.strokeStyle = ink!;
    context.lineWidth = 2;
    context.beginPath();
    context.moveTo(this.gate, field.y - 10);
    context.lineTo(this.gate, field.y + field.h + 10);
    context.stroke();
    context.setLineDash([5, 4]);
    context.beginPath();
    context.moveTo(0, level);
    context.lineTo(this.gate, level);
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = ink!;
    context.beginPath();
    context.arc(this.gate, level, this.isSmall ? 6 : 10, 0, 7);
    context.fill();
    if (!this.isSmall) {
      context.strokeStyle = this.colours.ground!;
      context.beginPath();
      for (const way of [-1, 1]) {
        context.moveTo(this.gate - 3.5, level + way * 2);
        context.lineTo(this.gate, level + way * 5.5);
        context.lineTo(this.gate + 3.5, level + way * 2);
      }
      context.stroke();
    }
    for (const [box, group] of [
      [there, groups.waitThere],
      [here, groups.waitHere],
    ] as const)
      if (group.length > 2) {
        const words = `${group.length} wait`;
        context.font = `600 12px ${this.font}`;
        const from = box.x + box.w - 9 - context.measureText(words).width;
        this.text(context, words, from, box.y + 17, group.length > 12 ? bad! : ink!, 12, 600);
      }
  }

  /** Words over the prompts that arrive. */
  private labels(context: CanvasRenderingContext2D, sight: Sight) {
    const { quiet, ink, ground } = this.colours as Record<string, string>;
    const field = this.field;
    for (const [words, y, colour, weight] of [
      ["long", field.y + 4, quiet!, 400],
      ["short", field.y + field.h + 4, quiet!, 400],
      [inTokens(sight.threshold), this.level(sight.threshold) - 6, ink!, 650],
    ] as const) {
      context.font = `${weight} 12px ${this.font}`;
      context.lineWidth = 4;
      context.strokeStyle = ground!;
      context.strokeText(words, 4, y);
      this.text(context, words, 4, y, colour, 12, weight);
    }
  }

  private box(context: CanvasRenderingContext2D, box: Box, colour: string, crowded: number) {
    context.beginPath();
    context.roundRect(box.x, box.y, box.w, box.h, 10);
    context.fillStyle = this.colours.card!;
    context.fill();
    if (crowded) {
      context.globalAlpha = crowded * 0.28;
      context.fillStyle = this.colours.bad!;
      context.fill();
      context.globalAlpha = 1;
    }
    context.strokeStyle = colour;
    context.lineWidth = 1.5;
    context.stroke();
  }

  private title(context: CanvasRenderingContext2D, box: Box, name: string, more: string, colour: string) {
    const size = this.isSmall || this.isNarrow ? 11.5 : 12.5;
    context.font = `600 ${size}px ${this.font}`;
    const end = context.measureText(name).width;
    this.text(context, name, box.x + 9, box.y + 17, colour, size, 600);
    this.text(context, more, box.x + 15 + end, box.y + 17, this.colours.quiet!, size);
  }

  private slots(context: CanvasRenderingContext2D, box: Box, count: number, colour: string, isOneDown: boolean) {
    for (let i = 0; i < count; i++) {
      const [x, y] = this.machine(box, count, i);
      const isDown = isOneDown && i === 0;
      context.beginPath();
      context.arc(x, y, this.machineRadius, 0, 7);
      context.fillStyle = this.colours.ground!;
      context.fill();
      context.strokeStyle = isDown ? this.colours.bad! : colour;
      context.globalAlpha = isDown ? 1 : 0.45;
      context.lineWidth = isDown ? 2 : 1.2;
      context.stroke();
      if (isDown) {
        context.beginPath();
        context.moveTo(x - 6, y - 6);
        context.lineTo(x + 6, y + 6);
        context.moveTo(x + 6, y - 6);
        context.lineTo(x - 6, y + 6);
        context.stroke();
      }
      context.globalAlpha = 1;
    }
  }

  /** The line between the sites: as wide as it carries, with blocks on it. */
  private line(context: CanvasRenderingContext2D, sight: Sight, groups: ReturnType<Scene["sort"]>) {
    const [a, b, c] = this.pipe as [[number, number], [number, number], [number, number]];
    const whole = this.isNarrow ? 14 : 20;
    const width = sight.trouble === "cut" ? whole : sight.trouble === "half" ? whole / 2 : whole;
    const path = () => {
      context.beginPath();
      context.moveTo(a[0] + 2, a[1]);
      context.lineTo(b[0], b[1]);
      context.lineTo(c[0], c[1] - 2);
    };
    context.lineJoin = "round";
    path();
    context.strokeStyle = this.colours.remote!;
    context.globalAlpha = sight.trouble === "cut" ? 0.25 : 0.5;
    context.lineWidth = width + 3;
    context.stroke();
    context.globalAlpha = 1;
    path();
    context.strokeStyle = this.colours.ground!;
    context.lineWidth = width;
    context.stroke();
    // What is read and has not arrived fills the line from its beginning.
    const backlog = Math.min(groups.way.length / 8, 1);
    if (backlog > 0.15) {
      path();
      context.save();
      context.globalAlpha = 0.28;
      context.strokeStyle = backlog > 0.7 ? this.colours.bad! : this.colours.remote!;
      context.lineWidth = width * backlog;
      context.stroke();
      context.restore();
    }
    if (sight.trouble !== "cut") this.blocks(context, sight, groups, width);
    const [x, y] = [(a[0] + b[0]) / 2, a[1]];
    if (!this.isNarrow) {
      const more = { cut: "the line is cut", half: "half of the line", engine: "", "": "" }[sight.trouble];
      const words = more || "the line";
      this.text(context, words, x - 20, y - 18, more ? this.colours.bad! : this.colours.quiet!, 12, more ? 600 : 400);
    }
    if (sight.trouble === "cut") {
      const [cx, cy] = [b[0], (b[1] + c[1]) / 2];
      context.fillStyle = this.colours.ground!;
      context.fillRect(cx - whole, cy - 13, 2 * whole, 26);
      context.strokeStyle = this.colours.bad!;
      context.lineWidth = 3;
      context.beginPath();
      context.moveTo(cx - 8, cy - 8);
      context.lineTo(cx + 8, cy + 8);
      context.moveTo(cx + 8, cy - 8);
      context.lineTo(cx - 8, cy + 8);
      context.stroke();
    }
  }

  /** Blocks of 8,192 tokens leave while the rest is still being read. */
  private blocks(context: CanvasRenderingContext2D, sight: Sight, groups: ReturnType<Scene["sort"]>, width: number) {
    context.fillStyle = this.colours.remote!;
    const flight = BLOCK_S * 1000 * sight.speed;
    const side = Math.min(width - 4, 9);
    for (const [prompt, share] of [...groups.readThere, ...groups.way]) {
      const length = newTokens(prompt);
      const whole = prompt.parts[2];
      if (!whole) continue;
      const isRead = groups.way.length > 0 && stageIsOver(prompt, groups.way);
      const gone = isRead ? whole + share * (prompt.parts[3] ?? 0) : share * whole;
      for (let end = BLOCK_TOKENS; end <= length; end += BLOCK_TOKENS) {
        const since = gone - (end / length) * whole;
        if (since < 0 || since > flight) continue;
        const [x, y] = this.along(since / flight);
        context.fillRect(x - side / 2, y - side / 2, side, side);
      }
    }
  }

  /** How much of a prompt is read, around its machine. */
  private progress(context: CanvasRenderingContext2D, { x, y }: Place, colour: string, share: number) {
    context.beginPath();
    context.arc(x, y, this.machineRadius - 1.5, -Math.PI / 2, -Math.PI / 2 + share * 2 * Math.PI);
    context.strokeStyle = colour;
    context.lineWidth = 3;
    context.stroke();
  }

  private disc(context: CanvasRenderingContext2D, prompt: Prompt, place: Place, colour: string) {
    const { x, y, r } = place;
    const rim = r * Math.sqrt(prompt.tokens / newTokens(prompt));
    if (prompt.cached && colour !== this.colours.good) {
      context.beginPath();
      context.arc(x, y, Math.min(rim, r + 4.5), 0, 7);
      context.fillStyle = this.colours.ink!;
      context.globalAlpha = 0.7;
      context.fill();
      context.globalAlpha = 1;
    }
    context.beginPath();
    context.arc(x, y, r, 0, 7);
    context.fillStyle = colour;
    context.fill();
  }

  private text(
    context: CanvasRenderingContext2D,
    words: string,
    x: number,
    y: number,
    colour: string,
    size: number,
    weight = 400,
  ) {
    context.font = `${weight} ${size}px ${this.font}`;
    context.fillStyle = colour;
    context.fillText(words, x, y);
  }
}

const crowd = (count: number) => Math.min(Math.max((count - 5) / 40, 0), 1);

function stageIsOver(prompt: Prompt, way: [Prompt, number][]): boolean {
  return way.some(([other]) => other === prompt);
}

function tint(
  context: CanvasRenderingContext2D,
  colour: string,
  alpha: number,
  x: number,
  y: number,
  w: number,
  h: number,
) {
  context.globalAlpha = alpha;
  context.fillStyle = colour;
  context.fillRect(x, y, w, h);
  context.globalAlpha = 1;
}

// What the system of a plan carries, and each stage that binds it, along one of its settings.

import { useMemo } from "preact/hooks";
import type { Curve, WhatIf } from "../api";
import { Chart, type Line } from "../chart";

type Stage = Exclude<keyof Curve, "x">;

const LINES: Record<Stage, Omit<Line, "label">> = {
  prfaas: { colour: "--blue" },
  pd_prefill: { colour: "--amber" },
  decode: { colour: "--green" },
  rate: { colour: "--violet", width: 4 },
};

interface Titled {
  plan: WhatIf;
  title: string;
  /** What the lines are called; a stage without a name is not drawn. */
  names: Partial<Record<Stage, string>>;
}

interface Along extends Titled {
  curve: Curve;
  xFormat: (value: number) => string;
  xLabel: string;
  mark: number | null;
}

export function Throughput({ plan, curve, names, ...rest }: Along) {
  const stages = Object.keys(names) as Stage[];
  const data = useMemo(
    () => [curve.x, ...stages.map((stage) => curve[stage])] as [number[], ...(number | null)[][]],
    [curve],
  );
  return (
    <Chart
      {...rest}
      lines={stages.map((stage) => ({ label: names[stage]!, ...LINES[stage] }))}
      data={data}
      top={1.7 * plan.plan.exact.designs[0]!.rate_per_s}
      height={260}
      yLabel="req/s"
    />
  );
}

export function ThroughputByThreshold(props: Titled) {
  return (
    <Throughput
      {...props}
      curve={props.plan.threshold}
      xFormat={(t) => `${Math.round(t / 1000)}k`}
      xLabel="threshold, tokens"
      mark={props.plan.plan.exact.designs[0]!.offload_threshold}
    />
  );
}

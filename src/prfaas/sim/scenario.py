"""From a scenario file to a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prfaas.core.policies import PolicyName
from prfaas.errors import ConfigError
from prfaas.planner.costs import make_costs
from prfaas.planner.load import Question, load_question
from prfaas.planner.problem import Problem
from prfaas.planner.search import Operation, optimum
from prfaas.planner.throughput import Mode
from prfaas.planner.toml_tables import override, read_toml, validated
from prfaas.sim.decode import DecodeLimits
from prfaas.sim.link import loss_limited_bits_per_s
from prfaas.sim.request import Request
from prfaas.sim.scenario_file import FailureTable, ScenarioFile
from prfaas.sim.setup import (
    CacheSetup,
    Failure,
    FailureKind,
    LinkSetup,
    RoutingSetup,
    Setup,
    SignalSetup,
    SloSetup,
)
from prfaas.sim.timing import step_time
from prfaas.sim.workload import Synthetic, Trace
from prfaas.units import NS_PER_S


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


@dataclass(frozen=True)
class Scenario:
    """A system, what arrives, and what of it is measured.

    Attributes:
        title: For people.
        setup: The system.
        workload: What arrives.
        seed: Of the workload.
        start_ns: Earlier arrivals are not counted.
        end_ns: End of the arrivals; None takes the last arrival.
        notes: What a reader of the results should know.
    """

    title: str
    setup: Setup
    workload: Synthetic | Trace
    seed: int
    start_ns: int
    end_ns: int | None
    notes: tuple[str, ...] = ()

    def requests(self) -> list[Request]:
        """The requests of the scenario's seed."""
        return self.workload.requests(self.seed)

    def with_policy(self, policy: PolicyName) -> Scenario:
        """The same with another policy."""
        routing = replace(self.setup.routing, policy=policy)
        return replace(self, setup=replace(self.setup, routing=routing))

    def with_seed(self, seed: int) -> Scenario:
        """The same with another seed."""
        return replace(self, seed=seed)

    def with_rate_scaled(self, factor: float) -> Scenario:
        """The same with arrivals `factor` times as fast."""
        if isinstance(self.workload, Trace):
            scaled: Synthetic | Trace = replace(
                self.workload, rate_scale=self.workload.rate_scale * factor
            )
        else:
            scaled = replace(self.workload, rate_per_s=self.workload.rate_per_s * factor)
        return replace(self, workload=scaled)


def load_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario file.

    Args:
        path: The file; paths in it start at its directory.
        overrides: Settings such as "workload.rate=3".

    Raises:
        ConfigError: The file or its plan is wrong; the message says what and where.
    """
    tables = read_toml(path)
    for setting in overrides:
        override(tables, setting)
    file = validated(ScenarioFile, tables, path)
    return _Loader(path, file).scenario()


class _Loader:
    def __init__(self, path: Path, file: ScenarioFile) -> None:
        self._directory, self._file = path.parent, file
        self._question: Question = load_question(path.parent / file.plan, file.plan_settings)
        self._notes: list[str] = []

    @property
    def _problem(self) -> Problem:
        return self._question.problem

    def scenario(self) -> Scenario:
        file = self._file
        self._check_clusters()
        workload = self._workload()
        setup = self._setup(self._num_tokens_max(workload))
        trace = isinstance(workload, Trace)
        return Scenario(
            title=file.title,
            setup=setup,
            workload=workload,
            seed=file.seed,
            start_ns=_ns(file.workload.warmup),
            end_ns=None if trace else _ns(file.workload.duration),
            notes=tuple(self._notes),
        )

    def _check_clusters(self) -> None:
        if len(self._problem.prfaas) > 1:
            raise ConfigError(
                f"{self._file.plan}: {len(self._problem.prfaas)} PrfaaS clusters; the simulator "
                "takes at most one"
            )

    def _workload(self) -> Synthetic | Trace:
        table, problem = self._file.workload, self._problem
        if table.arrivals == "trace":
            jitter = f"jitter {table.jitter:g} s" if table.jitter else "no jitter within ticks"
            self._notes.append(f"trace {table.trace}: {jitter}")
            return Trace(
                self._directory / str(table.trace),
                jitter_ns=_ns(table.jitter),
                rate_scale=table.rate_scale,
                num_requests_max=table.requests,
            )
        assert table.rate is not None  # noqa: S101 (the table was checked)
        return Synthetic(
            rate_per_s=table.rate,
            duration_ns=_ns(table.duration),
            lengths=problem.workload.lengths,
            output_tokens=problem.workload.output_tokens,
            arrival_cv=table.cv if table.arrivals != "poisson" else 1.0,
            diurnal_ratio=table.swing if table.arrivals == "diurnal" else 0.0,
            diurnal_period_ns=_ns(table.period),
            fixed_output=table.output == "fixed",
        )

    def _num_tokens_max(self, workload: Synthetic | Trace) -> int:
        if isinstance(workload, Synthetic):
            return round(workload.lengths.high) + 1
        longest = max((r.num_prompt_tokens for r in workload.requests(0)), default=1)
        for profile in self._problem.prefill_profiles:
            if not profile.covers(1, longest):
                self._notes.append(
                    f"profile {profile.name!r} is continued from {profile.lengths[-1]:.0f} to "
                    f"{longest} tokens and below {profile.lengths[0]:.0f} along its end segments"
                )
        return longest + 1

    def _setup(self, num_tokens_max: int) -> Setup:
        file, problem, pd = self._file, self._problem, self._problem.pd
        away = problem.prfaas[0] if problem.prfaas else None
        found = self._operation()
        num_prefill = file.routing.prefill_instances
        num_prefill = found.num_prefill if num_prefill is None else num_prefill
        if num_prefill >= pd.num_instances:
            raise ConfigError(
                f"routing.prefill_instances is {num_prefill} of {pd.num_instances} PD instances; "
                "at least one has to be left to decode"
            )
        batch, _ = pd.decode.largest_batch(problem.workload.mean_context, pd.tpot_max_s)
        capacity = None if pd.kv_capacity_bytes is None else int(pd.kv_capacity_bytes)
        num_prfaas = away.num_instances if away else 0
        self._check_failures(num_prfaas, num_prefill, pd.num_instances - num_prefill)
        return Setup(
            num_prfaas=num_prfaas,
            num_prefill=num_prefill,
            num_decode=pd.num_instances - num_prefill,
            costs=make_costs(
                problem.geometry,
                pd.prefill,
                away.prefill if away else pd.prefill,
                num_tokens_max=num_tokens_max,
                chunk_tokens=self._question.chunk_tokens,
                overlap=file.link.overlap,
            ),
            step_ns=step_time(pd.decode),
            decode=DecodeLimits(max(int(batch), 1), capacity),
            link=self._link(),
            routing=self._routing(found),
            cache=self._cache(),
            signals=self._signals(),
            slo=SloSetup(*(None if s is None else _ns(s) for s in (file.slo.ttft, file.slo.tpot))),
            failures=tuple(f for table in file.failure for f in _failures(table)),
            price_per_h=problem.gpu_price_per_h,
        )

    def _check_failures(self, num_prfaas: int, num_prefill: int, num_decode: int) -> None:
        counts = {
            FailureKind.PRFAAS: num_prfaas,
            FailureKind.PREFILL: num_prefill,
            FailureKind.DECODE: num_decode,
        }
        for table in self._file.failure:
            count = counts.get(table.kind, 1)
            if table.kind is not FailureKind.LINK and table.index >= count:
                raise ConfigError(
                    f"failure of {table.kind} instance {table.index}: there are {count}, counted "
                    "from 0"
                )

    def _operation(self) -> Operation:
        return optimum(self._problem, Mode.EXACT)

    def _routing(self, found: Operation) -> RoutingSetup:
        table = self._file.routing
        planned = round(found.offload_threshold or 0)
        threshold = planned if table.threshold is None else table.threshold
        self._notes.append(
            f"threshold {threshold:,} tokens, "
            + ("the planner's optimum" if table.threshold is None else "as given")
        )
        return RoutingSetup(
            policy=table.policy,
            offload_threshold=threshold,
            moving_threshold=table.moving_threshold,
            admission=table.admission,
        )

    def _link(self) -> LinkSetup:
        table = self._file.link
        planned = self._problem.prfaas[0].link if self._problem.prfaas else None
        if planned is None:
            return LinkSetup(bits_per_s=1.0)
        rtt_ns = _ns(planned.rtt_s if table.rtt is None else table.rtt)
        return LinkSetup(
            bits_per_s=planned.bits_per_s if table.bandwidth is None else table.bandwidth,
            rtt_ns=rtt_ns,
            flow_bits_per_s=loss_limited_bits_per_s(rtt_ns, table.loss, table.connections),
            dead_after_ns=_ns(table.dead_after),
            price_per_tb=planned.price_per_tb,
        )

    def _cache(self) -> CacheSetup:
        table = self._file.cache
        return CacheSetup(
            table.pd_blocks, table.prfaas_blocks, table.block_tokens, table.checkpoint_blocks
        )

    def _signals(self) -> SignalSetup:
        table = self._file.signals
        return SignalSetup(
            _ns(table.interval), _ns(table.delay), _ns(table.stale_after), _ns(table.loop_interval)
        )


def _failures(table: FailureTable) -> list[Failure]:
    return [
        Failure(
            table.kind,
            _ns(table.at + 2 * i * table.duration),
            _ns(table.duration),
            table.index,
            table.capacity,
        )
        for i in range(table.repeat)
    ]

"""The workload of a scenario, at any rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, floor
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from prfaas.errors import ConfigError
from prfaas.planner.answer.plan_file import Delay, Positive, Seconds, Span
from prfaas.planner.problem import Workload as PlannedWorkload
from prfaas.sim.system.request import Request
from prfaas.sim.workloads.requests import RateShape, SineSwing, Synthetic, Trace
from prfaas.sim.workloads.sessions import Sessions
from prfaas.toml_tables import refuse_unused
from prfaas.traces.checks import NUM_PROMPT_TOKENS_MAX, NUM_REQUESTS_MAX
from prfaas.traces.formats.columns import AZURE, LENGTHS, read_rate_curve
from prfaas.traces.formats.detect import CHATS, SESSIONS, detect
from prfaas.traces.reader import read_requests
from prfaas.traces.sessions.session_file import read_sessions
from prfaas.units import ns

_SYNTHETIC = ("poisson", "gamma", "diurnal")
_RECORDED = ("trace", "azure")
_APPLIES: dict[str, tuple[str, ...]] = {
    "rate": (*_SYNTHETIC, "sessions"),
    "users": ("sessions",),
    "duration": (*_SYNTHETIC, "sessions"),
    "cv": ("gamma", "diurnal"),
    "swing": ("diurnal",),
    "curve": ("diurnal",),
    "curve_model": ("diurnal",),
    "period": ("diurnal",),
    "output": _SYNTHETIC,
    "trace": (*_RECORDED, "sessions"),
    "jitter": _RECORDED,
    "rate_scale": _RECORDED,
    "requests": _RECORDED,
    "think_max": ("sessions",),
}
"""Kinds of arrivals that a key is for; all kinds where it is left out."""


class WorkloadTable(BaseModel):
    """`[workload]`: what arrives."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    arrivals: Literal["poisson", "gamma", "diurnal", "trace", "azure", "sessions"] = "poisson"
    """poisson, gamma, diurnal: synthetic.

    trace: recorded requests in any of the formats of workloads.md. azure: the same, only in
    Azure's format. sessions: closed loop, a turn arrives after the previous answer.
    """
    rate: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    """Mean arrival rate, req/s; of sessions their starts, 1/s. Not for a trace."""
    users: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """For sessions, in place of `rate`: number of users, each with one session after another."""
    duration: Span = 3600.0
    """Length of the arrivals; a trace brings its own."""
    warmup: Annotated[Seconds, Field(ge=0, le=1e7)] = 0.0
    """Requests that arrive earlier are not counted."""
    cv: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Variation of the gaps between arrivals, for gamma and diurnal."""
    swing: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Swing of the diurnal rate around its mean, without a curve."""
    curve: str | None = None
    """Measured rates over time in ServeGen's form, for diurnal; only their shape counts."""
    curve_model: str | None = None
    """Model whose rows of the curve are used."""
    period: Span | None = None
    """Period of the diurnal rate; 1 h if absent, with a curve the curve's own."""
    output: Literal["fixed", "geometric"] = "fixed"
    """Distribution of synthetic output lengths; the mean is the plan's."""
    trace: str | None = None
    """File of the trace or of the sessions, relative to the scenario file."""
    jitter: Delay = 0.0
    """Maximum random shift of a trace's arrivals within its tick."""
    rate_scale: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Factor of the arrival rate of a trace."""
    requests: Annotated[int, Field(ge=1)] | None = None
    """Number of requests from the start of a trace."""
    think_max: Delay | None = None
    """Longer pauses between turns are cut to this, for sessions."""
    prompt_scale: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Factor of prompt lengths, and of common prefixes."""
    output_scale: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Factor of output lengths."""
    tenants: dict[str, Positive] = {}
    """Share of each tenant by name; drawn per request, of sessions per session or user."""

    @model_validator(mode="after")
    def _complete(self) -> WorkloadTable:
        kind = f'arrivals = "{self.arrivals}"'
        synthetic = self.arrivals in _SYNTHETIC
        if not synthetic and self.trace is None:
            raise ValueError(f"{kind} needs trace")
        if synthetic and self.rate is None:
            raise ValueError(f"{kind} needs rate")
        if self.arrivals == "sessions" and (self.rate is None) == (self.users is None):
            raise ValueError(f"{kind} needs rate or users, and not both")
        if self.arrivals not in _RECORDED and self.warmup >= self.duration:
            raise ValueError(
                f"warmup is {self.warmup:g} s and duration {self.duration:g} s: nothing would be "
                "counted; the duration has to be longer"
            )
        expected = (self.rate or 0) * self.duration
        if expected > NUM_REQUESTS_MAX:
            raise ValueError(
                f"rate {self.rate:g} req/s for {self.duration:g} s is {expected:,.0f} requests; "
                f"at most {NUM_REQUESTS_MAX:,} are simulated; shorten duration"
            )
        if (self.curve is None) != (self.curve_model is None):
            raise ValueError("curve and curve_model belong together")
        refuse_unused(self, "arrivals", _APPLIES)
        return self


Source = Synthetic | Trace | Sessions
"""Requests, by seed: the same seed gives the same requests."""


@dataclass(frozen=True, slots=True)
class ScaledWorkload:
    """A source, changed."""

    source: Source
    block_tokens: int = 512
    prompt_scale: float = 1.0
    """Prompts become so many times as long; common prefixes do too."""
    output_scale: float = 1.0
    """Factor of output lengths."""
    tenants: Mapping[str, float] = field(default_factory=dict)
    """Share of each tenant, in any unit. Empty keeps those of the source. Requests that follow each
    other have one tenant."""

    def requests(self, seed: int) -> list[Request]:
        """Requests that come by themselves, in order of arrival; others follow them; ConfigError if
        they are too many."""
        roots = self.source.requests(seed)
        if self.prompt_scale != 1 or self.output_scale != 1:
            for request in with_followers(roots):
                self._scale(request)
        if self.tenants:
            self._assign(roots, np.random.default_rng((seed, 1)))
        return roots

    def with_rate_scaled(self, factor: float) -> ScaledWorkload:
        """The same with `factor` times the load."""
        return replace(self, source=self.source.with_rate_scaled(factor))

    @property
    def num_prompt_tokens_max(self) -> int:
        """Longest prompt, tokens."""
        return ceil(self.source.num_prompt_tokens_max * self.prompt_scale)

    def _scale(self, request: Request) -> None:
        prompt = max(round(request.num_prompt_tokens * self.prompt_scale), 1)
        num_blocks = ceil(prompt / self.block_tokens)
        request.num_prompt_tokens = prompt
        request.num_output_tokens = max(round(request.num_output_tokens * self.output_scale), 1)
        request.block_ids = stretched(request.block_ids, self.prompt_scale, num_blocks)

    def _assign(self, roots: list[Request], rng: np.random.Generator) -> None:
        names = sorted(self.tenants)
        shares = np.array([self.tenants[name] for name in names])
        drawn = rng.choice(len(names), size=len(roots), p=shares / shares.sum())
        for root, i in zip(roots, drawn.tolist(), strict=True):
            for request in with_followers([root]):
                request.tenant = names[i]


def with_followers(roots: Iterable[Request]) -> Iterator[Request]:
    """All requests: those that come by themselves, and those that follow."""
    left = list(roots)
    while left:
        request = left.pop()
        yield request
        left.extend(follower.request for follower in request.followers)


def stretched(block_ids: tuple[int, ...], scale: float, num_blocks_max: int) -> tuple[int, ...]:
    """Ids of a prompt that is `scale` times as long.

    Prompts that share a prefix of n blocks share about `n * scale` afterwards. An id names its
    whole prefix, so the last id of merged blocks names the merged block.

    Args:
        block_ids: Ids from the start of the prompt.
        scale: Above 0.
        num_blocks_max: Blocks of the new prompt; the ids end there.
    """
    pieces = ceil(scale) + 1
    last = min(ceil(len(block_ids) * scale), num_blocks_max)
    found = []
    for i in range(last):
        j = min(ceil((i + 1) / scale) - 1, len(block_ids) - 1)
        found.append(block_ids[j] * pieces + i - floor(j * scale))
    return tuple(found)


_SWING_PERIOD_S = 3600.0


def make_workload(
    table: WorkloadTable, directory: Path, planned: PlannedWorkload, block_tokens: int
) -> ScaledWorkload:
    """Return the workload of a table; ConfigError if a file is wrong, or prompts become too long.

    Args:
        directory: Where its paths start.
        planned: Lengths of synthetic requests.
        block_tokens: Tokens of a block of the caches.
    """
    workload = ScaledWorkload(
        _source(table, directory, planned, block_tokens),
        block_tokens,
        table.prompt_scale,
        table.output_scale,
        table.tenants,
    )
    if workload.num_prompt_tokens_max > NUM_PROMPT_TOKENS_MAX:
        raise ConfigError(
            f"workload: prompts of up to {workload.num_prompt_tokens_max:,} tokens, at most "
            f"{NUM_PROMPT_TOKENS_MAX:,} are simulated; lower workload.prompt_scale"
        )
    return workload


def _source(
    table: WorkloadTable, directory: Path, planned: PlannedWorkload, block_tokens: int
) -> Source:
    path = directory / str(table.trace)
    match table.arrivals:
        case "trace" | "azure":
            form = _azure(path) if table.arrivals == "azure" else None
            rows = read_requests(path, form, block_tokens=block_tokens).rows
            return Trace(rows, ns(table.jitter), table.rate_scale, table.requests)
        case "sessions":
            return Sessions(
                read_sessions(path),
                ns(table.duration),
                block_tokens,
                table.rate,
                table.users,
                float("inf") if table.think_max is None else table.think_max,
            )
        case _:
            return _synthetic(table, directory, planned)


def _azure(path: Path) -> str:
    """Return the format to read a file with that should be Azure's; ConfigError if the file holds
    requests in another format."""
    form = detect(path)
    if form in (AZURE.name, SESSIONS, CHATS):
        return form
    if form == LENGTHS.name:
        return AZURE.name  # whose reader names the missing column
    raise ConfigError(
        f'trace {path} is in the format {form}, and arrivals = "azure" reads the format '
        f'{AZURE.name} only; set arrivals = "trace", which reads every format and what prfaas '
        "trace import writes"
    )


def _synthetic(table: WorkloadTable, directory: Path, planned: PlannedWorkload) -> Synthetic:
    assert table.rate is not None  # noqa: S101 (the table was checked)
    return Synthetic(
        rate_per_s=table.rate,
        duration_ns=ns(table.duration),
        lengths=planned.lengths,
        output_tokens=planned.output_tokens,
        arrival_cv=table.cv if table.arrivals != "poisson" else 1.0,
        shape=_shape(table, directory) if table.arrivals == "diurnal" else None,
        fixed_output=table.output == "fixed",
    )


def _shape(table: WorkloadTable, directory: Path) -> RateShape:
    if table.curve is None or table.curve_model is None:
        return SineSwing(table.swing, _SWING_PERIOD_S if table.period is None else table.period)
    return read_rate_curve(directory / table.curve, table.curve_model, table.period)

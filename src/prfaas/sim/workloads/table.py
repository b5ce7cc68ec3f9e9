"""`[workload]` of a scenario file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from prfaas.planner.answer.plan_file import Delay, Positive, Seconds, Span
from prfaas.toml_tables import refuse_unused
from prfaas.traces.limits import NUM_REQUESTS_MAX

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

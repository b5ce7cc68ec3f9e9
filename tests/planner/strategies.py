"""Random questions to the planner."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from prfaas.planner.hardware.profiles import PrefillProfile, fixed_decode
from prfaas.planner.model.kv_geometry import KvGeometry, LayerGroup, LayerKind
from prfaas.planner.problem import PdCluster, PlannedLink, PrfaasCluster, Problem, Workload
from prfaas.planner.workload import (
    EmpiricalLengths,
    LengthDistribution,
    LogNormalLengths,
)
from prfaas.planner.workload import mean_length as mean

KNOTS = (16.0, 1_000.0, 8_000.0, 32_000.0, 128_000.0, 300_000.0)


@st.composite
def lengths(draw: st.DrawFn) -> LengthDistribution:
    if draw(st.booleans()):
        low = draw(st.floats(20, 1_000))
        return LogNormalLengths(
            mu=draw(st.floats(6, 11)),
            sigma=draw(st.floats(0.3, 2)),
            low=low,
            high=draw(st.floats(low + 5_000, 200_000)),
        )
    found = draw(st.lists(st.integers(20, 200_000), min_size=2, max_size=40, unique=True))
    return EmpiricalLengths(tuple(map(float, found)))


@st.composite
def affine_profiles(draw: st.DrawFn) -> PrefillProfile:
    fixed, slope = draw(st.floats(0.01, 1)), draw(st.floats(1e-6, 3e-4))
    return PrefillProfile("affine", "test", KNOTS, tuple(fixed + slope * x for x in KNOTS))


@st.composite
def profiles(draw: st.DrawFn) -> PrefillProfile:
    steps = draw(st.lists(st.floats(0.01, 10), min_size=len(KNOTS), max_size=len(KNOTS)))
    return PrefillProfile("random", "test", KNOTS, tuple(np.cumsum(steps).tolist()))


geometries = st.builds(
    lambda token, state: KvGeometry(
        "random",
        (
            LayerGroup(LayerKind.FULL, 1, token_bytes=token),
            LayerGroup(LayerKind.LINEAR, 1, state_bytes=state),
        ),
    ),
    st.integers(1_000, 500_000),
    st.integers(0, 10**9),
)


@st.composite
def problems(draw: st.DrawFn, curves: st.SearchStrategy[PrefillProfile] | None = None) -> Problem:
    curve = curves if curves is not None else profiles()
    work = draw(lengths())
    return Problem(
        title="random",
        geometry=draw(geometries),
        workload=Workload(work, mean(work), draw(st.floats(10, 5_000))),
        prfaas=tuple(
            PrfaasCluster(
                name=f"remote {i}",
                num_instances=draw(st.integers(1, 8)),
                gpus_per_instance=8,
                prefill=draw(curve),
                link=PlannedLink(draw(st.floats(1e8, 1e12)), price_per_tb=draw(st.floats(0, 2))),
                price_per_gpu_h=draw(st.floats(0.5, 4)),
            )
            for i in range(draw(st.integers(1, 2)))
        ),
        pd=PdCluster(
            name="local",
            num_instances=draw(st.integers(2, 10)),
            gpus_per_instance=8,
            prefill=draw(curve),
            decode=fixed_decode("decode", "test", draw(st.integers(1, 256)), 0.02),
            kv_capacity_bytes=draw(st.none() | st.floats(1e12, 1e14)),
        ),
        step_tokens=2_000,
    )

"""Plan files of five families of models on the same machines, written from their sources.

    python -m benchmarks.fit.families examples/plan/families

32 H200 prefill for 64 H20, with the lengths of the paper's case study. Between families only two
things differ: the bytes of the KV cache and the prefill time of an 8xH200 instance. The H20 takes
as many times as long as in the case study, by length (1.3 times at 1K tokens, 3.0 at 128K), and
decode is the case study's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fit import paper_tables
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.hardware.profiles import PrefillProfile
from prfaas.planner.hardware.roofline import ModelSize, Roofline, prefill_profile
from prfaas.planner.model.catalogue import find_accelerator, find_model
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import KvGeometry, kv_bytes

CASE = Path(__file__).parents[2] / "examples" / "plan" / "paper-case-study.toml"
KNOTS = (1024, 2048, 4096, 8192, 16_000, 32_000, 64_000, 130_000)
TABLE_3 = "T = S_kv / KV throughput of arXiv:2604.15039, table 3 (8xH200, SGLang v0.5.9)"


@dataclass(frozen=True)
class Measured:
    """A point that a roofline was fitted to: efficiency and fixed time."""

    efficiency: float
    overhead_s: float
    source: str


@dataclass(frozen=True)
class Family:
    """A family, by one of its models."""

    name: str
    model: str
    times: str | Measured


FAMILIES = (
    Family(
        "dense GQA",
        "llama_3_3_70b",
        Measured(
            0.26,
            0.0,
            "roofline at 26 % of the fp8 peak: aiconfigurator-core 0.12.0 silicon sample, "
            "Llama-3.1-70B fp8, vLLM, 8xH200: 0.303 s at 8,192 tokens",
        ),
    ),
    Family(
        "MLA",
        "deepseek_v3",
        Measured(
            0.235,
            0.24,
            "roofline at 23.5 % of the fp8 peak and 0.24 s: aiconfigurator-core 0.12.0 silicon "
            "sample, DeepSeek-V3 fp8, SGLang 0.5.9, 8xH200: 0.260 s at 1,024 and 0.447 s at 8,192 "
            "tokens",
        ),
    ),
    Family("sliding window 5:1", "mimo_v2_flash", "MiMo-V2-Flash"),
    Family("hybrid 3:1", "qwen3_5_397b_a17b", "Qwen3.5-397B"),
    Family("hybrid 7:1", "ring_2_5_1t", "Ring-2.5-1T"),
)


def text_of(family: Family) -> str:
    """The plan file of a family."""
    model = find_model(family.model)
    geometry = geometry_from_config(model.config, name=model.name)
    remote, source = _remote(family, geometry)
    pairs = [(tokens, remote.seconds_at(tokens)) for tokens in KNOTS]
    local = [(tokens, seconds * _slower(tokens)) for tokens, seconds in pairs]
    return f"""\
# {family.name}: {model.name} on the machines of the paper's case study. Only the KV cache and the
# prefill times differ between the files of this folder; decode is the case study's for all.
#   prfaas plan examples/plan/families/*.toml --map
# Written by `python -m benchmarks.fit.families examples/plan/families`.

title = "{family.name}: {model.name}"

[model]
catalogue = "{family.model}"

[workload]
distribution = "lognormal"
mu = 9.90
sigma = 1.00
min_tokens = 128
max_tokens = 131072
output_tokens = 1024

[[prfaas]]
name = "H200 cluster"
instances = 4
gpus_per_instance = 8
price_per_gpu_hour = 2.6
[prfaas.link]
bandwidth = "100Gbps"
price_per_tb = 0.5
[prfaas.prefill]
source = "{source}"
lengths = [{_listed(tokens for tokens, _ in pairs)}]
seconds = [{_listed(f"{seconds:.4f}" for _, seconds in pairs)}]
extrapolate = true

[pd]
name = "H20 cluster"
instances = 8
gpus_per_instance = 8
price_per_gpu_hour = 1.3
tpot_max = "25ms"
[pd.prefill]
source = "assumed: the H200's times, as many times as long as in table 6 of arXiv:2604.15039"
lengths = [{_listed(tokens for tokens, _ in local)}]
seconds = [{_listed(f"{seconds:.4f}" for _, seconds in local)}]
extrapolate = true
[pd.decode]
source = "assumed: that of arXiv:2604.15039, table 6, for every family"
batches = [20]
step = [["25ms"]]
"""


def file_of(family: Family) -> str:
    """Name of a family's plan file."""
    return family.name.lower().replace(" ", "-").replace(":", "-") + ".toml"


def _remote(family: Family, geometry: KvGeometry) -> tuple[PrefillProfile, str]:
    if isinstance(family.times, Measured):
        model = find_model(family.model)
        size = ModelSize(model.parameters, model.active_parameters, model.config)
        peaks = Roofline(
            accelerator=find_accelerator("h200"),
            num_gpus=8,
            weights="fp8",
            prefill_efficiency=family.times.efficiency,
            decode_efficiency=0.5,
            overhead_s=family.times.overhead_s,
            source=family.times.source,
        )
        return prefill_profile(family.name, peaks, geometry, size), family.times.source
    rates = zip(paper_tables.LENGTHS, paper_tables.KV_GBPS[family.times], strict=True)
    times = tuple(kv_bytes(geometry, tokens) * 8 / (gbps * 1e9) for tokens, gbps in rates)
    return PrefillProfile(
        family.name, TABLE_3, tuple(map(float, paper_tables.LENGTHS)), times
    ), TABLE_3


def _slower(tokens: int) -> float:
    """Prefill time of an 8xH20 instance as a multiple of an 8xH200 one's, in the case study."""
    problem = load_question(CASE).problem
    return problem.pd.prefill.seconds_at(tokens) / problem.prfaas[0].prefill.seconds_at(tokens)


def _listed(values: object) -> str:
    return ", ".join(map(str, values))  # type: ignore[call-overload]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for each in FAMILIES:
        (folder / file_of(each)).write_text(text_of(each), encoding="utf-8")

"""Loading of a plan file into a question, with settings changed."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from prfaas.core.codec.gain import CodecSpeed, PlannedCoding
from prfaas.core.transfer.link_goodput import BITS_PER_BYTE
from prfaas.core.transfer.tcp_goodput import TcpEnds
from prfaas.errors import ConfigError
from prfaas.limited_files import file_or_shipped, read_json
from prfaas.planner.answer.plan_file import (
    DecodeTable,
    PdTable,
    PlanFile,
    PlanLinkTable,
    PlanModelTable,
    PlanWorkloadTable,
    PrefillTable,
    PrfaasTable,
    ProfileFile,
)
from prfaas.planner.hardware import roofline as rl
from prfaas.planner.hardware.profiles import DecodeProfile, PrefillProfile
from prfaas.planner.hardware.roofline import ModelSize, Roofline
from prfaas.planner.model.catalogue import find_accelerator, find_model
from prfaas.planner.model.hf_config import geometry_from_config, read_quantization_beside
from prfaas.planner.model.kv_geometry import (
    KV_DTYPES,
    KvGeometry,
    LayerGroup,
    LayerKind,
    attention_share,
    canonical_dtype,
)
from prfaas.planner.problem import PdCluster, PlannedLink, PrfaasCluster, Problem, Workload
from prfaas.planner.solve.search import check_threshold
from prfaas.planner.workload import (
    EmpiricalLengths,
    LengthDistribution,
    LogNormalLengths,
    mean_length,
    read_trace,
)
from prfaas.toml_tables import read_toml, refuse_other_kind, validated


def override(tables: dict[str, Any], setting: str) -> None:
    """Apply one "a.b=value" to tables in place; the value is TOML or plain text; ConfigError if the
    setting has no value, or its key leads nowhere."""
    name, separator, text = setting.partition("=")
    steps = name.strip().split(".")
    if not separator or not all(steps):
        raise ConfigError(f'--set {setting!r}: expected key=value, as in "pd.instances=10"')
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    target: Any = tables
    for step in steps[:-1]:
        target = _step_into(target, step, setting)
    if isinstance(target, list):
        raise ConfigError(f"--set {setting!r}: name an item by its index, as in {steps[0]}.0.name")
    target[steps[-1]] = value


def _step_into(target: Any, step: str, setting: str) -> Any:
    if isinstance(target, list):
        if not step.isdecimal() or int(step) >= len(target):
            raise ConfigError(
                f"--set {setting!r}: {step!r} is not an index below {len(target)}; items are "
                "counted from 0"
            )
        return target[int(step)]
    inner = target.setdefault(step, {})
    if not isinstance(inner, dict | list):
        raise ConfigError(f"--set {setting!r}: {step!r} is a value, not a table")
    return inner


@dataclass(frozen=True)
class Question:
    """A problem and what only its report needs."""

    problem: Problem
    arrival_per_s: float | None
    """Load for latency with queueing, or None."""
    chunk_tokens: int

    def prfaas_cluster(self, name: str, plan: Path) -> PrfaasCluster:
        """The PrfaaS cluster that is meant by a name: a single one answers to any; ConfigError if
        there is no cluster, or there are several without that name.

        Args:
            plan: The plan file, for the error.
        """
        known = self.problem.prfaas
        by_name = {cluster.name: cluster for cluster in known}
        if name in by_name:
            return by_name[name]
        if len(known) == 1:
            return known[0]
        raise ConfigError(
            f"{plan}: no PrfaaS cluster is called {name!r} as in the deployment file; there are "
            f"{', '.join(by_name) or 'none'}"
        )


def load_question(path: Path, overrides: Sequence[str] = ()) -> Question:
    """Read a plan file.

    Args:
        path: The file, or the name of a shipped example; paths in it start at its directory.
        overrides: Settings such as "pd.instances=10"; list items by index, "prfaas.0.instances=5".

    Raises:
        ConfigError: The file cannot be read, is no TOML, breaks a rule, or is impossible; the
            message has the place and the reason.
    """
    path = file_or_shipped(path, "plan")
    tables = read_toml(path)
    refuse_other_kind(tables, path, "prfaas plan")
    for setting in overrides:
        override(tables, setting)
    return question_of(validated(PlanFile, tables, path), path.parent)


def question_of(file: PlanFile, directory: Path) -> Question:
    """Return the question that the tables of a plan file ask; ConfigError if the tables ask for the
    impossible.

    Args:
        directory: Start of the relative paths in them.
    """
    return _Loader(directory, file).question()


class _Loader:
    def __init__(self, directory: Path, file: PlanFile) -> None:
        self._directory = directory
        self._file = file
        self._geometry, self._size = self._model(file.model)

    def question(self) -> Question:
        file = self._file
        workload = self._workload(file.workload)
        tokens = mean_length(workload.lengths)
        problem = Problem(
            title=file.title,
            geometry=self._geometry,
            workload=workload,
            prfaas=tuple(self._prfaas(table, tokens) for table in file.prfaas),
            pd=self._pd(file.pd),
            step_tokens=file.search.step,
            threshold=file.search.threshold,
            num_prefill=file.search.num_prefill,
            ttft_p90_s=file.slo.ttft_p90,
            chunk_tokens=file.search.chunk,
        )
        if problem.threshold is not None:
            check_threshold(problem, problem.threshold)
        return Question(problem, file.workload.arrival_rate, file.search.chunk)

    def _model(self, table: PlanModelTable) -> tuple[KvGeometry, ModelSize | None]:
        if table.kv_bytes_per_token is not None:
            return _geometry_by_hand(table), None
        if table.catalogue is not None:
            known = find_model(table.catalogue)
            name, config = known.name, known.config
            total, active = known.parameters, known.active_parameters
        else:
            name, config = str(table.config), self._read_config(str(table.config))
            total, active = 0.0, 0.0
        geometry = geometry_from_config(
            config, name=name, kv_dtype=table.kv_dtype, state_dtype=table.state_dtype
        )
        total = table.parameters or total
        active = table.active_parameters or active or total
        return geometry, ModelSize(total, active, config) if total else None

    def _read_config(self, name: str) -> dict[str, Any]:
        return read_config_json(self._directory / name)

    def _workload(self, table: PlanWorkloadTable) -> Workload:
        if table.distribution == "trace":
            trace = read_trace(self._directory / str(table.trace), table.cache_blocks)
            new, cached = (
                tuple(map(float, trace.new_tokens)),
                tuple(map(float, trace.cached_tokens)),
            )
            lengths: LengthDistribution = EmpiricalLengths(new, cached)
            mean_prompt = trace.mean_prompt_tokens
        else:
            whole = _whole_prompts(table)
            mean_prompt = mean_length(whole)
            hits = table.prefix_hit_ratio
            lengths = whole.with_more_hits(hits) if hits else whole
        return Workload(lengths, mean_prompt, table.output_tokens, table.arrival_cv)

    def _prfaas(self, table: PrfaasTable, num_tokens: float) -> PrfaasCluster:
        return PrfaasCluster(
            name=table.name,
            num_instances=table.instances,
            gpus_per_instance=table.gpus_per_instance,
            prefill=self._prefill(table),
            link=_link(table.link, self._geometry, num_tokens),
            price_per_gpu_h=table.price_per_gpu_hour,
        )

    def _pd(self, table: PdTable) -> PdCluster:
        capacity: float | None = table.kv_capacity
        if capacity is None and table.roofline is not None:
            roofline, size = self._roofline(table)
            capacity = rl.kv_capacity_bytes(roofline, size)
        targets = [t for t in (table.tpot_max, self._file.slo.tpot) if t is not None]
        return PdCluster(
            name=table.name,
            num_instances=table.instances,
            gpus_per_instance=table.gpus_per_instance,
            prefill=self._prefill(table),
            decode=self._decode(table),
            tpot_max_s=min(targets, default=None),
            kv_capacity_bytes=capacity,
            price_per_gpu_h=table.price_per_gpu_hour,
        )

    def _profile(self, table: PrfaasTable | PdTable) -> ProfileFile:
        if table.profile is None:
            return ProfileFile()
        path = self._directory / table.profile
        return validated(ProfileFile, read_toml(path), path)

    def _prefill(self, table: PrfaasTable | PdTable) -> PrefillProfile:
        measured = table.prefill or self._profile(table).prefill
        if measured is not None:
            return prefill_from(measured, table.name)
        roofline, size = self._roofline(table)
        return rl.prefill_profile(table.name, roofline, self._geometry, size)

    def _decode(self, table: PdTable) -> DecodeProfile:
        measured = table.decode or self._profile(table).decode
        if measured is not None:
            return decode_from(measured, table.name)
        roofline, size = self._roofline(table)
        return rl.decode_profile(table.name, roofline, self._geometry, size)

    def _roofline(self, table: PrfaasTable | PdTable) -> tuple[Roofline, ModelSize]:
        peak = table.roofline
        if peak is None:
            raise ConfigError(
                f"{table.name}: no times are given; add a profile with the missing part, or "
                "[roofline]"
            )
        if self._size is None:
            raise ConfigError(
                f"{table.name}: a roofline needs a model from the catalogue or a config.json with "
                "model.parameters; a cache described by hand has no model size"
            )
        roofline = Roofline(
            accelerator=find_accelerator(peak.accelerator),
            num_gpus=table.gpus_per_instance,
            weights=peak.weights,
            prefill_efficiency=peak.prefill_efficiency,
            decode_efficiency=peak.decode_efficiency,
            overhead_s=peak.overhead,
            source=peak.source,
            step_overhead_s=peak.step_overhead,
        )
        rl.require_room(table.name, roofline, self._size)
        return roofline, self._size


def _link(table: PlanLinkTable, geometry: KvGeometry, num_tokens: float) -> PlannedLink:
    codec_bytes_per_s = table.codec_rate / BITS_PER_BYTE
    coding = PlannedCoding(
        mode=table.codec,
        cores=table.codec_cores or table.lanes,
        speed=CodecSpeed(codec_bytes_per_s, codec_bytes_per_s),
        ratio=table.codec_ratio,
        quality=table.quality,
        lanes=table.lanes,
        lane_bytes_per_s=(table.lane_rate or inf) / BITS_PER_BYTE,
        block_tokens=table.block_tokens,
        has_pages=geometry.has_pages,
        attention_share=attention_share(geometry, num_tokens),
        rounding_bytes_per_s=None
        if table.quality_rate is None
        else table.quality_rate / BITS_PER_BYTE,
    )
    ends = TcpEnds(table.pool_nodes or 0, table.connections or 0, table.congestion_control)
    return PlannedLink(table.bandwidth, table.rtt, table.price_per_tb, coding, table.loss, ends)


def prefill_from(table: PrefillTable, name: str) -> PrefillProfile:
    """The profile that a `[prefill]` table describes."""
    return PrefillProfile(
        name,
        table.source,
        tuple(table.lengths),
        tuple(table.seconds),
        table.extrapolate,
        tuple(table.prefixes),
        tuple(table.resume_seconds),
    )


def decode_from(table: DecodeTable, name: str) -> DecodeProfile:
    """The profile that a `[decode]` table describes."""
    steps = tuple(tuple(row) for row in table.step)
    return DecodeProfile(name, table.source, tuple(table.batches), tuple(table.contexts), steps)


def read_config_json(path: Path) -> dict[str, Any]:
    """A `config.json`, with the quantisation that a file beside it describes; ConfigError if a file
    cannot be read or holds no JSON object."""
    config = read_json(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object")
    read_quantization_beside(config, path)
    return config


def _whole_prompts(table: PlanWorkloadTable) -> LengthDistribution:
    if table.distribution == "lengths":
        return EmpiricalLengths(tuple(table.lengths or ()))
    mu, sigma, low, high = table.mu, table.sigma, table.min_tokens, table.max_tokens
    assert mu is not None and sigma is not None and low is not None and high is not None  # noqa: S101, PT018
    return LogNormalLengths(mu, sigma, low, high)


def _geometry_by_hand(table: PlanModelTable) -> KvGeometry:
    by_hand = "all layers, as given in the plan file"
    tokens = table.kv_bytes_per_token or 0
    groups = [LayerGroup(LayerKind.FULL, 1, token_bytes=tokens, detail=by_hand)]
    if table.kv_state:
        groups.append(LayerGroup(LayerKind.LINEAR, 1, state_bytes=table.kv_state, detail=by_hand))
    kv = canonical_dtype("bfloat16" if table.kv_dtype == "auto" else table.kv_dtype)
    state = canonical_dtype("float32" if table.state_dtype == "auto" else table.state_dtype)
    for key, dtype in (("kv_dtype", kv), ("state_dtype", state)):
        if dtype not in KV_DTYPES:
            raise ConfigError(f"model.{key} is {dtype!r}; it is one of {', '.join(KV_DTYPES)}")
    return KvGeometry(table.name or "model", tuple(groups), kv, state)

"""Coding of links in a scenario file: changes to what the plan has."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from prfaas.core.codec.codecs import LinkCodec, Quality
from prfaas.core.codec.gain import BlockCoding, CodecSpeed, PlannedCoding
from prfaas.errors import ConfigError
from prfaas.planner.answer.plan_file import Bandwidth
from prfaas.planner.model.kv_geometry import KvGeometry
from prfaas.units import BITS_PER_BYTE


class CodingTable(BaseModel):
    """Keys of `[link]` about coding and lanes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    codec: LinkCodec | None = None
    """Coding of blocks without loss: raw, auto where it raises the rate of the link, or always; the
    plan's if absent, as the following. raw rounds nothing either."""
    codec_rate: Bandwidth | None = None
    """Blocks that one core codes, and that one decodes."""
    codec_cores: Annotated[float, Field(gt=0, le=4096)] | None = None
    """Cores that code at each end; as many as lanes if only those are given."""
    quality: Quality | None = None
    """Quality class of the blocks of all tenants that qualities does not name."""
    qualities: dict[str, Quality] = {}
    """Quality class by tenant of the workload; a class of service is a tenant here."""
    quality_rate: Bandwidth | None = None
    """Blocks that one core rounds."""
    lanes: Annotated[int, Field(ge=1)] | None = None
    """I/O lanes at each end, of all pool nodes together."""
    lane_rate: Bandwidth | None = None
    """Rate at which one lane sends or receives, encryption included."""

    def coding(self, plan: PlannedCoding, geometry: KvGeometry) -> BlockCoding | None:
        """Return the coding of a simulated link; None if it sends all raw at any rate.

        Raises:
            ConfigError: Blocks would have to be rounded on a link that is raw.
        """
        codec, lane, rounding = (
            rate / BITS_PER_BYTE if rate is not None else None
            for rate in (self.codec_rate, self.lane_rate, self.quality_rate)
        )
        found = replace(
            plan,
            mode=self.codec or plan.mode,
            cores=self.codec_cores or self.lanes or plan.cores,
            speed=plan.speed if codec is None else CodecSpeed(codec, codec),
            quality=self.quality or plan.quality,
            lanes=self.lanes or plan.lanes,
            lane_bytes_per_s=lane or plan.lane_bytes_per_s,
            rounding_bytes_per_s=rounding or plan.rounding_bytes_per_s,
        )
        every = [found.quality, *self.qualities.values()]
        if found.mode is LinkCodec.RAW and any(quality.is_lossy for quality in every):
            raise ConfigError(
                'link.quality: a link with codec = "raw" rounds nothing; set link.codec to "auto"'
            )
        if found.is_raw:
            return None
        return BlockCoding(found, geometry.kv_dtype, geometry.state_dtype, self.qualities)

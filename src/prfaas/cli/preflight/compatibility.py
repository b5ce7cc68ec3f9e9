"""Compatibility of running engines: a row for each pair of a prefill and a decode engine.

Engines that have the same layout and shape share a row. Pool nodes are asked for theirs with the
gateway's identity.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from rich.table import Table
from rich.text import Text

from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.core.kv.blocks import Difference, Facts, HashScheme, differences, in_words
from prfaas.errors import ConfigError, PeerError
from prfaas.wire.channel import Channel
from prfaas.wire.frames import Frame
from prfaas.wire.identity import identity_in, peer_name
from prfaas.wire.messages.base import Goodbye
from prfaas.wire.messages.codec import decode
from prfaas.wire.messages.layouts import LayoutSpec
from prfaas.wire.messages.survey import UNKNOWN, EngineShape, Survey, Surveyed
from prfaas.wire.sockets import happy_eyeballs_s

COLUMNS = ("prefill", "decode", "layout", "dtype", "TP", "block", "hashes", "conversion")
_ADVICE = {
    "blocks": "set PRFAAS_BLOCKS=canonical for engines of several ranks",
    "cache_config.cache_dtype": "give both the same --kv-cache-dtype",
    "cache_config.kv_cache_layout": "give both the same VLLM_KV_CACHE_LAYOUT",
    "tokens_per_hash": "set block_tokens of [model], or give both the same --block-size",
    "block_tokens": "give both the same block_tokens",
    "hash_scheme": "engines that name blocks by different schemes share none",
    "model": "serve the same files at both sites",
    "config": "give both the same model and overrides",
}
"""Next step by fact, or by the part of its name before the first dot."""


@dataclass(frozen=True, slots=True)
class AlikeEngines:
    """Engines of one cluster that have the same layout and shape."""

    names: tuple[str, ...]
    """Of the engines, in the order of the file."""
    layout: LayoutSpec
    """As they announced it."""
    shape: EngineShape
    facts: Facts = field(default_factory=dict)
    """Behind the layout id; empty if their pool node has sent none."""

    @property
    def words(self) -> str:
        """The first name, and how many more there are."""
        more = len(self.names) - 1
        return self.names[0] + (f" and {more} more" if more else "")

    @property
    def dtypes(self) -> str:
        """Types of the numbers in blocks, such as `bfloat16 + float32`."""
        planes = {name for group in self.layout.groups for name, _ in group.planes}
        return " + ".join(sorted(planes)) or self.facts.get("cache_config.cache_dtype", "?")


@dataclass(frozen=True, slots=True)
class EnginePair:
    """A prefill and a decode engine."""

    prefill: AlikeEngines
    """The one that ships blocks."""
    decode: AlikeEngines
    """The one that loads them."""
    is_ticketed: bool = False
    """The prefill side keeps blocks of ticketed requests alone."""

    @property
    def has_no_tickets(self) -> bool:
        """True if blocks would need a ticket, and come from SGLang, which has none."""
        return self.is_ticketed and self.prefill.layout.hash_scheme is HashScheme.SGLANG_PAGES

    @property
    def is_refused(self) -> bool:
        """True if nothing is offloaded between them."""
        return self.has_no_tickets or self.prefill.layout.layout_id != self.decode.layout.layout_id

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of `COLUMNS`."""
        p, d = self.prefill, self.decode
        ids = (p.layout.layout_id.hex()[:12], d.layout.layout_id.hex()[:12])
        return (
            p.words,
            d.words,
            _both(*ids),
            _both(p.dtypes, d.dtypes),
            _both(_number(p.shape.ranks), _number(d.shape.ranks)),
            self._blocks(),
            _both(_hashes(p), _hashes(d)),
            "refused" if self.is_refused else self._conversion(),
        )

    def _blocks(self) -> str:
        p, d = self.prefill, self.decode
        shown = _both(_number(_block(p)), _number(_block(d)))
        shared = p.layout.tokens_per_hash
        if self.is_refused or {_block(p), _block(d)} == {shared}:
            return shown
        return f"{shown}, shared {shared}"

    def _conversion(self) -> str:
        p, d = self.prefill, self.decode
        steps = []
        if p.shape.ranks != d.shape.ranks:
            steps.append(f"heads of {_number(p.shape.ranks)} ranks to {_number(d.shape.ranks)}")
        for each in (p, d):
            size, shared = _block(each), each.layout.tokens_per_hash
            if size != shared:
                steps.append(f"{shared // size} blocks of {size} are one at {each.names[0]}")
        return "; ".join(steps) or "none"

    @property
    def words(self) -> str:
        """The reason of a refusal, and the next step."""
        p, d = self.prefill, self.decode
        if self.has_no_tickets:
            return (
                f"{p.words} to {d.words}: refused, nothing is handed over: pages of SGLang come "
                "without a ticket, and with regions the pool node keeps none of those; remove the "
                "regions, or use engines of vLLM's kind"
            )
        found = differences(d.facts, p.facts) if p.facts and d.facts else []
        advice = next((text for each in found if (text := _advice(each))), "")
        return (
            f"{p.words} to {d.words}: refused, nothing is offloaded (layout_mismatch): "
            f"{in_words(found, d.names[0], p.names[0])}" + (f"; {advice}" if advice else "")
        )


def _advice(found: Difference) -> str:
    return _ADVICE.get(found.fact) or _ADVICE.get(found.fact.partition(".")[0], "")


def _both(prefill: str, decode: str) -> str:
    return prefill if prefill == decode else f"{prefill} > {decode}"


def _number(count: int) -> str:
    return str(count) if count else "?"


def _block(engines: AlikeEngines) -> int:
    return engines.shape.block_tokens or engines.layout.tokens_per_hash


def _hashes(engines: AlikeEngines) -> str:
    return engines.layout.hash_scheme.value


def pairs(deployment: Deployment, found: Mapping[str, Surveyed | str]) -> list[EnginePair]:
    """Return every pair of engines that a request may use, alike ones once.

    Args:
        deployment: The engines, in their order.
        found: Answers of pool nodes, by pool.
    """
    sides = {
        role: list(_engines(deployment, role, found))
        for role in (ClusterRole.PRFAAS, ClusterRole.PD)
    }
    is_ticketed = bool(deployment.residency.all)
    return [
        EnginePair(p, d, is_ticketed)
        for p in sides[ClusterRole.PRFAAS]
        for d in sides[ClusterRole.PD]
    ]


def _engines(
    deployment: Deployment, role: ClusterRole, found: Mapping[str, Surveyed | str]
) -> Iterator[AlikeEngines]:
    for cluster in deployment.with_role(role):
        alike: dict[tuple[bytes, EngineShape], list[str]] = {}
        known: dict[bytes, tuple[LayoutSpec, Facts]] = {}
        for name, engine in cluster.engines.items():
            answer = found.get(engine.pool)
            if isinstance(answer, Surveyed) and name in answer.layouts:
                layout = answer.layouts[name]
                facts = (each.facts for each in answer.facts if each.layout_id == layout.layout_id)
                known[layout.layout_id] = layout, next(facts, {})
                shape = answer.shapes.get(name, UNKNOWN)
                alike.setdefault((layout.layout_id, shape), []).append(name)
        for (layout_id, shape), names in alike.items():
            yield AlikeEngines(tuple(names), known[layout_id][0], shape, known[layout_id][1])


def absent(deployment: Deployment, found: Mapping[str, Surveyed | str]) -> Iterator[str]:
    """Yield a line for each pool node without an answer, of those that are started here, and for
    engines that are not there."""
    for pool, answer in found.items():
        if isinstance(answer, str):
            if deployment.pools[pool].address is not None:
                continue  # `pool_problems` has it.
            yield f"engines of pool node {pool} are not known: {answer}"
            continue
        engines = [
            name
            for cluster in deployment.clusters.values()
            for name, engine in cluster.engines.items()
            if engine.pool == pool and name not in answer.layouts
        ]
        if engines:
            yield f"not connected to pool node {pool}: {', '.join(engines[:8])}" + (
                f" and {len(engines) - 8} more" if len(engines) > 8 else ""
            )


def table_of(found: Sequence[EnginePair]) -> Table:
    """The table for people."""
    table = Table(*COLUMNS, box=None)
    for pair in found:
        table.add_row(*(Text(cell) for cell in pair.row))
    return table


def surveyed(
    deployment: Deployment, pools: Mapping[str, tuple[str, int]]
) -> dict[str, Surveyed | str]:
    """Ask the pool nodes of a deployment for their engines.

    Args:
        deployment: Has the gateway's identity.

    Returns:
        The answers by pool; empty if the identity is not on this machine. Where no pool node
        answers, those without an `address` are left out: nothing runs yet.
    """
    try:
        identity = identity_in(deployment.security.identities, deployment.gateway.name)
        tls = identity.client_context()
    except ConfigError:
        return {}
    found = asyncio.run(survey(pools, tls))
    if any(isinstance(each, Surveyed) for each in found.values()):
        return found
    return {name: each for name, each in found.items() if deployment.pools[name].address}


ANSWER_S = 5.0
"""Limit for connection, handshake and answer of one pool node."""


async def survey(
    pools: Mapping[str, tuple[str, int]], tls: ssl.SSLContext, answer_s: float = ANSWER_S
) -> dict[str, Surveyed | str]:
    """Ask pool nodes for their engines, all at once; returns by pool, its answer or the reason that
    there is none.

    Args:
        tls: Context of a gateway that these pool nodes accept, for dialling.
        answer_s: Limit for each, seconds.
    """
    found = await asyncio.gather(
        *(_ask(name, address, tls, answer_s) for name, address in pools.items())
    )
    return dict(zip(pools, found, strict=True))


async def _ask(
    pool: str, address: tuple[str, int], tls: ssl.SSLContext, answer_s: float
) -> Surveyed | str:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Surveyed | str] = loop.create_future()

    def settle(value: Surveyed | str) -> None:
        if not answer.done():
            answer.set_result(value)

    channel = Channel(
        partial(_received, settle),
        lambda _, reason: settle(f"{reason}; a pool node of an older prfaas does not answer"),
        partial(_opened, pool),
    )
    try:
        async with asyncio.timeout(answer_s):
            await loop.create_connection(
                lambda: channel,
                *address,
                ssl=tls,
                happy_eyeballs_delay=await happy_eyeballs_s(*address),
            )
            return await answer
    except TimeoutError:
        return f"no answer within {answer_s:g} s"
    except OSError as error:
        return str(error)
    finally:
        channel.close("prfaas check has its answer")


def _opened(pool: str, channel: Channel) -> None:
    channel.peer = peer_name(channel.ssl_object, frozenset({pool}))
    channel.send(Survey())


def _received(settle: Callable[[Surveyed | str], None], _: Channel, frame: Frame) -> None:
    match decode(frame.payload):
        case Surveyed() as message:
            settle(message)
        case Goodbye() as message:
            raise PeerError(message.reason)
        case _:
            return

"""Several instances in one process, on one event loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prfaas.config.deployment import TIMING_MARK
from prfaas.core.kv.blocks import HashScheme
from prfaas.engines.timing.api.server import Server
from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.engines.timing.instance import TimedInstance
from prfaas.engines.timing.kv_events import Events, ZmqEvents
from prfaas.engines.timing.page_tier import PageTier
from prfaas.engines.timing.profile import load_profile
from prfaas.engines.timing.tier import TimingTier
from prfaas.errors import ConfigError

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings that all instances of a process share."""

    model: str
    """Name of the served model; has to show that it is a timing engine's."""
    model_path: str
    """Checkpoint directory, for its tokenizer."""
    plan: Path
    """Plan file with the profiles."""
    cluster: str | None
    """PrfaaS cluster of the plan; None for the PD cluster."""
    engines: Mapping[str, Address]
    """Place where each instance listens, by name. Those of one address (not of port 0) are the
    data-parallel ranks of an engine, in this order."""
    kv_events: Mapping[str, tuple[str, str | None]]
    """Place where each sends KV events, and replays them, by name."""
    pool: Path | None
    """Unix socket of the pool node; None without."""
    host_memory: int
    """Bytes that each shares with the pool node."""
    time_scale: float
    """Seconds of the wall clock for a second of the profile."""
    bytes_scale: float
    """Size of blocks, as a share of the real one."""
    block_tokens: int
    cache_tokens: int
    """Size of each prefix cache, tokens."""
    max_model_len: int
    """Longest sequence, tokens."""
    stream_interval: int
    """Tokens per chunk of a stream, after the first."""
    hash_scheme: HashScheme = HashScheme.SHA256_CBOR
    """Names of blocks, and with it the kind of engine: vLLM or SGLang."""


class InstanceHost:
    """Runs instances.

    Raises:
        ConfigError: The model's name does not contain "timing", or plan or tokenizer are missing.
    """

    def __init__(self, settings: HostSettings) -> None:
        if TIMING_MARK not in settings.model.lower():
            raise ConfigError(
                f"the model is called {settings.model!r}: a timing engine computes nothing, and "
                f"the name of its model has to show it; put {TIMING_MARK!r} into it"
            )
        self._settings = settings
        self._profile = load_profile(
            settings.plan,
            settings.cluster,
            settings.model,
            block_tokens=settings.block_tokens,
            bytes_scale=settings.bytes_scale,
            hash_scheme=settings.hash_scheme,
        )
        self._vocabulary = Vocabulary(settings.model_path)
        self.servers: dict[str, Server] = {}

    async def start(self) -> dict[str, str]:
        """Start all instances; ConfigError if an address is taken; returns base URL of each."""
        urls: dict[str, str] = {}
        firsts: dict[Address, str] = {}
        for name, address in self._settings.engines.items():
            self.servers[name] = server = self._server(name)
            first = firsts.setdefault(address, name) if address[1] else name
            if first == name:
                urls[name] = await server.start(*address)
            else:
                self.servers[first].add_rank(server)
                urls[name] = urls[first]
        return urls

    async def close(self) -> None:
        """Stop all."""
        for server in self.servers.values():
            await server.close()

    def _server(self, name: str) -> Server:
        settings, profile = self._settings, self._profile
        where = settings.kv_events.get(name)
        events = ZmqEvents(*where) if where else Events()
        kind = TimingTier if profile.layout.takes_orders else PageTier
        tier = (
            kind(name, profile.layout, settings.pool, settings.host_memory, profile.facts)
            if settings.pool is not None
            else None
        )
        instance = TimedInstance(
            name, profile, tier, events, settings.cache_tokens, settings.time_scale
        )
        return Server(
            instance,
            self._vocabulary,
            settings.model,
            settings.max_model_len,
            settings.stream_interval,
        )

"""Names of the blocks of recent prompts, for orders on the blocks of one request.

Only names are kept: salted hashes, of which nobody learns a prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prfaas.core.codec.codecs import Quality
from prfaas.core.kv.hashes import joined
from prfaas.core.kv.shipping import MANIFEST_BYTES_MAX
from prfaas.errors import RequestError

REQUESTS_MAX = 10_000
REQUEST_BYTES = 512
"""Bytes of a request beside its names, about."""
PREFIX_CHARS_MIN = 8
SHOWN_MAX = 8
"""Requests that an error names."""


class Recent(NamedTuple):
    """Names of the blocks of a recent prompt."""

    request: str
    tenant: str
    hashes: bytes
    """Of its blocks, one behind the other."""
    quality: Quality
    """Class of its blocks."""


class RecentNames:
    """Block hashes of the last requests.

    Beyond the limits the oldest are forgotten: those of a tenant with more than an equal part of
    the memory if it has a new one, or else of the tenant with the most. So no tenant has those of
    others forgotten.

    Args:
        bytes_max: Limit of all; 0 keeps none.
    """

    def __init__(self, bytes_max: int, requests_max: int = REQUESTS_MAX) -> None:
        self._bytes_max, self._requests_max = bytes_max, requests_max
        self._names: dict[str, OrderedDict[str, tuple[bytes, Quality]]] = {}
        """By tenant and request: clients choose ids, and may choose those of others."""
        self._shares: dict[str, float] = {}
        """Part of the limits that each tenant takes."""
        self.num_bytes = self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def keep(
        self,
        request_id: str,
        tenant: str,
        hashes: Sequence[bytes],
        quality: Quality = Quality.LOSSLESS,
    ) -> None:
        """Keep the names of a prompt.

        Args:
            request_id: An id that its tenant repeats stands for its last request.
            hashes: Of its blocks; with none, as of several prompts in one request, nothing is kept.
            quality: Class of the blocks.
        """
        names = joined(hashes) if self._bytes_max else b""
        cost = REQUEST_BYTES + len(names)
        if not names or len(names) > MANIFEST_BYTES_MAX or cost > self._bytes_max:
            return
        self._forget(tenant, request_id)
        self._names.setdefault(tenant, OrderedDict())[request_id] = names, quality
        self._count(tenant, 1, cost)
        while self.num_bytes > self._bytes_max or self._num_requests > self._requests_max:
            victim = tenant
            if self._shares[tenant] <= 1 / len(self._shares):
                victim = max(self._shares, key=self._shares.__getitem__)
            self._forget(victim, next(iter(self._names[victim])))

    def find(self, request_id: str) -> Recent:
        """Return the names of a request; RequestError if it is not known any more, or several begin
        so.

        Args:
            request_id: Its id, or at least PREFIX_CHARS_MIN of its first characters; after the name
                of its tenant and a slash, only that tenant's requests are meant.
        """
        if not self._bytes_max:
            raise RequestError(
                "this gateway keeps no names of blocks: set gateway.request_names (a purge can "
                "take the whole tenant)",
                status=404,
            )
        tenant, _, name = request_id.partition("/")
        found = self._matching([tenant] if tenant in self._names else [], name)
        found = found or self._matching(self._names, request_id)
        if len(found) != 1:
            some = ", ".join(f"{tenant}/{request}" for tenant, request in found[:SHOWN_MAX])
            why = f"several have this id, give one of {some}" if found else "no such request"
            raise RequestError(
                f"{request_id[:80]!r}: {why} among the {len(self)} whose names of blocks "
                "this gateway keeps (gateway.request_names); it may be of another gateway, have "
                "had no whole block, or be forgotten (a purge can take the whole tenant)",
                status=404,
            )
        [(tenant, request)] = found
        return Recent(request, tenant, *self._names[tenant][request])

    def _matching(self, tenants: Iterable[str], name: str) -> list[tuple[str, str]]:
        """Tenant and id of the requests with an id, or else of those that begin so."""
        tenants = list(tenants)
        exact = [(tenant, name) for tenant in tenants if name in self._names[tenant]]
        if exact or len(name) < PREFIX_CHARS_MIN:
            return exact
        return [
            (tenant, request)
            for tenant in tenants
            for request in self._names[tenant]
            if request.startswith(name)
        ]

    def _forget(self, tenant: str, request_id: str) -> None:
        requests = self._names.get(tenant)
        kept = None if requests is None else requests.pop(request_id, None)
        if kept is not None:
            self._count(tenant, -1, -REQUEST_BYTES - len(kept[0]))

    def _count(self, tenant: str, num_requests: int, num_bytes: int) -> None:
        self._num_requests += num_requests
        self.num_bytes += num_bytes
        share = num_requests / self._requests_max + num_bytes / self._bytes_max
        if self._names[tenant]:
            self._shares[tenant] = self._shares.get(tenant, 0.0) + share
        else:
            del self._names[tenant], self._shares[tenant]

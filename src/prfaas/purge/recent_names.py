"""Names of the blocks of recent prompts, for orders on the blocks of one request.

Only names are kept: salted hashes, of which nobody learns a prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from prfaas.core.codec.quality import Quality
from prfaas.errors import RequestError
from prfaas.purge.targets import HASHES_BYTES_MAX, Target

REQUESTS_MAX = 10_000
REQUEST_BYTES = 512
"""Bytes of a request beside its names, about."""
PREFIX_CHARS_MIN = 8


class Recent(NamedTuple):
    """Names of the blocks of a recent prompt.

    Attributes:
        request: Id of its request.
        tenant: Name of its tenant.
        hashes: Of its blocks, one behind the other.
        quality: Class of its blocks.
    """

    request: str
    tenant: str
    hashes: bytes
    quality: Quality


class RecentNames:
    """Block hashes of the last requests; the oldest are forgotten first.

    Args:
        bytes_max: Limit of all; 0 keeps none.
        requests_max: Limit of requests.
    """

    def __init__(self, bytes_max: int, requests_max: int = REQUESTS_MAX) -> None:
        self._bytes_max, self._requests_max = bytes_max, requests_max
        self._names: OrderedDict[tuple[str, str], tuple[bytes, Quality]] = OrderedDict()
        """By request and tenant: clients choose ids, and may choose those of others."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._names)

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
            tenant: Name of its tenant.
            hashes: Of its blocks; with none, as of several prompts in one request, nothing is kept.
            quality: Class of the blocks.
        """
        names = b"".join(hashes) if self._bytes_max else b""
        cost = REQUEST_BYTES + len(names)
        if not names or len(names) > HASHES_BYTES_MAX or cost > self._bytes_max:
            return
        self._forget((request_id, tenant))
        self._names[request_id, tenant] = names, quality
        self.num_bytes += cost
        while self.num_bytes > self._bytes_max or len(self._names) > self._requests_max:
            self._forget(next(iter(self._names)))

    def target(self, request_id: str, tag_of: Callable[[str], str]) -> Target:
        """Return the target of an order on the blocks of a request; see `find`."""
        found = self.find(request_id)
        tag = tag_of(found.tenant)
        return Target(tenant=found.tenant, tag=tag, request=found.request, hashes=found.hashes)

    def find(self, request_id: str) -> Recent:
        """Return the names of a request.

        Args:
            request_id: Its id, or at least PREFIX_CHARS_MIN of its first characters.

        Raises:
            RequestError: It is not known any more, or several begin so.
        """
        if not self._bytes_max:
            raise RequestError(
                "this gateway keeps no names of blocks: set gateway.request_names (a purge can "
                "take the whole tenant)",
                status=404,
            )
        found = [each for each in self._names if each[0] == request_id]
        if not found and len(request_id) >= PREFIX_CHARS_MIN:
            found = [each for each in self._names if each[0].startswith(request_id)]
        if len(found) != 1:
            why = "several requests have this id" if found else "no such request"
            raise RequestError(
                f"{request_id[:80]!r}: {why} among the {len(self._names)} whose names of blocks "
                "this gateway keeps (gateway.request_names); it may be of another gateway, have "
                "had no whole block, or be forgotten (a purge can take the whole tenant)",
                status=404,
            )
        [(request, tenant)] = found
        return Recent(request, tenant, *self._names[request, tenant])

    def _forget(self, key: tuple[str, str]) -> None:
        kept = self._names.pop(key, None)
        if kept is not None:
            self.num_bytes -= REQUEST_BYTES + len(kept[0])

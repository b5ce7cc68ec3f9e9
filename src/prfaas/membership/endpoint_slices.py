"""Members in Kubernetes EndpointSlices (discovery.k8s.io/v1): a translation without I/O.

A Service with the label `prfaas/kind` describes engines or pool nodes of a cluster; Kubernetes
copies its labels to its EndpointSlices:

| label | value |
|---|---|
| `prfaas/kind` | `engine` or `pool` |
| `prfaas/cluster` | name of the cluster in the deployment file |
| `prfaas/name` | name of the only member; if absent, each pod's name |
| `prfaas/pool` | pool node of engines; if absent, the one on the same node |
| `prfaas/role`, `prfaas/model` | role and model of engines |

The port `http` or `https` is an engine's, `link` a pool node's, `kv-events` and `kv-replay` those
of the KV events.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from prfaas.config.addresses import join_address
from prfaas.config.names import PART_NAME, PATTERNS
from prfaas.core.membership.members import Listed, Member, MemberKind, RefusalCause, RefusedEntry

ENDPOINTS_MAX = 8192
_OfPod = tuple[Listed, str]
"""A member, and what identifies its pod; "" if that is unknown."""


class _Named(msgspec.Struct):
    name: str | None = None
    uid: str | None = None


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)
    targetRef: _Named | None = None  # noqa: N815 (Kubernetes' name)
    nodeName: str | None = None  # noqa: N815 (Kubernetes' name)


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Metadata(msgspec.Struct):
    name: str = ""
    resourceVersion: str = ""  # noqa: N815 (Kubernetes' name)
    labels: dict[str, str] = {}


class EndpointSlice(msgspec.Struct):
    """An EndpointSlice, as far as it matters here."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


def read_slice(value: Any) -> EndpointSlice:
    """An EndpointSlice of the API.

    Raises:
        msgspec.ValidationError: It is none.
    """
    return msgspec.convert(value, EndpointSlice)


def members_in(slices: Iterable[EndpointSlice]) -> tuple[list[Listed], list[RefusedEntry]]:
    """Members of all slices, and the endpoints that cannot be one."""
    return SliceMembers().read({str(number): each for number, each in enumerate(slices)})


class SliceMembers:
    """Members of slices that change one by one; only changed slices are read."""

    def __init__(self) -> None:
        self._pools: dict[str | None, str] = {}
        """Pool nodes by the name of their node."""
        self._read: dict[str, tuple[EndpointSlice, list[_OfPod], list[RefusedEntry]]] = {}

    def read(self, slices: Mapping[str, EndpointSlice]) -> tuple[list[Listed], list[RefusedEntry]]:
        """Members of all slices, and the endpoints that cannot be one.

        Args:
            slices: By name; a changed one is another object.
        """
        known = self._read
        changed = {
            name: found
            for name, found in slices.items()
            if name not in known or known[name][0] is not found
        }
        gone = [known.pop(name)[0] for name in known.keys() - slices.keys()]
        before = [known[name][0] for name in changed.keys() & known.keys()]
        if any(map(_has_pools, (*changed.values(), *before, *gone))):
            self._pools = {
                endpoint.nodeName: name
                for found in slices.values()
                if _has_pools(found)
                for endpoint, name in _endpoints(found)
                if endpoint.nodeName
            }
            changed = dict(slices)
        for name, found in changed.items():
            known[name] = found, *self._members(found)
        by_name: dict[str, dict[str, _OfPod]] = {}
        refused: list[RefusedEntry] = []
        for name in slices:
            _, members, refusals = known[name]
            for each in members:
                # While slices are rewritten, an endpoint may be in two of them.
                member = each[0].member
                by_name.setdefault(member.name, {})[member.address] = each
            if refusals:
                refused += refusals
        listed = [each for found in by_name.values() for each in _present(list(found.values()))]
        if (count := len(listed) + len(refused)) > ENDPOINTS_MAX:
            words = f"there are {count} endpoints, limit {ENDPOINTS_MAX}"
            refused = [
                *refused[:ENDPOINTS_MAX],
                RefusedEntry("endpoints", RefusalCause.TOO_MANY, words),
            ]
        return listed[:ENDPOINTS_MAX], refused

    def _members(self, found: EndpointSlice) -> tuple[list[_OfPod], list[RefusedEntry]]:
        listed, refused = [], []
        for endpoint, name in _endpoints(found):
            target = endpoint.targetRef or _Named()
            pod = target.uid or target.name or ""
            try:
                listed.append((_listed(found, endpoint, name, self._pools), pod))
            except ValueError as error:
                refused.append(RefusedEntry(name[:63], RefusalCause.INVALID, str(error)))
        return listed, refused


def _present(found: list[_OfPod]) -> list[Listed]:
    """Members of one name: those that another one of them does not replace.

    The endpoint of a pod that ends, or whose node is dead, stays for a while beside that of its
    successor. A pod of a Service with both families of addresses has an endpoint in each.
    """
    if len(found) == 1:
        return [found[0][0]]
    best = max(_rank(each) for each, _ in found)
    present = [(each, pod, _is_ipv6(each)) for each, pod in found if _rank(each) == best]
    on_ipv4 = {pod for _, pod, is_ipv6 in present if pod and not is_ipv6}
    return [each for each, pod, is_ipv6 in present if not (is_ipv6 and pod in on_ipv4)]


def _is_ipv6(each: Listed) -> bool:
    return "[" in each.member.address


def _rank(each: Listed) -> int:
    """Return how much there is to be had of a member: it is ready, or will be, or ends."""
    return 0 if each.is_ending else 1 + each.is_ready


def _has_pools(found: EndpointSlice) -> bool:
    return found.metadata.labels.get("prfaas/kind") == MemberKind.POOL


def _endpoints(found: EndpointSlice) -> Iterator[tuple[_Endpoint, str]]:
    for endpoint in found.endpoints or ():
        pod = endpoint.targetRef.name if endpoint.targetRef else None
        name = found.metadata.labels.get("prfaas/name") or pod or found.metadata.name
        yield endpoint, name


def _listed(
    found: EndpointSlice, endpoint: _Endpoint, name: str, pools: Mapping[str | None, str]
) -> Listed:
    """The member of an endpoint; ValueError if it is none."""
    labels = found.metadata.labels
    if re.match(PART_NAME, name) is None:
        raise ValueError(f"{name[:80]!r} cannot be the name of a part, {PATTERNS[PART_NAME]}")
    if not endpoint.addresses:
        raise ValueError("its endpoint has no address")
    kind, host = labels.get("prfaas/kind", ""), endpoint.addresses[0]
    ports = {port.name: port.port for port in found.ports or () if port.port}
    conditions = endpoint.conditions
    # Kubernetes: an absent `ready` means true, an absent `serving` means as `ready`.
    is_ready = conditions.ready is not False
    is_ending = bool(conditions.terminating)
    cluster = labels.get("prfaas/cluster", "")
    if kind == MemberKind.POOL:
        place = _place(host, ports, "link")
        member = Member(name, MemberKind.POOL, cluster, place)
    elif kind == MemberKind.ENGINE:
        scheme = "https" if "https" in ports else "http"
        events = {"kv_events": "kv-events", "kv_events_replay": "kv-replay"}
        settings = tuple(
            (key, f"tcp://{_place(host, ports, port)}")
            for key, port in events.items()
            if port in ports
        )
        member = Member(
            name,
            MemberKind.ENGINE,
            cluster,
            f"{scheme}://{_place(host, ports, scheme)}",
            labels.get("prfaas/pool") or pools.get(endpoint.nodeName, ""),
            labels.get("prfaas/role", "both"),
            labels.get("prfaas/model", ""),
            settings,
        )
    else:
        raise ValueError(f"label prfaas/kind is {kind!r}, not one of engine, pool")
    return Listed(member, is_ready=is_ready and not is_ending, is_ending=is_ending)


def _place(host: str, ports: Mapping[str | None, int | None], name: str) -> str:
    port = ports.get(name)
    if port is None:
        raise ValueError(f"its Service has no port {name!r}")
    return join_address((host, port))

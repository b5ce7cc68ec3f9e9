"""Open requests: what each has booked, from its route to its end.

    Routed ─► prefill queue, link, memory in pool ─► prefilled, landed ─► decode ─► end
                 │                                                           ▲
                 └── fell back, or lost its pulled prefix: booked anew ──────┘

Whatever a request has booked is given back once, however it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import nsmallest

from prfaas.core.admission.deadline_admission import AdmissionControl
from prfaas.core.dispatch.instance_load import InstanceLoad, WorkAhead
from prfaas.core.dispatch.links import Link
from prfaas.core.dispatch.route_finder import RouteFinder, RouteOption
from prfaas.core.dispatch.stages import DecodeFlow
from prfaas.core.dispatch.types import Arrival, ClusterMember, LocalCluster, Routed
from prfaas.core.invariants import hold
from prfaas.core.resilience.budgets import SpareTime
from prfaas.core.routing.calibration import Expected
from prfaas.core.routing.decision import Decision, Path
from prfaas.core.routing.predictions import NO_WAIT, DecodeWait
from prfaas.records import MutableRecord
from prfaas.units import NS_PER_S

_LOCAL, _REMOTE = Path.LOCAL, Path.REMOTE

RELAYS_MAX = 16
"""Answers that an instance goes on with at a time: each takes a place in its batch."""
LOOKUPS_MAX = 16
"""Waiting requests of an instance that are looked up again after one report."""
NEVER_STALE_NS = 2**62
ROOM_KNOWN_NS = 60 * NS_PER_S
"""Time after the last queued request for which the free capacity of decode counts as known."""


class _Open(MutableRecord):
    """A request under way."""

    routed: Routed
    promised: list[tuple[Link, int]]
    """Links that blocks in transit take, and the bytes that each was promised."""
    arrived_at_ns: int
    prefilling: bool = True
    decode: str | None = None
    expected: Expected | None = None
    """Its prediction, until decode can begin or until it leaves the predicted path."""
    streams: bool = False
    """Its first token has come."""
    has_left: bool = False
    """It takes another route than the one that was predicted when it was admitted."""
    looked_up_at_ns: int = 0
    """Time of the last lookup of its cached prefix."""


class InstanceBooks:
    """Bookings of requests with the instances: prefills, and time beside decode."""

    def __init__(self, local: LocalCluster, routes: RouteFinder) -> None:
        names = [member.name for member in local.decode or ()]
        self._stage_of, self._decode = routes.stage_of, routes.decode_book
        self._lanes = InstanceLoad(names, NEVER_STALE_NS)
        """Prefill work of decode instances, sent by this gateway; engines do not report it."""
        self.book_of = {
            **{name: stage.book for name, stage in self._stage_of.items()},
            **dict.fromkeys(names, self._lanes),
        }
        """The prefill queues by name of an instance; to be read only."""
        self.spare = SpareTime(names)
        """Time that decode instances have for prefills."""
        self.num_streaming = dict.fromkeys(self._stage_of, 0)
        """Requests whose tokens an instance that prefills as well is streaming."""
        self.relays: dict[int, str] = {}
        """Answers that an instance which prefilled goes on with, until their blocks have come."""

    def add(self, member: ClusterMember, decode: str = "") -> None:
        """Book requests with a new instance too, and with `decode`, its name as one that decodes,
        where instances have roles."""
        self.book_of[member.name] = self._stage_of[member.name].book
        self.num_streaming[member.name] = 0
        if self._decode is not None and decode:
            self._decode.add(ClusterMember(decode, member.pool))
            self._lanes.add(decode)
            self.spare.add(decode)
            self.book_of[decode] = self._lanes

    def remove(self, name: str, decode: str, now_ns: int) -> None:
        """Forget an instance that no open request uses."""
        del self.book_of[name], self.num_streaming[name]
        if self._decode is not None and decode in self.book_of:
            self._decode.remove(decode)
            self._lanes.remove(decode, now_ns)
            self.spare.remove(decode)
            del self.book_of[decode]

    def set_ready(self, name: str, *, ready: bool, now_ns: int) -> None:
        """An instance became healthy, with an empty queue, or stopped being so."""
        stage = self._stage_of.get(name)
        if stage is not None:
            stage.book.set_ready(name, ready=ready, now_ns=now_ns)
        elif self._decode is not None:
            self._decode.set_ready(name, ready=ready)
            self._lanes.set_ready(name, ready=ready, now_ns=now_ns)

    def begin_relay(self, request_id: int, name: str, now_ns: int) -> bool:
        """An instance goes on with an answer after its prompt; returns False, and nothing changes,
        if it has prompts that this would delay, or enough answers."""
        book = self.book_of[name]
        is_idle = not book.num_jobs(name) and not book.wait_ns(name, now_ns)
        if is_idle and list(self.relays.values()).count(name) < RELAYS_MAX:
            self.relays[request_id] = name
        return request_id in self.relays

    def wait_ns(self, name: str, now_ns: int) -> int | None:
        """Predicted wait of a prefill that is sent to an instance now; None is unknown."""
        book = self.book_of.get(name)
        return 0 if book is None else book.wait_ns(name, now_ns)


class OpenRequests:
    """Books of the requests that were admitted and have not ended.

    Methods that name a request which is not open change nothing.

    Args:
        local: Name of the PD cluster.
        routes: Instances, links and expected times, which requests are booked with.
        admission: Learns from first tokens how late predictions are.
    """

    def __init__(
        self, local: LocalCluster, routes: RouteFinder, admission: AdmissionControl
    ) -> None:
        self._local = local.name
        self._routes, self._times, self._admission = routes, routes.times, admission
        self._stage_of, self._rooms = routes.stage_of, routes.rooms
        self._entries: dict[int, _Open] = {}
        self.instances = InstanceBooks(local, routes)
        """Bookings of requests with instances."""
        self.decode_book, self._book_of = routes.decode_book, self.instances.book_of
        self._decode_flow = DecodeFlow(ROOM_KNOWN_NS)

    def uses(self, *names: str) -> bool:
        """Return True if an open request was routed to an instance or a pool of these names."""
        wanted = set(names)
        return any(
            not wanted.isdisjoint(
                (routed.prefill, routed.source, *routed.pull_link, routed.destination)
            )
            or (entry.decode or routed.decode) in wanted
            for entry in self._entries.values()
            for routed in (entry.routed,)
        )

    # Queries

    def __len__(self) -> int:
        return len(self._entries)

    def route_of(self, request_id: int) -> Routed | None:
        """Route of a request."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.routed

    def prefills(self, request_id: int) -> str | None:
        """The prefill instance of a request; None after its end."""
        entry = self._entries.get(request_id)
        return entry.routed.prefill if entry is not None and entry.prefilling else None

    def is_prefilling(self, request_id: int, now_ns: int, *, streams: bool) -> bool:
        """Return True if a prompt is still before an engine or in it, as far as is known.

        Args:
            streams: Its first token will be seen; else its prefill is taken to end as predicted.
        """
        ahead = self.prefill_ahead(request_id, now_ns)
        return ahead is not None and (streams or ahead.work_ns > ahead.spent_ns)

    def decoder_of(self, request_id: int) -> str | None:
        """The decode instance of a request; None without one."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.decode or entry.routed.decode

    def decoded_by(self, name: str) -> list[int]:
        """Requests that an instance was chosen to decode."""
        return [number for number in self._entries if self.decoder_of(number) == name]

    def prefill_ahead(self, request_id: int, now_ns: int) -> WorkAhead | None:
        """Work at its instance up to the end of a request's prefill; None if it has ended."""
        entry = self._entries.get(request_id)
        if entry is None or not entry.prefilling:
            return None
        name = entry.routed.prefill
        return self._book_of[name].ahead(name, request_id, now_ns)

    def crossing(self, source: str, destination: str) -> list[int]:
        """Requests whose blocks are in transit over the link between two pools."""
        link = self._routes.links.between(source, destination)
        return [
            request_id
            for request_id, entry in self._entries.items()
            if any(promised is link for promised, _ in entry.promised)
        ]

    def num_shipping(self) -> int:
        """Requests that may wait for blocks in transit: no first token of theirs was seen."""
        return sum(entry.routed.ships and not entry.streams for entry in self._entries.values())

    def decode_wait(self, now_ns: int) -> DecodeWait:
        """Additional time of decode, if instances only decode."""
        return NO_WAIT if self.decode_book is None else self._decode_flow.wait(now_ns)

    # The life of a request

    def enter(
        self, arrival: Arrival, decision: Decision, option: RouteOption, now_ns: int, *, again: bool
    ) -> Routed:
        """Book what was decided for a request.

        Args:
            decision: Where it is prefilled.
            option: The route that it takes.
            again: It was admitted before: nothing is learnt from its prediction.
        """
        routed = option.routed(decision, self._local, is_mixed=self.decode_book is None)
        predicted_ns = decision.predicted_ns
        name, work_ns = routed.prefill, self._times.work_ns(routed)
        self._book_of[name].dispatch(name, arrival.request_id, now_ns, work_ns)
        promised = _promises(self._routes, routed, arrival)
        for link, num_bytes in promised:
            link.book.promise(num_bytes, now_ns)
        entry = _Open(routed, promised, now_ns, has_left=again)
        self._entries[arrival.request_id] = entry
        if arrival.streams and self.decode_book is not None:
            self._decode_flow.expect(arrival.request_id)
        if promised:
            # Of a pull for a prefill that hands over to another host, only the latter counts.
            length, pool = arrival.shippable_tokens or 0, routed.destination
            held = routed.present_tokens
            if routed.pulls and not routed.changes_host:
                length, pool = routed.hit_tokens, routed.prefill_pool
                held = routed.prefill_pool_tokens
            self._rooms.take(arrival.request_id, pool, arrival.layout, held, length)
        if not again and not self._times.has_plan:
            self._times.sent(arrival.request_id, routed, self._book_of[name], now_ns)
        elif predicted_ns is not None and not again and not routed.pulled_from:
            calibration = self._times.calibration(decision.path, routed.cluster)
            predicted_ns -= option.prediction.decode_ns(decision.path)
            entry.expected = calibration.expect(predicted_ns, now_ns)
        if routed.decode is not None:
            self._routes.local.enter(routed.decode)
        return routed

    def choose_decode(self, request_id: int, avoid: str = "") -> str | None:
        """The instance that decodes a request, chosen when first asked for; returns none when none
        is ready, or the request is not open.

        Args:
            avoid: Instance that was tried already.
        """
        entry = self._entries.get(request_id)
        if entry is None or self.decode_book is None:
            return entry.routed.decode if entry else None
        if entry.decode is None:
            entry.decode = self.decode_book.choose(avoid, entry.routed.destination)
        return entry.decode

    def due(self, name: str, num_waiting: int) -> Sequence[int]:
        """Return requests that wait at an instance and should be looked up again (`look_up`).

        Those whose last lookup is the oldest come first, at most `LOOKUPS_MAX`.

        Args:
            num_waiting: Requests that its last report found waiting.
        """
        waiting = self._stage_of[name].book.waiting(name, num_waiting)
        if len(waiting) <= LOOKUPS_MAX:
            return waiting
        return nsmallest(LOOKUPS_MAX, waiting, key=lambda n: self._entries[n].looked_up_at_ns)

    def look_up(self, request_id: int, hits: Mapping[str, int], now_ns: int) -> None:
        """Book the prefill that an engine would compute for a waiting request now.

        Engines look up cached prefixes when prefill starts. Until then others may have computed
        the prefix of a request, or it was evicted.

        Args:
            request_id: A request whose prefill has not begun, or begins now.
            hits: As in `Arrival`.
        """
        entry = self._entries.get(request_id)
        if entry is None or not entry.prefilling:
            return
        entry.looked_up_at_ns = now_ns
        routed = entry.routed
        stage = self._stage_of.get(routed.prefill)
        if stage is None:
            # One that decodes prefills it, and has all that there is.
            return
        hit = max(hits.get(stage.instances[routed.prefill].pool, 0), hits.get(routed.prefill, 0))
        if routed.pulled_from:
            hit = max(hit, routed.hit_tokens)
        new, times = routed.facts.num_prompt_tokens - hit, self._times
        is_local = stage is self._routes.local
        work_ns = (
            times.local_ns(new, hit) if is_local else times.remote_ns(routed.cluster, new, hit)
        )
        if stage.book.rework(routed.prefill, request_id, now_ns, work_ns):
            entry.expected = None

    def prefilled(self, request_id: int, now_ns: int) -> int | None:
        """The instance that prefills a request has answered: the rate of its cluster is learnt.

        Returns:
            The request whose prefill begins now, to be looked up once more (`look_up`); None
            without one.
        """
        if self._times.observes:
            self._times.answered(request_id, now_ns)
        entry = self._entries.get(request_id)
        if entry is None or not entry.prefilling:
            return None
        return self._end_prefill(request_id, entry, now_ns)

    def begin_relay(self, request_id: int, now_ns: int) -> bool:
        """The instance that prefilled a request goes on with its answer; False if it is busy."""
        entry = self._entries.get(request_id)
        if entry is None or entry.prefilling:
            return False
        return self.instances.begin_relay(request_id, entry.routed.prefill, now_ns)

    def begun(self, request_id: int, now_ns: int, *, is_streamed: bool) -> int | None:
        """The instance that decodes has begun to answer, with a first token if it streams; returns
        as `prefilled`."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        following = self._end_prefill(request_id, entry, now_ns) if entry.prefilling else None
        self._rooms.give_back(request_id)
        if is_streamed:
            if self.decode_book is None:
                self.prompt_ready(request_id, now_ns)
            self._first_token(request_id, entry, now_ns)
        return following

    def _end_prefill(self, request_id: int, entry: _Open, now_ns: int) -> int | None:
        entry.prefilling = False
        name = entry.routed.prefill
        if entry.routed.decision.path is _LOCAL:
            self._decode_flow.landed(request_id, now_ns)
        return self._book_of[name].done(name, request_id, now_ns)

    def prompt_ready(self, request_id: int, at_ns: int) -> None:
        """Decode of a request could begin at `at_ns`: later predictions are corrected by that.

        Nothing is learned from one that left the path that was predicted.
        """
        entry = self._entries.get(request_id)
        if entry is not None and entry.expected is not None:
            path, cluster = entry.routed.decision.path, entry.routed.cluster
            self._times.calibration(path, cluster).observe(entry.expected, at_ns)
            entry.expected = None
        if self._times.observes:
            self._times.came(request_id, at_ns)

    def _first_token(self, request_id: int, entry: _Open, now_ns: int) -> None:
        """A request streams its first token: decode has taken it."""
        self._decode_flow.begun(request_id, now_ns)
        num_streaming = self.instances.num_streaming
        if not entry.streams and entry.routed.decode in num_streaming:
            entry.streams = True
            num_streaming[entry.routed.decode] += 1
        if not entry.has_left:
            self._admission.seen(entry.routed.decision, now_ns - entry.arrived_at_ns)

    def transfer_over(
        self,
        request_id: int,
        now_ns: int,
        num_bytes: int = 0,
        ends: tuple[str, str] | None = None,
    ) -> None:
        """The blocks of a request have landed, or were aborted.

        Args:
            num_bytes: That all of these blocks took; 0 if they did not land, or nobody counted.
            ends: The link that they took; None is all links.
        """
        entry = self._entries.get(request_id)
        if entry is None or not entry.promised:
            return
        routed, promised, entry.promised = entry.routed, entry.promised, []
        is_remote = routed.decision.path is _REMOTE
        across = (routed.source, routed.destination) if is_remote else routed.pull_link
        crosses = ends is None or ends == across
        if num_bytes and crosses:
            self._routes.observe_bytes(routed, num_bytes, now_ns)
        for link, promised_bytes in promised:
            if ends is None or (link.source, link.destination) == ends:
                link.book.settle(promised_bytes)
            else:
                entry.promised.append((link, promised_bytes))
        if is_remote and crosses:
            self._decode_flow.landed(request_id, now_ns)

    def fall_back(self, request_id: int, now_ns: int) -> None:
        """The prefill of a request was aborted: the instance that decodes prefills as well. It is
        chosen now, if it was not before.

        Where all PD instances do both, nothing changes for a request on the local path.
        """
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.expected, entry.has_left = None, True
            self._decode_flow.end(request_id, now_ns)
            self.instances.relays.pop(request_id, None)
        self._times.drop(request_id)
        if entry is None or (self.decode_book is None and not entry.routed.source):
            return
        self.transfer_over(request_id, now_ns)
        self._rooms.give_back(request_id)
        self._withdraw(request_id, entry, now_ns)
        name, routed = self.choose_decode(request_id), entry.routed
        if name is None:
            return
        present = routed.present_tokens
        work_ns = self._times.local_ns(routed.facts.num_prompt_tokens - present, present)
        self._book_of[name].dispatch(name, request_id, now_ns, work_ns)
        if routed.prefill != name:
            # A prompt that waited for its turn was charged before.
            self.instances.spare.take(name, work_ns, now_ns)
        entry.routed = routed._replace(
            cluster=self._local,
            prefill=name,
            source="",
            prefill_pool=routed.destination,
            pulled_from="",
        )
        entry.prefilling = True

    def lose_pull(self, request_id: int, now_ns: int) -> None:
        """The prefix that a prefill pulls will not come whole: its instance computes it."""
        entry = self._entries.get(request_id)
        if entry is None or not entry.routed.pulled_from:
            return
        entry.has_left = True
        self._times.drop(request_id)
        self.transfer_over(request_id, now_ns, ends=entry.routed.pull_link)
        routed = entry.routed
        entry.routed = routed._replace(
            source=routed.source if routed.decision.path is _REMOTE else "",
            hit_tokens=routed.own_tokens,
            pulled_from="",
        )
        if not routed.ships:
            self._rooms.give_back(request_id)
        if entry.prefilling:
            self._withdraw(request_id, entry, now_ns)
            name, work_ns = routed.prefill, self._times.work_ns(entry.routed)
            self._book_of[name].dispatch(name, request_id, now_ns, work_ns)
            entry.prefilling = True

    def end(self, request_id: int, now_ns: int) -> None:
        """A request is over, one way or the other."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        if entry.promised:
            self.transfer_over(request_id, now_ns)
        self._rooms.give_back(request_id)
        self.instances.relays.pop(request_id, None)
        del self._entries[request_id]
        self._decode_flow.end(request_id, now_ns)
        if self._times.observes:
            self._times.drop(request_id)
        if entry.streams and entry.routed.decode is not None:
            self.instances.num_streaming[entry.routed.decode] -= 1
        if entry.prefilling:
            self._withdraw(request_id, entry, now_ns)
        if self.decode_book is None:
            self._routes.local.leave(entry.routed.decode or entry.routed.prefill)
        elif entry.decode is not None:
            self.decode_book.leave(entry.decode)

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        promised, streaming, decoding = Counter[Link](), Counter[str](), Counter[str]()
        booked = Counter[str]()
        for entry in self._entries.values():
            for link, num_bytes in entry.promised:
                promised[link] += num_bytes
            if entry.prefilling:
                booked[entry.routed.prefill] += 1
            if entry.streams:
                streaming[entry.routed.decode or ""] += 1
            decoding[(self.decode_book and entry.decode) or entry.routed.decode or ""] += 1
        count = self.decode_book.num_on if self.decode_book else self._routes.local.num_open.get
        hold(
            links_have_the_promises_of_requests=all(  # and copies of hot prefixes
                link.book.promised_bytes >= promised[link] for link in self._routes.links
            ),
            streams_are_those_of_requests=streaming == Counter(self.instances.num_streaming),
            relays_are_those_of_requests=self.instances.relays.keys() <= self._entries.keys(),
            decoding_requests_are_counted=all(
                count(name) == num for name, num in decoding.items() if name
            ),
            jobs_are_prefills_of_requests=all(
                book.num_jobs(name) <= booked[name] for name, book in self._book_of.items()
            ),
        )
        self._decode_flow.validate()

    def _withdraw(self, request_id: int, entry: _Open, now_ns: int) -> None:
        """End the wait for the prefill."""
        if entry.prefilling:
            entry.prefilling = False
            name = entry.routed.prefill
            self._book_of[name].drop(name, request_id, now_ns)


def _promises(routes: RouteFinder, routed: Routed, arrival: Arrival) -> list[tuple[Link, int]]:
    """Links that carry blocks of a route, and how many bytes of it."""
    found, links = [], routes.links
    is_remote = routed.decision.path is _REMOTE
    if is_remote:
        found.append((links.between(routed.source, routed.destination), routed.shipped_bytes))
    if routed.pulled_from:
        num_bytes = routed.shipped_bytes
        if routed.pulls_from_host:
            have, length = routed.prefill_pool_tokens, routed.hit_tokens
            num_bytes = routes.hosts_of(routed).num_bytes(arrival, have, length)
        found.append((links.between(*routed.pull_link), num_bytes))
    if not is_remote and routed.ships:
        final = arrival.shippable_tokens or 0
        num_bytes = routes.hosts.num_bytes(arrival, routed.present_tokens, final)
        found.append((links.between(routed.prefill_pool, routed.destination), num_bytes))
    return found

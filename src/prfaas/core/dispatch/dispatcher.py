"""The decision driver: events in, decisions out. The gateway and the simulator both run it.

    ready, layouts, links, reports ──┐
    arrival ─► pick instances ─► predict ─► policy ─► admission ─► Routed or Refused
                                     ▲                                  │
                     landed, given up, ended ◄──────────────────────────┘

It knows what a gateway knows: prompts, cache hits, reports with their age, and what it has sent
itself. Time comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from prfaas.core.admission.deadline_admission import AdmissionControl
from prfaas.core.dispatch.decode_load import DecodeBook
from prfaas.core.dispatch.decode_wait import DecodeFlow
from prfaas.core.dispatch.instance_load import LoadBook
from prfaas.core.dispatch.link_load import LinkReport
from prfaas.core.dispatch.links import Links
from prfaas.core.dispatch.route_options import Seen, Way, Ways
from prfaas.core.dispatch.types import (
    Arrival,
    DispatchSettings,
    Foreseen,
    HomeCluster,
    Refusal,
    Refused,
    RemoteCluster,
    Routed,
    ThresholdMoved,
)
from prfaas.core.routing.calibration import Calibration, Expected
from prfaas.core.routing.decision import Decision, Path, Reason
from prfaas.core.routing.first_tokens import FirstTokens
from prfaas.core.routing.observed_rates import NOMINAL_NS_PER_TOKEN, Paces
from prfaas.core.routing.policies import PolicyName
from prfaas.core.routing.predictions import DecodeWait, no_wait
from prfaas.units import NS_PER_S

RETRY_UNSERVED_S = 1
LOOKUPS_MAX = 16
"""Waiting requests of an instance that are looked up again after one report."""
ROOM_KNOWN_NS = 60 * NS_PER_S
"""So long after the last request that queued for decode, its room is taken for known."""


@dataclass(slots=True)
class _Open:
    """A request under way."""

    routed: Routed
    in_transfer: bool
    arrived_at_ns: int
    prefilling: bool = True
    decode: str | None = None
    expected: Expected | None = None
    """Its prediction, until decode can begin or until it leaves the predicted path."""
    streams: bool = False
    """Its first token has come."""
    looked_up_at_ns: int = 0
    """When its cached prefix was looked up again last."""


class Dispatcher:
    """Decides for every request, and keeps the books that decisions are made from.

    Args:
        home: The PD cluster.
        remotes: PrfaaS clusters.
        settings: How requests are routed.
    """

    def __init__(
        self, home: HomeCluster, remotes: Sequence[RemoteCluster], settings: DispatchSettings
    ) -> None:
        if settings.policy is PolicyName.OBSERVED:
            home = replace(home, costs=None)
            remotes = [replace(remote, costs=None) for remote in remotes]
        self._home, self._settings = home, settings
        self._admission = AdmissionControl(settings.ttft_max_ns, settings.fairness)
        self._ways = Ways(home, remotes, settings)
        self._stage_of = {
            name: stage
            for stage in (self._ways.home, *self._ways.away.values())
            for name in stage.instances
        }
        self._book_of = {name: stage.book for name, stage in self._stage_of.items()}
        decode = None if home.decode is None else [member.name for member in home.decode]
        self._decode_book = None if decode is None else DecodeBook(decode)
        self._decode_flow = DecodeFlow(ROOM_KNOWN_NS)
        self._open: dict[int, _Open] = {}
        self._paces = Paces() if home.costs is None else None
        self._first_tokens: FirstTokens | None = None
        if settings.policy is PolicyName.OBSERVED:
            self._first_tokens = FirstTokens(home.name)
        self._num_streaming = dict.fromkeys(self._stage_of, 0)
        self.spared_ns = 0
        """Prefill that was sent away although the threshold keeps it at home, ns of an instance."""

    # What there is

    def set_ready(self, name: str, *, ready: bool, now_ns: int) -> None:
        """An instance became healthy, with an empty queue, or stopped being so."""
        stage = self._stage_of.get(name)
        if stage is not None:
            stage.book.set_ready(name, ready=ready, now_ns=now_ns)
        elif self._decode_book is not None:
            self._decode_book.set_ready(name, ready=ready)

    def describe(self, name: str, *, num_tokens_max: int, layout_id: bytes | None) -> None:
        """An instance that prefills says what it takes; a layout of None is not known."""
        instance = self._stage_of[name].instances[name]
        instance.num_tokens_max, instance.layout_id = num_tokens_max, layout_id

    def set_link(self, source: str, destination: str, *, up: bool) -> list[int]:
        """The link between two pools came up or broke; it is down at first.

        Returns:
            When it broke: the requests whose blocks are on their way over it.
        """
        self.links.between(source, destination).up = up
        if up:
            return []
        pools = (source, destination)
        return [
            request_id
            for request_id, entry in self._open.items()
            if entry.in_transfer and (entry.routed.source, entry.routed.destination) == pools
        ]

    def set_room(self, pool: str, num_bytes: int) -> None:
        """A pool of the PD cluster has so much memory for blocks; 0 is not known."""
        self._ways.rooms.set_capacity(pool, num_bytes)

    # Reports

    def report_load(self, name: str, observed_at_ns: int, num_waiting: int) -> None:
        """So many requests waited for prefill at an instance at `observed_at_ns`."""
        self._book_of[name].report(name, observed_at_ns, num_waiting)

    def report_loads(self, observed_at_ns: int, num_waiting: Iterable[tuple[str, int]]) -> None:
        """The same of several instances that were looked at together."""
        books = self._book_of
        for name, waiting in num_waiting:
            books[name].report(name, observed_at_ns, waiting)

    def report_link(self, source: str, destination: str, report: LinkReport) -> None:
        """A pool node saw what a link carries."""
        self.links.between(source, destination).book.report(report)

    def tick(self, now_ns: int) -> list[ThresholdMoved]:
        """One interval of the short-term loop has passed."""
        if not self._settings.moving_threshold:
            self._ways.learn(now_ns)
            return []
        local_ns = self._ways.home.least_wait_ns(now_ns)
        moves = []
        for stage in self._ways.away.values():
            remote_ns = stage.least_wait_ns(now_ns)
            links = [link for link in self.links if link.source in stage.pools]
            moves += [link.move(local_ns, remote_ns, now_ns) for link in links]
        return [moved for moved in moves if moved is not None]

    def replan(self, offload_threshold: int) -> None:
        """The long-term loop found a better threshold, tokens, above 0; it is that of all links."""
        for link in self.links:
            link.replan(offload_threshold)

    # Requests

    def arrive(self, arrival: Arrival, now_ns: int, *, again: bool = False) -> Routed | Refused:
        """Decide for a request, and book what was decided.

        Args:
            arrival: The request. If it is open already, what was booked for it is given up.
            now_ns: Time.
            again: It was let in before; admission is not asked.
        """
        if arrival.request_id in self._open:
            self.end(arrival.request_id, now_ns)
        way = self._ways.best(arrival, now_ns, self._decode_wait(now_ns))
        decision = self._decide(way, now_ns)
        if way.home is None and (decision.path is Path.LOCAL or self._decode_book is None):
            return Refused(Refusal.NO_INSTANCE, RETRY_UNSERVED_S, decision)
        calibration = self._ways.calibration(way, decision.path)
        if self._settings.admission and not again:
            proven_ns = decision.predicted_ns if calibration.is_proven(now_ns) else None
            work_ns = self._local_work_ns(decision.num_new_tokens)
            admission = self._admission.decide(
                arrival.tenant, decision.path, proven_ns, work_ns, now_ns
            )
            if not admission.admitted:
                return Refused(Refusal.PREDICTED_LATE, admission.retry_after_s, decision)
        if not again:
            self._ways.note(way)
        way = self._ways.apart(way, arrival, decision.path, now_ns)
        if decision.path is Path.REMOTE:
            routed = self._send_away(arrival, decision, way, now_ns)
            if decision.reason is Reason.FASTER_REMOTE:
                self.spared_ns += self._local_work_ns(decision.num_new_tokens)
        else:
            routed = self._keep(arrival, decision, way, now_ns)
        entry = self._enter(arrival, routed, now_ns)
        is_planned = self._paces is None
        if is_planned and decision.predicted_ns is not None and not again and not routed.pulls:
            predicted_ns = decision.predicted_ns - way.prediction.decode_ns(decision.path)
            entry.expected = calibration.expect(predicted_ns, now_ns)
        return routed

    def foresee(self, arrival: Arrival, now_ns: int) -> Foreseen:
        """What would be decided for a request; admission is not asked, and nothing is booked."""
        way = self._ways.best(arrival, now_ns, self._decode_wait(now_ns))
        decision = self._decide(way, now_ns)
        way = self._ways.apart(way, arrival, decision.path, now_ns)
        is_remote = decision.path is Path.REMOTE
        taker = way.away if is_remote else way.home
        source = way.link.source if is_remote or decision.pull_tokens else ""
        return Foreseen(decision, taker and taker.name, source, way.link.destination)

    def _decide(self, way: Way, now_ns: int) -> Decision:
        """The policy's decision; what was observed may keep a prompt at home."""
        decision = way.link.policy.decide(way.facts, way.prediction)
        first_tokens, home, away = self._first_tokens, way.home, way.away
        if first_tokens is None or home is None or away is None:
            return decision
        if decision.path is Path.LOCAL:
            return decision
        own_ns = self._local_work_ns(decision.num_new_tokens)
        away_ns = self._remote_work_ns(
            way.cluster.name, way.facts.num_prompt_tokens - way.facts.prfaas_hit_tokens
        )
        compared = first_tokens.sooner_at_home(
            way.cluster.name,
            local_ns=own_ns + self._book_of[home.name].pending_ns(home.name),
            remote_ns=away_ns + self._book_of[away.name].pending_ns(away.name),
            own_ns=own_ns,
            num_decoding=self._num_streaming[home.name],
            now_ns=now_ns,
        )
        if compared is None:
            return decision
        return decision._replace(
            path=Path.LOCAL,
            reason=Reason.FASTER_LOCAL,
            predicted_local_ns=compared.local_ns,
            predicted_remote_ns=compared.remote_ns,
            unpredicted=None,
        )

    def choose_decode(self, request_id: int, avoid: str = "") -> str | None:
        """The instance that decodes an open request, chosen when first asked for.

        Args:
            request_id: The request.
            avoid: Instance that was tried already.

        Returns:
            None when none is ready, or the request is not open.
        """
        entry = self._open.get(request_id)
        if entry is None or self._decode_book is None:
            return entry.routed.decode if entry else None
        if entry.decode is None:
            entry.decode = self._decode_book.choose(avoid)
        return entry.decode

    def prefilled(self, request_id: int, now_ns: int) -> int | None:
        """Record the end of a prefill.

        Returns:
            The request whose prefill begins now, to be looked up once more (`look_up`); None
            without one.
        """
        entry = self._open.get(request_id)
        if entry is None or not entry.prefilling:
            return None
        entry.prefilling = False
        name = entry.routed.prefill
        if entry.routed.decision.path is Path.LOCAL:
            self._decode_flow.landed(request_id, now_ns)
        return self._book_of[name].done(name, request_id, now_ns)

    def due(self, name: str, num_waiting: int) -> Sequence[int]:
        """Return requests that wait at an instance and should be looked up again (`look_up`).

        Those whose last lookup is the oldest come first, at most `LOOKUPS_MAX`.

        Args:
            name: The instance.
            num_waiting: Requests that its last report found waiting.
        """
        waiting = self._book_of[name].waiting(name, num_waiting)
        if len(waiting) <= LOOKUPS_MAX:
            return waiting
        return nsmallest(LOOKUPS_MAX, waiting, key=lambda n: self._open[n].looked_up_at_ns)

    def look_up(self, request_id: int, hits: Mapping[str, int], now_ns: int) -> None:
        """Book the prefill that an engine would compute for a waiting request now.

        Engines look up cached prefixes when prefill starts. Until then others may have computed
        the prefix of a request, or it was evicted.

        Args:
            request_id: A request whose prefill has not begun, or begins now.
            hits: As in `Arrival`.
            now_ns: Time.
        """
        entry = self._open.get(request_id)
        if entry is None or not entry.prefilling:
            return
        entry.looked_up_at_ns = now_ns
        routed = entry.routed
        stage = self._stage_of[routed.prefill]
        hit = max(hits.get(stage.instances[routed.prefill].pool, 0), hits.get(routed.prefill, 0))
        if routed.pulls:
            hit = max(hit, routed.hit_tokens)
        new = routed.num_prompt_tokens - hit
        is_local = stage is self._ways.home
        work_ns = (
            self._local_work_ns(new) if is_local else self._remote_work_ns(routed.cluster, new)
        )
        if stage.book.rework(routed.prefill, request_id, now_ns, work_ns):
            entry.expected = None

    def loaded(self, request_id: int) -> None:
        """The blocks of a request are where it is decoded: its pool may drop them."""
        self._ways.rooms.give_back(request_id)

    def prompt_ready(self, request_id: int, at_ns: int) -> None:
        """Decode of a request could begin at `at_ns`: later predictions are corrected by that.

        Nothing is learned from one that left the path that was predicted.
        """
        entry = self._open.get(request_id)
        if entry is not None and entry.expected is not None:
            path, cluster = entry.routed.decision.path, entry.routed.cluster
            self.calibrations[path, cluster].observe(entry.expected, at_ns)
            entry.expected = None
        if self._first_tokens is not None:
            self._first_tokens.came(request_id, at_ns)
        self.prefill_answered(request_id, at_ns)

    def prefill_answered(self, request_id: int, now_ns: int) -> None:
        """The instance that prefills a request has answered: the rate of its cluster is learnt."""
        if self._paces is not None:
            self._paces.answered(request_id, now_ns)

    def fall_back(self, request_id: int, now_ns: int) -> None:
        """The prefill of a request was given up: the instance that decodes prefills as well.

        Where all PD instances do both, nothing changes for a request on the local path.
        """
        entry = self._open.get(request_id)
        if entry is not None:
            entry.expected = None
            self._decode_flow.end(request_id, now_ns)
        self._drop_paces(request_id)
        if entry is None or (self._decode_book is None and not entry.routed.source):
            return
        self.transfer_over(request_id, now_ns)
        self.loaded(request_id)
        self._withdraw(request_id, entry, now_ns)
        if self._decode_book is not None:
            return
        name, routed = entry.routed.decode, entry.routed
        assert name is not None  # noqa: S101 (such instances are chosen on arrival)
        new = routed.num_prompt_tokens - routed.present_tokens
        self._ways.home.book.dispatch(name, request_id, now_ns, self._local_work_ns(new))
        entry.routed = routed._replace(cluster=self._home.name, prefill=name, source="")
        entry.prefilling = True

    def lose_pull(self, request_id: int, now_ns: int) -> None:
        """The prefix that a prefill at home pulls will not come whole: its instance computes it."""
        entry = self._open.get(request_id)
        if entry is None or not entry.routed.pulls:
            return
        self._drop_paces(request_id)
        self.transfer_over(request_id, now_ns)
        self.loaded(request_id)
        routed = entry.routed = entry.routed._replace(source="")
        if entry.prefilling:
            self._withdraw(request_id, entry, now_ns)
            work_ns = self._local_work_ns(routed.num_prompt_tokens - routed.home_tokens)
            self._ways.home.book.dispatch(routed.prefill, request_id, now_ns, work_ns)
            entry.prefilling = True

    def first_token(self, request_id: int, now_ns: int) -> None:
        """A request streams its first token: decode has taken it."""
        entry = self._open.get(request_id)
        if entry is None:
            return
        self._decode_flow.begun(request_id, now_ns)
        if not entry.streams and entry.routed.decode in self._num_streaming:
            entry.streams = True
            self._num_streaming[entry.routed.decode] += 1
        self._admission.seen(entry.routed.decision, now_ns - entry.arrived_at_ns)

    def transfer_over(self, request_id: int, now_ns: int) -> None:
        """The blocks of a request have landed, or were given up."""
        entry = self._open.get(request_id)
        if entry is not None and entry.in_transfer:
            entry.in_transfer = False
            routed = entry.routed
            link = self.links.between(routed.source, routed.destination)
            link.book.settle(routed.shipped_bytes)
            if routed.decision.path is Path.REMOTE:
                self._decode_flow.landed(request_id, now_ns)

    def end(self, request_id: int, now_ns: int) -> None:
        """A request is over, one way or the other; one that is not open changes nothing."""
        entry = self._open.get(request_id)
        if entry is None:
            return
        if entry.in_transfer:
            self.transfer_over(request_id, now_ns)
        self.loaded(request_id)
        del self._open[request_id]
        self._decode_flow.end(request_id, now_ns)
        self._drop_paces(request_id)
        if entry.streams and entry.routed.decode is not None:
            self._num_streaming[entry.routed.decode] -= 1
        if entry.prefilling:
            self._withdraw(request_id, entry, now_ns)
        if self._decode_book is None:
            self._ways.home.leave(entry.routed.decode or entry.routed.prefill)
        elif entry.decode is not None:
            self._decode_book.leave(entry.decode)

    # What is expected

    def expected_prefill_ns(self, request_id: int) -> int | None:
        """Expected time from sending a prefill to its answer, ns, by a plan or by what was observed
        of its cluster; None while neither says."""
        entry = self._open.get(request_id)
        if entry is None:
            return None
        if self._paces is not None:
            return self._paces.expected_ns(request_id)
        return entry.routed.decision.predicted_ns

    def expected_local_ns(self, name: str, num_new_tokens: int, now_ns: int) -> int | None:
        """Expected time of a prefill that is sent to a PD instance now, ns; None is unknown."""
        book = self._book_of.get(name)
        wait_ns = book.wait_ns(name, now_ns) if book is not None else 0
        if wait_ns is None:
            return None
        work_ns = wait_ns + self._local_work_ns(num_new_tokens)
        if self._paces is not None:
            return self._paces.estimated_ns(self._home.name, work_ns)
        return work_ns

    def local_path_ns(
        self, request_id: int, name: str, held_tokens: int, now_ns: int
    ) -> int | None:
        """Predicted time to first token of a request that takes the local path now, ns.

        Args:
            request_id: The request; None is returned if it is not open, or without a cost model.
            name: PD instance that would prefill.
            held_tokens: Prefix that is there by now.
            now_ns: Time.
        """
        entry = self._open.get(request_id)
        if entry is None or self._home.costs is None:
            return None
        book, routed = self._book_of.get(name), entry.routed
        wait_ns = book.wait_ns(name, now_ns) if book is not None else 0
        if wait_ns is None:
            return None
        if routed.pulls:
            # Its prefill is in that queue already.
            num_new_tokens = routed.num_prompt_tokens - routed.hit_tokens
            wait_ns = max(0, wait_ns - self._local_work_ns(num_new_tokens))
        return wait_ns + self._local_work_ns(max(1, routed.num_prompt_tokens - held_tokens))

    def route_of(self, request_id: int) -> Routed | None:
        """Where an open request goes."""
        entry = self._open.get(request_id)
        return None if entry is None else entry.routed

    # What is held

    @property
    def num_open(self) -> int:
        """Requests that were let in and have not ended."""
        return len(self._open)

    def prefills(self, request_id: int) -> str | None:
        """The instance that prefills a request; None once the end was heard of."""
        entry = self._open.get(request_id)
        return entry.routed.prefill if entry is not None and entry.prefilling else None

    def decoder_of(self, request_id: int) -> str | None:
        """The instance that was chosen to decode a request; None if there is none."""
        entry = self._open.get(request_id)
        return None if entry is None else entry.decode or entry.routed.decode

    def decoded_by(self, name: str) -> list[int]:
        """Open requests that an instance was chosen to decode."""
        return [request_id for request_id in self._open if self.decoder_of(request_id) == name]

    @property
    def seen(self) -> Seen:
        """What was looked at for the last request that arrived."""
        return self._ways.seen

    @property
    def calibrations(self) -> Mapping[tuple[Path, str], Calibration]:
        """Corrections of predictions, by path and by the cluster that prefills."""
        remote = self._ways.remote_calibrations
        found = {(Path.REMOTE, name): found for name, found in remote.items() if name}
        return {(Path.LOCAL, self._home.name): self._ways.local_calibration, **found}

    @property
    def links(self) -> Links:
        """What is known of the links."""
        return self._ways.links

    def load(self, name: str) -> LoadBook:
        """The load book of an instance that prefills."""
        return self._stage_of[name].book

    @property
    def promised_bytes(self) -> int:
        """Bytes promised to all links; 0 when no transfer is open."""
        return sum(link.book.promised_bytes for link in self.links)

    @property
    def taken_bytes(self) -> int:
        """Bytes of blocks on their way to the PD cluster's pools; 0 when nothing is."""
        return self._ways.rooms.taken_bytes

    # Booking

    def _enter(self, arrival: Arrival, routed: Routed, now_ns: int) -> _Open:
        """Book what an admitted request takes beside prefill and link."""
        entry = self._open[arrival.request_id] = _Open(routed, bool(routed.source), now_ns)
        if arrival.streams and self._decode_book is not None:
            self._decode_flow.expect(arrival.request_id)
        if routed.source:
            length = routed.hit_tokens if routed.pulls else arrival.shippable_tokens or 0
            self._ways.rooms.take(
                arrival.request_id,
                routed.destination,
                arrival.layout,
                routed.present_tokens,
                length,
            )
        if self._paces is not None:
            self._keep_pace(self._paces, routed, arrival, now_ns)
        if routed.decode is not None:
            self._ways.home.enter(routed.decode)
        return entry

    def _decode_wait(self, now_ns: int) -> DecodeWait:
        """What decode adds, where instances only decode."""
        flow = self._decode_flow
        return no_wait if self._decode_book is None else lambda after: flow.wait_ns(after, now_ns)

    def _keep(self, arrival: Arrival, decision: Decision, way: Way, now_ns: int) -> Routed:
        assert way.home is not None  # noqa: S101 (refused before)
        name, held, costs = way.home.name, way.home.hit_tokens, way.cluster.costs
        present = way.facts.present_tokens
        pull = decision.pull_tokens if costs else 0
        shipped = costs.shipped_bytes(held + pull, present) if costs and pull else 0
        work_ns = self._local_work_ns(arrival.num_prompt_tokens - held - pull)
        self._ways.home.book.dispatch(name, arrival.request_id, now_ns, work_ns)
        way.link.book.promise(shipped)
        routed = (
            decision,
            self._home.name,
            name,
            name if self._decode_book is None else None,
            way.link.source if pull else "",
            way.link.destination,
            arrival.num_prompt_tokens,
            held + pull,
            present,
            held,
            way.facts.prfaas_hit_tokens,
            shipped,
        )
        return tuple.__new__(Routed, routed)  # half the time of Routed(...)

    def _send_away(self, arrival: Arrival, decision: Decision, way: Way, now_ns: int) -> Routed:
        assert way.away is not None  # noqa: S101 (no policy sends away what is barred)
        prompt, hit, costs = arrival.num_prompt_tokens, way.away.hit_tokens, way.cluster.costs
        present, new = way.facts.present_tokens, prompt - hit
        work_ns = self._remote_work_ns(way.cluster.name, new)
        shipped = costs.shipped_bytes(prompt, present) if costs else 0
        stage = self._ways.away[way.cluster.name]
        stage.book.dispatch(way.away.name, arrival.request_id, now_ns, work_ns)
        way.link.book.promise(shipped)
        routed = (
            decision,
            way.cluster.name,
            way.away.name,
            way.home.name if way.home and self._decode_book is None else None,
            way.link.source,
            way.link.destination,
            prompt,
            hit,
            present,
            way.facts.pd_hit_tokens,
            way.facts.prfaas_hit_tokens,
            shipped,
        )
        return tuple.__new__(Routed, routed)

    def _keep_pace(self, paces: Paces, routed: Routed, arrival: Arrival, now_ns: int) -> None:
        """Time a prefill: what was before it at its instance, and its own work."""
        name = routed.prefill
        wait_ns = self._book_of[name].wait_ns(name, now_ns) or 0
        own_ns = (arrival.num_prompt_tokens - routed.hit_tokens) * NOMINAL_NS_PER_TOKEN
        paces.sent(arrival.request_id, routed.cluster, max(wait_ns, own_ns), now_ns)
        if self._first_tokens is not None and not routed.pulls:
            queued_ns = self._book_of[name].pending_ns(name)
            self._first_tokens.sent(arrival.request_id, routed.cluster, queued_ns, now_ns)

    def _drop_paces(self, request_id: int) -> None:
        """A request left the path that it was sent on, or is over."""
        if self._paces is not None:
            self._paces.drop(request_id)
        if self._first_tokens is not None:
            self._first_tokens.drop(request_id)

    def _local_work_ns(self, num_new_tokens: int) -> int:
        costs = self._home.costs
        if costs is None:
            return num_new_tokens * NOMINAL_NS_PER_TOKEN
        work_ns = costs.local_prefill_ns(num_new_tokens)
        return round(work_ns * self._ways.local_calibration.factor)

    def _remote_work_ns(self, cluster: str, num_new_tokens: int) -> int:
        costs = self._ways.remotes[cluster].costs
        if costs is None:
            return num_new_tokens * NOMINAL_NS_PER_TOKEN
        work_ns = costs.remote_prefill_ns(num_new_tokens)
        return round(work_ns * self._ways.remote_calibrations[cluster].factor)

    def _withdraw(self, request_id: int, entry: _Open, now_ns: int) -> None:
        """Nobody waits for the prefill any more."""
        if entry.prefilling:
            entry.prefilling = False
            name = entry.routed.prefill
            self._book_of[name].drop(name, request_id, now_ns)

"""A simulated run with two gateways: each decides for half of the requests.

Both get every report of instances and links, and each knows of the requests that it sent itself,
as replicas of a gateway do. Breakers and health checks are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.links import LinkReport
from prfaas.sim.engine.dispatch_driver import SimulatedDriver
from prfaas.sim.engine.simulation import Simulation


class _Gateways:
    """The dispatchers of several gateways in place of one.

    What names a request is for the dispatcher of that request, and what does not is for the one
    that was used last. Reports are for all.
    """

    def __init__(self, all_: list[Dispatcher]) -> None:
        self.all, self.used = all_, all_[0]
        self.requests, self.links = _Requests(self), _Links(self)
        self.expected = _Expected(self)

    def of(self, number: int) -> Dispatcher:
        self.used = self.all[number % len(self.all)]
        return self.used

    def __getattr__(self, name: str) -> Any:
        if name in ("consider", "decide", "arrive", "foresee"):
            return lambda arrival, *rest, **more: getattr(self.of(arrival.request_id), name)(
                arrival, *rest, **more
            )
        if name in ("set_ready", "report_loads", "tick"):
            return lambda *args, **more: [getattr(each, name)(*args, **more) for each in self.all]
        if name in ("market", "load"):
            return getattr(self.used, name)
        raise AttributeError(name)

    def set_link(self, source: str, destination: str, *, up: bool) -> list[int]:
        lost = [each.set_link(source, destination, up=up) for each in self.all]
        return [number for numbers in lost for number in numbers]

    @property
    def promised_bytes(self) -> int:
        return sum(each.promised_bytes for each in self.all)


class _Links:
    """Links as the gateway knows them that was used last; reports are for all."""

    def __init__(self, gateways: _Gateways) -> None:
        self._gateways = gateways

    def report(self, source: str, destination: str, report: LinkReport) -> None:
        for each in self._gateways.all:
            each.links.report(source, destination, report)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gateways.used.links, name)


class _Requests:
    """Open requests of all gateways."""

    def __init__(self, gateways: _Gateways) -> None:
        self._gateways = gateways

    def __len__(self) -> int:
        return sum(len(each.requests) for each in self._gateways.all)

    def due(self, name: str, num_waiting: int) -> Iterable[int]:
        for each in self._gateways.all:
            yield from each.requests.due(name, num_waiting)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda number, *rest, **more: getattr(self._gateways.of(number).requests, name)(
            number, *rest, **more
        )


class _Expected:
    """Predicted times of the gateway of a request."""

    def __init__(self, gateways: _Gateways) -> None:
        self._gateways = gateways

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ("local_prefill_ns", "decoder_prefills"):  # They name an engine.
            return cast("Callable[..., Any]", getattr(self._gateways.used.expected, name))
        return lambda number, *rest, **more: getattr(self._gateways.of(number).expected, name)(
            number, *rest, **more
        )


def split(simulation: Simulation, num_gateways: int) -> None:
    """Have the requests of a run that has not begun decided by several gateways in turn."""
    dispatchers = [simulation.front.dispatcher]
    dispatchers += [SimulatedDriver(simulation.setup).dispatcher for _ in range(num_gateways - 1)]
    if num_gateways > 1:
        simulation.front.dispatcher = cast("Dispatcher", _Gateways(dispatchers))

"""Every driver has a method for each action."""

from __future__ import annotations

import pytest

from prfaas.core.request.actions import ACTIONS
from prfaas.core.request.driver import Executor
from prfaas.gateway.serving.request_run import RequestRun as GatewayRun
from prfaas.records import methods_of
from prfaas.sim.engine.request_run import SimulatedRequestRun as SimulatorRun


@pytest.mark.parametrize("driver", [GatewayRun, SimulatorRun])
def test_both_drivers_have_a_method_of_their_own_for_each_action(driver: type[Executor]) -> None:
    assert set(driver.methods) == set(ACTIONS)
    assert not driver.__abstractmethods__
    for method in driver.methods.values():
        owners = [each for each in driver.__mro__ if method.__name__ in each.__dict__]
        assert method is owners[0].__dict__[method.__name__]
        assert owners[0] is not Executor


def test_an_action_without_a_method_fails_with_the_driver_that_lacks_it() -> None:
    assert Executor.__abstractmethods__ == {
        method.__name__ for method in methods_of(Executor, ACTIONS).values()
    }

    class Half(SimulatorRun):
        __slots__ = ()
        _start_pull = Executor._start_pull  # type: ignore[assignment]

    with pytest.raises(TypeError, match="_start_pull"):
        Half(None, None, None)  # type: ignore[arg-type]

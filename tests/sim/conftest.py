"""Every simulated run ends with its books in order."""

import pytest

from prfaas.sim.engine.simulation import Simulation


@pytest.fixture(autouse=True)
def _validated_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Simulation.run

    def validated(simulation: Simulation, stop_at_ns: int | None = None) -> None:
        run(simulation, stop_at_ns)
        simulation.front.dispatcher.validate()
        simulation.guards.validate()
        assert simulation.busy or not len(simulation.front.dispatcher.requests)

    monkeypatch.setattr(Simulation, "run", validated)

"""A site on three Ray nodes: it serves, scales, and outlives its engines and a node."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray_nodes.cluster import NEEDS_RAY, RayNodes, ray_nodes
from tests.ray_site.site import Clients, Site, running_site, until

pytestmark = [NEEDS_RAY, pytest.mark.timeout(400)]
WAIT_S = 150.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(2, 2, 2) as found:
        yield found


@pytest.fixture(scope="module")
def site(nodes: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running_site(tmp_path_factory.mktemp("s"), nodes, "--engines", "pd=2") as found:
        yield found


def is_ready(site: Site, *names: str) -> bool:
    parts = site.parts()
    return all(name in parts and parts[name]["phase"] == "ready" for name in names)


def served(clients: Clients, count: int) -> None:
    seen = clients.num_answers
    until(lambda: clients.num_answers >= seen + count, WAIT_S)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_engines_are_added_and_drained_without_a_restart_of_the_gateway(site: Site) -> None:
    gateway = site.parts()["gateway"]["pid"]
    clients = Clients(site.url)
    with clients.load():
        served(clients, 10)
        for count, names in ((4, "a1, b1, a2, b2"), (2, "a1, b1")):
            found = site.command("ray", "scale", "--file", str(site.file), f"pd={count}")
            assert found == f"pd: {names}\n"
            assert len(site.parts()) == 3 + count
            served(clients, 10)
    assert (clients.errors, clients.wrong) == ([], [])
    assert site.parts()["gateway"]["pid"] == gateway


def test_a_killed_engine_actor_is_back_without_an_error_for_clients(site: Site) -> None:
    before = site.parts()["a1"]["pid"]
    clients = Clients(site.url)
    with clients.load():
        served(clients, 10)
        os.kill(parent(before), signal.SIGKILL)
        back_s = until(
            lambda: is_ready(site, "a1") and site.parts()["a1"]["pid"] not in (before, None),
            WAIT_S,
            site.log,
        )
        served(clients, 10)
    print(f"\nan engine was back {back_s:.1f} s after its actor was killed")
    assert (clients.errors, clients.wrong) == ([], [])


def test_the_parts_of_a_killed_node_move_and_no_answer_is_wrong(
    nodes: RayNodes, site: Site
) -> None:
    where, before = site.nodes(), site.parts()
    # The gateway is on the head, and there is room for one of the two pool nodes beside it.
    assert where["gateway"] == nodes.ids[0]
    lost = next(pool for pool in ("pool-a", "pool-b") if where[pool] != where["gateway"])
    engine = "a1" if lost == "pool-a" else "b1"
    clients = Clients(site.url)
    with clients.load():
        served(clients, 10)
        nodes.kill(nodes.ids.index(where[lost]))
        moved_s = until(
            lambda: (
                is_ready(site, lost, engine)
                and all(
                    site.parts()[n]["pid"] not in (before[n]["pid"], None) for n in (lost, engine)
                )
            ),
            WAIT_S,
            site.log,
        )
        served(clients, 10)
    print(
        f"\n{lost} and {engine} were back on another node after {moved_s:.1f} s; "
        f"{len(clients.errors)} errors in {clients.num_answers} answers"
    )
    assert clients.wrong == []
    assert len(clients.errors) <= clients.num_answers // 10, clients.errors[:5]


def test_a_host_that_fits_on_no_node_is_refused_in_words(nodes: RayNodes, tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError) as refused,
        running_site(tmp_path, nodes, "--need", "engine=GPU:8"),
    ):
        pass
    assert "no node of the Ray cluster has 1.5 CPU, 16 GPU for pool-a" in str(refused.value)

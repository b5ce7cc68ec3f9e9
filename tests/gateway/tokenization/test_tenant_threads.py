"""Threads that tokenise belong to one tenant each, and no tenant takes those of all others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest

from prfaas.gateway.tokenization.prompt_encoder import TenantThreads


def held(gate: threading.Event) -> Callable[[], str]:
    """Work that lasts until `gate` opens, and tells its thread."""

    def work() -> str:
        assert gate.wait(50)
        return threading.current_thread().name

    return work


def own_thread() -> int:
    return threading.get_ident()


async def test_no_thread_serves_two_tenants() -> None:
    threads = TenantThreads(threads_max=2)
    seen: dict[str, set[threading.Thread]] = {}

    def note(tenant: str) -> None:
        seen.setdefault(tenant, set()).add(threading.current_thread())

    for _ in range(3):
        for tenant in ("red", "blue", "green"):
            await threads.run(tenant, lambda tenant=tenant: note(tenant))  # type: ignore[misc]
            assert threads.num_threads <= 2
    for tenant, others in (("red", "blue"), ("blue", "green"), ("green", "red")):
        assert not seen[tenant] & seen[others]
    threads.close()


async def test_a_tenants_thread_is_used_again() -> None:
    threads = TenantThreads()
    first = await threads.run("red", own_thread)
    await threads.run("blue", own_thread)
    assert await threads.run("red", own_thread) == first
    threads.close()


async def test_another_tenant_does_not_wait_for_one_with_much_to_do() -> None:
    threads, gate = TenantThreads(), threading.Event()
    busy = [asyncio.create_task(threads.run("red", held(gate))) for _ in range(10)]
    # Nothing of red's ends before blue has been served.
    await threads.run("blue", own_thread)
    assert threads.num_waiting == 8
    gate.set()
    await asyncio.gather(*busy)
    assert threads.num_waiting == 0
    threads.close()


async def test_who_has_no_thread_is_next() -> None:
    threads = TenantThreads(threads_max=2)
    gates = [threading.Event(), threading.Event()]
    busy = [asyncio.create_task(threads.run("red", held(gate))) for gate in gates]
    order: list[str] = []
    more = [asyncio.create_task(threads.run("red", partial(order.append, "red"))) for _ in range(3)]
    await asyncio.sleep(0)
    other = asyncio.create_task(threads.run("blue", partial(order.append, "blue")))
    await asyncio.sleep(0)
    assert threads.num_waiting == 4
    gates[0].set()
    await other
    assert order[0] == "blue"
    gates[1].set()
    await asyncio.gather(*busy, *more)
    threads.close()


async def test_a_caller_that_leaves_gives_back_its_turn() -> None:
    threads, gate = TenantThreads(threads_max=1), threading.Event()
    busy = asyncio.create_task(threads.run("red", held(gate)))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(threads.run("blue", own_thread))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert threads.num_waiting == 0
    # The thread is busy although nobody waits for its work any more.
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    last = asyncio.create_task(threads.run("green", own_thread))
    await asyncio.sleep(0)
    assert threads.num_waiting == 1
    gate.set()
    await last
    assert threads.num_threads == 1
    threads.close()


async def test_a_newcomer_does_not_wait_behind_a_caller_that_has_left() -> None:
    threads = TenantThreads(threads_max=1)
    held_by_red = await threads._acquire("red")
    leaving = asyncio.create_task(threads.run("blue", own_thread))
    await asyncio.sleep(0)
    leaving.cancel()
    threads._release(held_by_red)
    # Before the one that leaves has run again: nobody would wake who waits behind it.
    with pytest.raises(StopIteration):
        threads._acquire("blue").send(None)
    await asyncio.gather(leaving, return_exceptions=True)
    threads.close()

import asyncio

from click.testing import CliRunner

from prfaas.cli.main import cli
from prfaas.wire.messages.gateway import TierUse

from .conftest import World, until


async def run(*args: str) -> tuple[int, str]:
    found = await asyncio.to_thread(CliRunner().invoke, cli, ["top", *args], terminal_width=200)
    return found.exit_code, found.output + str(found.exception or "")


async def test_top_shows_parts_alarms_and_requests(world: World) -> None:
    use = TierUse(used_bytes=3 << 20, capacity_bytes=1 << 30, num_blocks=7)
    world.pd_pool.tiers, world.pd_pool.num_leased = {"host": use}, 1_234
    world.pd_pool.tell_state()
    await until(lambda: world.gateway.pools.subscription("pd-pool").num_leased == 1_234)
    await world.post({"model": "tiny", "prompt": "x" * 20, "max_tokens": 2})
    code, shown = await run("--once", "--url", world.url)
    assert code == 0, shown
    for words in ("prfaas-pool>pd-pool", "spare", "down", "100 tokens", "below", "! engine spare"):
        assert words in shown
    for words in ("3.0 MiB of 1.0 GiB", "1,234", "no price set"):
        assert words in shown


async def test_top_says_when_nobody_is_there(unused_tcp_port: int) -> None:
    code, shown = await run("--once", "--url", f"http://127.0.0.1:{unused_tcp_port}")
    assert code == 1
    assert str(unused_tcp_port) in shown

import asyncio

from click.testing import CliRunner

from prfaas.cli.main import cli

from .conftest import World


async def run(*args: str) -> tuple[int, str]:
    found = await asyncio.to_thread(CliRunner().invoke, cli, ["top", *args], terminal_width=200)
    return found.exit_code, found.output + str(found.exception or "")


async def test_top_shows_parts_alarms_and_requests(world: World) -> None:
    await world.post({"model": "tiny", "prompt": "x" * 20, "max_tokens": 2})
    code, shown = await run("--once", "--url", world.url)
    assert code == 0, shown
    for words in ("prfaas-pool>pd-pool", "spare", "down", "100 tokens", "below", "! engine spare"):
        assert words in shown


async def test_top_says_when_nobody_is_there(unused_tcp_port: int) -> None:
    code, shown = await run("--once", "--url", f"http://127.0.0.1:{unused_tcp_port}")
    assert code == 1
    assert str(unused_tcp_port) in shown

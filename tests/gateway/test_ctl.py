"""`prfaas ctl` against a real gateway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from prfaas.cli.operate.ctl_command import ctl
from prfaas.errors import ConfigError
from tests.gateway.ctl_runner import run

from .conftest import World
from .prompts import LONG


async def test_an_operator_looks_steers_and_asks_why(world: World) -> None:
    status = await run("status", url=world.url)
    assert "prfaas-pool:pd-pool  up  threshold 100 tokens" in status.output
    await world.post({"prompt": LONG, "max_tokens": 2})
    record = await world.record()
    found = await run("explain", record["request_id"], url=world.url)
    assert "REMOTE: long: 360 new tokens against 100" in found.output
    assert "candidate  prefill (prfaas)  score" in found.output
    assert "predicted  nothing: " in found.output
    assert "remote     prfaas  waits: " in found.output
    assert "rate unknown then: no transfer had filled it" in found.output
    short = await run("explain", record["request_id"][:8], url=world.url)
    assert short.output == found.output
    story = (await run("story", record["request_id"], url=world.url)).output.splitlines()
    assert story[0].endswith("finished")
    steps = [line.split(" ms ")[1].split() for line in story[1:]]
    assert [step[:2] for step in steps] == [
        ["Begun", "prefilling"],
        ["PrefillDone", "decoding"],
        ["Finished", "ended"],
        ["Stopped", "ended"],
    ]
    assert steps[0][2:] == ["StartPrefill,", "WakeAt"]
    for words in (
        ("freeze",),
        ("threshold", "set", "5000", "--link", "prfaas-pool:pd-pool"),
        ("drain", "decode"),
        ("off", "prfaas"),
    ):
        assert (await run(*words, url=world.url)).exit_code == 0
    status = await run("status", url=world.url)
    for shown in ("FROZEN", "threshold 5,000", "DRAINED", "prfaas  prefill only  OFF"):
        assert shown in status.output
    for words in (("unfreeze",), ("resume", "decode"), ("on", "prfaas")):
        assert (await run(*words, url=world.url)).exit_code == 0
    lines = (await run("decisions", "--json", url=world.url)).output.splitlines()
    actions = [json.loads(line)["action"] for line in lines]
    assert actions == ["freeze", "threshold", "drain", "off", "unfreeze", "resume", "on"]
    last = (await run("decisions", "--limit", "1", url=world.url)).output
    assert "#7  operator on  cluster prfaas  off -> on" in last


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("drain", "nobody"), "there is no engine 'nobody'; there are: prefill, decode, spare"),
        (("explain", "r/../x"), "no such request among the last 1000"),
        (("story", "nobody"), "no such request among the last 1000"),
        (("off", "pd"), "only PD cluster"),
    ],
)
async def test_what_the_gateway_refuses_is_said(
    world: World, words: tuple[str, ...], says: str
) -> None:
    found = await run(*words, url=world.url)
    assert isinstance(found.exception, ConfigError)
    assert says in str(found.exception)


def test_a_gateway_that_is_not_there_is_said() -> None:
    found = CliRunner().invoke(ctl, ["status", "--url", "http://127.0.0.1:1"])
    assert isinstance(found.exception, ConfigError)
    assert "no gateway answers at http://127.0.0.1:1" in str(found.exception)


@pytest.mark.parametrize("link", ["a", "a:", ":b", ""])
def test_a_link_has_two_ends(link: str) -> None:
    found = CliRunner().invoke(ctl, ["threshold", "set", "5", "--link", link])
    assert found.exit_code == 2
    assert "SOURCE:DESTINATION" in found.output


def test_a_key_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    found = CliRunner().invoke(ctl, ["status", "--key-file", str(tmp_path / "key")])
    assert isinstance(found.exception, ConfigError)
    assert "cannot be read" in str(found.exception)

"""Files that a parser fails at, that have no end, or that are none: refused in words, at once."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prfaas.config.governance.contracts import load_contracts
from prfaas.config.load import load_deployment
from prfaas.errors import ConfigError
from prfaas.limited_files import DEPTH_MAX, FILE_BYTES_MAX, read_json, read_limited
from prfaas.market.price_file import read_prices
from prfaas.planner.answer.plan_loader import load_question, read_config_json
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.toml_tables import read_toml

pytestmark = pytest.mark.timeout(30)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path)


def folder(path: Path) -> None:
    path.mkdir()


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


NO_FILES = [pipe, endless, loop, folder, sparse]
TOML = {
    "lists": text("a = " + "[" * 100_000 + "]" * 100_000),
    "tables": text("a = " + "{b = " * 100_000 + "1" + "}" * 100_000),
    "dotted key": text("a" + ".a" * 2_000_000 + " = 1"),
    "quoted key": text("a" + '."b c"' * 1_000_000 + " = 1"),
    "header": text("[" + "a." * 2_000_000 + "a]"),
    "deep headers": text(
        "".join(f"[{'a.' * 50}{n}.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p]\n" for n in "xy")
    ),
    "digits": text("a = " + "9" * 5000),
    "hex digits": text("a = 0x" + "f" * 5000),
    "beyond 64 bits": text(f"a = {2**64}"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "nul": text("a = 1\0"),
    "date": text("a = 9999-99-99"),
}
JSON = {
    "lists": text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "objects": text('{"a": ' * 100_000 + "1" + "}" * 100_000),
    "below the parser's limit": text('{"a": ' * 100 + "1" + "}" * 100),
    "digits": text('{"num_hidden_layers": ' + "9" * 5000 + "}"),
    "beyond 64 bits": text(f'{{"num_hidden_layers": {10**30}}}'),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
}
LOADERS: dict[str, Callable[[Path], Any]] = {
    "deployment": load_deployment,
    "contracts": load_contracts,
    "prices": lambda path: read_prices(path, {}),
    "plan": load_question,
    "scenario": load_scenario,
    "toml": read_toml,
}


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS.keys())
@pytest.mark.parametrize("make", [*NO_FILES, *TOML.values()], ids=[*map(str, range(5)), *TOML])
def test_a_toml_file_is_refused(
    load: Callable[[Path], Any], make: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "file.toml"
    make(path)
    with pytest.raises(ConfigError, match=r"file\.toml") as refused:
        load(path)
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize("make", [*NO_FILES, *JSON.values()], ids=[*map(str, range(5)), *JSON])
def test_a_model_config_is_refused(make: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    make(path)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config_json(path)


def test_what_people_write_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    prices = ", ".join(["1.25"] * 10_000)
    path.write_text(f"\ufeffa = [{prices}]\nb.c.d = 1\nurl = 'http://a.b.c/d.e'\n")
    assert read_toml(path)["b"] == {"c": {"d": 1}}
    nested: Any = 1
    for _ in range(DEPTH_MAX - 1):
        nested = [nested]
    other = tmp_path / "config.json"
    other.write_text(json.dumps(nested))
    assert read_json(other) == nested


def test_a_pipe_that_the_process_was_given_is_read(tmp_path: Path) -> None:
    """As of `prfaas plan <(generate)`."""
    reader, writer = os.pipe()
    os.write(writer, b"a = 1\n")
    os.close(writer)
    assert read_toml(Path(f"/dev/fd/{reader}")) == {"a": 1}
    os.close(reader)


def test_a_limit_of_bytes_holds_while_a_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    assert read_limited(path, 10) == bytes(10)
    with pytest.raises(ConfigError, match="has 10 bytes, limit 9"):
        read_limited(path, 9)

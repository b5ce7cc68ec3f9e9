"""Addresses and keys as people paste them into commands."""

from pathlib import Path

import click
import pytest

from prfaas.cli.common.options import BASE_URL
from prfaas.cli.operate.control_client import KEY_VARIABLE, operator_key
from prfaas.errors import ConfigError


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "//", " \n"])
def test_the_address_of_openai_clients_is_taken(end: str) -> None:
    found = BASE_URL.convert(f"http://host:8000{end}", None, None)
    assert found == "http://host:8000"


def test_an_address_without_a_scheme_is_explained() -> None:
    with pytest.raises(click.BadParameter, match="is no URL of a server, such as http://"):
        BASE_URL.convert("host:8000", None, None)


@pytest.mark.parametrize("key", ["sk-a\nsk-b", "sk a", "sk-\u00e9", "sk-\x00"])
def test_a_key_that_no_header_takes_is_refused_and_not_shown(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text(key)
    with pytest.raises(ConfigError, match="one word of printable ASCII") as found:
        operator_key(file)
    assert key not in str(found.value)
    if "\0" not in key:
        monkeypatch.setenv(KEY_VARIABLE, key)
        with pytest.raises(ConfigError, match=KEY_VARIABLE):
            operator_key(None)


def test_a_key_with_a_line_break_at_its_end_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sk-a\n")
    assert operator_key(None) == "sk-a"

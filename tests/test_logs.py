"""Lines of the log, for people and for machines."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from prfaas.cli.common.options import LOG_FORMAT_VARIABLE, logs_of_parts
from prfaas.logs import JsonFormatter, log_event


def test_an_event_is_one_line_in_either_format(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = logging.getLogger("prfaas.test")
    log_event(log, logging.INFO, "moved", what='a "b"\nc', old=None, new=5, share="97 %")
    [record] = caplog.records
    assert record.getMessage() == 'moved what="a \\"b\\"\\nc" new=5 share="97 %"'
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "INFO",
        "logger": "prfaas.test",
        "event": "moved",
        "what": 'a "b"\nc',
        "new": 5,
        "share": "97 %",
    }


def test_other_lines_are_messages(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("prfaas.test")
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("it failed: %d", 3)
    found = json.loads(JsonFormatter().format(caplog.records[0]))
    assert found["message"] == "it failed: 3"
    assert "ValueError: no" in found["exception"]


@pytest.mark.parametrize(
    ("words", "environment", "is_json"),
    [
        ([], {}, False),
        (["--log-format", "json"], {}, True),
        ([], {LOG_FORMAT_VARIABLE: "json"}, True),
        (["--log-format", "text"], {LOG_FORMAT_VARIABLE: "json"}, False),
    ],
)
def test_a_command_logs_as_it_is_told(
    words: list[str], environment: dict[str, str], is_json: bool
) -> None:
    code = "import click; from tests.log_program import say; click.command()(say)()"
    found = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    [line] = found.stderr.splitlines()
    if is_json:
        said = json.loads(line)
        assert (said["event"], said["request_id"]) == ("said", "r1")
    else:
        assert line.endswith("INFO prfaas.test said request_id=r1")


def test_parts_are_told_how_to_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "text")

    @click.command()
    @logs_of_parts
    def start() -> None:
        click.echo(os.environ[LOG_FORMAT_VARIABLE])

    assert CliRunner().invoke(start, ["--log-format", "json"]).output == "json\n"
    assert CliRunner().invoke(start, ["--log-format", "xml"]).exit_code == 2

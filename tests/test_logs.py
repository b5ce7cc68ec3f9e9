"""Lines of the log, for people and for machines."""

from __future__ import annotations

import json
import logging

import pytest

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

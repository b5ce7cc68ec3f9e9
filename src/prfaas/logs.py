"""One line an event: text for people, JSON for machines."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from enum import StrEnum

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_FIELDS = "prfaas_fields"
_NOT_BARE = re.compile(r'[ "=\n\r\t]')


class LogFormat(StrEnum):
    """Format of a log line."""

    TEXT = "text"
    JSON = "json"


class JsonFormatter(logging.Formatter):
    """A JSON object a line: time, level, logger, event or message, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
        }
        fields = getattr(record, _FIELDS, None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(form: LogFormat = LogFormat.TEXT, level: int = logging.INFO) -> None:
    """Write the log of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    json_lines = form is LogFormat.JSON
    handler.setFormatter(JsonFormatter() if json_lines else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
    # No format shows them, and each line would ask for them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def log_event(log: logging.Logger, level: int, event: str, **fields: object) -> None:
    """Log an event: its name, and fields by name; those that are None are left out.

    Args:
        level: Of `logging`.
        event: A fixed word or two, joined by underscores.
        fields: Numbers and names; never prompts, salts or keys.
    """
    if not log.isEnabledFor(level):
        return
    known = {name: value for name, value in fields.items() if value is not None}
    text = " ".join((event, *(f"{name}={_shown(value)}" for name, value in known.items())))
    # Without arguments a percent sign is one. Who logs is the logger's name: the place in the code,
    # which no format shows, would have to be looked for.
    extra = {_FIELDS: {"event": event, **known}}
    log.handle(log.makeRecord(log.name, level, "", 0, text, (), None, extra=extra))


def _shown(value: object) -> str:
    text = str(value)
    return json.dumps(text) if not text or _NOT_BARE.search(text) else text

"""Option types of several commands: addresses, names with a value, the log format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import click

from prfaas.config.addresses import split_address
from prfaas.errors import ConfigError
from prfaas.limited_files import shipped_file
from prfaas.logs import LogFormat, set_up_logging
from prfaas.units import parse_duration, parse_rate

CONNECTIONS_MAX = 16
BUDGET_BITS_PER_S_MIN = 1_000_000
Command = TypeVar("Command", bound=Callable[..., None])
Value = TypeVar("Value")


class ParsedType(click.ParamType[Value], Generic[Value]):
    """A value in a form of its own.

    Args:
        name: Form in `--help`.
        read: Reads the text; its ValueError or ConfigError is the mistake in words.
    """

    def __init__(self, name: str, read: Callable[[str], Value]) -> None:
        self.name, self._read = name, read

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Value:
        """Read the value."""
        try:
            return self._read(str(value))
        except (ConfigError, ValueError) as error:
            self.fail(str(error), param, ctx)


def _named_address(text: str) -> tuple[str, tuple[str, int]]:
    name, _, address = text.partition("=")
    if not name or not address:
        raise ConfigError(f"{text!r} is not NAME=HOST:PORT")
    return name, split_address(address)


def _named_rate(text: str) -> tuple[str, int]:
    name, _, rate = text.partition("=")
    try:
        bits_per_s = parse_rate(rate)
    except ConfigError as error:
        raise ConfigError(f"{text!r} is not NAME=RATE: {error}") from None
    if not name or bits_per_s < BUDGET_BITS_PER_S_MIN:
        raise ConfigError(f"{text!r} is not NAME=RATE with a rate of 1Mbps or more")
    return name, bits_per_s


def _named_count(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not name or not count.isdecimal() or not 1 <= int(count) <= CONNECTIONS_MAX:
        raise ConfigError(f"{text!r} is not NAME=COUNT, 1 to {CONNECTIONS_MAX}")
    return name, int(count)


def _named_url(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise ConfigError(f"{text!r} is not NAME=URL")
    return name, url.rstrip("/")


def _base_url(text: str) -> str:
    url = text.strip()
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{text!r} is no URL of a server, such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class ExampleOrFile(click.Path):
    """A file; one that does not exist is taken from the examples of prfaas, by its name there.

    Args:
        folder: Folder of `examples` with files of this kind.
    """

    def __init__(self, folder: str = "") -> None:
        super().__init__(dir_okay=False, path_type=Path)
        self._folder = folder

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        """Find the file."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        shipped = shipped_file(path, self._folder)
        if shipped is not None:
            click.echo(f"{path} is not here; using the example {shipped}", err=True)
        return shipped or path


DURATION = ParsedType("duration", parse_duration)
"""Nanoseconds."""
ADDRESS = ParsedType("host:port", split_address)
NAMED_ADDRESS = ParsedType("name=host:port", _named_address)
NAMED_RATE = ParsedType("name=rate", _named_rate)
NAMED_COUNT = ParsedType("name=count", _named_count)
NAMED_URL = ParsedType("name=url", _named_url)
BASE_URL = ParsedType("url", _base_url)
"""URL of a server, also with the `/v1` that OpenAI clients are given; paths are appended to it."""
PATH = click.Path(path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
DEPLOYMENT, PLAN, SCENARIO = ExampleOrFile(), ExampleOrFile("plan"), ExampleOrFile("sim")
TRACE = ExampleOrFile("sim/traces")
FOLDER = click.Path(file_okay=False, exists=True, path_type=Path)


LOG_FORMAT_VARIABLE = "PRFAAS_LOG_FORMAT"
_FORMATS = click.Choice([form.value for form in LogFormat])


def logs(command: Command) -> Command:
    """Adds `--log-format` to a command, and sets the log up before it runs."""

    def set_up(_context: click.Context, _option: click.Parameter, value: str) -> None:
        set_up_logging(LogFormat(value))

    option = click.option(
        "--log-format",
        type=_FORMATS,
        default=LogFormat.TEXT.value,
        envvar=LOG_FORMAT_VARIABLE,
        expose_value=False,
        callback=set_up,
        help="Format of a log line.",
    )
    return option(command)


def logs_of_parts(command: Command) -> Command:
    """Adds `--log-format` to a command that starts parts: it is theirs."""

    def tell(_context: click.Context, _option: click.Parameter, value: str | None) -> None:
        if value is not None:
            os.environ[LOG_FORMAT_VARIABLE] = value

    option = click.option(
        "--log-format",
        type=_FORMATS,
        expose_value=False,
        callback=tell,
        help="Format of the logs of gateway, pool nodes and timing engines; text if absent.",
    )
    return option(command)

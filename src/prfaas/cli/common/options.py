"""Option types of several commands: addresses, names with a value, the log format."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import click

from prfaas.config.addresses import split_address
from prfaas.errors import ConfigError
from prfaas.logs import LogFormat, set_up_logging
from prfaas.units import parse_duration, parse_rate

CONNECTIONS_MAX = 16
BUDGET_BITS_PER_S_MIN = 1_000_000
Command = TypeVar("Command", bound=Callable[..., None])


class DurationType(click.ParamType[int]):
    """`90s`, `2h`: nanoseconds."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read a duration."""
        try:
            return parse_duration(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class AddressType(click.ParamType[tuple[str, int]]):
    """`HOST:PORT`."""

    name = "host:port"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """Split an address."""
        try:
            return split_address(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class PeerType(click.ParamType[tuple[str, tuple[str, int]]]):
    """`NAME=HOST:PORT`."""

    name = "name=host:port"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[str, int]]:
        """Split a named address."""
        name, _, address = str(value).partition("=")
        if not name or not address:
            self.fail(f"{value!r} is not NAME=HOST:PORT", param, ctx)
        return name, AddressType().convert(address, param, ctx)


class PeerRateType(click.ParamType[tuple[str, int]]):
    """`NAME=RATE`."""

    name = "name=rate"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """Split a named rate."""
        name, _, rate = str(value).partition("=")
        try:
            bits_per_s = parse_rate(rate)
        except ConfigError as error:
            self.fail(f"{value!r} is not NAME=RATE: {error}", param, ctx)
        if not name or bits_per_s < BUDGET_BITS_PER_S_MIN:
            self.fail(f"{value!r} is not NAME=RATE with a rate of 1Mbps or more", param, ctx)
        return name, bits_per_s


class PeerCountType(click.ParamType[tuple[str, int]]):
    """`NAME=COUNT`."""

    name = "name=count"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """Split a named count."""
        name, _, count = str(value).partition("=")
        if not name or not count.isdecimal() or not 1 <= int(count) <= CONNECTIONS_MAX:
            self.fail(f"{value!r} is not NAME=COUNT, 1 to {CONNECTIONS_MAX}", param, ctx)
        return name, int(count)


class UrlType(click.ParamType[tuple[str, str]]):
    """`NAME=URL`."""

    name = "name=url"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Split a named URL."""
        name, _, url = str(value).partition("=")
        if not name or not url.startswith(("http://", "https://")):
            self.fail(f"{value!r} is not NAME=URL", param, ctx)
        return name, url.rstrip("/")


class BaseUrlType(click.ParamType[str]):
    """`http://HOST:PORT`, also with the `/v1` that OpenAI clients are given."""

    name = "url"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the URL that paths are appended to."""
        url = str(value).strip()
        if not url.startswith(("http://", "https://")):
            self.fail(f"{value!r} is no URL of a server, such as http://127.0.0.1:8000", param, ctx)
        return url.rstrip("/").removesuffix("/v1").rstrip("/")


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
        show_default=True,
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

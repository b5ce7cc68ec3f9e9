"""Requests of `prfaas ctl` to a gateway, and the options that its commands share."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import click

from prfaas.cli.common.options import BASE_URL, PATH
from prfaas.cli.operate.ctl_views import decision_line, joined, purge_lines
from prfaas.errors import ConfigError

KEY_VARIABLE = "PRFAAS_OPERATOR_KEY"
URL_DEFAULT = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0
Command = TypeVar("Command", bound=Callable[..., None])
_FORBIDDEN = (401, 403)


@dataclass(frozen=True, slots=True)
class ControlClient:
    """Speaks to one gateway."""

    url: str
    key: str = ""
    """The operator's key; "" sends none."""
    root: str = "control"
    """Base URL of its pages."""

    def get(self, *parts: str, **query: int | str) -> dict[str, Any]:
        """Ask for a page; ConfigError if the gateway is not there, or refuses.

        Args:
            parts: Of its path, unquoted.
        """
        words = "&".join(f"{name}={value}" for name, value in query.items())
        return self._ask("GET", parts, words, None)

    def post(
        self, *parts: str, body: dict[str, object], limit_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        """Change something; ConfigError if the gateway is not there, or refuses.

        Args:
            parts: Of its path, unquoted.
        """
        return self._ask("POST", parts, "", body, limit_s)

    def _ask(
        self,
        method: str,
        parts: tuple[str, ...],
        query: str,
        body: dict[str, object] | None,
        limit_s: float = TIMEOUT_S,
    ) -> dict[str, Any]:
        path = "/".join(quote(part, safe="") for part in parts)
        url = f"{self.url.rstrip('/')}/{self.root}/{path}" + (f"?{query}" if query else "")
        status, text = asyncio.run(self._exchange(method, url, body, limit_s))
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ConfigError(f"{url} answers {status}, and no JSON: is that a prfaas gateway?")
        if status in _FORBIDDEN:
            message = answer.get("error", {}).get("message", status)
            raise ConfigError(f"{message} (set {KEY_VARIABLE}, or use --key-file FILE)")
        if status != 200:
            raise ConfigError(str(answer.get("error", {}).get("message", status)))
        return answer

    async def _exchange(
        self, method: str, url: str, body: dict[str, object] | None, limit_s: float
    ) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.request(method, url, json=body) as response,
            ):
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ConfigError(
                f"no gateway answers at {self.url}: {reason}; set --url http://HOST:PORT"
            ) from None


def asks_gateway(command: Command) -> Command:
    """Adds `--url` and `--key-file` to a command."""
    url = click.option(
        "--url", envvar="PRFAAS_URL", default=URL_DEFAULT, type=BASE_URL, help="The gateway."
    )
    key_file = click.option(
        "--key-file",
        type=PATH,
        help=f"File with the operator's key; without it {KEY_VARIABLE} is looked at.",
    )
    return url(key_file(command))


def operator_key(key_file: Path | None) -> str:
    """The operator's key: of a file, else of the environment, else none.

    Raises:
        ConfigError: The file cannot be read, or the key cannot be sent in a header.
    """
    if key_file is None:
        key, place = os.environ.get(KEY_VARIABLE, "").strip(), KEY_VARIABLE
    else:
        try:
            key, place = key_file.read_text().strip(), f"the key file {key_file}"
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the key file {key_file} cannot be read: {error}") from None
    wrong = next((at for at, c in enumerate(key) if not "!" <= c <= "~"), None)
    if wrong is not None:
        raise ConfigError(
            f"{place}: character {wrong + 1} of {len(key)} is a space, a line break or not ASCII; "
            "a key is one word of printable ASCII characters"
        )
    return key


PURGE_S = 180.0
Run = TypeVar("Run", bound=Callable[..., None])


class PrintedGateway:
    """A gateway, and how its answers are printed."""

    def __init__(self, client: ControlClient, *, as_json: bool) -> None:
        self.client, self.as_json = client, as_json

    def show(self, found: dict[str, Any], lines: Callable[[dict[str, Any]], list[str]]) -> None:
        """Print an answer."""
        click.echo(json.dumps(found, indent=2) if self.as_json else joined(lines(found)))

    def change(self, *parts: str, **body: object) -> None:
        """Make a change, and print it."""
        self.show(self.client.post(*parts, body=body), _decision_lines)

    def purge(self, target: dict[str, str], *, is_dry: bool, counts_first: bool) -> None:
        """Drop blocks, and print the report; exits with 1 if not all are dropped.

        Args:
            target: What is purged, as fields of the body.
            counts_first: Print on the standard error what will be dropped.
        """
        ask = functools.partial(self.client.post, "purge", limit_s=PURGE_S)
        if counts_first and not is_dry:
            found = ask(body={**target, "dry_run": True})
            click.echo("\n".join(purge_lines(found)), err=True)
        found = ask(body={**target, "dry_run": is_dry})
        self.show(found, purge_lines)
        if not found["is_complete"]:
            sys.exit(1)


def talks(run: Run) -> Run:
    """Options of every command, which it gets as a `PrintedGateway`."""

    @asks_gateway
    @click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
    @functools.wraps(run)
    def connected(*, url: str, key_file: Path | None, as_json: bool, **rest: Any) -> None:
        run(PrintedGateway(ControlClient(url, operator_key(key_file)), as_json=as_json), **rest)

    return connected  # type: ignore[return-value] # click calls it with keywords


def _decision_lines(found: dict[str, Any]) -> list[str]:
    return [decision_line(entry) for entry in found["decisions"]]

"""Commands of README and quick start run as printed, in an empty folder with the wheel alone."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port

from .charts import ROOT
from .packages import installed

pytestmark = pytest.mark.timeout(600)

PAGES = {ROOT / "README.md": ["gateway", "plan"], ROOT / "docs" / "quick-start.md": ["gateway"]}
"""Pages, and the extras that they install."""
PROGRAMS = ("pip ", "make ", "prfaas ", "curl ", "python3 ", "eval ", "PIP_EXTRA_INDEX_URL=")
NAMED = {
    "pip install 'prfaas[gateway]'": "needs a package index; here is the wheel",
    "pip install 'prfaas[gateway]' && prfaas demo": "the same; quick start has its demo, --once",
    "make test": "in a clone, and runs this test",
    "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo": "in a clone, with vLLM",
    "prfaas up laptop.toml": "needs vLLM and a minute; the test sees that the command says so",
}
"""Commands that are not run as printed, and why."""
UNTIL_CTRL_C = {"prfaas up timing.toml": "ready at"}
"""Commands that run until Ctrl-C, and what they print once they can be used."""
ADDRESS = "127.0.0.1:8000"
BLOCK = re.compile(r"^```python\n(.*?)```|((?:^ {4,}[^\n]+\n)+)", re.DOTALL | re.MULTILINE)


def commands(page: str) -> Iterator[str]:
    """Commands of a page: indented blocks and the fences of Python, descriptions left out."""
    for python, block in BLOCK.findall(page):
        if python:
            yield f"python {python}"
        text = ""
        for line in block.splitlines():
            # A description follows after several spaces.
            text = f"{text}\n{line}" if text else re.sub(r" {3,}\S.*", "", line.strip())
            if text.count("'") % 2 == 0 and not text.endswith("\\"):
                if text.startswith(PROGRAMS):
                    yield text
                text = ""


@contextmanager
def running(command: str, until: str, cwd: Path, env: dict[str, str]) -> Iterator[None]:
    """A command that is used while it runs, and ends in good order on Ctrl-C."""
    process = subprocess.Popen(
        ["/bin/bash", "-c", f"exec {command}"], cwd=cwd, env=env, stdout=-1, stderr=-2
    )
    assert process.stdout is not None
    shown, deadline = b"", time.monotonic() + 120
    try:
        while until.encode() not in shown:
            assert select.select([process.stdout], [], [], deadline - time.monotonic())[0], shown
            piece = os.read(process.stdout.fileno(), 2**16)
            assert piece, shown
            shown += piece
        yield
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
        assert process.returncode == 0, shown + rest


def test_every_command_that_is_not_run_is_on_a_page() -> None:
    found = {command for page in PAGES for command in commands(page.read_text())}
    assert not NAMED.keys() - found
    assert len(found) > 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run_as_printed(
    page: Path,
    served: Path,
    wheel: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    binaries = served
    if PAGES[page] != ["gateway"]:
        binaries = installed(tmp_path_factory.mktemp("page") / "env", wheel, *PAGES[page])
    address = f"127.0.0.1:{free_port()}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"PATH": f"{binaries}:{env['PATH']}", "PRFAAS_URL": f"http://{address}"}
    env |= {"HOME": "/nonexistent"}
    printed = page.read_text().replace(ADDRESS, address)
    open_commands = []
    try:
        for command in commands(printed):
            if command in NAMED:
                continue
            if command in UNTIL_CTRL_C:
                open_commands.append(running(command, UNTIL_CTRL_C[command], tmp_path, env))
                open_commands[-1].__enter__()
                continue
            python = command.removeprefix("python ")
            shell = ["/bin/bash", "-c", command]
            args = shell if python == command else [sys.executable, "-c", python]
            done = subprocess.run(
                args,
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                check=False,
                timeout=200,
            )
            assert done.returncode == 0, (command, done.stdout[-1000:], done.stderr[-3000:])
            assert command.partition(" ")[0] != "curl" or "200 OK" in done.stdout, done.stdout
            for file in tmp_path.glob("*.toml"):
                file.write_text(file.read_text().replace(ADDRESS, address))
    finally:
        for each in reversed(open_commands):
            each.__exit__(None, None, None)


def test_engines_that_are_not_installed_are_one_sentence(served: Path, tmp_path: Path) -> None:
    for command in ("prfaas demo --engines vllm", "prfaas up laptop"):
        done = subprocess.run(
            [served / "prfaas", *command.split()[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "not installed here: pip install 'prfaas[vllm]', without a GPU" in done.stderr
        assert len(done.stderr.splitlines()) <= 2

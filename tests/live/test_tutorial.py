"""docs/tutorial.md with real vLLM servers: its commands as printed, at ports that are free.

The checkpoint is the demo's, as in the tutorial; waits end with what the page says to wait for.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prfaas.engines.checkpoint import make_checkpoint
from tests.engines.vllm_modules import needing_vllm
from tests.ports import free_port

needing_vllm("vllm")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]
PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
BASH = shutil.which("bash") or "bash"
PORTS = ("8000", "7101", "7181", "8101", "7102", "7182", "8102")


def with_ports() -> str:
    """The page, with a free port for each."""
    text = PAGE
    for port in PORTS:
        text = re.sub(rf"\b{port}\b", str(free_port()), text)
    return text


class Reader:
    """Runs commands of the page in a folder of its own."""

    def __init__(self, text: str, folder: Path) -> None:
        self.text, self.folder = text, folder
        self.lines = re.findall(r"^ {4}(.*)$", text, re.MULTILINE)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        [url] = set(re.findall(r"curl '(http://127\.0\.0\.1:\d+)/health", text))
        self.env = os.environ | {"PATH": path, "PRFAAS_URL": url, "CUDA_VISIBLE_DEVICES": ""}

    def line(self, begin: str, index: int = 0) -> str:
        """A command by its first words."""
        found: str = [line for line in self.lines if line.startswith(begin)][index]
        return found

    def run(self, command: str) -> str:
        """Output of a command that has to succeed."""
        words = [BASH, "-c", command]
        done = subprocess.run(
            words, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def wait(self, command: str, words: str) -> str:
        """Repeat a command until its output has the words; the test's timeout is the limit."""
        while words not in (answer := self.run(f"sleep 1; {command} 2>&1 || true")):
            pass
        return answer

    @contextmanager
    def started(self, command: str) -> Iterator[subprocess.Popen[bytes]]:
        """A command in a terminal of its own, ended by Ctrl-C."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [BASH, "-c", command],
                cwd=self.folder,
                env=self.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C in the terminal of a process, and its end."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        process.wait()


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    text = with_ports()
    reader = Reader(text, tmp_path)
    make_checkpoint(tmp_path / "model")
    for name, kind in (("tutorial.toml", "toml"), ("ask.py", "python")):
        [block] = re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(block)
    assert "full attention" in reader.run(reader.line("prfaas model"))
    reader.run(reader.line("prfaas identity"))
    assert "tutorial.toml: ok" in reader.run(reader.line("prfaas check"))
    first = text.index("    export PYTHONHASHSEED")
    servers = re.findall(r"^ {4}(.*)$", text[first : text.index("## 6.")], re.MULTILINE)
    *define, remote, local = servers
    pools = [reader.line("prfaas pool tutorial.toml", index) for index in (0, 1)]
    ask = [line for line in reader.lines if line.startswith("python ask.py")]
    health = reader.line("curl")
    with (
        reader.started(pools[1]),
        reader.started("\n".join([*define, remote])),
        reader.started("\n".join([*define, local])),
        reader.started(pools[0]) as pool,
        reader.started(reader.line("prfaas gateway")),
    ):
        reader.wait(health, '"ready"')
        assert "below_threshold" in reader.run(ask[0])
        assert "remote above_threshold" in reader.run(ask[1])
        assert "local below_threshold" in reader.run(ask[2])
        end(pool)
        assert " local " in reader.wait(ask[3], " local ")
        assert "NOT HEARD" in reader.wait(reader.line("prfaas ctl status"), "NOT HEARD")
        with reader.started(pools[0]):
            reader.wait(health, '"ready"')
            assert "remote above_threshold" in reader.run("python ask.py again 1000")

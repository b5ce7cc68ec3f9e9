"""Commands run as the shell would run them, and the file that most of them read."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prfaas.cli.main import main
from tests.ports import free_port

from .tiny_parts import Make, maker

EXAMPLES = Path(__file__).parents[2] / "examples"
LAPTOP = (EXAMPLES / "laptop.toml").read_text()

Outcome = tuple[int, str, str]
Prfaas = Callable[..., Outcome]


@pytest.fixture
def prfaas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Prfaas:
    """Run the command as the shell would: exit code, output, errors."""

    def run(*args: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        output = capsys.readouterr()
        return caught.value.code, output.out, output.err

    return run


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes tiny parts."""
    return maker(tmp_path)


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The laptop example in a place of its own, its gateway at a free port."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "laptop.toml"
    path.write_text(LAPTOP.replace("127.0.0.1:8000", f"127.0.0.1:{free_port()}"))
    return path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def one_line(outcome: Outcome) -> str:
    """The line of a mistake; exit code 2, and nothing but that line."""
    code, _, errors = outcome
    assert code == 2
    (line,) = errors.splitlines()
    assert line.startswith("prfaas: ")
    return line


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `prfaas` with its output in a file."""
    processes: list[subprocess.Popen[str]] = []

    def run(*args: object) -> subprocess.Popen[str]:
        with (tmp_path / "output").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "prfaas", *map(str, args)],
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        processes.append(process)
        return process

    yield run
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(30)
        process.kill()
        process.wait()

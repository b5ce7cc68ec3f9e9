"""Commands in the documentation: each exists with its options, and those that need nothing run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from prfaas.cli.main import cli
from prfaas.config.load import load_deployment

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *(
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.name not in ("cli.md", "deployment-file.md", "scenario-file.md")
    ),
]
_FENCE = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^(?: {4}|\t)(.*)$", re.MULTILINE)
_SPAN = re.compile(r"`(prfaas [^`]+)`")
_COMMAND = re.compile(r"^\s*(?:\$ |nohup |sudo )?(?:\.venv/bin/)?(prfaas .*)$")
_END = re.compile(r"\s{2,}|\s+#|\s[|>;&]|;$")

RUN = [
    "prfaas plan examples/plan/paper-case-study.toml",
    "prfaas model llama_3_3_70b --gpus 2 --efficiency 0.43",
    "prfaas simulate examples/sim/breaker.toml",
    "prfaas identity gateway pd-pool prfaas-pool --directory identities",
    "prfaas tenant key",
]
"""Commands of the documentation that need neither a deployment nor another host."""


def commands_of(text: str) -> Iterator[str]:
    """Lines that begin with `prfaas`, and spans of code, without what follows a command."""
    blocks = [*_FENCE.findall(text), "\n".join(_INDENTED.findall(_FENCE.sub("", text)))]
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            if found := _COMMAND.match(re.sub(r"(?<=\S) +(?=--)", " ", line)):
                yield _END.split(found[1])[0].strip()
    for span in _SPAN.findall(_FENCE.sub("", text).replace("\n", " ")):
        yield _END.split(re.sub(r" +", " ", span))[0].strip()


def everywhere() -> dict[str, str]:
    """All commands, and a page of each."""
    return {
        command: page.relative_to(ROOT).as_posix()
        for page in PAGES
        for command in commands_of(page.read_text())
    }


def parse(command: str) -> None:
    """click.ClickException if it is no command, or has an option that does not exist."""
    words = shlex.split(command)[1:]
    node: click.Command = cli
    context = click.Context(cli, info_name="prfaas")
    while isinstance(node, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        found = node.get_command(context, name)
        if found is None:
            raise click.UsageError(f"no such command: {name}")
        node, context = found, click.Context(found, parent=context, info_name=name)
    words = [word for word in words if word not in ("...", "…")]
    try:
        node.make_parser(context).parse_args(args=words)
    except click.BadOptionUsage:
        return  # prose names an option without its value


def test_every_command_of_the_documentation_is_one() -> None:
    found, wrong = everywhere(), {}
    assert len(found) > 120
    for command, page in found.items():
        try:
            parse(command)
        except (click.ClickException, ValueError) as error:
            wrong[command] = f"{page}: {error}"
    assert wrong == {}


def test_a_command_that_is_none_is_found() -> None:
    text = "`prfaas ctl trheshold`\n\n    prfaas plan FILE --emitt > out.toml    # no\n"
    for command in commands_of(text):
        with pytest.raises(click.ClickException):
            parse(command)


@pytest.mark.parametrize("command", RUN)
def test_commands_run_as_printed(command: str, tmp_path: Path) -> None:
    assert command in everywhere(), "the documentation has another command"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr


def test_the_deployment_file_of_the_tutorial_is_one(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text()
    [file] = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    path = tmp_path / "tutorial.toml"
    path.write_text(file)
    deployment = load_deployment(path)
    ports = re.findall(r"127\.0\.0\.1:(\d+)", file)
    assert len(set(ports)) == len(ports)
    for engine, pool in (("prfaas-engine", "prfaas-pool"), ("pd-engine", "pd-pool")):
        [port] = re.findall(rf"serve (\d+) {engine} {pool}\.sock", text)
        tables = deployment.clusters["prfaas" if engine == "prfaas-engine" else "pd"]
        assert tables.engines[engine].url == f"http://127.0.0.1:{port}"
        assert str(tables.pools[pool].socket).endswith(f"{pool}.sock")

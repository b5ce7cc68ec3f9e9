"""The page of all commands, written from the commands themselves.

python -m prfaas.cli.reference > docs/cli.md
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from prfaas.cli.main import cli

WIDTH = 100
INTRODUCTION = """# Commands

Every command and option, as printed by `--help`.

| exit code | when |
|---|---|
| 0 | done, or stopped in good order: a command that runs until it is stopped, see below |
| 1 | a part failed; `demo` found a difference; `ctl parts` found a part that is not ready; \
`plan --confirm` found that the answer does not hold |
| 2 | an operator's mistake, in one line |
| 130, 143 | Ctrl-C or SIGTERM ended a command before it was done |

`up`, `gateway`, `pool`, `engine timing` and `link serve` run until they are stopped: Ctrl-C and
SIGTERM stop them with exit code 0, and so does Ctrl-C for `top` and `ctl decisions --follow`. `up`
and `demo` that are stopped during their start, all other commands, and commands ended by a second
signal exit with 130 or 143.

This page is generated from the commands: `python -m prfaas.cli.reference > docs/cli.md`.
"""


def reference() -> str:
    """The whole page, Markdown."""
    sections = [_section(path, command) for path, command in _commands(cli, "prfaas")]
    return "\n".join([INTRODUCTION, *sections])


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """A command, and those below it."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _commands(below, f"{path} {name}")


def _section(path: str, command: click.Command) -> str:
    context = click.Context(
        command,
        info_name=path,
        max_content_width=WIDTH,
        terminal_width=WIDTH,
        help_option_names=[],
        show_default=True,
    )
    lines = (line.rstrip() for line in command.get_help(context).splitlines())
    return f"## `{path}`\n\n```\n" + "\n".join(lines) + "\n```\n"


if __name__ == "__main__":
    print(reference(), end="")

"""Entry point of the `prfaas` command."""

from __future__ import annotations

import io
import signal
import sys
from importlib import import_module

import click

from prfaas import __version__
from prfaas.cli.common.signals import EXIT_FAILURE, EXIT_MISTAKE, EXIT_SIGNAL
from prfaas.errors import ConfigError, PrfaasError
from prfaas.extras import extra_of, require

COMMANDS = {
    "audit": "operate.audit_command",
    "bill": "operate.bill_command",
    "check": "deploy.up_command",
    "ctl": "operate.ctl_command",
    "demo": "deploy.demo_command",
    "engine": "parts.engine_command",
    "gateway": "parts.gateway_command",
    "identity": "parts.identity_command",
    "init": "deploy.init_command",
    "link": "operate.link_command",
    "model": "plan.plan_command",
    "plan": "plan.plan_command",
    "pool": "parts.pool_command",
    "profile": "plan.plan_command",
    "proxy": "parts.proxy_command",
    "quality": "operate.quality_command",
    "ray": "ray_site.command",
    "simulate": "plan.simulate_command",
    "tenant": "parts.identity_command",
    "top": "operate.top_command",
    "trace": "trace.command",
    "up": "deploy.up_command",
}
"""Module of each command."""
NEEDED = {
    "demo": "gateway",
    "gateway": "gateway",
    "model": "plan",
    "plan": "plan",
    "profile": "plan",
    "proxy": "gateway",
    "simulate": "plan",
    "trace": "plan",
}
"""Extra of each command that does nothing without one."""


class LazyGroup(click.Group):
    """Imports a command when it is asked for: a pool node keeps no planner in its memory."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"prfaas.cli.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of a call, unless all it would do is fail for a package; NoSuchCommand, with
        similar names, if there is none."""
        try:
            name, command, rest = super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            raise click.NoSuchCommand(error.command_name, possibilities=COMMANDS, ctx=ctx) from None
        if name in NEEDED and not {"-h", "--help"}.intersection(rest):
            require(f"`prfaas {name}`", NEEDED[name])
        return name, command, rest


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(__version__)
def cli() -> None:
    """Prefill-as-a-Service: prefill long prompts in a remote cluster, decode locally.

    \b
    Examples:
      prfaas demo                        two sites on this machine, with sample traffic
      prfaas init two-sites              write a commented deployment file here
      prfaas up examples/laptop.toml     run a deployment until stopped
      prfaas check examples/laptop.toml  validate a file
      prfaas link test A B --file F.toml measure the path from pool A to pool B
      prfaas ctl explain REQUEST_ID      the reason for a request's path
      prfaas top                         the state of a gateway, live
      prfaas simulate examples/sim/link-cut.toml   simulate a cut link
      prfaas trace show TRACE.csv        requests, rate, bursts and lengths of a recorded workload
    """


def main() -> None:
    """Run the command; an error is one line, with exit code 2 for an operator's mistake, else 1.

    Ctrl-C ends with 130 where a command was not done, and without a line. Long-running commands
    that Ctrl-C or SIGTERM stop in good order end with 0 (`prfaas.cli.common.signals`). Characters
    that the encoding of the output lacks are "?".
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    try:
        sys.exit(cli(standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(EXIT_SIGNAL + signal.SIGINT)
    except ModuleNotFoundError as error:
        if (extra := extra_of(error.name or "")) is None:
            raise
        needed = f"{error.name}, not installed here: pip install 'prfaas[{extra}]'"
        click.echo(f"prfaas: this needs {needed}", err=True)
        sys.exit(EXIT_MISTAKE)
    except PrfaasError as error:
        click.echo(f"prfaas: {error}", err=True)
        sys.exit(EXIT_MISTAKE if isinstance(error, ConfigError) else EXIT_FAILURE)

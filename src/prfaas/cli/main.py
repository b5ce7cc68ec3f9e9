"""Entry point of the `prfaas` command."""

from __future__ import annotations

import sys

import click

from prfaas import __version__
from prfaas.cli.demo import demo
from prfaas.cli.deploy import check, up
from prfaas.cli.link import link
from prfaas.cli.parts import gateway, identity, pool
from prfaas.cli.plan import model, plan, profile
from prfaas.cli.simulate import simulate
from prfaas.errors import PrfaasError

EXIT_MISTAKE = 2
"""Exit code when the operator has to change something."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def cli() -> None:
    """Prefill-as-a-Service: prefill long prompts in another cluster, decode at home.

    \b
    Examples:
      prfaas demo                        two clusters on this machine, twelve requests
      prfaas up examples/laptop.toml     run a deployment until stopped
      prfaas check examples/laptop.toml  is this file right?
      prfaas link test A B --file F.toml what does the path from pool A to pool B carry?
      prfaas simulate examples/sim/link-cut.toml   what if the link is cut?
    """


for command in (check, demo, gateway, identity, link, model, plan, pool, profile, simulate, up):
    cli.add_command(command)


def main() -> None:
    """Run the command; a mistake of the operator is one clear line and exit code 2."""
    try:
        cli()
    except PrfaasError as error:
        click.echo(f"prfaas: {error}", err=True)
        sys.exit(EXIT_MISTAKE)

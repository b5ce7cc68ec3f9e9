"""`prfaas proxy`: the proxy in front of engines that several sites share."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from prfaas.cli.common.options import ADDRESS, FOLDER, PATH, logs
from prfaas.cli.common.signals import run_until_stopped


@click.command()
@click.argument("contracts", type=PATH)
@click.option("--name", required=True, help="Name of the proxy, as in its certificate.")
@click.option(
    "--identities", type=FOLDER, required=True, help="Directory with ca.pem, NAME.pem and NAME.key."
)
@click.option(
    "--admin",
    type=ADDRESS,
    default="127.0.0.1:7181",
    help="Address of /health and /metrics, plain HTTP; use a local address.",
)
@click.option(
    "--audit",
    type=PATH,
    help="Folder of the audit log, with the usage of each site; none if absent.",
)
@logs
def proxy(
    *, contracts: Path, name: str, identities: Path, admin: tuple[str, int], audit: Path | None
) -> None:
    """Share the engines of a PrfaaS cluster between sites, as CONTRACTS has it.

    Gateways of the sites reach each engine at its `listen` address in CONTRACTS. Prompts wait here,
    so that each site gets its share. Changes of the contracts hold within seconds; those of the
    engines need a restart.

    \b
    Examples:
      prfaas proxy examples/shared-service/contracts.toml --name proxy --identities /etc/prfaas
    """
    from prfaas.audit.settings import AuditSettings
    from prfaas.proxy.proxy import ProxySettings, serve
    from prfaas.wire.identity import identity_in

    log = AuditSettings(audit, audit) if audit is not None else None
    settings = ProxySettings(name, contracts, identity_in(identities, name), admin, log)
    run_until_stopped(partial(serve, settings))

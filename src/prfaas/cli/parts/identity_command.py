"""`prfaas identity` and `prfaas tenant`: certificates of parts, keys of tenants and operators."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from prfaas.cli.common.options import PATH
from prfaas.core.transfer.residency import Regions
from prfaas.errors import ConfigError
from prfaas.wire.certificates import names_in, reissue, renew_due
from prfaas.wire.identity import check_name, identity_in, make_authority, make_identity


@click.command()
@click.argument("names", nargs=-1)
@click.option(
    "--directory",
    type=PATH,
    required=True,
    help="Directory of the files; a missing authority is created there.",
)
@click.option("--address", "addresses", multiple=True, help="Host name or IP for https clients.")
@click.option(
    "--site", default="", show_default=False, help="Site and kind of the parts, such as pd/pool."
)
@click.option(
    "--region",
    "regions",
    multiple=True,
    help="Region of a pool's blocks, or for which a gateway may sign; several times if needed.",
)
@click.option("--renew", is_flag=True, help="Renew existing identities.")
def identity(
    names: tuple[str, ...],
    directory: Path,
    addresses: tuple[str, ...],
    site: str,
    regions: tuple[str, ...],
    *,
    renew: bool,
) -> None:
    """Create identities: a certificate and a key for each NAME, signed by one authority.

    Copy NAME.pem, NAME.key and ca.pem to the host of each part; keep ca.key on this machine.
    Existing identities and their addresses are not changed.

    With --site, an allow-list can admit a part by its site instead of its name: --source and
    --gateway of `prfaas pool` take patterns such as site/prfaas/pool/*.

    With --region, pool nodes and gateways have the regions that a deployment with regions demands
    (docs/residency.md); --renew NAMES with --region replaces them.

    Identities are valid for 90 days, the authority for five years. --renew renews the identities of
    NAMES with the same addresses; without NAMES, all in the directory that end within 30 days. Run
    that daily on the machine with ca.key.

    \b
    Examples:
      prfaas identity gateway pd-pool prfaas-pool --directory identities
      prfaas identity prfaas-engine --address prefill.example.net --directory identities
      prfaas identity pd-a pd-b --site pd/pool --directory identities
      prfaas identity pd-pool gateway --region eu --directory identities
      prfaas identity --renew --directory identities
    """
    if renew:
        _renew(names, directory, (*addresses, *filter(None, [site])), frozenset(regions))
        return
    if not names:
        raise click.UsageError("Missing argument 'NAMES...'.")
    for name in names:
        check_name(name)
    try:
        make_authority(directory)
        for name in names:
            before = identity_in(directory, name)
            kept = before.certificate.exists() and before.key.exists()
            made = make_identity(directory, name, list(addresses), site, regions)
            click.echo(f"{made.certificate}\n{made.key}")
            if kept:
                click.echo(
                    f"{name} has an identity, which is not changed; for a new one, or other "
                    "addresses, remove both files first",
                    err=True,
                )
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from None


def _renew(
    names: tuple[str, ...], directory: Path, addresses: tuple[str, ...], regions: Regions
) -> None:
    """Renew identities, and print the files that are new."""
    if addresses:
        raise click.UsageError(
            "--renew keeps the addresses that an identity has; leave --address and --site."
        )
    if regions and not names:
        raise click.UsageError("--renew with --region needs NAMES.")
    for name in names:
        check_name(name)
    try:
        if names:
            renewed = [reissue(directory, name, regions or None) for name in names]
        else:
            renewed = renew_due(directory, names_in(directory), datetime.datetime.now(datetime.UTC))
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from None
    for each in renewed:
        click.echo(f"{each.certificate}\n{each.key}")


@click.group()
def tenant() -> None:
    """Keys for tenants, and for operators.

    \b
    Examples:
      prfaas tenant key      a new key, and the line for the deployment file
    """


@tenant.command()
def key() -> None:
    """Create an API key: print it once, and its hash for the deployment file.

    Give the key to the tenant; it is not stored. The hash goes into `keys` of [tenants.NAME],
    or into `keys` of [operators.NAME] or `operator_keys` of [gateway].

    \b
    Examples:
      prfaas tenant key
    """
    from prfaas.gateway.tenancy.tenants import key_hash, new_key

    made = new_key()
    click.echo(made)
    click.echo(f'keys = ["{key_hash(made)}"]')

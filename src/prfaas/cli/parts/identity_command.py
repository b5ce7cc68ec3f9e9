"""`prfaas identity`: certificates and keys for the parts of a deployment."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from prfaas.errors import ConfigError
from prfaas.wire.identity import check_name, identity_in, make_authority, make_identity
from prfaas.wire.reissue import names_in, reissue, renew_due


@click.command()
@click.argument("names", nargs=-1)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    required=True,
    help="Where the files go; the authority is made there if it is missing.",
)
@click.option("--address", "addresses", multiple=True, help="Host name or IP for https clients.")
@click.option("--renew", is_flag=True, help="Make identities anew that are there.")
def identity(
    names: tuple[str, ...], directory: Path, addresses: tuple[str, ...], *, renew: bool
) -> None:
    """Make identities: a certificate and a key for each NAME, signed by one authority.

    Carry NAME.pem, NAME.key and ca.pem to the host of each part; keep ca.key where you made it.
    An identity that is there already is kept as it is, its addresses included.

    Identities hold for 90 days, the authority for five years. With --renew those of NAMES are made
    anew, with the addresses they have; without NAMES, all in the directory that end within 30 days:
    run that daily where ca.key is.

    \b
    Examples:
      prfaas identity gateway pd-pool prfaas-pool --directory identities
      prfaas identity prfaas-engine --address prefill.example.net --directory identities
      prfaas identity --renew --directory identities
    """
    if renew:
        _renew(names, directory, addresses)
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
            made = make_identity(directory, name, list(addresses))
            click.echo(f"{made.certificate}\n{made.key}")
            if kept:
                click.echo(
                    f"{name} had an identity, which is kept as it is; for a new one, or other "
                    "addresses, remove both files first",
                    err=True,
                )
    except OSError as error:
        raise ConfigError(f"{error.filename} can not be written: {error.strerror}") from None


def _renew(names: tuple[str, ...], directory: Path, addresses: tuple[str, ...]) -> None:
    """Renew identities, and print the files that are new."""
    if addresses:
        raise click.UsageError("--renew keeps the addresses that an identity has; leave --address.")
    for name in names:
        check_name(name)
    try:
        if names:
            renewed = [reissue(directory, name) for name in names]
        else:
            renewed = renew_due(directory, names_in(directory), datetime.datetime.now(datetime.UTC))
    except OSError as error:
        raise ConfigError(f"{error.filename} can not be written: {error.strerror}") from None
    for each in renewed:
        click.echo(f"{each.certificate}\n{each.key}")

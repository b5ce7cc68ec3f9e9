"""`prfaas identity`: certificates and keys for the parts of a deployment."""

from __future__ import annotations

from pathlib import Path

import click

from prfaas.errors import ConfigError
from prfaas.wire.identity import check_name, identity_in, make_authority, make_identity


@click.command()
@click.argument("names", nargs=-1, required=True)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    required=True,
    help="Where the files go; the authority is made there if it is missing.",
)
@click.option("--address", "addresses", multiple=True, help="Host name or IP for https clients.")
def identity(names: tuple[str, ...], directory: Path, addresses: tuple[str, ...]) -> None:
    """Make identities: a certificate and a key for each NAME, signed by one authority.

    Carry NAME.pem, NAME.key and ca.pem to the host of each part; keep ca.key where you made it.
    An identity that is there already is kept as it is, its addresses included.

    \b
    Examples:
      prfaas identity gateway pd-pool prfaas-pool --directory identities
      prfaas identity prfaas-engine --address prefill.example.net --directory identities
    """
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

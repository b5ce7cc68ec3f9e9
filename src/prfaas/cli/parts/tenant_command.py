"""`prfaas tenant`: keys for tenants and operators."""

from __future__ import annotations

import click


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

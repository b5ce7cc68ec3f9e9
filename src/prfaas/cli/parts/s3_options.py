"""Options of `prfaas pool` for the tier in an S3 bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from prfaas.config.clusters import S3Table
from prfaas.config.names import PATTERNS
from prfaas.errors import ConfigError
from prfaas.pool.shared.mooncake.settings import MooncakeSettings
from prfaas.pool.shared.settings import PREFIX, S3Settings, SharedSettings, s3_settings
from prfaas.toml_tables import validated

Command = TypeVar("Command", bound=Callable[..., None])
START = "s3_"
_OPTIONS = [
    ("bucket", "Bucket for blocks that pool nodes of the site share."),
    ("keys", "File of the keys that encrypt what is in the bucket."),
    ("limit", "Limit of what this pool node keeps in the bucket."),
    ("prefix", f"Start of the names of objects; {PREFIX} without FILE."),
    ("endpoint", "URL of the S3 server; AWS if absent."),
    ("region", "Region of the bucket; that of the environment if absent."),
    ("deadline", "Longest time that reads from the bucket may take for a request; 1s if absent."),
    ("object-size", "Size of an object, 4MiB to 64MiB; 16MiB if absent."),
]


def s3_options(command: Command) -> Command:
    """Add the options, which the command gets as one dictionary `s3`."""
    for name, text in reversed(_OPTIONS):
        command = click.option(f"--s3-{name}", START + name.replace("-", "_"), help=text)(command)
    return command


def shared_tier(options: Mapping[str, str], below: SharedSettings | None) -> SharedSettings | None:
    """The tier that options name.

    Args:
        options: Those that were given, by their names.
        below: Settings of the deployment file, which options override.

    Raises:
        ConfigError: They are incomplete or wrong.
    """
    if not options:
        return below
    if isinstance(below, MooncakeSettings):
        raise ConfigError("--s3-...: the cluster has `mooncake`; a cluster has one shared tier")
    table = {} if below is None else _written(below)
    table |= {name.removeprefix(START): value for name, value in options.items()}
    made = validated(S3Table, table, Path("options --s3-..."), words=PATTERNS)
    return s3_settings(made, PREFIX)


def _written(settings: S3Settings) -> dict[str, Any]:
    """Settings as the table of a file has them."""
    found = {key: value for key, value in asdict(settings).items() if value is not None}
    del found["timing"]
    found["limit"] = f"{found.pop('limit_bytes')}B"
    found["object_size"] = f"{found.pop('pack_bytes')}B"
    found["deadline"] = f"{found.pop('deadline_ns') / 10**6}ms"
    return found

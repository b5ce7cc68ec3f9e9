"""The operator's settings of the backend, from `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from prfaas.errors import ConfigError
from prfaas.wire.messages.fields import Name

WAIT_S = 2.0
"""Default time limit of a call: a page is looked up or copied in milliseconds."""
_OF_SGLANG = "backend_name, module_path, class_name, interface_v1, allocator"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the backend.

    Attributes:
        prfaas_pool: The pool node's unix socket.
        prfaas_engine: Name of the engine in the deployment.
        prfaas_wait_s: Time limit of a call, seconds; afterwards its pages are missing.
        prfaas_unproven_pools: Accept models with state or windows besides full attention.
        interface_v1: Has to be set: SGLang copies pages itself otherwise.
    """

    prfaas_pool: Annotated[str, msgspec.Meta(min_length=1)]
    prfaas_engine: Name
    prfaas_wait_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = WAIT_S
    prfaas_unproven_pools: bool = False
    interface_v1: int | bool = 0

    @property
    def pool(self) -> Path:
        """The pool node's unix socket."""
        return Path(self.prfaas_pool)


def read_settings(extra_config: Mapping[str, Any] | None) -> Settings:
    """Return the settings in SGLang's `extra_config`.

    Raises:
        ConfigError: One is missing, unknown or out of its range.
    """
    found = dict(extra_config or {})
    unknown = [name for name in found if name.startswith("prfaas_")]
    unknown = [name for name in unknown if name not in Settings.__struct_fields__]
    try:
        settings = msgspec.convert(found, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--hicache-storage-backend-extra-config: {error}; it needs {_OF_SGLANG}, prfaas_pool "
            "and prfaas_engine (docs/sglang.md)"
        ) from None
    if unknown:
        raise ConfigError(
            f"--hicache-storage-backend-extra-config: there is no {', '.join(sorted(unknown))}; "
            f"there are {', '.join(n for n in Settings.__struct_fields__ if 'prfaas' in n)}"
        )
    if not settings.interface_v1:
        raise ConfigError(
            'add "interface_v1": 1 to --hicache-storage-backend-extra-config: pages are copied '
            "between SGLang's memory and the pool node, and not through arguments"
        )
    return settings

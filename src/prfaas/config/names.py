"""Names, addresses and paths of a deployment file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from prfaas.config.addresses import split_address
from prfaas.config.tenants import KEY_HASH
from prfaas.core.transfer.residency import REGION as DATA_REGION

TRACE_PAGE = r"^https?://[^\s{}]+\{trace_id\}[^\s{}]*$"
COLLECTOR = r"^https?://[^\s]+$"
FilePathText = Annotated[Path, Field(strict=False)]
PART_NAME = r"^[a-z][a-z0-9-]{0,62}$"
HOST_PORT = r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"
BUCKET = r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$"
PREFIX = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}){0,4}$"
REGION = r"^[a-z0-9-]{1,63}$"
PEER_TO_PEER = "P2PHANDSHAKE"
"""Metadata of a Mooncake Store without a server: clients exchange it themselves."""
METADATA = rf"^({PEER_TO_PEER}|(https?|etcd|redis)://[A-Za-z0-9._:/\[\]-]{{1,200}})$"
DEVICES = r"^([A-Za-z0-9_.-]{1,63}(,[A-Za-z0-9_.-]{1,63}){0,15})?$"
URL = r"^https?://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?$"
ZMQ = r"^(tcp://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}|ipc://[^@\s][^\s]{0,99})$"
PATTERNS = {
    COLLECTOR: 'http:// or https:// with host and path, as in "http://127.0.0.1:4318/v1/traces"',
    TRACE_PAGE: 'http:// or https:// with {trace_id}, as in "https://jaeger.example/trace/{trace_id}"',
    ZMQ: 'tcp://HOST:PORT or ipc://PATH, as in "ipc:///run/prfaas/prefill-events"',
    PART_NAME: "a name: lower-case letters, digits, dashes; a letter first; 63 characters at most",
    BUCKET: "the name of a bucket: 3 to 63 lower-case letters, digits, dots and dashes",
    PREFIX: 'parts of letters, digits, dots, dashes and underscores, as in "kv/pd"',
    REGION: 'a region, as in "eu-central-1"',
    DATA_REGION: 'lower-case letters, digits and dashes, 32 characters at most, as in "eu"',
    METADATA: f'"{PEER_TO_PEER}", or http://, etcd:// or redis:// with an address',
    DEVICES: 'names of devices, separated by commas, as in "mlx5_0,mlx5_1"',
    HOST_PORT: 'HOST:PORT, as in "127.0.0.1:8000"',
    KEY_HASH: '"sha256:" and 64 hex digits, as `prfaas tenant key` prints it',
    URL: 'http:// or https:// with a host and no path, as in "https://prefill.example.net:8100"',
}
"""Description of each kind of fault for the operator."""

PartName = Annotated[str, StringConstraints(pattern=PART_NAME)]
RegionName = Annotated[str, StringConstraints(pattern=DATA_REGION)]
_WITH_PORT = re.compile(r":[0-9]+$")


def _address(text: str) -> str:
    split_address(text)
    return text


def _url(text: str) -> str:
    place = text.partition("://")[2]
    split_address(place if _WITH_PORT.search(place) else f"{place}:80")
    return text


HostPort = Annotated[str, StringConstraints(pattern=HOST_PORT), AfterValidator(_address)]
Url = Annotated[str, StringConstraints(pattern=URL), AfterValidator(_url)]

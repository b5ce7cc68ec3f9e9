"""A part of a site on one host: its settings there, and its process.

Every host reads the deployment file itself: only paths and addresses travel through Ray.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.cli.deploy.topology import Topology, parts
from prfaas.cli.host.processes import ProcessPart, open_private
from prfaas.config.addresses import join_address, split_address
from prfaas.config.clusters import EngineTable
from prfaas.config.deployment import Deployment
from prfaas.config.load import load_deployment
from prfaas.membership.entries import engine_member
from prfaas.toml_tables import read_toml

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Members:
    """Member files of a site: its parts that run."""

    version: int
    """Changes with them; at least 1."""
    folder: Path
    """Their directory on every host."""
    files: dict[str, str]
    """Text by name."""


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part to start."""

    file: Path
    """The deployment file, at the same path on every host."""
    name: str
    """Name of the part in it."""
    run: str
    """Identifier of this start of the site."""
    ports: Mapping[str, int]
    """Port of each part by name, and of health and metrics of pool nodes by `admin NAME`."""

    def part(self, host: str) -> ProcessPart:
        """The part, with its command on this host; writes the file that it reads.

        Args:
            host: Address of this host.
        """
        file = _write_own_file(load_deployment(self.file), self.file, self.name)
        deployment = load_deployment(file)
        pools, admins = dict[str, Address](), dict[str, Address]()
        for name, pool in deployment.pools.items():
            pools[name] = split_address(pool.address) if pool.address else (host, self.ports[name])
            at = split_address(pool.admin)[0] if pool.admin else "127.0.0.1"
            admins[name] = (at, self.ports[f"admin {name}"])
        url = f"http://{join_address((host, self.ports[self.name]))}"
        engines = {self.name: url} if self.name in engines_of(deployment) else {}
        listen = deployment.gateway.listen
        gateway = split_address(listen)[0] if listen else host, self.ports[deployment.gateway.name]
        if self.name == deployment.gateway.name:
            pools, engines = {}, {}
        topology = Topology(deployment, file, None, self.run, pools, engines, gateway, admins)
        found = next(part for stage in parts(topology) for part in stage if part.name == self.name)
        found.whole_url = ""  # the members of a gateway join it as they become ready
        return found


def engines_of(deployment: Deployment) -> dict[str, EngineTable]:
    """Engines of all clusters by name."""
    return {n: e for table in deployment.clusters.values() for n, e in table.engines.items()}


def members_folder(deployment: Deployment) -> Path:
    """Directory of the member files on every host."""
    return deployment.state / "ray" / "members"


def member_files(deployment: Deployment, places: Mapping[str, Address]) -> dict[str, str]:
    """Text of the member files by name.

    Args:
        places: Addresses of the pool nodes and engines that are members.
    """
    found: dict[str, dict[str, Any]] = {}
    for cluster, table in deployment.clusters.items():
        for name in table.pools.keys() & places.keys():
            found[name] = {
                "kind": "pool",
                "cluster": cluster,
                "address": join_address(places[name]),
            }
        for name in table.engines.keys() & places.keys():
            engine, url = table.engines[name], f"http://{join_address(places[name])}"
            settings: dict[str, Any] = dict(engine_member(name, cluster, url, engine).settings)
            if "sequences_max" in settings:
                settings["sequences_max"] = int(settings["sequences_max"])
            found[name] = {
                "kind": "engine", "cluster": cluster, "url": url, "pool": engine.pool,
                "role": engine.role.value, **settings,
            }  # fmt: skip
    return {f"{name}.toml": toml_text(table) for name, table in found.items()}


def write_members(folder: Path, files: Mapping[str, str]) -> None:
    """Replace the member files in a directory, each at once."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, text in files.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            _replace(path, text)
    for path in folder.glob("*.toml"):
        if path.name not in files:
            path.unlink(missing_ok=True)


def _write_own_file(deployment: Deployment, file: Path, name: str) -> Path:
    """The deployment file of one part; all others come from member files."""
    engine = engines_of(deployment).get(name)
    kept = {name} if engine is None else {name, engine.pool}
    tables = read_toml(file)
    for cluster, table in deployment.clusters.items():
        raw = tables["clusters"][cluster]
        raw["engines"] = {
            n: t for n, t in raw.get("engines", {}).items() if "url" in t or n in kept
        }
        raw["pools"] = {
            n: t for n, t in raw.get("pools", {}).items() if "address" in t or n in kept
        }
        if any(engine.role.value != "both" for engine in table.engines.values()):
            raw["has_roles"] = True
    # Only the actors write these files, and engines on other hosts have no identities.
    membership = tables.setdefault("membership", {})
    membership |= {"folder": str(members_folder(deployment)), "identity": "none"}
    path = deployment.state / "ray" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _replace(path, toml_text(tables))
    return path


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with open(new, "w", opener=open_private, encoding="utf-8") as file:
        file.write(text)
    new.replace(path)


def toml_text(tables: Mapping[str, Any]) -> str:
    """TOML of nested tables, all but the outermost inline."""
    return "".join(f"{json.dumps(key)} = {_value(each)}\n" for key, each in tables.items())


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(each) for each in value) + "]"
    return json.dumps(value, ensure_ascii=False)

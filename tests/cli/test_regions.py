"""Regions in the commands: identities, `prfaas check`, and what parts are started with."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from prfaas.cli.deploy.deployment_warnings import residency_lines
from prfaas.cli.deploy.topology import identity_problems, prepare_identities
from prfaas.cli.parts.pool_settings import settings_in
from prfaas.config.load import load_deployment
from prfaas.wire.allow_list import regions_of
from prfaas.wire.identity import identity_in

from .conftest import Prfaas
from .running_parts import DEPLOYMENT

KEY = "sha256:" + "0" * 64
FAR = """
[clusters.far]
role = "prfaas"
region = "us"
[clusters.far.pools.far-pool]
disk = "disk"
disk_limit = "1GiB"
disk_region = "ca"
[clusters.far.engines.far-engine]
pool = "far-pool"
"""
TENANTS = f"""
[tenants.clinic]
keys = ["{KEY}"]
regions = ["eu"]
[tenants.shop]
keys = ["{KEY[:-1]}1"]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "deployment.toml"
    local = DEPLOYMENT.replace('role = "pd"', 'role = "pd"\nregion = "eu"')
    assert local != DEPLOYMENT
    path.write_text(local + FAR + TENANTS)
    return path


def test_identities_name_regions_and_a_renewal_can_change_them(
    prfaas: Prfaas, tmp_path: Path
) -> None:
    where = ("--directory", tmp_path)
    code, _, _ = prfaas("identity", "pd-pool", "--region", "eu", "--address", "a.example", *where)
    certificate = identity_in(tmp_path, "pd-pool").certificate
    assert code == 0
    assert regions_of(certificate) == {"eu"}
    assert prfaas("identity", "pd-pool", "--renew", *where)[0] == 0
    assert regions_of(certificate) == {"eu"}
    assert (
        prfaas("identity", "pd-pool", "--renew", "--region", "us", "--region", "ca", *where)[0] == 0
    )
    assert regions_of(certificate) == {"us", "ca"}
    assert b"a.example" in _der(certificate)


def _der(certificate: Path) -> bytes:
    return x509.load_pem_x509_certificate(certificate.read_bytes()).public_bytes(Encoding.DER)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pd-pool", "--region", "Europe"), "'Europe' is no region"),
        (("--renew", "--region", "eu"), "--renew with --region needs NAMES"),
        (("pd-pool", *(f"--region=r{n}" for n in range(17))), "17 regions; a certificate has at"),
    ],
)
def test_other_regions_are_refused(
    prfaas: Prfaas, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    code, _, errors = prfaas("identity", *arguments, "--directory", tmp_path)
    assert code == 2
    assert words in errors


def test_check_shows_regions_and_who_relies_on_the_gateways(
    prfaas: Prfaas, file: Path, laptop: Path
) -> None:
    code, output, _ = prfaas("check", laptop)
    assert (code, "residency" in output) == (0, False)
    shown = laptop.read_text()
    for role, region in (("pd", "eu"), ("prfaas", "us")):
        assert shown.count(f'role = "{role}"') == 1
        shown = shown.replace(f'role = "{role}"', f'role = "{role}"\nregion = "{region}"')
    laptop.write_text(shown + TENANTS)
    code, output, errors = prfaas("check", laptop)
    assert code == 0, errors
    assert "residency: tenant clinic in eu; not offloaded to" in output
    assert "blocks of clinic do not go to us" in output
    [line, *_] = residency_lines(load_deployment(file))
    assert line == "residency: blocks of pd in eu; far in ca, us"


def test_check_refuses_a_tenant_that_nothing_may_serve(prfaas: Prfaas, file: Path) -> None:
    file.write_text(file.read_text().replace('regions = ["eu"]', 'regions = ["us"]'))
    code, _, errors = prfaas("check", file)
    assert code == 2
    assert "tenants.clinic.regions allows us: it can be served nowhere" in errors


def test_made_identities_follow_the_regions_of_the_file(file: Path) -> None:
    plain = file.with_name("plain.toml")
    plain.write_text(DEPLOYMENT)
    prepare_identities(load_deployment(plain))
    deployment = load_deployment(file)
    directory = deployment.security.identities
    pool = identity_in(directory, "pd-pool").certificate
    assert regions_of(pool) == set()
    prepare_identities(deployment)
    assert regions_of(pool) == {"eu"}
    assert regions_of(identity_in(directory, "far-pool").certificate) == {"us", "ca"}
    gateway = identity_in(directory, deployment.gateway.name).certificate
    assert regions_of(gateway) == {"eu", "us", "ca"}
    before = pool.read_bytes()
    prepare_identities(deployment)
    assert pool.read_bytes() == before


def test_a_certificate_of_other_regions_is_named_with_what_mends_it(file: Path) -> None:
    prepare_identities(load_deployment(file))
    file.write_text(
        file.read_text()
        .replace("generate = true", "generate = false")
        .replace('disk_region = "ca"', "")
    )
    [gateway, pool] = identity_problems(load_deployment(file))
    assert "the deployment file puts far-pool into the regions us" in pool
    assert "`prfaas identity far-pool --renew --region us`" in pool
    assert "--region eu --region us`" in gateway


def test_pool_nodes_are_started_with_their_footprint(file: Path) -> None:
    deployment = load_deployment(file)
    far, local = (settings_in(deployment, name, file) for name in ("far-pool", "pd-pool"))
    assert (far["regions"], far["needs_grant"]) == ({"us", "ca"}, True)
    assert (local["regions"], local["needs_grant"]) == ({"eu"}, False)


def test_hosts_of_a_shared_tier_have_one_footprint_which_is_in_its_prefix(file: Path) -> None:
    store = '[clusters.far.mooncake]\nmaster = "127.0.0.1:1"\nkeys = "k"\ndata_region = "eu"\n'
    other = '[clusters.far.pools.other]\nregion = "us"\n'
    file.write_text(file.read_text() + store + other)
    deployment = load_deployment(file)
    for name in ("far-pool", "other"):
        found = settings_in(deployment, name, file)
        assert found["regions"] == {"us", "ca", "eu"}
        assert found["shared"].prefix == "far/in-ca-eu-us"

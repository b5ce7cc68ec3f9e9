"""Identities made anew before they end."""

import datetime
import stat
from pathlib import Path

import pytest
from cryptography import x509

from prfaas.errors import ConfigError
from prfaas.wire.certificates import SOON, ends_at, faults, names_in, reissue, renew_due
from prfaas.wire.identity import (
    AUTHORITY_DAYS,
    VALID_DAYS,
    identity_in,
    make_authority,
    make_identity,
)

DAY = datetime.timedelta(days=1)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    make_authority(tmp_path)
    make_identity(tmp_path, "gateway")
    make_identity(tmp_path, "prfaas-engine", ["prefill.example.net", "192.0.2.1"])
    return tmp_path


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def days(path: Path) -> float:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    return (certificate.not_valid_after_utc - now()) / DAY


def test_an_identity_ends_long_before_its_authority(local: Path) -> None:
    identity = identity_in(local, "gateway")
    assert VALID_DAYS - 1 < days(identity.certificate) <= VALID_DAYS <= 90
    assert AUTHORITY_DAYS - 1 < days(identity.authority) <= AUTHORITY_DAYS
    assert days(identity.authority) > 10 * days(identity.certificate)


def test_a_renewed_identity_has_a_new_key_its_addresses_and_its_mode(local: Path) -> None:
    before = identity_in(local, "prfaas-engine")
    old_key, old = before.key.read_bytes(), names(before.certificate)
    after = reissue(local, "prfaas-engine")
    assert after.key.read_bytes() != old_key
    assert names(after.certificate) == old
    assert "192.0.2.1" in old
    assert "prefill.example.net" in old
    assert stat.S_IMODE(after.key.stat().st_mode) == 0o600
    assert list(faults(after, "prfaas-engine", now())) == []
    assert sorted(path.name for path in local.iterdir()) == [
        *("ca.key", "ca.pem", "gateway.key", "gateway.pem"),
        *("prfaas-engine.key", "prfaas-engine.pem"),
    ]


def names(certificate: Path) -> list[str]:
    leaf = x509.load_pem_x509_certificate(certificate.read_bytes())
    found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(each.value) for each in found]


def test_only_what_ends_soon_is_renewed(local: Path) -> None:
    known = names_in(local)
    assert known == ["gateway", "prfaas-engine"]
    later = now() + datetime.timedelta(days=VALID_DAYS) - SOON
    assert renew_due(local, known, later - DAY) == []
    reissued = renew_due(local, known, later + DAY)
    assert [each.certificate.stem for each in reissued] == known
    end = ends_at(identity_in(local, "gateway"))
    assert end is not None
    assert end > now() + datetime.timedelta(days=VALID_DAYS) - DAY


@pytest.mark.parametrize("missing", ["ca.key", "gateway.pem"])
def test_what_can_not_be_renewed_is_left_as_it_is(local: Path, missing: str) -> None:
    (local / missing).unlink()
    before = {path.name: path.read_bytes() for path in local.iterdir()}
    with pytest.raises(ConfigError):
        reissue(local, "gateway")
    assert {path.name: path.read_bytes() for path in local.iterdir()} == before


def test_a_certificate_of_another_name_is_not_renewed_as_ours(local: Path) -> None:
    other, mine = identity_in(local, "prfaas-engine"), identity_in(local, "gateway")
    mine.certificate.write_bytes(other.certificate.read_bytes())
    with pytest.raises(ConfigError, match="is not of gateway"):
        reissue(local, "gateway")

"""The audit log of a gateway: who changed what, and who was refused."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prfaas.audit.reading import logs_of, records, verify
from prfaas.audit.settings import AuditSettings
from prfaas.config.deployment import Deployment
from prfaas.core.admission.quotas import ADDRESSES_MAX, TRIES_MAX, WINDOW_NS, WrongKeys
from prfaas.core.kv.tenant_salts import salt_of
from prfaas.deployment_secret import deployment_secret
from prfaas.gateway.tenancy.tenants import key_hash, new_key
from tests.gateway.conftest import World, annexes_of, deployment_for, running
from tests.gateway.prompts import LONG
from tests.gateway.tenant_keys import HASHES, KEYS, bearer, tenants

ALICE, BOB = new_key(), new_key()
PATHS = (
    "/control/loops",
    "/control/threshold",
    "/control/engines/spare",
    "/control/purge",
    "/control/prefixes",
)


@pytest.fixture
async def audited(checkpoint: Path, identities: Path, tmp_path: Path) -> AsyncIterator[World]:
    """A gateway with an audit log, two tenants, two named operators and an unnamed key."""
    tables = {
        "audit": {"folder": str(tmp_path / "audit")},
        "tenants": tenants(),
        "operators": {
            "alice": {"keys": [key_hash(ALICE)]},
            "bob": {"keys": [key_hash(BOB)]},
        },
        "gateway": {"operator_keys": [HASHES["operator"]]},
    }
    async with running(checkpoint, identities, tmp_path / "state", **tables) as made:
        yield made


async def change(world: World, key: str, path: str, body: object) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    async with world.http.post(world.url + path, json=body, headers=headers) as response:
        return response.status


def recorded(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = records(logs_of(folder / "audit")["gateway"])
    return [line.fields for line in lines if line.kind == kind]


async def test_a_change_has_the_name_of_the_operators_key(audited: World, tmp_path: Path) -> None:
    for key, path, body in (
        (ALICE, "/control/loops", {"frozen": True}),
        (BOB, "/control/engines/spare", {"drained": True}),
        (KEYS["operator"], "/control/threshold", {"tokens": 4321}),
        (ALICE, "/control/purge", {"source": "prfaas-pool"}),
    ):
        assert await change(audited, key, path, body) == 200
        # It is in the file once it is answered.
        assert recorded(tmp_path, "operator")

    found = recorded(tmp_path, "operator")
    named = [(record["operator"], record["action"], record["what"]) for record in found]
    assert named == [
        ("alice", "freeze", "loops"),
        ("bob", "drain", "engine spare"),
        ("operator", "threshold", "link prfaas-pool:pd-pool"),
        ("alice", "purge", "source prfaas-pool"),
    ]
    assert (found[2]["old"], found[2]["new"]) == (100, 4321)


async def test_a_change_that_is_refused_is_recorded_with_its_operator(
    audited: World, tmp_path: Path
) -> None:
    assert await change(audited, BOB, "/control/engines/nobody", {"drained": True}) == 404

    (record,) = recorded(tmp_path, "refusal")
    assert (record["operator"], record["route"], record["status"]) == (
        "bob",
        "/control/engines/{name}",
        404,
    )


async def test_orders_on_prompts_are_for_operators_and_recorded(
    audited: World, tmp_path: Path
) -> None:
    order = {"request": "unknown-1", "for_s": 60}
    assert await change(audited, KEYS["red"], "/control/prefixes", order) in (401, 403)
    assert await change(audited, new_key(), "/control/prefixes", order) == 401
    assert await change(audited, ALICE, "/control/prefixes", order) == 404
    (record,) = [each for each in recorded(tmp_path, "refusal") if each.get("operator") == "alice"]
    assert (record["route"], record["status"]) == ("/control/prefixes", 404)


async def test_a_wrong_key_is_refused_recorded_and_limited(audited: World, tmp_path: Path) -> None:
    wrong = new_key()
    body = {"frozen": True}
    answers = [await change(audited, wrong, "/control/loops", body) for _ in range(TRIES_MAX + 15)]
    tenants_key = await change(audited, KEYS["red"], "/control/loops", body)
    right = await change(audited, ALICE, "/control/loops", body)
    headers = {"Authorization": f"Bearer {wrong}"}
    async with audited.http.get(f"{audited.url}/metrics", headers=headers) as response:
        assert response.status == 429
        assert 1 <= int(response.headers["Retry-After"]) <= 60
        assert response.headers["X-Prfaas-Reject-Reason"] == "wrong_keys"

    assert answers == [401] * TRIES_MAX + [429] * 15
    assert (tenants_key, right) == (403, 200)
    found = recorded(tmp_path, "refusal")
    assert {(r["reason"], r["status"]) for r in found} >= {
        ("unauthorized", 401),
        ("too_many_wrong_keys", 429),
        ("forbidden", 403),
    }
    assert {record["address"] for record in found} == {"127.0.0.1"}
    assert {record["operator"] for record in found} == {""}


async def test_every_ticket_that_is_signed_is_recorded(audited: World, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": LONG, "max_tokens": 2}
    async with audited.http.post(
        f"{audited.url}/v1/completions", json=body, headers=bearer("red")
    ) as response:
        assert response.status == 200
    assert await change(audited, ALICE, "/control/loops", {"frozen": True}) == 200

    (ticket,) = recorded(tmp_path, "ticket")
    assert (ticket["from"], ticket["to"]) == ("prfaas-pool", "pd-pool")
    assert ticket["bytes_max"] > 0
    assert ticket["tenant_name"] == "red"


async def test_no_prompt_no_key_and_no_salt_is_in_the_log(audited: World, tmp_path: Path) -> None:
    canary = "CANARY-" + "9f31" * 40
    wrong = new_key()
    body = {"model": "tiny", "prompt": canary * 5, "max_tokens": 2}
    headers = bearer("red") | {"X-Request-Id": canary}
    async with audited.http.post(
        f"{audited.url}/v1/completions?{canary}", json=body, headers=headers
    ) as response:
        assert response.status == 200
    await change(audited, wrong, f"/control/engines/{canary}", {"drained": True})
    await change(audited, wrong, f"/{canary}/{wrong}", {})
    await change(audited, ALICE, f"/control/engines/{canary}", {canary: 1})
    await change(audited, ALICE, "/control/purge", {"source": canary[:60]})
    await audited.gateway.close()

    folder = tmp_path / "audit"
    log = b"".join(path.read_bytes() for path in folder.glob("*.jsonl"))
    secret = deployment_secret(tmp_path / "state")
    secrets = [canary, wrong, ALICE, BOB, *KEYS.values(), secret.decode()]
    secrets += [salt_of(secret, name) for name in ("red", "blue")]
    secrets += [key_hash(key).removeprefix("sha256:") for key in (ALICE, BOB, wrong)]
    secrets += (folder / "gateway.key").read_text().splitlines()[1:-1]
    secrets += [base64.b64encode(text.encode()).decode() for text in (canary, wrong)]
    assert recorded(tmp_path, "ticket")
    assert recorded(tmp_path, "refusal")
    assert [text for text in secrets if text.encode() in log] == []
    assert verify(folder, "gateway", logs_of(folder)["gateway"]).is_intact


async def test_without_a_log_that_can_be_written_nothing_is_changed_if_it_is_closed(
    checkpoint: Path, identities: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "audit"
    tables = {"audit": {"folder": str(folder), "on_full": "closed"}}
    async with running(checkpoint, identities, tmp_path / "state", **tables) as world:
        audit = annexes_of(world).audit
        assert audit is not None
        log = audit.log
        monkeypatch.setattr(log, "_is_failing", True)
        for path in PATHS:
            assert await change(world, "", path, {}) == 503
        async with world.http.get(f"{world.url}/control/status") as response:
            assert response.status == 200
            assert not (await response.json())["loops"]["frozen"]
        status, _ = await world.post({"model": "tiny", "prompt": LONG, "max_tokens": 1})
        assert status == 200
        monkeypatch.setattr(log, "_is_failing", False)
        assert await change(world, "", "/control/loops", {"frozen": True}) == 200

    reasons = [record["reason"] for record in recorded(tmp_path, "refusal")]
    assert reasons == ["not_audited"] * len(PATHS)
    assert recorded(tmp_path, "operator")[0]["operator"] == "without_key"


def test_wrong_keys_are_counted_by_address_and_forgotten_after_a_window() -> None:
    limit = WrongKeys()
    first = [limit.wrong("a", 0) for _ in range(TRIES_MAX)]

    assert first == [0] * TRIES_MAX
    assert limit.wrong("a", WINDOW_NS // 2) == 30
    assert limit.wrong("b", WINDOW_NS // 2) == 0
    assert limit.wrong("a", WINDOW_NS) == 0
    for number in range(2 * ADDRESSES_MAX):
        limit.wrong(str(number), WINDOW_NS)
    assert len(limit._counts) <= ADDRESSES_MAX


def deployed(checkpoint: Path, **tables: Any) -> Deployment:
    return deployment_for(checkpoint, checkpoint, checkpoint, **tables)


def test_a_key_has_one_operator_and_a_name_one_owner(checkpoint: Path) -> None:
    alice = {"alice": {"keys": [key_hash(ALICE)]}}
    with pytest.raises(ValueError, match="is given twice"):
        deployed(checkpoint, operators=alice | {"bob": {"keys": [key_hash(ALICE)]}})
    with pytest.raises(ValueError, match="is given twice"):
        deployed(checkpoint, operators=alice, tenants={"red": {"keys": [key_hash(ALICE)]}})
    with pytest.raises(ValueError, match="choose another one"):
        deployed(
            checkpoint,
            operators={"operator": {"keys": [key_hash(ALICE)]}},
            gateway={"operator_keys": [key_hash(BOB)]},
        )


def test_settings_of_the_log_are_those_of_the_file(checkpoint: Path, tmp_path: Path) -> None:
    table = {
        "folder": str(tmp_path / "a"),
        "keys": str(tmp_path / "k"),
        "rotate": "1MiB",
        "keep": 7,
        "on_full": "closed",
        "checkpoint_lines": 50,
        "checkpoint_interval": "1s",
    }
    found = AuditSettings.of(deployed(checkpoint, audit=table).audit)

    assert found is not None
    assert (found.folder, found.keys) == (tmp_path / "a", tmp_path / "k")
    assert (found.rotate_bytes, found.keep, found.on_full) == (1 << 20, 7, "closed")
    assert (found.checkpoint_lines, found.checkpoint_s) == (50, 1.0)
    assert AuditSettings.of(None) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("rotate", "1KiB"), ("checkpoint_interval", "1ms"), ("on_full", "perhaps"), ("keep", -1)],
)
def test_settings_that_make_no_sense_are_refused(checkpoint: Path, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        deployed(checkpoint, audit={"folder": "a", key: value})

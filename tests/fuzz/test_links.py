"""Hostile streams into admitted data connections, and proof that each check notices its damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.pool.receive.block_assembly import Assembly
from prfaas.wire.fragments import ReceivedBlock
from prfaas.wire.sealed.records import Opener

from .links import AT_ONCE, Attacker, LinkFigures, a_site


async def attacked(
    directory: Path,
    encryption: LinkEncryption,
    num_streams: int,
    ended_s: float = 60.0,
    num_lanes: int = 1,
) -> LinkFigures:
    async with a_site(directory, encryption, num_lanes) as site:
        return await Attacker(site, directory, encryption, 1, ended_s).run(num_streams)


@pytest.mark.parametrize(
    ("encryption", "num_lanes"),
    [*((encryption, 1) for encryption in LinkEncryption), (LinkEncryption.SEALED, 4)],
)
async def test_damaged_streams_leave_no_wrong_byte_and_nothing_behind(
    tmp_path: Path, encryption: LinkEncryption, num_lanes: int
) -> None:
    figures = await attacked(tmp_path, encryption, num_streams=80, num_lanes=num_lanes)

    assert figures.num_streams >= 80 + AT_ONCE
    assert figures.num_links_ended > 0
    assert figures.num_blocks > AT_ONCE
    assert figures.num_rounded > 0


async def test_without_digests_wrong_bytes_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReceivedBlock, "is_intact", property(lambda _: True))

    with pytest.raises(AssertionError, match=r"wrong bytes|nobody sent"):
        await attacked(tmp_path, LinkEncryption.TLS, num_streams=400)


async def test_without_tags_the_damage_of_a_path_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Opener, "check", lambda self, data, _tag: self._keys.take(len(data)))

    with pytest.raises(AssertionError, match="the path's damage ended it"):
        await attacked(tmp_path, LinkEncryption.NETWORK, num_streams=400)


async def test_blocks_that_are_never_finished_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Assembly, "forget", lambda *_: None)

    with pytest.raises(TimeoutError):
        await attacked(tmp_path, LinkEncryption.SEALED, num_streams=400, ended_s=3.0)

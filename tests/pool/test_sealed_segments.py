"""Segments whose records are sealed with keys of tenants, and the keyring of their folder."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.core.cache.keep_rules import Origin
from prfaas.core.cache.tenant_shares import Share
from prfaas.core.kv.blocks import BlockName
from prfaas.errors import ConfigError
from prfaas.pool.keys.keyring import FILE_NAME, Keyring
from prfaas.pool.keys.record_seals import NONCE_BYTES, SegmentStamps
from prfaas.pool.keys.site_keys import load_keys
from prfaas.pool.keys.wrapping import SiteKeyWrapper
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.node.store_room import disk_wrapper
from prfaas.pool.store.disk_segments import ALIGN_BYTES, MARKER, DiskPlace, SegmentFiles
from prfaas.pool.store.disk_tier import DiskTier
from prfaas.wire.fragments import block_digest

from .mirror import Owner
from .segment_files import content, name_of, site_keys

TENANTS = ("a" * 32, "b" * 32, "")
SIZE = 3000


@pytest.fixture
def wrapper(tmp_path: Path) -> SiteKeyWrapper:
    return SiteKeyWrapper(load_keys(site_keys(tmp_path / "site.keys", b"s" * 32)))


@contextlib.contextmanager
def sealed(folder: Path, wrapper: SiteKeyWrapper | None) -> Iterator[SegmentFiles]:
    files = SegmentFiles(folder, wrapper=wrapper)
    try:
        yield files
    finally:
        files.close()


def write(files: SegmentFiles, segment: int, number: int, tenant: str) -> DiskPlace:
    name, data = name_of(number), content(number, SIZE)
    origin = Origin(frozenset(), "engine", b"", tenant)
    return files.append(segment, name, data, block_digest(*name, data), origin)


def read(files: SegmentFiles, name: BlockName, place: DiskPlace) -> bytes | None:
    into = bytearray(place.num_bytes)
    digest = files.read(name, place, memoryview(into))
    assert digest is None or digest == block_digest(*name, into)
    return bytes(into) if digest is not None else None


def readable(files: SegmentFiles, number: int = 0) -> dict[str, int]:
    """Blocks of each tenant that a segment has, all of which read as they were written."""
    found: dict[str, int] = {}
    for name, place in files.scan(number).records:
        block = int.from_bytes(name[1].block_hash, "big")
        assert read(files, name, place) == bytes(content(block, SIZE))
        found[place.origin.tenant] = found.get(place.origin.tenant, 0) + 1
    return found


def filled(folder: Path, wrapper: SiteKeyWrapper | None) -> None:
    with sealed(folder, wrapper) as files:
        segment = files.start()
        for number in range(12):
            write(files, segment, number, TENANTS[number % 3])


def shows(folder: Path) -> bool:
    """Return True if a file has a part of a block in the clear."""
    parts = [bytes(content(number, SIZE))[at : at + 64] for number in range(12) for at in (0, 999)]
    return any(part in path.read_bytes() for path in folder.iterdir() for part in parts)


@pytest.mark.parametrize("is_sealed", [True, False])
def test_no_block_is_in_the_clear_in_any_file_of_a_sealed_folder(
    tmp_path: Path, wrapper: SiteKeyWrapper, is_sealed: bool
) -> None:
    """The other case shows that the search finds blocks."""
    folder = tmp_path / "disk"
    filled(folder, wrapper if is_sealed else None)
    assert shows(folder) is not is_sealed
    with sealed(folder, wrapper if is_sealed else None) as files:
        assert readable(files) == dict.fromkeys(TENANTS, 4)


def test_without_its_key_no_record_of_a_tenant_is_readable_also_after_a_restart(
    tmp_path: Path, wrapper: SiteKeyWrapper
) -> None:
    folder = tmp_path / "disk"
    filled(folder, wrapper)
    before = (folder / FILE_NAME).read_bytes()
    with sealed(folder, wrapper) as files:
        places = files.scan(0).records
        assert files.destroy_keys(TENANTS[0]) == 1
        assert files.destroy_keys(TENANTS[0]) == 0
        of = [(name, place) for name, place in places if place.origin.tenant == TENANTS[0]]
        assert [read(files, *each) for each in of] == [None] * 4
        assert readable(files) == {TENANTS[1]: 4, "": 4}
    with sealed(folder, wrapper) as files:
        assert readable(files) == {TENANTS[1]: 4, "": 4}
        assert files.scan(0).num_broken == 0
        # A later block of the tenant has another key.
        place = write(files, files.start(), 100, TENANTS[0])
        assert place.key_id not in before
        assert readable(files) == {TENANTS[1]: 4, "": 4}


def test_a_record_at_another_place_or_under_another_name_is_unreadable(
    tmp_path: Path, wrapper: SiteKeyWrapper
) -> None:
    folder = tmp_path / "disk"
    filled(folder, wrapper)
    path = folder / f"{0:016d}.seg"
    data = path.read_bytes()
    step = len(data) // 12
    assert step % ALIGN_BYTES == 0
    path.write_bytes(data[step : 2 * step] + data[:step] + data[2 * step :])
    shutil.copyfile(path, folder / f"{1:016d}.seg")
    with sealed(folder, wrapper) as files:
        assert [read(files, *each) is None for each in files.scan(0).records] == (
            [True, True] + [False] * 10
        )
        assert all(read(files, *each) is None for each in files.scan(1).records)


def test_each_flipped_byte_makes_its_record_unreadable(
    tmp_path: Path, wrapper: SiteKeyWrapper
) -> None:
    folder = tmp_path / "disk"
    with sealed(folder, wrapper) as files:
        place = write(files, files.start(), 1, TENANTS[0])
    path = folder / f"{0:016d}.seg"
    data = path.read_bytes()
    end = place.head_bytes + place.stored_bytes
    with sealed(folder, wrapper) as files:
        for at in [*range(place.head_bytes), *range(place.head_bytes, end, 97), end - 1]:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            assert read(files, name_of(1), place) is None, at
        path.write_bytes(data)
        assert read(files, name_of(1), place) is not None


def stamps_in(folder: Path, wrapper: SiteKeyWrapper) -> list[tuple[bytes, bytes]]:
    """Derived key and nonce of every record on disk."""
    found = []
    with sealed(folder, wrapper) as files:
        for segment in files.found():
            path = folder / f"{segment.number:016d}.seg"
            for _, place in files.scan(segment.number).records:
                head = path.read_bytes()[place.offset : place.offset + place.head_bytes]
                found.append((head[-56:-8], head[-8:].rjust(NONCE_BYTES, b"\0")))
    return found


def test_no_pair_of_key_and_nonce_comes_twice_after_restarts_and_failed_writes(
    tmp_path: Path, wrapper: SiteKeyWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "disk", os.pwritev
    sent: list[bytes] = []

    def torn(file: int, parts: list[bytes], offset: int) -> int:
        sent.append(bytes(parts[0]))
        written = real(file, parts, offset)
        return written - 1 if len(sent) % 3 == 0 else written

    monkeypatch.setattr(os, "pwritev", torn)
    for _ in range(3):
        with sealed(folder, wrapper) as files:
            segment = files.start()
            for number in range(12):
                # The bytes of a torn record reached the disk, and the next one is at its place.
                with contextlib.suppress(OSError):
                    write(files, segment, number, TENANTS[number % 2])
    used = {head[-56:] for head in sent}
    assert len(used) == len(sent) == 36
    assert len(set(stamps_in(folder, wrapper))) == 24


def test_stamps_of_two_segments_and_two_processes_have_salts_of_their_own(
    tmp_path: Path, wrapper: SiteKeyWrapper
) -> None:
    keyring = Keyring(tmp_path / "keyring", wrapper)
    again = Keyring(tmp_path / "keyring", wrapper)
    stamps = [SegmentStamps(each) for each in (keyring, keyring, again)]
    assert len({each.stamp("")[16:48] for each in stamps}) == 3
    first = stamps[0]
    assert [int.from_bytes(first.stamp("")[48:], "big") for _ in range(3)] == [1, 2, 3]


# --- folders ---


def test_a_folder_in_the_clear_is_emptied_when_keys_are_given(
    tmp_path: Path, wrapper: SiteKeyWrapper, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "disk"
    filled(folder, None)
    with sealed(folder, wrapper) as files:
        assert files.found() == []
    assert "disk_emptied" in caplog.text
    assert "blocks in the clear" in caplog.text
    assert not shows(folder)


def test_a_sealed_folder_is_not_opened_without_keys(
    tmp_path: Path, wrapper: SiteKeyWrapper
) -> None:
    folder = tmp_path / "disk"
    filled(folder, wrapper)
    with pytest.raises(ConfigError, match=r"are sealed; name the file of the site's keys"):
        SegmentFiles(folder)
    with sealed(folder, wrapper) as files:
        assert readable(files) == dict.fromkeys(TENANTS, 4)


def test_a_new_key_of_the_site_is_put_before_the_old_one(
    tmp_path: Path, wrapper: SiteKeyWrapper
) -> None:
    folder = tmp_path / "disk"
    filled(folder, wrapper)
    both = SiteKeyWrapper(load_keys(site_keys(tmp_path / "both", b"n" * 32, b"s" * 32)))
    with sealed(folder, both) as files:
        assert readable(files) == dict.fromkeys(TENANTS, 4)
    # The keys of tenants were wrapped anew: the old key of the site is not needed any more.
    new = SiteKeyWrapper(load_keys(site_keys(tmp_path / "new", b"n" * 32)))
    with sealed(folder, new) as files:
        assert readable(files) == dict.fromkeys(TENANTS, 4)
    with pytest.raises(ConfigError, match=r"sealed with key .* not in the file of the site's keys"):
        SegmentFiles(folder, wrapper=wrapper)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b'{"format": 2, "keys": []}'])
def test_a_broken_keyring_is_refused_in_words(
    tmp_path: Path, wrapper: SiteKeyWrapper, damage: bytes
) -> None:
    folder = tmp_path / "disk"
    filled(folder, wrapper)
    (folder / FILE_NAME).write_bytes(damage)
    with pytest.raises(ConfigError, match=r"keyring .* is broken: .*; delete the folder"):
        SegmentFiles(folder, wrapper=wrapper)
    assert (folder / MARKER).exists()


def test_a_key_that_was_moved_to_another_tenant_is_refused(
    tmp_path: Path, wrapper: SiteKeyWrapper
) -> None:
    folder = tmp_path / "disk"
    filled(folder, wrapper)
    path = folder / FILE_NAME
    path.write_bytes(path.read_bytes().replace(b"a" * 32, b"c" * 32))
    with pytest.raises(ConfigError, match="is broken"):
        SegmentFiles(folder, wrapper=wrapper)


def test_a_keyring_has_a_limit_and_its_oldest_key_goes(
    tmp_path: Path, wrapper: SiteKeyWrapper
) -> None:
    keyring = Keyring(tmp_path / "keyring", wrapper, keys_max=3)
    made = [keyring.sealing(f"{number:032x}") for number in range(5)]
    assert [keyring.get(key.id) is not None for key in made] == [False, False, True, True, True]
    assert len(Keyring(tmp_path / "keyring", wrapper)) == 3


def test_a_process_with_another_name_leaves_the_keyring_of_a_running_one(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    first, is_new = disk_wrapper(folder, None, tmp_path / "a.disk-key")
    assert is_new
    filled(folder, first)
    other, is_other_new = disk_wrapper(folder, None, tmp_path / "b.disk-key")
    assert is_other_new
    with sealed(folder, first) as files:
        with pytest.raises(ConfigError, match="another pool node uses"):
            SegmentFiles(folder, wrapper=other, is_new_key=True)
        assert readable(files) == dict.fromkeys(TENANTS, 4)
    again, is_new = disk_wrapper(folder, None, tmp_path / "a.disk-key")
    assert not is_new
    with sealed(folder, again) as files:
        assert readable(files) == dict.fromkeys(TENANTS, 4)


def test_a_folder_whose_key_is_gone_is_emptied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, own = tmp_path / "disk", tmp_path / "a.disk-key"
    filled(folder, disk_wrapper(folder, None, own)[0])
    own.unlink()
    wrapper, is_new = disk_wrapper(folder, None, own)
    files = SegmentFiles(folder, wrapper=wrapper, is_new_key=is_new)
    assert readable(files) == {}
    assert "disk_emptied" in caplog.text
    files.close()


def test_of_two_processes_that_make_a_key_one_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "a.disk-key"
    assert disk_wrapper(tmp_path, None, own)[1]
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert not disk_wrapper(tmp_path, None, own)[1]


def test_made_up_tenants_cost_no_key_of_a_tenant_with_a_reserve(
    tmp_path: Path, wrapper: SiteKeyWrapper
) -> None:
    folder = tmp_path / "disk"
    files = SegmentFiles(folder, wrapper=wrapper)
    tier = DiskTier(files, 1 << 20, PoolMetrics(), Owner())
    keyring = files.keyring
    assert keyring is not None
    keyring._keys_max = 3
    tier.share({"a" * 32: Share(reserve=0.5), "b" * 32: Share(limit=0.5)})
    kept, limited = (keyring.sealing(letter * 32) for letter in "ab")
    made = [keyring.sealing(f"{number:032x}") for number in range(5)]
    assert keyring.get(kept.id) == kept
    assert keyring.get(limited.id) is None
    assert [keyring.get(key.id) is not None for key in made] == [False, False, False, True, True]
    files.close()


# --- crashes ---

STEPS = ("open", "fsync", "rename", "fsync_folder", "overwrite", "nothing")
CHILD = """
import os, signal, sys
from pathlib import Path
from prfaas.pool.keys.keyring import Keyring
from prfaas.pool.keys.site_keys import load_keys
from prfaas.pool.keys.wrapping import SiteKeyWrapper

folder, step = Path(sys.argv[1]), sys.argv[2]
keyring = Keyring(folder / "keyring", SiteKeyWrapper(load_keys(folder / "site.keys")))
syncs = [0]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

real = os.fsync
def fsync(file):
    syncs[0] += 1
    if syncs[0] == {"fsync": 1, "fsync_folder": 2}.get(step):
        die()
    real(file)

os.fsync = fsync
if step == "open":
    os.open = die
if step == "rename":
    Path.replace = die
if step == "overwrite":
    os.pwrite = die
keyring.destroy("a" * 32)
"""


@pytest.mark.parametrize("step", STEPS)
def test_a_process_killed_while_it_destroys_a_key_leaves_a_whole_keyring(
    tmp_path: Path, wrapper: SiteKeyWrapper, step: str
) -> None:
    keyring = Keyring(tmp_path / "keyring", wrapper)
    keys = {tenant: keyring.sealing(tenant).id for tenant in TENANTS}
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), step], check=False)
    assert done.returncode == (0 if step == "nothing" else -signal.SIGKILL)
    again = Keyring(tmp_path / "keyring", wrapper)
    is_gone = again.get(keys[TENANTS[0]]) is None
    assert is_gone == (step in ("fsync_folder", "overwrite", "nothing"))
    assert all(again.get(keys[tenant]) is not None for tenant in TENANTS[1:])
    # The same again ends it.
    again.destroy(TENANTS[0])
    assert Keyring(tmp_path / "keyring", wrapper).get(keys[TENANTS[0]]) is None

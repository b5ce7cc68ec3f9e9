"""A model's identity: every byte that an engine reads, under any file name."""

from pathlib import Path

import pytest

from prfaas.core.kv.blocks import facts_id
from prfaas.engines.identity.checkpoint_files import (
    FileDigests,
    checkpoint_digests,
    find_checkpoint,
)
from prfaas.errors import ConfigError

pytestmark = pytest.mark.timeout(60)

FILES = {
    "config.json": "config",
    "generation_config.json": "config",
    "model.safetensors": "weights",
    "model.safetensors.index.json": "weights_index",
    "tokenizer.json": "tokenizer",
    "tokenizer.model": "tokenizer",
    "merges.txt": "tokenizer",
    "chat_template.jinja": "chat_template",
    "preprocessor_config.json": "processor",
    "processor_config.json": "processor",
    "video_preprocessor_config.json": "processor",
    "modeling_own.py": "code",
}
MIB = 1 << 20
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def a_checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in FILES:
        (directory / name).write_bytes(f"content of {name}".encode() * 10)
    return directory


def digests_of(directory: Path) -> dict[str, str]:
    return checkpoint_digests(directory, FileDigests(directory.parent / "kept"))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", ["flip", "grow", "remove", "rename"])
def test_the_digest_of_its_kind_changes_when_a_file_changes(
    tmp_path: Path, name: str, change: str
) -> None:
    one, other = a_checkpoint(tmp_path / "one"), a_checkpoint(tmp_path / "other")
    assert digests_of(one) == digests_of(other)
    path = other / name
    match change:
        case "flip":
            path.write_bytes(b"C" + path.read_bytes()[1:])
        case "grow":
            path.write_bytes(path.read_bytes() + b"!")
        case "remove":
            path.unlink()
        case "rename":
            path.rename(path.with_name(f"{path.stem}-2{path.suffix}"))
    before, after = digests_of(one), digests_of(other)
    assert [kind for kind in before if before[kind] != after.get(kind)] == [FILES[name]] or (
        change == "rename" and before != after
    )


@pytest.mark.parametrize("place", [16 * MIB, 1024 * MIB + 1, 1084 * MIB - 1])
def test_one_byte_far_inside_a_shard_of_more_than_a_gibibyte_makes_another_layout(
    tmp_path: Path, place: int
) -> None:
    found = []
    for site in ("here", "there"):
        directory = a_checkpoint(tmp_path / site)
        with (directory / "model.safetensors").open("wb") as shard:
            shard.truncate(1084 * MIB)
            if site == "there":
                shard.seek(place)
                shard.write(b"\x01")
        found.append({f"model.{kind}": value for kind, value in digests_of(directory).items()})
    here, there = found
    assert [name for name in here if here[name] != there[name]] == ["model.weights"]
    assert facts_id(here) != facts_id(there)


@pytest.mark.parametrize("name", ["README.md", "LICENSE.txt", ".gitattributes", "picture.png"])
def test_files_that_no_engine_reads_do_not_count(tmp_path: Path, name: str) -> None:
    directory = a_checkpoint(tmp_path / "one")
    before = digests_of(directory)
    (directory / name).write_text("words")
    assert digests_of(directory) == before


def test_weights_in_a_format_that_is_not_loaded_do_not_count(tmp_path: Path) -> None:
    directory = a_checkpoint(tmp_path / "one")
    before = digests_of(directory)
    (directory / "pytorch_model.bin").write_bytes(b"the same weights again")
    assert digests_of(directory) == before
    kept = FileDigests(tmp_path / "kept")
    assert checkpoint_digests(directory, kept, all_formats=True) != before
    (directory / "model.safetensors").unlink()
    assert digests_of(directory)["weights"] != before["weights"]


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(ConfigError, match="holds no file of a checkpoint"):
        digests_of(tmp_path / "one")


def a_hub_cache(root: Path, commit: str = COMMIT, ref: str = "main") -> Path:
    """A local cache with one commit of `org/model`, as the hub's own library lays it out."""
    repository = root / "models--org--model"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    return a_checkpoint(repository / "snapshots" / commit)


def test_a_hub_name_is_tied_to_the_commit_in_the_local_cache(tmp_path: Path) -> None:
    snapshot = a_hub_cache(tmp_path)
    for revision in (None, "main", COMMIT):
        found = find_checkpoint("org/model", revision, str(tmp_path))
        assert found == (snapshot, f"org/model@{COMMIT[:12]}")


def test_two_commits_under_one_name_are_two_models(tmp_path: Path) -> None:
    other = "f" * 40
    a_hub_cache(tmp_path / "here")
    (a_hub_cache(tmp_path / "there", other) / "model.safetensors").write_bytes(b"newer")
    kept = FileDigests(tmp_path / "kept")
    found = [
        checkpoint_digests(find_checkpoint("org/model", None, str(tmp_path / site))[0], kept)
        for site in ("here", "there")
    ]
    assert found[0]["weights"] != found[1]["weights"]
    assert found[0]["config"] == found[1]["config"]
    assert facts_id(found[0]) != facts_id(found[1])


def test_a_snapshot_named_by_its_path_is_shown_with_its_commit(tmp_path: Path) -> None:
    snapshot = a_hub_cache(tmp_path)
    assert find_checkpoint(str(snapshot), None) == (snapshot, f"org/model@{COMMIT[:12]}")


@pytest.mark.parametrize("revision", [None, "main", "e" * 40])
def test_a_name_that_can_not_be_tied_to_files_is_refused(
    tmp_path: Path, revision: str | None
) -> None:
    with pytest.raises(ConfigError, match=r"'org/model' .*its blocks cannot be shared. .*COMMIT"):
        find_checkpoint("org/model", revision, str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be tied to files"):
        find_checkpoint("no such/../name", revision, str(tmp_path))


def test_a_name_that_is_loaded_from_another_hub_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of that name in the local cache of this hub are not those that are loaded."""
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(ConfigError, match="is loaded from ModelScope"):
        find_checkpoint("org/model", None, str(tmp_path))
    assert find_checkpoint(str(tmp_path), None)[0] == tmp_path

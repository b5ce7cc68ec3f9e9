"""Files that each host of a site under Ray writes for its own parts, and refused settings."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from prfaas.cli.ray_site.command import ray
from prfaas.cli.ray_site.parts import (
    PartSpec,
    member_files,
    members_folder,
    toml_text,
    write_members,
)
from prfaas.cli.ray_site.site import check_site
from prfaas.config.load import load_deployment
from prfaas.errors import ConfigError
from prfaas.membership.folder import MemberFile
from tests.ray_nodes.cluster import NEEDS_RAY
from tests.ray_site.site import deployment_file

PORTS = {
    **dict.fromkeys(("pool-a", "pool-b"), 7100),
    **dict.fromkeys(("a1", "b1", "a2", "b2", "prefill-a", "decode-b"), 8100),
    **dict.fromkeys(("admin pool-a", "admin pool-b"), 7101),
    "gateway": 8000,
}


def test_a_table_is_the_same_after_writing_and_reading() -> None:
    tables = {"a": {"b c": [1, 2.5, True, 'x"\n\\'], "d": {"é": "ü"}}, "empty": {}}
    assert tomllib.loads(toml_text(tables)) == tables


def test_each_part_knows_only_itself_and_finds_the_others_as_members(tmp_path: Path) -> None:
    file = deployment_file(tmp_path, 8000)
    made = {
        n: PartSpec(file, n, "run", PORTS).part("10.0.0.2") for n in ("pool-a", "b2", "gateway")
    }
    folder = members_folder(load_deployment(file))
    for name, pools, engines in (
        ("pool-a", {"pool-a"}, set()),
        ("b2", {"pool-b"}, {"b2"}),
        ("gateway", set(), set()),
    ):
        path = load_deployment(file).state / "ray" / f"{name}.toml"
        own = load_deployment(path).clusters["pd"]
        assert (set(own.pools), set(own.engines)) == (pools, engines)
        assert load_deployment(path).membership.folder == folder
        assert path.stat().st_mode & 0o777 == 0o600
    assert "--peer" not in made["pool-a"].command.args
    assert "--engine" not in made["gateway"].command.args
    assert made["b2"].places == {"b2": "http://10.0.0.2:8100"}


@pytest.mark.parametrize("name", ["prefill-a", "decode-b"])
def test_an_engine_with_a_role_starts_without_those_of_the_other_role(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = Path(__file__).parents[2] / "examples" / "two-hosts.toml"
    file = tmp_path / "site.toml"
    file.write_text(example.read_text())
    (tmp_path / "examples").symlink_to(example.parent)
    monkeypatch.chdir(tmp_path)
    made = PartSpec(file, name, "run", PORTS).part("10.0.0.1")
    assert list(made.places) == [name]
    own = load_deployment(load_deployment(file).state / "ray" / f"{name}.toml")
    assert list(own.clusters["pd"].engines) == [name]
    assert own.has_roles


def test_members_are_all_pools_and_the_engines_that_run(tmp_path: Path) -> None:
    deployment = load_deployment(deployment_file(tmp_path, 8000))
    names = ("pool-a", "pool-b", "a1", "b1")
    files = member_files(deployment, {n: ("10.0.0.2", PORTS[n]) for n in names})
    assert sorted(files) == ["a1.toml", "b1.toml", "pool-a.toml", "pool-b.toml"]
    engine = MemberFile.model_validate(tomllib.loads(files["b1.toml"]))
    assert (engine.url, engine.pool) == ("http://10.0.0.2:8100", "pool-b")
    folder = tmp_path / "members"
    write_members(folder, files)
    write_members(folder, {"a1.toml": files["a1.toml"]})
    assert [path.name for path in folder.iterdir()] == ["a1.toml"]


def test_a_file_that_ray_cannot_run_is_refused(tmp_path: Path) -> None:
    file = deployment_file(tmp_path, 8000)
    text = file.read_text()
    for change, message in (
        (("block_tokens = 256", "block_tokens = 256\none_process = true"), "one_process"),
        (("[routing]", '[gateway.replicas]\ng2 = "127.0.0.1:1"\n[routing]'), "gateway.replicas"),
        (("[routing]", '[membership]\nfolder = "m"\n[routing]'), "membership.folder"),
    ):
        file.write_text(text.replace(*change))
        with pytest.raises(ConfigError, match=message):
            check_site(load_deployment(file))


@NEEDS_RAY
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--need", "engines=GPU:8"], "expected KIND=RESOURCE:AMOUNT"),
        (["--engines", "pd=5"], "5 engines of pd are asked for"),
        (["--engines", "pd=many"], "expected CLUSTER=COUNT"),
        ([], "no Ray cluster answers at 127.0.0.1:1"),
        (["--engines", "dp=2"], "there is no cluster 'dp'"),
    ],
)
def test_a_wrong_option_is_refused_in_words(tmp_path: Path, words: list[str], message: str) -> None:
    file = deployment_file(tmp_path, 8000)
    refused = CliRunner().invoke(ray, ["up", str(file), "--address", "127.0.0.1:1", *words])
    assert isinstance(refused.exception, ConfigError)
    assert message in str(refused.exception)

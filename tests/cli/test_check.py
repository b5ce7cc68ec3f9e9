"""`prfaas check` and `prfaas up`: one clear line for every mistake in what they are given."""

import os
import socket
import sys
from pathlib import Path

import pytest

from prfaas.wire.identity import identity_in, make_authority, make_identity
from tests.cli.check_files import CASE_STUDY, TIMING
from tests.ports import free_port

from .conftest import Prfaas, edit, one_line


def test_check_says_ok_and_starts_nothing(prfaas: Prfaas, laptop: Path) -> None:
    code, output, errors = prfaas("check", laptop)
    assert (code, errors) == (0, "")
    assert f"{laptop}: ok" in output.replace("\n", "")
    assert "cluster prfaas (prfaas): 1 engine, 1 pool node; 1 engine started by" in output
    assert [path.name for path in laptop.parent.iterdir()] == ["laptop.toml"]


def test_engines_that_do_not_fit_into_shared_memory_are_said_before_they_start(
    prfaas: Prfaas, laptop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has 64 MiB of it; vLLM needs minutes to fail there, and does not say why."""
    # Of the host's memory there is enough; of what containers are given of it to share, not.
    few = os.statvfs_result((4096, 4096, 16, 16, 16, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: few)
    said = "free: give the engines less, or the machine more (containers: --shm-size; Kubernetes"
    line = one_line(prfaas("up", laptop))
    assert "host_memory of prfaas-engine, pd-engine is " in line
    assert said in line
    code, output, _ = prfaas("check", laptop)
    assert code == 1
    assert said in " ".join(output.split())


def test_check_warns_of_a_gateway_that_others_reach(prfaas: Prfaas, laptop: Path) -> None:
    assert "warning" not in prfaas("check", laptop)[1]
    edit(laptop, 'listen = "127.0.0.1:', 'listen = "0.0.0.0:')
    code, output, _ = prfaas("check", laptop)
    assert code == 0
    assert "without a key" in output
    key = "sha256:" + "0" * 64
    laptop.write_text(laptop.read_text() + f'\n[tenants.a]\nkeys = ["{key}"]\n')
    assert "operator_keys" in prfaas("check", laptop)[1]


@pytest.mark.parametrize(
    ("written", "place"), [('["sk-prfaas-mine"]', "keys.0"), ('"sk-prfaas-mine"', "keys")]
)
def test_a_key_in_the_place_of_its_hash_is_not_repeated(
    prfaas: Prfaas, laptop: Path, written: str, place: str
) -> None:
    laptop.write_text(laptop.read_text() + f"\n[tenants.a]\nkeys = {written}\n")
    code, output, errors = prfaas("check", laptop)
    assert code == 2
    assert f"tenants.a.{place}: " in errors
    assert "sk-prfaas-mine" not in output + errors


@pytest.mark.parametrize("command", ["check", "up", "demo"])
def test_a_missing_file_is_one_line(prfaas: Prfaas, laptop: Path, command: str) -> None:
    assert "nowhere.toml cannot be read" in one_line(prfaas(command, "nowhere.toml"))


@pytest.mark.parametrize(
    ("command", "file", "words"),
    [
        ("plan", "laptop.toml", "a deployment file, for `prfaas up`; `prfaas plan` takes a plan"),
        ("simulate", "laptop.toml", "a deployment file, for `prfaas up`; `prfaas simulate` takes"),
        (
            "up",
            "examples/plan/paper-case-study.toml",
            "a plan file, for `prfaas plan`; `prfaas up`",
        ),
        ("demo", "examples/plan/paper-case-study.toml", "a plan file, for `prfaas plan`"),
        ("check", "examples/sim/link-cut.toml", "a scenario file, for `prfaas simulate`"),
        ("plan", "examples/sim/link-cut.toml", "a scenario file, for `prfaas simulate`"),
        ("simulate", "examples/plan/paper-case-study.toml", "a plan file, for `prfaas plan`"),
    ],
)
def test_a_file_of_another_kind_is_one_line(
    prfaas: Prfaas, laptop: Path, command: str, file: str, words: str
) -> None:
    code, output, errors = prfaas(command, file)
    assert (code, output) == (2, "")
    *_, line = errors.splitlines()
    assert f"{file} is {words}" in line
    assert "such as `prfaas init " in line


@pytest.mark.parametrize(
    ("typed", "meant"), [("plna", "plan"), ("simulte", "simulate"), ("chekc", "check")]
)
def test_a_mistyped_command_names_the_nearest(prfaas: Prfaas, typed: str, meant: str) -> None:
    code, _, errors = prfaas(typed, "x.toml")
    assert code == 2
    assert f"No such command {typed!r}. Did you mean {meant!r}?" in errors


@pytest.mark.parametrize("command", [("up",), ("demo", "--engines", "vllm")])
def test_engines_that_are_not_installed_are_one_line(
    prfaas: Prfaas, laptop: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    code, _, errors = prfaas(*command, *([laptop] if len(command) == 1 else []))
    assert code == 2
    *_, line = errors.splitlines()
    assert "not installed here: pip install 'prfaas[vllm]', without a GPU" in line
    assert not (laptop.parent / ".state" / "demo-model").exists()


def test_a_port_in_use_stops_up_and_is_said_by_check(prfaas: Prfaas, laptop: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        edit(laptop, "[gateway]\nlisten = ", f'[gateway]\nlisten = "127.0.0.1:{port}" # ')
        line = one_line(prfaas("up", laptop))
        code, output, _ = prfaas("check", laptop)
    assert f"gateway cannot listen on 127.0.0.1:{port}" in line
    assert "Address already in use" in line
    assert code == 1
    assert f"gateway cannot listen on 127.0.0.1:{port}" in output.replace("\n", " ")


@pytest.mark.parametrize("command", ["check", "up"])
def test_a_missing_checkpoint_is_one_line(prfaas: Prfaas, laptop: Path, command: str) -> None:
    edit(laptop, "generate = true        #", "generate = false       #")
    line = one_line(prfaas(command, laptop))
    assert "no checkpoint at .state/demo-model" in line
    assert "model.generate = true" in line


@pytest.mark.parametrize("command", ["check", "up", "demo"])
def test_a_mistake_in_the_file_is_a_list(prfaas: Prfaas, laptop: Path, command: str) -> None:
    edit(laptop, "offload_threshold", "offload_treshold")
    code, output, errors = prfaas(command, laptop)
    assert code == 2
    assert output == ""
    assert errors.splitlines() == [
        f"prfaas: {laptop}:",
        "  routing.offload_threshold: is required",
        "  routing.offload_treshold: unknown key; the nearest valid one is 'offload_threshold'",
    ]


def test_a_missing_identity_is_said_by_check_and_stops_up(prfaas: Prfaas, laptop: Path) -> None:
    edit(laptop, 'identities"\ngenerate = true', 'identities"\ngenerate = false')
    code, output, _ = prfaas("check", laptop)
    assert code == 1
    assert "identities/ca.pem is missing" in output.replace("\n", "")
    line = one_line(prfaas("up", laptop))
    assert "identities/ca.pem is missing" in line
    assert "make it with `prfaas identity gateway` where the deployment's ca.key is" in line


def test_a_missing_key_of_one_part_is_named(prfaas: Prfaas, laptop: Path) -> None:
    edit(laptop, 'identities"\ngenerate = true', 'identities"\ngenerate = false')
    directory = Path(".state/laptop/identities")
    make_authority(directory)
    for name in ("gateway", "prfaas-pool", "pd-pool"):
        make_identity(directory, name)
    identity_in(directory, "pd-pool").key.unlink()
    assert "pd-pool.key is missing" in one_line(prfaas("up", laptop))


def test_a_wrong_identity_is_said_while_others_are_still_to_be_made(
    prfaas: Prfaas, laptop: Path
) -> None:
    directory = Path(".state/laptop/identities")
    make_authority(directory)
    other, wrong = make_identity(directory, "pd-pool"), identity_in(directory, "prfaas-pool")
    other.certificate.rename(wrong.certificate)
    other.key.rename(wrong.key)
    code, output, _ = prfaas("check", laptop)
    assert code == 1
    assert "prfaas-pool.pem is of pd-pool, and not of prfaas-pool" in output.replace("\n", " ")
    assert "is missing" not in output
    assert "and not of prfaas-pool" in one_line(prfaas("up", laptop))


def test_two_parts_at_one_address_are_one_line(prfaas: Prfaas, laptop: Path) -> None:
    place = f'listen = "127.0.0.1:{free_port()}"'
    edit(laptop, "[clusters.pd.pools.pd-pool]\n", f"[clusters.pd.pools.pd-pool]\n{place}\n")
    edit(
        laptop,
        "[clusters.prfaas.pools.prfaas-pool]\n",
        f"[clusters.prfaas.pools.prfaas-pool]\n{place}\n",
    )
    line = one_line(prfaas("check", laptop))
    assert "pd-pool" in line
    assert "prfaas-pool" in line


def test_two_pools_in_one_folder_are_one_line(prfaas: Prfaas, laptop: Path) -> None:
    for name, folder in (
        ("pd.pools.pd-pool", "blocks"),
        ("prfaas.pools.prfaas-pool", "./x/../blocks"),
    ):
        place = f'disk = "{folder}"\ndisk_limit = "1GiB"'
        edit(laptop, f"[clusters.{name}]\n", f"[clusters.{name}]\n{place}\n")
    line = one_line(prfaas("check", laptop))
    assert "prfaas-pool and pd-pool cannot both keep blocks in" in line
    edit(laptop, "./x/../blocks", "others")
    assert prfaas("check", laptop)[0] == 0


@pytest.mark.parametrize("command", ["check", "up"])
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (str(CASE_STUDY), "nowhere.toml", "clusters.prfaas.timing.plan: nowhere.toml"),
        ('host_memory = "64MiB"', 'host_memory = "1MiB"', "prfaas-0.host_memory: 1048576 bytes"),
    ],
)
def test_timing_engines_that_can_not_start_are_one_line(
    prfaas: Prfaas, laptop: Path, command: str, old: str, new: str, said: str
) -> None:
    laptop.write_text(TIMING.replace("bytes_scale = 0.001", "bytes_scale = 0.1"))
    assert prfaas("check", laptop)[0] == 0
    edit(laptop, old, new)
    assert said in one_line(prfaas(command, laptop))


@pytest.mark.parametrize(
    "place", ["laptop.toml", "laptop.toml/s", "/proc/state"], ids=["file", "below", "proc"]
)
def test_no_state_is_one_line(prfaas: Prfaas, laptop: Path, place: str) -> None:
    edit(laptop, 'state = ".state/laptop"', f'state = "{laptop.parent / place}"')
    code, _, errors = prfaas("up", laptop)
    assert code == 2
    assert f"{place}' cannot be written: " in errors


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("threshold = 1500 ", "threshold = 100 ", "below one KV block, 384 tokens"),
        (
            '"--max-num-batched-tokens", "2048"',
            '"--max-num-batched-tokens", "2048", "--max-model-len=1500"',
            "not below the longest sequence of any engine, 1500 tokens",
        ),
    ],
)
def test_check_warns_of_a_threshold_that_does_nothing(
    prfaas: Prfaas, laptop: Path, old: str, new: str, says: str
) -> None:
    assert "warning" not in prfaas("check", laptop)[1]
    edit(laptop, old, new)
    code, output, _ = prfaas("check", laptop)
    assert (code, "warning" in output) == (0, True)
    assert says in output
    edit(laptop, "transfer_timeout", 'policy = "local"\ntransfer_timeout')
    assert "warning" not in prfaas("check", laptop)[1]


def test_check_warns_of_timing_engines_whose_blocks_differ(prfaas: Prfaas, tmp_path: Path) -> None:
    file = tmp_path / "timing.toml"
    file.write_text(TIMING.replace("127.0.0.1:8000", "127.0.0.1:0"))
    assert "warning" not in prfaas("check", file)[1]
    head, _, tail = file.read_text().rpartition("block_tokens = 256")
    file.write_text(f"{head}block_tokens = 128{tail}")
    assert "layout_mismatch" in prfaas("check", file)[1]


def test_check_warns_of_secrets_that_others_can_read(prfaas: Prfaas, laptop: Path) -> None:
    identities = Path(".state/laptop/identities")
    make_authority(identities)
    make_identity(identities, "pd-pool")
    salt = Path(".state/laptop/tenant.salt")
    salt.write_text("x")
    salt.chmod(0o600)
    assert "is a secret" not in prfaas("check", laptop)[1]
    for path, mode in ((identities / "pd-pool.key", 0o640), (identities / "ca.key", 0o604)):
        path.chmod(mode)
    salt.chmod(0o644)
    code, output, _ = prfaas("check", laptop)
    assert code == 0
    for name, mode in (("pd-pool.key", 640), ("ca.key", 604), ("tenant.salt", 644)):
        assert f"{name} is a secret, and its mode {mode} lets others in: chmod 600" in output

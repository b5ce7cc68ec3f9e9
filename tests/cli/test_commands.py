"""The command line: help everywhere, and one clear line for every mistake."""

import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from prfaas.cli.main import COMMANDS, cli, main
from prfaas.wire.identity import identity_in, make_authority, make_identity

EXAMPLES = Path(__file__).parents[2] / "examples"
LAPTOP = (EXAMPLES / "laptop.toml").read_text()

Outcome = tuple[int, str, str]
Prfaas = Callable[..., Outcome]


@pytest.fixture
def prfaas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Prfaas:
    """Run the command as the shell would: exit code, output, errors."""

    def run(*args: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        output = capsys.readouterr()
        return caught.value.code, output.out, output.err

    return run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The laptop example in a place of its own, its gateway at a free port."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "laptop.toml"
    path.write_text(LAPTOP.replace("127.0.0.1:8000", f"127.0.0.1:{free_port()}"))
    return path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def one_line(outcome: Outcome) -> str:
    """The line of a mistake; exit code 2, and nothing but that line."""
    code, _, errors = outcome
    assert code == 2
    (line,) = errors.splitlines()
    assert line.startswith("prfaas: ")
    return line


# --- help ---


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_with_examples(command: str) -> None:
    # `-h` is not asked for here: click keeps the help option of a command's first use, and other
    # tests use commands without the group that names it.
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0, result.output
    examples = result.output.partition("Examples:")[2]
    assert f"prfaas {command}" in examples


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_says_what_it_is(command: str) -> None:
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    for parameter in found.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


def test_the_command_itself_runs_and_names_its_commands() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "prfaas", "--help"], capture_output=True, text=True, check=True
    )
    assert "Examples:" in result.stdout
    for command in COMMANDS:
        assert f"  {command}" in result.stdout
    assert result.stderr == ""


def test_the_planner_is_loaded_by_those_who_need_it() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from prfaas.cli.main import cli; "
        "CliRunner().invoke(cli, ['--help']); assert 'prfaas.gateway.app' not in sys.modules; "
        "import prfaas.gateway.app, prfaas.pool.node; assert 'scipy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "args",
    [
        ("pool", "--name", "p", "--listen", "nowhere", "--socket", "s", "--identities", "."),
        ("pool", "--name", "p", "--listen", "h:99999", "--socket", "s", "--identities", "."),
        ("pool", "--peer", "no-address"),
        ("gateway", "f.toml", "--engine", "e=ftp://x"),
        ("identity",),
        ("nonsense",),
        ("up",),
    ],
)
def test_wrong_arguments_are_a_mistake(prfaas: Prfaas, args: tuple[str, ...]) -> None:
    code, _, errors = prfaas(*args)
    assert code == 2
    assert "Traceback" not in errors
    assert "Error: " in errors


# --- check and up ---


def test_check_says_ok_and_starts_nothing(prfaas: Prfaas, laptop: Path) -> None:
    code, output, errors = prfaas("check", laptop)
    assert (code, errors) == (0, "")
    assert f"{laptop}: ok" in output.replace("\n", "")
    assert "cluster prfaas (prfaas): 1 engine, 1 pool node; 1 engine started by" in output
    assert [path.name for path in laptop.parent.iterdir()] == ["laptop.toml"]


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
    assert "nowhere.toml can not be read" in one_line(prfaas(command, "nowhere.toml"))


def test_a_port_in_use_stops_up_and_is_said_by_check(prfaas: Prfaas, laptop: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        edit(laptop, "[gateway]\nlisten = ", f'[gateway]\nlisten = "127.0.0.1:{port}" # ')
        line = one_line(prfaas("up", laptop))
        code, output, _ = prfaas("check", laptop)
    assert f"gateway can not listen on 127.0.0.1:{port}" in line
    assert "Address already in use" in line
    assert code == 0
    assert f"gateway can not listen on 127.0.0.1:{port}" in output.replace("\n", " ")


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
    assert code == 0
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
    assert "prfaas-pool and pd-pool can not both keep blocks in" in line
    edit(laptop, "./x/../blocks", "others")
    assert prfaas("check", laptop)[0] == 0


TIMING = Path(__file__).parents[2] / "examples" / "timing.toml"
CASE_STUDY = TIMING.parent / "plan" / "paper-case-study.toml"


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
    laptop.write_text(
        TIMING.read_text()
        .replace("examples/plan/paper-case-study.toml", str(CASE_STUDY))
        .replace("bytes_scale = 0.001", "bytes_scale = 0.1")
    )
    assert prfaas("check", laptop)[0] == 0
    edit(laptop, old, new)
    assert said in one_line(prfaas(command, laptop))


@pytest.mark.parametrize("place", ["laptop.toml", "laptop.toml/state", "/proc/state"])
def test_a_state_that_can_not_be_written_is_one_line(
    prfaas: Prfaas, laptop: Path, place: str
) -> None:
    edit(laptop, 'state = ".state/laptop"', f'state = "{laptop.parent / place}"')
    code, _, errors = prfaas("up", laptop)
    assert code == 2
    assert f"{place}' can not be written: " in errors


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
    plan = EXAMPLES / "plan" / "paper-case-study.toml"
    text = (EXAMPLES / "timing.toml").read_text()
    file = tmp_path / "timing.toml"
    text = text.replace("examples/plan/paper-case-study.toml", str(plan))
    file.write_text(text.replace("127.0.0.1:8000", "127.0.0.1:0"))
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


# --- single parts ---


def pool_args(directory: Path, listen: str, socket_path: Path) -> tuple[object, ...]:
    return (
        *("pool", "--name", "pd-pool", "--listen", listen, "--admin", "127.0.0.1:0"),
        *("--socket", socket_path, "--identities", directory),
    )


@pytest.fixture
def identities(tmp_path: Path) -> Path:
    directory = tmp_path / "identities"
    make_authority(directory)
    make_identity(directory, "pd-pool")
    return directory


def test_a_pool_whose_port_is_taken_says_so(
    prfaas: Prfaas, tmp_path: Path, identities: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        line = one_line(prfaas(*pool_args(identities, listen, tmp_path / "pool.sock")))
    assert f"can not listen on {listen}" in line
    assert not (tmp_path / "pool.sock").exists()


def test_a_pool_leaves_the_socket_of_a_running_one_alone(
    prfaas: Prfaas, tmp_path: Path, identities: Path
) -> None:
    path = tmp_path / "pool.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        line = one_line(prfaas(*pool_args(identities, "127.0.0.1:0", path)))
        assert f"{path}: another process serves there" in line
        assert path.is_socket()


def test_a_pool_removes_no_file_where_its_socket_should_be(
    prfaas: Prfaas, tmp_path: Path, identities: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    line = one_line(prfaas(*pool_args(identities, "127.0.0.1:0", path)))
    assert "no socket is there" in line
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--peer", "far-pool", "'far-pool' is not NAME=HOST:PORT"),
        ("--peer", "far-pool=10.0.0.1:70000", "65535"),
        ("--peer", "far-pool=10.0.0.1:8²", "65535"),
        ("--peer", "far-pool=pd..example.net:7100", "1 to 63 characters"),
        ("--link-budget", "far-pool=0Gbps", "1Mbps or more"),
        ("--link-budget", "=1Gbps", "NAME=RATE"),
    ],
)
def test_a_wrong_peer_or_budget_of_a_pool_is_said(
    prfaas: Prfaas, tmp_path: Path, identities: Path, option: str, value: str, said: str
) -> None:
    args = pool_args(identities, "127.0.0.1:0", tmp_path / "pool.sock")
    code, _, errors = prfaas(*args, option, value)
    assert code == 2
    assert said in errors


def test_an_identity_that_is_there_is_kept_and_said_to_be(prfaas: Prfaas, tmp_path: Path) -> None:
    args = ("identity", "gateway", "--directory", tmp_path / "identities")
    assert prfaas(*args)[2] == ""
    first = identity_in(tmp_path / "identities", "gateway").certificate.read_bytes()
    code, _, errors = prfaas(*args, "--address", "gw.example.net")
    assert code == 0
    assert "gateway had an identity, which is kept as it is" in errors
    assert identity_in(tmp_path / "identities", "gateway").certificate.read_bytes() == first


def test_a_pool_whose_socket_can_not_be_made_says_so(
    prfaas: Prfaas, tmp_path: Path, identities: Path
) -> None:
    for path in (tmp_path / "no" / "pool.sock", tmp_path / ("x" * 120)):
        line = one_line(prfaas(*pool_args(identities, "127.0.0.1:0", path)))
        assert str(path) in line


@pytest.mark.parametrize("memory", ["5", "many", "1 gb"])
def test_a_pool_needs_memory_with_a_unit(
    prfaas: Prfaas, tmp_path: Path, identities: Path, memory: str
) -> None:
    args = pool_args(identities, "127.0.0.1:0", tmp_path / "pool.sock")
    assert "is not a size" in one_line(prfaas(*args, "--memory", memory))


def test_a_pool_without_its_identity_says_how_to_make_one(prfaas: Prfaas, tmp_path: Path) -> None:
    line = one_line(prfaas(*pool_args(tmp_path, "127.0.0.1:0", tmp_path / "pool.sock")))
    assert "pd-pool.pem" in line
    assert "`prfaas identity`" in line


def test_a_gateway_that_is_not_told_where_an_engine_is_says_which_option(
    prfaas: Prfaas, laptop: Path
) -> None:
    assert "--engine prfaas-engine=URL" in one_line(prfaas("gateway", laptop))


def test_identities_are_made_once_with_keys_for_the_owner(prfaas: Prfaas, tmp_path: Path) -> None:
    directory = tmp_path / "new" / "identities"
    assert prfaas("identity", "gateway", "pd-pool", "--directory", directory)[0] == 0
    names = {"ca.pem", "ca.key", "gateway.pem", "gateway.key", "pd-pool.pem", "pd-pool.key"}
    assert {path.name for path in directory.iterdir()} == names
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for path in directory.glob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    code, output, _ = prfaas("identity", "pd-pool", "--directory", directory)
    assert code == 0
    assert output.splitlines() == [str(directory / "pd-pool.pem"), str(directory / "pd-pool.key")]
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    identity_in(directory, "gateway").server_context()


@pytest.mark.parametrize("name", ["../escaped", "a/b", "ca", "Upper", "zürich", "x" * 70])
def test_a_name_that_no_part_can_have_gets_no_identity(
    prfaas: Prfaas, tmp_path: Path, name: str
) -> None:
    directory = tmp_path / "identities"
    assert repr(name) in one_line(prfaas("identity", name, "--directory", directory))
    assert not directory.exists()


@pytest.mark.parametrize("address", ["zürich.example", ""])
def test_an_address_that_fits_no_certificate_is_one_line(
    prfaas: Prfaas, tmp_path: Path, address: str
) -> None:
    args = ("identity", "engine", "--directory", tmp_path, "--address", address)
    assert repr(address) in one_line(prfaas(*args))


def test_a_place_that_can_not_be_written_is_one_line(prfaas: Prfaas, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in one_line(prfaas("identity", "engine", "--directory", tmp_path / "file"))


# --- link ---


@pytest.mark.parametrize("command", ["test", "serve"])
def test_the_link_commands_have_help_with_examples(command: str) -> None:
    result = CliRunner().invoke(cli, ["link", command, "--help"])
    assert result.exit_code == 0
    assert "prfaas link" in result.output.partition("Example")[2]


def test_a_link_test_without_identities_says_what_to_give(prfaas: Prfaas) -> None:
    line = one_line(prfaas("link", "test", "prfaas-pool", "pd-pool", "--to", "127.0.0.1:1"))
    assert "--identities" in line


def test_a_link_test_names_a_pool_that_the_file_does_not_have(prfaas: Prfaas, laptop: Path) -> None:
    line = one_line(prfaas("link", "test", "prfaas-pool", "pd-pol", "--file", laptop))
    assert "pd-pol" in line
    assert "pd-pool" in line


def test_a_link_test_needs_an_address_that_stays(prfaas: Prfaas, laptop: Path) -> None:
    line = one_line(prfaas("link", "test", "prfaas-pool", "pd-pool", "--file", laptop))
    assert "--to" in line


@pytest.mark.parametrize("counts", ["0", "17", "1,x", "", "1.5"])
def test_numbers_of_connections_are_checked(prfaas: Prfaas, counts: str) -> None:
    code, _, errors = prfaas("link", "test", "a", "b", "--connections", counts)
    assert code == 2
    assert "numbers from 1 to 16" in errors


def test_a_link_test_against_nobody_is_one_line(prfaas: Prfaas, tmp_path: Path) -> None:
    make_authority(tmp_path)
    make_identity(tmp_path, "prfaas-pool")
    place = f"127.0.0.1:{free_port()}"
    where = ("--to", place, "--identities", tmp_path)
    code, _, errors = prfaas("link", "test", "prfaas-pool", "pd-pool", *where)
    assert code == 1
    assert errors.startswith(f"prfaas: no link test with pd-pool at {place}")
    assert errors.count("\n") == 1

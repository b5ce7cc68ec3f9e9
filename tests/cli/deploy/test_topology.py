"""Commands and settings of the parts that `prfaas up` starts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import pytest

from prfaas.cli.common.options import NAMED_COUNT, NAMED_RATE
from prfaas.cli.deploy.topology import check_addresses, check_ports, lay_out, parts
from prfaas.cli.parts import pool_command
from prfaas.cli.parts.engine_command import timing
from prfaas.cli.parts.gateway_command import gateway
from prfaas.cli.parts.pool_command import pool
from prfaas.config.addresses import split_address
from prfaas.config.load import load_deployment
from prfaas.errors import ConfigError
from prfaas.pool.process.process import PoolProcessSettings
from tests.cli.running_parts import DEPLOYMENT

FAR = """
[clusters.far]
role = "prfaas"
[clusters.far.pools.far-pool]
[clusters.far.pools.far-pool.links.pd-pool]
budget = "930Mbps"
connections = 5
[clusters.far.engines.far-engine]
pool = "far-pool"
"""


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], PoolProcessSettings]:
    """The settings with which `prfaas pool` would run, by its arguments."""
    taken: list[PoolProcessSettings] = []
    monkeypatch.setattr(pool_command, "_run", lambda settings, _: taken.append(settings))

    def run(args: list[str]) -> PoolProcessSettings:
        pool.main(args, standalone_mode=False)
        return taken[-1]

    return run


SettingsOf = Callable[[list[str]], PoolProcessSettings]


def test_a_pool_node_reads_the_deployment_file(tmp_path: Path, settings_of: SettingsOf) -> None:
    path, where = tmp_path / "deployment.toml", "http://127.0.0.1:4318/v1/traces"
    path.write_text(f'{DEPLOYMENT}{FAR}[tracing]\nendpoint = "{where}"\n')
    deployment = load_deployment(path)
    topology = lay_out(deployment, path)
    pools, _ = parts(topology)
    found = {part.name: settings_of(part.command.args[4:]) for part in pools}
    far, local = found["far-pool"], found["pd-pool"]
    assert far.link_budgets == {"pd-pool": 930_000_000}
    assert far.link_connections == {"pd-pool": 5}
    assert far.peers == {"pd-pool": topology.pools["pd-pool"]}
    assert not far.sources
    assert local.sources == {"far-pool"}
    assert not local.peers
    for name, settings in found.items():
        table = deployment.pools[name]
        assert settings.listen == topology.pools[name]
        assert settings.admin == topology.admins[name]
        assert settings.memory_bytes == table.memory
        assert settings.drain_ns == table.drain_timeout
        assert settings.socket_path == deployment.state / f"{name}.sock"
        assert settings.gateways == {"gateway"}
        assert settings.tracing == where


POOL = '[clusters.pd.pools.pd-pool]\nmemory = "1MiB"\n'
TWO_SITES = """
[clusters.pd.pools.pd-pool]
address = "pd.example.net:7100"
memory = "3MiB"
disk = "blocks"
disk_limit = "5MiB"
drain_timeout = "2s"
transfers_max = 7
socket = "{0}/run/pool.sock"
"""


def test_a_pool_node_runs_alone_from_the_file_that_the_gateway_reads(
    tmp_path: Path, settings_of: SettingsOf
) -> None:
    path = tmp_path / "deployment.toml"
    table = TWO_SITES.format(tmp_path)
    path.write_text(DEPLOYMENT.replace(POOL, table) + FAR)
    local = settings_of([str(path), "--name", "pd-pool"])
    assert local.listen == ("0.0.0.0", 7100)  # noqa: S104
    assert local.admin == ("127.0.0.1", 7180)
    assert (local.memory_bytes, local.disk, local.disk_bytes) == (3 << 20, Path("blocks"), 5 << 20)
    assert local.drain_ns == 2 * 10**9
    assert local.receive.transfers_max == 7
    assert local.socket_path == tmp_path / "run" / "pool.sock"
    assert local.socket_path.parent.is_dir()
    args = [str(path), "--name", "far-pool", "--listen", "10.0.0.1:7100"]
    assert settings_of(args).peers == {"pd-pool": ("pd.example.net", 7100)}


def test_options_of_a_pool_node_override_the_file(tmp_path: Path, settings_of: SettingsOf) -> None:
    path = tmp_path / "deployment.toml"
    path.write_text(DEPLOYMENT.replace(POOL, TWO_SITES.format(tmp_path)) + FAR)
    args = [str(path), "--name", "far-pool", "--listen", "10.0.0.1:7100", "--memory", "7MiB"]
    args += ["--peer", "pd-pool=10.0.0.2:7000", "--link-budget", "pd-pool=2Gbps"]
    args += ["--gateway", "other", "--admin", "127.0.0.1:0", "--socket", f"{tmp_path}/s"]
    far = settings_of(args)
    assert far.memory_bytes == 7 << 20
    assert far.peers == {"pd-pool": ("10.0.0.2", 7000)}
    assert far.link_budgets == {"pd-pool": 2 * 10**9}
    assert far.link_connections == {"pd-pool": 5}
    assert far.gateways == {"other"}
    assert far.admin == ("127.0.0.1", 0)
    assert far.socket_path == tmp_path / "s"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--name", "nobody"], "no pool node of .*, which has pd-pool, far-pool"),
        (["--name", "pd-pool"], "Missing option '--listen', or its `listen` in"),
        (
            ["--name", "far-pool", "--listen", "127.0.0.1:0"],
            "not known where pd-pool is; say --peer pd-pool=HOST:PORT",
        ),
    ],
)
def test_a_pool_node_says_what_the_file_lacks(tmp_path: Path, args: list[str], said: str) -> None:
    path = tmp_path / "deployment.toml"
    path.write_text(DEPLOYMENT + FAR)
    with pytest.raises((ConfigError, click.UsageError), match=said):
        pool.main([str(path), *args], standalone_mode=False)


def test_a_pool_node_without_a_file_needs_its_options() -> None:
    with pytest.raises(click.UsageError, match="Missing option '--listen', or FILE"):
        pool.main(["--name", "p"], standalone_mode=False)


def test_no_two_parts_get_the_same_port(tmp_path: Path) -> None:
    path = tmp_path / "deployment.toml"
    # As many as make it all but certain that a port is drawn twice.
    engines = [f'[clusters.far.engines.e{i}]\npool = "far-pool"\n' for i in range(800)]
    path.write_text(DEPLOYMENT + FAR + "".join(engines))
    topology = lay_out(load_deployment(path), path)
    given = [*topology.pools.values(), *topology.admins.values(), topology.gateway]
    given += [split_address(url.removeprefix("http://")) for url in topology.engines.values()]
    assert len(given) > 800
    assert len({port for _, port in given}) == len(given)


def test_a_port_that_is_found_is_none_that_a_connection_may_get_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "deployment.toml"
    path.write_text(DEPLOYMENT.replace("127.0.0.1:8000", "127.0.0.1:0") + FAR)
    topology = lay_out(load_deployment(path), path)
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [port for _, port in (*topology.pools.values(), topology.gateway)]
    ports += [split_address(url.removeprefix("http://"))[1] for url in topology.engines.values()]
    assert ports
    assert max(ports) < low


def test_a_collector_that_is_no_url_is_refused(tmp_path: Path) -> None:
    args = ["--name", "p", "--listen", "127.0.0.1:0", "--socket", "s", "--identities"]
    with pytest.raises(ConfigError, match="is no http:// or https:// URL"):
        pool.main([*args, str(tmp_path), "--tracing", "127.0.0.1:4318"], standalone_mode=False)


def test_budgets_and_counts_are_read_with_the_peer_they_are_for() -> None:
    assert NAMED_RATE.convert("pd-pool=1.5Gbps", None, None) == ("pd-pool", 1_500_000_000)
    assert NAMED_COUNT.convert("pd-pool=16", None, None) == ("pd-pool", 16)
    for wrong in ("pd-pool=17", "pd-pool=0", "=3", "pd-pool"):
        with pytest.raises(click.BadParameter, match="NAME=COUNT"):
            NAMED_COUNT.convert(wrong, None, None)
    with pytest.raises(click.BadParameter, match="10Gbps"):
        NAMED_RATE.convert("pd-pool=fast", None, None)


def test_a_budget_for_a_peer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    args = ["--name", "p", "--listen", "127.0.0.1:0", "--socket", "s", "--identities"]
    with pytest.raises(ConfigError, match="no --peer nobody"):
        pool.main([*args, str(tmp_path), "--link-budget", "nobody=1Gbps"], standalone_mode=False)


TIMING = Path(__file__).parents[3] / "examples" / "timing.toml"


@pytest.mark.parametrize("one_process", [False, True])
def test_timing_engines_are_told_who_they_are(tmp_path: Path, one_process: bool) -> None:
    path = tmp_path / "timing.toml"
    text = TIMING.read_text().replace("127.0.0.1:8000", "127.0.0.1:0")
    path.write_text(text.replace("block_tokens = 256", f"one_process = {str(one_process).lower()}"))
    _, (*engines, _) = parts(lay_out(load_deployment(path), path))
    parser = timing.make_parser(click.Context(timing))
    told = [parser.parse_args(part.command.args[5:])[0] for part in engines]
    names = [[entry.partition("=")[0] for entry in options["engines"]] for options in told]
    if one_process:
        assert names == [["prfaas-0", "prfaas-1"], ["pd-0", "pd-1"]]
    else:
        assert names == [["prfaas-0"], ["prfaas-1"], ["pd-0"], ["pd-1"]]
    assert [options.get("cluster") for options in told[:: len(told) - 1]] == ["prfaas", None]
    assert {options["time_scale"] for options in told} == {"0.1"}
    assert told[-1]["pool"].endswith("pd-pool.sock")


def test_a_model_of_timing_engines_says_so(tmp_path: Path) -> None:
    path = tmp_path / "timing.toml"
    path.write_text(TIMING.read_text().replace("prfaas-timing", "my-model"))
    with pytest.raises(ConfigError, match="compute nothing"):
        load_deployment(path)


def test_timing_engines_are_told_where_they_publish(tmp_path: Path) -> None:
    path = tmp_path / "timing.toml"
    places = 'kv_events = "ipc:///e"\nkv_events_replay = "ipc:///r"\n'
    table = "[clusters.pd.engines.pd-0]\n"
    text = TIMING.read_text().replace("127.0.0.1:8000", "127.0.0.1:0")
    path.write_text(text.replace(table, table + places))
    _, (*engines, _) = parts(lay_out(load_deployment(path), path))
    args = {part.name: part.command.args for part in engines}
    assert args["pd-0"][args["pd-0"].index("--kv-events") + 1] == "pd-0=ipc:///e,ipc:///r"
    assert sum("--kv-events" in told for told in args.values()) == 1


def test_pool_nodes_let_every_gateway_in(tmp_path: Path, settings_of: SettingsOf) -> None:
    path = tmp_path / "deployment.toml"
    replicas = '[gateway]\nreplicas = { gateway-b = "192.0.2.1:8000" }\n'
    path.write_text(DEPLOYMENT.replace("[gateway]\n", replicas))
    deployment = load_deployment(path)
    check_addresses(deployment)
    check_ports(deployment)
    pools, _ = parts(lay_out(deployment, path))
    for part in pools:
        assert settings_of(part.command.args[4:]).gateways == {"gateway", "gateway-b"}


def test_a_gateway_runs_under_a_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deployment.toml"
    replicas = '[gateway]\nreplicas = { gateway-b = "127.0.0.1:7" }\n'
    path.write_text(DEPLOYMENT.replace("[gateway]\n", replicas))
    other = load_deployment(path).run_by("gateway-b").gateway
    assert (other.name, other.listen) == ("gateway-b", "127.0.0.1:7")
    with pytest.raises(ConfigError, match=r"gateway-c is no gateway.*gateway, gateway-b"):
        gateway.main([str(path), "--name", "gateway-c"], standalone_mode=False)


def test_addresses_with_colons_are_bracketed(tmp_path: Path) -> None:
    path = tmp_path / "deployment.toml"
    path.write_text(DEPLOYMENT + FAR)
    laid = lay_out(load_deployment(path), path)
    six = replace(laid, gateway=("::1", 8000), pools=dict.fromkeys(laid.pools, ("::1", 7100)))
    pools, (*_, gateway) = parts(six)
    assert gateway.whole_url.startswith("http://[::1]:8000/health")
    told = " ".join(arg for part in (*pools, gateway) for arg in part.command.args)
    assert "--listen [::1]:8000" in told
    assert "--pool pd-pool=[::1]:7100" in told
    assert "--peer pd-pool=[::1]:7100" in told
    text = DEPLOYMENT + FAR
    for pool_table in ("[clusters.pd.pools.pd-pool]", "[clusters.far.pools.far-pool]"):
        text = text.replace(pool_table, f'{pool_table}\nlisten = "[::1]:7100"')
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cannot both listen on \[::1\]:7100"):
        check_addresses(load_deployment(path))

"""Deployment files: what is right loads, what is wrong says what, where and what instead."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from prfaas.cli.parts.pool_settings import settings_in
from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment, ModelTable
from prfaas.config.load import load_deployment
from prfaas.config.routing import RoutingTable
from prfaas.errors import ConfigError
from tests.config.good_file import GOOD, toml

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
Change = Callable[[dict[str, Any]], object]


def far_pool(tables: dict[str, Any]) -> dict[str, Any]:
    pool: dict[str, Any] = tables["clusters"]["far"]["pools"]["far-pool"]
    return pool


def far_engine(tables: dict[str, Any]) -> dict[str, Any]:
    engine: dict[str, Any] = tables["clusters"]["far"]["engines"]["far-engine"]
    return engine


def split_over_two_clusters(tables: dict[str, Any]) -> None:
    tables["clusters"]["home"]["engines"]["home-engine"]["role"] = "decode"
    tables["clusters"]["annex"] = {
        "role": "pd",
        "pools": {"other-pool": {}},
        "engines": {"a": {"pool": "other-pool", "role": "prefill"}},
    }


def split_over_two_hosts(tables: dict[str, Any]) -> None:
    local = tables["clusters"]["home"]
    local["pools"]["other-pool"] = {"links": {"home-pool": {"budget": "10Gbps"}}}
    local["engines"]["home-engine"]["role"] = "decode"
    local["engines"]["a"] = {"pool": "other-pool", "role": "prefill"}


def load(tmp_path: Path, change: Change = lambda _: None) -> Deployment:
    tables = copy.deepcopy(GOOD)
    change(tables)
    path = tmp_path / "deployment.toml"
    path.write_text(toml(tables))
    return load_deployment(path)


def problems(tmp_path: Path, change: Change) -> list[str]:
    """The lines of the error, without the one that names the file."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, change)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{tmp_path / 'deployment.toml'}:"
    return [line.strip() for line in lines]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_load(path: Path) -> None:
    deployment = load_deployment(path)
    assert deployment.with_role(ClusterRole.PD)
    assert deployment.with_role(ClusterRole.PRFAAS) or path.name == "two-hosts.toml"


def test_hosts_of_a_pd_cluster_have_links_in_both_directions(tmp_path: Path) -> None:
    deployment = load(tmp_path, split_over_two_hosts)
    assert deployment.destinations("far-pool") == ["home-pool", "other-pool"]
    assert deployment.destinations("home-pool") == ["other-pool"]
    assert deployment.destinations("other-pool") == ["home-pool"]
    for name in ("home-pool", "other-pool"):
        found = settings_in(deployment, name, tmp_path)
        (peer,) = found["peers"]
        assert found["sources"] == {"far-pool", peer}
    assert settings_in(deployment, "other-pool", tmp_path)["link_budgets"] == {"home-pool": 10**10}


def test_quantities_are_read_with_their_units(tmp_path: Path) -> None:
    deployment = load(tmp_path)
    assert deployment.routing.transfer_timeout == 5 * 10**9
    assert deployment.clusters["far"].pools["far-pool"].memory == 2**30
    assert deployment.gateway.body_bytes_max == 8 * 2**20


def test_a_link_has_a_budget_in_bits_and_a_number_of_connections(tmp_path: Path) -> None:
    link = {"budget": "1.5Gbps", "connections": 8}
    deployment = load(tmp_path, lambda t: far_pool(t).update(links={"home-pool": link}))
    loaded = deployment.clusters["far"].pools["far-pool"].links["home-pool"]
    assert (loaded.budget, loaded.connections) == (1_500_000_000, 8)


@pytest.mark.parametrize("joins", [False, True])
def test_a_budget_of_a_site_needs_pool_nodes_that_the_file_lists(
    tmp_path: Path, joins: bool
) -> None:
    def change(tables: dict[str, Any]) -> None:
        tables["clusters"]["far"]["link_budget"] = "1Gbps"
        if joins:
            tables["membership"] = {"folder": "members"}

    if joins:
        with pytest.raises(ConfigError, match=r"clusters\.far\.link_budget .* \[membership\]"):
            load(tmp_path, change)
    else:
        assert load(tmp_path, change).clusters["far"].link_budget == 10**9


UNKNOWN: list[tuple[list[str], str, str]] = [
    ([], "modle", "model"),
    (["model"], "nam", "name"),
    (["gateway"], "lisen", "listen"),
    (["routing"], "threshold", "offload_threshold"),
    (["security"], "identites", "identities"),
    (["clusters", "far"], "rolle", "role"),
    (["clusters", "far", "pools", "far-pool"], "memmory", "memory"),
    (["clusters", "far", "pools", "far-pool", "links", "home-pool"], "budgett", "budget"),
    (["clusters", "home", "engines", "home-engine"], "cpu", "cpus"),
]


@pytest.mark.parametrize(("table", "key", "nearest"), UNKNOWN, ids=str)
def test_an_unknown_key_names_itself_its_place_and_the_nearest(
    tmp_path: Path, table: list[str], key: str, nearest: str
) -> None:
    def change(tables: dict[str, Any]) -> None:
        for step in table:
            tables = tables.setdefault(step, {})
        tables[key] = "x"

    (line,) = problems(tmp_path, change)
    assert line == f"{'.'.join([*table, key])}: unknown key; the nearest valid one is {nearest!r}"


@pytest.mark.parametrize("key", ["x", "q" * 200, "schlüssel"])
def test_a_key_like_no_other_still_gets_an_answer(tmp_path: Path, key: str) -> None:
    (line,) = problems(tmp_path, lambda t: t["routing"].update({f'"{key}"': 1}))
    assert line.startswith(f"routing.{key}: unknown key; the nearest valid one is")


def test_every_problem_gets_its_line(tmp_path: Path) -> None:
    def change(tables: dict[str, Any]) -> None:
        tables["routing"]["offload_threshold"] = -1
        tables["gateway"]["lisen"] = "x"
        del tables["model"]["path"]

    lines = problems(tmp_path, change)
    assert len(lines) == 3
    assert "model.path: is required" in lines


def local_engine(tables: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = tables["clusters"]["home"]["engines"]["home-engine"]
    return found


def timing(**keys: Any) -> dict[str, Any]:
    return {"plan": "plan.toml", **keys}


WRONG: list[tuple[Change, str, str]] = [
    (lambda t: t["gateway"].update(request_timeout="0s"), "gateway.request_timeout", "1ms"),
    (lambda t: t["gateway"].update(connect_timeout="0s"), "gateway.connect_timeout", "1ms"),
    (lambda t: t["routing"].update(prefill_timeout="0s"), "routing.prefill_timeout", "1ms"),
    (lambda t: t["gateway"].update(body_bytes_max="0B"), "body_bytes_max", "1KiB"),
    (lambda t: local_engine(t).update(url="http://a:70000"), "home-engine.url", "70000"),
    (lambda t: local_engine(t).update(url="http://a:1?b#c"), "home-engine.url", "no path"),
    (lambda t: local_engine(t).update(url="http://key@a:1"), "home-engine.url", "no path"),
    (lambda t: local_engine(t).update(url="http://[::1"), "home-engine.url", "no path"),
    (
        lambda t: t["clusters"]["home"].update(timing=timing(nope=1)),
        "clusters.home.timing.nope",
        "unknown key",
    ),
    (lambda t: t.update(tracing={"endpoint": "http://a", "ratio": 1}), "ratio", "sample_ratio"),
    (lambda t: t.update(tracing={"endpoint": "a"}), "tracing.endpoint", "4318"),
    (
        lambda t: t["clusters"]["home"].update(timing=timing(time_scale=float("inf"))),
        "clusters.home.timing.time_scale",
        "inf",
    ),
    (lambda t: t["routing"].update(replication_half_life="0s"), "replication_half_life", "1ms"),
    (lambda t: t["routing"].update(transfer_timeout=5), "routing.transfer_timeout", "250ms"),
    (lambda t: t["routing"].update(transfer_timeout="5"), "routing.transfer_timeout", "250ms"),
    (lambda t: t["routing"].update(transfer_timeout="5 parsecs"), "transfer_timeout", "parsecs"),
    (lambda t: t["gateway"].update(body_bytes_max=8), "gateway.body_bytes_max", "16GiB"),
    (lambda t: t["gateway"].update(body_bytes_max="8gb"), "gateway.body_bytes_max", "GiB"),
    (lambda t: t["gateway"].update(body_bytes_max="9" * 400 + "GiB"), "body_bytes_max", "999"),
    (lambda t: t["gateway"].update(listen="here"), "gateway.listen", "here"),
    (lambda t: t["gateway"].update(listen="127.0.0.1:99999"), "gateway.listen", "65535"),
    (lambda t: t["gateway"].update(listen="8000"), "gateway.listen", "HOST:PORT"),
    (lambda t: t["gateway"].update(listen="a..b:80"), "gateway.listen", "1 to 63 characters"),
    (lambda t: t["routing"].update(policy="adaptive"), "routing", "needs a plan"),
    (lambda t: t["routing"].update(short_term_loop=True), "routing", "needs a plan"),
    (
        lambda t: t["clusters"]["far"]["pools"]["far-pool"].update(address="10.0.0.1:70000"),
        "clusters.far.pools.far-pool.address",
        "70000",
    ),
    (lambda t: t["routing"].update(offload_threshold="many"), "offload_threshold", "many"),
    (lambda t: t["routing"].update(offload_threshold=1.5), "offload_threshold", "1.5"),
    (lambda t: t["clusters"]["far"].update(role="king"), "clusters.far.role", "'prfaas' or 'pd'"),
    (lambda t: t["clusters"].update(Far=t["clusters"].pop("far")), "clusters.Far", "a name"),
    (
        lambda t: t["clusters"]["home"]["engines"]["home-engine"].update(listen="127.0.0.1:1"),
        "clusters.home.engines.home-engine",
        "`url`",
    ),
    (
        lambda t: t["clusters"]["home"]["engines"]["home-engine"].update(url="ftp://there"),
        "clusters.home.engines.home-engine.url",
        "ftp://there",
    ),
    (
        lambda t: t["clusters"]["home"]["engines"]["home-engine"].update(pool="far-pool"),
        "clusters.home",
        "home-pool",
    ),
    (lambda t: t["clusters"]["home"].update(engines={}), "file", "clusters.home.engines is empty"),
    (
        lambda t: t["clusters"]["far"]["engines"].update({"home-pool": {"pool": "far-pool"}}),
        "file",
        "home-pool",
    ),
    (lambda t: far_pool(t).update(links={"nobody": {}}), "file", "it pushes to home-pool"),
    (lambda t: far_pool(t).update(disk="", disk_limit="1GiB"), "far-pool.disk", "name a folder"),
    (lambda t: far_pool(t).update(disk="d", disk_limit="1B"), "disk_limit", "1MiB"),
    (lambda t: far_pool(t).update(memory="10B"), "far-pool.memory", "1MiB"),
    (lambda t: far_engine(t).update(host_memory="1MB"), "far-engine.host_memory", "1MiB"),
    (lambda t: far_engine(t).update(env={"A": "1", '"A=B"': "1"}), "far-engine.env", "'A=B'"),
    (
        lambda t: far_pool(t).update(links={"home-pool": {"budget": "1 GB/s"}}),
        "far-pool.links.home-pool.budget",
        "10Gbps",
    ),
    (
        lambda t: far_pool(t).update(links={"home-pool": {"connections": 17}}),
        "far-pool.links.home-pool.connections",
        "16",
    ),
    (lambda t: t["gateway"].update(name="far-pool"), "file", "far-pool"),
    (lambda t: t["clusters"]["home"].update(role="prfaas"), "file", 'role = "pd"'),
    (lambda t: t.pop("clusters"), "clusters", "is required"),
    (lambda t: t["routing"].update(reroling=True), "routing", "needs a plan"),
    (
        lambda t: t["routing"].update(state_checkpoints="auto"),
        "routing",
        'state_checkpoints = "auto" needs a plan',
    ),
    (lambda t: t["routing"].update(pull=True), "routing", "pull needs a plan"),
    (lambda t: t["routing"].update(second_price=0.02), "routing", "second_price needs a plan"),
    (lambda t: t["routing"].update(second_price=0, plan="p"), "second_price", "greater than 0"),
    (lambda t: t["routing"].update(bandwidth="wide"), "bandwidth", "abundant"),
    (
        lambda t: t["routing"].update(bandwidth="abundant", policy="paper"),
        "routing",
        'bandwidth = "abundant" needs a plan',
    ),
    (
        lambda t: t["routing"].update(bandwidth="abundant", plan="p"),
        "routing",
        'needs a plan and policy = "paper"',
    ),
    (lambda t: t["routing"].update(pull=True, plan="p", policy="paper"), "routing", "pull needs"),
    (
        lambda t: t["routing"].update(reroling=True, plan="plan.toml"),
        "file",
        'role = "prefill" or "decode"',
    ),
    (
        lambda t: t["clusters"]["far"]["engines"]["far-engine"].update(role="prefill"),
        "file",
        "far is PrfaaS",
    ),
    (
        lambda t: t["clusters"]["home"]["engines"]["home-engine"].update(role="decode"),
        "file",
        "home-engine: decode",
    ),
    (
        lambda t: t["clusters"]["home"]["engines"].update(
            {"a": {"pool": "home-pool", "role": "prefill"}}
        ),
        "file",
        "home-engine: both, a: prefill",
    ),
    (split_over_two_clusters, "file", "annex, home"),
]


@pytest.mark.parametrize(("change", "place", "hint"), WRONG)
def test_a_mistake_names_its_place_and_what_is_wrong(
    tmp_path: Path, change: Change, place: str, hint: str
) -> None:
    (line,) = problems(tmp_path, change)
    where, _, what = line.partition(": ")
    assert where.endswith(place)
    assert hint in what


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("/models/tiny", "/models/ti\\u0000ny", "model.path: '/models/ti\\x00ny'"),
        ("[model]", 'state = "s\\u0000"\n[model]', "state: 's\\x00'"),
        ('far-pool"\n', 'far-pool"\nargs = ["a", "b\\u0000"]\n', "far-engine.args.1: 'b\\x00'"),
        ('far-pool"\n', 'far-pool"\nenv = {A = "b\\u0000"}\n', "far-engine.env.A: 'b\\x00'"),
        ('far-pool"\n', 'far-pool"\nenv = {"A\\u0000" = ""}\n', "the key holds a NUL"),
    ],
)
def test_no_text_holds_a_nul(tmp_path: Path, old: str, new: str, place: str) -> None:
    load(tmp_path)
    path = tmp_path / "deployment.toml"
    text = path.read_text().replace("'", '"')
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match="NUL character") as caught:
        load_deployment(path)
    first, line = str(caught.value).split("\n")
    assert first == f"{path}:"
    assert place in line


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read: No such file"):
        load_deployment(tmp_path / "nowhere.toml")


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_deployment(tmp_path)


@pytest.mark.parametrize("content", [b"[model\n", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_what_is_no_toml_says_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "deployment.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"deployment\.toml is no valid TOML"):
        load_deployment(path)


def test_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "long.json"
    path.write_text('{"content": "' + "Ethernet is enough. " * 100 + '"}')
    with pytest.raises(ConfigError, match=r"long\.json is no valid TOML: .* as JSON does"):
        load_deployment(path)


def test_a_model_s_name_can_be_printed() -> None:
    with pytest.raises(ValidationError, match="cannot be printed"):
        ModelTable(name="a\n\x1b[31m", path="here")


@pytest.mark.parametrize(
    ("table", "policy"),
    [({}, "observed"), ({"plan": "p"}, "adaptive"), ({"policy": "paper"}, "paper")],
)
def test_without_a_policy_the_best_that_can_be_known_is_taken(
    table: dict[str, Any], policy: str
) -> None:
    routing = RoutingTable.model_validate({"offload_threshold": 1000, **table})
    assert routing.effective_policy == policy


def test_a_gateway_has_one_pd_cluster(tmp_path: Path) -> None:
    def two(tables: Any) -> None:
        tables["clusters"]["far"]["role"] = "pd"

    load(tmp_path).check_one_local()
    with pytest.raises(ConfigError, match=r"far.* have the role pd, and a gateway has one"):
        load(tmp_path, two).check_one_local()


def test_settings_of_engines_that_shape_answers(tmp_path: Path) -> None:
    def with_args(*args: str) -> Deployment:
        return load(tmp_path, lambda t: local_engine(t).update(args=list(args)))

    assert with_args().response_role == "assistant"
    assert not with_args().forces_usage
    made = with_args("--response-role", "model", "--enable-force-include-usage")
    assert (made.response_role, made.forces_usage) == ("model", True)

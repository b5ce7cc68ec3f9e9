"""A deployment that `prfaas up` runs, seen from outside: metrics to scrape, links to test."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from prfaas.cli.deploy.topology import FILE_NAME, lay_out
from prfaas.config.load import load_deployment
from tests.cli.conftest import Prfaas, Start, edit, one_line
from tests.cli.running_parts import DEPLOYMENT, until
from tests.cli.started_commands import said
from tests.deployments import ROOT, TIMING, placed


@pytest.mark.timeout(300)
def test_a_running_deployment_is_scraped_and_its_links_are_tested(
    start: Start, tmp_path: Path
) -> None:
    file, _ = placed(TIMING, tmp_path)
    edit(
        file,
        "[clusters.pd.engines.pd-0]\n",
        f'[clusters.pd.engines.pd-0]\nkv_events = "ipc://{tmp_path}/state/pd-0.events"\n',
    )
    umask = os.umask(0)
    try:
        process = start("up", file)
    finally:
        os.umask(umask)
    until(lambda: "ready at" in said(tmp_path) or process.poll() is not None, 200)
    assert process.poll() is None, said(tmp_path)
    until(lambda: "Ctrl-C stops everything" in said(tmp_path))
    assert (tmp_path / "state" / "pd-0.events").is_socket()
    assert open_to_others(tmp_path / "state") == []
    found = json.loads((tmp_path / "state" / FILE_NAME).read_text())
    pages = {each["labels"]["part"]: page(each["targets"][0]) for each in found}
    deployment = load_deployment(file)
    parts = {name for cluster in deployment.clusters.values() for name in cluster.pools}
    for name in parts:
        assert "prfaas_pool_" in pages[name]
        assert f"metrics of {name} at http://127.0.0.1:" in said(tmp_path)
    assert "prfaas_requests_total" in pages["gateway"]
    assert "vllm:" in pages["pd-0"]
    probe = [sys.executable, "-m", "prfaas", "link", "test", "prfaas-pool", "pd-pool"]
    probe += ["--file", str(file), "--connections", "1", "--seconds", "0.2", "--json"]
    tested = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    assert tested.returncode == 0, tested.stderr
    assert json.loads(tested.stdout)["probes"][0]["goodput_bits_per_s"] > 0


PUBLIC = {".pem", ".json"}
"""Certificates, and addresses for Prometheus."""


def open_to_others(folder: Path) -> list[Path]:
    """Paths that others than the owner may read, write or connect to, against the intention."""
    private = [path for path in folder.rglob("*") if path.suffix not in PUBLIC]
    assert len(private) > 10
    return [path for path in [folder, *private] if path.stat().st_mode & 0o077]


def page(target: str) -> str:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as reply:
        text: str = reply.read().decode()
        return text


def test_the_example_for_prometheus_reads_what_up_writes() -> None:
    example = yaml.safe_load((ROOT / "examples" / "prometheus.yml").read_text())
    (scrape,) = example["scrape_configs"]
    (discovery,) = scrape["file_sd_configs"]
    place = (ROOT / "examples" / discovery["files"][0]).resolve()
    state = load_deployment(ROOT / "examples" / "laptop.toml").state
    assert place == ROOT / state / FILE_NAME
    assert (ROOT / "examples" / example["rule_files"][0]).resolve().exists()


def test_admin_ports_are_the_same_at_every_start_and_as_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "deployment.toml"
    text = DEPLOYMENT.replace('"state"', f'"{tmp_path}/state"')
    path.write_text(text)
    first, second = (lay_out(load_deployment(path), path).admins["pd-pool"] for _ in range(2))
    assert first == second
    assert 20_000 <= first[1] < 30_020
    path.write_text(text.replace('memory = "1MiB"', 'memory = "1MiB"\nadmin = "127.0.0.1:7183"'))
    assert lay_out(load_deployment(path), path).admins["pd-pool"] == ("127.0.0.1", 7183)
    path.write_text(text.replace('memory = "1MiB"', 'admin = "h:1"\naddress = "h:2"'))
    assert not lay_out(load_deployment(path), path).admins


def test_a_link_test_without_a_running_deployment_says_what_to_do(
    prfaas: Prfaas, laptop: Path
) -> None:
    args = ("link", "test", "prfaas-pool", "pd-pool", "--file", laptop)
    line = one_line(prfaas(*args))
    assert "pool pd-pool has no fixed address in the file, and no `prfaas up` answers" in line
    assert "--to HOST:PORT" in line


@pytest.mark.parametrize("command", ["check", "up"])
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            '[clusters.pd.pools.pd-pool]\nmemory = "512MiB"',
            '[clusters.pd.pools.pd-pool]\nmemory = "900TiB"',
            "clusters.pd.pools.pd-pool.memory 900.0 TiB",
        ),
        ("host_memory = ", 'host_memory = "900TiB" # ', "host_memory 900.0 TiB"),
        (
            '[clusters.pd.pools.pd-pool]\nmemory = "512MiB"',
            '[clusters.pd.pools.pd-pool]\ndisk = "blocks"\ndisk_limit = "900TiB"',
            "clusters.pd.pools.pd-pool.disk_limit 900.0 TiB: 900.0 TiB together are more than",
        ),
    ],
)
def test_what_this_machine_does_not_have_is_refused(
    prfaas: Prfaas, laptop: Path, command: str, old: str, new: str, said: str
) -> None:
    assert prfaas("check", laptop)[0] == 0
    edit(laptop, old, new)
    assert said in one_line(prfaas(command, laptop))


def test_what_runs_elsewhere_is_not_held_against_this_machine(prfaas: Prfaas, laptop: Path) -> None:
    edit(
        laptop,
        '[clusters.pd.pools.pd-pool]\nmemory = "512MiB"',
        '[clusters.pd.pools.pd-pool]\nmemory = "900TiB"\naddress = "pd.example.net:7100"',
    )
    assert prfaas("check", laptop)[0] == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ('"--pipeline-parallel-size", "2"', "--pipeline-parallel-size 2: prfaas does not support"),
        ('"-pp=2"', "--pipeline-parallel-size 2: prfaas does not support"),
        ('"--pipeline_parallel_size=4"', "--pipeline-parallel-size 4: prfaas does not support"),
        ('"--data-parallel-size", "2"', "--data-parallel-size 2 with KV events"),
        ('"--nnodes", "2"', "--nnodes 2: the ranks of an engine have to be on one host"),
        ('"-n", "2", "-r", "0"', "--nnodes 2: the ranks of an engine have to be on one host"),
        ('"--node_rank=1"', "--node-rank 1: the ranks of an engine have to be on one host"),
        (
            '"--distributed-executor-backend", "ray"',
            "--distributed-executor-backend ray: the ranks of an engine have to be on one host",
        ),
        (
            '"--distributed-executor-backend=external_launcher"',
            "--distributed-executor-backend external_launcher: the ranks of an engine have to be",
        ),
        (
            '"-dp", "4", "--data-parallel-size-local", "2"',
            "--data-parallel-size-local 2 of --data-parallel-size 4: the ranks of an engine",
        ),
        ('"--data-parallel-backend", "ray"', "--data-parallel-backend ray: the ranks of an"),
        ('"--data-parallel-hybrid-lb"', "--data-parallel-hybrid-lb: the ranks of an engine"),
        ('"--headless"', "--headless: the ranks of an engine have to be on one host"),
    ],
)
@pytest.mark.parametrize("command", ["check", "up"])
def test_ranks_that_are_not_served_are_refused_in_words(
    prfaas: Prfaas, laptop: Path, command: str, args: str, said: str
) -> None:
    edit(laptop, '"--max-num-batched-tokens", "2048",', f"{args},")
    code, _, errors = prfaas(command, laptop)
    assert code == 2
    assert said in errors


def test_data_parallel_ranks_without_events_are_served(prfaas: Prfaas, laptop: Path) -> None:
    edit(laptop, '"--max-num-batched-tokens", "2048",', '"--data-parallel-size", "2",')
    edit(laptop, "kv_events", "# kv_events")
    assert prfaas("check", laptop)[0] == 0

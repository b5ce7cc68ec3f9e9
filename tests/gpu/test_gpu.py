"""The GPU suite: `python -m pytest -m gpu` on a machine with an NVIDIA GPU, one command.

Everywhere else the tests marked gpu skip themselves. The same functions run on the CPU with
`-m "engine or nightly"`; the rest of this file needs no engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.config.load import load_deployment
from tests.deployments import LAPTOP, placed
from tests.engines.vllm_modules import needing_vllm
from tests.gpu import suite
from tests.gpu.kit import facts, page
from tests.gpu.kit.__main__ import run_all
from tests.gpu.kit.parts import PARTS
from tests.gpu.kit.results import read
from tests.gpu.suite import CPU, DENSE_KIND, KINDS, LENGTHS, Figures, Machine

ON_GPU = [pytest.mark.gpu, pytest.mark.timeout(1800)]
ON_CPU = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]
PAGE = Path(__file__).parents[2] / "docs" / "results" / "gpu.md"
H200 = Machine("cuda", 1, "NVIDIA H200")


def machine_for(device: str) -> Machine:
    """The machine of a test, which is skipped without it."""
    needing_vllm("vllm")
    if device == "cpu":
        return CPU
    found = suite.gpus()
    if found is None:
        pytest.skip("no NVIDIA GPU here: run `python -m pytest -m gpu` on a machine with one")
    return found


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=ON_GPU), pytest.param("cpu", marks=ON_CPU)]
)
async def test_the_whole_suite(device: str, tmp_path: Path) -> None:
    """Profiles of engines; the page in the documentation is the kit's."""
    machine = machine_for(device)
    lengths = LENGTHS if machine.is_gpu else (2048,)
    figures = await suite.measured(machine, lengths)
    target = tmp_path / "suite.md"
    target.write_text(suite.page(figures, f"python -m pytest -m gpu    # on {machine.device}"))
    assert not figures.faults, figures.faults
    assert len(figures.identity) == len(KINDS) + (machine.num_devices > 1)
    assert len(figures.ttft) == len(KINDS) * len(lengths)
    assert len(figures.stacks) == max(2, len(lengths))
    assert all(line.endswith("| remote |") for line in figures.ttft), figures.ttft


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=ON_GPU), pytest.param("cpu", marks=ON_CPU)]
)
def test_every_part_of_the_kit(device: str, tmp_path: Path) -> None:
    """On a GPU the results replace the page in the documentation."""
    machine = machine_for(device)
    facts.write(tmp_path, machine.device, ["pytest", "-m", "gpu"])
    is_good = run_all(PARTS, machine.device, tmp_path, 1700.0)
    target = PAGE if machine.is_gpu else tmp_path / "gpu.md"
    target.write_text(page.page(tmp_path))
    assert is_good, [read(tmp_path, part.name) for part in PARTS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("machine", [CPU, H200], ids=["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_deployment_files_are_valid(
    tmp_path: Path, kind: str, machine: Machine, ranks: int
) -> None:
    overlay = suite.settings(machine, kind, 131_328, pd_ranks=ranks, memory="8GiB")
    deployment = load_deployment(*placed(LAPTOP, tmp_path, overlay))
    engines = {
        name: engine.args
        for cluster in deployment.clusters.values()
        for name, engine in cluster.engines.items()
    }
    for name, args in engines.items():
        assert ("--gpu-memory-utilization" in args) == machine.is_gpu
        assert "--enforce-eager" not in args
        is_split = name == "pd-engine" and ranks == 2
        assert ("--tensor-parallel-size" in args) == is_split


def test_copies_are_measured_in_both_directions() -> None:
    needing_vllm("torch")
    figures = Figures(CPU)
    suite.copies(CPU, figures, num_bytes=1 << 24)
    assert len(figures.copies) == len(suite.COPY_BLOCKS)
    for line in figures.copies:
        assert all(float(each) > 0 for each in line.split("|")[2:4])


def test_the_page_names_machine_versions_and_faults() -> None:
    vllm = needing_vllm("vllm")
    figures = Figures(H200, ["| a |"], ["| b |"], ["| c |"], ["profile"], ["it broke"], ["| d |"])
    text = suite.page(figures, "python -m pytest -m gpu")
    for words in (
        "1 x NVIDIA H200",
        vllm.__version__,
        "| a |",
        "| b |",
        "| c |",
        "| d |",
        "- it broke",
    ):
        assert words in text


def test_longer_prompts_are_a_field_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 16384, "other": 1}')
    suite.lengthen(tmp_path, 131_328)
    assert '"max_position_embeddings": 131328' in (tmp_path / "config.json").read_text()
    assert DENSE_KIND in KINDS

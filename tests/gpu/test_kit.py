"""The kit for a borrowed GPU on a CPU: its parts fail on damage, and a cut one keeps its figures.

The dry run beside PyTorch 2.11 needs Python 3.12 and the archive: `python3 gpu-kit/start.py --dry`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.engines.vllm_modules import needing_vllm
from tests.gpu.kit import build, facts, page
from tests.gpu.kit.__main__ import run_all
from tests.gpu.kit.damages import DAMAGES
from tests.gpu.kit.deployment import engine_args, settings
from tests.gpu.kit.engines_part import handed_over
from tests.gpu.kit.models import CHECKPOINTS, DENSE, HYBRID_KIND
from tests.gpu.kit.parts import PARTS, Part, chosen
from tests.gpu.kit.results import Results, read
from tests.gpu.kit.ttft_part import predicted_s
from tests.live.identity_by_kind import PROMPT_TOKENS, Row

KIT = Path(build.__file__).parent
ROOT = Path(__file__).parents[2]
LIMIT_S = 9 * 60


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=[] if part == "layers" else pytest.mark.nightly) for part in DAMAGES],
)
def test_damage_is_seen(part: str) -> None:
    """A part holds, and does not with a flipped byte, a wrong description or a skipped copy."""
    needing_vllm("torch")
    needing_vllm("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.kit.damages", part],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("") == []
    assert set(found) == set(DAMAGES[part])
    for damage, faults in found.items():
        assert faults, damage


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_a_link_that_copies_nothing_is_seen(tmp_path: Path) -> None:
    """By real engines: the decode engine computes every prompt itself then."""
    needing_vllm("vllm")
    row = await handed_over(Results(tmp_path, "engines", "cpu", "skipped copy"), DENSE)
    assert row.num_as_fresh == len(PROMPT_TOKENS)
    assert row.num_loaded == row.num_bytes == 0
    assert any("not all prompts were prefilled remotely" in words for words in row.faults)


def test_answers_that_differ_are_faults() -> None:
    every = len(PROMPT_TOKENS)
    whole = Row(
        "kind",
        num_remote=every,
        num_as_cached=every,
        num_blocks=4,
        num_loaded=4,
        num_bytes=9,
        planned_bytes=9,
    )
    assert whole.faults == []
    for field in ("num_remote", "num_as_cached", "num_loaded", "num_bytes"):
        broken = Row(**{name: getattr(whole, name) for name in Row.__slots__})
        setattr(broken, field, getattr(whole, field) - 1)
        assert len(broken.faults) == 1, field


def test_a_part_that_is_cut_keeps_what_it_had(tmp_path: Path) -> None:
    """The second part has no time left; the first one's process ends before it can say so."""
    part = Part("codec", "e", 1, 1, "Codec")
    Results(tmp_path, "codec", "cpu").add("codec", spread="normal")
    assert not run_all((part, part), "cpu", tmp_path, 5.5)
    found = read(tmp_path, "codec")
    assert found is not None
    assert found["skipped"] == ["no time was left"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["part-codec.json", "parts.log"]


def test_a_process_that_dies_leaves_its_records(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from tests.gpu.kit.results import Results; import os; "
        f"Results(Path({str(tmp_path)!r}), 'codec', 'cpu').add('codec', value=1); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT)
    found = read(tmp_path, "codec")
    assert found is not None
    assert [record["value"] for record in found["records"]] == [1]
    assert found["ended"] == ""


def test_parts_are_chosen_in_the_order_of_their_value() -> None:
    assert chosen("all") == PARTS
    assert [part.letter for part in chosen("e, copies,a")] == ["a", "b", "e"]
    with pytest.raises(ValueError, match="parts z are not known"):
        chosen("a,z")
    assert sum(part.limit_s for part in PARTS) < LIMIT_S


def test_the_page_shows_every_part(tmp_path: Path) -> None:
    """Also one that did not run, one that was cut, and that no GPU was there."""
    facts.write(tmp_path, "cpu", ["--device", "cpu"])
    results = Results(tmp_path, "copies", "cpu")
    results.add("copies", pinned=True, block_bytes=65536, to_host_gb_s=1.5, to_device_gb_s=2.5)
    results.check(False, "3 blocks came back otherwise")
    results.skip("no GPU")
    results.save("cut after 45 s")
    text = page.page(tmp_path, "imports: 10 modules")
    assert page.NO_GPU in text
    assert text.count("Did not run.") == len(PARTS) - 1
    for words in ("| pinned | 65,536 | 1.5 | 2.5 |", "cut after 45 s", "Fault: 3 blocks", "no GPU"):
        assert words in text
    assert "imports: 10 modules" in text


def test_the_page_in_the_documentation_is_of_this_kit() -> None:
    """It says that no GPU has run, until one has."""
    text = (ROOT / "docs" / "results" / "gpu.md").read_text()
    assert page.KIT in text
    assert (page.NO_GPU in text) == ("no GPU; CPU" in text)
    for part in PARTS:
        assert f"## ({part.letter}) {part.title}" in text


def test_what_the_project_needs_is_carried_or_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = {re.split(r"[<>=\[ ]", name)[0] for name in project}
    carried = set(build.names_of(KIT / "wheels.txt"))
    there = set(build.names_of(KIT / "machine.txt"))
    assert not carried & there
    assert wanted <= carried | there
    assert len(build.pinned(sorted(carried))) == len(carried)
    with pytest.raises(LookupError, match="no-such-name"):
        build.pinned(["no-such-name"])


def test_kernels_of_vllm_stay_behind() -> None:
    for name in ("vllm/_C_stable_libtorch.abi3.so", "vllm/vllm-rs", "vllm/third_party/x/a.hpp"):
        assert not build.is_carried(name)
    assert build.is_carried("vllm/v1/worker/gpu_worker.py")
    assert build.VLLM.removeprefix("vllm==").startswith("0.32.")


def test_a_wheel_is_unpacked_as_it_is_installed(tmp_path: Path) -> None:
    import zipfile

    wheel = tmp_path / "vllm-0.32.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("vllm/a.py", "vllm/a.so", "vllm-0.32.0.data/scripts/x", "d.data/purelib/b.py"):
            archive.writestr(name, name)
    assert dict(build.files_of(wheel)) == {
        "vllm/a.py": b"vllm/a.py",
        "b.py": b"d.data/purelib/b.py",
    }


def test_the_product_does_not_know_the_bridge() -> None:
    for file in (ROOT / "src").rglob("*.py"):
        assert "kit_bridge" not in file.read_text(), file
    for file in (KIT / "bridge").glob("*.py"):
        ast.parse(file.read_text(), feature_version=(3, 12))


def test_engines_of_the_kit_use_no_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gpu.kit import deployment

    assert set(CHECKPOINTS) == {"dense", HYBRID_KIND}
    assert "TRITON_ATTN" not in engine_args("cpu", HYBRID_KIND, 8192)
    monkeypatch.setattr(deployment, "find_spec", lambda name: object())
    args = engine_args("cuda", HYBRID_KIND, 8192)
    for word in ("--enforce-eager", "TRITON_ATTN", "--kv-cache-memory-bytes"):
        assert word in args
    overlay = tomllib.loads(settings("cuda", HYBRID_KIND, 8192, "1GiB", kernel_block=16))
    engines = {name: cluster["engines"] for name, cluster in overlay["clusters"].items()}
    assert engines["prfaas"]["prfaas-engine"]["env"]["KIT_KERNEL_BLOCK"] == "16"
    assert "KIT_KERNEL_BLOCK" not in engines["pd"]["pd-engine"]["env"]


def test_the_prediction_is_the_slower_of_compute_and_link() -> None:
    assert predicted_s(2.0, 10**8, 1e10) == pytest.approx(2.01)
    assert predicted_s(0.1, 10**8, 1e9) == pytest.approx(0.81)

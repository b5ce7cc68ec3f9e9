"""Output in an encoding that lacks characters, and files with a byte order mark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PLAN = "examples/plan/paper-case-study.toml"


def _run(*args: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", "from prfaas.cli.main import main; main()", *args],
        capture_output=True,
        timeout=280,
        cwd=_ROOT,
        env=os.environ | {"PYTHONIOENCODING": encoding},
        check=False,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("encoding", ["ascii"])
@pytest.mark.parametrize(
    "args",
    [
        ("model", "llama_3_3_70b"),
        ("plan", _PLAN),
        ("plan", _PLAN, "--json"),
        ("trace", "show", "tests/traces/data/mooncake_conversation_40.jsonl"),
        ("simulate", "examples/sim/link-cut.toml", "--set", "workload.title=Φ"),
    ],
)
def test_characters_that_the_output_lacks_end_nothing(args: tuple[str, ...], encoding: str) -> None:
    done = _run(*args, encoding=encoding)
    assert b"Traceback" not in done.stderr
    assert done.returncode == (2 if "Φ" in args[-1] else 0)
    done.stdout.decode(encoding)


@pytest.mark.timeout(300)
def test_a_byte_order_mark_before_toml_or_json_is_left_out(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + b'{"model_type": "llama", "num_hidden_layers": 4}')
    plan = (_ROOT / _PLAN).read_text().replace('"profiles/', f'"{_ROOT}/examples/plan/profiles/')
    file = tmp_path / "plan.toml"
    file.write_bytes(b"\xef\xbb\xbf" + plan.encode())
    for args in (("model", str(config)), ("model", str(tmp_path)), ("plan", str(file))):
        done = _run(*args)
        assert (done.returncode, done.stderr) == (0, b"")
    file.write_bytes(plan.encode("utf-16"))
    done = _run("plan", str(file))
    assert done.returncode == 2
    assert b"is no valid TOML" in done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "change", ["workload.mu=20000", 'pd.tpot_max="0ms"', "workload.sigma=1e-300"]
)
def test_a_number_out_of_range_is_one_line_with_key_and_limit(change: str) -> None:
    done = _run("plan", _PLAN, "--set", change)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") <= 2
    key = change.partition("=")[0].rpartition(".")[2]
    assert key.encode() in done.stderr


@pytest.mark.timeout(300)
def test_a_disk_without_bandwidth_is_refused() -> None:
    done = _run("simulate", "examples/sim/link-cut.toml", "--set", 'cache.disk_bandwidth="0Gbps"')
    assert done.returncode == 2
    assert b"cache.disk_bandwidth: Input should be greater than 0" in done.stderr

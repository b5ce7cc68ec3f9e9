"""Memory of tokenisation: no texts are kept, and torch is not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.engines.checkpoint import make_tokenizer
from prfaas.wire.identity import make_authority, make_identity

NUM_TEXTS = 150
TEXT_CHARS = 200_000
GROWTH_MIB_MAX = 100
"""With words kept, these texts take more than 200 MiB."""
_MEASURE = f"""
import random, sys
from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.gateway.tokenization.known_prefixes import Naming
from prfaas.gateway.tokenization.text_encoder import Encoder
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

LAYOUT = Layout(b"L" * 32, 512, "0", (CacheGroup(0, GroupKind.FULL_ATTENTION, 512, 64),))

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

encoder = Encoder(PreTrainedTokenizerFast(tokenizer_file=sys.argv[1])).settled()
rng, naming = random.Random(1), Naming("salt", LAYOUT)
encoder.encode("begin " * 1000, False, naming)
before = resident_mib()
for number in range({NUM_TEXTS}):
    words = rng.randbytes({TEXT_CHARS} * 3 // 10).hex(" ", 4)
    encoder.encode(words[:{TEXT_CHARS}], False, naming)
print(resident_mib() - before)
"""
DEPLOYMENT = """
state = "state"
[model]
name = "tiny"
path = "./model"
[gateway]
listen = "127.0.0.1:0"
[routing]
offload_threshold = 1000
[security]
identities = "identities"
[clusters.pd]
role = "pd"
[clusters.pd.pools.pd-pool]
[clusters.pd.engines.pd-engine]
pool = "pd-pool"
"""


@pytest.mark.timeout(600)
def test_texts_of_a_byte_level_tokenizer_leave_nothing_behind(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "tokenizer.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=True)
    assert float(done.stdout.split()[-1]) < GROWTH_MIB_MAX


def test_a_gateway_process_has_no_torch(tmp_path: Path) -> None:
    model, identities = tmp_path / "model", tmp_path / "identities"
    model.mkdir()
    make_tokenizer(model)
    (model / "config.json").write_text('{"model_type": "qwen3_next", "vocab_size": 512}')
    identities.mkdir()
    make_authority(identities)
    make_identity(identities, "gateway")
    file = tmp_path / "site.toml"
    file.write_text(DEPLOYMENT)
    command = [sys.executable, "-m", "prfaas", "gateway", str(file)]
    command += ["--engine", "pd-engine=http://127.0.0.1:9", "--pool", "pd-pool=127.0.0.1:9"]
    # vLLM, if another test has imported it, has all processes from then on load torch's OpenMP.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert "listens at" in process.stdout.readline()
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        finally:
            process.kill()
    assert "tokenizers" in maps
    assert "torch" not in maps

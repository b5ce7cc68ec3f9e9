"""Start of an engine, and the tokenizer of the small checkpoint."""

import json
import sys
import warnings
from pathlib import Path

import pytest

from prfaas.config.clusters import EngineTable
from prfaas.config.deployment import ModelTable
from prfaas.engines import launch
from prfaas.engines.checkpoint import SPECIAL_TOKENS, make_checkpoint, make_tokenizer
from prfaas.engines.launch import Command, engine_command, shared_memory_files
from prfaas.errors import ConfigError

MODEL = ModelTable(name="tiny", path="/models/tiny")


def command(monkeypatch: pytest.MonkeyPatch, *, on_cpu: bool = True, **engine: object) -> Command:
    monkeypatch.setattr(launch, "runs_on_cpu", lambda: on_cpu)
    table = EngineTable.model_validate({"pool": "pd-pool", **engine})
    address = ("127.0.0.1", 8101)
    return engine_command("pd-engine", table, MODEL, address, Path("state/pd.sock"), "ab12")


def value(args: list[str], option: str) -> str:
    assert args.count(option) == 1
    return args[args.index(option) + 1]


def test_the_command_line_says_what_where_and_with_which_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = command(monkeypatch, host_memory="256MiB").args
    assert args[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert value(args, "--model") == "/models/tiny"
    assert value(args, "--served-model-name") == "tiny"
    assert (value(args, "--host"), value(args, "--port")) == ("127.0.0.1", "8101")
    assert value(args, "--prefix-caching-hash-algo") == "sha256_cbor"
    assert "--enable-prompt-tokens-details" in args
    transfer = json.loads(value(args, "--kv-transfer-config"))
    assert transfer["kv_connector"] == "PrfaasConnector"
    assert transfer["kv_role"] == "kv_both"
    assert transfer["kv_load_failure_policy"] == "recompute"
    extra = transfer["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 256 * 2**20
    assert extra["prfaas_engine"] == "pd-engine"
    assert Path(extra["prfaas_pool"]) == Path("state/pd.sock").absolute()
    left = shared_memory_files("pd-engine", "ab12")
    for suffix in ("", "_dp0", "_dp1"):  # as vLLM names the regions of data-parallel ranks
        assert Path(f"/dev/shm/vllm_offload_{transfer['engine_id']}{suffix}.mmap").match(str(left))  # noqa: S108


def test_an_engine_publishes_kv_events_where_the_file_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "--kv-events-config" not in command(monkeypatch).args
    args = command(monkeypatch, kv_events="ipc:///e", kv_events_replay="ipc:///r").args
    events = json.loads(value(args, "--kv-events-config"))
    assert events == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "ipc:///e",
        "replay_endpoint": "ipc:///r",
    }


def test_every_engine_hashes_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "31337")
    assert command(monkeypatch).env["PYTHONHASHSEED"] == launch.HASH_SEED


def test_an_engine_without_a_gpu_is_bound_to_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    env = command(monkeypatch, cpus="0-3", kv_cache_memory="2GiB").env
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert env["KMP_BLOCKTIME"] == "1"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in command(monkeypatch).env
    on_gpu = command(monkeypatch, on_cpu=False, cpus="0-3")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in on_gpu.env
    assert "--dtype" not in on_gpu.args


def test_the_operators_arguments_and_variables_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    made = command(
        monkeypatch, args=["--block-size", "384"], env={"KMP_BLOCKTIME": "9", "EXTRA": "x"}
    )
    assert made.args[-2:] == ["--block-size", "384"]
    assert made.env["KMP_BLOCKTIME"] == "9"
    assert made.env["EXTRA"] == "x"


def test_two_starts_share_no_memory_file() -> None:
    assert shared_memory_files("e", "one") != shared_memory_files("e", "two")
    assert shared_memory_files("e", "one") != shared_memory_files("f", "one")


@pytest.mark.timeout(120)
def test_the_tokenizer_gives_back_every_byte(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_tokenizer(tmp_path)
        from transformers import AutoTokenizer

        (tmp_path / "config.json").write_text('{"model_type": "qwen3_next"}')
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(1, 0x250))) + " 漢字 🙂 \n\t  two  spaces"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())
    for number, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer.encode(token, add_special_tokens=False) == [256 + number]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_checkpoint_is_made_over_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="not empty"):
        make_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_checkpoint_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    make_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]

"""The wheel in empty environments serves a chat: with the packages of the image, and with those of
its extras, each role with its own."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prfaas.cli.main import COMMANDS
from tests.deployments import TIMING, placed
from tests.ports import free_port

from .charts import ROOT
from .packages import call, installed

pytestmark = pytest.mark.timeout(400)

EXTRAS = {"vllm", "torch", "ray", "obstore", "mooncake", "sglang"}
"""Packages that parts of the project import and their users install: engines, extras."""
IMPORT_ALL = """
import importlib, json, pkgutil, prfaas
missing = {}
for found in pkgutil.walk_packages(prfaas.__path__, "prfaas."):
    if found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        missing.setdefault(error.name.partition(".")[0], found.name)
print(json.dumps(missing))
"""
BARE_BYTES_MAX = 60_000_000
MISSING = """
import json
from prfaas.extras import EXTRAS, missing
print(json.dumps({extra: missing("it", extra) for extra in EXTRAS}))
"""
EVERY_HELP = """
import json, sys
from click.testing import CliRunner
from prfaas.cli.main import cli
codes = {name: CliRunner().invoke(cli, [name, "--help"]).exit_code for name in sys.argv[1:]}
print(json.dumps(codes))
"""
ENCODE = """
import sys
from prfaas.gateway.tokenization.prompt_encoder import PromptMaker
print(PromptMaker(sys.argv[1]).vocab_size)
"""


def test_every_module_can_be_imported_but_for_engines_and_extras(
    shipped: Path, tmp_path: Path
) -> None:
    missing = json.loads(call(shipped / "python", "-c", IMPORT_ALL, cwd=tmp_path))
    assert set(missing) <= EXTRAS, missing


def test_a_bare_install_is_small(bare: Path) -> None:
    # Without compiled bytecode, which an installer may add.
    files = [path for path in bare.parent.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) < BARE_BYTES_MAX
    missing = json.loads(call(bare / "python", "-c", MISSING, cwd=bare))
    assert all(missing.values()), missing


def test_a_bare_install_has_every_command_and_says_what_it_needs(
    bare: Path, tmp_path: Path
) -> None:
    words = call(bare / "python", "-c", EVERY_HELP, *COMMANDS, cwd=tmp_path)
    assert json.loads(words) == dict.fromkeys(COMMANDS, 0)
    for args, extra in (
        (("gateway", "f.toml"), "gateway"),
        (("demo",), "gateway"),
        (("plan", "f.toml"), "plan"),
        (("simulate", "f.toml"), "plan"),
    ):
        done = subprocess.run(
            [bare / "prfaas", *args], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        assert line.startswith(f"prfaas: `prfaas {args[0]}` needs ")
        assert line.endswith(f"pip install 'prfaas[{extra}]'")


@pytest.mark.parametrize("extra", ["codecs", "plan", "s3", "tracing"])
def test_an_extra_has_all_that_its_modules_need(wheel: Path, tmp_path: Path, extra: str) -> None:
    binaries = installed(tmp_path / "env", wheel, extra)
    missing = json.loads(call(binaries / "python", "-c", MISSING, cwd=tmp_path))
    assert [name for name, sentence in missing.items() if sentence is None] == [extra]
    if extra == "plan":
        plan = ROOT / "examples" / "plan" / "paper-case-study.toml"
        assert "offload" in call(binaries / "prfaas", "plan", plan, cwd=tmp_path)
    if extra == "codecs":
        call(binaries / "python", "-c", "import numba", cwd=tmp_path)


async def test_a_gateway_serves_a_chat_over_pool_nodes_of_a_bare_install(
    served: Path, bare: Path, tmp_path: Path
) -> None:
    """The chat goes through a gateway and timing engines of [gateway], with neither scipy nor
    torch, and over a link between two pool nodes that have neither numpy nor codecs."""
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("prfaas-pool", "pd-pool")}
    places = "".join(
        f'[clusters.{name.removesuffix("-pool")}.pools.{name}]\naddress = "{address}"\n'
        f'socket = "{tmp_path}/{name}.sock"\nadmin = "127.0.0.1:{free_port()}"\n'
        for name, address in addresses.items()
    )
    file, overlay = placed(TIMING, tmp_path, places)
    for name in (*addresses, "gateway"):
        identities = tmp_path / "state" / "identities"
        call(bare / "prfaas", "identity", name, "--directory", identities)
    with (tmp_path / "pools.log").open("wb") as log:
        pools = [
            await asyncio.create_subprocess_exec(
                *(bare / "prfaas", "pool", file, "--with", overlay, "--name", name),
                cwd=tmp_path,
                stdout=log,
                stderr=log,
            )
            for name in addresses
        ]
        try:
            async with serving(served, tmp_path, places) as (http, url):
                messages = [{"role": "user", "content": "word " * 20_000}]
                body: dict[str, Any] = {"messages": messages, "max_tokens": 4}
                async with http.post(f"{url}/v1/chat/completions", json=body) as reply:
                    assert reply.status == 200, await reply.text()
                    assert reply.headers["X-Prfaas-Path"] == "remote"
                async with http.get(f"{url}/control/links") as reply:
                    [link] = (await reply.json())["links"]
        finally:
            for pool in pools:
                if pool.returncode is None:
                    pool.terminate()
                await pool.wait()
    assert link["arrived_bytes"] > 0
    said = (tmp_path / "pools.log").read_text()
    assert said.count("codecs_not_installed") == 2
    assert "pip install 'prfaas[codecs]'" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_tokenizers_that_need_a_package_to_be_read_are_read(
    shipped: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "sentencepiece":
        import sentencepiece

        sentencepiece.SentencePieceTrainer.train(
            input=str(ROOT / "LICENSE"),
            model_prefix=str(tmp_path / "tokenizer"),
            vocab_size=600,
            model_type="bpe",
            byte_fallback=True,
            minloglevel=9,
        )
    else:
        words = (base64.b64encode(bytes([code])).decode() for code in range(256))
        lines = (f"{word} {code}\n" for code, word in enumerate(words))
        (tmp_path / "tokenizer.model").write_text("".join(lines))
    config = {"model_type": "llama", "vocab_size": 600}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    said = call(shipped / "python", "-c", ENCODE, tmp_path, cwd=tmp_path)
    assert said.strip().splitlines()[-1] == "600"


async def test_it_serves_a_chat(shipped: Path, tmp_path: Path) -> None:
    async with serving(shipped, tmp_path) as (http, url):
        messages = [{"role": "user", "content": "Hello"}]
        body: dict[str, Any] = {"messages": messages, "max_tokens": 4}
        async with http.post(f"{url}/v1/chat/completions", json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
        assert answer["usage"]["completion_tokens"] == 4
        messages[0]["content"] = "word " * 20_000
        async with http.post(f"{url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            assert reply.headers["X-Prfaas-Path"] == "remote"
        async with http.get(f"{url}/console") as reply:
            assert reply.status == 200


@asynccontextmanager
async def serving(
    shipped: Path, local: Path, settings: str = ""
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """Run `prfaas up` of that environment until the whole deployment is ready."""
    file, overlay = placed(TIMING, local, settings)
    listen = f"127.0.0.1:{free_port()}"
    url = f"http://{listen}"
    file.write_text(file.read_text().replace("127.0.0.1:0", listen))
    log = (local / "up.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        shipped / "prfaas", "up", file, "--with", overlay, cwd=local, stdout=log, stderr=log
    )
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(120):
            while not await is_whole(http, url):
                assert process.returncode is None, (local / "up.log").read_text()
                await asyncio.sleep(0.2)
            yield http, url
    finally:
        process.terminate()
        await process.wait()
        log.close()


async def is_whole(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/health?full=1") as reply:
            return reply.status == 200
    except aiohttp.ClientConnectionError:
        return False

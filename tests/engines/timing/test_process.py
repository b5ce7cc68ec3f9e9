"""`prfaas engine timing` as a process."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import aiohttp

from prfaas.engines.checkpoint import make_checkpoint

from .worlds import MODEL, write_plan


async def test_it_serves_several_engines_until_it_is_told_to_stop(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    make_checkpoint(tokenizer, weights=False)
    command = [sys.executable, "-m", "prfaas", "engine", "timing", "--time-scale", "0.001"]
    command += ["--plan", str(write_plan(tmp_path)), "--model", MODEL]
    command += ["--model-path", str(tokenizer), "--block-tokens", "16"]
    command += ["--engine", "e0=127.0.0.1:0", "--engine", "e1=127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        texts = []
        async with aiohttp.ClientSession() as http:
            for name in ("e0", "e1"):
                line = (await process.stderr.readline()).decode()
                found = re.fullmatch(rf"timing engine {name} at (http://\S+)\n", line)
                assert found is not None, line
                body = {"model": MODEL, "prompt": "Hello", "temperature": 0}
                async with http.post(f"{found[1]}/v1/completions", json=body) as reply:
                    texts.append((await reply.json())["choices"][0]["text"])
        assert texts[0] == texts[1] != ""
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

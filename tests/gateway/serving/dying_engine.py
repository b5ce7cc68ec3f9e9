"""A process that serves as a scripted engine, and ends at once when a prompt has the token 7.

    python -m tests.gateway.serving.dying_engine NAME

Prints its URL.
"""

import asyncio
import os
import sys
from typing import Any

from aiohttp import web

from tests.gateway.scripted_engine import ScriptedEngine

POISON = 7


async def dies(
    engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """Answers, unless the prompt kills the process."""
    if POISON in body["prompt"]:
        os._exit(139)
    return await engine.answer(request, body)


async def main(name: str) -> None:
    engine = ScriptedEngine(name, script=dies)
    await engine.start()
    print(engine.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

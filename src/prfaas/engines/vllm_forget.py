"""The endpoint that makes vLLM forget the blocks it holds, without its development mode.

    vllm serve MODEL ... --middleware prfaas.engines.vllm_forget.ForgetRoute

vLLM has `POST /reset_prefix_cache` in development mode only, beside endpoints that nobody should
reach. This serves the same path with the same answer, and nothing else of that mode. Requests under
way are begun anew, so nothing computed before is left in the device's memory, in the host memory of
the offloading connector, or in what the tier remembers (`PrfaasConnector.reset_cache`).
"""

from __future__ import annotations

import json
import logging
from typing import Any

PATH = "/reset_prefix_cache"
log = logging.getLogger(__name__)


class ForgetRoute:
    """ASGI middleware that answers `POST /reset_prefix_cache` and passes on all else."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        is_asked = scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "POST"
        if not is_asked:
            await self._app(scope, receive, send)
            return
        status, answer = await _reset(scope["app"].state.engine_client)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def _reset(engine: Any) -> tuple[int, dict[str, Any]]:
    """Ask the engine; it refuses while blocks are being loaded, and may be asked again."""
    try:
        done = await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    except Exception as error:
        log.warning("the prefix cache was not reset: %s", error)
        return 200, {"success": False}
    return 200, {"success": bool(done)}

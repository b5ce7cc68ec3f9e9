"""Parts that run already, or have to: engines at a `url`, pool nodes at an `address`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping

import aiohttp
import msgspec

from prfaas.config.addresses import join_address, split_address
from prfaas.config.deployment import Deployment
from prfaas.errors import EngineError
from prfaas.wire.messages.survey import Surveyed

ANSWER_S = 5.0
"""Limit for the answer of one engine."""
ANSWER_BYTES_MAX = 1 << 20
_NO_ENGINE = "its url has to be that of an engine itself, without /v1"
_OTHER_AUTHORITY = (
    "its certificate is of another authority than the gateway's: all parts of all sites need "
    "identities of one ca.key, and its ca.pem"
)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def engine_problems(deployment: Deployment) -> list[str]:
    """Return a sentence for each engine at a `url` to which requests would fail."""
    urls = {
        f"clusters.{cluster}.engines.{name}": engine.url
        for cluster, table in deployment.clusters.items()
        for name, engine in table.engines.items()
        if engine.url
    }
    problems = asyncio.run(_problems(set(urls.values()), deployment.model.name)) if urls else {}
    return [
        f"{place}.url {url}: {problem}"
        for place, url in urls.items()
        if (problem := problems[url]) is not None
    ]


def serves(deployment: Deployment, listen: str) -> bool:
    """Return True if a gateway or engine of this deployment's model answers at an address."""
    scheme = "https" if deployment.gateway.tls and listen == deployment.gateway.listen else "http"
    url = f"{scheme}://{join_address(split_address(listen))}"
    return asyncio.run(_problems({url}, deployment.model.name))[url] is None


async def _problems(urls: set[str], model: str) -> dict[str, str | None]:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        found = await asyncio.gather(*(_problem(http, url, model) for url in urls))
    return dict(zip(urls, found, strict=True))


async def _problem(http: aiohttp.ClientSession, url: str, model: str) -> str | None:
    try:
        served = await _served(http, url)
    except EngineError as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {ANSWER_S:g} s; see its log, and that this host may reach it"
    except (aiohttp.ClientError, OSError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number and number > 0 else error
        return f"no engine answers: {reason}; start it, or correct the address"
    if model in served:
        return None
    shown = ", ".join(repr(each[:80]) for each in served[:4]) or "nothing"
    return (
        f"it serves {shown}, and not model.name = {model!r}: start it with "
        f"--served-model-name {model}, or correct model.name"
    )


async def _served(http: aiohttp.ClientSession, url: str) -> list[str]:
    # A certificate of a name: the address is asked here.
    async with http.get(f"{url}/v1/models", ssl=False, allow_redirects=False) as reply:
        if reply.status in (401, 403):
            raise EngineError(
                f"it wants a key (status {reply.status}), and gateways send engines none: start "
                "it without --api-key, and let only gateways reach it"
            )
        if reply.status != 200:
            raise EngineError(f"/v1/models answers {reply.status}; {_NO_ENGINE}")
        body = b""
        async for part in reply.content.iter_any():
            body += part
            if len(body) > ANSWER_BYTES_MAX:
                break
    try:
        return [card.id for card in msgspec.json.decode(body, type=_Models).data]
    except (msgspec.DecodeError, RecursionError):
        raise EngineError(f"/v1/models answers no list of models; {_NO_ENGINE}") from None


def pool_problems(deployment: Deployment, found: Mapping[str, Surveyed | str]) -> Iterator[str]:
    """Yield a sentence for each pool node at an `address` that does not answer.

    Args:
        found: Answers of pool nodes, by pool.
    """
    for cluster, table in deployment.clusters.items():
        for name, pool in table.pools.items():
            answer = found.get(name)
            if pool.address is None or not isinstance(answer, str):
                continue
            hint = "start it, or correct the address"
            if "CERTIFICATE" in answer or "UNKNOWN_CA" in answer or "unknown ca" in answer:
                hint = _OTHER_AUTHORITY
            yield (
                f"clusters.{cluster}.pools.{name}.address {pool.address}: {answer}; nothing is "
                f"offloaded over it: {hint}"
            )

"""A tenant that floods the caches with unique prompts, beside one with a reserve: live hit rates.

    python -m tests.engines.timing.cache_flood

A gateway, pool nodes and timing engines. Blue asks for prompts of a skewed popularity, one after
the other. After each of them red asks for ten prompts that nobody has asked for. The engines' own
prefix caches are emptied each time, so that all hits are those of the pool node. The same requests
of blue, alone with a pool node of the size of its reserve, are what the reserve promises.
"""

import argparse
import asyncio
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.engines.checkpoint import make_checkpoint
from prfaas.gateway.tenancy.tenants import key_hash, new_key
from prfaas.wire.identity import make_authority, make_identity
from tests.pool.sites import until

from .deployment import World, running
from .worlds import DENSE_PLAN

KEYS = {"red": new_key(), "blue": new_key()}
MEMORY, RESERVE = 1 << 20, 0.5
"""The reserve holds about fifty prompts."""
PROMPT_TOKENS, NUM_PROMPTS, SKEW = 161, 120, 0.8
FLOOD = 10


@dataclass
class Figures:
    """Figures of one run.

    Attributes:
        hit_rate: Cached tokens of blue by its prompt tokens.
        held_bytes: Blue's bytes in the pool node at the end.
        num_red: Requests of red.
    """

    hit_rate: float
    held_bytes: int
    num_red: int


def tenants(reserve: float) -> dict[str, dict[str, Any]]:
    """Both, and blue's reserve."""
    found: dict[str, dict[str, Any]] = {
        name: {"keys": [key_hash(key)]} for name, key in KEYS.items()
    }
    if reserve:
        found["blue"]["cache_reserve"] = reserve
    return found


async def run(
    local: Path, checkpoint: Path, identities: Path, requests: int, *, flood: int, reserve: float
) -> Figures:
    """Ask, and count.

    Args:
        local: An empty folder.
        checkpoint: A tokenizer.
        identities: Of gateway and pool nodes.
        requests: Of blue.
        flood: Requests of red for each of them; without any, blue is alone with the reserve.
        reserve: Blue's reserve.
    """
    memory = MEMORY if flood else int(MEMORY * RESERVE)
    async with running(
        local,
        checkpoint,
        identities,
        plan_text=DENSE_PLAN,
        pd_memory_bytes=memory,
        tenants=tenants(reserve),
    ) as world:
        chance, unique = random.Random(7), random.Random(8)
        weights = [1 / (n + 1) ** SKEW for n in range(NUM_PROMPTS)]
        prompts = [[chance.randrange(200) for _ in range(PROMPT_TOKENS)] for _ in weights]
        cached = total = num_red = 0
        for prompt in chance.choices(prompts, weights, k=requests):
            usage = (await world.complete(prompt, KEYS["blue"], max_tokens=1))["usage"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            total += usage["prompt_tokens"]
            await settled(world)
            for _ in range(flood):
                other = [unique.randrange(200) for _ in range(PROMPT_TOKENS)]
                await world.complete(other, KEYS["red"], max_tokens=1)
                num_red += 1
            await settled(world)
        tag = tenant_tag(world.gateway.tenants.by_name["blue"].cache_salt)
        held = world.sites["pd-pool"].node.store.room.held_bytes.get(tag, 0)
        return Figures(cached / total, held, num_red)


async def settled(world: World) -> None:
    """Wait until all blocks are in the pool node, and empty the caches of engines."""
    await until(world.is_quiet)
    world.forget()


async def figures(local: Path, requests: int) -> dict[str, Figures]:
    """Alone with the reserve, beside the flood with it, and beside the flood without."""
    checkpoint, identities = local / "model", local / "identities"
    make_checkpoint(checkpoint, weights=False)
    make_authority(identities)
    for name in ("gateway", "prfaas-pool", "pd-pool"):
        make_identity(identities, name)
    found: dict[str, Figures] = {}
    for label, flood, reserve in (
        ("alone with the reserve", 0, 0.0),
        ("beside the flood, with the reserve", FLOOD, RESERVE),
        ("beside the flood, without", FLOOD, 0.0),
    ):
        folder = local / str(len(found))
        folder.mkdir()
        found[label] = await run(
            folder, checkpoint, identities, requests, flood=flood, reserve=reserve
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=600, help="Requests of blue in each run.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print("| blue | hit rate | bytes in the pool node at the end | requests of red |")
        print("|---|---|---|---|")
        for label, each in asyncio.run(figures(Path(scratch), given.requests)).items():
            print(f"| {label} | {each.hit_rate:.2%} | {each.held_bytes:,} | {each.num_red:,} |")

"""Engines that say strange things of themselves count as silent, and are asked again."""

from __future__ import annotations

import pytest

from prfaas.gateway import engines

from .conftest import World, until


@pytest.mark.parametrize(
    "cards",
    [
        7,
        {"id": "tiny"},
        ["tiny"],
        [{"id": "tiny", "max_model_len": -1}],
        [{"id": "tiny", "max_model_len": "long"}],
        [{"id": ["tiny"], "max_model_len": 4096}],
    ],
)
async def test_an_engine_without_a_model_is_asked_until_it_has_one(
    world: World, cards: object
) -> None:
    spare = world.gateway.engines.by_name["spare"]
    world.spare.cards, world.spare.healthy = cards, True
    asked = world.spare.num_asked_models
    await until(lambda: world.spare.num_asked_models > asked + 1)
    assert not spare.is_ready
    world.spare.cards = None
    await until(lambda: spare.is_ready)


async def test_an_engine_that_says_too_much_has_an_unknown_queue(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = world.gateway.engines.by_name["decode"]
    monkeypatch.setattr(engines, "PAGE_BYTES_MAX", 4096)
    world.decode.padding = 5000
    await until(lambda: decode.load.num_waiting is None)
    assert decode.is_ready
    world.decode.padding = 0
    await until(lambda: decode.load.num_waiting is not None)

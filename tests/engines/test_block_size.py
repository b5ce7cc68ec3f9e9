"""The block size of hybrid models: kept as the engine found it, or refused."""

import importlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.core.kv.blocks import CacheGroup, GroupKind
from prfaas.engines.checkpoint import make_checkpoint
from prfaas.errors import ConfigError

pytestmark = pytest.mark.timeout(180)
ATTENTION = CacheGroup(0, GroupKind.FULL_ATTENTION, 384, 1000)
STATE = CacheGroup(1, GroupKind.LINEAR_STATE, 384, 1000)


@pytest.fixture(scope="module")
def layout() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", reason="vLLM is not installed here")
        return importlib.import_module("prfaas.engines.vllm_layout")


def initialise_again(cache_config: Any) -> None:
    """As `VllmConfig.__post_init__` does on CPUs, which the engine calls after its start."""
    if not cache_config.user_specified_block_size:
        cache_config.block_size = 128


@pytest.mark.parametrize(
    ("groups", "kept"), [((ATTENTION, STATE), 384), ((STATE,), 384), ((ATTENTION,), 128)]
)
def test_the_block_size_of_a_hybrid_stays_without_being_said(
    layout: Any, groups: tuple[CacheGroup, ...], kept: int
) -> None:
    config = SimpleNamespace(block_size=384, user_specified_block_size=False)
    layout.keep_block_size(config, groups)
    initialise_again(config)
    assert config.block_size == kept


def test_vllm_resets_what_is_not_the_users(layout: Any) -> None:
    """The fact of vLLM that makes all this needed."""
    from vllm.config.cache import CacheConfig

    assert CacheConfig().user_specified_block_size is False
    assert CacheConfig(block_size=384).user_specified_block_size is True


@pytest.mark.parametrize("scheduled", [16, 128, 400])
def test_a_scheduler_that_cuts_where_no_state_ends_is_refused(layout: Any, scheduled: int) -> None:
    with pytest.raises(ConfigError, match="--block-size 384"):
        layout.check_block_size(scheduled, (ATTENTION, STATE))
    layout.check_block_size(scheduled, (ATTENTION,))


def test_a_scheduler_that_cuts_at_states_is_not_refused(layout: Any) -> None:
    for scheduled in (384, 768):
        layout.check_block_size(scheduled, (ATTENTION, STATE))


def test_an_engine_is_checked_at_its_first_step_and_not_before(layout: Any) -> None:
    made = object.__new__(importlib.import_module("prfaas.engines.vllm_connector").PrfaasConnector)
    made._cache_config = SimpleNamespace(block_size=384)
    made._unchecked = (STATE,)
    made._cache_config.block_size = 128
    with pytest.raises(ConfigError, match=r"every 384 tokens, but the scheduler cuts .* every 128"):
        made.build_connector_meta(SimpleNamespace())


@pytest.mark.parametrize("is_kept", [True, False])
def test_vllm_leaves_a_kept_size_alone_and_sets_others_back(
    layout: Any, tmp_path: Path, is_kept: bool
) -> None:
    """As in an engine: the size is found, the connector made, the configuration made once more."""
    from vllm.engine.arg_utils import EngineArgs

    make_checkpoint(tmp_path / "model")
    arguments = EngineArgs(
        model=str(tmp_path / "model"), dtype="bfloat16", enforce_eager=True, max_model_len=4096
    )
    config = arguments.create_engine_config()
    if not importlib.import_module("vllm.platforms").current_platform.is_cpu():
        pytest.skip("only CPUs set the size back")
    config.cache_config.block_size = 384
    if is_kept:
        layout.keep_block_size(config.cache_config, (ATTENTION, STATE))
    config.__post_init__()
    assert config.cache_config.block_size == (384 if is_kept else 128)

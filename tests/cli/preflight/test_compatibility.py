"""`prfaas check` against running engines: what they share, what is converted, what is refused."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from prfaas.cli.preflight.compatibility import AlikeEngines, EnginePair, absent, pairs, survey
from prfaas.config.load import load_deployment
from prfaas.core.kv.blocks import HashScheme
from prfaas.wire.identity import identity_in, make_authority, make_identity
from prfaas.wire.messages.layouts import GroupSpec, LayoutFacts, LayoutSpec
from prfaas.wire.messages.survey import EngineShape, Surveyed
from tests.cli.conftest import Start
from tests.cli.running_parts import until
from tests.cli.started_commands import said
from tests.deployments import TIMING, placed


def engine(
    name: str,
    *,
    ranks: int = 1,
    block: int = 1056,
    shared: int = 1056,
    facts: dict[str, str] | None = None,
    layout_id: bytes = b"L" * 32,
) -> AlikeEngines:
    group = GroupSpec(
        index=0,
        kind="full_attention",  # type: ignore[arg-type]
        tokens_per_block=shared,
        block_bytes=64,
        planes=[("bfloat16", 32), ("float32", 32)],
    )
    layout = LayoutSpec(layout_id=layout_id, tokens_per_hash=shared, hash_seed="0", groups=[group])
    shape = EngineShape(ranks=ranks, block_tokens=block)
    return AlikeEngines((name,), layout, shape, facts or {})


def test_engines_with_equal_rows_convert_nothing() -> None:
    pair = EnginePair(engine("p"), engine("d"))
    assert not pair.is_refused
    assert pair.row == (
        "p",
        "d",
        (b"L" * 32).hex()[:12],
        "bfloat16 + float32",
        "1",
        "1056",
        "sha256_cbor",
        "none",
    )


def test_engines_that_name_blocks_by_different_schemes_share_none() -> None:
    facts = {"dtype": "a", "hash_scheme": "sglang_pages"}
    prefill, decode = engine("p", facts=facts), engine("d")
    layout = msgspec.structs.replace(
        prefill.layout, layout_id=b"S" * 32, hash_scheme=HashScheme.SGLANG_PAGES
    )
    pair = EnginePair(replace(prefill, layout=layout), replace(decode, facts={"dtype": "a"}))
    assert pair.row[-2:] == ("sglang_pages > sha256_cbor", "refused")
    assert "hash_scheme: sha256_cbor at d, sglang_pages at p; " in pair.words
    assert "share none" in pair.words


def test_pages_of_sglang_are_refused_where_only_ticketed_blocks_are_kept() -> None:
    made = engine("p")
    pages = replace(
        made, layout=msgspec.structs.replace(made.layout, hash_scheme=HashScheme.SGLANG_PAGES)
    )
    assert not EnginePair(pages, pages).is_refused
    assert not EnginePair(made, made, is_ticketed=True).is_refused
    refused = EnginePair(pages, pages, is_ticketed=True)
    assert refused.row[-1] == "refused"
    assert "come without a ticket" in refused.words


def test_a_conversion_names_the_ranks_and_the_blocks_that_are_combined() -> None:
    pair = EnginePair(
        engine("p", ranks=8, block=272, shared=1088), engine("d", block=1088, shared=1088)
    )
    assert pair.row[4:] == (
        "8 > 1",
        "272 > 1088, shared 1088",
        "sha256_cbor",
        "heads of 8 ranks to 1; 4 blocks of 272 are one at p",
    )


@pytest.mark.parametrize(
    ("fact", "values", "advice"),
    [
        ("blocks", ("canonical 1", "of 2 ranks"), "set PRFAAS_BLOCKS=canonical"),
        ("tokens_per_hash", ("768", "384"), "set block_tokens of [model]"),
        ("cache_config.cache_dtype", ("bfloat16", "fp8"), "the same --kv-cache-dtype"),
        ("model.weights", ("1", "2"), "serve the same files at both sites"),
    ],
)
def test_a_refusal_has_its_reason_and_the_next_step(
    fact: str, values: tuple[str, str], advice: str
) -> None:
    decode, prefill = (
        engine(name, facts={fact: value}, layout_id=value.encode().ljust(32))
        for name, value in zip(("d", "p"), values, strict=True)
    )
    pair = EnginePair(prefill, decode)
    assert pair.row[-1] == "refused"
    assert pair.words.startswith(
        f"p to d: refused, nothing is offloaded (layout_mismatch): "
        f"{fact}: {values[0]} at d, {values[1]} at p; "
    )
    assert advice in pair.words


def test_alike_engines_share_a_row_and_absent_ones_are_named(tmp_path: Path) -> None:
    deployment = load_deployment(placed(TIMING, tmp_path)[0])
    one = engine("prfaas-0").layout
    shape = EngineShape(ranks=1, block_tokens=1056)
    facts = [LayoutFacts(layout_id=one.layout_id, facts={"a": "1"})]

    def answer(*names: str) -> Surveyed:
        return Surveyed(
            layouts=dict.fromkeys(names, one), shapes=dict.fromkeys(names, shape), facts=facts
        )

    found: dict[str, Surveyed | str] = {
        "prfaas-pool": answer("prfaas-0", "prfaas-1"),
        "pd-pool": answer("pd-0"),
    }
    [pair] = pairs(deployment, found)
    assert pair.row[:2] == ("prfaas-0 and 1 more", "pd-0")
    assert pair.decode.facts == {"a": "1"}
    assert list(absent(deployment, found)) == ["not connected to pool node pd-pool: pd-1"]
    found["pd-pool"] = "no answer within 5 s"
    assert pairs(deployment, found) == []
    [line] = absent(deployment, found)
    assert line == "engines of pool node pd-pool are not known: no answer within 5 s"


async def test_a_pool_node_that_does_not_answer_is_a_reason_and_no_failure(tmp_path: Path) -> None:
    make_authority(tmp_path)
    make_identity(tmp_path, "gateway")
    tls = identity_in(tmp_path, "gateway").client_context()
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        found = await survey(
            {"silent": silent.getsockname(), "closed": closed.getsockname()}, tls, 0.2
        )
    assert found["silent"] == "no answer within 0.2 s"
    assert "Connect call failed" in str(found["closed"])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("block_tokens", [pytest.param(256, marks=pytest.mark.nightly), 1024])
def test_running_engines_are_compared(start: Start, tmp_path: Path, block_tokens: int) -> None:
    """Real processes: pool nodes and timing engines of `prfaas up`, asked over mutual TLS."""
    overlay = f"[clusters.pd.timing]\nblock_tokens = {block_tokens}\n"
    file, settings = placed(TIMING, tmp_path, overlay)
    process = start("up", file, "--with", settings)
    until(lambda: "Ctrl-C stops everything" in said(tmp_path) or process.poll() is not None, 300)
    assert process.poll() is None, said(tmp_path)
    check = [sys.executable, "-m", "prfaas", "check", str(file), "--with", str(settings)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=90, check=False)
    words = " ".join(done.stdout.split())
    row = "prfaas-0 and 1 more pd-0 and 1 more"
    if block_tokens == 256:
        assert done.returncode == 0, done.stderr
        assert f"{row} " in words
        assert "256 sha256_cbor none" in words
        return
    assert done.returncode == 1, done.stderr
    assert "256 > 1024 sha256_cbor refused" in words
    assert "block_tokens: 1024 at pd-0, 256 at prfaas-0; give both the same block_tokens" in words

"""`prfaas check` of engines that would not start, or would never share a block."""

import json
from pathlib import Path

import pytest

from prfaas.cli.preflight import vllm_flags
from tests.cli.conftest import Prfaas, edit, one_line

ARGS = '"--max-num-batched-tokens", "2048",\n    # The same state'


def alter(laptop: Path, *words: str) -> None:
    """Give the PrfaaS engine, which comes first in the file, further arguments."""
    text, added = laptop.read_text(), ", ".join(map(json.dumps, words))
    laptop.write_text(text.replace(ARGS, f"{added}, {ARGS}", 1))


def told_apart(laptop: Path, ours: str, theirs: str) -> None:
    """Change an argument of the PrfaaS engine alone."""
    text = laptop.read_text()
    assert ours in text
    laptop.write_text(text.replace(ours, theirs, 1))


def test_the_example_has_no_doubts(prfaas: Prfaas, laptop: Path) -> None:
    code, output, _ = prfaas("check", laptop)
    assert (code, "warning" in output) == (0, False)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (
            '"--block-size", "384"',
            '"--block-size", "400"',
            "--block-size: 400 at prfaas-engine, 384 at pd-engine",
        ),
        ('"--block-size", "384"', '"-tp", "2", "--block_size=384"', "--tensor-parallel-size: 2 at"),
        (
            '"--block-size", "384"',
            '"-tp", "2", "--block_size=384"',
            "PRFAAS_BLOCKS: ranks at prfaas-engine, canonical at pd-engine",
        ),
        (
            '"--mamba-ssm-cache-dtype", "float32"',
            '"--mamba-ssm-cache-dtype", "float16"',
            "--mamba-ssm-cache-dtype: float16 at prfaas-engine, float32 at pd-engine",
        ),
        (
            '"--block-size", "384"',
            '"--model", "org/other", "--block-size", "384"',
            "--model: org/other at prfaas-engine, .state/demo-model at pd-engine",
        ),
    ],
)
def test_clusters_that_were_told_different_things_are_refused(
    prfaas: Prfaas, laptop: Path, ours: str, theirs: str, words: str
) -> None:
    told_apart(laptop, ours, theirs)
    line = one_line(prfaas("check", laptop))
    assert words in line
    assert "nothing would be offloaded between them (layout_mismatch)" in line


def test_tensor_parallel_sizes_may_differ_where_blocks_are_canonical(
    prfaas: Prfaas, laptop: Path
) -> None:
    told_apart(laptop, '"--block-size", "384"', '"-tp", "2", "--block_size=384"')
    environment = '[clusters.prfaas.engines.prfaas-engine.env]\nPRFAAS_BLOCKS = "canonical"\n'
    laptop.write_text(f"{laptop.read_text()}\n{environment}")
    code, output, _ = prfaas("check", laptop)
    words = " ".join(output.split())
    assert code == 0
    assert "--tensor-parallel-size: 2 at prfaas-engine, not given at pd-engine" in words or (
        "--tensor-parallel-size: 2 at prfaas-engine, 1 at pd-engine" in words
    )
    assert "pool nodes convert blocks between them" in words


def combined(laptop: Path, size: str, tokens: int, *, events: bool) -> None:
    """Give the PrfaaS engine blocks of its own size, and both engines a length that they share."""
    edit(laptop, 'name = "prfaas-demo"', f'name = "prfaas-demo"\nblock_tokens = {tokens}')
    told_apart(laptop, '"--block-size", "384"', f'"--block-size", "{size}"')
    if not events:
        kept = [line for line in laptop.read_text().splitlines() if line[:9] != "kv_events"]
        laptop.write_text("\n".join(kept))


def test_block_sizes_may_differ_where_a_common_length_is_set(prfaas: Prfaas, laptop: Path) -> None:
    combined(laptop, "768", 768, events=False)
    code, output, _ = prfaas("check", laptop)
    words = " ".join(output.split())
    assert code == 0
    assert "--block-size: 768 at prfaas-engine, 384 at pd-engine: pool nodes convert" in words


@pytest.mark.parametrize(
    ("size", "tokens", "events", "words"),
    [
        (
            "512",
            768,
            False,
            "blocks of 768 tokens cannot be made of blocks of 512 at prfaas-engine: 768 is no "
            "multiple of 512; take 1024",
        ),
        ("768", 768, True, "pd-engine: KV events of an engine with blocks of 384 tokens do not"),
    ],
)
def test_block_sizes_that_do_not_fit_the_common_length_are_refused(
    prfaas: Prfaas, laptop: Path, size: str, tokens: int, events: bool, words: str
) -> None:
    combined(laptop, size, tokens, events=events)
    code, _, error = prfaas("check", laptop)
    assert code == 2
    assert words in " ".join(error.split())


def test_block_sizes_that_differ_are_refused_with_the_length_to_set(
    prfaas: Prfaas, laptop: Path
) -> None:
    told_apart(laptop, '"--block-size", "384"', '"--block-size", "512"')
    line = one_line(prfaas("check", laptop))
    assert "set block_tokens of [model] to a common multiple (the least is 1536)" in line


def test_weights_of_different_types_are_refused(prfaas: Prfaas, laptop: Path) -> None:
    edit(laptop, '"--block-size", "384"', '"--dtype", "bfloat16", "--block-size", "384"')
    told_apart(laptop, '"--dtype", "bfloat16"', '"--dtype", "float16"')
    assert "--dtype: float16 at prfaas-engine, bfloat16 at" in one_line(prfaas("check", laptop))


def test_what_one_cluster_alone_was_told_is_warned_of(prfaas: Prfaas, laptop: Path) -> None:
    alter(laptop, "--hf-overrides", '{"rope_parameters": {"factor": 4.0}}')
    code, output, _ = prfaas("check", laptop)
    assert code == 0
    expected = (
        "warning: --hf-overrides.rope_parameters.factor: 4.0 at prfaas-engine, not given at "
        "pd-engine: if the values differ, nothing is offloaded"
    )
    assert expected in " ".join(output.split())


def test_both_ways_to_write_an_override_are_the_same(prfaas: Prfaas, laptop: Path) -> None:
    text = laptop.read_text()
    head, _, tail = text.rpartition('"--block-size"')
    text = f'{head}"--hf-overrides.rope_parameters.factor", "4.0", "--block-size"{tail}'
    laptop.write_text(text)
    alter(laptop, "--hf-overrides", '{"rope_parameters": {"factor": 4.0}}')
    assert "warning" not in prfaas("check", laptop)[1]


def test_a_cache_layout_in_the_environment_is_compared(prfaas: Prfaas, laptop: Path) -> None:
    laptop.write_text(
        laptop.read_text()
        + '[clusters.pd.engines.pd-engine.env]\nVLLM_KV_CACHE_LAYOUT = "HND"\n'
        + '[clusters.prfaas.engines.prfaas-engine.env]\nVLLM_KV_CACHE_LAYOUT = "NHD"\n'
    )
    line = one_line(prfaas("check", laptop))
    assert "VLLM_KV_CACHE_LAYOUT: NHD at prfaas-engine, HND at pd-engine" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--blok-size", "3"],
            "--blok-size is no argument of vLLM 0.32; did you mean --block-size?",
        ),
        (["--kv-transfer-config", "{}"], "--kv-transfer-config cannot be set here: prfaas sets"),
        (["--kv-transfer-config.kv_role", "x"], "--kv-transfer-config cannot be set here"),
        (["--port", "1"], "--port cannot be set here: the gateway connects to the engine at"),
        (["--served-model-name", "x"], "--served-model-name cannot be set here: clients ask"),
        (["--weight-transfer-config", "{}"], "--weight-transfer-config cannot be set here"),
        (["--no-enable-prefix-caching"], "--enable-prefix-caching is 'no' and has to be 'yes'"),
        (["--prefix-caching-hash-algo", "sha256"], "is 'sha256' and has to be 'sha256_cbor'"),
    ],
)
def test_arguments_with_which_an_engine_would_not_take_part_are_refused(
    prfaas: Prfaas, laptop: Path, words: list[str], says: str
) -> None:
    alter(laptop, *words)
    line = one_line(prfaas("check", laptop))
    assert "clusters.prfaas.engines.prfaas-engine.args: " in line
    assert says in line


def test_another_version_may_know_an_argument_that_is_not_listed(
    prfaas: Prfaas, laptop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_flags, "is_listed_version", lambda: False)
    alter(laptop, "--newer", "3")
    code, output, _ = prfaas("check", laptop)
    assert code == 0
    assert "engine prfaas-engine: --newer is no argument of vLLM 0.32" in " ".join(output.split())


def test_a_checkpoint_without_a_tokenizer_is_refused(prfaas: Prfaas, laptop: Path) -> None:
    model = Path("model")
    model.mkdir()
    (model / "config.json").write_text("{}")
    edit(laptop, 'path = ".state/demo-model"', 'path = "./model"')
    edit(laptop, "generate = true        # a random", "# a random")
    line = one_line(prfaas("check", laptop))
    assert "no tokenizer at model: the gateway tokenises every prompt" in line
    (model / "tokenizer.json").write_text("{}")
    assert prfaas("check", laptop)[0] == 0


def test_links_without_encryption_are_a_loud_warning(prfaas: Prfaas, laptop: Path) -> None:
    table = "[clusters.prfaas.pools.prfaas-pool]\n"
    edit(laptop, table, f'{table}link_encryption = "network"\n')
    code, output, _ = prfaas("check", laptop)
    assert code == 0
    assert 'NOT ENCRYPTED: prfaas-pool with link_encryption = "network"' in " ".join(output.split())
    edit(laptop, '"network"', '"tls"')
    assert "NOT ENCRYPTED" not in prfaas("check", laptop)[1]


def test_a_prfaas_engine_without_cores_of_its_own_is_warned_of_where_the_policy_spares_it(
    prfaas: Prfaas, laptop: Path
) -> None:
    words = "engine prfaas-engine computes on the cores of pd-engine"
    assert words not in " ".join(prfaas("check", laptop)[1].split())
    edit(laptop, 'policy = "paper"', 'policy = "observed"')
    code, output, _ = prfaas("check", laptop)
    assert (code, words in " ".join(output.split())) == (0, True)
    told_apart(laptop, 'cpus = "0-1"', 'cpus = "2"')
    assert words not in " ".join(prfaas("check", laptop)[1].split())


@pytest.mark.parametrize(
    ("interval", "is_told"), [((), True), (("0",), True), (("1920",), False)], ids=str
)
def test_checkpoints_need_an_engine_that_keeps_states(
    prfaas: Prfaas, laptop: Path, interval: tuple[str, ...], is_told: bool
) -> None:
    if interval:
        alter(laptop, "--prefix-cache-retention-interval", *interval)
    edit(laptop, "offload_threshold = 1500", "offload_threshold = 1500\nstate_checkpoints = 2048")
    code, output, _ = prfaas("check", laptop)
    words = " ".join(output.split())
    told = "engine prfaas-engine: routing.state_checkpoints is 2048, but vLLM keeps the last"
    assert (code, told in words) == (0, is_told)
    assert "engine pd-engine: routing.state_checkpoints" not in words

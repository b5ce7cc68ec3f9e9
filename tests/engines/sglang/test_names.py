"""The names of SGLang's own tree: fields of its types, its factory, its addresses of pages."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.engines.sglang import facts
from prfaas.engines.sglang.page_layout import host_rows
from tests.engines.sglang import names
from tests.engines.sglang.conftest import Engines, PoolThread, extra_config, wait
from tests.engines.sglang.host_pools import HostPool
from tests.engines.sglang.pages import HASHES, kept
from tests.engines.sglang.tree import TREE, needs_tree

pytestmark = needs_tree


def test_the_stand_ins_have_the_fields_of_sglangs_types(backend: Any) -> None:
    theirs = names.sglang()
    for each in names.NAMES:
        other = getattr(theirs, each.__name__)
        if dataclasses.is_dataclass(each):
            ours = [field.name for field in dataclasses.fields(each)]
            assert ours == [field.name for field in dataclasses.fields(other)]
    policies = {policy.value for policy in theirs.PoolHitPolicy}
    assert policies == {policy.value for policy in names.PoolHitPolicy}


def test_the_backend_has_all_that_sglang_calls(backend: Any) -> None:
    base = names.sglang().HiCacheStorage
    ours = backend.PrfaasStorage
    assert issubclass(ours, base)
    assert not ours.__abstractmethods__
    inherited = {"get_stats"}
    public = {name for name in vars(base) if not name.startswith("_")} - inherited
    assert public <= set(vars(ours))


def test_sglangs_factory_makes_the_backend_from_the_operators_settings(
    engines: Engines, pool_node: PoolThread
) -> None:
    module = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory")
    pool = HostPool()
    config = names.sglang().HiCacheStorageConfig(
        **dataclasses.asdict(
            names.HiCacheStorageConfig(extra_config=extra_config(pool_node.socket_path))
        )
    )
    made = module.StorageBackendFactory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    made.pools = {"kv": pool}
    try:
        wait(lambda: made.is_connected)
        kept(made)
        assert made.batch_exists(HASHES) == 4
    finally:
        made.close()
        pool.close()


def _method(path: str, owner: str, name: str) -> Any:
    """A method of a class whose module needs a GPU's kernels."""
    assert TREE is not None
    text = (TREE / path).read_text()
    (found,) = (
        node
        for cls in ast.parse(text).body
        if isinstance(cls, ast.ClassDef) and cls.name == owner
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    scope: dict[str, Any] = {}
    source = textwrap.dedent(ast.get_source_segment(text, found) or "")
    exec(source, scope)  # noqa: S102
    return scope[name]


@pytest.mark.parametrize(
    ("layout", "num_parts"), [("page_first_direct", 2), ("page_first", 2), ("layer_first", 8)]
)
def test_pages_lie_where_sglangs_own_arithmetic_puts_them(layout: str, num_parts: int) -> None:
    heads, dim, layers, page, num = 2, 4, 4, 16, 5
    torch = pytest.importorskip("torch")
    shapes = {
        "page_first_direct": (2, num, layers, page, heads, dim),
        "page_first": (2, num * page, layers, heads, dim),
        "layer_first": (2, layers, num * page, heads, dim),
    }
    real = HostPool(page, num, 2, layers * page * heads * dim * 2)
    host = SimpleNamespace(
        layout=layout,
        page_size=page,
        size=num * page,
        layer_num=layers,
        head_num=heads,
        head_dim=dim,
        dtype=torch.bfloat16,
        kv_buffer=real.kv_buffer.view(torch.bfloat16).reshape(shapes[layout]),
        fd=real.fd,
    )
    meta = _method(
        "sglang/srt/mem_cache/pool_host/mha.py", "MHATokenToKVPoolHost", "get_page_buffer_meta"
    )
    host.get_page_buffer_meta = lambda indices: meta(host, indices)
    rows = host_rows(host, "kv")
    assert len(rows.parts) == num_parts
    assert rows.page_bytes * num == host.kv_buffer.numel() * 2
    # Every page has its own bytes: those that SGLang writes for its tokens.
    axis = 1 if layout == "page_first_direct" else {"page_first": 1, "layer_first": 2}[layout]
    token = 2 if layout == "page_first_direct" else axis
    assert shapes[layout][axis] in (num, num * page)
    for number in range(num):
        host.kv_buffer.zero_()
        cut = [slice(None)] * len(shapes[layout])
        width = 1 if axis != token else page
        cut[axis] = slice(number * width, (number + 1) * width)
        host.kv_buffer[tuple(cut)] = 1
        data = bytes(real.kv_buffer.tolist())
        at = [rows.stride * number + offset for offset, _ in rows.parts]
        found = b"".join(
            data[start : start + length] for start, (_, length) in zip(at, rows.parts, strict=True)
        )
        ones = bytes(torch.ones(1, dtype=torch.bfloat16).view(torch.uint8).tolist())
        assert found == ones * (rows.page_bytes // 2)
        assert data.count(ones[1]) == rows.page_bytes // 2
    del host.kv_buffer
    real.close()


def test_the_configuration_of_a_server_is_read_as_sglang_keeps_it() -> None:
    assert TREE is not None
    text = (TREE / "sglang/srt/runtime_context.py").read_text()
    (bag,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == "_ConfigBag"
    )
    scope: dict[str, Any] = {"Any": Any, "contextmanager": lambda function: function}
    source = ast.get_source_segment(text, bag) or ""
    exec("from __future__ import annotations\n" + source, scope)  # noqa: S102
    made, sub = scope["_ConfigBag"]("exec"), scope["_ConfigBag"]("exec.moe")
    made._set("attention_backend", "fa3")
    sub._set("moe_runner_backend", "auto")
    made._set_sub("moe", sub)
    assert dict(facts.leaves("exec", made)) == {
        "exec.attention_backend": "fa3",
        "exec.moe.moe_runner_backend": "auto",
    }


def settings_of_sglang() -> set[str]:
    """Dotted names of SGLang's settings."""
    assert TREE is not None
    found = set[str]()
    for path in (TREE / "sglang/srt/arg_groups/fields").glob("*.py"):
        for each in ast.parse(path.read_text()).body:
            if isinstance(each, ast.ClassDef):
                values = {
                    target.id: node.value
                    for node in each.body
                    if isinstance(node, ast.Assign | ast.AnnAssign)
                    for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                    if isinstance(target, ast.Name)
                }
                prefix = values.pop("_NS_PATH", None)
                if isinstance(prefix, ast.Constant):
                    found |= {f"{prefix.value!s}.{name}" for name in values}
    return found


def test_the_settings_that_are_not_counted_and_that_are_refused_exist() -> None:
    known = settings_of_sglang()
    refused = {"spec.speculative_algorithm", "lora.enable_lora", "lora.lora_paths"}
    refused |= {"model.load_format", "model.custom_weight_loader"}
    assert facts.NOT_COUNTED | refused | {"serving.weight_version", "model.model_path"} <= known
    assert {name.split(".")[0] for name in known} >= set(facts.NAMESPACES)


def test_the_metadata_of_the_tree_is_a_known_release() -> None:
    assert TREE is not None
    found = [path.name for path in TREE.glob("sglang-*.dist-info")]
    assert not found or found[0] in {f"sglang-{version}.dist-info" for version in facts.VERSIONS}

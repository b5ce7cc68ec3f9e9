"""(c) Prefill time of layers of real size beside the planner's roofline: T(prefix, new).

A layer is projections, attention over a cached prefix and the new tokens, and an MLP; weights are
random. Its time is that of PyTorch's own kernels: FlashAttention through SDPA, but for MLA, whose
keys and values differ in size, and for windows, which are masks. For the gated delta net it is that
of vLLM's Triton kernels where they are there. The last rows of a layer that computed the
prefix itself have to be those of one that took it from the cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.gpu.kit.results import Results
from tests.gpu.kit.rooflines import roofline_s

NEW = (8_192, 32_768, 131_072)
PREFIXES = (0, 32_768, 98_304)
TOKENS_MAX = 131_072
"""Of prefix and new tokens together."""
CPU_SIZES = ((64, 0), (64, 128), (128, 0))
WRONG, SKIP, FLIP = "wrong description", "skipped copy", "flipped byte"


@dataclass(frozen=True)
class Shape:
    """Shape of a layer.

    Attributes:
        kind: "full", "sliding", "mla" or "gdn".
        hidden: Size of the hidden state.
        intermediate: Of the MLP.
        heads: Of queries; of values in a gated delta net.
        kv_heads: Of keys; of keys and queries in a gated delta net.
        key_size: Of a head.
        value_size: Of a head.
        window: Tokens that are seen; 0 is all.
        latent: Of MLA.
    """

    kind: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int = 0
    latent: int = 0


SHAPES = (
    Shape("full", 4096, 14336, 32, 8, 128, 128),
    Shape("sliding", 4096, 14336, 32, 8, 128, 128, window=4096),
    Shape("mla", 7168, 18432, 128, 128, 192, 128, latent=512),
    Shape("gdn", 4096, 12288, 32, 16, 128, 128),
)
"""Llama 3 8B, the same with a window, a dense layer of DeepSeek-V3, and of Qwen3.5."""


def small(shape: Shape) -> Shape:
    """Return the layer for a CPU."""
    return replace(
        shape,
        hidden=64,
        intermediate=128,
        heads=4,
        kv_heads=4 if shape.kind == "mla" else 2,
        key_size=24 if shape.kind == "mla" else 16,
        value_size=16,
        window=min(shape.window, 96),
        latent=min(shape.latent, 32),
    )


def run(results: Results) -> None:
    """Time every layer, every prefix and every number of new tokens."""
    import torch

    is_gpu = results.device == "cuda"
    sizes = [(n, p) for n in NEW for p in PREFIXES if n + p <= TOKENS_MAX] if is_gpu else CPU_SIZES
    for given in SHAPES:
        shape = given if is_gpu else small(given)
        try:
            with torch.inference_mode():
                layer = Layer(shape, results.device)
                _same_with_cache(results, layer)
                for new, prefix in sizes:
                    seconds = _seconds(layer, new, prefix)
                    predicted = roofline_s(shape, new, prefix, results.device)
                    results.add(
                        "layer",
                        layer=shape.kind,
                        new=new,
                        prefix=prefix,
                        seconds=seconds,
                        roofline_s=predicted,
                        ratio=seconds / predicted,
                    )
        except (RuntimeError, NotImplementedError) as problem:
            if "out of memory" not in str(problem) and not isinstance(problem, NotImplementedError):
                raise
            results.skip(f"layer {shape.kind}: {problem}"[:300])


class Layer:
    """A layer with random weights."""

    def __init__(self, shape: Shape, device: str) -> None:
        import torch

        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.draws = torch.Generator(device).manual_seed(0)
        s = shape
        queries, keys, values = (
            s.heads * s.key_size,
            s.kv_heads * s.key_size,
            s.kv_heads * s.value_size,
        )
        if s.kind == "gdn":
            queries, values = s.kv_heads * s.key_size, s.heads * s.value_size
        if s.kind == "mla":
            self.down = self._weight(s.hidden, s.latent)
            self.up = self._weight(s.latent, s.heads * (s.key_size + s.value_size))
            self.query = self._weight(s.hidden, queries)
        else:
            self.qkv = self._weight(s.hidden, queries + keys + values)
            self.sizes = [queries, keys, values]
        if s.kind == "gdn":
            self.gates = self._weight(s.hidden, 2 * s.heads)
        self.out = self._weight(s.heads * s.value_size, s.hidden)
        self.gate_up = self._weight(s.hidden, 2 * s.intermediate)
        self.down_mlp = self._weight(s.intermediate, s.hidden)

    def _weight(self, rows: int, columns: int) -> Any:
        import torch

        drawn = torch.randn(
            rows, columns, generator=self.draws, device=self.device, dtype=self.dtype
        )
        return drawn / math.sqrt(rows)

    def hidden(self, tokens: int) -> Any:
        """Return hidden states to start from."""
        import torch

        return torch.randn(
            tokens, self.shape.hidden, generator=self.draws, device=self.device, dtype=self.dtype
        )

    def cache_of(self, hidden: Any) -> Any:
        """Return what the layer keeps of these tokens: keys and values, a latent, or a state."""
        if self.shape.kind == "gdn":
            return self._delta(hidden, None)[1]
        if self.shape.kind == "mla":
            return hidden @ self.down
        kept = (hidden @ self.qkv).split(self.sizes, dim=-1)[1:]
        return tuple(each.contiguous() for each in kept)

    def cache_of_size(self, tokens: int) -> Any:
        """Return random content of a cache of so many tokens."""
        import torch

        if not tokens:
            return None
        s, draw = self.shape, self._draw
        if s.kind == "gdn":
            size = (1, s.heads, s.value_size, s.key_size)
            return torch.zeros(size, device=self.device, dtype=torch.float32)
        if s.kind == "mla":
            return draw(tokens, s.latent)
        return draw(tokens, self.sizes[1]), draw(tokens, self.sizes[2])

    def _draw(self, *size: int) -> Any:
        import torch

        return torch.randn(*size, generator=self.draws, device=self.device, dtype=self.dtype)

    def __call__(self, hidden: Any, cache: Any = None) -> Any:
        """Return the layer's output for new tokens after those of the cache."""
        import torch

        if self.shape.kind == "gdn":
            mixed = self._delta(hidden, cache)[0]
        else:
            mixed = self._attention(hidden, cache)
        hidden = hidden + mixed @ self.out
        gate, up = (hidden @ self.gate_up).chunk(2, dim=-1)
        return hidden + (torch.nn.functional.silu(gate) * up) @ self.down_mlp

    def _attention(self, hidden: Any, cache: Any) -> Any:
        import torch

        s = self.shape
        if s.kind == "mla":
            latent = hidden @ self.down
            latent = latent if cache is None else torch.cat([cache, latent])
            query = hidden @ self.query
            key, value = (latent @ self.up).split(
                [s.heads * s.key_size, s.heads * s.value_size], dim=-1
            )
        else:
            query, key, value = (hidden @ self.qkv).split(self.sizes, dim=-1)
            if cache is not None:
                key, value = torch.cat([cache[0], key]), torch.cat([cache[1], value])
        q = query.view(1, -1, s.heads, s.key_size).transpose(1, 2)
        k = key.view(1, -1, s.kv_heads, s.key_size).transpose(1, 2)
        v = value.view(1, -1, s.kv_heads, s.value_size).transpose(1, 2)
        mixed = _windowed(q, k, v, s.window) if s.window else _causal(q, k, v)
        return mixed.transpose(1, 2).reshape(hidden.shape[0], -1)

    def _delta(self, hidden: Any, state: Any) -> tuple[Any, Any]:
        import torch

        s = self.shape
        query, key, value = (hidden @ self.qkv).split(self.sizes, dim=-1)
        decay, beta = (hidden @ self.gates).float().chunk(2, dim=-1)
        q = query.view(1, -1, s.kv_heads, s.key_size)
        k = key.view(1, -1, s.kv_heads, s.key_size)
        v = value.view(1, -1, s.heads, s.value_size)
        decay, beta = -torch.nn.functional.softplus(decay)[None], torch.sigmoid(beta)[None]
        mixed, state = _delta_rule(q, k, v, decay, beta, state)
        return mixed.reshape(hidden.shape[0], -1), state


def _causal(q: Any, k: Any, v: Any) -> Any:
    """Attention of the last queries of a sequence over all of its keys."""
    import torch
    from torch.nn.attention.bias import causal_lower_right

    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if q.shape[2] == k.shape[2]:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
    if grouped:  # The kernel of a lower-right mask takes no groups.
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    mask = causal_lower_right(q.shape[2], k.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _windowed(q: Any, k: Any, v: Any, window: int) -> Any:
    """The same over the last `window` keys of each query, in pieces of a window."""
    import torch

    new, total = q.shape[2], k.shape[2]
    repeats = q.shape[1] // k.shape[1]
    found = []
    for first in range(0, new, window):
        last = min(new, first + window)
        end = total - new + last
        start = max(0, total - new + first - window + 1)
        at = torch.arange(total - new + first, end, device=q.device)[:, None]
        keys = torch.arange(start, end, device=q.device)[None]
        mask = (keys <= at) & (keys > at - window)
        here = [each[:, :, start:end].repeat_interleave(repeats, dim=1) for each in (k, v)]
        found.append(
            torch.nn.functional.scaled_dot_product_attention(
                q[:, :, first:last], *here, attn_mask=mask
            )
        )
    return torch.cat(found, dim=2)


def _delta_rule(q: Any, k: Any, v: Any, decay: Any, beta: Any, state: Any) -> tuple[Any, Any]:
    """Gated delta rule: vLLM's kernels on a GPU, token by token elsewhere."""
    import torch

    if q.is_cuda:
        try:
            from vllm.third_party.flash_linear_attention.ops import chunk_gated_delta_rule
        except ImportError as missing:
            raise NotImplementedError(
                f"its kernels are vLLM's, which is not there: {missing}"
            ) from None
        size = (1, v.shape[2], v.shape[3], q.shape[3])
        state = torch.zeros(size, device=q.device) if state is None else state
        offsets = torch.tensor([0, q.shape[1]], device=q.device, dtype=torch.int32)
        found = chunk_gated_delta_rule(
            q,
            k,
            v,
            decay,
            beta.to(q.dtype),
            initial_state=state,
            output_final_state=True,
            cu_seqlens=offsets,
            use_qk_l2norm_in_kernel=True,
        )
        return found[0], found[1]
    repeats = v.shape[2] // q.shape[2]
    unit = torch.nn.functional.normalize
    q, k = (unit(each.float(), dim=-1).repeat_interleave(repeats, dim=2) for each in (q, k))
    state = torch.zeros(1, v.shape[2], v.shape[3], q.shape[3]) if state is None else state
    state, found = state.clone(), []
    for at in range(q.shape[1]):
        state = state * decay[:, at].exp()[..., None, None]
        seen = torch.einsum("bhvk,bhk->bhv", state, k[:, at])
        change = (v[:, at].float() - seen) * beta[:, at][..., None]
        state = state + torch.einsum("bhv,bhk->bhvk", change, k[:, at])
        found.append(torch.einsum("bhvk,bhk->bhv", state, q[:, at]) * q.shape[3] ** -0.5)
    return torch.stack(found, dim=1).to(v.dtype), state


def _same_with_cache(results: Results, layer: Layer) -> None:
    """New tokens after a cached prefix have to come out as if the layer had computed all."""
    import torch

    shape, unit = layer.shape, 1024 if results.device == "cuda" else 128
    hidden = layer.hidden(2 * unit)
    whole = layer(hidden)[unit:].float()
    cache = layer.cache_of(hidden[:unit])
    if results.damage == SKIP:
        cache = layer.cache_of_size(unit)
    elif results.damage == FLIP:
        part = cache if torch.is_tensor(cache) else cache[0]
        flat = part.view(torch.uint8).view(-1)
        flat[-part.element_size() :] ^= 0x7F
    elif results.damage == WRONG:
        layer.shape = replace(shape, heads=shape.kv_heads, kv_heads=shape.heads, window=unit // 2)
    try:
        parted = layer(hidden[unit:], cache).float()
    except RuntimeError:
        results.check(False, f"layer {shape.kind}: its description does not fit its cache")
        return
    finally:
        layer.shape = shape
    error = float((parted - whole).norm() / whole.norm())
    worst = float((parted - whole).abs().max() / whole.abs().max())
    results.add("cached", layer=shape.kind, relative_error=error, worst=worst)
    limit = 2e-2 if results.device == "cuda" else 1e-4
    results.check(
        max(error, worst) < limit,
        f"layer {shape.kind}: after a cached prefix it differs by {max(error, worst):.2g}",
    )


def _seconds(layer: Layer, new: int, prefix: int) -> float:
    """Median of five, after one that is not counted; at most about three seconds."""
    import torch

    hidden, cache = layer.hidden(new), layer.cache_of_size(prefix)
    call: Callable[[], Any] = lambda: layer(hidden, cache)  # noqa: E731
    found, began = list[float](), time.perf_counter()
    for number in range(6):
        if hidden.is_cuda:
            torch.cuda.synchronize()
        first = time.perf_counter()
        call()
        if hidden.is_cuda:
            torch.cuda.synchronize()
        if number:
            found.append(time.perf_counter() - first)
            if time.perf_counter() - began > 2.0:
                break
    return sorted(found)[len(found) // 2]

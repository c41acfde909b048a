"""FlashInfer's real Python wrappers on CPU tensors: only the compiled kernels below them are replaced.

Each stand-in reads its arrays as the kernel does, raw 32-bit integers by position, and asserts what the
kernel takes on trust. So a test fails where a GPU would read another's memory.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# What a query that sees no token has as log-sum-exp: minus infinity, or a finite number in older versions.
EMPTY_LSE_LOG2 = (-math.inf, -5e4)


@dataclass
class Launches:
    """What ran, in order: ("prefill" | "merge" | "append" | ..., details)."""

    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    empty_lse_log2: float = -math.inf

    def of(self, name: str) -> list[dict[str, Any]]:
        return [details for kind, details in self.seen if kind == name]


class _TorchWithoutPinning:
    """torch, but for memory that only a GPU's driver can pin."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return torch.empty(*args, **kwargs)


@contextlib.contextmanager
def cpu_kernels(empty_lse_log2: float = -math.inf) -> Iterator[Launches]:
    """Run FlashInfer on CPU tensors for as long as the context lasts."""
    import flashinfer
    from flashinfer import activation, cascade, norm, page, prefill, rope

    log = Launches(empty_lse_log2=empty_lse_log2)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    replaced: list[tuple[Any, str, Any]] = [
        (prefill, "torch", _TorchWithoutPinning()),
        (prefill, "get_batch_prefill_module", lambda backend, *kinds: _prefill(log, backend, kinds)),
        (cascade, "get_cascade_module", lambda: _namespace(merge_state_in_place=_merge(log))),
        (page, "get_page_module", lambda: _namespace(append_paged_kv_cache=_append(log))),
        (norm, "get_norm_module", lambda: _norms(log)),
        (norm, "_use_cuda_norm", lambda device: True),
        (activation, "get_act_and_mul_module", lambda name: _activation(log)),
        (rope, "get_rope_module", lambda: _rotation(log)),
        (wrapper, "plan", _bound(wrapper.plan)),
        (wrapper, "run", _bound(wrapper.run)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield log


def _namespace(**functions: Callable[..., None]) -> types.SimpleNamespace:
    return types.SimpleNamespace(**functions)


def _bound(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, after its arguments were bound to its signature: no keyword may vanish in **kwargs."""
    signature = inspect.signature(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name, parameter in signature.parameters.items():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                assert not bound.arguments.get(name), f"{name} swallowed {bound.arguments[name]}"
        return method(*args, **kwargs)

    return call


def ints(tensor: Tensor, name: str) -> list[int]:
    """The numbers that a kernel would find at the tensor's address."""
    assert tensor.dtype == torch.int32, f"{name} is {tensor.dtype}: the kernel reads int32"
    assert tensor.dim() == 1, f"{name} has {tensor.dim()} dimensions"
    assert tensor.is_contiguous(), f"{name} has gaps"
    numbers: list[int] = tensor.tolist()
    return numbers


def check_indptr(indptr: list[int], name: str) -> None:
    assert indptr[0] == 0, f"{name} starts at {indptr[0]}"
    assert indptr == sorted(indptr), f"{name} falls"


def _prefill(log: Launches, backend: str, kinds: tuple[Any, ...]) -> types.SimpleNamespace:
    q_dtype, kv_dtype, _, index_dtype, *_ = kinds
    assert index_dtype == torch.int32, f"the module would be built for {index_dtype}"

    def plan(*args: Any) -> list[Any]:
        assert len(args) == (20 if backend == "fa2" else 16)
        qo, kv, lengths, most_rows, segments, heads, kv_heads, page_size, graph = args[3:12]
        host = {"qo_indptr": qo, "kv_indptr": kv, "kv_lens": lengths}
        assert all(t.device.type == "cpu" for t in host.values())
        rows, pages = ints(qo, "qo_indptr"), ints(kv, "kv_indptr")
        check_indptr(rows, "qo_indptr")
        check_indptr(pages, "kv_indptr")
        assert len(rows) == len(pages) == segments + 1 == len(ints(lengths, "kv_lens")) + 1
        assert heads % kv_heads == 0
        # In unsigned arithmetic this difference wraps around.
        assert not graph or segments <= most_rows
        details = {"rows": rows, "pages": pages, "graph": graph, "page_size": page_size, "causal": args[14]}
        if backend == "fa2":
            details |= {"fixed_split": args[16]}
        log.seen.append(("plan", details | {"backend": backend}))
        return [rows, pages]

    def run(*args: Any) -> None:
        planned, q, k, v, qo, kv, indices, last, out, lse, mask_mode, layout = args[2:14]
        sm_scale = args[23]
        assert q.dtype == q_dtype
        assert k.dtype == v.dtype == kv_dtype
        assert layout == 0, "NHD"
        assert k.stride() == v.stride()
        assert out.is_contiguous()
        assert out.shape == q.shape
        if lse is not None:
            assert lse.dtype == torch.float32
            assert lse.is_contiguous()
        rows, pages, last = ints(qo, "qo_indptr"), ints(kv, "kv_indptr"), ints(last, "last_page_len")
        assert [rows, pages] == planned, "planned for other arrays than it runs on"
        used = ints(indices, "kv_indices")[: pages[-1]]
        assert rows[-1] == len(q)
        assert len(used) == pages[-1]
        assert all(0 < p < len(k) for p in used), "a page out of the pool, or the zero page"
        details = {"rows": rows, "pages": pages, "indices": used, "last": last, "causal": mask_mode == 1}
        log.seen.append(("prefill", details | {"lse": lse is not None}))
        for s in range(len(last)):
            segment = slice(rows[s], rows[s + 1])
            table = used[pages[s] : pages[s + 1]]
            assert last[s] == 0 if not table else 1 <= last[s] <= k.shape[1], f"last_page_len {last[s]}"
            tokens = max(len(table) - 1, 0) * k.shape[1] + last[s]
            assert mask_mode == 0 or not table or tokens >= rows[s + 1] - rows[s]
            _attend(log, q, k, v, segment, table, tokens, mask_mode == 1, sm_scale, out, lse)

    return _namespace(plan=plan, paged_run=run)


def _attend(
    log: Launches,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment: slice,
    table: list[int],
    tokens: int,
    causal: bool,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """One segment as plain attention, with the log-sum-exp in base 2."""
    count = segment.stop - segment.start
    if not table:
        out[segment] = 0
        if lse is not None:
            lse[segment] = log.empty_lse_log2
        return
    keys, values = (x[table].flatten(0, 1)[:tokens].float() for x in (k, v))
    group = q.shape[1] // k.shape[2]
    scores = scale * torch.einsum("qhd,thd->qht", q[segment].float(), keys.repeat_interleave(group, 1))
    if causal:
        last = torch.arange(count) + tokens - count
        scores.masked_fill_((torch.arange(tokens)[None] > last[:, None])[:, None], -math.inf)
    weights = torch.softmax(scores, -1)
    out[segment] = torch.einsum("qht,thd->qhd", weights, values.repeat_interleave(group, 1)).to(out.dtype)
    if lse is not None:
        lse[segment] = (torch.logsumexp(scores, -1) / math.log(2)).float()


def _merge(log: Launches) -> Callable[..., None]:
    def merge_state_in_place(
        v: Tensor, s: Tensor, other: Tensor, s_other: Tensor, mask: Tensor | None
    ) -> None:
        assert mask is None
        assert v.shape == other.shape
        assert s.shape == s_other.shape == v.shape[:2]
        assert v.dtype == other.dtype
        assert v.dtype in (torch.float16, torch.bfloat16)
        assert s.dtype == s_other.dtype == torch.float32
        assert all(x.is_contiguous() for x in (v, s, other, s_other))
        assert v.shape[1] * v.shape[2] // 8 <= 1024, "more threads than a block has"
        log.seen.append(("merge", {"rows": len(v)}))
        top = torch.maximum(s, s_other)
        empty = top == -math.inf
        safe = torch.where(empty, 0.0, top)
        mine, others = torch.exp2(s - safe), torch.exp2(s_other - safe)
        total = torch.where(empty, 1.0, mine + others)
        v.copy_((v * (mine / total)[..., None] + other * (others / total)[..., None]).to(v.dtype))
        s.copy_(torch.where(empty, -math.inf, torch.log2(total) + top))

    return merge_state_in_place


def _append(log: Launches) -> Callable[..., None]:
    def append(
        key: Tensor,
        value: Tensor,
        batch: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        indices: Tensor,
        indptr: Tensor,
        last: Tensor,
        layout: int,
    ) -> None:
        assert layout == 0
        assert key.dtype == value.dtype == k_cache.dtype == v_cache.dtype, "the kernel reinterprets the keys"
        assert key.shape == value.shape
        assert key.shape[1:] == k_cache.shape[2:]
        assert key.stride(-1) == value.stride(-1) == 1
        assert k_cache.stride() == v_cache.stride()
        table, starts = ints(indices, "kv_indices"), ints(indptr, "kv_indptr")
        check_indptr(starts, "kv_indptr")
        assert len(starts) == len(ints(last, "last_page_len")) + 1
        size = k_cache.shape[1]
        slots = []
        for sequence, position in zip(
            ints(batch, "batch_indices"), ints(positions, "positions"), strict=True
        ):
            nth, offset = divmod(starts[sequence] * size + position, size)
            assert nth < starts[sequence + 1], "a row is appended beyond its sequence's pages"
            assert 0 < table[nth] < len(k_cache)
            slots.append((table[nth], offset))
        assert len(slots) == len(key)
        log.seen.append(("append", {"slots": slots}))
        for row, (at, offset) in enumerate(slots):
            k_cache[at, offset], v_cache[at, offset] = key[row], value[row]

    return append


def _norms(log: Launches) -> types.SimpleNamespace:
    log.seen.append(("norm", {}))
    return _namespace(rmsnorm=_rmsnorm, fused_add_rmsnorm=_fused_add_rmsnorm)


def _activation(log: Launches) -> types.SimpleNamespace:
    log.seen.append(("activation", {}))
    return _namespace(silu_and_mul=_silu_and_mul)


def _rotation(log: Launches) -> types.SimpleNamespace:
    log.seen.append(("rope", {}))
    return _namespace(apply_rope_pos_ids_cos_sin_cache=_rope)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _rmsnorm(out: Tensor, x: Tensor, weight: Tensor, eps: float, pdl: bool) -> None:
    assert x.dtype == weight.dtype == out.dtype != torch.float32
    assert x.dim() in (2, 3)
    assert x.stride(-1) == out.stride(-1) == 1
    assert weight.shape == x.shape[-1:]
    out.copy_(_normed(x, weight, eps))


def _fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, pdl: bool) -> None:
    assert x.dtype == residual.dtype == weight.dtype != torch.float32
    assert x.dim() == 2
    assert x.shape == residual.shape
    total = x.float() + residual.float()
    residual.copy_(total)
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    x.copy_(total * scale * weight.float())


def _silu_and_mul(out: Tensor, x: Tensor, pdl: bool) -> None:
    assert x.is_contiguous()
    gate, up = x.float().chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _rope(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, table: Tensor, positions: Tensor, interleave: bool
) -> None:
    assert not interleave, "halves, not pairs"
    assert table.dtype == torch.float32
    assert table.is_contiguous()
    assert positions.dtype in (torch.int32, torch.int64)
    assert positions.is_contiguous()
    assert 0 <= int(positions.min()) <= int(positions.max()) < len(table)
    cos, sin = table[positions.long()].unsqueeze(1).chunk(2, -1)
    for x, out in ((q, q_out), (k, k_out)):
        assert x.dtype in (torch.float16, torch.bfloat16)
        assert x.dim() == 3
        first, second = x.float().chunk(2, -1)
        out.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))

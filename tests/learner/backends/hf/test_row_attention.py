"""Attention over packed rows with shared prefixes: the reference, and what is asked of a GPU's kernels.

Meta tensors and a fake varlen_attn stand for the GPU: nothing here computes on one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from asyncrl.learner.backends.hf import row_attention
from asyncrl.learner.backends.hf.row_attention import (
    MASK_BYTES,
    Layout,
    attend,
    by_rows,
    ends_of,
    flash_takes,
    in_one_call,
    layout_of,
)
from asyncrl.learner.backends.hf.scorer import Scorer
from asyncrl.learner.backends.protocol import Packed
from asyncrl.learner.backends.shared_prefixes import Segment, share_prefixes
from asyncrl.learner.budget.counting import Counter
from tests.learner.backends.hf.fake_varlen import FakeVarlen
from tests.learner.backends.hf.test_torch import pack_rows, rows
from tests.learner.tiny import tiny_model


def plan_of(lengths: tuple[int, ...], common: int) -> tuple[tuple[Segment, ...], Tensor | None]:
    """Of rows of which each begins with the same `common` tokens."""
    made = [torch.cat([torch.arange(common), torch.full((n - common,), 1000 + i)]) for i, n in enumerate(lengths)]
    plan = share_prefixes(torch.cat(made), lengths)
    return plan.segments, plan.seen


RAGGED = {
    "alone": plan_of((20,), 0),
    "ragged": plan_of((17, 1, 40, 5), 0),
    "shared": plan_of((30, 27, 55, 12), 11),
    "one token of its own": plan_of((30, 12), 11),
}


def explicit(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float | None) -> Tensor:
    """torch's attention of all queries to all computed tokens at once, under a mask that says who sees whom."""
    sees = torch.zeros(len(query), len(key), dtype=torch.bool)
    seen = torch.arange(len(key)) if layout.seen is None else layout.seen
    at = 0
    for s in layout.segments:
        for i in range(s.length):
            sees[s.start + i, seen[at : at + s.prefix + i + 1]] = True
        at += s.prefix + s.length
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def states(tokens: int, dtype: torch.dtype, heads: int = 4) -> list[Tensor]:
    g = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, n, 8, generator=g).to(dtype).requires_grad_() for n in (heads, 2, 2)]


def outcomes(function: Callable[..., Tensor], given: list[Tensor], *more: Any, **named: Any) -> list[Tensor]:
    """The result and the three gradients."""
    out = function(*given, *more, **named)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), given)]


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-9)])
@pytest.mark.parametrize("kernel", ["by_rows", "by_rows in blocks", "2.11", "2.13"])
def test_every_way_equals_an_explicit_mask(
    name: str, scale: float | None, dtype: torch.dtype, tolerance: float, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments, seen = RAGGED[name]
    fake = FakeVarlen()
    if kernel == "by_rows in blocks":
        monkeypatch.setattr(row_attention, "ROUND", 3)
        monkeypatch.setattr(row_attention, "MASK_BYTES", 2 * dtype.itemsize * 60 * 6)
        row_attention._causal.cache_clear()
    if kernel.startswith("2."):
        monkeypatch.setattr(varlen, "varlen_attn", fake.of_2_11 if kernel == "2.11" else fake.of_2_13)
    layout = layout_of(segments, seen)
    given = states(sum(s.length for s in segments), dtype)
    function = by_rows if kernel.startswith("by_rows") else in_one_call
    found = outcomes(function, given, layout, scale=scale)
    expected = outcomes(explicit, given, layout, scale)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    if function is in_one_call:
        (asked,) = fake.asked
        assert asked["window_size"] == (-1, 0)
        assert asked["rows"] == len(segments)
        assert asked["key"][1] == (4 if kernel == "2.11" else 2), "heads are copied only where they cannot be shared"


def test_the_fakes_have_the_signatures_of_torch() -> None:
    real = inspect.signature(varlen.varlen_attn)
    known = [inspect.signature(f) for f in (FakeVarlen().of_2_11, FakeVarlen().of_2_13)]
    names = [(p.name, p.kind) for p in real.parameters.values()]
    assert names in [[(p.name, p.kind) for p in one.parameters.values()] for one in known]


def test_without_a_causal_window_rows_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_2_10(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor: ...

    monkeypatch.setattr(varlen, "varlen_attn", of_2_10)
    assert row_attention.varlen() is None
    with pytest.raises(RuntimeError, match="use by_rows"):
        in_one_call(*states(20, torch.float32), layout_of(*RAGGED["alone"]))


@pytest.mark.parametrize(
    ("dtype", "head", "capability", "takes"),
    [
        (torch.bfloat16, 128, (9, 0), True),
        (torch.float16, 64, (8, 0), True),
        (torch.float32, 128, (9, 0), False),
        (torch.bfloat16, 100, (9, 0), False),
        (torch.bfloat16, 512, (9, 0), False),
        (torch.bfloat16, 128, (7, 5), False),
    ],
)
def test_flash_kernels_get_what_they_take(
    dtype: torch.dtype, head: int, capability: tuple[int, int], takes: bool
) -> None:
    assert flash_takes(dtype, head, capability) == takes


def ragged_parts() -> list[Packed]:
    """Rows of 50 different lengths; in the second part they begin alike."""
    lengths = tuple(range(20, 70))
    ids = [torch.randint(0, 40, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    alike = [torch.cat([ids[0][:10], x[10:]]) for x in ids]
    mask = torch.cat([torch.arange(n) > 0 for n in lengths])
    return [Packed(torch.cat(x), mask, lengths) for x in (ids, alike)]


def test_one_call_for_each_layer_whatever_the_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeVarlen()
    monkeypatch.setattr(varlen, "varlen_attn", fake.of_2_13)
    scorer = Scorer(tiny_model(layers=3), temperature=1.0)
    scorer.attention = in_one_call
    with torch.no_grad():
        found = [scorer(part).logprobs for part in ragged_parts()]
    assert len(fake.asked) == 2 * 3
    assert len({(x["query"], x["key"]) for x in fake.asked}) == 2, "a shape for each part, not for each row"
    scorer.attention = None
    with torch.no_grad():
        for a, part in zip(found, ragged_parts(), strict=True):
            torch.testing.assert_close(a, scorer(part).logprobs, atol=2e-5, rtol=1e-5)


def test_gradients_through_a_model_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", FakeVarlen().of_2_13)
    scorer = Scorer(tiny_model(), temperature=1.0)
    found = []
    for kernel in (in_one_call, None):
        scorer.attention = kernel
        scorer(pack_rows(rows())).logprobs.sum().backward()
        found.append({n: p.grad.clone() for n, p in scorer.named_parameters() if p.grad is not None})
        scorer.zero_grad()
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], atol=2e-5, rtol=1e-4)


class Asked:
    """Notes what torch's attention is asked for, and computes nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.masks: list[tuple[int, int, bool]] = []
        """Queries, bytes, contiguous"""
        self.heads: list[tuple[int, bool]] = []
        self.cudnn: list[bool] = []
        monkeypatch.setattr(F, "scaled_dot_product_attention", self)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, enable_gqa: bool, **_: Any
    ) -> Tensor:
        if attn_mask is not None:
            self.masks.append((attn_mask.shape[0], attn_mask.nbytes, attn_mask.is_contiguous()))
        self.heads.append((k.shape[1], enable_gqa))
        self.cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
        return torch.empty_like(q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_mask_is_above_its_limit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 64k tokens that shares 8: one mask took 17 GB, and a copy of it as much again."""
    asked = Asked(monkeypatch)
    row_attention._causal.cache_clear()
    segments = (Segment(0, 64, 0), Segment(64, (1 << 16) - 8, 8))
    seen = torch.cat([torch.arange(72), torch.arange(64, segments[1].length + 64)]).to("meta")
    layout = layout_of(segments, seen, ends=ends_of(segments).to("meta"))
    given = [torch.empty(segments[1].length + 64, n, 8, dtype=dtype, device="meta") for n in (2, 1, 1)]
    with Counter() as counted:
        out = by_rows(*given, layout)
    row_attention._causal.cache_clear()
    assert out.shape == given[0].shape
    assert sum(queries for queries, _, _ in asked.masks) == segments[1].length, "every query of it, once"
    assert max(size for _, size, _ in asked.masks) <= MASK_BYTES
    assert counted.peak < 4 * MASK_BYTES, "the mask, a copy of a block's part, and what the masks are for"


def test_what_kernels_of_a_gpu_are_asked_for_without_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    segments, seen = RAGGED["shared"]
    assert seen is not None
    layout = layout_of(segments, seen.to("meta"), ends=ends_of(segments).to("meta"))
    tokens = sum(s.length for s in segments)
    for dtype in (torch.bfloat16, torch.float32):
        by_rows(*[torch.empty(tokens, n, 8, dtype=dtype, device="meta") for n in (4, 2, 2)], layout)
    first = sum(not s.prefix for s in segments)
    assert asked.heads[:first] == [(2, True)] * first, "heads are shared where there is no mask"
    assert set(asked.heads[first:]) == {(4, False)}, "with a mask, and in float32, kernels share no heads"
    assert all(contiguous for _, _, contiguous in asked.masks)
    assert not any(asked.cudnn), "cuDNN would build a plan for every length of a row"
    assert torch.backends.cuda.cudnn_sdp_enabled(), "and is as it was afterwards"


def test_on_a_cpu_the_reference_computes() -> None:
    segments, seen = RAGGED["shared"]
    given = states(sum(s.length for s in segments), torch.float32)
    layout = layout_of(segments, seen)
    assert torch.equal(attend(*given, layout), by_rows(*given, layout))

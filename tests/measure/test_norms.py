"""Norms of many tensors in one call, and of what has changed since a copy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fxguard.measure import native

pytestmark = pytest.mark.skipif(not native.is_built, reason="needs the part in C")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = ((16, 17), (5,), (), (1,), (3, 1, 4))


def given() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape).to(dtype) for dtype in DTYPES for shape in SHAPES)


def norm_of(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.double()))


def changes(
    tensors: tuple[Tensor, ...], copies: tuple[Tensor, ...], most: int = 0
) -> tuple[list[float], list[float], list[float]]:
    found = native.changes(tensors, copies, most)
    assert found is not None
    return found


def test_norms() -> None:
    tensors = given()
    assert native.norms(tensors, 0) == pytest.approx([norm_of(x) for x in tensors], rel=1e-14)
    assert native.norms((), 0) == []


def test_changes() -> None:
    """The norm of a difference; the copy is then the tensor, and the next difference 0."""
    tensors = given()
    copies = tuple(x.clone() for x in tensors)
    for copy in copies:
        copy += 0.25
    changed = [norm_of(x.double() - c.double()) for x, c in zip(tensors, copies, strict=True)]
    sizes, before = ([norm_of(x) for x in each] for each in (tensors, copies))
    for wanted, found in zip((changed, sizes, before), changes(tensors, copies), strict=True):
        assert found == pytest.approx(wanted, rel=1e-14)
    assert all(map(torch.equal, tensors, copies))
    change, now, then = changes(tensors, copies)
    assert change == [0.0] * len(tensors)
    assert now == then == pytest.approx(sizes, rel=1e-14)


def test_copied() -> None:
    """Copies become the tensors, or the samples of large ones; nothing where one cannot be read."""
    tensors = given()
    copies = tuple(torch.full_like(x, 7.0) for x in tensors)
    assert native.copied(tensors, copies, 0)
    assert all(map(torch.equal, tensors, copies))
    x = torch.arange(10.0)
    copy = torch.zeros(4)
    assert native.copied((x,), (copy,), 4)
    assert copy.tolist() == [0.0, 3.0, 6.0, 9.0]
    assert changes((x,), (copy,), 4)[0] == [0.0]
    spread = torch.randn(6, 4).t()
    assert native.copied((spread,), (kept := torch.zeros_like(spread),), 0)
    assert torch.equal(kept, spread)
    for other in (torch.zeros(3), torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]):
        assert not native.copied((x, x), (copy, other), 4)
    assert not native.copied((x, None), (copy, torch.zeros(4)), 4)
    assert not native.copied((x,), (copy, copy), 4)
    assert copy.tolist() == [0.0, 3.0, 6.0, 9.0]


def test_layouts() -> None:
    x = torch.randn(12, 10)
    copy = torch.zeros(30)
    spread = x.view(-1)[::4]
    assert changes((spread,), (copy,))[0] == [pytest.approx(norm_of(spread), rel=1e-14)]
    assert torch.equal(copy, spread)
    t = x.t()
    copy = t.clone() + 1  # in the order of the original
    assert changes((t,), (copy,))[0] == [pytest.approx(math.sqrt(120), rel=1e-6)]
    assert torch.equal(copy, t)
    offset = x.view(-1)[3:]
    assert native.norms((offset,), 0) == [pytest.approx(norm_of(offset), rel=1e-14)]


def test_as_many_elements_of_a_large_tensor() -> None:
    """Every k-th in order of the indices; a small one is read in full."""
    x, small = torch.randn(30, 101), torch.randn(7)
    sample, copy = x.view(-1)[::4], torch.zeros(758)
    assert native.are_here((x, small), (copy, torch.zeros(7)), 1000)
    assert not native.are_here((x,), (torch.zeros(757),), 1000)
    wanted = [norm_of(sample), norm_of(small)]
    assert native.norms((x, small), 1000) == pytest.approx(wanted, rel=1e-14)
    assert changes((x,), (copy,), 1000)[0] == pytest.approx(wanted[:1], rel=1e-14)
    assert torch.equal(copy, sample)
    high = float(sample.abs().max())
    assert native.largest((x, small), 1000) == pytest.approx([high, float(small.abs().max())])
    assert native.largest((x,), 0) == pytest.approx([float(x.abs().max())])
    assert native.norms((x.t(),), 1000) is None  # the order of its memory is another one
    assert native.norms((x.t(),), 0) == pytest.approx([norm_of(x)], rel=1e-14)
    assert native.largest((x.t(),), 1000) is None


def test_weights_are_read_as_they_are() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    assert native.norms((weight,), 0) == [pytest.approx(norm_of(weight.detach()))]
    assert native.largest((weight, torch.tensor([1.0, math.nan])), 0) is not None


def test_numbers_that_are_too_large_for_the_dtype() -> None:
    x = torch.full((400,), 60000.0, dtype=torch.float16)
    assert native.norms((x, x.float() * 1e33), 0) == pytest.approx([1.2e6, 1.2e39], rel=1e-5)
    bad = torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.nan])
    inf, nan = native.norms(bad, 0) or ()
    assert inf == math.inf
    assert math.isnan(nan)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3).expand(4, 3),
        torch.ones(2, dtype=torch.int32),
        torch.randn(4, 4)[:, :2],
        torch.randn(0),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, 3).to_sparse(),
        torch.empty(3, device="meta"),
        "a tensor",
    ],
    ids=lambda x: x if isinstance(x, str) else f"{x.dtype} {x.layout} {list(x.shape)} {x.device}",
)
def test_what_cannot_be_read(x: Tensor) -> None:
    """Then nothing is written, of other tensors either."""
    before, copy = torch.ones(2), torch.zeros(2)
    assert native.norms((before, x), 0) is None
    assert native.changes((before, x), (copy, x), 0) is None
    assert not native.are_here((before, x), None, 0)
    assert native.changes((before, before), (copy, torch.zeros(3)), 0) is None
    assert native.changes((before,), (copy.double(),), 0) is None
    assert not copy.any()

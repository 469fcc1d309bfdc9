"""Tests of numerics: four functions, each as it is often written and as it should be.

python -m pytest examples/numerical_tests.py
"""

import math

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from fxguard.testing import find_overflow, like, numerically_stable, tensors

HIDDEN = tensors(torch.float16, (2, 64), min_value=-1000, max_value=1000)


class RMSNorm(nn.Module):
    """Root mean square layer normalization (arXiv:1910.07467)."""

    def __init__(self, width: int, squares: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.squares = squares

    def forward(self, x: Tensor) -> Tensor:
        mean = x.to(self.squares).square().mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(mean + 1e-6)).to(x.dtype)


def test_rms_norm() -> None:
    """In float16 the square of 256 overflows. The result is a zero, and nobody notices."""
    found = find_overflow(RMSNorm(64, torch.float16).half(), HIDDEN)
    assert found is not None
    print(found)
    assert found.report.origins[0].what == "square"
    assert find_overflow(RMSNorm(64, torch.float32).half(), HIDDEN) is None


def naive_logsumexp(x: Tensor) -> Tensor:
    return x.exp().sum(-1).log()


def test_logsumexp() -> None:
    """64 times exp(7) overflows float16, unless the largest number is subtracted first."""
    found = find_overflow(naive_logsumexp, HIDDEN)
    assert found is not None
    print(found)
    assert find_overflow(lambda x: x.logsumexp(-1), HIDDEN) is None


def attention(query: Tensor, mask: Tensor) -> Tensor:
    scores = (query @ query.transpose(-1, -2)).masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ query


def test_attention() -> None:
    """A row that is masked entirely gives NaN. Masks of padded text have no such row."""
    query = torch.randn(4, 8)
    found = find_overflow(attention, st.tuples(st.just(query), tensors(torch.bool, (4, 4))))
    assert found is not None
    print(found)
    assert found.report.origins[0].masked_row
    padded = torch.tensor([[True, True, True, False]]).expand(4, 4)
    assert find_overflow(attention, like((query, padded))) is None


def one_pass_variance(x: Tensor) -> Tensor:
    return x.square().mean(-1) - x.mean(-1).square()


def test_variance_in_one_pass_cancels() -> None:
    """Nothing overflows, but the digits are lost."""
    unstable = numerically_stable(one_pass_variance, torch.randn(4, 64) + 100, dtype=torch.float32)
    print(unstable)
    assert not unstable
    assert unstable.first is not None
    assert unstable.first.title == "sub"


def test_variance_in_two_passes_does_not() -> None:
    assert numerically_stable(lambda x: x.var(-1), torch.randn(4, 64) + 100, dtype=torch.float32)

"""What is said to do works: in forward and in gradient, for all that reads the number, and exactly.

Repairs run here as a user would write them; numbers that are told are counted by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents have it
from torch import Tensor, nn

import fxguard
from fxguard.findings import Origin
from fxguard.graph.alignment import no_alignment
from fxguard.report.text import cause_text
from fxguard.source.named import operand_text
from fxguard.testing.watch import as_module

HALF = torch.float16


def origin_of(function: Callable[..., Tensor], *args: Tensor) -> Origin:
    """The first origin of a forward, or of the backward of the sum of its result."""
    with pytest.raises(fxguard.NonFiniteError) as caught:
        fxguard.instrument(as_module(function))(*args).float().sum().backward()
    return caught.value.report.origins[0]


def fix_of(function: Callable[..., Tensor], *args: Tensor) -> str:
    return origin_of(function, *args).fixes[0].text


# CTC


CTC = [
    ([[1, 1, 2]], [3], [3], "3 labels with 1 repeat need 4 frames, the input has 3"),
    ([[1, 2, 3]], [2], [3], "3 labels need 3 frames, the input has 2"),
    ([[1, 0, 0], [2, 2, 2]], [4, 4], [1, 3],
     "sample 1: 3 labels with 2 repeats need 5 frames, the input has 4"),
    ([[1, 2, 3], [1, 1, 3]], [2, 3], [3, 3],
     "sample 0: 3 labels need 3 frames, the input has 2 (and so does the other)"),
    ([[1, 2, 2, 3]], [4, 4], [2, 2], None),  # of one row, nothing repeats inside a sample
    ([[1, 1, 1]], [5], [3], ""),
    ([[1, 2, 3]], [3], [3], ""),
]  # fmt: skip


@pytest.mark.parametrize(("targets", "frames", "lengths", "said"), CTC)
def test_ctc_needs_a_frame_for_each_repeat(
    targets: list[list[int]], frames: list[int], lengths: list[int], said: str | None
) -> None:
    """What is counted too short is what torch gives an infinite loss, and nothing else is."""
    labels = torch.tensor(targets[0] if said is None else targets)
    log_probs = torch.randn(6, len(frames), 5).log_softmax(-1)
    args = (log_probs, labels, torch.tensor(frames), torch.tensor(lengths))
    assert no_alignment(args, {}) == (said or "")
    losses = F.ctc_loss(*args, reduction="none")
    assert bool(losses.isinf().any()) == bool(said)


def test_a_report_on_ctc_names_the_sample() -> None:
    """And the frames that it needs, of lengths that are tuples as well."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), y, (9, 9), (7, 7))

    targets = torch.tensor([[1, 2, 3, 4, 1, 2, 3], [1, 1, 2, 2, 3, 3, 4]])
    origin = origin_of(loss, torch.randn(9, 2, 5, requires_grad=True), targets)
    wanted = "sample 1: 7 labels with 3 repeats need 10 frames, the input has 9"
    assert origin.operands == wanted
    assert "labels + repeats" in origin.fixes[0].text


# An eps in half precision


def rms(x: Tensor, eps: float) -> Tensor:
    ms = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(ms + eps)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: rms(x, 1e-8),
        lambda x: x / (x.pow(2).mean(-1, keepdim=True) + 1e-9),
        lambda x: x * (x.abs().sum(-1, keepdim=True) + 1e-9).reciprocal(),
        lambda x: x * (x.var(-1, keepdim=True) + 1e-9) ** -0.5,
        lambda x: (x * 0.5 + 1e-9).rsqrt(),
    ],
)
def test_no_eps_is_proposed_at_which_the_gradient_overflows(
    function: Callable[[Tensor], Tensor],
) -> None:
    """In float16 the derivatives of 1 / x and 1 / sqrt(x) at 1e-4 are 1e8 and 5e5."""
    text = fix_of(function, torch.zeros(2, 4, dtype=HALF, requires_grad=True))
    assert "1e-4" not in text
    assert "float32" in text


@pytest.mark.parametrize(
    ("function", "mended"),
    [
        (lambda x: (x + 1e-9).log(), lambda x: (x + 1e-4).log()),
        (lambda x: F.layer_norm(x, (4,), eps=1e-12), lambda x: F.layer_norm(x, (4,), eps=1e-4)),
        (lambda x: F.normalize(x, dim=-1), lambda x: F.normalize(x, dim=-1, eps=1e-4)),
    ],
)
def test_an_eps_that_is_proposed_has_a_gradient(
    function: Callable[[Tensor], Tensor], mended: Callable[[Tensor], Tensor]
) -> None:
    """What is said runs, forward and backward, at the operands that failed."""
    x = torch.zeros(2, 4, dtype=HALF, requires_grad=True)
    assert any("1e-4" in fix.text for fix in origin_of(function, x).fixes)
    x.grad = None
    mended(x).sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


# A divisor that something else reads


def gaussian(x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    sigma = make(x)
    return ((1 - x) / sigma) ** 2 + torch.log(sigma)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (torch.relu, "softplus(...) + 1e-3 in place of relu (test_right_repairs.py:"),
        (lambda x: x.clamp(min=0), "softplus(...) + 1e-3 in place of clamp ("),
        (lambda x: F.relu(x).unsqueeze(-1).squeeze(-1), "in place of relu ("),
        (torch.abs, "keep sigma away from 0 where it is computed in abs ("),
        (lambda x: x, "make sigma positive where it is computed, by softplus(...) + 1e-3: log ("),
    ],
)
def test_a_divisor_that_has_another_pole_is_made_positive(
    make: Callable[[Tensor], Tensor], says: str
) -> None:
    """Where it is computed: a choice before the division would leave the logarithm of 0."""
    text = fix_of(lambda x: gaussian(x, make), torch.tensor([0.0, 1.0]))
    assert says in text
    assert "log (test_right_repairs.py:" in text
    assert "where(" not in text


def test_a_divisor_that_nothing_else_reads_is_chosen_by_its_name() -> None:
    """The clean twin, with the name that the program has for it."""

    def scaled(w: Tensor) -> Tensor:
        scale = w.abs().amax(1, keepdim=True)
        return (w / scale).tanh() * scale

    text = fix_of(scaled, torch.zeros(2, 3))
    assert text.startswith("choose the divisor by where(scale == 0, 1, scale)")


# Numbers that must be positive


class Noise(nn.Module):
    """A likelihood whose variance is a sum of parameters."""

    def __init__(self, variance: Callable[[Noise, Tensor], Tensor]) -> None:
        super().__init__()
        self.q_pos = nn.Parameter(torch.tensor(-0.5))
        self.r = nn.Parameter(torch.tensor(0.25))
        self.fc = nn.Linear(1, 1)
        nn.init.constant_(self.fc.weight, -9.0)
        self.variance = variance

    def forward(self, x: Tensor) -> Tensor:
        S = self.variance(self, x)
        return torch.log(S)


@pytest.mark.parametrize(
    ("variance", "names"),
    [
        (lambda m, x: m.q_pos + m.r, "q_pos and r"),
        (lambda m, x: torch.diag(torch.stack([m.q_pos, m.r])) @ torch.ones(2), "q_pos and r"),
        (lambda m, x: 2 * m.q_pos, "q_pos"),
        (lambda m, x: m.q_pos - m.r, "q_pos"),  # r has to be small, not large
        (lambda m, x: 3 * m.q_pos + F.softplus(m.r), "q_pos"),
        (lambda m, x: m.q_pos * m.r - 0, ""),  # of two negative ones it is positive
        (lambda m, x: m.fc(x) - 9, ""),
        (lambda m, x: m.q_pos - x, ""),
    ],
)
def test_parameters_that_make_a_variance_negative_are_named(
    variance: Callable[[Noise, Tensor], Tensor], names: str
) -> None:
    """Those it grows with, unless data or a layer computed it as well."""
    with pytest.raises(fxguard.NonFiniteError) as caught:
        fxguard.instrument(Noise(variance))(torch.ones(1, 1))
    text = caught.value.report.origins[0].fixes[0].text
    if names:
        assert text.startswith(f"keep {names} positive, by softplus or exp of a free parameter")
    else:
        assert text.startswith("see why S is negative in sub (test_right_repairs.py:")


def test_what_a_layer_returns_is_made_positive() -> None:
    """Its numbers have no sign by themselves, and softplus keeps their gradient."""
    with pytest.raises(fxguard.NonFiniteError) as caught:
        fxguard.instrument(Noise(lambda m, x: m.fc(x)))(torch.ones(1, 1))
    text = caught.value.report.origins[0].fixes[0].text
    assert text.startswith("make S positive where it is computed in linear (")


# What a model returned to a loss


def loss_fix(last: Callable[[], nn.Module], loss: Callable[[Tensor], Tensor]) -> str:
    """The first fix of a loss of what a model returns that ends in a module."""
    model, found = nn.Sequential(nn.Linear(2, 3), last()), list[fxguard.types.Report]()
    nn.init.constant_(model[0].weight, -100.0)
    with fxguard.watch(model, on_detect=found.append):
        loss(model(torch.arange(4.0).view(2, 2))).mean().backward()
    return found[0].origins[0].fixes[0].text


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (nn.Sigmoid, "return logits from the model, without its sigmoid: logsigmoid(logits)"),
        (nn.ReLU, "make y positive where it is computed, by softplus(...) + 1e-3 in place of relu"),
        (nn.Identity, "make y positive where it is computed in linear ("),
    ],
)
def test_a_logarithm_of_what_a_model_returned(last: Callable[[], nn.Module], says: str) -> None:
    """The operation that made it there is known."""
    assert loss_fix(last, lambda y: -torch.log(y)).startswith(says)


def test_a_softmax_that_a_model_returned() -> None:
    """Its logarithm is that of one class."""

    def last() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1))

    torch.manual_seed(0)
    text = loss_fix(last, lambda y: -torch.log(y))
    assert text.startswith("return logits from the model, without its softmax: log_softmax(logits")


# Backwards


def test_a_quotient_that_forward_made_nan_is_said_to_be_masked() -> None:
    """Its derivative is not infinite: 0 / 0 was already NaN, and left out."""

    def kept(w: Tensor) -> Tensor:
        w = w / w.sum(-1, keepdim=True)
        return w[:1].sum()

    w = torch.tensor([[1.0, 1.0], [0.0, 0.0]], requires_grad=True)
    origin = origin_of(kept, w)
    assert cause_text(origin).startswith(": 0 / 0 in the forward: what follows hides")
    assert origin.fixes[0].text.startswith("choose the divisor d = w.sum(-1, keepdim=True) by whe")


def test_a_small_operand_is_no_growth() -> None:
    """The derivative of log at 1e-42 overflows; nothing grew."""

    def nce(x: Tensor) -> Tensor:
        e = x.exp()
        return -torch.log(e.diagonal() / e.sum(1)).sum()

    origin = origin_of(nce, torch.tensor([[-48.0, 48.0], [0.0, 0.0]], requires_grad=True))
    assert (origin.cause, origin.fixes[0].kind) == ("overflow", "exact")
    assert cause_text(origin) == ": its operand is so small that the derivative overflows"
    assert origin.fixes[0].text.startswith("take log_softmax(x, dim)")


def test_a_small_operand_in_float64_is_none_of_a_pole() -> None:
    """No dtype is wider: a determinant of 1e-312 has a logarithm, and no derivative that fits."""

    def volume(x: Tensor) -> Tensor:
        return torch.log(torch.linalg.det(torch.diag(x.exp()))).sum()

    at = torch.full((39,), math.log(1e-8), dtype=torch.float64, requires_grad=True)
    origin = origin_of(volume, at)
    assert cause_text(origin) == ": its operand is so small that the derivative overflows"
    assert origin.fixes[0].text.startswith("take slogdet(")


@dataclass(frozen=True)
class Told:
    code: str
    name: str
    text: str


@pytest.mark.parametrize(
    "told",
    [
        Told("inv = deg.pow(-0.5)", "pow", "deg"),
        Told("return u**gamma", "pow", "u"),
        Told("z = (y - mu) / self.sigma", "div", "self.sigma"),
        Told("x /= n", "div", "n"),
        Told("for row in x / total:", "div", "total"),
        Told("a = torch.log(1 - p)", "log", "(1 - p)"),
        Told("a = x.log_()", "log", "x"),
        Told("p.addcdiv_(m, denom, value=-lr)", "addcdiv", "denom"),
        Told("p = torch.addcdiv(p, m, state.v)", "addcdiv", "state.v"),
        Told("a = torch.remainder(x, period)", "remainder", "period"),
        Told("a = x % period", "remainder", "period"),
        Told("a = x // n", "floor_divide", "n"),
        Told("a = x / y + u / v", "div", ""),  # which of them is not known
        Told("a = x / 8", "div", ""),
        Told("a = self.act(x)", "log", ""),
        Told("    x) / (n", "div", ""),  # a part of a statement
        Told("", "div", ""),
    ],
    ids=lambda told: told.code,
)
def test_operands_have_the_names_of_the_program(told: Told) -> None:
    """Or none, where the line does not tell."""
    assert operand_text(told.code, told.name) == told.text


# Squares


def test_a_square_that_float32_does_not_hold_is_not_sent_there() -> None:
    """What made its base so large is named, in float32 and where float16 needs more than that."""

    def squared(x: Tensor) -> Tensor:
        spread = torch.exp(x * 3)
        return (spread - 1).pow(2)

    assert fix_of(squared, torch.tensor([1.0, 15.5])).startswith("look at exp")
    half = fix_of(lambda x: x.pow(2), torch.tensor([2.0, 300.0], dtype=HALF))
    assert half.startswith("square in float32")


def test_what_reads_all_of_an_operand_names_no_row() -> None:
    """An element of an attention is made from the whole sequence."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    origin = origin_of(lambda x: attention(x, x, x)[0], torch.rand(2, 2, 4) * 1e30)
    assert origin.operands.startswith("at [")
    assert "multi_head_attention_forward of numbers from" in origin.operands
    assert "(16 elements)" in origin.operands

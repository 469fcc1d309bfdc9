"""A mask is what a softmax turns into zeros: by its use, whoever made it, whatever it is called."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxguard

INF = math.inf
SIZE = 6
KEPT = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0])  # 0 where the mask is

Mask = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Attention whose mask a function makes; `scale` makes its activations overflow."""

    def __init__(self, mask: Mask, scale: float = 1.0) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Linear(4, 4), nn.Linear(4, 12)
        self.mask, self.scale = mask, scale

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        mask = self.mask(kept)
        x = self.embed(x) * self.scale
        x = x * self.scale
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-1, -2) + mask.to(q.dtype)).softmax(-1) @ v


def report_of(model: nn.Module, *args: Tensor) -> fxguard.types.Report | None:
    """The report on one call; None if it is healthy."""
    try:
        fxguard.instrument(model)(*args)
    except fxguard.NonFiniteError as error:
        return error.report
    return None


MADE: dict[str, Mask] = {
    "log of a triangle": lambda kept: torch.log(torch.tril(torch.ones(SIZE, SIZE))),
    "log2, then scaled": lambda kept: torch.log2(torch.ones(SIZE, SIZE).tril()) * 0.5,
    "log of a mask that was given": lambda kept: kept.log(),
    "cast, expanded": lambda kept: (kept > 0).double().log()[None].expand(SIZE, SIZE).float(),
    "minus one divided by zero": lambda kept: (-1 / (kept > 0).float()).clamp(max=-1.0),
    "a large number in float16": lambda kept: (1 - kept.half()) * -1e9,
    "joined": lambda kept: torch.minimum(kept.log(), torch.ones(SIZE, SIZE).tril().log()),
}


@pytest.mark.parametrize("name", MADE)
def test_a_mask_that_the_model_makes_is_not_blamed_for_another_fault(name: str) -> None:
    """Without the other fault nothing is reported; with it, it is the first, and the mask none."""
    x = torch.randn(SIZE, 4)
    assert report_of(Attention(MADE[name]), x, KEPT) is None
    report = report_of(Attention(MADE[name], 1e30), x, KEPT)
    assert report is not None
    assert (report.origins[0].what, report.origins[0].cause) == ("mul", "overflow")
    text = "\n".join(report.verdict)
    assert "x * self.scale" in report.verdict[1]
    assert not any(word in text for word in ("log", "div made", "clamp", "-1e9"))


def test_a_row_that_is_masked_entirely_is_the_softmax_s() -> None:
    """What fails is the softmax of that row, and not the logarithm that made the mask."""
    report = report_of(Attention(torch.log), torch.randn(SIZE, 4), torch.zeros(SIZE))
    assert report is not None
    assert [each.cause for each in report.origins if not each.follows] == ["masked row"]


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x, w: torch.log(x) @ w, "log"),  # mixed: no mask
        (lambda x, w: (torch.log(x @ w * 0).softmax(-1), torch.log(x) @ w), "log"),  # of a weight
        (lambda x, w: (x.log(), x.log().softmax(-1)), "log"),  # the model returns it
        (lambda x, w: x.log().softmax(-1) @ x.log(), "log"),  # one reader is no softmax
        (lambda x, w: (1 / x).softmax(-1), "div"),  # +inf
        (lambda x, w: (torch.rand_like(x) * 0).log().sum(), "log"),  # drawn
    ],
)
def test_an_infinity_that_is_no_mask_is_blamed(
    function: Callable[[Tensor, Tensor], object], what: str
) -> None:
    """It is mixed, returned, of a weight, drawn, or +inf."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> object:
            return function(x, self.weight)

    report = report_of(Net(), torch.tensor([[1.0, 0.0, 2.0]]).expand(3, 3).contiguous())
    assert report is not None
    assert report.origins[0].what == what


class Head(nn.Module):
    """Features, prepared in some way, and a linear layer."""

    def __init__(self, prepare: Callable[[Head, Tensor], Tensor]) -> None:
        super().__init__()
        self.prepare = prepare
        self.norm, self.batch = nn.LayerNorm(SIZE), nn.BatchNorm1d(SIZE)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.gain, self.shift = nn.Parameter(torch.ones(SIZE)), nn.Parameter(torch.zeros(SIZE))
        self.register_buffer("mean", torch.full((SIZE,), 0.5))
        self.out = nn.Linear(SIZE, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.prepare(self, x))


@pytest.mark.parametrize(
    "prepare",
    [
        lambda s, x: x,
        lambda s, x: s.norm(x),
        lambda s, x: s.batch(x),
        lambda s, x: s.conv(x[:, None])[:, 0],
        lambda s, x: x * s.gain + s.shift,
        lambda s, x: (x - s.mean) / 2.0,
        lambda s, x: (x - x.mean(0)) / (x.std(0) + 1e-6),
        lambda s, x: torch.cat([x[:, :2], x[:, 2:]], 1).float(),
        lambda s, x: x.sin(),
    ],
)
def test_an_argument_that_is_mixed_is_no_mask(prepare: Callable[[Head, Tensor], Tensor]) -> None:
    """-inf among features is a fault of the features: the argument is named, with its rows."""
    counts = torch.poisson(torch.full((8, SIZE), 3.0)) + 1
    assert report_of(Head(prepare), counts.log()) is None
    counts[5, 2] = 0
    report = report_of(Head(prepare), counts.log())
    assert report is not None
    assert report.origins[0].message == "argument `x` of Head.forward: 1 -inf, in row 5"
    assert (report.phase, report.origins[0].cause) == ("data", "data")
    assert "log1p" in report.fix
    assert "masked_fill" not in "\n".join(report.verdict)


class Masked(nn.Module):
    """Scores, an additive mask as an argument, and what a function makes of both."""

    def __init__(self, function: Callable[[Masked, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.lin = function, nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.function(self, self.lin(x), bias)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x, bias: (x + bias).softmax(-1) @ x,
        lambda s, x, bias: torch.log_softmax(x + bias[None, :, :SIZE][0], -1).exp() @ x,
        lambda s, x, bias: (x + bias).logsumexp(-1),
        lambda s, x, bias: nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=bias),
        lambda s, x, bias: torch.maximum(x + bias, torch.tensor(-1e4)).softmax(-1),
        lambda s, x, bias: (x + bias).exp() @ x,
        lambda s, x, bias: torch.where(bias == 0, x, -9.0),
    ],
)
def test_an_additive_mask_as_an_argument_stays_intended(
    function: Callable[[Masked, Tensor, Tensor], Tensor],
) -> None:
    """Nothing is reported; when something else fails, that is."""
    bias = torch.zeros(SIZE, SIZE).masked_fill(torch.ones(SIZE, SIZE).triu(1) > 0, -INF)
    assert report_of(Masked(function), torch.randn(SIZE, SIZE), bias) is None
    report = report_of(Masked(function), torch.randn(SIZE, SIZE) * 1e38 * 1e4, bias)
    assert report is None or "bias" not in report.origins[0].message


def test_a_masked_row_of_an_argument_is_told_of_the_softmax() -> None:
    """The argument holds nothing but -inf in one row: the softmax of that row fails."""
    bias = torch.zeros(SIZE, SIZE)
    bias[2] = -INF
    report = report_of(Masked(lambda s, x, b: (x + b).softmax(-1)), torch.randn(SIZE, SIZE), bias)
    assert report is not None
    assert (report.origins[0].what, report.origins[0].cause) == ("softmax", "masked row")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda s, x, bias: x.relu() * bias, "0 * inf of a mask"),
        (lambda s, x, bias: (x + bias).sum(), "it read -inf of a mask"),
        (lambda s, x, bias: (x + bias).exp() @ x + x.relu() * bias, "0 * inf of a mask"),
    ],
)
def test_an_additive_mask_that_meets_a_layer_is_no_feature(
    function: Callable[[Masked, Tensor, Tensor], Tensor], words: str
) -> None:
    """What the model computed with weights is no loss: there the argument would be blamed."""
    bias = torch.zeros(SIZE, SIZE).masked_fill(torch.ones(SIZE, SIZE).triu(1) > 0, -INF)
    report = report_of(Masked(function), torch.randn(SIZE, SIZE), bias)
    assert report is not None
    assert report.origins[0].cause_in_words == words


@pytest.mark.parametrize(
    ("function", "words", "fix"),
    [
        (lambda logits, m: (lp := logits.masked_fill(m, -INF).log_softmax(-1)).exp() * lp,
         "0 * inf of a mask", "log_p.masked_fill(mask, 0)"),
        (lambda logits, m: logits.masked_fill(m, -INF) * (~m).float(), "0 * inf of a mask",
         "mask after this product"),
        (lambda logits, m: logits + torch.where(m, -INF, 0.0) * m.float().mul(0),
         "0 * inf of a mask",
         "masked_fill(mask, -inf) instead"),
        (lambda logits, m: logits.masked_fill(m, -INF).sum(-1), "it read -inf of a mask",
         "set masked entries to 0"),
    ],
)  # fmt: skip
def test_what_fails_of_an_intended_mask_says_so(
    function: Callable[[Tensor, Tensor], Tensor], words: str, fix: str
) -> None:
    """0 * -inf came of the mask: where to put 0, or where to mask."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor, m: Tensor) -> Tensor:
            return function(self.lin(x), m)

    report = report_of(Policy(), torch.randn(2, 4), torch.tensor([False, True, False, False]))
    assert report is not None
    assert report.origins[0].cause_in_words == words
    assert fix in report.fix


def test_the_fix_of_a_masked_entropy_is_finite_with_its_gradient() -> None:
    """0 where the mask is, before the product: the entropy of what is left, and its gradient."""
    logits = torch.randn(3, 5, requires_grad=True)
    mask = torch.tensor([False, True, False, True, False])
    log_p = logits.masked_fill(mask, -INF).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(mask, 0)).sum(-1)
    want = torch.distributions.Categorical(logits=logits[:, ~mask]).entropy()
    torch.testing.assert_close(entropy, want)
    entropy.sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


TIMES = torch.tensor([[3.0, 0.0, 1.0, 2.0]])
HIDDEN = torch.tensor([[False, True, False, False]])
BIAS = torch.zeros(1, 4).masked_fill(HIDDEN, -INF)


def report_of_loss(loss: Callable[[Tensor], Tensor]) -> fxguard.types.Report | None:
    """The first report on a loss that a script computes of what a model returned."""
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model := nn.Linear(4, 4), on_detect=found.append):
        loss(model(torch.ones(1, 4))).sum().backward()
    return found[0] if found else None


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, t: (t.log() - p) - t.log(),
        lambda p, t: (t > 1) * (t.log() - p),
        lambda p, t: (t > 1) * (t.log() - p) - (t.log() - p).exp(),
        lambda p, t: (t > 1) * (far := t.log() - p) - far.exp(),
        lambda p, t: (p.exp() * (t.log() - p)) * (t > 1).float(),
    ],
)
def test_a_logarithm_among_the_targets_is_no_mask(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """A time of 0: the first that read its logarithm is named, and no mask is spoken of."""
    assert report_of_loss(lambda p: loss(p, TIMES.clamp(min=0.5))) is None
    report = report_of_loss(lambda p: loss(p, TIMES))
    assert report is not None
    assert report.origins[0].cause == "data"
    assert "read at test_masks_by_use.py" in report.verdict[1]
    assert "log(0)" in report.fix
    texts = [fix.text for each in report.origins for fix in each.fixes]
    assert not any("mask" in text.replace("test_masks_by_use.py", "") for text in texts)
    assert not any("of a mask" in each.cause_in_words for each in report.origins)


def test_a_mask_of_what_a_model_returned_stays_one() -> None:
    """Its scores go to a softmax, in a loss as well; what fails of it says so."""
    assert report_of_loss(lambda p: (p + BIAS).softmax(-1)) is None
    report = report_of_loss(lambda p: (p + BIAS).softmax(-1) * (p + BIAS).log_softmax(-1))
    assert report is not None
    assert report.origins[0].cause_in_words == "0 * inf of a mask"
    assert "log_p.masked_fill(mask, 0)" in report.fix

"""Bad gradients: the operation whose backward made the first one, why, and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxguard
from fxguard.report.text import cause_text
from fxguard.testing.watch import as_module
from support.needs import CLAMP_STOPS_AT_BOUNDS


def reports_of(model: Any, *args: Any, loss: Callable[[Any], Tensor] | None = None) -> list[Any]:
    """What is reported of one forward and its backward."""
    found: list[fxguard.types.Report] = []
    module = fxguard.instrument(as_module(model), on_detect=found.append)
    result = module(*args)
    (result.sum() if loss is None else loss(result)).backward()
    fxguard.remove(module)
    return found


@dataclass(frozen=True)
class Story:
    """A forward that is finite, and of which the backward is not."""

    forward: Callable[..., Tensor]
    args: tuple[Any, ...]
    message: str
    cause: str
    fix: str  # a part of the first one


def leaf(*numbers: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, requires_grad=True)


def log2_in_where(x: Tensor) -> Tensor:
    return torch.where(x > 2, torch.log2(x), 2 * x)


def length(x: Tensor) -> Tensor:
    return (x**2).sum(-1).sqrt()


def angle(a: Tensor, b: Tensor) -> Tensor:
    return torch.acos(F.cosine_similarity(a, b, dim=0).clamp(-1, 1))


def root(x: Tensor) -> Tensor:
    return x**0.5


def clipped_after(x: Tensor) -> Tensor:
    return (x.exp() - 1 - x).clamp(-10, 10)


def log_of_rest(x: Tensor) -> Tensor:
    rest = torch.log1p(-torch.sigmoid(x).clamp(max=1 - 1e-6))
    return rest.where(x < 10, torch.zeros_like(rest))


def scaled_loss(x: Tensor) -> Tensor:
    return (x * 0.5).float().sum() * 65536.0


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    return ((x @ x.mT + mask).softmax(-1) @ x.detach())[1:]


def root_of_lost_eps(x: Tensor) -> Tensor:
    return torch.sqrt(x.square() + 1e-8)


def norm_of_lost_eps(x: Tensor) -> Tensor:
    return F.layer_norm(x, (4,), eps=1e-12)


def product_in_half(x: Tensor) -> Tensor:
    return ((x * 200) * 200).float() * 2.0


NEVER = torch.tensor([[-math.inf, -math.inf], [0.0, -math.inf]])
HALF = torch.float16
BRAIN = torch.bfloat16

STORIES = {
    "where": Story(log2_in_where, (leaf(0.0, 2.0, 3.0),), "backward of log2 made NaN",
                   "singular gradient", "by where, too"),
    "sqrt": Story(length, (torch.zeros(2, 3, requires_grad=True),), "backward of sqrt made inf",
                  "singular gradient", "sqrt((x ** 2).sum(-1) + 1e-12)"),
    "acos": Story(angle, (leaf(3.0, 4.0), torch.tensor([3.0, 4.0])), "backward of acos made -inf",
                  "singular gradient", "atan2"),
    "pow": Story(root, (leaf(0.0, 1.0),), "backward of pow made inf", "singular gradient",
                 "(x + 1e-12) ** 0.5"),
    "exp": Story(clipped_after, (leaf(100.0, 0.1),), "backward of exp made NaN", "overflow",
                 "exp(x.clamp(max=66))"),
    "log1p": Story(log_of_rest, (leaf(12.0, 1.0, dtype=BRAIN),), "backward of log1p made NaN",
                   "rounding", "logsigmoid(-x)"),
    "scale": Story(scaled_loss, (leaf(1.0, 2.0, dtype=HALF),), "backward of float made inf",
                   "loss scale", "2**15 at most"),
    "mask": Story(masked_softmax, (torch.eye(2, requires_grad=True), NEVER),
                  "backward of softmax made NaN", "masked row", "drop the row"),
    "eps": Story(root_of_lost_eps, (leaf(0.0, 1.0, dtype=HALF),), "backward of sqrt made inf",
                 "underflow", "an eps that float16 holds"),
    "norm": Story(norm_of_lost_eps, (leaf(1.0, 1.0, 1.0, 1.0, dtype=HALF),),
                  "backward of layer_norm made NaN", "underflow", "an eps that float16 holds"),
    "half": Story(product_in_half, (leaf(1.0, 1.5, dtype=HALF),), "backward of mul made inf",
                  "overflow", "float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_the_first_bad_gradient_is_explained(name: str) -> None:
    """Operation, cause and fix; and the first five lines say them."""
    if name in ("acos", "log1p") and CLAMP_STOPS_AT_BOUNDS:
        pytest.skip("no gradient goes through clamp at its bound")
    story = STORIES[name]
    (report,) = reports_of(story.forward, *story.args)
    first = report.origins[0]
    assert story.message in report.message
    assert (report.phase, first.phase, first.cause) == ("backward", "backward", story.cause)
    assert story.fix in report.fix.splitlines()[0]
    lines = "\n".join(str(report).splitlines()[:5])
    for words in (story.message, cause_text(first), first.fixes[0].text, first.operands):
        assert words in lines


def test_the_backward_of_an_operation_in_place_has_its_cause() -> None:
    """It writes its operand, which the second backward must be able to do: as out of place."""

    def apart(x: Tensor) -> Tensor:
        return (x * 1).mul(300.0).mul(300.0)

    def in_place(x: Tensor) -> Tensor:
        h = x * 1
        h.mul_(300.0)
        h.mul_(300.0)
        return h

    (one,), (other,) = (reports_of(f, leaf(1e-3, dtype=torch.float16)) for f in (apart, in_place))
    assert (one.origins[0].what, other.origins[0].what) == ("mul", "mul_")
    assert other.origins[0].cause == one.origins[0].cause == "loss scale"
    assert other.origins[0].needed == one.origins[0].needed == 90000
    assert other.why == one.why
    assert other.why


def test_the_numbers_at_the_bad_element_are_said() -> None:
    """What the operation had read there, and both gradients."""
    (report,) = reports_of(length, torch.zeros(2, 3, requires_grad=True))
    wanted = (
        "at [0]: sqrt(0.0); grad of output 1.0, grad of input[0] inf (likewise in all 2 elements)"
    )
    assert report.origins[0].operands == wanted


def test_what_forward_had_made_bad_is_named() -> None:
    """A backward that read a bad value of forward is not why."""

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return (x.exp() * weight).clamp(max=3)

    first, second = reports_of(forward, leaf(100.0, 1.0), leaf(1.0, 1.0))[0].origins
    assert first.message.startswith("backward of mul made NaN")
    assert "it read inf that exp (test_backward.py:" in first.operands
    assert "exp(100.0) is 2.68812e+43 in float64" in first.operands
    assert (first.cause, second.what) == ("overflow", "exp")
    assert "exp(x.clamp(max=66))" in first.fixes[0].text


@pytest.mark.parametrize("seed", range(6))
def test_a_dropout_is_judged_by_what_it_dropped(seed: int) -> None:
    """Another throw of the dice would call every second one a rounding."""
    x = torch.ones(8, dtype=torch.float16, requires_grad=True)
    torch.manual_seed(seed)
    (report,) = reports_of(lambda x: F.dropout(x, 0.5), x, loss=lambda out: (out * 4e4).sum())
    (origin,) = report.origins
    assert (origin.message.partition(" (")[0], origin.cause) == (
        "backward of dropout made inf",
        "overflow",
    )
    assert origin.needed == 8e4


def test_the_frames_are_those_of_the_backward() -> None:
    """From the forward's into the backward's, in its order, up to the one to blame."""
    (report,) = reports_of(length, torch.zeros(2, 3, requires_grad=True))
    titles = [frame.title for frame in report.frames]
    assert titles[-1] == "sqrt (backward)"
    last = report.frames[-1]
    assert [row.label for row in last.rows] == ["grad of output", "grad of input[0]"]
    assert (last.rows[0].abs_max, last.rows[1].abs_max) == (1.0, math.inf)
    assert last.made_bad
    assert "forward frames:" not in str(report)


def test_the_page_says_what_is_backward(tmp_path: Path) -> None:
    """The same operation of forward stands beside it."""
    (report,) = reports_of(length, torch.zeros(2, 3, requires_grad=True))
    report.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '"sqrt"' in page
    assert '"sqrt (backward)"' in page
    assert "backward of sqrt made inf" in page


def test_a_weight_has_its_name() -> None:
    """A frame of the backward of a linear layer shows the gradient of each of its weights."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.head = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x).mul(0).square().sum(-1, keepdim=True).sqrt() + x)  # type: ignore[no-any-return]

    (report,) = reports_of(Net(), torch.ones(1, 2))
    frame = next(frame for frame in report.frames if frame.title == "head linear (backward)")
    assert [row.label for row in frame.rows] == [
        *("grad of output", "grad of input[0]", "grad of weight", "grad of bias")
    ]
    text = str(report)
    assert "it spread to the gradients of inner." in text


def test_a_sum_of_gradients_that_overflows_is_said_to_be_one() -> None:
    """No operation made it: each of two handed back a number that fits."""

    def forward(x: Tensor) -> Tensor:
        left, right = (x * 1).float() * 40000.0, (x * 2).float() * 20000.0
        return left + right

    x = leaf(1.0, dtype=HALF)
    (report,) = reports_of(lambda x: forward(x * 1.0), x)
    first = report.origins[0]
    assert (first.cause, first.is_operation) == ("overflow", False)
    assert "their sum is not finite" in str(report)


def test_a_gradient_that_came_in_bad_is_the_losss() -> None:
    """The model is not to blame for it."""
    (report,) = reports_of(
        nn.Linear(2, 2), torch.ones(1, 2), loss=lambda y: (y * 0).square().sum().sqrt()
    )
    assert report.phase == "loss"
    assert report.message == "batch 0: gradient of what the model returned came in as NaN"


HEALTHY = {
    "norm at zero": lambda x: x.norm(dim=-1),
    "std of a constant": lambda x: x.std(-1),
    "atan2 of zeros": lambda x: torch.atan2(x, x),
    "masked row that masked_fill zeroes": lambda x: (
        (x.masked_fill(torch.ones_like(x) > 0, -math.inf))
        .softmax(-1)
        .masked_fill(torch.ones_like(x) > 0, 0)
        + x
    ),
    "attention with a masked row": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], attn_mask=torch.zeros(2, 2, dtype=torch.bool)
    ),
    "where before the log as well": lambda x: torch.where(
        x > 0, torch.where(x > 0, x, torch.ones_like(x)).log(), x
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_gradients_are_not_reported(name: str) -> None:
    """What is bad inside one operation's backward, or is masked before a leaf, does no harm."""
    x = torch.zeros(2, 3, requires_grad=True)
    assert reports_of(HEALTHY[name], x) == []
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_weights_that_a_step_has_made_bad_are_not_uninitialised() -> None:
    """Every element is bad, and it was not the first batch: an update did that."""
    model = nn.Linear(2, 2)
    found: list[fxguard.types.Report] = []
    fxguard.instrument(model, on_detect=found.append)
    model(torch.ones(1, 2))
    with torch.no_grad():
        model.weight.fill_(math.nan)
    model(torch.ones(1, 2))
    assert found[0].fix.startswith("look at what writes weights between these batches")
    fresh = nn.Linear(2, 2)
    with torch.no_grad():
        fresh.weight.fill_(math.nan)
    (report,) = reports_of(fresh, torch.ones(1, 2))
    assert report.fix.startswith("initialise")


@torch.library.custom_op("fxguard_tests::only_float32", mutates_args=())
def only_float32(x: Tensor) -> Tensor:
    assert x.dtype == torch.float32
    return x.clone()


@only_float32.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


only_float32.register_autograd(lambda ctx, gradient: gradient * math.nan)


def test_a_gradient_without_a_float64_form_has_no_cause() -> None:
    """Whether its derivative is singular is not known."""
    (report,) = reports_of(lambda x: only_float32(x * 1.0), leaf(1.0, 2.0))
    first = report.origins[0]
    assert (first.what, first.cause, first.problem) == ("only_float32", "unknown", "nan")

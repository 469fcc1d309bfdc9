"""Infinities that somebody intended: which operations keep them, and which make an error of them.

Each opposite is beside its clean twin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxguard

INF = math.inf
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


class Model(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def origins_of(function: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
    """Operation and problem of what is reported; the same with a model that saw healthy batches."""
    reports: list[fxguard.types.Report] = []
    module = function if isinstance(function, nn.Module) else Model(function)
    fxguard.instrument(module, on_detect=reports.append)(*args)
    return [(origin.what, origin.problem) for report in reports for origin in report.origins]


def masked(x: Tensor) -> Tensor:
    """Scores, of which the last of each row is masked."""
    return x.masked_fill(torch.arange(x.shape[-1]) == x.shape[-1] - 1, -INF)


def router(x: Tensor) -> Tensor:
    """A mixture of experts, of which the last is switched off."""
    weights, chosen = torch.topk(masked(x), 2)
    return weights.softmax(-1) * chosen


def buckets(x: Tensor) -> Tensor:
    """T5's relative position: the logarithm of 0 is not taken."""
    distance = x - 1
    return torch.where(distance < 2, distance, 2 + torch.log(distance / 2))


def nearest(x: Tensor) -> Tensor:
    """The nearest neighbour of each point, which is not the point itself."""
    return torch.cdist(x, x).fill_diagonal_(INF).min(-1).values


def part_in_place(x: Tensor) -> Tensor:
    """A part of the scores overflows, in their memory."""
    scores = masked(x)
    scores[:, 1:].mul_(1e39)
    return scores


HEALTHY: dict[str, Callable[[Tensor], Any]] = {
    "returned": masked,
    "temperature": lambda x: masked(x) / 0.7,
    "log_softmax": lambda x: torch.log_softmax(masked(x), -1),
    "length penalty": lambda x: masked(x) / (x[:, :1] + 1) ** 0.6,
    "logsumexp of a masked row": lambda x: torch.full_like(x, -INF).logsumexp(-1),
    "logaddexp": lambda x: torch.logaddexp(masked(x), masked(x)),
    "router": router,
    "diagonal under min": nearest,
    "log(0) under where": buckets,
    "sum with finite numbers": lambda x: masked(x) + x - 2 * x,
    "negative": lambda x: -masked(x),
    "clamped": lambda x: masked(x).clamp(max=2.0),
    "largest of two": lambda x: torch.maximum(masked(x), torch.full_like(x, -INF)),
    "joined": lambda x: torch.cat([masked(x), x], -1).sort(-1).values,
    "narrower": lambda x: masked(x).half(),
    "times and over": lambda x: masked(x * 1e30) / 1e20 * 1e20,
    "number over": lambda x: 2.0 / masked(x),
    "over integers": lambda x: masked(x) / x.long(),
    "square": lambda x: masked(x * 1e10) ** 2,
    "bound too large, elements not": lambda x: masked(x * 1e30) * torch.tensor([1.0, 1.0, 1e10]),
    "baddbmm": lambda x: torch.baddbmm(masked(x)[None], x[None, :, :2], x[None, :2]),
}

BROKEN: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sum": (lambda x: masked(x).sum(-1), "sum"),
    "mean of a row": (lambda x: masked(x).mean(-1), "mean"),
    "cumsum": (lambda x: masked(x).cumsum(-1), "cumsum"),
    "linear": (lambda x: functional.linear(masked(x), torch.ones(2, 3)), "linear"),
    "matmul": (lambda x: masked(x) @ torch.ones(3, 2), "matmul"),
    "conv1d": (lambda x: functional.conv1d(masked(x)[:, None], torch.ones(1, 1, 2)), "conv1d"),
    "baddbmm": (lambda x: torch.baddbmm(x[None], masked(x)[None, :, 1:], x[None, :2]), "baddbmm"),
    "masked target": (
        lambda x: functional.cross_entropy(masked(x), torch.tensor([2, 0])),
        "cross_entropy",
    ),
    "times a large number": (lambda x: masked(x) * 1e39, "mul"),
    "over a small number": (lambda x: masked(x) / 1e-39, "div"),
    "over a zero": (lambda x: masked(x) / torch.tensor([1.0, 0.0, 1.0]), "div"),
    "number over a zero": (lambda x: -2.0 / masked(x - 1), "div"),
    "plus a large number": (lambda x: (masked(x) - 3e38) - 3e38 * x.sign(), "sub"),
    "exponential": (lambda x: (-masked(x * 30)).exp() + (masked(x * 30)).exp(), "exp"),
    "part in place": (part_in_place, "mul_"),
    "narrower": (lambda x: masked(x * 1e5).half(), "half"),
    "after many": (lambda x: ((masked(x).abs() + 1e20).log() * 1e20).neg() * 1e20, "mul"),
    "mse_loss": (lambda x: functional.mse_loss(masked(x), x), "mse_loss"),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_an_infinity_that_is_kept_is_healthy(name: str) -> None:
    """Movement, comparison, softmax and its family, finite factors and addends keep it intended."""
    assert origins_of(HEALTHY[name], X) == []


@pytest.mark.parametrize("name", BROKEN)
def test_an_infinity_that_is_mixed_is_found(name: str) -> None:
    """What mixes it with other elements made an infinity that nobody intended."""
    function, operation = BROKEN[name]
    assert origins_of(function, X)[0][0] == operation


def test_minus_infinity_that_comes_into_a_linear_is_found() -> None:
    """An input may be a mask, but not where weights are multiplied with it and summed: bad data."""
    linear = nn.Linear(3, 2)
    with torch.no_grad():
        linear.weight.fill_(1.0)
    assert origins_of(linear, masked(X)) == [("argument `input` of Linear.forward", "inf")]


# What bounds do for later batches.


def reports_of(model: nn.Module, *batches: Any) -> list[int]:
    """Numbers of the batches that were reported."""
    reports: list[fxguard.types.Report] = []
    fxguard.instrument(model, on_detect=reports.append)
    for batch in batches:
        model(*batch)
    return [report.batch_number for report in reports]


def test_a_later_batch_whose_bounds_do_not_hold_is_judged_again() -> None:
    """The pattern is the one of healthy batches: finite beside infinities. The numbers are not."""
    scaled = Model(lambda x, factor: masked(x) * factor)
    fine, large = torch.tensor([1.0]), torch.tensor([1e30])
    assert reports_of(scaled, *[(X, fine)] * 3, (X, large), (X * 1e9, large), (X, fine)) == [4]


def test_a_later_mask_with_larger_elements_is_judged_again() -> None:
    """Nobody measures the finite elements of a mask that comes in with infinities."""
    added = Model(lambda x, mask: (x + mask) * 1e30)
    mask = torch.tensor([0.0, 0.0, -INF])
    assert reports_of(added, (X, mask), (X, mask + 1), (X, mask + 1e9), (X, mask)) == [2]


def test_healthy_batches_ask_for_no_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """While bounds hold, no element is looked at, and one judgment serves all batches."""
    asked: list[Any] = []
    monkeypatch.setattr("fxguard.verdict.judge.turned_infinite", lambda *args: asked.append(args))
    model = Model(lambda x, mask: ((x + mask) / 0.7).log_softmax(-1) - x)
    mask = torch.tensor([0.0, 0.0, -INF])
    assert reports_of(model, *[(X * scale, mask) for scale in (1.0, 100.0, 0.01)]) == []
    assert asked == []


def test_where_elements_cannot_be_seen_an_infinity_stays_intended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second run that fails accuses nobody."""
    monkeypatch.setattr("fxguard.verdict.judge.turned_infinite", lambda *args: {})
    assert origins_of(lambda x: masked(x) * 1e39, X) == []


# Masks of a dtype's largest magnitude.

LOWEST = torch.finfo(torch.float16).min


def limit_masked(scores: Tensor, mask: Tensor) -> Tensor:
    return (scores + mask).softmax(-1)


def limits(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float16)


def test_a_row_of_finite_limits_that_overflows_is_blamed_on_the_addition() -> None:
    """Scores and mask are finite: -inf came from their sum, and the softmax only followed."""
    scores = torch.full((2, 3), -20.0).half()
    mask = limits([0.0, LOWEST, 0.0], [LOWEST] * 3)
    assert origins_of(limit_masked, scores, mask) == [("add", "inf"), ("softmax", "nan")]
    assert origins_of(limit_masked, scores, mask[:1]) == []
    assert origins_of(limit_masked, -scores / 20, mask) == []  # it rounds to the limit


def test_a_row_of_genuine_infinities_is_blamed_on_the_softmax() -> None:
    """Nobody's addition made it."""
    scores = torch.full((2, 3), -20.0).half()
    mask = limits([0.0, -INF, 0.0], [-INF] * 3)
    assert origins_of(limit_masked, scores, mask) == [("softmax", "nan")]


def test_a_cast_of_limits_that_masks_a_row_is_blamed() -> None:
    """The lowest number of float32 is -inf in float16."""
    mask = torch.full((1, 3), torch.finfo(torch.float32).min)
    assert origins_of(lambda x, m: (m.half() + x).softmax(-1), limits([1.0] * 3), mask) == [
        ("half", "inf"),
        ("softmax", "nan"),
    ]


# What an earlier batch wrote.


class Cached(nn.Module):
    """Attends to what it has seen, kept in a buffer."""

    def __init__(self, holds: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("cache", torch.full((4, 3), holds))

    def forward(self, x: Tensor) -> Tensor:
        self.cache[:2] = x
        return self.cache.amax(-1)


class Attended(Cached):
    """Keeps what it attended to: finite numbers, made with a mask."""

    def forward(self, x: Tensor) -> Tensor:
        self.cache[:2] = x.masked_fill(x == x[0, 0], -INF).softmax(-1)
        return self.cache.amax(-1)


class Masking(nn.Module):
    """Keeps its mask in a buffer, and writes it in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mask[2:] = -INF
        return (x + self.mask).softmax(-1)


class Passed(nn.Module):
    """The same with a cache that is an argument."""

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache[:2] = x
        return cache.amax(-1)


def test_a_cache_that_holds_minus_infinity_is_no_mask() -> None:
    """What the model itself writes is an origin where it holds an infinity when it comes in."""
    assert origins_of(Cached(), X) == []
    assert origins_of(Cached(-INF), X) == [("buffer cache", "inf")]
    assert origins_of(Attended(), X) == []
    assert origins_of(Attended(-INF), X) == [("buffer cache", "inf")]
    cache = torch.zeros(4, 3)
    assert origins_of(Passed(), X, cache) == []
    cache[3] = -INF
    ((what, problem),) = origins_of(Passed(), X, cache)
    assert ("input" in what or "argument" in what, problem) == (True, "inf")


def test_a_mask_that_the_model_writes_stays_a_mask() -> None:
    """A buffer into which the model writes -inf as a number is its mask, in each batch."""
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(Masking(), on_detect=reports.append)
    for _ in range(3):
        model(X)
    assert reports == []
    assert model.mask.tolist() == [0.0, 0.0, -INF]


# What leaves the model.


class Inner(nn.Module):
    """A part whose output is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x * 100)


class Outer(nn.Module):
    """Takes the part's output, or what is left of it, and may keep it."""

    def __init__(self, then: Callable[[Tensor], Tensor], keeps: bool = False) -> None:
        super().__init__()
        self.inner = Inner()
        self.then = then
        self.keeps = keeps
        self.register_buffer("kept", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.keeps:
            self.kept.copy_(y)
        return self.then(y)


@pytest.mark.parametrize("then", [torch.sigmoid, torch.tanh])
def test_a_value_that_leaves_a_part_and_not_the_model_is_a_note(then: Any) -> None:
    """A submodule's output does not count by itself."""
    reports: list[fxguard.types.Report] = []
    model = fxguard.instrument(Outer(then), on_detect=reports.append)
    model(X)
    assert reports == []
    assert [note.what for note in fxguard.guard_of(model).notes] == ["exp"]


def test_what_the_model_keeps_in_a_buffer_leaves_it() -> None:
    """The next batch reads it."""
    assert origins_of(Outer(torch.sigmoid, keeps=True), X) == [("exp", "inf")]
    assert origins_of(Outer(lambda y: y.flatten()), X) == [("exp", "inf")]

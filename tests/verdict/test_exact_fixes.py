"""Exact fixes, applied as they are printed: the same function, in value and in gradient.

Both expressions of ``take A instead of B`` are read from the sentence that a report prints. B runs,
guarded, where it fails, and A has to be said. A and B agree in float64 on ordinary numbers; where B
fails, A is finite, and what it is in float64.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents have it
from torch import Tensor, nn

import fxguard
from fxguard.advice.rules import RULES

HALF = torch.float16
DIM = -1

# What the sentences of fixes call by name.
VOCABULARY: dict[str, Any] = {
    **{name: getattr(torch, name) for name in ("exp", "expm1", "log1p", "log2", "log10")},
    **{name: getattr(torch, name) for name in ("sigmoid", "tanh", "atanh", "logaddexp", "cosh")},
    **{name: getattr(torch, name) for name in ("softmax", "log_softmax", "logsumexp", "xlogy")},
    **{name: getattr(F, name) for name in ("kl_div", "logsigmoid", "softplus")},
    "log": lambda x: x.log() if isinstance(x, Tensor) else math.log(x),
    "sum": lambda x, dim: x.sum(dim),
    "mean": lambda x, dim: x.mean(dim),
    **{name: getattr(torch.special, name) for name in ("i0", "i1", "erf", "erfc")},
    "ndtr": torch.special.ndtr,
    "sinh": torch.sinh,
    "special": torch.special,
    "sqrt": math.sqrt,
    "dim": DIM,
}

Function = Callable[..., Tensor]


def written(expression: str, operands: list[str]) -> Function:
    """A function of an expression: what a user would write."""
    code = expression.replace("²", "**2")
    scope: dict[str, Any] = dict(VOCABULARY)
    exec(f"def function({', '.join(operands)}): return {code}", scope)
    function: Function = scope["function"]
    return function


@dataclass(frozen=True)
class Exact:
    """A sentence, and operands at which the expression that it replaces fails.

    ``mended`` and ``broken`` are given where a sentence describes them, and read from it otherwise.
    """

    says: str
    at: dict[str, Tensor]  # in the dtype in which it fails
    given: dict[str, Tensor] = field(default_factory=dict)  # operands that need no gradient
    broken: Function | None = None
    mended: Function | None = None
    near: dict[str, Tensor] | None = None  # ordinary numbers, in float64; None for some
    cancels: bool = False  # whether what it replaces is wrong there in float64, too
    eps: float = 64.0  # how many eps what is said may be off

    @property
    def both(self) -> tuple[Function, Function]:
        """What fails, and what is said instead."""
        if self.broken is not None and self.mended is not None:
            return self.broken, self.mended
        text = self.says.removesuffix(" of n numbers")
        found = re.fullmatch(r"take (.*) instead of (.*)|keep (\w+) instead of taking (.*)", text)
        assert found is not None, self.says
        mended, broken = (found[1], found[2]) if found[1] else (found[3], found[4])
        names = [*self.at, *self.given]
        scope = names + (["n=4"] if " log(n)" in mended else [])
        return (
            self.broken or written(broken, names),
            self.mended or written(mended, scope),
        )

    @property
    def ordinary(self) -> dict[str, Tensor]:
        """Operands at which nothing fails."""
        draw = torch.Generator().manual_seed(0)
        wide = {
            name: torch.rand(x.shape, generator=draw, dtype=torch.float64) * 0.5 + 0.25
            for name, x in self.at.items()
        }
        return self.near or wide


X = torch.tensor([[900.0, -900.0, 3.0, 0.0], [0.5, -400.0, 200.0, 1.0]])
P = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.25, 0.5, 0.0, 0.25]])
LARGE = torch.tensor([[120.0, 95.0, 3.0], [0.5, 40.0, 1.0]])
FAR = torch.tensor([[-40.0, -1.0, 3.0], [-20.0, 0.5, 1.0]])
LOGS = {"log": "", "log2": " / log(2)", "log10": " / log(10)"}


BASES = {"log": 1.0, "log2": math.log(2), "log10": math.log(10)}


def weighted(log: Function) -> Function:
    """The sum of p * log(p), for a softmax."""
    return lambda x: (x.softmax(DIM) * log(x)).sum(DIM)


MASKED = torch.tensor([[True, False, False, False], [False, False, True, True]])


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(MASKED, -math.inf)


def masked_entropy(x: Tensor) -> Tensor:
    p = masked(x).softmax(DIM)
    return (p * p.log()).sum(DIM)


def masked_entropy_mended(x: Tensor) -> Tensor:
    y = masked(x)
    return (y.softmax(DIM) * y.log_softmax(DIM).masked_fill(MASKED, 0)).sum(DIM)


def log_entropy(x: Tensor) -> Tensor:
    log_p = masked(x).log_softmax(DIM)
    return (log_p.exp() * log_p).sum(DIM)


def contrasted(x: Tensor, fill: bool) -> Tensor:
    """A logarithm of probabilities by hand, times those that count."""
    scores = masked(x)
    log_p = scores - torch.logsumexp(scores, DIM, keepdim=True)
    if fill:
        log_p = log_p.masked_fill(MASKED, 0)
    return ((~MASKED).to(x.dtype) * log_p).sum(DIM)


def spread(x: Tensor) -> Tensor:
    return (x.pow(2).mean(DIM) - x.mean(DIM).pow(2)).sqrt()


def moved(x: Tensor) -> Tensor:
    return ((x - x.mean(DIM, keepdim=True)) ** 2).mean(DIM).sqrt()


def through_norm(x: Tensor, factor: float) -> Tensor:
    return F.layer_norm(x * factor + x * 2 * factor, (4,), eps=0.0)


def running(k: Tensor, v: Tensor, shift: bool) -> Tensor:
    """A weighted mean, summed up from left to right."""
    largest = k.amax(DIM, keepdim=True) if shift else 0.0
    above = below = torch.zeros_like(k[..., 0])
    for i in range(k.shape[DIM]):
        e = (k - largest)[..., i].exp()
        above, below = above + e * v[..., i], below + e
    return above / below


def times_inf(x: Tensor, fill: bool) -> Tensor:
    if fill:
        return masked(x).softmax(DIM)
    return (x + MASKED.to(x.dtype) * -math.inf).softmax(DIM)


def two_masks(x: Tensor, join: bool) -> Tensor:
    low = torch.zeros_like(x, requires_grad=False).masked_fill(MASKED, -math.inf)
    high = torch.zeros_like(x, requires_grad=False).masked_fill(MASKED, math.inf)
    if join:
        return masked(x).softmax(DIM)
    return (x + (low + high)).softmax(DIM)


def chosen(x: Tensor, before: bool) -> Tensor:
    argument = torch.where(x > 0, x, 1.0) if before else x
    return torch.where(x > 0, argument.sqrt(), 0.0)


def entropy(x: Tensor, *, before: bool) -> Tensor:
    """Of what is legal, by a ``where`` before or after the product alone."""
    legal = x > -300
    logp = x.masked_fill(~legal, -torch.inf).log_softmax(DIM)
    if before:
        return (logp.exp() * torch.where(legal, logp, 0)).sum(DIM)
    plogp = logp.exp() * logp
    return torch.where(legal, plogp, torch.zeros_like(plogp)).sum(DIM)


CASES = [
    *(
        case
        for log, per in LOGS.items()
        for case in (
            Exact(f"take log_softmax(x, dim){per} instead of {log}(softmax(x, dim))", {"x": X}),
            Exact(f"take logsigmoid(x){per} instead of {log}(sigmoid(x))", {"x": X}),
            Exact(
                f"take logsumexp(x, dim){per} instead of {log}(sum(exp(x), dim))",
                {"x": X - 1200},
            ),
            Exact(
                f"take (logsumexp(x, dim) - log(n)){per} instead of {log}(mean(exp(x), dim)) of n "
                "numbers",
                {"x": X - 1200},
            ),
            Exact(
                f"take logaddexp(a, b){per} instead of {log}(exp(a) + exp(b))",
                {"a": X - 1200, "b": 2 * X - 2400},
            ),
            Exact(
                f"take (a - log(b)){per} instead of {log}(exp(a) / b)",
                {"a": X - 1200, "b": X.abs() + 1},
            ),
            Exact(
                f"take (a + log(b)){per} instead of {log}(exp(a) * b)",
                {"a": X - 1200, "b": X.abs() + 1},
            ),
            Exact(
                f"take log_softmax(x, dim){per} instead of {log}(exp(x) / sum(exp(x), dim))",
                {"x": torch.tensor([0.0, -60.0, -120.0, 1.0])},
            ),
            Exact(
                f"take (a - logsumexp(b, dim)){per} instead of {log}(exp(a) / sum(exp(b), dim))",
                {"a": torch.tensor(-120.0), "b": torch.tensor([0.0, -60.0, 3.0, 1.0])},
            ),
            Exact(
                f"take logsumexp(log_softmax(w, dim) + x, dim){per} instead of "
                f"{log}(sum(softmax(w, dim) * exp(x), dim))",
                {"w": X / 900, "x": X - 1200},
            ),
        )
    ),
    Exact("take log_softmax(x, dim) instead of log(softmax(x, dim))", {"x": X},
          broken=weighted(lambda x: x.softmax(DIM).log()),
          mended=weighted(lambda x: x.log_softmax(DIM))),
    Exact("take log_softmax(masked(x), dim) instead of log(softmax(masked(x), dim)), and "
          "masked_fill(mask, 0) it before the product: 0 * -inf is NaN", {"x": X},
          broken=masked_entropy, mended=masked_entropy_mended),
    Exact("take log_softmax(a, dim) - log_softmax(b, dim) instead of the logarithm of their ratio",
          {"a": X, "b": 2 * X},
          broken=lambda a, b: (a.softmax(DIM) * (a.softmax(DIM) / b.softmax(DIM)).log()).sum(DIM),
          mended=lambda a, b: (
              a.softmax(DIM) * (a.log_softmax(DIM) - b.log_softmax(DIM))).sum(DIM)),
    Exact('take kl_div(log_softmax(x, dim), p, reduction="none") instead of '
          "p * log(p / softmax(x, dim))", {"x": X}, {"p": P}),
    Exact("take log(p) - log_softmax(x, dim) instead of log(p / softmax(x, dim))",
          {"x": X}, {"p": P + 1}),
    Exact("take logsigmoid(-x) instead of log(1 - sigmoid(x))", {"x": X}),
    Exact("take logsigmoid(-x) instead of log(1 - sigmoid(x))", {"x": X},
          broken=lambda x: (-x.sigmoid()).log1p(), mended=lambda x: F.logsigmoid(-x)),
    Exact("take log(-expm1(x)) instead of log(1 - exp(x))", {"x": torch.tensor([-1e-9, -1e-3])},
          near={"x": torch.tensor([-0.5, -2.0]).double()}),
    Exact("take 2 * (log(2) - x - softplus(-2 * x)) instead of log(1 - tanh(x)²)", {"x": X}),
    Exact("keep x instead of taking atanh(tanh(x))", {"x": X}),
    *(Exact(f"take xlogy(p, q){per} instead of p * {log}(q): it is 0 where p is",
            {"x": X}, {"p": P},
            broken=lambda x, p, log=log: p * getattr(p, log)() + x,
            mended=lambda x, p, log=log: torch.xlogy(p, p) / BASES[log] + x)
      for log, per in LOGS.items()),
    Exact("take log1p(x) instead of log(1 + x)", {"x": torch.tensor([1e-9, -1e-9])},
          broken=lambda x: 1e-9 / (1 + x).log(), mended=lambda x: 1e-9 / x.log1p(), cancels=True),
    Exact("take expm1(x) instead of exp(x) - 1", {"x": torch.tensor([1e-9, -1e-9])},
          broken=lambda x: 1e-9 / (x.exp() - 1), mended=lambda x: 1e-9 / x.expm1(), cancels=True),
    Exact("take -expm1(x) instead of 1 - exp(x)", {"x": torch.tensor([1e-9, -1e-9])},
          broken=lambda x: 1e-9 / (1 - x.exp()), mended=lambda x: 1e-9 / -x.expm1(), cancels=True),
    Exact("take ((x - x.mean(dim, keepdim=True)) ** 2).mean(dim) instead of E[x²] - E[x]², which "
          "cancels", {"x": 1000 + torch.tensor([[0.01, 0.02, 0.07, 0.05]])},
          broken=spread, mended=moved, cancels=True, eps=1e4),
    # Overflows.
    Exact("take softplus(x) instead of log(1 + exp(x))", {"x": X}),
    Exact("take sigmoid(x) instead of exp(x) / (1 + exp(x))", {"x": X},
          broken=lambda x: (lambda e: e / (1 + e))(x.exp()), mended=torch.sigmoid),
    Exact("take a * sigmoid(x) instead of a * exp(x) / (1 + exp(x))", {"a": X / 100, "x": X},
          broken=lambda a, x: (lambda e: a * e / (1 + e))(x.exp()),
          mended=lambda a, x: a * torch.sigmoid(x)),
    Exact("take tanh(x / 2) instead of (exp(x) - 1) / (exp(x) + 1)", {"x": X}),
    Exact("take a * sigmoid(-x) instead of a / (1 + exp(x))", {"a": X / 100, "x": X}),
    Exact("take a * sigmoid(-x) instead of a / (1 + exp(x))", {"x": X},
          broken=lambda x: 1 / (1 + x.exp()), mended=lambda x: torch.sigmoid(-x)),
    Exact("take exp(0.5 * log_softmax(x, dim)) instead of softmax(x, dim) ** 0.5", {"x": X},
          broken=lambda x: x.softmax(DIM) ** 0.5,
          mended=lambda x: (0.5 * x.log_softmax(DIM)).exp()),
    Exact("take a * exp(-x) instead of a / exp(x)", {"a": X / 100, "x": X.abs()}),
    *(case for log, per in LOGS.items() for case in (
        Exact(f"take logsumexp(x, dim){per} instead of {log}(sum(exp(x), dim))",
              {"x": torch.full((2, 4), 88.5)}),
        Exact(f"take (logsumexp(x, dim) - log(n)){per} instead of {log}(mean(exp(x), dim)) of n "
              "numbers", {"x": torch.full((2, 4), 88.5)}),
        Exact(f"take logaddexp(a, b){per} instead of {log}(exp(a) + exp(b))",
              {"a": torch.full((4,), 88.5), "b": torch.full((4,), 88.0)}),
    )),
    Exact("take logsumexp or log_softmax: a logarithm is taken of these exponentials anyway",
          {"x": X}, broken=lambda x: x.exp().sum(DIM).log(), mended=lambda x: x.logsumexp(DIM)),
    Exact("subtract the row's maximum first, exp(x - x.amax(dim, keepdim=True)): the division "
          "cancels it", {"x": X},
          broken=lambda x: (lambda e: e / e.sum(DIM, keepdim=True))(x.exp()),
          mended=lambda x: (lambda e: e / e.sum(DIM, keepdim=True))(
              (x - x.amax(DIM, keepdim=True)).exp())),
    Exact("scale an operand before the product: (q * 0.125) @ k instead of (q @ k) * 0.125",
          {"q": torch.full((2, 4), 300.0, dtype=HALF), "k": torch.full((4, 3), 300.0, dtype=HALF)},
          broken=lambda q, k: (q @ k) * 0.125,
          mended=lambda q, k: (q * 0.125) @ k),
    Exact("subtract the running maximum from all exponents before their sum",
          {"k": torch.full((4,), 10.6, dtype=HALF), "v": torch.arange(4).to(HALF)},
          broken=lambda k, v: running(k, v, shift=False),
          mended=lambda k, v: running(k, v, shift=True)),
    Exact("rescale what is summed here by a constant: the norm that follows",
          {"x": torch.tensor([[1.0, 2.0, 4.0, 3.0]], dtype=HALF)},
          broken=lambda x: through_norm(x, 16384.0), mended=lambda x: through_norm(x, 1.0)),
    # Masks.
    Exact("take masked_fill(mask, -inf) instead of a product with inf: 0 * inf is NaN", {"x": X},
          broken=lambda x: times_inf(x, fill=False), mended=lambda x: times_inf(x, fill=True)),
    Exact("join masks by where or a boolean or, not by addition: inf - inf is NaN", {"x": X},
          broken=lambda x: two_masks(x, join=False), mended=lambda x: two_masks(x, join=True)),
    Exact("set masked entries to 0 before this product, "
          'log_p.masked_fill(log_p == float("-inf"), 0): 0 * -inf is NaN', {"x": X},
          broken=log_entropy, mended=masked_entropy_mended),
    Exact("set masked entries to 0 before this product, "
          'log_p.masked_fill(log_p == float("-inf"), 0): 0 * -inf is NaN', {"x": X},
          broken=lambda x: contrasted(x, fill=False), mended=lambda x: contrasted(x, fill=True)),
    Exact("mask after this product, not before it: 0 * -inf is NaN", {"x": X},
          {"gate": P},
          broken=lambda x, gate: (masked(x * 2) * gate).softmax(DIM),
          mended=lambda x, gate: masked(x * 2 * gate).softmax(DIM)),
    Exact("choose a safe argument of sqrt by where, too", {"x": torch.tensor([-1.0, 0.0, 4.0])},
          broken=lambda x: chosen(x, before=False), mended=lambda x: chosen(x, before=True)),
    Exact("take logaddexp(x, -x) - log(2) instead of log(cosh(x))", {"x": X}),
    Exact("take x + log(-expm1(-2 * x)) - log(2) instead of log(sinh(x))", {"x": LARGE}),
    Exact("take x instead of log(exp(x))", {"x": X}),
    *(Exact(f"take x{per} instead of {log}(exp(x))", {"x": FAR * 10}) for log, per in LOGS.items()),
    *(Exact(f"take log(special.{name}e(x)) + x.abs() instead of log({name}(x))", {"x": LARGE},
            eps=200) for name in ("i0", "i1")),
    Exact("take special.i1e(x) / special.i0e(x) instead of i1(x) / i0(x)", {"x": LARGE}),
    *(Exact(f"take special.log_ndtr(x){per} instead of {log}(ndtr(x))", {"x": FAR}, eps=1e3)
      for log, per in LOGS.items()),
    *(Exact(f"take (special.log_ndtr(-sqrt(2) * x) + log(2)){per} instead of {log}(erfc(x))",
            {"x": -FAR}, eps=1e3) for log, per in LOGS.items()),
    *(Exact(f"take special.log_ndtr({sign}x){per} "
            f"instead of {log}(0.5 * (1 {by} erf(x / sqrt(2))))",
            {"x": FAR if by == "+" else -FAR}, eps=1e3)
      for log, per in LOGS.items() for by, sign in (("+", ""), ("-", "-"))),
    Exact("take torch.where(legal, logp, 0) in place of logp in the product", {"x": X},
          broken=lambda x: entropy(x, before=False), mended=lambda x: entropy(x, before=True)),
]  # fmt: skip

IDS = [f"{number}: {case.says[:60]}" for number, case in enumerate(CASES)]


class Net(nn.Module):
    """A function of its weights, and of inputs that need no gradient."""

    def __init__(self, function: Function, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.function = function
        self.names = list(weights)
        for name, weight in weights.items():
            self.register_parameter(f"{name}_", nn.Parameter(weight.clone()))

    def forward(self, **given: Tensor) -> Tensor:
        made = {name: getattr(self, f"{name}_") * 1 for name in self.names}
        return self.function(**made, **given)


def incoming(output: Tensor) -> Tensor:
    """A gradient that differs from element to element."""
    count = torch.arange(1, output.numel() + 1, dtype=torch.float64)
    return (count / output.numel()).reshape(output.shape).to(output.dtype)


def result_of(function: Function, at: dict[str, Tensor], given: dict[str, Tensor]) -> list[Tensor]:
    """The value, and the gradients of all operands, in float64."""
    model = Net(function, at)
    output = model(**given)
    output.backward(incoming(output))
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [each.detach().double() for each in (output, *gradients)]


def widened(operands: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() for name, x in operands.items()}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_it_is_said_where_the_expression_fails(case: Exact) -> None:
    """First of all fixes, whether the forward fails or the backward."""
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model := Net(case.both[0], case.at), on_detect=found.append):
        output = model(**case.given)
        output.backward(incoming(output))
    assert found
    fixes = [fix for report in found for origin in report.origins for fix in origin.fixes]
    assert fixes[0].kind == "exact", fixes
    assert fixes[0].text.startswith(case.says), fixes


# What is said instead of an expression that is NaN with any numbers has nothing to agree with.
DEFINED = [case for case in CASES if "inf" not in case.says]


@pytest.mark.parametrize("case", DEFINED, ids=lambda case: case.says[:60])
def test_it_is_the_same_function(case: Exact) -> None:
    """In float64, on ordinary numbers, where the expression does not fail."""
    broken, mended = case.both
    given = widened(case.given)
    near = {name: x + 0.1 for name, x in given.items()}
    for one, other in zip(
        result_of(broken, case.ordinary, near), result_of(mended, case.ordinary, near), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_it_is_finite_and_right_where_the_expression_fails(case: Exact) -> None:
    """Value and gradients are those of float64, and those of the expression where it has any."""
    broken, mended = case.both
    low = result_of(mended, case.at, case.given)
    wide = result_of(mended, widened(case.at), widened(case.given))
    meant = result_of(broken, widened(case.at), widened(case.given))
    dtype = next(iter(case.at.values())).dtype
    for one, other, as_meant in zip(low, wide, meant, strict=True):
        assert one.isfinite().all()
        scale = float(other.abs().max())
        close = {"rtol": 0.0, "atol": case.eps * torch.finfo(dtype).eps * scale + 1e-30}
        torch.testing.assert_close(one, other, **close)
        if not case.cancels and as_meant.isfinite().all():
            torch.testing.assert_close(other, as_meant, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.kind == "exact"],
                         ids=lambda rule: rule.text[:50])  # fmt: skip
def test_every_exact_rule_is_run(rule: Any) -> None:
    """A new rule comes with the numbers at which it has been run."""
    pattern = re.sub(r"\\\{.*?\\\}", ".*", re.escape(rule.text))
    parts = [pattern, pattern.split(r":\ the\ branch")[0], pattern.split(".*")[0]]
    assert any(re.fullmatch(part, case.says) for part in parts for case in CASES), rule.text


def beside(x: Tensor) -> Tensor:
    e = x.exp()
    return e / e.sum(DIM, keepdim=True) + e.mean()


def of_earlier_batches(x: Tensor) -> Tensor:
    known = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
    return F.batch_norm(x * 1e5, *known, training=False)


# These look like what an exact rule replaces, and are something else.
OTHERS: list[tuple[str, Function, Tensor]] = [
    ("1 - softmax", lambda x: (1 - x.softmax(DIM)).log(), X),
    ("log(2 - x) of a sigmoid", lambda x: (1 - x.sigmoid() * 1.0001).log(), X),
    ("log1p(softmax - 1)", lambda x: (x.softmax(DIM) - 1).log1p(), X),
    ("a square of a tanh and another", lambda x: (1 - x.tanh() * x.tanh().abs()).log(), X),
    ("means of two things", lambda x: (x.mean(DIM) - x.abs().mean(DIM)).sqrt(), -X),
    ("squares of two things", lambda x: (x.pow(2).mean(DIM) - (3 * x).mean(DIM) ** 2).sqrt(),
     X * 0 + 1),
    ("exponentials read beside their quotient", beside, X),
    ("a product with a mask", lambda x: (x @ x.t()) * torch.ones(2, 2).tril().to(x.dtype),
     X.to(HALF)),
    ("a sum beside the product", lambda x: F.linear(x, x, x[:, 0]) * 0.125, X.to(HALF)),
    ("a norm of earlier batches", of_earlier_batches, X.to(HALF)),
    ("a weighted sum of exponentials",
     lambda x: (x.exp() * x.sigmoid()).sum(DIM).log(), X * 0 + 88.7),
    ("exponentials that nothing divides", lambda x: x.exp().sum(DIM), X),
]  # fmt: skip


@pytest.mark.parametrize(("function", "x"), [other[1:] for other in OTHERS],
                         ids=[name for name, *_ in OTHERS])  # fmt: skip
def test_an_exact_fix_is_said_of_its_own_expression_only(function: Function, x: Tensor) -> None:
    """Another expression of the same operations gets advice at most."""
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model := Net(function, {"x": x}), on_detect=found.append):
        output = model()
        output.backward(incoming(output))
    assert found
    fixes = [fix for report in found for origin in report.origins for fix in origin.fixes]
    assert not any(fix.kind == "exact" for fix in fixes), fixes


class Gates(nn.Module):
    """Probabilities of which some are 0, with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).softmax(DIM).tril()


def test_xlogy_is_no_exact_fix_of_what_needs_a_gradient() -> None:
    """Its gradient is NaN where p is 0: what is said instead has one, with the same value."""
    found: list[fxguard.types.Report] = []
    with fxguard.watch(model := Gates(), on_detect=found.append):
        p = model(torch.eye(2, 4))
        (p * p.log()).sum().backward()
    fix = found[0].origins[0].fixes[0]
    assert fix.kind == "advice"
    assert fix.text.startswith("take the log of p.masked_fill(p == 0, 1)")
    gradients = []
    for entropy in (lambda p: torch.xlogy(p, p), lambda p: p * p.masked_fill(p == 0, 1).log()):
        p = P.clone().requires_grad_()
        value = entropy(p).sum()
        torch.testing.assert_close(value, -torch.special.entr(P).sum())
        value.backward()
        gradients.append(p.grad)
    assert gradients[0].isnan().any()
    assert gradients[1].isfinite().all()

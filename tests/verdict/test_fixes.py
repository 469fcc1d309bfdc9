"""What to do about an origin: each rule at least once, and each has a twin that it leaves alone."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

import pytest

from fxguard.advice.fixes import fixes_for
from fxguard.advice.given import fixes_of_given
from fxguard.advice.rules import RULES
from fxguard.advice.surroundings import Surroundings
from fxguard.formats import FORMATS
from fxguard.graph.evidence import Evidence, Operand
from fxguard.graph.poles import plain
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Step, Value
from fxguard.records import Role, Severity, Source

LIMIT = FORMATS["float16"].max


def around(code: str, dtype: str = "float16") -> Surroundings:
    """A graph written as ``y = exp(x); z = sum(y, 1)!``: the blamed line ends with ``!``.

    Names that no line made are inputs, or weights where they begin with ``w``; inputs that begin
    with ``g`` need a gradient. A model's sigmoid returned an input ``sigmoid_y``. Lines are
    those of ``model.py``, counted from 1. What is given ``-inf`` is masked, and so is what is made
    of it.
    """
    values: list[Value] = []
    numbers: dict[str, int] = {}
    steps: list[Step] = []
    blame = None
    intended: set[int] = set()

    def value(name: str, role: Role) -> int:
        if name not in numbers:
            numbers[name] = len(values)
            needs_gradient = role is Role.INPUT and name[0] == "g"
            values.append(Value(role, name, dtype, needs_gradient=needs_gradient))
        return numbers[name]

    for line, text in enumerate(code.split(";"), 1):
        found = re.fullmatch(r"(\w+) = (\w+)\((.*)\)(!?)", text.strip())
        assert found is not None, text
        name, kind, arguments, is_blamed = found.groups()
        inputs, literals = [], []
        for argument in filter(None, arguments.split(", ")):
            if argument == "-inf":
                literals.append(-math.inf)
            elif re.match(r"-?[\d.]", argument):
                literals.append(float(argument))
            else:
                inputs.append(value(argument, Role.WEIGHT if argument[0] == "w" else Role.INPUT))
        output = value(name, Role.MADE)
        first = arguments.split(", ")[0]
        source = Source("/tmp/model.py", line, text.strip())
        is_masked = -math.inf in literals
        steps.append(
            Step(
                kind,
                "",
                tuple(inputs),
                (output,),
                infinite_literal=is_masked,
                literals=tuple(literals),
                number_first=bool(re.match(r"-?[\d.]", first)),
                source=source,
            )
        )
        if is_masked or (kind != "exp" and not intended.isdisjoint(inputs)):
            intended.add(output)
        if is_blamed:
            blame = Blame(output, len(steps) - 1, Severity.NAN)
    assert blame is not None

    def made_before(index: int) -> Step | None:
        kind, has_kind, _ = values[index].name.partition("_")
        return Step(kind, "", (), ()) if has_kind else None

    return Surroundings(steps, values, blame, intended, made_before=made_before)


@dataclass(frozen=True, slots=True)
class Case:
    """A graph, the cause of what went wrong there, and what is said first."""

    cause: str
    code: str
    fix: str  # how it begins, with its kind
    numbers: tuple[float, ...] = ()  # that the operation read
    dtype: str = "float16"
    literal: float | None = None  # a Python number that it was given
    degeneracy: str = ""

    @property
    def fixes(self) -> list[str]:
        """All that is said, as reports have it."""
        graph = around(self.code, self.dtype)
        operands = tuple(Operand(x, x, dtype=self.dtype) for x in self.numbers)
        if self.literal is not None:
            operands += (Operand(self.literal, self.literal),)
        index = (0,)
        made = math.nan if self.literal is None else math.inf
        evidence = Evidence(
            graph.step.kind, self.dtype, index, made, operands, degeneracy=self.degeneracy
        )
        return [f"{fix.kind}: {fix.text}" for fix in fixes_for(self.cause, evidence, graph)]


CASES = (
    Case("underflow", "p = softmax(x, -1); y = log(p)!", "exact: take log_softmax(x, dim)"),
    Case("zero divisor", "p = softmax(x, -1); q = gather(p, i); y = log(q)!",
         "exact: take log_softmax(x, dim)"),
    Case("underflow", "p = softmax(x, -1); q = add(p, 1e-9); y = log(q)!",
         "exact: take log_softmax(x, dim)"),
    Case("underflow", "p = sigmoid(x); y = log(p)!", "exact: take logsigmoid(x)"),
    Case("underflow", "y = log(sigmoid_p)!", "advice: return logits from the model, without its s"),
    Case("underflow", "g = gather(softmax_p, i); y = log(g)!",
         "advice: return logits from the model, without its softmax"),
    Case("rounding", "p = sigmoid(x); q = sub(1, p); y = log(q)!", "exact: take logsigmoid(-x)"),
    Case("rounding", "p = sigmoid(x); q = neg(p); y = log1p(q)!", "exact: take logsigmoid(-x)"),
    Case("rounding", "p = sigmoid(x); c = clamp(p, 0.999999); q = neg(c); y = log1p(q)!",
         "exact: take logsigmoid(-x)"),
    Case("underflow", "e = exp(x); s = sum(e, 1); y = log(s)!", "exact: take logsumexp(x, dim)"),
    Case("rounding", "e = add(x, 1); l = log(e); y = div(z, l)!", "exact: take log1p(x)"),
    Case("rounding", "e = exp(x); d = sub(e, 1); y = div(z, d)!", "exact: take expm1(x)"),
    Case("rounding", "s = pow(x, 2); m = mean(s); n = mean(x); o = pow(n, 2); v = sub(m, o); "
         "y = sqrt(v)!", "exact: take ((x - x.mean(dim, keepdim=True)) ** 2).mean(dim)"),
    Case("overflow", "e = exp(x)!; s = sum(e, 1); y = log(s)", "exact: take logsumexp"),
    Case("overflow", "e = exp(x); s = sum(e, 1)!; y = log(s)",
         "exact: take logsumexp(x, dim) instead of log(sum(exp(x), dim))"),
    Case("overflow", "e = exp(x); s = mean(e, 1)!; y = log(s)",
         "exact: take (logsumexp(x, dim) - log(n)) instead of log(mean(exp(x), dim))"),
    Case("overflow", "e = exp(a); f = exp(b); s = add(e, f)!; y = log10(s)",
         "exact: take logaddexp(a, b) / log(10) instead of log10(exp(a) + exp(b))"),
    Case("overflow", "e = exp(x); m = mul(e, w); s = sum(m, 1)!; y = log(s)",
         "advice: accumulate in float32"),
    Case("overflow", "e = exp(x)!; d = diag(e); s = sum(e, 1); r = div(d, s); y = log(r)",
         "exact: take logsumexp"),
    Case("overflow", "e = exp(x)!; s = sum(e, 1); r = div(e, s)",
         "exact: subtract the row's maximum first"),
    Case("overflow", "s = matmul(q, k)!; t = mul(s, 0.125)",
         "exact: scale an operand before the product: (q * 0.125) @ k instead of (q @ k) * 0.125"),
    Case("overflow", "s = bmm(q, k)!; v = view(s); t = div(v, 8)",
         "exact: scale an operand before the product: (q / 8) @ k"),
    Case("overflow", "s = matmul(q, k)!; t = mul(s, 8)", "advice: keep this matmul in float32"),
    Case("overflow", "s = matmul(q, k)!; t = div(s, 1)", "advice: keep this matmul in float32"),
    Case("overflow", "s = add(x, m)!; p = softmax(s, -1)", "advice: mask with masked_fill",
         numbers=(-20.0, -LIMIT)),
    Case("overflow", "s = add(x, m)!; p = softmax(s, -1)", "advice: keep this add in float32",
         numbers=(-2e4, -5e4)),
    Case("overflow", "e = exp(x); m = mul(n, 0.99); s = add(m, e)!; y = div(z, s)",
         "exact: subtract the running maximum"),
    Case("overflow", "h = linear(x, w)!; r = add(x, h); f = float(r); s = pow(f, 2); "
         "m = mean(s, -1); a = add(m, 1e-6); i = rsqrt(a); y = mul(r, i)",
         "exact: rescale what is summed here by a constant: the norm that follows (model.py:4)"),
    Case("overflow", "h = mul(x, 16)!; r = add(x, h); y = layer_norm(r, 64)",
         "exact: rescale what is summed here by a constant: the norm that follows (model.py:3)"),
    Case("overflow", "h = linear(x, w)!; r = relu(h)", "advice: keep this linear in float32 or"),
    Case("overflow", "h = to(x)!", "advice: cast to float32 or bfloat16 here"),
    Case("overflow", "s = pow(x, 2)!; m = mean(s, -1); i = rsqrt(m); y = mul(x, i)",
         "advice: square in float32, x.float().pow(2): float16 holds squares of up to 256"),
    Case("overflow", "e = exp(w)!; y = mul(x, e)", "advice: keep the weight in float32"),
    Case("overflow", "h = half(w); n = neg(h); e = exp(n)!; y = mul(x, e)",
         "advice: keep the weight in float32"),
    Case("overflow", "d = sub(a, b); e = exp(d)!; y = mul(x, e)",
         "advice: compute it in float32, exp(x.float()): float16 holds exp up to exp(11)"),
    Case("overflow", "e = exp(x)!", "advice: look at what its argument grew from",
         dtype="float32"),
    Case("overflow", "y = cumsum(x, 1)!", "advice: accumulate in float32: cumsum(..., dtype="),
    Case("overflow", "y = mul(x, z)!", "advice: look at what its operands grew from",
         dtype="float32"),
    Case("overflow", "y = mul(x, z)!", "advice: look at what made its operand infinite",
         numbers=(math.inf, 0.0)),
    Case("underflow", "n = sum(m, 1); c = clamp(n, 1e-9); y = div(h, c)!",
         "advice: take n.clamp(min=1)"),
    Case("zero divisor", "n = sum(m, 1); y = div(h, n)!", "advice: take n.clamp(min=1)"),
    Case("zero divisor", "a = exp(x); n = sum(a, 1); y = div(h, n)!",
         "advice: choose the divisor by where(d == 0, 1, d)"),
    Case("zero divisor", "s = sum(x, 1); n = sqrt(s); y = div(x, n)!",
         "advice: add an eps inside the root, sqrt(s + 1e-4)"),
    Case("zero divisor", "d = scatter_add(z, i, o); y = pow(d, -0.5)!",
         "advice: take n.clamp(min=1): a count may be 0"),
    Case("zero divisor", "o = ones(4); n = sum(o); y = log(n)!", "advice: take log1p(n)"),
    Case("zero divisor", "v = var(x, 1); y = log(v)!", "advice: add an eps to the variance"),
    Case("zero divisor", "s = mul(x, x); m = mean(s, 1); y = rsqrt(m)!",
         "advice: add an eps to the variance, rsqrt(v + 1e-12)", dtype="float32"),
    Case("zero divisor", "s = mul(x, x); m = mean(s, 1); y = rsqrt(m)!",
         "advice: compute rsqrt and what it reads in float32, with an eps"),
    Case("zero divisor", "p = softmax(x, -1); q = sub(1, p); y = log(q)!",
         "advice: take logsumexp over the other classes"),
    Case("overflow", "e = exp(x)!; a = sub(e, 1); b = add(e, 1); y = div(a, b)",
         "exact: take tanh(x / 2)"),
    Case("zero divisor", "d = det(x); y = log(d)!", "advice: take slogdet(x).logabsdet"),
    Case("domain", "h = linear(x, w); y = log(h)!",
         "advice: make its operand positive where it is computed in linear", numbers=(-2.0,)),
    Case("domain", "s = sub(x, z); y = log(s)!",
         "advice: see why its operand is negative in sub", numbers=(-2.0,)),
    Case("domain", "y = log(x)!", "advice: see why its operand is negative",
         numbers=(-2.0,)),
    Case("underflow", "v = var(x, 1); a = add(v, 1e-8); y = rsqrt(a)!",
         "advice: compute the norm in float32, from x.float() on: 1e-08 in add (model.py:2) is 0"),
    Case("underflow", "a = add(x, 1e-8); y = log(a)!",
         "advice: take an eps that float16 holds, 1e-4: 1e-08 in add (model.py:1) is 0 there"),
    Case("underflow", "y = normalize(x, 2, 1)!",
         "advice: take an eps that float16 holds, 1e-4: 1e-12 in normalize is 0 there"),
    Case("overflow", "h = mul(x, 16)!; r = add(x, h); y = layer_norm(r, 64); s = add(r, y)",
         "advice: rescale all that is added to this stream: the norm that follows (model.py:3)"),
    Case("zero divisor", "y = _weight_norm(w, wg, 0)!", "advice: initialise this weight"),
    Case("zero divisor", "y = renorm(x, 2)!", "advice: leave out rows of zeros"),
    Case("zero divisor", "y = poisson_nll_loss(x, t)!",
         "advice: give poisson_nll_loss an eps above 0: it takes the logarithm",
         dtype="float32"),
    Case("domain", "s = pow(m, 2); d = sub(q, s); y = sqrt(d)!", "advice: average (x - mean) ** 2"),
    Case("rounding", "s = pow(m, 2); d = sub(q, s); y = sqrt(d)!", "advice: take (sq - mean ** 2)"),
    Case("domain", "s = mul(m, m); d = sub(q, s); e = add(d, 1e-5); y = rsqrt(e)!",
         "advice: average (x - mean) ** 2"),
    Case("domain", "s = pow(m, 2); r = pow(q, 2); d = sub(r, s); y = sqrt(d)!",
         "advice: bound the argument"),
    Case("domain", "s = pow(m, 2); d = sub(1, s); y = sqrt(d)!", "advice: bound the argument"),
    Case("domain", "s = pow(m, 2); d = sub(1, s); y = sqrt(d)!",
         "advice: see why its operand is -3 in sub (model.py:2): leave such elements out, or",
         numbers=(-3.0,)),
    Case("domain", "s = pow(m, 2); d = sub(1, s); y = sqrt(d)!", "advice: bound the argument",
         numbers=(-1e-5,)),
    Case("domain", "y = acos(x)!",
         "advice: see why its operand is 1.5: leave such elements out, or take acos(",
         numbers=(1.5,)),
    Case("domain", "y = acos(x)!", "advice: bound the argument: acos(x", numbers=(1.0001,)),
    Case("domain", "y = atanh(x)!", "advice: see why its operand is -1.7", numbers=(-1.7,)),
    Case("zero divisor", "y = layer_norm(x, 64, 0)!", "advice: give layer_norm an eps above 0"),
    Case("zero divisor", "y = reciprocal(x)!", "advice: choose the divisor by"),
    Case("zero divisor", "y = rsqrt(x)!", "advice: bound the argument: rsqrt(x + 1e-12)",
         dtype="float32"),
    Case("rounding", "c = cosine_similarity(x, z); y = acos(c)!",
         "advice: bound the argument: acos(x.clamp(-1 + 4e-03, 1"),
    Case("domain", "y = sqrt(x)!", "advice: see why its operand is negative",
         numbers=(-2.0,)),
    Case("underflow", "y = cdist(x, z)!", "advice: compute cdist and what it reads in float32"),
    Case("domain", "y = mul(x, m)!", "exact: take masked_fill(mask, -inf)",
         numbers=(0.0, -math.inf)),
    Case("domain", "m = masked_fill(x, -inf); l = log_softmax(m, -1); p = exp(l); y = mul(p, l)!",
         "exact: set masked entries to 0 before this product", numbers=(0.0, -math.inf)),
    Case("domain", "s = linear(x, w); m = masked_fill(s, -inf); y = mul(m, z)!",
         "exact: mask after this product, not before it", numbers=(-math.inf, 0.0)),
    Case("domain", "y = add(x, m)!", "exact: join masks by where", numbers=(math.inf, -math.inf)),
    Case("domain", "y = matmul(x, m)!", "advice: set masked entries to 0 before the matmul",
         numbers=(0.0, -math.inf)),
    Case("domain", "y = nll_loss(x, t)!", "advice: leave out targets", numbers=(-math.inf,)),
    Case("domain", "l = log(x); y = mul(x, l)!", "advice: look at what made its operand infinite",
         numbers=(0.0, math.inf)),
    Case("zero divisor", "l = log(p)!; y = mul(p, l)", "exact: take xlogy(p, q)"),
    Case("underflow", "a = exp(x); b = exp(y); q = div(a, b)!", "advice: take exp(a - b)",
         numbers=(0.0, 0.0)),
    Case("rounding", "m = pow(a, 2); v = sub(s, m); d = sqrt(v); y = div(x, d)!",
         "advice: average (x - mean) ** 2", numbers=(0.0, 0.0)),
    Case("zero divisor", "l = log(gp)!; y = mul(gp, l)", "advice: take the log of x.masked"),
    Case("zero divisor", "p = clamp(gp, 0, 1); q = sub(1, p); y = log(q)!",
         "advice: return the logit x in place of p = sigmoid(x), which rounded to 1"),
    Case("zero divisor", "q = sub(1, x); y = log(q)!", "advice: bound the argument"),
    Case("overflow", "e = exp(x)!; a = add(e, 1); y = log(a)", "exact: take softplus(x)"),
    Case("overflow", "h = linear(x, w); s = chunk(h); y = exp(s)!", "advice: compute it in"),
    Case("overflow", "e = exp(x)!; y = clamp(e, 0, 3)",
         "advice: bound the argument in place of the result, exp(x.clamp(max=8))"),
    Case("overflow", "e = exp(x)!; y = log1p(e)", "exact: take softplus(x)"),
    Case("overflow", "e = exp(x)!; a = add(e, 1); y = div(e, a)", "exact: take sigmoid(x)"),
    Case("overflow", "y = mul(m, -1000000000)!", "advice: take masked_fill(mask, torch.finfo",
         numbers=(1.0, -1e9)),
    Case("overflow", "h = linear(x, w); y = mul(h, 1e39)!", "advice: take a number that float32 "
         "holds, or compute mul in float64", dtype="float32", literal=1e39),
    Case("overflow", "h = linear(x, w); y = add(h, 100000)!", "advice: take a number that float16 "
         "holds, or compute add in float32", literal=1e5),
    Case("overflow", "s = matmul(q, k)!; t = div(s, scale)",
         "exact: scale an operand before the product: (q / scale) @ k instead of (q @ k) / scale"),
    Case("overflow", "d = sqrt(n); s = matmul(q, k)!; t = div(s, d)",
         "exact: scale an operand before the product: (q / scale) @ k"),
    Case("overflow", "s = matmul(q, k)!; t = mul(s, mask)", "advice: keep this matmul in"),
    Case("domain", "l = log(q); y = mul(p, l)!", "exact: take xlogy(p, q) instead of p * log(q)",
         numbers=(0.0, -math.inf)),
    Case("underflow", "p = softmax(a, -1); q = softmax(b, -1); r = div(p, q)!; y = log(r)",
         "exact: take log_softmax(a, dim) - log_softmax(b, dim)"),
    Case("underflow", "y = div(p, q)!", "advice: work with logarithms", dtype="float32"),
    Case("zero divisor", "y = logdet(x)!", "advice: add eps to the diagonal"),
    Case("overflow", "y = mse_loss(x, t)!", "advice: compute mse_loss in float32"),
    Case("zero divisor", "d = sum(a, 1); y = pow(d, -0.5)!", "advice: take n.clamp(min=1)"),
    Case("underflow", "v = var(x, 1); a = add(v, 1e-12); s = sqrt(a); y = div(x, s)!",
         "advice: compute div and what it reads in float32: 1e-12 in add (model.py:2) is 0 in"),
    Case("underflow", "e = exp(x); d = diag(e); s = sum(e, 1); r = div(d, s); y = log(r)!",
         "exact: take log_softmax(x, dim) instead of log(exp(x) / sum(exp(x), dim))"),
    Case("rounding", "e = exp(x); d = sub(1, e); y = log(d)!", "exact: take log(-expm1(x))"),
    Case("rounding", "a = tanh(x); s = pow(a, 2); d = sub(1, s); e = add(d, 1e-6); y = log(e)!",
         "exact: take 2 * (log(2) - x - softplus(-2 * x))"),
    Case("zero divisor", "a = tanh(x); y = atanh(a)!", "exact: keep x instead of"),
    Case("underflow", "e = exp(x); m = mul(w, e); s = sum(m, 1); y = log(s)!",
         "advice: take logsumexp(log(w) + x, dim) instead of log(sum(w * exp(x), dim))"),
    Case("underflow", "p = softmax(w, -1); e = exp(x); m = mul(p, e); s = sum(m, 1); y = log(s)!",
         "exact: take logsumexp(log_softmax(w, dim) + x, dim)"),
    Case("underflow", "m = masked_fill(x, k, -1e4); s = add(x, w); p = softmax(s, -1); "
         "q = add(p, 1e-9); y = log2(q)!; z = mul(p, y)",
         "exact: take log_softmax(s, dim) / log(2) instead of log2(softmax(s, dim))"),
    Case("underflow", "q = softmax(x, -1); r = div(p, q)!; l = log(r); y = mul(p, l)",
         "exact: take kl_div(log_softmax(x, dim), p"),
    Case("underflow", "q = softmax(x, -1); r = div(w, q)!; l = log(r)",
         "exact: take log(p) - log_softmax(x, dim)"),
    Case("underflow", "e = exp(a); f = exp(b); s = sum(f, 1); r = div(e, s); y = log(r)!",
         "exact: take (a - logsumexp(b, dim)) instead of log(exp(a) / sum(exp(b), dim))"),
    Case("underflow", "e = exp(a); r = div(e, b); y = log10(r)!",
         "exact: take (a - log(b)) / log(10) instead of log10(exp(a) / b)"),
    Case("underflow", "e = exp(a); r = mul(e, b); y = log(r)!", "exact: take (a + log(b))"),
    Case("underflow", "e = exp(x); m = mean(e, 1); y = log(m)!",
         "exact: take (logsumexp(x, dim) - log(n)) instead of log(mean(exp(x), dim))"),
    Case("underflow", "e = exp(a); f = exp(b); s = add(e, f); y = log(s)!",
         "exact: take logaddexp(a, b) instead of log(exp(a) + exp(b))"),
    Case("rounding", "e = exp(x); d = sub(1, e); y = div(z, d)!", "exact: take -expm1(x)"),
    Case("overflow", "e = exp(x)!; a = add(1, e); y = div(z, a)", "exact: take a * sigmoid(-x)"),
    Case("overflow", "e = exp(x)!; y = div(z, e)", "exact: take a * exp(-x) instead"),
    Case("overflow", "e = exp(x)!; d = sub(e, 1); m = mul(w, d); y = div(z, m)",
         "advice: take a * exp(-x) / -expm1(-x) instead of a / (exp(x) - 1)"),
    Case("overflow", "e = expm1(x)!; y = div(z, e)",
         "advice: take a * exp(-x) / -expm1(-x) instead of a / expm1(x)"),
    Case("overflow", "e = exp(x)!; d = sub(e, 1); q = square(d); y = div(e, q)",
         "advice: divide both sides of the quotient (model.py:4) by exp(x)"),
    Case("underflow", "p = prod(x, 1); y = log(p)!", "advice: take log(x).sum(dim)"),
    Case("underflow", "p = prod(x, 2); q = mul(w, p); s = sum(q, 1); y = log(s)!",
         "advice: work with logarithms: logsumexp(log(w) + log(x).sum(dim), dim)"),
    Case("zero divisor", "e = exp(x); d = div(e, z); m = mul(w, d); s = sum(m, 1); y = log(s)!",
         "advice: work with logarithms: logsumexp of the exponents"),
    Case("zero divisor", "e = relu(x); d = div(e, z); m = mul(w, d); s = sum(m, 1); y = log(s)!",
         "advice: bound the argument"),
    Case("underflow", "p = relu(x); l = log(p)!; y = mul(p, l)",
         "advice: take the log of x.masked_fill(x == 0, 1)"),
    # Numbers that became 0.
    Case("zero divisor", "a = matmul(v0, w); a1 = mul(a, e1); b = matmul(a1, w); a2 = mul(b, e2); "
         "n = sum(a2); y = log(n)!", "advice: bound the argument"),
    Case("zero divisor", "e = exp(l); w = prod(e, 1); s = sum(w); y = div(w, s)!",
         "advice: take softmax(l.sum(dim), 0) in place of exp(l).prod(dim) divided by its sum"),
    Case("underflow", "w = prod(e, 1); s = sum(w); y = div(w, s)!",
         "advice: take softmax(log(e).sum(dim), 0) in place of e.prod(dim) divided by its sum"),
    Case("zero divisor", "w = cumprod(e, 1); s = sum(w); y = div(w, s)!",
         "advice: take softmax(log(e).sum(dim), 0)"),
    Case("zero divisor", "e = exp(l); s = sum(e); y = div(e, s)!",
         "advice: take softmax(l, dim) in place of exp(l) divided by its sum"),
    Case("zero divisor", "e = prod(l, 1); j = mul(e, p); s = sum(j, 0); y = div(j, s)!",
         "advice: add logarithms, and take softmax of the sum"),
    Case("zero divisor", "r = relu(l); s = sum(r); y = div(r, s)!",
         "advice: choose the divisor by where(d == 0, 1, d)"),
    Case("zero divisor", "e = exp(l); s = sum(e); y = div(z, s)!",
         "advice: choose the divisor by where(d == 0, 1, d)"),
    Case("zero divisor", "m = minimum(x, g); y = div(m, x)!",
         "advice: take (c / x).clamp(max=1) in place of the smaller"),
    Case("zero divisor", "m = clamp(x, 5); y = div(m, x)!",
         "advice: take (c / x).clamp(max=1) in place of the smaller"),
    Case("zero divisor", "m = minimum(x, g); y = div(m, z)!", "advice: choose the divisor by"),
    Case("zero divisor", "d = sub(x, m); q = pow(d, 2); r = mul(p, q); s = sum(r, 0); "
         "v = div(s, n); y = log(v)!", "advice: add a floor in the line that makes it"),
    Case("zero divisor", "d = sub(x, m); q = mul(d, d); s = matmul(p, q); v = div(s, n); "
         "y = div(a, v)!", "advice: add a floor in the line that makes it"),
    Case("zero divisor", "d = sub(x, m); q = square(d); r = mul(p, q); s = sum(r, 0); "
         "v = div(s, n); c = sqrt(v); y = div(a, c)!",
         "advice: add a floor in the line that makes it"),
    Case("zero divisor", "r = mul(p, q); s = sum(r, 0); v = div(s, n); y = div(a, v)!",
         "advice: choose the divisor by"),
    Case("zero divisor", "r = div(x, 10); p = pow(r, 0.75); w = clamp(p, 1); l = log(x)!; "
         "d = sub(z, l); s = pow(d, 2); y = mul(w, s)",
         "advice: take the log of x.masked_fill(x == 0, 1)", dtype="float32"),
    Case("zero divisor", "m = gt(x, 0); f = float(m); l = log(x)!; y = mul(l, f)",
         "advice: take the log of x.masked_fill(x == 0, 1)", dtype="float32"),
    Case("zero divisor", "r = add(x, 10); l = log(x)!; y = mul(r, l)",
         "advice: bound the argument", dtype="float32"),
    Case("zero divisor", "r = pow(x, -0.5); l = log(x)!; y = mul(r, l)",
         "advice: bound the argument", dtype="float32"),
    Case("zero divisor", "n = norm(x, 2); y = div(x, n)!",
         "advice: take F.normalize(x, dim=dim)", dtype="float32"),
    Case("zero divisor", "n = linalg_vector_norm(x); u = unsqueeze(n); y = div(x, u)!",
         "advice: take F.normalize(x, dim=dim)", dtype="float32"),
    Case("zero divisor", "n = norm(g, 2); y = div(x, n)!",
         "advice: add an eps to the norm, x + 1e-6", dtype="float32"),
    Case("zero divisor", "m = norm(a); n = norm(b); p = mul(m, n); y = div(x, p)!",
         "advice: take F.cosine_similarity", dtype="float32"),
    Case("zero divisor", "s = sub(1, h); c = cumprod(s, 1); y = log(c)!",
         "advice: take log(s).cumsum(dim)"),
    Case("zero divisor", "r = div(p, q)!; l = log(r); y = mul(p, l)",
         "advice: leave out where x is 0 before the division"),
    Case("zero divisor", "r = div(p, q)!; l = log(r); y = mul(z, l)",
         "advice: choose the divisor by"),
    Case("zero divisor", "r = div(p, q); l = log(r)!; y = mul(p, l)",
         "advice: take the log of x.masked_fill(x == 0, 1)"),
    Case("zero divisor", "r = div(p, q); l = log(r)!; y = mul(q, l)", "advice: bound the argument"),
    Case("zero divisor", "e = exp(l); m = gt(x, 0); j = mul(e, m); s = sum(j, 1); y = div(j, s)!",
         "advice: choose the divisor by"),
    Case("underflow", "e = exp(a); d = div(e, 2.5); y = log(d)!", "exact: take (a - log(b))"),
    Case("underflow", "e = exp(a); d = mul(e, 0.4); y = log(d)!", "exact: take (a + log(b))"),
    Case("underflow", "e = relu(a); d = div(e, 2.5); y = log(d)!", "advice: bound the argument"),
    Case("underflow", "e = exp(a); s = mul(w, e); t = add(z, s); f = exp(b); g = mul(v, f); "
         "l = add(t, g); y = log(l)!", "advice: work with logarithms: logsumexp of the exponents"),
    Case("underflow", "n = neg(z); e = exp(n); o = add(1, e); p = reciprocal(o); y = log(p)!",
         "advice: take logsigmoid(x) instead of log(1 / (1 + exp(-x)))"),
    Case("rounding", "n = neg(z); e = exp(n); o = add(1, e); p = div(1, o); q = sub(1, p); "
         "y = log(q)!", "advice: take logsigmoid(x) instead of log(1 / (1 + exp(-x)))"),
    Case("underflow", "n = neg(z); e = exp(n); o = add(2, e); p = reciprocal(o); y = log(p)!",
         "advice: bound the argument"),
    Case("overflow", "e = exp(x)!; d = sub(e, 1); y = log(d)",
         "advice: take x + log(-expm1(-x)) instead of log(exp(x) - 1)"),
    Case("singular gradient", "s = sub(a, b); y = sqrt(s)!", "advice: sqrt(x.clamp(min=1e-4))"),
    Case("domain", "q = pow(x, w); m = mean(q, 1); r = div(1, w); y = pow(m, r)!",
         "advice: clamp what the first power reads"),
    Case("domain", "q = pow(x, 2); m = mean(q, 1); n = sub(m, z); y = pow(n, 0.3)!",
         "advice: bound the argument"),
    Case("domain", "l = leaky_relu(x); y = pow(l, wp)!",
         "advice: clamp the base, x.clamp(min=1e-6), before the power"),
    Case("domain", "l = leaky_relu(x); y = pow(l, 0.3)!",
         "advice: see why its operand is negative"),
    Case("domain", "h = linear(x, w); r = getitem(h, 0); s = add(p, r); y = log(s)!",
         "advice: make positive what linear (model.py:1) makes"),
    Case("domain", "h = linear(x, w); s = sub(h, 9); y = log(s)!",
         "advice: see why its operand is negative"),
    Case("domain", "h = linear(x, w); t = tanh(h); s = add(p, t); y = log(s)!",
         "advice: see why its operand is negative"),
    Case("domain", "m = masked_fill(x, -inf); t = amax(m, 1); y = sub(m, t)!",
         "advice: begin with torch.finfo(torch.float16).min", numbers=(-math.inf, -math.inf)),
    Case("domain", "m = masked_fill(x, -inf); y = sub(m, z)!", "exact: join masks by where",
         numbers=(-math.inf, 1.0)),
    Case("overflow", "e = exp(x)!; s = sum(e); q = div(e, s); r = sum(q, 1); t = div(q, r); "
         "u = sum(t, 0); y = div(t, u)", "advice: normalise in logarithms", dtype="float32"),
    Case("overflow", "e = exp(x)!; s = sum(e); q = div_(e, s); r = sum(q, 1); c = div(k, r); "
         "t = mul_(q, c); u = sum(t, 0); y = div_(t, u)", "advice: normalise in logarithms",
         dtype="float32"),
    Case("overflow", "e = exp(x)!; s = sum(e); y = div(e, s)",
         "exact: subtract the row's maximum first", dtype="float32"),
    Case("zero divisor", "y = digamma(x)!", "advice: bound the argument of digamma"),
    Case("masked row", "y = softmax(x, -1)!", "advice: drop the row"),
    Case("masked row", "m = max(x); y = sub(x, m)!",
         "advice: mask with torch.finfo(torch.float16).min in place of -inf"),
    Case("empty", "y = std(x, 1)!", "advice: take std of more than one element"),
    Case("empty", "y = cross_entropy(x, t)!", "advice: skip the batch, or take reduction="),
    Case("empty", "y = mean(x)!", "advice: skip what is empty"),
    Case("no alignment", "y = ctc_loss(x, t)!", "advice: drop samples with labels"),
    Case("memory", "y = empty_like(x)!", "advice: take zeros instead of empty_like"),
    Case("singular gradient", "y = log2(x)!; z = where(c, y, x)",
         "exact: choose a safe argument of log2 by where, too"),
    Case("singular gradient", "y = sqrt(x)!", "advice: sqrt(x + 1e-4)"),
    Case("singular gradient", "y = rsqrt(x)!", "advice: rsqrt(x + 1e-12)", dtype="float32"),
    Case("singular gradient", "y = acos(x)!", "advice: acos(x.clamp(-1 + "),
    Case("singular gradient", "y = asin(x)!", "advice: asin(x.clamp(-1 + "),
    Case("singular gradient", "y = pow(x, 0.5)!", "advice: (x + 1e-4) ** y"),
    Case("singular gradient", "y = log(x)!", "advice: bound the argument: log(x.clamp(min="),
    Case("singular gradient", "y = linalg_eig(x)!",
         "advice: take the loss from eigvals's values", degeneracy="equal"),
    Case("singular gradient", "y = linalg_eigh(x)!",
         "advice: take the loss from eigvalsh's values", degeneracy="equal"),
    Case("rounding", "y = svd(x)!",
         "advice: take the loss from svdvals's values", degeneracy="equal"),
    Case("singular gradient", "y = linalg_qr(x)!", "advice: leave out dependent columns",
         degeneracy="column 1"),
    Case("singular gradient", "y = svd(x)!", "advice: keep the argument of svd away"),
    Case("overflow", "b = special_i0(x)!; y = log(b)", "exact: take log(special.i0e(x)) + x.abs()"),
    Case("overflow", "b = i1(x)!; c = i0(x); y = div(b, c)",
         "exact: take special.i1e(x) / special.i0e(x) instead of i1(x) / i0(x)"),
    Case("overflow", "b = i1(x); c = i0(x)!; y = div(b, c)",
         "exact: take special.i1e(x) / special.i0e(x) instead of i1(x) / i0(x)"),
    Case("overflow", "b = i0(x)!; c = i0(z); y = div(b, c)",
         "advice: take torch.special.i0e(x), which is i0(x) * exp(-x.abs())"),
    Case("overflow", "b = i0(x)!; c = mul(b, 6.28); y = log(c)",
         "advice: take log(special.i0e(x)) + x.abs() for the logarithm of i0(x)"),
    Case("overflow", "b = i0(x)!; y = mul(b, z)", "advice: take torch.special.i0e(x)"),
    Case("overflow", "e = sinh(x)!; y = log(e)", "exact: take x + log(-expm1(-2 * x)) - log(2)"),
    Case("overflow", "e = exp(x)!; y = log(e)", "exact: take x instead of log(exp(x))"),
    Case("overflow", "g = lgamma(x); e = exp(g)!; f = exp(z); q = div(e, f); y = log(q)",
         "advice: add and subtract its argument and the other lgamma themselves"),
    Case("underflow", "e = exp(x); y = log(e)!", "exact: take x instead of log(exp(x))"),
    Case("zero divisor", "p = special_ndtr(x); y = log2(p)!",
         "exact: take special.log_ndtr(u) / log(2) instead of log2(ndtr(u))"),
    Case("zero divisor", "p = erfc(x); y = log(p)!",
         "exact: take (special.log_ndtr(-sqrt(2) * x) + log(2)) instead of log(erfc(x))"),
    Case("zero divisor", "z = div(x, 1.4142135); e = erf(z); s = add(e, 1); p = mul(s, 0.5); "
         "y = log(p)!", "exact: take special.log_ndtr(x) instead of log(0.5 * (1 + erf"),
    Case("zero divisor", "z = mul(x, 0.70710678); e = erf(z); s = sub(1, e); p = div(s, 2); "
         "y = log(p)!", "exact: take special.log_ndtr(-x) instead of log(0.5 * (1 - erf"),
    Case("zero divisor", "e = erf(x); s = add(e, 1); p = mul(s, 0.5); y = log(p)!",
         "advice: bound the argument"),
    Case("singular gradient", "y = cbrt(x)!",
         "advice: keep the argument of cbrt away from where its derivative is infinite"),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.cause}: {case.code}")
def test_the_best_fix_comes_first(case: Case) -> None:
    """It is short, and so are those that follow."""
    assert case.fixes
    assert case.fixes[0].startswith(case.fix)
    assert all(len(fix) <= 160 for fix in case.fixes)


# What only a program's text, or all of its numbers, tell: see tests/cli/test_first_fixes.py.
OF_PROGRAMS = (
    "bound the parameter {parameter}",
    "do without {quotient} where",
    "give what does not occur the weight 0",
    "leave the loop once `{residual}`",
    "bound the weight that a term",
    "compute it only where `{factor}`",
    "leave out what holds nothing but NaN",
    "leave out what has no extent",
    "{repair}, or give such samples",
    "give this function f of a matrix",
    "normalise in logarithms, from the exponents",
    "leave each row its own entry",
    "keep {c.x} above 0 where it is lowered",
    "work in logs from exp ({place})",
    "keep {stored} in",
    "take {n}.clamp(min=2)",
    "pad by half a window",
    "keep u, of which",
    "go back and halve a step",
    "make {matrix} positive definite",
    "take slogdet({matrix})",
    "change {grown} by a factor",
    "give `{option}`",
    "a count is -1",
    "bound {part}",
    "keep points inside the unit ball",
    "begin {grid} above 0",
    "keep {learned} {range}",
    "keep the factor that {gate} makes",
    "bound the error",
    "compare both where both",
    "take atan2(a, b)",
    "bound the eigenvalues",
    "divide by the largest magnitude first",
    "leave the input more frames",
    "keep 0 out of {log}",
    "put distinct numbers, far",
    "{filled} behind {reduce}",
    "bound the scale",
    "take {instead} for {constant}",
    "{repair}",
    "compute all of {name} in float32",
    "take 0.99 of {ratio}",
    "keep {name} above 0 in this update",
    "keep {number} in float32",
    "take the difference in {made} in float32",
    "begin inside the support",
    "stop where `{name}`{made} is 0 throughout",
    "bound the divisor of this Newton step",
    "take a number of your data's range",
    "add 1 to the counts",
    "bound what {distances} reads",
    "{first}, or {second}",
    "divide by the largest first",
    "{power} made 0 of {numbers}",
    "take softmax of what {exp} reads, in place",
    "take the difference in {made} in float64",
    "look at the numbers that {power}",
    "{power} made 0",
    "{factor} is 0{place}",
    "both sides are 0 where {name}",
    "subtract the maximum of each {what}",
    "subtract the maximum of each group from",
    "take the maximum{place}",
    "{extend}: all {count}",
    "compute `{name}`",
    "sum `{name}` over",
    "bound what each multiplicative",
    "begin {logsumexp} with",
    "keep the largest entry",
    "keep {number} {inside} where it is made",
    "{c.bare} is {c.number} in the data",
    "work with logarithms, logsumexp",
    "smooth over the classes",
    "reject a proposal",
    "take 1 for a deviation",
    "compute the variance as",
    "take F.kl_div({q}",
    "of counts take",
    "take softmax of what {exp}",
    "{exp} made 0",
    "compute in {wide}",
    "{name} is what roundings",
    "bound it at the size",
    "drop the rows where",
    "keep {c.x} away from 0 where it is made",
    "take {c.counted}.clamp(min=1): it is whole",
    "divide by {count}",
    "look at what makes {c.bare} 0",
    "make {integers}",
    "see why {c.operand} is {c.number}{c.made_at}, {terms}",
    "square {squared}",
    "update {P}",
    "keep {c.x} from falling",
    "keep the samples as they were",
    "initialise this weight with numbers that are not 0",
    "give {c.name} probabilities",
    "see what makes {c.operand} +inf",
    "keep {table} away",
    "begin with torch.finfo({c.torch_dtype}).min in place of -inf for what",
    # See tests/cli/test_fixes_of_pairs_and_counts.py.
    "put 1 on the diagonal",
    "work in logs from {exp}",
    "{c.bare} is -1 in the data",
    "mask with torch.finfo({c.torch_dtype}).min in place of -inf in {filled}",
    "give what was counted 0 times",
    "keep all that {c.name} is computed from",
    # See tests/cli/test_fixes_of_exponents.py and test_fixes_of_fields.py.
    "bound what {log} reads",
    "do not divide by the product of all decays",
    "keep {p} away from 0 and 1",
    "keep the sum of the sigmoids below 1",
    "keep {name} from becoming {end}",
    "divide by ({c.x} + 1)",
    "leave out, before {c.name}, what does not vary",
    "leave out, before the arithmetic",
    "choose before {maker}",
    "mask with masked_fill({mask} == 0",
)


def test_every_rule_is_said_once_at_least() -> None:
    """By one of the cases above; but for rules that differ in the operation only."""
    said = {fix for case in CASES for fix in case.fixes}
    for rule in (each for each in RULES if not each.text.startswith(OF_PROGRAMS)):
        begins = re.split("[{(:]", rule.text)[0]
        assert any(fix.startswith(f"{rule.kind}: {begins}") for fix in said), rule.text


def test_what_inherits_an_infinity_is_sent_back() -> None:
    """To what made it; a row that is masked by an overflow is told how masks are made."""
    graph = around("s = add(x, m); p = softmax(s, -1)!")

    def fixes(wide: float, *, masked_row: bool) -> str:
        row = Operand(-math.inf, -math.inf, wide, wide, 1, "float16")
        seen = Evidence(
            "softmax", "float16", (0,), math.nan, (row,), math.nan, 0.5, masked_row=masked_row
        )
        return fixes_for("overflow", seen, graph)[0].text

    assert fixes(-65524.0, masked_row=False).startswith("look at what made its operand infinite")
    assert fixes(-65524.0, masked_row=True).startswith("mask with masked_fill")


def test_an_exponential_that_no_dtype_helps() -> None:
    """Its argument is bounded, and float32 is not proposed; it is where that holds a result."""

    def fix(needed: float) -> str:
        x = Operand(11.5, 11.5, dtype="float16")
        seen = Evidence("exp", "float16", (0,), math.inf, (x,), 1e5, needed=needed)
        graph = around("h = linear(x, w); e = exp(h)!; y = mul(x, e)")
        return fixes_for("overflow", seen, graph)[0].text

    bounded = "bound its argument where it is computed in linear (model.py:1), or scale the inputs"
    assert fix(5.9e28) == f"{bounded}: in float32 the result would be 5.9e+28"
    assert fix(1e5).startswith("compute it in float32")


def test_whole_numbers_are_not_cast_to_bfloat16() -> None:
    """It rounds those above 256; float32 holds them. Fractions may be cast to either."""

    def fix(number: float, dtype: str) -> str:
        x = Operand(number, number, dtype=dtype)
        seen = Evidence("half", "float16", (0,), math.inf, (x,), number, needed=number)
        return fixes_for("overflow", seen, around("h = half(x)!"))[0].text

    for number, dtype in ((77805.0, "int64"), (77805.0, "float32")):
        assert fix(number, dtype).startswith(
            "cast to float32 here: float16's maximum is 65504, and"
        )
    assert fix(77805.5, "float32").startswith("cast to float32 or bfloat16 here")


def test_a_sum_of_the_numerator_counts_no_mask() -> None:
    """``x / x.sum()`` is no mean."""
    fixes = Case("zero divisor", "s = sum(x, 1); y = div(x, s)!", "").fixes
    assert fixes[0].startswith("advice: choose the divisor by")


def test_no_result_that_overflowed_is_clamped() -> None:
    """A bound on an argument is allowed."""
    for rule in RULES:
        if "overflow" in rule.causes:
            text = rule.text.replace("{c.x}.clamp", "")
            assert "clamp" not in text.replace("{parameter} where it is read, by clamp", "")


@pytest.mark.parametrize(
    "code", ["y = add(x, 1e-9); z = log(y)!", "y = sub(1, x); z = log(y)!", "z = log(x)!"]
)
def test_what_no_softmax_made_is_no_log_softmax(code: str) -> None:
    """Nor is it an exact rewrite of something else."""
    fixes = Case("zero divisor", code, "").fixes
    assert fixes
    assert not any(fix.startswith("exact") for fix in fixes)


def test_nobody_could_look_closer() -> None:
    """Rules that ask for numbers stay silent, and the others do not."""
    graph = around("p = softmax(x, -1); y = log(p)!")
    assert [fix.kind for fix in fixes_for("underflow", None, graph)] == ["exact"]
    assert fixes_for("unknown", None, graph) == ()


def test_what_was_given_is_looked_at() -> None:
    """A weight, all of a weight, a sample."""
    (weight,) = fixes_of_given(Role.WEIGHT, "fc.weight")
    (all_of_it,) = fixes_of_given(Role.WEIGHT, "fc.weight", is_all_bad=True)
    (sample,) = fixes_of_given(Role.INPUT, "`x` of forward", row=5)
    (buffer,) = fixes_of_given(Role.BUFFER, "bn.running_var")
    assert buffer.text.startswith("initialise bn.running_var")
    assert weight.text.startswith("initialise fc.weight")
    assert all_of_it.text.startswith("look at what wrote fc.weight before this call")
    assert sample.text.startswith("look at where sample 5 of `x` of forward comes from")


def test_walks_end() -> None:
    """Also where a value is made of itself by way of its memory, and in deep graphs."""
    chain = "; ".join(f"x{i + 1} = add(x{i}, 1)" for i in range(300))
    graph = around(f"{chain}; y = exp(x300)!; x0 = add(y, 1)")
    assert len(graph.culprit_made_by) < 300
    assert {plain(step.kind) for step in graph.read_by} == {"add"}
    assert all(a is not b for a, b in itertools.combinations(graph.culprit_made_by, 2))

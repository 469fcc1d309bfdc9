"""Models that are written in another way agree; models that are wired in another way do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxguard

Forward = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    """A model with some modules and weights, and a forward from outside."""

    def __init__(self, forward: Forward, **parts: Any) -> None:
        super().__init__()
        self.does = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


def parts() -> dict[str, Any]:
    """Fresh modules, always the same."""
    torch.manual_seed(0)
    named: dict[str, Any] = {name: nn.Linear(8, 8) for name in "qkvo"}
    named |= {"norm": nn.LayerNorm(8), "up": nn.Linear(8, 32), "down": nn.Linear(32, 8)}
    named |= {"conv": nn.Conv1d(8, 8, 1), "table": nn.Parameter(torch.randn(8, 8))}
    with torch.no_grad():
        named["norm"].weight.normal_()
        named["norm"].bias.normal_()
    return named


X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))


def heads(x: Tensor) -> Tensor:
    return x.view(2, 6, 2, 4).transpose(1, 2)


def attended(s: Any, x: Tensor) -> Tensor:
    q, k, v = heads(s.q(x)), heads(s.k(x)), heads(s.v(x))
    p = (q @ k.transpose(-1, -2) * 0.5).softmax(-1)
    return (p @ v).transpose(1, 2).reshape(2, 6, 8)


def attended_by_sdpa(s: Any, x: Tensor) -> Tensor:
    made = functional.scaled_dot_product_attention(heads(s.q(x)), heads(s.k(x)), heads(s.v(x)))
    return made.transpose(1, 2).reshape(2, 6, 8)


def attended_by_einsum(s: Any, x: Tensor) -> Tensor:
    q, k, v = (f(x).view(2, 6, 2, 4) for f in (s.q, s.k, s.v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(4)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)


def attended_scaled_before(s: Any, x: Tensor) -> Tensor:
    v, k, q = heads(s.v(x)), heads(s.k(x)), heads(s.q(x) * 0.5)
    return (torch.softmax(torch.matmul(q, k.mT), dim=-1) @ v).transpose(1, 2).reshape(2, 6, 8)


def fused(s: Any, x: Tensor) -> Tensor:
    q, k, v = (heads(part) for part in s.qkv(x).chunk(3, -1))
    p = (q @ k.transpose(-1, -2) * 0.5).softmax(-1)
    return (p @ v).transpose(1, 2).reshape(2, 6, 8)


def with_fused() -> dict[str, Any]:
    named = parts()
    qkv = nn.Linear(8, 24)
    with torch.no_grad():
        qkv.weight.copy_(torch.cat([named[n].weight for n in "qkv"]))
        qkv.bias.copy_(torch.cat([named[n].bias for n in "qkv"]))
    return {**{name: each for name, each in named.items() if name not in "qkv"}, "qkv": qkv}


def norm_by_hand(s: Any, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + s.norm.eps) * s.norm.weight + s.norm.bias


def softmax_by_hand(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def branches(s: Any, x: Tensor) -> Tensor:
    a = s.q(x).relu()
    b = s.k(x).relu()
    return a * s.norm(b)


def branches_the_other_way(s: Any, x: Tensor) -> Tensor:
    b = s.norm(s.k(x).relu())
    a = s.q(x).relu()
    return a * b


def transposed() -> dict[str, Any]:
    named = parts()
    named["table"] = nn.Parameter(named["table"].detach().t().contiguous())
    return named


def renamed() -> dict[str, Any]:
    named = parts()
    return {"second": named["k"], "first": named["q"], "norm": named["norm"]}


@dataclass(frozen=True)
class Pair:
    """Two forwards, and the modules of the second if they are others."""

    a: Forward
    b: Forward
    parts_of_b: Callable[[], dict[str, Any]] = parts

    def models(self) -> tuple[nn.Module, nn.Module]:
        return Model(self.a, **parts()).eval(), Model(self.b, **self.parts_of_b()).eval()


HARMLESS = {
    "scaled before the product": Pair(attended, attended_scaled_before),
    "branches in the other order": Pair(branches, branches_the_other_way),
    "three linears in one": Pair(attended, fused, with_fused),
    "attention in one call": Pair(attended, attended_by_sdpa),
    "attention by einsum": Pair(attended, attended_by_einsum),
    "square": Pair(lambda s, x: s.q(x) * s.q(x), lambda s, x: s.q(x).square()),
    "pow": Pair(lambda s, x: s.q(x).pow(2).mean(-1), lambda s, x: s.q(x).square().mean(-1)),
    "reshape": Pair(lambda s, x: s.q(s.k(x).view(12, 8)), lambda s, x: s.q(s.k(x)).reshape(-1, 8)),
    "layer norm by hand": Pair(lambda s, x: s.o(s.norm(x)), lambda s, x: s.o(norm_by_hand(s, x))),
    "softmax by hand": Pair(
        lambda s, x: s.q(x).softmax(-1) @ s.table, lambda s, x: softmax_by_hand(s.q(x)) @ s.table
    ),
    "einsum": Pair(lambda s, x: x @ s.table, lambda s, x: torch.einsum("bij,jk->bik", x, s.table)),
    "a weight that is stored transposed": Pair(
        lambda s, x: x @ s.table, lambda s, x: functional.linear(x, s.table), transposed
    ),
    "addmm": Pair(lambda s, x: s.q(x[0]), lambda s, x: torch.addmm(s.q.bias, x[0], s.q.weight.t())),
    "the other way round": Pair(lambda s, x: s.norm(x + s.q(x)), lambda s, x: s.norm(s.q(x) + x)),
    "split": Pair(
        lambda s, x: torch.cat([y.relu() for y in s.q(x).split(4, -1)], -1),
        lambda s, x: torch.cat([y.relu() for y in s.q(x).chunk(2, -1)], -1),
    ),
    "slices": Pair(
        lambda s, x: s.up(x).chunk(2, -1)[0] * s.up(x).chunk(2, -1)[1].sigmoid(),
        lambda s, x: functional.glu(s.up(x), -1),
    ),
    "casts": Pair(
        lambda s, x: s.q(x).double().float().relu(),
        lambda s, x: s.q(x).float().relu().double().float(),
    ),
    "a bias that is added apart": Pair(
        lambda s, x: s.q(x), lambda s, x: x @ s.q.weight.t() + s.q.bias
    ),
    "dropout in evaluation": Pair(
        lambda s, x: s.o(s.q(x)), lambda s, x: s.o(functional.dropout(s.q(x), 0.5, s.training))
    ),
    "a convolution of width 1": Pair(
        lambda s, x: s.conv(x.transpose(1, 2)).transpose(1, 2),
        lambda s, x: functional.linear(x, s.conv.weight[:, :, 0], s.conv.bias),
    ),
    "silu": Pair(lambda s, x: functional.silu(s.q(x)), lambda s, x: s.q(x) * torch.sigmoid(s.q(x))),
    "divided": Pair(lambda s, x: s.q(x) / 8, lambda s, x: s.q(x) * 0.125),
    "log softmax": Pair(
        lambda s, x: s.q(x).log_softmax(-1),
        lambda s, x: s.q(x) - s.q(x).logsumexp(-1, keepdim=True),
    ),
    "in place": Pair(lambda s, x: s.q(x).relu() + 1, lambda s, x: s.q(x).relu_().add_(1)),
    "names": Pair(
        branches,
        lambda s, x: s.first(x).relu() * s.norm(s.second(x).relu()),
        renamed,
    ),
    "outputs by name": Pair(
        lambda s, x: {"a": s.q(x), "b": s.k(x)}, lambda s, x: {"b": s.k(x), "a": s.q(x)}
    ),
    "a shared result": Pair(
        lambda s, x: s.q(x).tanh() + s.q(x).tanh(), lambda s, x: 2 * s.q(x).tanh()
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_two_ways_to_write_a_model_agree(name: str) -> None:
    """What they return is the same in float64, and so are the gradients."""
    a, b = HARMLESS[name].models()
    for one, other in ((a, b), (b, a)):
        found = fxguard.compare(one, other, X)
        assert found.agrees, str(found)
        assert found.outcome == "agree"


@dataclass(frozen=True)
class Wrong:
    """A forward and a wrong one, and what is named: the kind of an operation, or an output."""

    right: Forward
    wrong: Forward
    named: str
    x: Tensor = X


def block(s: Any, x: Tensor) -> Tensor:
    h = x + attended(s, x)
    return h + s.down(functional.gelu(s.up(s.norm(h))))


def wrong_residual(s: Any, x: Tensor) -> Tensor:
    h = x + attended(s, x)
    return x + s.down(functional.gelu(s.up(s.norm(h))))


class Stale(nn.Module):
    """Returns what it computed in the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.q = parts()["q"]
        self.register_buffer("last", torch.ones(2, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        before = self.last.clone()
        self.last.copy_(self.q(x).detach())
        return before + 0 * self.q(x)


def attention_of(
    q: str = "q", k: str = "k", v: str = "v", scale: float = 0.5, axis: int = -1
) -> Forward:
    def forward(s: Any, x: Tensor) -> Tensor:
        first, second, third = (heads(getattr(s, name)(x)) for name in (q, k, v))
        p = (first @ second.transpose(-1, -2) * scale).softmax(axis)
        return (p @ third).transpose(1, 2).reshape(2, 6, 8)

    return forward


def permuted_heads(s: Any, x: Tensor) -> Tensor:
    q, k, v = heads(s.q(x)), heads(s.k(x)), heads(s.v(x)).flip(1)
    p = (q @ k.transpose(-1, -2) * 0.5).softmax(-1)
    return (p @ v).transpose(1, 2).reshape(2, 6, 8)


def written_through_a_view(s: Any, x: Tensor) -> Tensor:
    made: Tensor = s.q(x)
    made.view(-1)[:4].mul_(2)
    return s.k(made) + s.v(made)


def scaled_before_and_without_a_bias(s: Any, x: Tensor) -> Tensor:
    return functional.linear(attended_scaled_before(s, x), s.o.weight)


WRONG = {
    "query and key": Wrong(attended, attention_of(q="k", k="q"), "transpose|matmul"),
    "key and value": Wrong(attended, attention_of(k="v", v="k"), "transpose|matmul"),
    "the residual": Wrong(block, wrong_residual, "add"),
    "no activation": Wrong(
        lambda s, x: s.down(functional.relu(s.up(x))), lambda s, x: s.down(s.up(x)), "relu|linear"
    ),
    "the scale": Wrong(attended, attention_of(scale=0.25), "mul"),
    "eps": Wrong(
        lambda s, x: s.o(functional.layer_norm(x, (8,), eps=1e-5)),
        lambda s, x: s.o(functional.layer_norm(x, (8,), eps=1e-3)),
        "layer_norm",
    ),
    "a layer twice": Wrong(lambda s, x: s.k(s.q(x)), lambda s, x: s.q(s.q(x)), "linear"),
    "a slice": Wrong(lambda s, x: s.q(x)[:, 1:] * 2, lambda s, x: s.q(x)[:, :-1] * 2, "getitem"),
    "heads": Wrong(attended, permuted_heads, "flip"),
    "the gelu": Wrong(
        lambda s, x: s.o(functional.gelu(s.q(x))),
        lambda s, x: s.o(functional.gelu(s.q(x), approximate="tanh")),
        "gelu",
    ),
    "the axis": Wrong(attended, attention_of(axis=-2), "softmax"),
    "no bias": Wrong(
        lambda s, x: s.o(s.q(x)).relu(),
        lambda s, x: s.o(functional.linear(x, s.q.weight)).relu(),
        "linear",
    ),
    "no mask": Wrong(
        lambda s, x: functional.scaled_dot_product_attention(
            s.q(x), s.k(x), s.v(x), is_causal=True
        ),
        lambda s, x: functional.scaled_dot_product_attention(s.q(x), s.k(x), s.v(x)),
        "scaled_dot_product_attention",
    ),
    "outputs": Wrong(
        lambda s, x: (s.q(x).relu(), s.k(x).relu()),
        lambda s, x: (s.k(x).relu(), s.q(x).relu()),
        "output 0",
    ),
    "the output of another layer": Wrong(
        lambda s, x: (s.q(x), s.k(s.q(x)))[1], lambda s, x: (s.q(x), s.k(s.q(x)))[0], "output 0"
    ),
    "the state before the norm": Wrong(
        lambda s, x: s.norm(s.q(x)), lambda s, x: (s.q(x), s.norm(s.q(x)))[0], "output 0"
    ),
    "no norm": Wrong(lambda s, x: s.norm(s.q(x)), lambda s, x: s.q(x), "layer_norm|output 0"),
    "its input": Wrong(lambda s, x: s.q(x) + x, lambda s, x: (s.q(x), x)[1], "add|output 0"),
    "order of operands": Wrong(lambda s, x: s.q(x) - s.k(x), lambda s, x: s.k(x) - s.q(x), "sub"),
    "integers": Wrong(
        lambda s, x: s.q(x).argmax(-1), lambda s, x: s.q(x).argmin(-1), "argm|output 0"
    ),
    "written in another way, and wrong after that": Wrong(
        lambda s, x: s.o(attended(s, x)), scaled_before_and_without_a_bias, "linear"
    ),
    "norm by hand with another eps": Wrong(
        lambda s, x: s.o(s.norm(x * 0.1)),
        lambda s, x: s.o(
            (x * 0.1 - (x * 0.1).mean(-1, keepdim=True))
            / ((x * 0.1).std(-1, keepdim=True) + s.norm.eps)
            * s.norm.weight
            + s.norm.bias
        ),
        "",
    ),
    "a transposed weight": Wrong(
        lambda s, x: x @ s.table, lambda s, x: x @ s.table.t(), "matmul|t"
    ),
    "a write through a view": Wrong(
        lambda s, x: s.k(s.q(x)) + s.v(s.q(x)), written_through_a_view, "mul|view"
    ),
    "a sum in place of a mean": Wrong(lambda s, x: s.q(x).mean(1), lambda s, x: s.q(x).sum(1), ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_wiring_is_named(name: str) -> None:
    """By its operation, or by the output where all operations are right."""
    wrong = WRONG[name]
    a, b = Model(wrong.right, **parts()).eval(), Model(wrong.wrong, **parts()).eval()
    for one, other in ((a, b), (b, a)):
        found = fxguard.compare(one, other, wrong.x)
        assert found.outcome == "operation", str(found)
        assert not found.agrees
        assert found.first is not None
        said = found.first.kind or found.first.title
        assert not wrong.named or any(each in said for each in wrong.named.split("|")), str(found)


def test_a_stale_output() -> None:
    """Returned from the call before, it is not what the operations of this one make."""
    fresh = Model(lambda s, x: s.q(x), **parts())
    found = fxguard.compare(fresh, Stale(), X)
    assert found.outcome == "operation", str(found)

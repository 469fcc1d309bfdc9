"""Weights that were changed together with what reads them: folded, merged, rotated, rescaled."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx.experimental.optimization as optimization
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import fxguard

Two = tuple[nn.Module, nn.Module, Tensor]


class Does(nn.Module):
    """Some parts, and a forward from outside."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.does = does
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


def norm(width: int, cls: Any = nn.BatchNorm2d) -> Any:
    """A batch norm that has been trained."""
    made = cls(width)
    with torch.no_grad():
        for each in (made.running_mean, made.weight, made.bias):
            each.normal_()
        made.running_var.uniform_(0.01, 0.1)
    return made


IMAGE, ROWS = (
    torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    for shape in ((2, 3, 8, 8), (5, 8))
)


def convolved() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


def without_its_norm(model: nn.Sequential, fused: nn.Module) -> nn.Sequential:
    return nn.Sequential(fused, nn.ReLU(), copy.deepcopy(model[3])).eval()


def by_torch() -> Two:
    a = convolved()
    return a, without_its_norm(a, fuse_conv_bn_eval(a[0], a[1])), IMAGE  # type: ignore[arg-type]


def by_fx() -> Two:
    a = convolved()
    return a, optimization.fuse(copy.deepcopy(a)), IMAGE


def into_a_linear() -> Two:
    a = nn.Sequential(nn.Linear(8, 6), norm(6, nn.BatchNorm1d), nn.ReLU(), nn.Linear(6, 3)).eval()
    return a, without_its_norm(a, fuse_linear_bn_eval(a[0], a[1])), ROWS  # type: ignore[arg-type]


def in_bfloat16() -> Two:
    a, b, x = into_a_linear()
    return a, b.to(torch.bfloat16), x


def by_hand(changed: Callable[[Any, Any], tuple[Tensor, Tensor]]) -> Two:
    a = convolved()
    b = without_its_norm(a, copy.deepcopy(a[0]))
    with torch.no_grad():
        for mine, weight in zip(b[0].parameters(), changed(a[0], a[1]), strict=True):
            mine.copy_(weight)
    return a, b, IMAGE


def scale_of(n: Any, eps: float | None = None) -> Tensor:
    return n.weight / torch.sqrt(n.running_var + (n.eps if eps is None else eps))  # type: ignore[no-any-return]


def folded(c: Any, n: Any, eps: float | None = None) -> tuple[Tensor, Tensor]:
    scale = scale_of(n, eps)
    return c.weight * scale.view(-1, 1, 1, 1), (c.bias - n.running_mean) * scale + n.bias


def with_the_batch(c: Any, n: Any) -> tuple[Tensor, Tensor]:
    n, made = copy.deepcopy(n), c(IMAGE)
    n.running_mean, n.running_var = made.mean((0, 2, 3)), made.var((0, 2, 3))
    return folded(c, n)


def weight_norm(forgets: bool) -> Two:
    a, b = (
        nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 6)), nn.Tanh(), nn.Linear(6, 2))
        for _ in range(2)
    )
    with torch.no_grad():
        a[0].parametrizations["weight"].original0.mul_(1.5)  # type: ignore[union-attr, index]
    b.load_state_dict(a.state_dict())
    parametrize.remove_parametrizations(b[0], "weight")
    if forgets:
        with torch.no_grad():
            weight: Any = b[0].weight
            weight.div_(weight.norm(dim=1, keepdim=True))
    return a, b, ROWS


class LowRank(nn.Module):
    """A linear layer with an adapter."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.base = nn.Linear(8, width).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x)
        return made + (x @ self.down.t() @ self.up.t()) * 2.0


def merged(scale: float) -> Two:
    a = nn.Sequential(LowRank(), nn.GELU(), nn.Linear(6, 3))
    linear = copy.deepcopy(a[0].base)
    with torch.no_grad():
        linear.weight += scale * (a[0].up @ a[0].down)  # type: ignore[operator]
    return a, nn.Sequential(linear, nn.GELU(), copy.deepcopy(a[2])), ROWS


def into_the_next(both: bool, affine: bool = True) -> Two:
    a = Does(
        lambda s, x: s.o(torch.relu(s.q(s.n(x)) * s.k(s.n(x)))),
        n=nn.RMSNorm(8),
        **{name: nn.Linear(8, 8, bias=False) for name in "qko"},
    )
    with torch.no_grad():
        a.n.weight.normal_()
    b = copy.deepcopy(a)
    with torch.no_grad():
        for each in (b.q, b.k) if both else (b.q,):
            each.weight.mul_(a.n.weight)
        b.n.weight.fill_(1)
    if not affine:
        b.n = nn.RMSNorm(8, elementwise_affine=False)
    return a, b, ROWS


def between_two(change: Callable[[Any], None], does: Any = lambda s, x: s.b(s.a(x))) -> Two:
    a = Does(does, a=nn.Linear(8, 6), b=nn.Linear(6, 3))
    b = copy.deepcopy(a)
    with torch.no_grad():
        change(b)
    return a, b, ROWS


def rescaled(b: Any, back: bool = True) -> None:
    scale = torch.linspace(0.5, 2, 6)
    b.a.weight.mul_(scale[:, None])
    b.a.bias.mul_(scale)
    if back:
        b.b.weight.div_(scale)


def scaled_queries(bias: bool) -> Two:
    def attends(s: Any, x: Tensor) -> Tensor:
        made: Tensor = s.o((s.q(x) @ s.k(x).mT * s.scale).softmax(-1) @ s.v(x))
        return made

    a = Does(attends, scale=8**-0.5, **{name: nn.Linear(8, 8) for name in "qkvo"})
    b = copy.deepcopy(a)
    b.scale = 1.0
    with torch.no_grad():
        b.q.weight.mul_(8**-0.5)
        if bias:
            b.q.bias.mul_(8**-0.5)
    return a, b, ROWS


def embedded() -> Two:
    a = Does(lambda s, x: s.o(s.e(x) * math.sqrt(8)), e=nn.Embedding(20, 8), o=nn.Linear(8, 4))
    b = copy.deepcopy(a)
    b.does = lambda s, x: s.o(s.e(x))
    with torch.no_grad():
        b.e.weight.mul_(math.sqrt(8))
    return a, b, torch.arange(12).view(2, 6)


def another_shape() -> Two:
    a = Does(lambda s, x: s.c(x).relu(), c=nn.Conv2d(3, 5, 1))
    b = Does(lambda s, x: s.c(x.movedim(1, -1)).movedim(-1, 1).relu(), c=nn.Linear(3, 5))
    with torch.no_grad():
        b.c.weight.copy_(a.c.weight.flatten(1))
        b.c.bias.copy_(a.c.bias)
    return a, b, IMAGE


def one_convolution() -> Two:
    a = Does(
        lambda s, x: (s.c(x) + s.point(x) + x).relu(),
        c=nn.Conv2d(3, 3, 3, padding=1),
        point=nn.Conv2d(3, 3, 1),
    )
    b = Does(lambda s, x: s.c(x).relu(), c=copy.deepcopy(a.c))
    with torch.no_grad():
        b.c.weight[:, :, 1:2, 1:2] += a.point.weight + torch.eye(3)[:, :, None, None]
        b.c.bias.add_(a.point.bias)
    return a, b, IMAGE


class Block(nn.Module):
    """A residual block, with its norms or without."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList([norm(8) if normed else nn.Identity() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norms[1](self.two(self.norms[0](self.one(x)).relu()))
        return functional.relu(x + made)


def fused_modules() -> Two:
    a = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 4, 3), norm(4), nn.Flatten()),
        *(nn.Linear(64, 6), norm(6, nn.BatchNorm1d)),
    ).eval()
    pairs = [["0", "1", "2"], ["3", "4"], ["6", "7"]]
    return a, quantization.fuse_modules(copy.deepcopy(a), pairs), IMAGE


def residual_by_fx() -> Two:
    a = nn.Sequential(*convolved()[:3], *(Block(True) for _ in range(2)), nn.Flatten()).eval()
    a.append(nn.Linear(288, 3))
    return a, optimization.fuse(copy.deepcopy(a)), IMAGE


def without_parametrizations(parametrized: Callable[[nn.Module], nn.Module]) -> Two:
    """After some steps of training."""
    a, b = (
        nn.Sequential(parametrized(nn.Linear(8, 6)), nn.Tanh(), parametrized(nn.Linear(6, 4)))
        for _ in range(2)
    )
    optimizer = torch.optim.SGD(a.parameters(), 0.1)
    for _ in range(3):
        a(ROWS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    b.load_state_dict(a.state_dict())
    a.eval(), b.eval()
    for layer in b[0], b[2]:
        parametrize.remove_parametrizations(layer, "weight")
    return a, b, ROWS


HARMLESS: dict[str, Callable[[], Two]] = {
    "a norm into a convolution, by torch": by_torch,
    "a norm into a convolution, by torch.fx": by_fx,
    "a norm into a convolution, by hand": lambda: by_hand(folded),
    "a norm into a linear layer": into_a_linear,
    "a norm into a linear layer, in bfloat16": in_bfloat16,
    "weight norm": lambda: weight_norm(False),
    "low rank": lambda: merged(2.0),
    "the weight of a norm into two linear layers": lambda: into_the_next(True),
    "a norm without a weight": lambda: into_the_next(True, affine=False),
    "scales between two layers": lambda: between_two(rescaled),
    "a scale into queries": lambda: scaled_queries(True),
    "a scale into an embedding": embedded,
    "a convolution as a linear layer of the same name": another_shape,
    "three branches in one convolution": one_convolution,
    "norms one behind the other": fused_modules,
    "norms of residual blocks, by torch.fx": residual_by_fx,
    "spectral norm": lambda: without_parametrizations(parametrizations.spectral_norm),
    "orthogonal": lambda: without_parametrizations(parametrizations.orthogonal),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_weights_that_belong_to_how_a_model_is_written(name: str) -> None:
    """Both models return the same with their own weights, and the text names these."""
    torch.manual_seed(0)
    a, b, x = HARMLESS[name]()
    for one, other in ((a, b), (b, a)):
        found = fxguard.compare(one, other, x)
        assert found.outcome == "agree", str(found)
        names = dict(one.named_parameters())
        wanted = {
            each
            for each, weight in other.named_parameters()
            if each in names and not torch.equal(weight.double(), names[each].double())
        }
        said = " ".join(found.notes)
        assert not wanted or "written in another way in B, with what reads them" in said
        assert not wanted or any(each in said for each in wanted), str(found)


@pytest.mark.parametrize(
    ("make", "module"),
    [
        (lambda: by_hand(lambda c, n: folded(c, n, eps=0.0)), "0"),
        (lambda: by_hand(lambda c, n: (folded(c, n)[0], c.bias)), "0"),
        (lambda: by_hand(lambda c, n: (folded(c, n)[0], c.bias * scale_of(n) + n.bias)), "0"),
        (lambda: by_hand(with_the_batch), "0"),
        (lambda: weight_norm(True), "0|0.parametrizations.weight.0"),
        (lambda: merged(1.0), "0|0.base"),
        (lambda: into_the_next(False), "n|k"),
        (lambda: between_two(lambda b: rescaled(b, back=False)), "a"),
        (lambda: scaled_queries(False), "q"),
    ],
    ids=[
        *("the eps", "the bias", "the mean", "statistics of the batch", "the norm of weights"),
        *("alpha over r", "one of two readers", "not scaled back", "the bias of queries"),
    ],
)
def test_what_was_forgotten_is_found(make: Callable[[], Two], module: str) -> None:
    """At the layer whose weights hold too little."""
    torch.manual_seed(0)
    a, b, x = make()
    for one, other in ((a, b), (b, a)):
        found = fxguard.compare(one, other, x)
        assert found.outcome == "operation", str(found)
        assert found.first is not None
        assert found.first.module in module.split("|"), str(found)


def blocks(wrong: str) -> Two:
    a = nn.Sequential(nn.Conv2d(3, 8, 3), *(Block(True) for _ in range(3))).eval()
    b = nn.Sequential(copy.deepcopy(a[0]), *(Block(False) for _ in range(3))).eval()
    for name, mine in b.named_modules():
        if not isinstance(mine, Block):
            continue
        theirs: Any = a.get_submodule(name)
        for conv, each in zip(("one", "two"), theirs.norms, strict=True):
            each = copy.deepcopy(each)
            if f"{name}.{conv}" == wrong:
                each.running_mean.zero_()
            setattr(mine, conv, fuse_conv_bn_eval(getattr(theirs, conv), each))
    return a, b, IMAGE


def test_the_one_norm_that_was_folded_wrongly() -> None:
    """Five of six are right: their layers are not named."""
    torch.manual_seed(0)
    assert not fxguard.compare(*blocks(""), gradients=False).differs
    found = fxguard.compare(*blocks("2.one"), gradients=False)
    assert found.first is not None
    assert found.first.module == "2.one", str(found)
    assert found.first.weights


def attention(*adapted: str) -> nn.Module:
    def attends(s: Any, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(5, 2, 4).transpose(0, 1) for layer in (s.q, s.k, s.v))
        made: Tensor = functional.scaled_dot_product_attention(q, k, v)
        return s.o(made.transpose(0, 1).reshape(5, 8))  # type: ignore[no-any-return]

    layers = {name: LowRank(8) if name in adapted else nn.Linear(8, 8) for name in "qkvo"}
    return Does(attends, **layers)


@pytest.mark.parametrize("wrong", ["q", "v"])
def test_the_one_adapter_that_was_merged_wrongly(wrong: str) -> None:
    """The layer beside it reads the same, was merged as well, and is not named."""
    torch.manual_seed(0)
    a, b = attention("q", "v"), attention()
    with torch.no_grad():
        for name in "qkvo":
            mine, theirs = b.get_submodule(name), a.get_submodule(name)
            mine.load_state_dict(getattr(theirs, "base", theirs).state_dict())
            if name in "qv":
                scale = 1.0 if name == wrong else 2.0
                mine.weight += scale * (theirs.up @ theirs.down)  # type: ignore[operator]
    for one, other in ((a, b), (b, a)):
        found = fxguard.compare(one, other, ROWS, gradients=False)
        assert found.first is not None
        assert found.first.module.split(".")[0] == wrong, str(found)


def test_a_weight_that_nothing_makes_up_for() -> None:
    """It is named beside a fold that is right, also where it changes no output."""
    torch.manual_seed(0)
    a = Does(
        lambda s, x: s.b(s.n(s.a(x)).relu()) + 0 * s.d(x),
        a=nn.Linear(8, 6),
        n=norm(6, nn.BatchNorm1d),
        b=nn.Linear(6, 3),
        d=nn.Linear(8, 3),
    ).eval()
    b = Does(
        lambda s, x: s.b(s.a(x).relu()) + 0 * s.d(x),
        a=fuse_linear_bn_eval(a.a, a.n),
        **{name: copy.deepcopy(getattr(a, name)) for name in "bd"},
    )
    assert fxguard.compare(a, b, ROWS).agrees
    with torch.no_grad():
        b.d.weight[0].mul_(2)
    found = fxguard.compare(a, b, ROWS)
    assert [each.module for each in found.significant] == ["d"]


def test_a_frozen_weight() -> None:
    """It has no gradient because nobody asks for one: that is said, and is no divergence."""
    a = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    b = copy.deepcopy(a)
    b[0].requires_grad_(False)
    found = fxguard.compare(a, b, ROWS)
    assert found.agrees, str(found)
    assert dict(found.not_compared) == {
        "gradient of 0.weight": "only A asks for one",
        "gradient of 0.bias": "only A asks for one",
    }
    b[0].requires_grad_(True)
    b[2].register_forward_pre_hook(lambda module, given: (given[0].detach(),))
    assert fxguard.compare(a, b, ROWS).outcome == "operation"

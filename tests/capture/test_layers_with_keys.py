"""Equal layers that read and set their own keys of a dictionary, as a cross attention's cache."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxguard
from fxguard.capture import layers

LAYERS, WIDTH = 6, 4


class Layer(nn.Module):
    """A residual block with a number of its own, which does something with a dictionary."""

    def __init__(self, index: int, uses: Callable[..., Tensor]) -> None:
        super().__init__()
        self.index = index
        self.other = max(index - 1, 0)
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.uses = uses

    def forward(self, x: Tensor, flags: Any) -> Tensor:
        """A residual block."""
        return x + self.uses(self, self.out(self.linear(self.norm(x)).tanh()), flags)


class Net(nn.Module):
    """Layers that are given one dictionary."""

    def __init__(self, uses: Callable[..., Tensor]) -> None:
        super().__init__()
        self.h = nn.ModuleList(Layer(index, uses) for index in range(LAYERS))

    def forward(self, x: Tensor, flags: Any) -> Tensor:
        """The last layer's."""
        for layer in self.h:
            x = layer(x, flags)
        return x


def marks(layer: Any, x: Tensor, flags: Any) -> Tensor:
    """Like the cross attention of transformers."""
    if flags.get(layer.index):
        return x * 2
    flags[layer.index] = True
    return x


def reads_its_own(layer: Any, x: Tensor, flags: Any) -> Tensor:
    """What it has just set."""
    flags[layer.index] = 3
    flags[layer.index] = flags.get(layer.index) + 1
    return x * flags.get(layer.index)


def reads_another(layer: Any, x: Tensor, flags: Any) -> Tensor:
    """A key that may be the one just set."""
    flags[layer.index] = 2 + len(x)
    return x * (flags.get(layer.other) or 5)


def sets_another(layer: Any, x: Tensor, flags: Any) -> Tensor:
    """Two keys that may be one."""
    flags[layer.index] = 2
    flags[layer.other] = 3
    return x * flags.get(layer.index)


def counts(layer: Any, x: Tensor, flags: Any) -> Tensor:
    """All that were set so far."""
    flags[layer.index] = True
    return x * len(flags)


def looks_for(layer: Any, x: Tensor, flags: Any) -> Tensor:
    """Whether a key is there."""
    flags[layer.index] = True
    return x * 2 if layer.other in flags and 3 not in flags else x * 3


def sums(layer: Any, x: Tensor, flags: Any) -> Tensor:
    """All keys, in their order."""
    flags[layer.index] = layer.index + 1
    for number, key in enumerate(flags):
        x = x * (1 + number * key)
    return x


def removes(layer: Any, x: Tensor, flags: Any) -> Tensor:
    """Its own key, once set."""
    flags[layer.index] = True
    if flags.pop(layer.other, None):
        x = x * 2
    return x


def keeps_a_tensor(layer: Any, x: Tensor, flags: Any) -> Tensor:
    """What a later call adds."""
    before = flags.get(layer.index)
    flags[layer.index] = x
    return x if before is None else x + before


def breaks_the_graph(layer: Any, x: Tensor, flags: Any) -> Tensor:
    """Between setting and reading."""
    flags[layer.index] = 2
    torch._dynamo.graph_break()
    return x * flags.get(layer.index)


def checkpoints(layer: Any, x: Tensor, flags: Any) -> Tensor:
    """Sets a key in what is run again."""

    def body(x: Tensor) -> Tensor:
        flags[layer.index] = (flags.get(layer.index) or 0) + 1
        return x.sin()

    found: Tensor = checkpoint(body, x, use_reentrant=False)
    return found


def compares(layer: Any, x: Tensor, flags: Any) -> Tensor:
    """Its number, in every way."""
    if layer.index == 2 or layer.index >= 5:
        x = x * 2
    if layer.index != 3 and 1 < layer.index <= 4:
        x = x.sin()
    flags[layer.index] = layer.index < len(flags) + 1
    return x


def counts_itself(layer: Any, x: Tensor, flags: Any) -> Tensor:
    """Changes its number before it uses it."""
    layer.index += 1
    flags[layer.index] = True
    return x * 2 if layer.index > 3 else x


def returns_it(layer: Any, x: Tensor, flags: Any) -> Tensor:
    """Hands the dictionary on to a function of its own."""
    flags[layer.index] = True

    def of(items: Any) -> Any:
        return dict(items)

    return x * len(of(flags))


class Counting(dict[int, Any]):
    """A dictionary that notes how often it is set."""

    sets = 0

    def __setitem__(self, key: int, value: Any) -> None:
        self.sets += 1
        super().__setitem__(key, value)


USES = [marks, reads_its_own, reads_another, sets_another, counts, looks_for, sums, removes]
USES += [keeps_a_tensor, breaks_the_graph, checkpoints, compares, counts_itself, returns_it]


@pytest.fixture(autouse=True)
def _any_layer_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LEAST_WORK", 0)


def both(uses: Callable[..., Tensor], flags: Any, calls: int = 3) -> tuple[Any, Any, nn.Module]:
    """What a plain and a guarded model make of equal dictionaries."""
    torch.manual_seed(0)
    plain = Net(uses)
    model = fxguard.instrument(copy.deepcopy(plain))
    x = torch.randn(3, WIDTH, requires_grad=True)
    found = []
    for each in (plain, model):
        own = copy.deepcopy(flags)
        results = [each(x, own) for _ in range(calls)]
        (grad,) = torch.autograd.grad(results[-1].square().sum(), x)
        found.append((own, results, grad, [layer.index for layer in each.h]))  # type: ignore[union-attr, operator]
    return found[0], found[1], model


def is_same(a: Any, b: Any) -> bool:
    """Whether two trees of tensors are equal, with the order of keys."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("uses", USES, ids=lambda uses: uses.__name__)
@pytest.mark.parametrize("flags", [{}, {3: 1, 0: 4}], ids=["empty", "filled"])
def test_a_dictionary_is_the_same_afterwards(uses: Any, flags: dict[int, Any]) -> None:
    """Whatever the layers do with it: values, order of keys, outputs, gradients."""
    want, got, _ = both(uses, flags)
    assert is_same(want, got)


@pytest.mark.parametrize("make", [OrderedDict, lambda: defaultdict(int), Counting])
@pytest.mark.parametrize("uses", [marks, reads_its_own, counts], ids=lambda uses: uses.__name__)
def test_dictionaries_of_other_classes(make: Any, uses: Any) -> None:
    """They have methods of their own."""
    want, got, _ = both(uses, make())
    assert is_same(want, got)
    assert getattr(want[0], "sets", 0) == getattr(got[0], "sets", 0)


@pytest.mark.parametrize("uses", [marks, reads_its_own], ids=lambda uses: uses.__name__)
def test_one_graph_serves_all_layers(uses: Any) -> None:
    """One for each state of its own key."""
    _, _, model = both(uses, {})
    assert len(fxguard.guard_of(model).plans) < LAYERS


def test_layers_of_a_cross_attention_are_named_one_by_one() -> None:
    """Though they share a graph."""
    torch.manual_seed(0)
    model = Net(marks)
    with torch.no_grad():
        model.h[4].linear.weight[1, 2] = torch.nan  # type: ignore[union-attr, index]
    guarded = fxguard.instrument(model)
    with pytest.raises(fxguard.NonFiniteError) as caught:
        guarded(torch.ones(3, WIDTH), {})
    assert "h.4.linear" in caught.value.report.verdict[0]


def test_whole_models_are_captured_as_ever() -> None:
    """Nothing is lifted where no layer runs by itself."""
    torch.manual_seed(0)
    plain = Net(counts)
    compiled = torch.compile(copy.deepcopy(plain), backend=fxguard.backend("eager"), fullgraph=True)
    want: dict[int, Any] = {}
    got: dict[int, Any] = {}
    x = torch.ones(3, WIDTH)
    assert torch.equal(plain(x, want), compiled(x, got))
    assert want == got

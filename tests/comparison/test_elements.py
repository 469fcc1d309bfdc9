"""What `compare` says of elements, held against torch itself."""

from __future__ import annotations

import copy
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard import compare
from fxguard.comparison._weights import difference_between

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Linear(8, 4)
    ).eval()


def test_own_and_inherited_errors() -> None:
    """Each is what torch gives for the same operands."""
    a, b = model(), model()
    with torch.no_grad():
        b[2].weight[3] += 0.5
        b[3].weight.neg_()
    found = compare(a, b, X)
    norm, linear, last = found.operations[2:5]
    with torch.no_grad():
        in_a, in_b = a[:3](X), b[:3](X)
        given, own, actual = a[3](in_a), b[3](in_a), b[3](in_b)
    assert found.first == norm
    assert norm.weights == ("2.weight: 1 of 32 elements differ",)
    assert norm.inherited is not None
    assert norm.inherited.absolute == 0
    assert linear.weights == ("3.weight: negated",)
    for apart, one, other in (
        (linear.own, given, own),
        (linear.inherited, own, actual),
        (linear.total, given, actual),
    ):
        assert apart is not None
        gap = float((one.double() - other.double()).abs().max())
        assert apart.absolute == gap
        assert apart.relative == pytest.approx(gap / float(one.abs().max()))
        cosine = torch.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0)
        assert apart.cosine == pytest.approx(float(cosine))
    assert not last.is_significant
    assert last.own is not None
    assert last.own.absolute == 0
    assert last.inherited is not None
    assert last.inherited.absolute > 0
    assert not found.agrees


def test_the_side_that_is_nearer_to_float64() -> None:
    """For outputs, gradients and operations: the float32 model, whichever it is."""
    low = model().to(torch.bfloat16)
    for found, side in ((compare(model(), low, X), "A"), (compare(low, model().float(), X), "B")):
        assert found.agrees, str(found)
        assert found.outputs[0].nearer == side
    found = compare(model(), model().to(torch.bfloat16), X)
    assert {each.nearer for each in found.gradients} == {"A"}
    wanted = model().double()
    for weight, each in zip(found.gradients, model().named_parameters(), strict=True):
        assert weight.title == each[0]
    generator = torch.Generator().manual_seed(0)
    output = wanted(X.double())
    output.backward(torch.randn(output.shape, generator=generator, dtype=torch.float64).float())
    a = model()
    output = a(X)
    generator = torch.Generator().manual_seed(0)
    output.backward(torch.randn(output.shape, generator=generator, dtype=torch.float64).float())
    for each in found.gradients:
        want = wanted.get_parameter(each.title).grad
        mine = a.get_parameter(each.title).grad
        assert want is not None
        assert mine is not None
        error = float((mine.double() - want).abs().max() / want.abs().max())
        assert each.errors is not None
        assert each.errors[0] == pytest.approx(error, rel=0.5)


class Tanh(torch.autograd.Function):
    """Its backward is right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh() ** 2)


class WrongTanh(torch.autograd.Function):
    """A tenth too much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh() ** 2) * 1.1


class Own(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function.apply(x)
        return result


class Cut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach() * 2 + x * 0.5


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + x * 0.5


def test_a_backward_that_differs() -> None:
    """The forward agrees; the operation whose backward differs is named."""
    a, b = model(), model()
    a[1], b[1] = Own(Tanh), Own(WrongTanh)
    found = compare(a, b, X)
    assert found.first is not None
    assert (found.first.part, found.first.module) == ("backward", "1")
    assert "0.1 apart" in found.first.reason
    assert not any(each.is_significant for each in found.operations)
    a[1] = Own(Tanh)
    assert compare(a, copy.deepcopy(a), X).agrees
    assert not compare(a, b, X, gradients=False).differs
    with torch.no_grad():
        assert compare(a, b, X).gradients == ()


def test_a_gradient_that_is_cut_off() -> None:
    a, b = model(), model()
    a[1], b[1] = Whole(), Cut()
    found = compare(a, b, X)
    assert found.first is not None
    assert found.first.heading == "1 detach (backward) (only in B)"


@pytest.mark.parametrize("inplace", [False, True])
def test_a_relu_on_the_other_side_of_0(inplace: bool) -> None:
    """Roundings decide between two derivatives. Neither gradient is worse for that."""
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    net = nn.Sequential(
        nn.Linear(16, 999), nn.BatchNorm1d(999), nn.ReLU(inplace), nn.Linear(999, 8)
    )
    low = copy.deepcopy(net).bfloat16()
    signs = [copy.deepcopy(each)[:2](x.to(each[0].weight.dtype)) > 0 for each in (net, low)]
    assert not torch.equal(*signs)
    for a, b, given in ((net, low, x), (low, net, x), (low, copy.deepcopy(low), x.bfloat16())):
        found = compare(a, b, given)
        assert found.agrees, str(found)
        assert len(found.gradients) == 6
        assert all(each.errors is not None for each in found.gradients)
        assert max(max(each.errors or ()) for each in found.gradients) < 0.1


def test_an_operation_of_one_model_alone() -> None:
    """It is named where what follows reads other values, and is none where it changes nothing."""
    for change, kind in ((torch.neg, "neg"), (lambda x: x.roll(1, -1), "roll")):
        a, b = model(), model()
        b[3].register_forward_hook(lambda module, inputs, output, change=change: change(output))
        for found, side in ((compare(a, b, X), "B"), (compare(b, a, X), "A")):
            assert found.first is not None
            assert (found.first.kind, found.first.module) == (kind, "3")
            assert found.first.only_in == side
    b = model()
    b[3].register_forward_hook(lambda module, inputs, output: output.neg().neg())
    assert compare(model(), b, X).agrees
    b = model()
    b[4].register_forward_hook(lambda module, inputs, output: -output)  # the last one
    found = compare(model(), b, X)
    assert found.first is not None
    assert found.first.kind == "neg"


def test_a_compiler_that_makes_something_else() -> None:
    """What a graph returned is held against its operations in eager mode."""

    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple(x * 1.01 for x in graph(*args))

    b = model()
    found = compare(b, torch.compile(model(), backend=wrong), X)
    assert found.first is not None
    assert (found.first.part, found.first.title) == ("compiled", "what graph 0 of B returned, 0")
    assert not any(each.is_significant for each in found.operations)
    assert "fused kernels do not exist, and are not compared" in " ".join(str(found).split())
    assert compare(b, torch.compile(model(), backend="eager"), X).agrees


class Breaks(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.inner, self.breaks = model(), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner[:2](x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.inner[2:](x)


def test_graphs_that_break_at_other_places() -> None:
    """Operations are compared over all graphs of both models."""
    for first, second in ((False, True), (True, False), (True, True)):
        a, b = Breaks(first), Breaks(second)
        found = compare(a, b, X)
        assert found.agrees, str(found)
        assert len(found.operations) == 5
        with torch.no_grad():
            b.inner[3].weight.neg_()
        found = compare(a, b, X)
        assert found.first is not None
        assert found.first.weights == ("inner.3.weight: negated",)


def test_what_is_left_behind() -> None:
    """Gradients of weights and inputs, buffers and the random state are as they were."""
    a = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).train()
    b = copy.deepcopy(a)
    x = X.clone().requires_grad_()
    a[0].weight.grad = kept = torch.ones(8, 16)
    states = [copy.deepcopy(each.state_dict()) for each in (a, b)]
    random = torch.get_rng_state()
    found = compare(a, b, x)
    assert found.agrees, str(found)
    assert "input 0" in {each.title for each in found.gradients}
    assert a[0].weight.grad is kept
    assert torch.equal(kept, torch.ones(8, 16))
    assert b[0].weight.grad is None
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), random)
    for each, state in zip((a, b), states, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in each.state_dict().items())
        assert not list(each._forward_hooks)
        assert "forward" not in each.__dict__


def test_what_could_not_be_compared_is_said() -> None:
    """ "No difference" is said of what was compared only."""

    class Between(nn.Module):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.between = Between()

        def forward(self, x: Tensor) -> Tensor:
            return self.between(x + 1) - 3

    found = compare(Around(), Around(), X)
    assert found.agrees
    assert any(why == "they ran between captured graphs" for _, why in found.not_compared)
    assert "they ran between captured graphs" in str(found)


def test_a_tolerance() -> None:
    """In place of float64's judgement."""
    a, b = model(), model().to(torch.bfloat16)
    assert compare(a, b, X, tolerance=0.5).agrees
    found = compare(a, b, X, tolerance=1e-6)
    assert found.first is not None
    assert found.first.title == "0 linear"
    assert "over the tolerance of 1e-06" in found.first.reason
    with pytest.raises(fxguard.FxguardError, match="0 or more"):
        compare(a, b, X, tolerance=-1.0)


W = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w, ""),
        (lambda w: -w, "negated"),
        (lambda w: w * (1 + 2**-6), "scaled by 1.01"),
        (lambda w: w.roll(2, 0), "rolled by 2 along axis 0"),
        (lambda w: w.flip(1), "flipped along axis 1"),
        (lambda w: w.flatten()[torch.randperm(48)].view(8, 6), "permuted: the same elements"),
        (lambda w: w.index_fill(0, torch.tensor(3), 9.0), "6 of 48 elements differ"),
        (lambda w: w[:4], "shape [8, 6] against [4, 6]"),
        (lambda w: w * (1 + 1e-8), ""),
    ],
)
def test_how_a_weight_differs(dtype: torch.dtype, change: Any, said: str) -> None:
    """In the coarser dtype, whichever side has it."""
    found = difference_between(W, change(W).to(dtype))
    assert found.startswith(said)
    assert bool(found) == bool(said)
    assert bool(difference_between(W.to(dtype), change(W))) == bool(said)


def test_a_page(tmp_path: Path) -> None:
    """Both curves, a dot for each operation, and the name of the first significant one, escaped."""
    a, b = model(), model()
    b[3].register_forward_hook(lambda module, inputs, output: -output)
    found = compare(a, b, X)
    found.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    drawing = ElementTree.fromstring(re.search(r"<svg.*</svg>", text, re.DOTALL)[0])  # type: ignore[index]
    curves = {path.get("class"): path.get("d", "") for path in drawing.iter("path")}
    assert curves.keys() == {"own", "inherited"}
    assert all(d.count("L") == len(found.operations) - 1 for d in curves.values())
    assert len(list(drawing.iter("circle"))) == 2 * len(found.operations)
    words = [each.text or "" for each in drawing.iter("text")]
    assert any(each.startswith("first significant: 3 neg (only in B)") for each in words)
    assert "script" not in text
    assert found.verdict[0] in text
    healthy = compare(a, model(), X)
    healthy.to_html(tmp_path / "healthy.html")
    assert "first significant" not in (tmp_path / "healthy.html").read_text()


def test_tables_and_json() -> None:
    """Everything that was compared, as strict JSON too."""
    a, b = model(), model().half()
    with torch.no_grad():
        a[3].weight.mul_(1e6)
        b[3].weight.fill_(math.inf)
    found = compare(a, b, X)
    data = json.loads(found.to_json())
    assert data["first"]["title"] == "3 linear"
    assert data["first"]["own"]["absolute"] == "inf"
    assert len(data["operations"]) == len(found.operations)
    assert len(found.to_table().splitlines()) == 2 + found.compared
    assert "<table>" in found._repr_html_()


def test_weights_that_no_captured_operation_reads_are_compared() -> None:
    """TorchDynamo captures no LSTM: its weights and outputs are compared all the same."""
    model, x = nn.LSTM(4, 8, batch_first=True), torch.randn(2, 5, 4)
    assert fxguard.compare(model, copy.deepcopy(model), x).agrees
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.weight_ih_l0.neg_()
    found = fxguard.compare(model, other, x)
    assert not found.agrees
    assert found.first is not None
    assert found.first.heading == "weight weight_ih_l0"
    assert found.first.weights == ("weight_ih_l0: negated",)
    assert any(each.part == "output" and each.is_significant for each in found.significant)
    assert not any(line.startswith("A and B agree") for line in found.verdict)
    assert "from float64" not in str(found), "nobody computed with it in float64"


def test_outputs_are_judged_where_operations_were_not() -> None:
    """What runs between graphs may be why they differ; roundings are not."""

    class Times(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return torch.compiler.disable(torch.mul)(x, self.factor)

    x = torch.randn(8, 8)
    assert fxguard.compare(Times(2.0), Times(2.0 * (1 + 1e-7)), x).agrees
    found = fxguard.compare(Times(2.0), Times(2.0 * (1 + 1e-6)), x)
    assert found.outcome == "not compared"
    assert found.verdict[0].startswith("it is not known whether A and B agree: output 0 is ")
    assert not found.agrees
    assert not found.differs
    found = fxguard.compare(Times(2.0), Times(3.0), x)
    assert [each.heading for each in found.significant] == ["output 0"]
    assert "not every operation was compared" in found.significant[0].reason
    assert fxguard.compare(Times(2.0), Times(3.0), x, tolerance=0.6).agrees


def test_operations_inside_torch_func_are_not_compared_by_themselves() -> None:
    """Their tensors do not outlive them; what the models return is compared all the same."""

    class Mapped(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.function = nn.Linear(16, 8), function

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.vmap(lambda row: self.function(row) * 2)(self.linear(x))
            return result

    a = Mapped(torch.sin)
    for b in (a, Mapped(torch.sin), Mapped(torch.sin).to(torch.bfloat16)):
        found = compare(a, b, X)
        assert found.agrees, str(found)
        assert "they run inside torch.func" in dict(found.not_compared).values()
        assert [each.title for each in found.operations] == ["linear linear"]
    found = compare(a, Mapped(torch.cos), X)
    assert found.first is not None
    assert found.first.kind == "cos"


def test_another_number_of_outputs_is_a_divergence() -> None:
    class First(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (x + 1,)

    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x + 1, x + 2

    found = fxguard.compare(First(), Both(), torch.ones(3))
    assert not found.agrees
    assert "A returned 1 tensors, B 2" in str(found)


def test_operands_that_were_made_between_graphs() -> None:
    """In another dtype they are rounded, and what reads them is not blamed for that."""

    class Between(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.weight, self.factor = nn.Parameter(torch.ones(1)), factor

        def forward(self, x: Tensor) -> Tensor:
            x = torch.compiler.disable(torch.mul)(x, self.weight)
            return torch.nn.functional.avg_pool1d(x, 2) * self.factor

    found = compare(Between(2.0), Between(2.0).to(torch.bfloat16), X, gradients=False)
    assert not found.differs, str(found)
    found = compare(Between(2.0), Between(2.5).to(torch.bfloat16), X, gradients=False)
    assert found.first is not None
    assert found.first.kind == "mul"

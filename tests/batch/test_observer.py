"""What TorchDynamo leaves to Python is seen, named and blamed like everything else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxguard
from support import zoo


class Broken(nn.Module):
    """A graph break inside a submodule, with operations on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = Breaking()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x) * 2) + 1)


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(torch.sin(x))
        torch._dynamo.graph_break()
        return torch.log(x.abs() - x.abs())


def test_names_stay_qualified_after_a_graph_break() -> None:
    """Frames of all graphs carry full names, in order; one call is one batch."""
    model = fxguard.instrument(Broken(), on_detect=(reports := []).append)
    model(torch.randn(2, 4))
    guard = fxguard.guard_of(model)
    assert guard.batch_number == 1
    assert [frame.title for frame in guard.frames()] == [
        *["first Linear", "mul", "block sin", "block.inner Linear", "block abs", "block abs"],
        *["block sub", "block log", "block Breaking", "add", "last Linear", "Broken"],
    ]
    origin = reports[0].origins[0]
    assert origin.message.startswith("log in block made -inf (test_observer.py:")
    assert reports[0].frames[-1].title == "block log"


def test_instances_that_share_code_after_a_break_are_told_apart() -> None:
    """TorchDynamo may run one block's graph for another block: the names are those that ran."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Breaking() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) * 0 + 1 if block is not self.blocks[-1] else block(x)
            return x

    class Fine(Breaking):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(torch.sin(x))
            torch._dynamo.graph_break()
            return self.inner(x)

    model = Stack()
    model.blocks = nn.ModuleList(Fine() for _ in range(3))
    fxguard.instrument(model)
    for _ in range(2):
        model(torch.randn(2, 4))
        names = [f.name for f in fxguard.guard_of(model).frames() if f.kind == "Linear"]
        assert names == [f"blocks.{i}.inner" for i in (0, 0, 1, 1, 2, 2)]
    with torch.no_grad():
        model.blocks[1].inner.weight[0, 0] = torch.nan
    with pytest.raises(fxguard.NonFiniteError, match=r"weight blocks\.1\.inner\.weight turned NaN"):
        model(torch.randn(2, 4))


def test_a_value_keeps_its_cause_across_graphs() -> None:
    """What overflowed before a break is not blamed on the operation after it."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            bad = x / 0
            torch._dynamo.graph_break()
            return bad + 1

    model = fxguard.instrument(Model(), on_detect=(reports := []).append)
    model(torch.ones(3))
    assert [origin.what for origin in reports[0].origins] == ["div"]


def test_an_lstm_and_what_follows_is_seen() -> None:
    """TorchDynamo runs nn.LSTM and the rest of that forward in Python."""
    model = fxguard.instrument(zoo.ZOO["lstm"].model())
    args, _ = zoo.ZOO["lstm"].inputs(torch.float32, False)
    model(*args)
    guard = fxguard.guard_of(model)
    titles = [frame.title for frame in guard.frames()]
    assert titles == [
        *["before Linear", "tanh", "lstm zeros", "lstm zeros", "lstm lstm", "lstm LSTM"],
        *["norm LayerNorm", "mul", "add", "head Linear", "Lstm"],
    ]
    assert "between graphs" in guard.coverage()
    with torch.no_grad():
        model.lstm.weight_hh_l1.fill_(torch.nan)
    with pytest.raises(fxguard.NonFiniteError, match=r"weight lstm\.weight_hh_l1 turned NaN"):
        model(*args)


@pytest.mark.parametrize("train", [True, False])
def test_a_fault_inside_nn_transformer_encoder_is_found(train: bool) -> None:
    """In training and in evaluation without gradients, where a fused kernel runs."""
    entry = zoo.ZOO["encoder"]
    args, kwargs = entry.inputs(torch.float32, False)
    model = fxguard.instrument(entry.model(train=train))
    with torch.set_grad_enabled(train):
        model(*args, **kwargs)
        with torch.no_grad():
            model.inner.layers[1].linear2.weight.fill_(3e38)
        with pytest.raises(fxguard.NonFiniteError) as caught:
            model(*args, **kwargs)
    origin = caught.value.report.origins[0]
    assert origin.frame.name.startswith("inner.layers.1")
    assert origin.problem == "inf" or not train


def test_a_full_graph_pays_no_observer() -> None:
    """A model that is one graph has nothing between graphs."""
    model = fxguard.instrument(zoo.ZOO["bert"].model())
    args, kwargs = zoo.ZOO["bert"].inputs(torch.float32, True)
    for _ in range(2):
        model(*args, **kwargs)
    assert "between" not in fxguard.guard_of(model).coverage()


def test_without_torchdynamo_everything_is_seen_by_the_observer() -> None:
    """When TorchDynamo is told to stand aside, every operation is still checked."""
    model = fxguard.instrument(Broken(), on_detect=(reports := []).append)
    with torch.compiler.set_stance("force_eager"):
        model(torch.randn(2, 4))
    assert "in 0 graphs" in fxguard.guard_of(model).coverage()
    assert reports[0].origins[0].message.startswith("log in block made -inf (test_observer.py:")
    assert reports[0].origins[0].neginf_count == 8


@pytest.mark.parametrize("has_options", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_many_shapes_do_not_end_the_checks(
    has_options: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past TorchDynamo's own recompile limit, 8, graphs are still captured and checked."""
    if not has_options:  # torch.compile had no recompile_limit: the configuration is changed
        compile_ = torch.compile
        monkeypatch.setattr(
            torch,
            "compile",
            lambda model, *, backend, fullgraph: compile_(
                model, backend=backend, fullgraph=fullgraph
            ),
        )

    class Shapes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(int(x.shape[0]), -1).mul(2).exp()

    model = fxguard.instrument(Shapes(), on_detect=(reports := []).append)
    for size in range(1, 14):
        torch._dynamo.mark_static(x := torch.full((size, size), 1e3))
        model(x)
    assert len(reports) == 13
    assert "in 13 graphs" in fxguard.guard_of(model).coverage()

"""Every operation is in the frames, checked against an oracle that runs the model eagerly."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fxguard
from fxguard.graph.tables import MOVES, SELECTS
from support import zoo

CASTS = {"to", "float", "half", "bfloat16", "double", "type", "type_as"}


class Oracle(TorchFunctionMode):
    """Measures every floating-point result of every torch function that Python calls.

    The documented omissions are left out: operations that only move data (views, slices,
    concatenations), and casts to the dtype that the tensor has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = getattr(args[0], "dtype", None) if args else None
        result = func(*args, **(kwargs or {}))
        name = func.__name__.strip("_")
        if name in MOVES | SELECTS | {"get"}:
            return result
        for tensor in zoo.tensors_in(result):
            if tensor.is_floating_point() and not (name in CASTS and tensor.dtype == dtype):
                self.seen.append((name, numbers_of(tensor)))
        return result


def numbers_of(tensor: Tensor) -> str:
    if not tensor.numel():
        return "empty"
    magnitude = tensor.detach().double().abs()
    return f"{magnitude.min():.2e} {magnitude.max():.2e}"


def normal(name: str) -> str:
    """TorchDynamo and Python call some operations by different names."""
    name = {"iadd": "add", "isub": "sub", "imul": "mul"}.get(name, name)
    return name.strip("_").removesuffix("_fallback")


def operations_in(guard: fxguard.types.Guard) -> list[tuple[str, str]]:
    """Name and numbers of every output of every operation that was measured and framed."""
    from fxguard.batch.assemble import assemble

    flow = assemble(guard.recorder.last_batch)
    found = []
    for frame in flow.frames:
        if frame.step is None:
            continue
        step = flow.steps[frame.step]
        for row in frame.rows:
            if row.label.startswith("output") and row.value in step.outputs:
                stat = flow.ranges[row.value]
                text = stat if isinstance(stat, str) else f"{stat.abs_min:.2e} {stat.abs_max:.2e}"
                found.append((step.kind, text))
    return found


ONLY_IN_PYTHON = ("t5", "bert")


def in_ci(name: str, captured: bool, masked: bool) -> bool:
    """Every model captured in one dtype, and in Python in the other; small ones in both."""
    if name in zoo.PLAIN:
        return True
    return captured != masked and not (captured and name in ONLY_IN_PYTHON)


VARIANTS = [
    pytest.param(
        *(name, stance, dtype, masked),
        id=f"{name}-{'captured' if captured else 'in Python'}-{str(dtype)[6:]}",
        marks=() if in_ci(name, captured, masked) else pytest.mark.campaign,
    )
    for name in zoo.ZOO
    for stance, captured in (("default", True), ("force_eager", False))
    for dtype, masked in ((torch.float32, False), (torch.bfloat16, True))
]


@pytest.mark.parametrize(("name", "stance", "dtype", "masked"), VARIANTS)
def test_frames_hold_every_result_of_the_oracle(
    name: str, stance: str, dtype: torch.dtype, masked: bool
) -> None:
    """Same operations, same order, same numbers; nothing is missing and nothing is invented."""
    entry = zoo.ZOO[name]
    if masked and not entry.has_mask:
        masked = False
    args, kwargs = entry.inputs(dtype, masked)
    model = entry.model(dtype, train=True)
    torch.manual_seed(3)
    with Oracle() as oracle:
        model(*args, **kwargs)

    model = fxguard.instrument(entry.model(dtype, train=True))
    torch.manual_seed(3)
    with torch.compiler.set_stance(stance):
        model(*args, **kwargs)
    assert stance == "default" or "in 0 graphs" in fxguard.guard_of(model).coverage()
    found = operations_in(fxguard.guard_of(model))

    if name == "in_place":
        # x[i] = y has no result for the oracle to see.
        assert "setitem" in [kind for kind, _ in found]
        found = [row for row in found if row[0] != "setitem"]
    names = [(normal(kind), numbers) for kind, numbers in found]
    assert names == [(normal(kind), numbers) for kind, numbers in oracle.seen]
    assert len(names) >= 4


class Ops(nn.Module):
    """One of each: function, method, operator, module, in-place, tuple output, cast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(x)
        y = y.sigmoid()
        y = y * 3 - 1
        y = self.linear(y)
        y = y.clone().add_(2)
        values, _ = y.max(dim=0)
        low, high = y.aminmax()
        return (values + low + high).half().float()


def test_call_function_call_method_and_call_module_are_framed() -> None:
    """Nodes of all three kinds get a frame, with the user's line."""
    model = fxguard.instrument(Ops())
    model(torch.randn(3, 4))
    frames = fxguard.guard_of(model).frames()
    kinds = [frame.kind for frame in frames]
    assert kinds == [
        *["exp", "sigmoid", "mul", "sub", "Linear", "add_", "max", "aminmax"],
        *["add", "add", "half", "float", "Ops"],
    ]
    exp = frames[0]
    assert exp.source is not None
    assert exp.source.file == __file__
    assert exp.source.code == "y = torch.exp(x)"
    linear = frames[4]
    assert [row.label for row in linear.rows] == ["weight", "bias", "input[0]", "output"]
    assert linear.source is not None
    assert linear.source.code == "y = self.linear(y)"
    assert [row.label for row in frames[7].rows] == ["input[0]", "output[0]", "output[1]"]


def test_an_in_place_operation_shows_what_it_wrote() -> None:
    """Not what a later operation overwrote; and later readers see the new numbers."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            y.mul_(100)
            z = y + 0
            y.zero_()
            return z + y

    model = fxguard.instrument(Model())
    model(torch.tensor([1.0, 2.0]))
    rows = {
        (f.kind, row.label): row.abs_max for f in fxguard.guard_of(model).frames() for row in f.rows
    }
    assert rows[("mul", "output")] == 2
    assert rows[("mul_", "input[0]")] == 2
    assert rows[("mul_", "output")] == 200
    assert ("zero_", "input[0]") not in rows  # it does not read what was there
    assert rows[("zero_", "output")] == 0
    assert rows[("add", "input[1]")] == 0


def test_writing_part_of_a_tensor_changes_the_whole() -> None:
    """A bad value written through a view is seen in the whole, and blamed on the write."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            y[:, 0].div_(0)
            return y + 1

    model = fxguard.instrument(Model(), on_detect=(reports := []).append)
    model(torch.ones(2, 3))
    (origin,) = reports[0].origins
    assert origin.what == "div_"
    assert origin.posinf_count == 2


def test_a_slice_of_a_bad_tensor_may_be_clean() -> None:
    """Slices are measured on their own: what overflows behind one is the cause, not carried on."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            logs = torch.log(x)  # -inf in the first element, which nobody uses
            return torch.exp(logs[1:] * 1000)

    model = fxguard.instrument(Model(), on_detect=(reports := []).append)
    model(torch.tensor([0.0, 2.0, 3.0]))
    assert [origin.what for origin in reports[0].origins] == ["exp"]
    assert [note.what for note in fxguard.guard_of(model).notes] == ["log"]


@pytest.mark.parametrize("operation", [operator.mul, operator.add, torch.matmul])
def test_a_bad_weight_is_told_from_a_bad_product(operation: Any) -> None:
    """The same operation is blamed when it overflows, and not when its weight was bad before."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((2, 2), 3e38))

        def forward(self, x: Tensor) -> Tensor:
            return operation(x, self.scale)

    model = fxguard.instrument(Model(), on_detect=(reports := []).append)
    model(torch.full((2, 2), 3e38))
    assert reports[0].origins[0].what == operation.__name__
    with torch.no_grad():
        model.scale.fill_(torch.nan)
    model(torch.ones(2, 2))
    assert reports[1].origins[0].what == "weight scale"
    with torch.no_grad():
        model.scale.fill_(1.0)
    model(torch.ones(2, 2))
    assert len(reports) == 2

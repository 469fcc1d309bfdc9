"""Bad input gets a clear error and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard import FxguardError, NonFiniteError, backend, guard_of, instrument, remove

ROOT = Path(__file__).resolve().parents[2]


class Model(nn.Module):
    """Two operations, of which the second makes -inf out of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x * self.scale)


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that a module and its submodules hold, containers by content."""
    return {
        f"{name}/{key}": dict(value) if isinstance(value, dict) else value
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
    }


def refused(call: Callable[[], Any], model: nn.Module, words: str) -> None:
    """The call fails with an error of fxguard that holds these words; the model is as before."""
    before = state(model)
    with pytest.raises(FxguardError) as raised:
        call()
    assert words in str(raised.value)
    assert state(model) == before


# Options.

BAD_OPTIONS: list[tuple[str, Any, str]] = [
    ("max_frames_to_save", 0, "0"),
    ("max_frames_to_save", -1, "-1"),
    ("max_frames_to_save", True, "True"),
    ("max_frames_to_save", 21.0, "21.0"),
    ("max_frames_to_save", "21", "'21'"),
    ("max_frames_to_save", None, "None"),
    ("trace_batch_nums", 3, "3"),
    ("trace_batch_nums", "12", "'12'"),
    ("trace_batch_nums", [-1], "-1"),
    ("trace_batch_nums", [1, True], "True"),
    ("trace_batch_nums", [1.0], "1.0"),
    ("trace_batch_nums", ["1"], "'1'"),
    ("abort_after_batch_num", -1, "-1"),
    ("abort_after_batch_num", True, "True"),
    ("abort_after_batch_num", 1.5, "1.5"),
    ("abort_after_batch_num", "1", "'1'"),
    ("on_detect", "explode", "'explode'"),
    ("on_detect", None, "None"),
    ("granularity", "ops", "'ops'"),
    ("granularity", None, "None"),
    ("ignore", "decoder.*", "'decoder.*'"),
]
UNCHECKED_OPTIONS = [
    ("trace_batch_nums", None, "trace_batch_nums"),
    ("trace_batch_nums", 1.5, "1.5"),
    ("abort_after_batch_num", False, "False"),
    ("abort_after_batch_num", 0.0, "0.0"),
    ("abort_after_batch_num", "", "''"),
    ("ignore", None, "None"),
    ("ignore", 3, "3"),
    ("ignore", [3], "3"),
]
OPTIONS = [*BAD_OPTIONS, *UNCHECKED_OPTIONS]


@pytest.mark.parametrize(("option", "value", "words"), OPTIONS)
def test_bad_option_is_refused(option: str, value: Any, words: str) -> None:
    """An option that cannot work is refused by name of its value, before the model is touched."""
    model = Model()
    refused(lambda: instrument(model, **{option: value}), model, words)


@pytest.mark.parametrize(("option", "value", "words"), OPTIONS)
def test_backend_refuses_the_same_options(option: str, value: Any, words: str) -> None:
    """`backend` has the options of `instrument`, and refuses what that refuses."""
    refused(lambda: backend("eager", **{option: value}), Model(), words)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [case for case in BAD_OPTIONS if case[0] in ("max_frames_to_save", "abort_after_batch_num")]
    + [("trace_batch_nums", 3, "3")]
    + [("trace_batch_nums", [-1], "-1")],
)
def test_drop_in_refuses_the_same_options(option: str, value: Any, words: str) -> None:
    """The drop-in refuses what `instrument` refuses."""
    model = Model()
    refused(lambda: fxguard.DebugUnderflowOverflow(model, **{option: value}), model, words)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_frames_to_save", 1),
        ("trace_batch_nums", []),
        ("trace_batch_nums", range(5, 7)),
        ("trace_batch_nums", {5}),
        ("abort_after_batch_num", 5),
        ("on_detect", print),
        ("on_detect", "warn"),
        ("granularity", "module"),
        ("ignore", ["decoder.*", "*:log"]),
        ("strict", True),
    ],
)
def test_good_option_is_taken(option: str, value: Any) -> None:
    """The clean twin: what is documented is taken, and the model computes what it computed."""
    model = instrument(Model(), **{option: value})
    assert model(torch.tensor([0.5])).tolist() == [0.0]


def test_batch_numbers_from_a_generator_are_traced(capsys: Any) -> None:
    """Batch numbers may come from any iterable."""
    model = instrument(Model(), trace_batch_nums=(number for number in [0]))
    model(torch.tensor([0.5]))
    assert "*** Starting batch number=0 ***" in capsys.readouterr().out


# Models.


@pytest.mark.parametrize("value", [None, 3, "model", Model, torch.relu, {"model": 1}])
def test_what_is_no_module_is_refused(value: Any) -> None:
    """Anything but a module is refused with its type; a class is no module."""
    with pytest.raises(FxguardError, match=rf"nn\.Module, got {type(value).__name__}$"):
        fxguard.DebugUnderflowOverflow(value)
    if not callable(value):
        with pytest.raises(FxguardError, match=rf"or a function, got {type(value).__name__}$"):
            instrument(value)


def test_second_instrument_is_refused() -> None:
    """Instrumenting twice says so and how to undo it; the first guard goes on."""
    model = instrument(Model())
    guard = guard_of(model)
    refused(lambda: instrument(model), model, "instrumented already")
    refused(lambda: fxguard.DebugUnderflowOverflow(model), model, "fxguard.remove")
    assert guard_of(model) is guard
    with pytest.raises(NonFiniteError):
        model(torch.zeros(1))


def test_model_can_be_instrumented_again_after_remove() -> None:
    """The clean twin: after remove it is a model like any other."""
    model = instrument(remove(instrument(Model())))
    with pytest.raises(NonFiniteError):
        model(torch.zeros(1))


def test_parent_of_an_instrumented_module_is_refused() -> None:
    """A model with an instrumented part is refused, and the part is named."""
    parent = nn.Sequential(nn.ReLU(), nn.Sequential(Model()))
    instrument(parent[1][0])
    refused(lambda: instrument(parent), parent, "'1.0'")
    remove(parent[1][0])
    assert instrument(parent)(torch.tensor([0.5])).tolist() == [0.0]


def test_child_of_an_instrumented_module_is_refused() -> None:
    """A part of an instrumented model is refused: it is being checked already."""
    parent = instrument(nn.Sequential(Model()))
    refused(lambda: instrument(parent[0]), parent, "instrumented already")


def test_data_parallel_is_refused() -> None:
    """nn.DataParallel is refused with the class to use in its place; what it wraps is taken."""
    wrapped = Model()
    model = nn.DataParallel(wrapped)
    refused(lambda: instrument(model), model, "DistributedDataParallel")
    assert instrument(wrapped) is wrapped


def test_compiled_model_is_refused() -> None:
    """The result of torch.compile is refused with the right order; that order is taken."""
    model = torch.compile(Model(), backend="eager")
    refused(lambda: instrument(model), model, "torch.compile(fxguard.instrument(model))")
    compiled = torch.compile(instrument(Model()), backend="eager")
    with pytest.raises(NonFiniteError):
        compiled(torch.zeros(1))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(1))]
)
def test_torchscript_is_refused(make: Any) -> None:
    """A scripted or traced module has no Python to capture."""
    model = make(Model())
    with pytest.raises(FxguardError, match="TorchScript"):
        instrument(model)
    assert model(torch.tensor([0.5])).tolist() == [0.0]


def test_plain_model_has_no_guard() -> None:
    """remove and guard_of say that a model is not instrumented; so does a second remove."""
    model = Model()
    refused(lambda: remove(model), model, "Model is not instrumented")
    refused(lambda: guard_of(model), model, "Model is not instrumented")
    remove(instrument(model))
    refused(lambda: remove(model), model, "Model is not instrumented")


@pytest.mark.parametrize("value", [None, 3])
def test_guard_of_something_else(value: Any) -> None:
    """remove and guard_of name the type of what is no model."""
    for call in (remove, guard_of):
        with pytest.raises(FxguardError, match=f"{type(value).__name__} is not instrumented"):
            call(value)


def test_a_backend_is_not_copied() -> None:
    """With lightning imported, `torch.compile` copies its arguments; reports have one place."""
    one = backend("eager")
    assert copy.deepcopy({"backend": one})["backend"] is one


def test_unknown_backend_is_refused_at_once() -> None:
    """An unknown inner backend is refused when it is named, not at the first batch."""
    with pytest.raises(torch._dynamo.exc.InvalidBackend, match="nope"):
        backend("nope")
    compiled = torch.compile(Model(), backend=backend("eager"))
    assert compiled(torch.tensor([0.5])).tolist() == [0.0]


@pytest.mark.parametrize("inner", [None, 3])
def test_inner_backend_has_to_be_callable(inner: Any) -> None:
    """What is neither a name nor a callable is refused when it is given."""
    with pytest.raises(FxguardError):
        backend(inner)


@pytest.mark.parametrize("value", [Model(), None])
def test_insert_checks_needs_a_graph(value: Any) -> None:
    """A module that is no graph is refused with its type."""
    with pytest.raises(FxguardError, match=type(value).__name__):
        fxguard.insert_checks(value)

"""There is one list of options: the fields of ``Options``."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxguard
from fxguard.options import InstrumentOptions, Options
from support.needs import OF_PYTHON_3_13_0

# What a compiler's backend cannot do: it has no model to write of, and no batch of all ranks.
NOT_OF_BACKENDS = {
    "trace_to",
    "history",
    "history_weights",
    "stop_at_event",
    "recheck",
    "backward",
    "loss_scale",
    "sync_ranks",
}


@pytest.mark.parametrize(
    ("function", "missing"), [(fxguard.instrument, set()), (fxguard.backend, NOT_OF_BACKENDS)]
)
def test_functions_take_what_is_in_the_list(
    function: Callable[..., Any], missing: set[str]
) -> None:
    """Names and defaults of the keyword arguments are those of the fields."""
    parameters = inspect.signature(function).parameters.values()
    taken = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    listed = {f.name: f.default for f in dataclasses.fields(Options) if f.name not in missing}
    assert taken == listed


def test_a_type_checker_knows_each_option_of_functions_that_pass_them_on() -> None:
    """Names and types are those of the fields, and of ``instrument``'s arguments."""
    listed = {field.name: field.type for field in dataclasses.fields(Options)}
    passed_on = {
        name: kind.__forward_arg__ for name, kind in InstrumentOptions.__annotations__.items()
    }
    taken = inspect.signature(fxguard.instrument).parameters.values()
    assert passed_on == listed
    assert {p.name: p.annotation for p in taken if p.kind is p.KEYWORD_ONLY} == listed


def test_options_are_given_by_name() -> None:
    """A new option in the middle of the list shifts no other one."""
    with pytest.raises(TypeError, match="positional"):
        Options(21)  # type: ignore[misc]


@pytest.mark.parametrize("name", ["strict", "replay", "backward", "sync_ranks"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_switch_is_true_or_false(name: str, value: Any) -> None:
    """``strict="no"`` is refused, with the value: it would count as true."""
    with pytest.raises(
        fxguard.FxguardError, match=f"{name} has to be True or False, got {value!r}"
    ):
        fxguard.instrument(torch.nn.Linear(2, 2), **{name: value})


class Logs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(self.block(x) + 1)


@pytest.mark.parametrize(
    ("glob", "message"),
    [
        ("decoder.*", "ignore='decoder.*' names no module of this Logs"),
        ("block.?:log", "ignore='block.?:log' names no operation of the first batch of this Logs"),
        ("blok:relu", "ignore='blok:relu' names no operation of the first batch of this Logs"),
    ],
)
def test_a_glob_that_names_nothing_is_warned_of_once(glob: str, message: str) -> None:
    """After the first batch, at the line that called the model."""
    model = fxguard.instrument(Logs(), ignore=[glob, "block.0"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", OF_PYTHON_3_13_0)
        model(torch.ones(1, 2)), model(torch.ones(1, 2))
    assert [(str(w.message), w.filename) for w in caught] == [(message, __file__)]


@pytest.mark.parametrize("glob", ["block.*", "block", "*:log", "block.1:*", "*"])
def test_a_glob_that_names_something_is_not_warned_of(glob: str) -> None:
    """The clean twin: modules, operations, in graphs and between graphs."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", OF_PYTHON_3_13_0)
        fxguard.instrument(Logs(), ignore=[glob])(torch.ones(1, 2))
        with torch.compiler.set_stance("force_eager"):
            fxguard.instrument(Logs(), ignore=[glob])(torch.ones(1, 2))

"""There is one list of options: the fields of ``Options``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxguard
from fxguard.options import Options

# What a compiler's backend cannot do: it has no model to write of, and no batch of all ranks.
NOT_OF_BACKENDS = {"trace_to", "sync_ranks"}


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


def test_options_are_given_by_name() -> None:
    """A new option in the middle of the list shifts no other one."""
    with pytest.raises(TypeError, match="positional"):
        Options(21)  # type: ignore[misc]


@pytest.mark.parametrize("name", ["strict", "replay", "sync_ranks"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_switch_is_true_or_false(name: str, value: Any) -> None:
    """``strict="no"`` is refused, with the value: it would count as true."""
    with pytest.raises(
        fxguard.FxguardError, match=f"{name} has to be True or False, got {value!r}"
    ):
        fxguard.instrument(torch.nn.Linear(2, 2), **{name: value})

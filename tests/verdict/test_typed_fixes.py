"""What fixes say of functions of torch is true: their arguments, and where they have a gradient."""

from __future__ import annotations

import contextlib
import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn

from fxguard.advice import _divisor_rules, _kinds, _overflow_rules
from fxguard.graph.poles import LOSSES_OF_TARGETS

# What a fix names has to be something that can be typed: keyword arguments of these functions.
TAKEN = {
    "eps": (
        _divisor_rules._NORMS | {"poisson_nll_loss"},
        _divisor_rules._WITHOUT_EPS | {"weight_norm"},
    ),
    "dtype": (_overflow_rules._TAKE_DTYPE, _kinds.REDUCED - _overflow_rules._TAKE_DTYPE),
    "correction": (frozenset({"std", "std_mean", "var", "var_mean", "cov"}), frozenset()),
    "zero_infinity": (frozenset({"ctc_loss"}), frozenset()),
    "reduction": (LOSSES_OF_TARGETS - {"linear_cross_entropy"}, frozenset()),
}


def documented(name: str) -> str:
    """The signature of a function, or what its documentation says of its arguments."""
    function = getattr(nn.functional, name, None) or getattr(torch, name, None)
    if name == "weight_norm":
        function = nn.utils.parametrizations.weight_norm
    with contextlib.suppress(ValueError):
        return str(inspect.signature(function))
    return str(function.__doc__).partition("Args")[0].partition("Keyword")[0]


@pytest.mark.parametrize("argument", TAKEN)
def test_what_a_fix_names_can_be_typed(argument: str) -> None:
    """Functions whose fix names a keyword take it; the others do not, and their fix is another."""
    taken, not_taken = TAKEN[argument]
    for name in taken:
        assert re.search(rf"\b{argument}\b", documented(name)), name
    for name in not_taken:
        assert not re.search(rf"\b{argument}\b", documented(name)), name


@pytest.mark.parametrize(
    ("whole", "values"),
    [
        (torch.linalg.eigh, torch.linalg.eigvalsh),
        (torch.linalg.eig, torch.linalg.eigvals),
        (torch.linalg.svd, torch.linalg.svdvals),
    ],
)
def test_what_is_said_of_values_alone_is_true(whole: Any, values: Any) -> None:
    """Where two are equal, the gradient of the vectors is not finite, and that of the values is."""
    for is_alone, function in ((False, whole), (True, values)):
        matrix = torch.eye(3, dtype=torch.float64, requires_grad=True)
        result = function(matrix)
        vectors = result if is_alone else next(x for x in result if x.dim() == 2)
        weights = torch.arange(1.0, vectors.numel() + 1).view_as(vectors)
        (vectors * weights).abs().sum().backward()
        assert matrix.grad is not None
        assert bool(matrix.grad.isfinite().all()) is is_alone

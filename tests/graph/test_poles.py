"""The table of poles and domains, against torch in float64, which knows no table."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fxguard.graph.operations import name_of
from fxguard.graph.poles import DEFAULT_EPS, LAWS, plain

# At poles, at the ends of domains, inside and outside of them.
NUMBERS = (0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 2.5, -2.5, 3.0, math.inf, -math.inf)


def function_of(name: str) -> Callable[..., Tensor]:
    """The function of torch that has a name of the table."""
    places = (torch, torch.special, functional)
    return next(getattr(place, name) for place in places if hasattr(place, name))


def points(name: str) -> Iterator[tuple[float, ...]]:
    """Operands of an operation."""
    return itertools.product(NUMBERS, repeat=LAWS[name].arity)


def value(name: str, numbers: tuple[float, ...], dtype: torch.dtype = torch.float64) -> float:
    """What torch makes of numbers."""
    given = [torch.tensor([x], dtype=dtype) for x in numbers]
    return function_of(name)(*given).double().item()


@pytest.mark.parametrize("name", LAWS)
def test_the_table_is_right_about_finite_numbers(name: str) -> None:
    """It says something where float64 has no finite result, and only there."""
    for numbers in points(name):
        if all(map(math.isfinite, numbers)):
            said = LAWS[name].verdict([(x, x) for x in numbers])
            assert bool(said) == (not math.isfinite(value(name, numbers))), (numbers, said)


@pytest.mark.parametrize("name", LAWS)
def test_what_has_a_pole_grows_without_bounds_next_to_it(name: str) -> None:
    """And what is outside a domain does not; but for 0/0, which may be anything."""
    for numbers in points(name):
        said = LAWS[name].verdict([(x, x) for x in numbers])
        if not said or not all(map(math.isfinite, numbers)) or numbers[-2:] == (0.0, 0.0):
            continue
        by_distance = []
        for distance in (1e-4, 1e-10):
            moves = itertools.product((0, distance, -distance), repeat=len(numbers))
            near = [tuple(x + by for x, by in zip(numbers, move, strict=True)) for move in moves]
            made = [abs(value(name, point)) for point in near]
            by_distance.append(max(filter(math.isfinite, made), default=0.0))
        # Logarithms grow slowest.
        grows = by_distance[1] - by_distance[0] > 1
        is_quotient = plain(name) in ("remainder", "fmod")  # no limit, and nothing large
        assert (said == "zero divisor") == (grows or is_quotient), (numbers, said, by_distance)


@pytest.mark.parametrize("name", LAWS)
def test_infinities_that_end_as_nan_are_outside(name: str) -> None:
    """NaN made of an infinity and no NaN: the table knows, in float64 and in the narrow dtypes."""
    for numbers in points(name):
        if all(map(math.isfinite, numbers)):
            continue
        said = LAWS[name].verdict([(x, x) for x in numbers])
        assert bool(said) >= math.isnan(value(name, numbers)), numbers


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (torch.Tensor.div_, "div"),
        (torch.ops.aten.div.Tensor, "div"),
        (torch.true_divide, "div"),
        (torch.special.expit, "expit"),
        (torch.special.log1p, "log1p"),
        (torch.arccos, "acos"),
        (torch.nn.LayerNorm, "layer_norm"),
        (torch.nn.CrossEntropyLoss, "cross_entropy"),
        (torch.ops.aten.nll_loss_forward.default, "nll_loss"),
        (torch.ops.aten._softmax.default, "softmax"),
        (torch.ops.aten._weight_norm_interface.default, "weight_norm"),
        (torch.linalg.inv, "inv"),
    ],
)
def test_one_operation_has_one_plain_name(target: Any, name: str) -> None:
    """However it is called."""
    assert plain(name_of(target)) == name


@pytest.mark.parametrize("name", [name for name, eps in DEFAULT_EPS.items() if eps])
def test_the_table_of_eps_is_that_of_torch(name: str) -> None:
    """Where the function has no signature, that of another with the same eps is read."""
    if name in ("cosine_embedding_loss", "cosine_similarity", "pairwise_distance"):
        packet = getattr(torch.ops.aten, name.replace("embedding_loss", "similarity"))
        eps = {each.name: each.default_value for each in packet.default._schema.arguments}["eps"]
    else:
        eps = inspect.signature(getattr(functional, name)).parameters["eps"].default
    assert DEFAULT_EPS[name] == eps

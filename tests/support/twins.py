"""Twins: an idiom that holds infinities or NaN and is healthy, and its sister that went wrong.

The idioms stand in ``masks_intended``, ``bad_and_discarded`` and ``too_large_and_healthy``, one
function each, as people write them. A healthy idiom runs twice, with other numbers of the same
kind: the second batch may be judged by the precedent of the first. A sister makes sure that no
idiom is healthy because nobody looks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fxguard
from support.masks import Function
from support.ways import AOT, EAGER, assert_same_bits, prepared, the_way

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WIDE = (torch.float32,)  # idioms without a kernel, or without a use, in a low precision
HALF = (torch.float16,)  # idioms that overflow in float16 only


@dataclass(frozen=True)
class Draw:
    """The numbers of one batch."""

    dtype: torch.dtype
    seed: int

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return (torch.randn(*shape, generator=generator) * scale).to(self.dtype)

    def positive(self, *shape: int) -> Tensor:
        return self.normal(*shape).abs() + 0.5

    def of(self, *numbers: float) -> Tensor:
        """These numbers, a little larger in the second batch; zeros and infinities stay."""
        return torch.tensor(numbers, dtype=self.dtype) * (1 + self.seed / 64)

    def exact(self, *numbers: Any) -> Tensor:
        """These numbers in each batch."""
        return torch.tensor(numbers, dtype=self.dtype)

    def hidden(self, *shape: int) -> Tensor:
        """A mask that hides the last element of each row, and in the last row all but the first."""
        mask = torch.zeros(*shape, dtype=torch.bool)
        mask[..., -1] = True
        mask[..., -1, 1:] = True
        return mask

    def row_hidden(self, *shape: int) -> Tensor:
        """The same, and the first row is hidden."""
        mask = self.hidden(*shape)
        mask[..., 0, :] = True
        return mask


Inputs = Callable[[Draw], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Twin:
    """One idiom.

    Attributes:
        make: the function, or a class of modules.
        inputs: what it is called with.
        dtypes: in which the idiom exists; CI runs the first one.
        holds_bad: whether an operation makes an inf or a NaN; False also where nobody can look.
        blames: names of operations of which a report names one first; "" for a healthy twin.
    """

    make: Callable[..., Any]
    inputs: Inputs
    dtypes: tuple[torch.dtype, ...] = FLOATS
    holds_bad: bool = True
    blames: str = ""

    def __str__(self) -> str:
        return self.make.__name__

    def model(self, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        function = self.make() if isinstance(self.make, type) else self.make
        return Function(function).to(dtype).eval()

    def run(self, model: Callable[..., Any], dtype: torch.dtype, seed: int) -> Any:
        inputs = self.inputs(Draw(dtype, seed))
        torch.manual_seed(seed)
        return model(*inputs)


@dataclass
class Twins:
    """The idioms of one file, in its order, each with the sisters that were written below it."""

    healthy: list[Twin] = field(default_factory=list)
    wrong: list[Twin] = field(default_factory=list)

    def twin(self, inputs: Inputs, **facts: Any) -> Callable[[Any], Any]:
        """The function below is healthy."""

        def add(make: Any) -> Any:
            self.healthy.append(Twin(make, inputs, **facts))
            return make

        return add

    def sister(self, blames: str, inputs: Inputs | None = None, **facts: Any) -> Any:
        """The function below went wrong: the last twin's inputs and dtypes where none are given."""
        last = self.healthy[-1]

        def add(make: Any) -> Any:
            dtypes = facts.get("dtypes", last.dtypes)
            self.wrong.append(Twin(make, inputs or last.inputs, dtypes, blames=blames))
            return make

        return add

    def gone_wrong(self, blames: str, inputs: Inputs, **facts: Any) -> None:
        """The last twin itself, on other inputs."""
        self.sister(blames, inputs, **facts)(self.healthy[-1].make)


class BadResults(TorchDispatchMode):
    """Whether any operation makes an inf or a NaN, or is given one."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.seen = self.seen or not bool(tensor.isfinite().all())
        return result


def check_healthy(twin: Twin, dtype: torch.dtype, way: str = EAGER, replay: bool = False) -> None:
    """Nothing is raised in two batches, and the outputs are those of the plain model."""
    if twin.holds_bad:
        with BadResults() as watched:
            twin.run(twin.model(dtype), dtype, 1)
        assert watched.seen, "this idiom holds nothing bad"
    with the_way(way):
        # AOTAutograd's decompositions may round otherwise than the operations themselves.
        plain = prepared(twin.model(dtype), way)
        expected = [twin.run(plain, dtype, seed) for seed in (1, 2)]
        if way == AOT:
            torch._dynamo.reset()
        model = fxguard.instrument(twin.model(dtype), replay=replay)
        guarded = prepared(model, way)
        for seed, output in enumerate(expected, 1):
            assert_same_bits(twin.run(guarded, dtype, seed), output)


def first_blamed(twin: Twin, dtype: torch.dtype) -> str:
    """The operation that a report of this batch names first; "" where there is no report."""
    reports: list[fxguard.types.Report] = []
    twin.run(fxguard.instrument(twin.model(dtype), on_detect=reports.append), dtype, 1)
    return reports[0].origins[0].what if reports else ""

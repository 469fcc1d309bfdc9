"""What a model and its loss are given, as series."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard import trees
from fxguard.batch.kept_run import KeptRun, runs_that_made
from fxguard.history._norms import Number
from fxguard.history._norms import largest as largest_of
from fxguard.history._open_step import OpenStep
from fxguard.history._sample import sample_of
from fxguard.history._series import ROW_SIZE, ROWS, Kind
from fxguard.measure import native
from fxguard.measure.at_hand import has_memory, own_arithmetic
from fxguard.torch_names import is_of_func_level

__all__ = ["behind", "note_data", "note_inputs"]

MOST = 2**13  # elements that means and shares are taken of, evenly spread
NODES = 256  # of autograd, from a loss on
TARGET = "_saved_target"  # where the nodes of torch's losses keep what they compare with


def note_inputs(
    step: OpenStep, names: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Add the tensors that a model is called with.

    Args:
        step: the step that runs.
        names: of its positional arguments.
        args: the arguments.
        kwargs: likewise.
    """
    named = [(names[i] if i < len(names) else str(i), x) for i, x in enumerate(args)]
    for name, value in (*named, *kwargs.items()):
        for i, x in enumerate(x for x in trees.tree_leaves(value) if isinstance(x, Tensor)):
            which = f"[{i}]" if i else ""
            what = "input" if name == "input" else f"input {name}"
            note_data(step, "input", what + which, x)


def note_data(
    step: OpenStep,
    kind: Kind,
    what: str,
    given: Tensor,
    source: str = "",
) -> None:
    """Add a tensor: largest magnitude, mean, share of zeros, distinct integers, and shape.

    Args:
        step: the step that runs.
        kind: "input" or "target".
        what: its name.
        given: the tensor.
        source: the line of the loss that reads it, if that is known.
    """
    if type(given) is not Tensor or is_of_func_level(given):
        return
    with own_arithmetic():
        found: Sequence[Number] | None = native.described(given.detach())
        if found is None:
            if not has_memory(given) or not given.numel():
                return
            found = _described(given.detach())
        of_numbers = given.is_floating_point() or given.is_complex()
        details = ("largest", "mean", "share of zeros", "typical" if of_numbers else "distinct")
        series = [step.series(kind, what, source, detail=detail) for detail in details]
    step.note_all(series, found)
    rows = len(given) if given.dim() else 1
    for detail, count in ((ROWS, rows), (ROW_SIZE, given.numel() // rows)):
        step.note(step.series(kind, what, source, detail=detail), count, count)


def _described(x: Tensor) -> list[Number]:
    """What C finds in the tensors that it can read."""
    (largest,) = largest_of((x,), most=0)
    sample = sample_of(x, MOST).reshape(-1)
    if sample.is_complex():
        sample = torch.view_as_real(sample).reshape(-1)
    numbers = sample if sample.dtype == torch.float64 else sample.float()
    is_some = numbers != 0
    if x.is_floating_point() or x.is_complex():
        logs = numbers.abs().log2().where(is_some, 0.0)
        last = (logs.sum() / is_some.sum().clamp(min=1)).exp2()
    else:
        last = torch.tensor(float(len(torch.unique(sample))), device=x.device)
    return [largest, numbers.mean(), 1 - is_some.sum() / len(numbers), last]


def behind(root: Tensor) -> tuple[list[KeptRun], list[Tensor]]:
    """The runs of graphs that led to a loss last, and what losses of torch compare these with."""
    runs = list[KeptRun]()
    todo, seen, found = deque([root.grad_fn]), set[Any](), list[Tensor]()
    while todo and len(seen) < NODES:
        node = todo.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        target = getattr(node, TARGET, None) if hasattr(type(node), TARGET) else None
        if isinstance(target, Tensor) and target.grad_fn is None:
            found.append(target)
        made_by = runs_that_made(node)
        runs += made_by
        if node is root.grad_fn or not made_by:  # what follows is inside the model
            todo.extend(each for each, _ in node.next_functions)
    return runs, found

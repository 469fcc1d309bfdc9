"""Faults that the operations of a loss show: broadcast, applied twice, over samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from fxguard.batch.loss import Loss
from fxguard.graph.tables import CASTS, MOVES
from fxguard.quiet._flow import DETACHES, Leaf, Operation, Value, operations_behind
from fxguard.quiet._training import Rule, Training
from fxguard.source.lines import Place, source_at

__all__ = ["LossFaults"]

FIRST, EVERY = 3, 500  # losses that are looked at: the first ones, and each 500th
VIEWS = (MOVES | CASTS | frozenset({"getitem", "select", "narrow"})) - DETACHES
SQUASHES = frozenset({"sigmoid", "softmax"})
# What applies a softmax or a sigmoid itself, and which of these must not come before it.
APPLIES = {
    "cross_entropy": SQUASHES,
    "cross_entropy_loss": SQUASHES,
    "binary_cross_entropy_with_logits": frozenset({"sigmoid"}),
    "log_softmax": frozenset({"softmax"}),
}
COMPARES = frozenset({"huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss"})
TAKE_TWO = frozenset({"add", "div", "mul", "rsub", "sub", "true_divide"})
# What may stand between a difference and its mean over everything.
ELEMENTWISE = frozenset(
    [
        *("abs", "add", "clamp", "clamp_max", "clamp_min", "cosh", "div", "exp", "float"),
        *("huber_loss", "log", "log1p", "mul", "neg", "pow", "relu", "rsub", "softplus"),
        *("sqrt", "square", "sub", "sum", "to", "true_divide", "where"),
    ]
)
TURNS = frozenset({"expand", "reshape", "unsqueeze", "view"})
AVERAGES = frozenset({"add", "div", "true_divide"})  # of sums of several, by their number
MOST = 64  # values between a loss and a difference
WHOLE = frozenset({"mean", "sum", "nanmean", "nansum"})
SWAPS = frozenset({"swapaxes", "swapdims", "t", "transpose"})
ATTENTION = "multi_head_attention_forward"
OVER_SAMPLES = frozenset({"log_softmax", "normalize", "softmax", "softmin"})


class LossFaults(Rule):
    """Looks at what leads to the first losses."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._count = 0

    def loss_comes(self, loss: Loss, place: Place | None) -> None:
        self._count += 1
        if self._count > FIRST and self._count % EVERY:
            return
        operations = list(operations_behind(loss.roots))
        for operation in operations:
            self._look_for_two(operation)
            self._look_for_broadcast(operation)
        self._look_for_samples(operations)

    def _look_for_two(self, operation: Operation) -> None:
        wrong = APPLIES.get(operation.kind)
        if wrong is None:
            return
        made = _one_of(wrong, operation.argument(0, "input"))
        if made is not None:
            self.training.found(
                "applied twice",
                f"{operation.kind} reads the result of {made.kind}",
                place=made.place or operation.place,
                evidence=f"{operation.kind}{_at(operation.place)} applies {_own(operation.kind)} "
                "itself",
                advice=f"take {made.kind} away and give {operation.kind} the logits",
            )

    def _look_for_broadcast(self, root: Operation) -> None:
        """A column against a row, and the mean or sum over all pairs."""
        if root.kind in COMPARES:
            self._tell_of_pairs(root)
        if root.kind not in WHOLE or root.argument(1, "dim") is not None:
            return
        todo = list(root.values)
        for value in todo:
            if isinstance(value, Operation) and value.kind in ELEMENTWISE | COMPARES:
                if value.kind in TAKE_TWO | COMPARES and self._tell_of_pairs(value):
                    return
                if len(todo) < MOST:
                    todo.extend(value.values)

    def _tell_of_pairs(self, operation: Operation) -> bool:
        values = list(operation.values)
        if len(values) < 2:
            return False
        for prediction, target in ((values[0], values[1]), (values[1], values[0])):
            shape = prediction.shape
            if shape is None or len(shape) != 2 or shape[1] != 1 or shape[0] < 2:
                continue
            count = shape[0]
            if not _is_trained(prediction) or _is_turned(prediction):
                continue
            if operation.shape not in (None, (), (count, count)) or not _is_row(target, count):
                continue
            self.training.found(
                "broadcast loss",
                f"{operation.kind} of [{count}, 1] and [{count}] makes [{count}, {count}]",
                place=operation.place,
                evidence="each prediction is compared with every target",
                advice="give both one shape: squeeze(-1) the prediction, or unsqueeze(-1) the "
                "target",
            )
            return True
        return False

    def _look_for_samples(self, operations: list[Operation]) -> None:
        samples = _samples(operations)
        if samples is None:
            return
        count, targets = samples
        for operation in operations:
            if operation.kind == ATTENTION:
                self._look_for_attention(operation, count, targets)
            if operation.kind not in OVER_SAMPLES:
                continue
            shape = operation.shape
            dim = operation.argument(2 if operation.kind == "normalize" else 1, "dim")
            if shape is None or type(dim) is not int or len(shape) < 2:
                continue
            dim, at = dim % len(shape), _dim_of_samples(operation)
            size = shape[dim]
            is_over = dim == at and size % count == 0 and size in targets
            if is_over and shape.count(size) == 1:
                self.training.found(
                    "mixes samples",
                    f"{operation.kind} over dimension {dim} of {list(shape)}",
                    place=operation.place,
                    evidence=f"its {size} {'rows' if dim == 0 else 'columns'} are samples, with "
                    "one target for each",
                    advice="choose the dimension of classes or features, such as dim=-1",
                )

    def _look_for_attention(self, operation: Operation, count: int, targets: set[int]) -> None:
        """``nn.MultiheadAttention`` without ``batch_first`` that is given the samples in front."""
        query = operation.argument(0, "query")
        shape = query.shape if isinstance(query, (Operation, Leaf)) else None
        if shape is None or len(shape) != 3 or shape[0] % count or shape[0] not in targets:
            return
        if shape[0] != shape[1] and not _was_swapped(query):
            self.training.found(
                "mixes samples",
                f"attention over dimension 0 of {list(shape)}",
                place=operation.place,
                evidence=f"its {shape[0]} rows are samples, with one target for each",
                advice="pass batch_first=True to nn.MultiheadAttention, or give it "
                "x.transpose(0, 1)",
            )


def _was_swapped(value: object) -> bool:
    """Whether dimensions were put in another order on the way to a value."""
    for _ in range(MOST):
        if not isinstance(value, Operation) or value.kind not in VIEWS:
            return False
        if value.kind in SWAPS | {"permute", "movedim"}:
            return True
        value = next(value.values, None)
    return True


def _dim_of_samples(operation: Operation) -> int:
    """Where the dimension 0 of what an operation reads stands, after it was transposed."""
    value = next(operation.values, None)
    if not isinstance(value, Operation) or value.kind not in SWAPS:
        return 0
    swapped: list[Any] = [value.argument(1, "dim0", 0), value.argument(2, "dim1", 1)]
    size = len(value.shape or operation.shape or ())
    if not size or not all(type(dim) is int for dim in swapped):
        return 0
    first, second = sorted(dim % size for dim in swapped)
    return second if first == 0 else 0


def _one_of(kinds: frozenset[str], value: object) -> Operation | None:
    """The operation of some kinds that made a value: itself, or each part of a mean of several."""
    made = _behind_views(value)
    if not isinstance(made, Operation) or made.kind in kinds:
        return made if isinstance(made, Operation) else None
    if made.kind == "mean":
        made = _behind_views(next(made.values, None))
        if not isinstance(made, Operation) or made.kind != "stack":
            return None
    elif made.kind not in AVERAGES:
        return None
    parts = [_one_of(kinds, part) for part in itertools.islice(made.values, MOST)]
    return parts[0] if parts and all(part is not None for part in parts) else None


def _behind_views(value: object) -> object:
    """What made a value, before it was moved and cast."""
    while isinstance(value, Operation) and value.kind in VIEWS:
        value = next(value.values, None)
    return value


def _own(kind: str) -> str:
    return "a sigmoid" if "binary" in kind else "a softmax"


def _at(place: Place | None) -> str:
    return "" if place is None else f" ({source_at(place).place})"


def _is_trained(value: Value) -> bool:
    """Whether gradients reach what made a value."""
    if isinstance(value, Leaf):
        return value.tensor.requires_grad
    if not value.with_grad or value.kind in DETACHES:
        return False
    return value.inside is not None or any(map(_is_trained, value.values))


def _is_turned(value: Value) -> bool:
    """Whether a column was made of a value on purpose, as for all pairs."""
    while isinstance(value, Operation) and value.kind in VIEWS | ELEMENTWISE:
        if value.kind in TURNS or (value.kind == "getitem" and _has_none(value.args[1:])):
            return True
        value = next(value.values, Leaf(Tensor()))
    return False


def _has_none(given: object) -> bool:
    return given is None or (isinstance(given, (tuple, list)) and any(map(_has_none, given)))


def _is_row(value: Value, count: int) -> bool:
    """Whether a value is one number for each sample, and no gradient reaches it."""
    if isinstance(value, Leaf):
        return value.shape == (count,) and not value.tensor.requires_grad
    if value.inside is not None:
        return False
    if value.shape is not None:
        return value.shape == (count,) and not _is_trained(value)
    if value.kind in DETACHES or value.kind in CASTS:
        return _is_row(next(value.values), count)
    if value.kind not in ELEMENTWISE or _is_trained(value):
        return False
    read = list(value.values)
    is_flat = all(x.shape is None or len(x.shape) < 2 for x in read)
    return is_flat and any(_is_row(x, count) for x in read)


def _samples(operations: list[Operation]) -> tuple[int, set[int]] | None:
    """How many samples the graphs of a loss were given, and how many targets there are.

    None if inputs have no such dimension in common, or the number of targets is no multiple of it.
    """
    data = list(_data_of(operations))
    leaves = (x for op in operations if op.inside is None for x in op.values)
    targets = [x for x in leaves if isinstance(x, Leaf) and not x.tensor.requires_grad]
    counts = {x.shape[0] for x in targets if _is_flat(x.shape)}
    if not counts or not data or not data[0]:
        return None
    count = data[0][0]
    if any(not shape or shape[0] != count or shape[1:2] == (count,) for shape in data):
        return None
    return (count, counts) if count and all(x % count == 0 for x in counts) else None


def _is_flat(shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)


def _data_of(operations: list[Operation]) -> Iterator[tuple[int, ...]]:
    """The shapes of what graphs of the model were given."""
    runs = {id(op.inside): op.inside for op in operations if op.inside is not None}
    for run in runs.values():
        args = run.arguments() or ()
        for position, _ in run.event.plan.inputs:
            x = args[position] if position < len(args) else None
            if isinstance(x, Tensor) and not isinstance(x, Parameter):
                yield tuple(x.shape)

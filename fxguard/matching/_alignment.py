"""Runs one program on the values of another: each of its values is looked for there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.matching._exact import (
    Exact,
    is_kept,
    made_by,
    note_weights,
    operands,
    parts_of_next,
    roundoff,
    weights_read,
)
from fxguard.matching._layouts import apart, nearest_layout, order_of_rows
from fxguard.matching._parts_of_weights import PartsOfWeights
from fxguard.matching._weights import Twin
from fxguard.recording.recorded import Leaf, Operation, Recording
from fxguard.recording.replay import Replay, reads_of

__all__ = ["PRODUCTS", "Alignment", "Mismatch"]

SAME = 1e-9  # relative, between values that differ by roundings of float64
# Units of roundoff that a value may be off which was not computed again.
FOR_ROUNDINGS, FOR_LOW = 64.0, 8.0
OUT_OF_ORDER = 1e-3  # relative: no tolerance is as large
LOW = 1e-5  # the roundoff of dtypes with few digits
# Other names for one operation: a value times a weight.
PRODUCTS = frozenset(["mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "addmv", "mv", "dot"])


def _tolerance(noise: float) -> float:
    return SAME + noise * (FOR_LOW if noise > LOW else FOR_ROUNDINGS)


def _same_for_all(tolerance: float) -> Callable[[int], float]:
    return lambda value: tolerance


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A value that should be one of the other program's, and is not."""

    mine: int
    theirs: int
    apart: float  # relative to the largest magnitude
    operation: int  # that reads it; behind the last one for an output
    is_output: bool = False


class Alignment:
    """One program, run in float64 on the values of another one.

    What it computes is looked for among the other's values. Where an operation with a weight that
    both have reads something that the other's operation does not read, the other's value takes its
    place: what follows is compared on equal terms.

    Args:
        recording: of the program.
        other: the other program.
        twins: of its weights.
        repairs: what to add to values that do not match, in place of the other's values: the
            corrections of a run before this one. Other values stay as they are.

    Attributes:
        same: for each value of this program the values of the other that hold the same.
        mismatches: where the programs part, in order.
        outputs: pairs of an output, or a value, of the other program and of an output of this one.
    """

    def __init__(
        self,
        recording: Recording,
        other: Exact,
        twins: dict[int, Twin],
        repairs: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.recording, self.other, self.twins = recording, other, twins
        self.repairs = repairs
        self.same: dict[int, tuple[int, ...]] = {}
        self.mismatches: list[Mismatch] = []
        self.outputs: list[tuple[int, int]] = []
        self.forced: set[int] = set()  # values in whose place the other's were taken
        self.corrections: dict[int, Tensor] = {}  # what that has changed
        self.made_by: dict[int, int] = {}
        self.values: dict[int, Tensor] = {}  # a copy of each, as it was looked for
        self.given: dict[int, Tensor] = {}  # what was put in its place, for what follows
        self.weights_in: dict[int, frozenset[int]] = {}  # of the other program
        self.parts: dict[int, list[Tensor]] = {}  # inside fused operations, which the other lacks
        self.seen: dict[int, int] = {}  # values of the other, with the operation that found them
        self._parts_of_weights = PartsOfWeights(twins, other)
        self._noise: dict[int, float] = {}
        self._at = -1  # the operation that runs
        self._uses: dict[object, int] = defaultdict(int)  # of weights, by each rank
        self._replay = Replay(recording, {v: twin.content for v, twin in twins.items()})

    @property
    def not_run(self) -> dict[str, str]:
        """Operations that did not run again, with the reason."""
        return self._replay.not_run

    def noise_of(self, value: int) -> float:
        """The roundoff in a value that was not computed again, nor replaced by the other's."""
        return self._noise.get(value, 0.0)

    def run(self) -> Alignment:
        """Run all of it."""
        for leaf in self.recording.leaves:
            self._enter(leaf)
        for number, operation in enumerate(self.recording.operations):
            self._at = number
            self._step(number, operation)
        self._meet_outputs()
        return self

    def _enter(self, leaf: Leaf) -> None:
        replay, value = self._replay, leaf.value
        if value not in replay.now:
            return
        twin = self.twins.get(value)
        if is_kept(self.recording, leaf):
            self.weights_in[value] = frozenset(() if twin is None else twin.of)
        if twin is not None and twin.is_whole:
            self.same[value] = twin.of
            self._see(twin.of)
            self.values[value] = replay.now[value].clone()
            return
        self._noise[value] = roundoff(self.recording, value)
        self._look(value)

    def _step(self, number: int, operation: Operation) -> None:
        replay = self._replay
        note_weights(self.weights_in, operation)
        self._parts_of_weights.note(operation)
        self._meet(number, operation)
        noise = max((self._noise.get(ref.value, 0.0) for ref in reads_of(operation)), default=0.0)
        self.parts[number] = []
        for part in parts_of_next(replay, operation):
            found = self.other.index.find(part, _same_for_all(_tolerance(noise)))
            if found is None:
                self.parts[number].append(part)
            else:
                self._see(found.values)
        replay.run(operation)
        for value in made_by(operation):
            self.made_by[value] = number
            if value not in replay.now:
                continue
            mine = roundoff(self.recording, value) if value in replay.told else 0.0
            self._noise[value] = max(noise, mine)
            self._look(value)

    def _look(self, value: int) -> None:
        x = self._replay.now[value]
        self.values[value] = x.clone()
        mine, most = self._noise.get(value, 0.0), [0.0]

        def tolerance(theirs: int) -> float:
            most[0] = max(mine, self._noise_of_theirs(theirs))
            return _tolerance(most[0])

        found = self.other.index.find(x, tolerance, self._at_most(mine))
        if found is None:
            return
        self.same[value] = found.values
        self._see(found.values)
        if found.same is not None and found.same.shape == x.shape:
            if most[0]:
                self._put(value, found.same)
            else:
                self._noise.pop(value, None)

    def _see(self, theirs: Iterable[int]) -> None:
        for value in theirs:
            self.seen.setdefault(value, self._at)

    def _at_most(self, mine: float) -> Callable[[int], float]:
        """The tolerance of a value of the other program, if this one shared nothing behind it."""
        noise = self.other.noise_behind
        return lambda theirs: _tolerance(max(mine, noise.get(theirs, 0.0)))

    def _noise_of_theirs(self, value: int) -> float:
        """The noise in a value of the other program that no value of this one shares."""
        other, most, left, known = self.other, 0.0, [value], set[int]()
        if not other.noise_behind.get(value, 0.0):
            return 0.0
        while left:
            at = left.pop()
            if at in known or at in self.seen:
                continue
            known.add(at)
            most = max(most, other.noise.get(at, 0.0))
            number = -1 - at if at < 0 else other.made_by.get(at)
            if number is not None:
                left += other.reads[number]
        return most

    def _put(self, value: int, instead: Tensor) -> None:
        """Let a value be the other's from here on."""
        self.given[value] = instead
        x = self._replay.now[value]
        if x.is_floating_point() and not any(
            stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)
        ):
            x.copy_(instead)
        else:
            self._replay.now[value] = instead.clone()
        self._noise.pop(value, None)

    def _meet(self, number: int, operation: Operation) -> None:
        """Compare what an operation with a weight reads with what the other's reads."""
        weights = weights_read(self.weights_in, operation)
        if not weights:
            return
        mine = operands(self.weights_in, operation)
        key = operation.rank, *sorted(weights)
        use, self._uses[key] = self._uses[key], self._uses[key] + 1
        found = self._their_operand(operation, weights, use)
        if len(mine) != 1 or found is None or found not in self.other.values:
            return
        value, theirs = mine[0], self.other.values[found]
        if value not in self._replay.now:
            return
        x = self._replay.now[value]
        is_part = theirs.numel() != x.numel()
        parts = self._parts_of_weights
        expected = parts.columns(weights, operation, theirs, x) if is_part else None
        if value in self.same and expected is None:
            return
        if x.dtype != theirs.dtype:
            return
        if not x.is_floating_point() and (is_part or parts.reads_rows(operation)):
            return  # rows of its own part of a table
        part = self.part_of(theirs, x, operation.rank) if expected is None else expected
        instead = None if part is None else self.laid_out(part, x)
        if instead is None or (value in self.same and apart(instead, x) <= OUT_OF_ORDER):
            return
        self.mismatches.append(Mismatch(value, found, apart(instead, x), number))
        if self.repairs is None:
            self.corrections[value] = torch.nan_to_num(instead - x, posinf=0.0, neginf=0.0)
            self._put(value, instead)
            self.same[value] = (found,)
            self.forced.add(value)
            self._see([found])
        elif value in self.repairs:
            self._put(value, x + self.repairs[value])

    def part_of(self, theirs: Tensor, like: Tensor, place: int | None) -> Tensor | None:
        """A value of the other, or the part of it that is nearest to what this program has."""
        if theirs.numel() == like.numel():
            return theirs
        return self.other.shards.like(theirs, like, place)

    def laid_out(
        self, theirs: Tensor, like: Tensor, carried: Tensor | None = None
    ) -> Tensor | None:
        """The elements of a value of the other, where this program would have them.

        Rows are in the order that values with as many rows have which both programs computed.

        Args:
            theirs: the value.
            like: what this program has in its place.
            carried: of the shape of ``theirs``: is returned instead, in the same order.
        """
        if like.dim() and theirs.shape[-1:] == like.shape[-1:]:
            width = like.shape[-1]
            order = self._order_of_rows(like.numel() // max(width, 1))
            if order is not None:
                moved = theirs if carried is None else carried
                return moved.reshape(-1, width)[order].reshape(like.shape)
        return nearest_layout(theirs, like, carried)

    def _order_of_rows(self, rows: int) -> Tensor | None:
        """For each row of this program's values the other's row; None if that is not known."""
        for value in reversed(self.same):
            x = self.values[value]
            if x.dim() < 2 or x.shape[-1] < 2 or x.numel() != rows * x.shape[-1]:
                continue
            for other in self.same[value] if x.is_floating_point() else ():
                y = self.other.values.get(other)
                if y is not None and y.numel() == x.numel() and y.shape[-1:] == x.shape[-1:]:
                    order = order_of_rows(x.reshape(rows, -1), y.reshape(rows, -1))
                    if order is not None:
                        return order
        return None

    def _meet_outputs(self) -> None:
        """Compare the outputs that are no values of the other program with its outputs."""
        self._at = len(self.recording.operations)
        mine = [v for _, v in self.recording.outputs if v in self.values]
        theirs = [v for _, v in self.other.recording.outputs if v in self.other.values]
        returned_by_both = {x for v in mine for x in self.same.get(v, ())}
        left = [v for v in theirs if v not in returned_by_both]
        names = [{v: name for name, v in x.outputs} for x in (self.recording, self.other.recording)]
        has_floats = any(self.values[v].is_floating_point() for v in mine)
        for value in mine:
            x = self.values[value]
            if has_floats and not x.is_floating_point():
                continue
            held = [v for v in self.same.get(value, ()) if self._has_size_of(v, x)]
            returned = [v for v in theirs if v in held]
            if returned:  # casts are nothing in float64: several may hold the same
                taken = {one for one, _ in self.outputs}
                alike = [v for v in returned if names[1][v] == names[0][value]]
                first = next(iter([*alike, *(v for v in returned if v not in taken)]), returned[0])
                self.outputs.append((first, value))
                self._meet_order(value, first)
                continue
            for other in left:
                y = self.other.values[other]
                instead = self.laid_out(y, x) if y.numel() == x.numel() else None
                if instead is not None:
                    far = apart(instead, x)
                    self.mismatches.append(Mismatch(value, other, far, self._at, is_output=True))
                    self.outputs.append((other, value))
                    left.remove(other)
                    break
            else:
                # If the other program has it, and does not return it.
                self.outputs += [(v, value) for v in held[:1]]

    def _has_size_of(self, theirs: int, x: Tensor) -> bool:
        """Whether a value of the other program has as many elements; one may repeat them."""
        y = self.other.values.get(theirs)
        return y is not None and y.numel() == x.numel()

    def _meet_order(self, mine: int, theirs: int) -> None:
        """Compare an output that holds what the other's holds, in the order of its elements."""
        x, y = self.values[mine], self.other.values[theirs]
        laid = self.laid_out(y, x) if x.numel() == y.numel() else None
        if laid is not None and (far := apart(laid, x)) > OUT_OF_ORDER:
            self.mismatches.append(Mismatch(mine, theirs, far, self._at, is_output=True))

    def _their_operand(self, operation: Operation, weights: frozenset[int], use: int) -> int | None:
        """What the other program's operations with the same weights read, if that is one value."""
        other = self.other
        found = set()
        for weight in weights:
            readers = [
                at
                for at in other.readers.get(weight, ())
                if self._alike(operation, other.recording.operations[at])
            ]
            if not readers:
                return None
            reader = readers[min(use, len(readers) - 1)]
            theirs = operands(other.weights_in, other.recording.operations[reader])
            if len(theirs) != 1 or (
                use >= len(readers) and not self._reads_parts(operation, theirs[0])
            ):
                return None
            found.add(theirs[0])
        first = min(found)
        for value in found:
            x, y = other.values.get(value), other.values.get(first)
            if x is None or y is None or x.shape != y.shape or apart(x, y) > SAME:
                return None
        return first

    def _reads_parts(self, operation: Operation, theirs: int) -> bool:
        """Whether an operation may read a part of a value of the other program."""
        mine, whole = operands(self.weights_in, operation), self.other.values.get(theirs)
        return (
            len(mine) == 1
            and whole is not None
            and mine[0] in self._replay.now
            and self._replay.now[mine[0]].numel() < whole.numel()
        )

    @staticmethod
    def _alike(mine: Operation, theirs: Operation) -> bool:
        both = {mine.kind, theirs.kind}
        return both <= PRODUCTS or len(both) == 1

"""Loops at whose turns a number grew that is computed from itself: what the variable held."""

from __future__ import annotations

import ast
import bisect
import math
from collections.abc import Collection, Mapping, Sequence

from fxguard.advice.iterated import fix_of_turns
from fxguard.advice.surroundings import CREATES
from fxguard.batch.dataflow import DataFlow
from fxguard.findings import Fix
from fxguard.graph.poles import plain
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Step
from fxguard.records import Range, Source
from fxguard.source.iterated import Iterated, iterated_at
from fxguard.source.named import SIGNS
from fxguard.verdict.explain import Back, Beyond, way_back

__all__ = ["fixes_of_turns"]

LEAST_NUMBERS = 3  # of a loop, so that a number has grown in them
GROWN = 4.0  # how much larger its last turns have made it
MOST_VALUES = 64  # in one walk
LARGE = 1e10  # what a variable has become whose earlier turns are not known
MODULES = ("F", "functional", "torch")  # as programs call them
OPERATIONS = {sign: name for name, sign in SIGNS.items()}
REVERSED = {"rsub": "sub", "rdiv": "div"}

_Bound = Mapping[str, int]  # the value of each variable that an expression reads


def fixes_of_turns(flow: DataFlow, blame: Blame, beyond: Beyond) -> tuple[Fix, ...]:
    """A loop at whose turns a number grew that is computed from itself.

    Args:
        flow: the batch of the origin.
        blame: the origin.
        beyond: see :data:`fxguard.verdict.explain.Beyond`.
    """
    way = list(way_back(flow, blame, beyond))
    by_line: dict[tuple[str, Source], list[Back]] = {}
    for back in way:
        if back.step.source is not None:
            by_line.setdefault((back.step.kind, back.step.source), []).append(back)
    places = [(turns[0].flow, source) for (_, source), turns in by_line.items()]
    if blame.step is not None and (here := flow.steps[blame.step].source) is not None:
        places.append((flow, here))
    told = set[tuple[str, int]]()
    for at, source in places:  # a loss reads what a loop of the model has made
        found = iterated_at(source)
        if found is None or found.source.position in told:
            continue
        told.add(found.source.position)
        chain = _Chain(at, found)
        if chain.made and (fix := _of_chain(at, chain, _read(at, way, flow, blame))) is not None:
            return (fix,)
    for (_, source), turns in by_line.items():
        numbers = [back.after for back in reversed(turns)]
        is_growth = numbers == sorted(numbers) and numbers[-1] >= GROWN * numbers[0]
        found = iterated_at(source) if len(turns) >= LEAST_NUMBERS and is_growth else None
        if found is not None and not _Chain(turns[0].flow, found).made:
            fix = fix_of_turns(source)
            return () if fix is None else (fix,)
    return ()


def _read(at: DataFlow, way: Sequence[Back], flow: DataFlow, blame: Blame) -> set[int]:
    """The values of a batch that were read on the way back from an origin."""
    read = {back.operand for back in way if back.flow is at}
    if at is flow and blame.step is not None:
        read |= set(flow.steps[blame.step].inputs)
    return read


def _of_chain(flow: DataFlow, chain: _Chain, read: set[int]) -> Fix | None:
    """How far a variable grew that led to the overflow; None if it did not grow, or led nowhere."""
    held = chain.before(read)
    numbers = [number for value in held if (number := _magnitude(flow, value)) is not None]
    if not numbers:
        return None
    first, last = min(filter(None, numbers), default=0.0), numbers[-1]
    turns = len(numbers) - 1 - numbers.index(first)
    if len(numbers) >= LEAST_NUMBERS and turns > 1 and last >= GROWN * first:
        grew = f"grew from {first:.2g} to {last:.2g} in {turns} turns"
        return fix_of_turns(chain.found.source, grew)
    if len(numbers) < LEAST_NUMBERS and last > LARGE and chain.is_of_earlier_turn(held[0]):
        return fix_of_turns(chain.found.source, f"has become {last:.2g}")
    return None


class _Chain:
    """The values that a variable held, from turn to turn, as far as they are known.

    Args:
        flow: the batch.
        found: the variable.

    Attributes:
        made: what each turn made of it, by value, and what it held before; None if not known.
    """

    def __init__(self, flow: DataFlow, found: Iterated) -> None:
        self.found = found
        self.places = {x: i for i, step in enumerate(flow.steps) for x in step.outputs}
        self.steps = flow.steps
        self.begins = [i for i, step in enumerate(flow.steps) if self._is_at(step, found.apart)]
        self.made: dict[int, int | None] = {}
        makers = {value: step for step in flow.steps for value in step.outputs}
        reading = _Reading(makers, found)
        for step in flow.steps:
            source = step.source
            is_here = source is not None and source.position == found.value_source.position
            if is_here and step.inputs and step.outputs and _is_operation(found.value, step):
                bound = reading.bound_by(found.value, step.outputs[0], {})
                if bound is not None:
                    self.made[step.outputs[0]] = bound.get(found.name)

    def before(self, read: set[int]) -> list[int]:
        """The values that it held until it was read, the first one first; [] if it was not read."""
        known = read & {*self.made, *(x for x in self.made.values() if x is not None)}
        value = max(known, key=lambda each: self.places.get(each, -1), default=None)
        if value is not None and value not in self.made:
            found = self._turn_behind(value)
            value = value if found is None else found
        held: list[int] = []
        while value is not None:
            held.append(value)
            first, value = self.made.get(value), self._turn_behind(value)
            if value is None and first is not None:
                held.append(first)
        return held[::-1]

    def _is_at(self, step: Step, lines: Collection[int]) -> bool:
        source = step.source
        is_of_file = source is not None and source.file == self.found.source.file
        return is_of_file and source is not None and source.line in lines

    def is_of_earlier_turn(self, value: int) -> bool:
        """Whether the loop made a value, and what that was made of is not known any more."""
        todo, seen = [value], {value}
        while todo and len(seen) <= MOST_VALUES:
            each = todo.pop(0)
            step = self.steps[self.places[each]] if each in self.places else None
            if step is None or not self._is_at(step, self.found.inside):
                continue
            if not step.inputs and plain(step.kind) not in CREATES:
                return True
            todo += [read for read in step.inputs if read not in seen]
            seen.update(step.inputs)
        return False

    def _turn_behind(self, value: int) -> int | None:
        """What the turn before made of it, of which the loop computed a value.

        A recursion may read what several turns made: it is that of the last of them.
        """
        todo = [self.places[value]] if value in self.places else []
        seen, last = set(todo), max(todo, default=0)
        found = list[int]()
        while todo:
            step = self.steps[place := max(todo)]
            todo.remove(place)
            for each in step.inputs:
                behind = self.places.get(each)
                if each in self.made:
                    found.append(each)
                elif behind is not None and behind not in seen and self._is_in_turn(behind):
                    todo.append(behind)
                    seen.add(behind)
        latest = max(found, key=self.places.__getitem__, default=None)
        if latest is None or not self._is_of_one_run(self.places[latest], last):
            return None
        return latest

    def _is_in_turn(self, place: int) -> bool:
        return not self._is_at(self.steps[place], self.found.outside)

    def _is_of_one_run(self, one: int, other: int) -> bool:
        """Whether the loop has not begun anew between two turns, as in another call."""
        at = bisect.bisect(self.begins, one)
        return at == len(self.begins) or self.begins[at] > other


class _Reading:
    """Reads values as what an expression of the program has made.

    Args:
        makers: the operation that made each value.
        found: the variable that the expression computes.
    """

    def __init__(self, makers: Mapping[int, Step], found: Iterated) -> None:
        self.makers = makers
        self.found = found

    def bound_by(self, node: ast.expr, value: int, bound: _Bound) -> _Bound | None:
        """The values of variables with which an expression makes a value; None if it does not."""
        if isinstance(node, ast.Name):
            is_same = bound.get(node.id, value) == value
            return {**bound, node.id: value} if is_same else None
        step = self.makers.get(value)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            if step is None or not _is_operation(node, step):
                return None
            return self._operands(_parts(node), step.inputs, bound)
        if isinstance(node, ast.UnaryOp) and step is not None and plain(step.kind) == "neg":
            return self._operands([node.operand], step.inputs, bound)
        if isinstance(node, ast.Call) and step is not None and _is_operation(node, step):
            return self._operands(_parts(node), step.inputs, bound)
        return bound

    def _operands(
        self, nodes: Sequence[ast.expr], values: Sequence[int], bound: _Bound
    ) -> _Bound | None:
        if len(nodes) == 2 and len(values) == 1:
            first, second = nodes if self._depends(nodes[0]) else nodes[::-1]
            found = self.bound_by(first, values[0], bound)
            return self.bound_by(second, values[0], bound) if found is None else found
        for node, value in zip(nodes, values, strict=False):
            found = self.bound_by(node, value, bound)
            if found is None:
                return None
            bound = found
        return bound

    def _depends(self, node: ast.expr) -> bool:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return not names.isdisjoint(self.found.made_of_it)


def _is_operation(node: ast.expr, step: Step) -> bool:
    """Whether an expression is the operation of a step, whatever its operands are."""
    kind = plain(step.kind)
    if isinstance(node, ast.BinOp):
        return OPERATIONS.get(type(node.op)) == REVERSED.get(kind, kind)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return plain(node.func.attr) == kind
    return False


def _parts(node: ast.BinOp | ast.Call) -> list[ast.expr]:
    """The operands of an operator, or of a function or a method."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    is_module = isinstance(owner, ast.Name) and owner.id in MODULES
    return list(node.args) if owner is None or is_module else [owner, *node.args]


def _magnitude(flow: DataFlow, value: int) -> float | None:
    number = flow.ranges[value]
    is_finite = isinstance(number, Range) and math.isfinite(number.abs_max)
    return number.abs_max if is_finite and isinstance(number, Range) else None

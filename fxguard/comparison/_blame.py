"""Which operation is to blame for outputs that differ in float64: found backwards from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fxguard.comparison._aligned import Aligned
from fxguard.comparison._ends import Inside
from fxguard.comparison._rounding import apart, are_one_program, in_double, rms_of
from fxguard.comparison._sides import Key, Named, Side
from fxguard.comparison._writers import writers_of
from fxguard.comparison.elements import Compared

__all__ = ["Blame"]

SHOWN = 4  # operations of one side that are listed
NEARLY = 1e-3  # how far apart two root mean squares may be, for the tensors to be worth a look


@dataclass(slots=True)
class Blame:
    """What each operation of both models makes in float64, of A's inputs and weights.

    Where two models were written in two ways, values differ in between and are the same again
    later, perhaps as the result of another operation. Such a difference is harmless. A difference
    is to blame if it lies on the way to an output that differs, behind the last values that A has.
    """

    both: Aligned
    inside: Inside
    unit: float  # how far numbers in the programs may have been rounded
    # Operations of A by the shape of their results, with root mean squares.
    _by_shape: dict[Any, list[tuple[float, Key]]] = field(default_factory=dict)
    _known: dict[Key, bool] = field(default_factory=dict)  # whether A has what B's operation makes

    def behind(self, output: Any) -> set[Key]:
        """The operations of B through which an output came to differ."""
        origin: Any = self.both.b.made.get(id(output))
        found: set[Key] = set()
        others: set[Key] = set()
        todo: list[Any] = [origin]
        while todo:
            key = todo.pop()
            if key in found or key not in self.both.b.named:
                continue
            if key not in others and self._is_same(key):
                continue
            found.add(key)
            todo += self._reads(key)
            if key in self.both.alike:  # what A has elsewhere is not what it should read
                others.update(filter(self._is_other, self._reads(key)))
        return found

    def named(self, reached: set[Key]) -> Iterator[Compared]:
        """The first operation of those that were reached, as a divergence."""
        order = [key for key in self.both.b.named if key in reached]
        if not order:
            return
        paired = next((key for key in order if key in self.both.of_b), None)
        first = order[0]
        if paired is not None and first not in self.both.of_b:
            # What B alone has begins it, if A alone has nothing in its place.
            first = first if self._feeds(first, paired) else paired
        named = self.both.b.named[first]
        partner = self.both.of_b.get(first)
        own = self._gap(first)
        if partner is not None:
            reason = "not roundings: in float64, too, the two results differ, on A's inputs"
            yield _compared(named, reason, own, "")
            return
        mine = _titles(self.both.b.named[key] for key in order if key not in self.both.of_b)
        theirs = _titles(
            each
            for key, each in self.both.a.named.items()
            if key not in self.both.of_a and each.is_step
        )
        instead = f" instead of {theirs} of A" if theirs else ""
        reason = f"B alone has {mine}{instead}, and then returns other values"
        yield _compared(named, reason, own, "B")

    def maker(self, side: Side, output: Any) -> str:
        """What made an output, in words."""
        origin: Any = side.made.get(id(output))
        if origin in side.named:
            named = side.named[origin]
            line = f" ({named.source.place})" if named.source is not None else ""
            return f"the result of {named.title}{line}"
        if isinstance(origin, tuple) and origin[0] == "input":
            return f"its input {origin[1]}"
        if isinstance(origin, tuple) and origin[0] == "weight":
            return f"its weight {origin[1]}"
        return "something that no captured graph made"

    def _is_other(self, key: Key) -> bool:
        """Whether an operation makes something else than its partner in A."""
        partner = self.both.of_b.get(key)
        return partner is not None and not self._are_same(key, partner)

    def _is_same(self, key: Key) -> bool:
        """Whether A makes in float64 what an operation of B does, in its place or elsewhere."""
        if key not in self._known:
            partner = self.both.of_b.get(key)
            others = self._alike(key) if partner is None else (partner, *self._alike(key))
            self._known[key] = any(self._are_same(key, other) for other in others)
        return self._known[key]

    def _alike(self, key: Key) -> Iterator[Key]:
        """Operations of A whose result has the shape and the size of that of an operation of B."""
        if not self._by_shape:
            self._by_shape = defaultdict(list)
            for other, turns in self.inside.values[0].items():
                self._by_shape[_shapes(turns)].append((_size(turns), other))
        turns = self.inside.values[1].get(key, [])
        size = _size(turns)
        for other_size, other in self._by_shape.get(_shapes(turns), ()) if size else ():
            if abs(other_size - size) <= NEARLY * size:
                yield other

    def _are_same(self, key: Key, partner: Key) -> bool:
        (of_a, of_b), (moves_a, moves_b) = self.inside.values, self.inside.moves
        mine, theirs = of_b.get(key, []), of_a.get(partner, [])
        if len(mine) != len(theirs) or not mine:
            return not mine and not theirs
        moved_b, moved_a = moves_b.values.get(key), moves_a.values.get(partner)
        for turn, (x, y) in enumerate(zip(mine, theirs, strict=True)):
            if len(x) != len(y):
                return False
            for place, (p, q) in enumerate(zip(y, x, strict=True)):
                moved = max(_at(moved_a, turn, place), _at(moved_b, turn, place))
                # Single elements move further than their root mean square.
                if not are_one_program(p, q, self.unit, 2 * moved):
                    return False
        return True

    def _gap(self, key: Key) -> Any:
        partner = self.both.of_b.get(key)
        mine = self.inside.values[1].get(key, [])
        theirs = self.inside.values[0].get(partner, []) if partner is not None else []
        if not mine or not theirs or not mine[0] or not theirs[0]:
            return None
        one, other = theirs[0][0], mine[0][0]
        return apart(one, other) if one.shape == other.shape else None

    def _feeds(self, key: Key, reader: Key) -> bool:
        todo, seen = [reader], set()
        while todo:
            each = todo.pop()
            if each == key:
                return True
            if each in seen or each not in self.both.b.named:
                continue
            seen.add(each)
            todo += self._reads(each)
        return False

    def _reads(self, key: Key) -> list[Any]:
        """What an operation reads: results, and what was written into them before."""
        side = self.both.b
        named = side.named[key]
        graph, (inside, name) = key
        found: list[Any] = []
        for node in named.node.all_input_nodes:
            found.append(side.origin(graph, inside, node))
            found += [
                (graph, (inside, writer.name))
                for writer in writers_of(node)
                if writer.name != name and writer < named.node
            ]
        # What is inside of an operation that runs other graphs returns its results.
        for other in side.named:
            around, (within, _) = other
            if around == graph and within[:-1] == inside and within and within[-1][0] == name:
                found.append(other)
        return found


def _at(moved: list[list[float]] | None, turn: int, place: int) -> float:
    """How far a tensor moves, root mean square."""
    return 0.0 if moved is None else moved[turn][place]


def _shapes(turns: list[list[Tensor]]) -> Any:
    return tuple(tuple(x.shape for x in made) for made in turns)


def _size(turns: list[list[Tensor]]) -> float:
    """The root mean square of the first tensor that an operation makes."""
    return rms_of(in_double(turns[0][0])) if turns and turns[0] else 0.0


def _titles(all_named: Any) -> str:
    titles = [each.title for each in all_named if each.is_step]
    more = len(titles) - SHOWN
    return ", ".join(titles[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _compared(named: Named, reason: str, own: Any, side: Any) -> Compared:
    return Compared(
        named.title,
        kind=named.kind,
        module=named.module,
        source=named.source,
        own=own,
        only_in=side,
        reason=reason,
    )

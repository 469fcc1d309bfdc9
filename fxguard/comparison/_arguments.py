"""What A has for each argument of a graph of B: the same weight, the same input."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fxguard.comparison._runs import ModelRun
from fxguard.comparison._sides import Twin, placeholders, standing
from fxguard.comparison._weights import difference_between

__all__ = ["Arguments", "weights_by_twin"]

FIRST = 16  # elements that decide whether two weights are worth a comparison


def _weights_of(model: ModelRun) -> dict[str, Tensor]:
    """The weights and buffers that the graphs of a model read, by name, in order."""
    found: dict[str, Tensor] = {}
    for kept in model.runs:  # the first graph that reads a buffer has its old value
        args = kept.run.args
        assert args is not None
        for position, name in standing(kept.run).items():
            if isinstance(args[position], Tensor):
                found.setdefault(name, args[position])
    return found


def twins_of(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Twin]:
    """The weight of A that each weight of B is: by name, else by content, else by order.

    A weight that is stored transposed is the same weight. A weight of B without a twin, such as
    three that were joined into one, keeps its own value.
    """
    found: dict[str, Twin] = {}
    for name in a.keys() & b.keys():
        if twin := _by_name(name, a[name], b[name]):
            found[name] = twin
    others = {name: x for name, x in a.items() if name not in b}
    alone = [name for name in b if name not in a]
    for name in alone:
        twin = next(_by_content(b[name], others), None)
        if twin is not None:
            found[name] = twin
            del others[twin.name]
    if len(a) == len(b):  # their names have another prefix
        for name, other in zip(b, a, strict=True):
            if name not in found and other in others and others[other].shape == b[name].shape:
                found[name] = Twin(other)
    return found


def _by_name(name: str, a: Tensor, b: Tensor) -> Twin | None:
    if a.shape == b.shape and not (a.dim() == 2 and difference_between(a.detach(), b.detach())):
        return Twin(name)
    if a.dim() == 2 and a.mT.shape == b.shape and _are_alike(a.detach().mT, b.detach()):
        return Twin(name, is_transposed=True)
    return Twin(name) if a.shape == b.shape else None


def _by_content(b: Tensor, others: Mapping[str, Tensor]) -> Iterator[Twin]:
    b = b.detach()
    for name, a in others.items():
        if _are_alike(a.detach(), b):
            yield Twin(name)
        elif a.dim() == 2 and _are_alike(a.detach().mT, b):
            yield Twin(name, is_transposed=True)


def _are_alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    first = tuple(x[(slice(FIRST),) * x.dim()].contiguous() for x in (a, b))
    return not difference_between(*first) and not difference_between(a, b)


@dataclass(frozen=True, slots=True)
class Arguments:
    """What A has for what B's graphs read."""

    a: ModelRun
    b: ModelRun
    weights: dict[str, Tensor]  # of A
    weights_of_b: dict[str, Tensor]
    twins: dict[str, Twin]  # by the name of B's weight
    differing: dict[str, str]  # weights of B that are not their twin, and how they differ
    own: frozenset[str] = frozenset()  # weights of B that keep the value that they have in B

    @classmethod
    def between(cls, a: ModelRun, b: ModelRun) -> Arguments:
        """For two models that have run."""
        weights, of_b = _weights_of(a), _weights_of(b)
        found = cls(a, b, weights, of_b, twins_of(weights, of_b), {})
        for name in found.twins:
            twin, own = found.weight(name), of_b[name]
            if twin is None or twin is own:
                continue
            if difference := difference_between(twin.detach(), own.detach()):
                found.differing[name] = difference
        return found

    def keeping(self, names: Collection[str]) -> Arguments:
        """The same, but some weights of B keep their own values."""
        return replace(self, own=frozenset(names))

    def name_in_a(self, name: str) -> str:
        """What a weight of B is called in A."""
        return self.twins[name].name if name in self.twins else name

    @property
    def unshared(self) -> tuple[set[str], set[str]]:
        """Weights of A and of B whose values the other model does not have."""
        shared = {name: twin.name for name, twin in self.twins.items() if name not in self.own}
        return self.weights.keys() - shared.values(), self.weights_of_b.keys() - shared.keys()

    def frozen(self) -> dict[str, str]:
        """Weights, named as in A, of which one model alone asks for a gradient, and which one."""
        names = {twin.name: name for name, twin in self.twins.items()}
        found = {}
        for name, theirs in self.a.parameters.items():
            mine = self.b.parameters.get(names.get(name, ""))
            if mine is not None and mine.requires_grad != theirs.requires_grad:
                found[name] = "A" if theirs.requires_grad else "B"
        return found

    def of(self, number: int, returned: Sequence[Sequence[Any]]) -> list[Any]:
        """A's value for each argument of a graph of B; B's own if A has none.

        Args:
            number: the number of the graph.
            returned: what earlier graphs of B returned in their second form.
        """
        made = {
            id(output): value
            for kept, second in zip(self.b.runs, returned, strict=False)
            for output, value in zip(kept.outputs, second, strict=True)
        }
        given = self.a.given
        inputs = {id(x): given[n] for n, x in enumerate(self.b.given) if n < len(given)}
        run = self.b.runs[number].run
        names = standing(run)
        found = []
        assert run.args is not None
        for position, own in enumerate(run.args):
            other: Any = None
            if position in names:
                other = self.weight(names[position])
            elif isinstance(own, Tensor):
                other = made.get(id(own), inputs.get(id(own)))
                other = self._in_place(number, position) if other is None else other
            both = isinstance(own, Tensor) and isinstance(other, Tensor)
            found.append(other if both and own.shape == other.shape else own)
        return found

    def _in_place(self, number: int, position: int) -> Any:
        """What A has for what was made between graphs: what its graph reads by the same name."""
        if len(self.a.runs) != len(self.b.runs):
            return None
        run = self.a.runs[number].run
        names, name = placeholders(run), placeholders(self.b.runs[number].run)[position]
        if run.args is None or name not in names or names.index(name) in standing(run):
            return None
        return run.args[names.index(name)]

    def weight(self, name: str) -> Tensor | None:
        """A's value for a weight of B, in the layout of B; None if A has none."""
        twin = self.twins.get(name)
        if twin is None or name in self.own:
            return None
        weight = self.weights[twin.name]
        return weight.detach().mT if twin.is_transposed else weight


def weights_by_twin(found: Mapping[str, Tensor], twins: Mapping[str, Twin]) -> dict[str, Tensor]:
    """Tensors of B, one for each weight, by the names and in the layouts of A."""
    named: dict[str, Tensor] = {}
    for name, x in found.items():
        twin = twins.get(name)
        if twin is None:
            named.setdefault(name, x)
        else:
            named[twin.name] = x.mT if twin.is_transposed else x
    return named

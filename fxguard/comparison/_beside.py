"""Runs a captured graph of B again: each operation also on the operands of A's operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.comparison._aligned import Aligned
from fxguard.comparison._culprits import Culprits
from fxguard.comparison._evaluated import as_dtypes_of, evaluated, in_float64, shares_memory
from fxguard.comparison._judged import Judge, Sides
from fxguard.comparison._memory import gives_memory, with_zeros
from fxguard.comparison._recorded import Made, Recorded, copied, values_of
from fxguard.comparison._rounding import is_same
from fxguard.comparison._sides import Key, Named
from fxguard.comparison.elements import Compared
from fxguard.forgiving import theirs
from fxguard.graph.nodes import leaves
from fxguard.graph.wide_form import NotJudged, Ran, is_float, widened
from fxguard.rerun.walk import SecondForm, Walk

__all__ = ["Beside"]


class Beside(SecondForm):
    """Runs each operation of B on what A's operation read, and continues with A's results.

    The second form of a value is A's value in the same place, in A's dtypes. Operations that only B
    has compute in float64, so that they add no roundings.

    Args:
        recorded: the graphs of A.
        aligned: which operation of A corresponds to which operation of B.
        judge: compares an operation.

    Attributes:
        found: what was compared, in order of execution.
        not_compared: operations that were not compared, and why.
        differing: names of weights and buffers that differ from A's, and how.
        returned: what each graph of B returned in its second form.
        misshapen: positions in ``found`` of operations with different shapes, and how they differ.
        suspects: positions in ``found`` of operations of another program that do not read the same
            in both models, and which operation of B reads that.
        reweighed: positions in ``found`` of operations that are the first to read a weight that
            differs, and which operation of B it is.
    """

    def __init__(self, recorded: Sequence[Recorded], aligned: Aligned, judge: Judge) -> None:
        self.recorded = recorded
        self.aligned = aligned
        self.judge = judge
        self.culprits = Culprits(aligned)
        self.found: list[Compared] = []
        self.not_compared: dict[str, str] = {}
        self.differing: dict[str, str] = {}
        self.returned: list[list[Any]] = []
        self.misshapen: dict[int, str] = {}
        self.suspects: dict[int, Key | None] = {}
        self.reweighed: dict[int, Key] = {}
        self._said: set[str] = set()  # weights that differ and have been named
        self.begin(0, {}, writes=False)

    def begin(self, graph: int, weights: Mapping[str, str], *, writes: bool) -> None:
        """A graph of B is about to run.

        Args:
            graph: its number.
            weights: names of its inputs that are weights or buffers: they stay as B has them.
            writes: whether one of its operations writes a tensor.
        """
        self.graph = graph
        self.weights = weights
        self.writes = writes
        self._whole: set[str] = set()  # nodes whose body runs inside them

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return True

    def copy_of(self, memory: Tensor) -> Tensor:
        return memory.clone()

    def before(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> None:
        if walk.kind_of(node) is not None:  # its body runs inside it
            self._whole.add(node.name)

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        key = self.graph, walk.place(node)
        if any(name in self._whole for name, _ in walk.inside):
            return ran.result
        if walk.levels:  # tensors of a level do not outlive it, so nothing of A is left
            raise NotJudged("they run inside torch.func")
        if gives_memory(ran):
            with_zeros(ran.result)
        named = self.aligned.b.named.get(key)
        partner = self.aligned.of_b.get(key)
        made = None if partner is None else self.recorded[partner[0]].next_of(partner[1])
        if named is None or made is None or not _same_shapes(made, walk, ran):
            if named is not None and made is not None:
                self._shapes_differ(named, made, ran)
            return self._alone(walk, node, ran, args, kwargs)
        if not gives_memory(ran):
            self._compare(walk, node, ran, args, kwargs, named, made)
        return self._as_in_a(walk, ran, args, kwargs, made)

    # A's value in place of B's.

    def _alone(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        """The result of an operation that only B has, on A's values."""
        if gives_memory(ran):
            return widened(ran.result, torch.float64)
        if not ran.has_floats and not ran.call.written:
            return ran.result
        if ran.call.written or shares_memory(ran):
            try:
                with torch.no_grad():
                    return ran.run(*args, **kwargs)
            except theirs() as error:  # dtypes that cannot be combined
                raise NotJudged(f"{ran.call.kind} of B alone does not run on A's values") from error
        try:
            values = in_float64(ran, node, args, kwargs)
        except NotJudged:
            values = evaluated(ran, node, *self._own(walk, node), None)
        return _in_structure(ran.result, values)

    def _as_in_a(self, walk: Walk, ran: Ran, args: Any, kwargs: Any, made: Made) -> Any:
        """The result of A's operation, in the memory that B's operation has for it."""
        values = copied(made.values) if self.writes else made.values
        shares = self.writes and shares_memory(ran)  # invisible if nothing is written
        if not ran.call.written and not shares:
            return _in_structure(ran.result, values)
        try:
            with torch.no_grad():
                result = ran.run(*args, **kwargs)
                mine = values_of(result, ran.call, lambda x: walk.others.get(x, walk.env[x]))
                for one, other in zip(mine, values, strict=True):
                    # Operations that only B has made it in float64, and A rounds it.
                    if is_float(one) and (ran.call.written or not is_same(one, other)):
                        one.copy_(other)
        except theirs() as error:  # shapes or dtypes that do not go together
            raise NotJudged(f"{ran.call.kind} does not run on A's values") from error
        return result

    # How far apart the two are.

    def _compare(
        self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any, named: Named, made: Made
    ) -> None:
        weights = self._weights_of(walk, node)
        actual = values_of(ran.result, ran.call, walk.env.__getitem__)
        sides = Sides(
            made=made,
            ran=ran,
            node=node,
            exact=(args, kwargs),
            own=self._own(walk, node),
            actual=actual,
            is_wired_alike=self._is_wired_alike(walk, node, made),
        )
        try:
            judged = self.judge.compare(sides, weights)
        except NotJudged as reason:
            self.not_compared[named.title] = str(reason)
            return
        if judged is None:
            return
        found, key = judged.found, (self.graph, walk.place(node))
        found = replace(
            found, title=named.title, kind=named.kind, module=named.module, source=named.source
        )
        culprit = None
        if found.reason and not weights:
            culprit = self.culprits.behind(self.graph, walk, node, made.node)
        if culprit is not None:
            alone, side = culprit
            found = replace(
                found,
                title=alone.title,
                kind=alone.kind,
                module=alone.module,
                source=alone.source,
                only_in=side,
                reason=f"{self._alone_in(side)}, and {named.title} then reads other values",
            )
        if not found.reason and any(_tell(x) for x in made.values):
            self.culprits.clear(self.graph, walk, node, made.node)
        if named.is_step or found.reason:
            if judged.is_program and (culprit is not None or key not in self.aligned.alike):
                self.suspects[len(self.found)] = key
            if weights:
                self.reweighed[len(self.found)] = key
            self.found.append(found)

    def _alone_in(self, side: str) -> str:
        other = self.aligned.b if side == "A" else self.aligned.a
        return f"{side} alone has it" if other.is_whole else f"it is in a graph of {side} alone"

    def _shapes_differ(self, named: Named, made: Made, ran: Ran) -> None:
        shapes = [
            [list(x.shape) for x in leaves(result) if isinstance(x, Tensor)]
            for result in (made.ran.result, ran.result)
        ]
        self.suspects[len(self.found)] = named.key
        self.misshapen[len(self.found)] = "shapes differ: {} in A, {} in B".format(*shapes)
        self.found.append(
            Compared(named.title, kind=named.kind, module=named.module, source=named.source)
        )

    def _own(self, walk: Walk, node: Node) -> tuple[Any, Any]:
        """Arguments of B's operation: A's values in B's dtypes, weights as B has them."""
        written = set(walk.call_of(node).written)

        def own(read: Node) -> Any:
            low = walk.env[read]
            if not walk.inside and read.name in self.weights and read not in written:
                return low
            return as_dtypes_of(walk.others.get(read, low), low)

        args: tuple[Any, ...] = torch.fx.node.map_arg(node.args, own)
        kwargs: dict[str, Any] = torch.fx.node.map_arg(node.kwargs, own)
        return args, kwargs

    def _weights_of(self, walk: Walk, node: Node) -> tuple[str, ...]:
        """The differing weights that an operation is the first to read."""
        found = []
        for read in node.all_input_nodes if not walk.inside else ():
            name = self.weights.get(read.name, "")
            if name in self.differing and name not in self._said:
                self._said.add(name)
                found.append(f"{name}: {self.differing[name]}")
        return tuple(found)

    def _is_wired_alike(self, walk: Walk, node: Node, made: Made) -> bool:
        """Whether both operations read the results of operations that are aligned."""
        mine, theirs = node.all_input_nodes, made.node.all_input_nodes
        if len(mine) != len(theirs):
            return False
        graph, (inside, _) = self.aligned.of_b[self.graph, walk.place(node)]
        for x, y in zip(mine, theirs, strict=True):
            if x.op == y.op == "get_attr" or (walk.inside and x.op == y.op == "placeholder"):
                continue
            one = self.aligned.b.origin(self.graph, walk.inside, x)
            other = self.aligned.a.origin(graph, inside, y)
            if self.aligned.of_b.get(one, one) != other:  # type: ignore[call-overload]
                return False
        return True


def _tell(x: Any) -> bool:
    """Whether a result says anything about operands: that of ``zeros_like`` does not."""
    return is_float(x) and bool((x != x.flatten()[:1]).any())


def _same_shapes(made: Made, walk: Walk, ran: Ran) -> bool:
    mine = values_of(ran.result, ran.call, walk.env.__getitem__)
    if len(mine) != len(made.values):
        return False
    return all(
        x.shape == y.shape
        for x, y in zip(mine, made.values, strict=True)
        if isinstance(x, Tensor) and isinstance(y, Tensor)
    )


def _in_structure(like: Any, values: list[Any]) -> Any:
    """Values in the structure of a result."""
    flat, spec = trees.tree_flatten(like)
    taken = [
        value if isinstance(one, Tensor) and isinstance(value, Tensor) else one
        for one, value in zip(flat, values[: len(flat)], strict=True)
    ]
    return trees.tree_unflatten(taken, spec)

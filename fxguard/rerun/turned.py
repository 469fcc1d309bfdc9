"""Whether an operation on intended infinities made another one, out of finite elements."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Node

from fxguard.batch.events import GraphRun
from fxguard.graph.wide_form import Ran
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Check
from fxguard.rerun.lockstep import Lockstep, SecondForm
from fxguard.rerun.same_start import as_before, copies_of

__all__ = ["turned_infinite"]


def turned_infinite(run: GraphRun, value: int) -> bool | None:
    """Whether an element is infinite although all that it was made of is finite.

    The graph runs again, up to the operation that made the value. That one is taken to work
    element by element, on operands that are broadcast.

    Args:
        run: of a graph, not closed yet.
        value: of its plan.

    Returns:
        None where that cannot be seen: no second run is possible, or nothing is infinite in it.
    """
    slot = run.plan.values[value].slot
    if run.args is None or not run.repeated or slot is None:
        return None
    look = _Look(run.plan.checks[slot])
    try:
        with as_before(run):
            Lockstep(without_marks(run.graph_module), look).run_both(copies_of(run))
    except _Ended:
        pass
    except Exception:  # whatever stops the second run, the infinity is taken to be intended
        return None
    return look.turned


class _Ended(Exception):  # noqa: N818 - a signal, not an error
    pass


class _Look(SecondForm):
    """No second form: a look at what one operation reads and makes."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.turned: bool | None = None
        self.infinite: list[Tensor] = []  # where its operands are

    def wants(self, step: Lockstep, node: Node, differs: bool) -> bool:
        return step.place(node) == (self.check.inside, self.check.after)

    def before(self, step: Lockstep, node: Node, args: Any, kwargs: Any) -> None:
        if self.wants(step, node, differs=False):
            operands = pytree.tree_leaves((args, kwargs))
            self.infinite = [~torch.isfinite(x) for x in operands if isinstance(x, Tensor)]
            numbers = (x for x in operands if isinstance(x, (int, float)))
            self.infinite += [torch.tensor(not math.isfinite(x)) for x in numbers]

    def follow(self, step: Lockstep, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        return ran.result

    def after(self, step: Lockstep, node: Node, args: Any, kwargs: Any) -> None:
        made: Any = next(step.env[each] for each in step.env if each.name == self.check.node)
        for index in self.check.path:
            made = made[index]
        turned = torch.isinf(made)
        if not turned.any():
            return  # the second run does not repeat the first; or another iteration of a loop does
        for infinite in self.infinite:
            turned = turned & ~infinite.to(made.device).broadcast_to(made.shape)
        self.turned = bool(turned.any())
        if self.turned or not self.check.inside:
            raise _Ended

    def copy_of(self, memory: Tensor) -> Tensor:
        return memory.clone()

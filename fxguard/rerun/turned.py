"""Whether an operation on intended infinities made another one, out of finite elements."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Node

from fxguard.batch.events import GraphRun
from fxguard.plan.plan import Check
from fxguard.rerun.node_by_node import NodeByNode
from fxguard.rerun.same_start import as_before, copies_of

__all__ = ["turned_infinite"]


class _Ended(Exception):  # noqa: N818 - a signal, not an error
    pass


def turned_infinite(run: GraphRun, value: int) -> bool | None:
    """Whether an element is infinite although all that it was made of is finite.

    The graph runs again, up to the operation that made the value. That one is taken to work
    element by element, on operands that are broadcast.

    Args:
        run: of a graph, not closed yet.
        value: of its plan.

    Returns:
        None where that cannot be seen: no second run is possible, or it did not repeat the first.
    """
    slot = run.plan.values[value].slot
    if run.args is None or not run.repeated or slot is None:
        return None
    read: list[Tensor] = []  # where each operand is not finite
    found: list[bool] = []

    def before(number: int, check: Check, node: Node, args: Any, kwargs: Any) -> None:
        operands = pytree.tree_leaves((args, kwargs))
        read[:] = [~torch.isfinite(x) for x in operands if isinstance(x, Tensor)]
        read.extend(
            torch.tensor(not math.isfinite(x)) for x in operands if isinstance(x, (int, float))
        )

    def visit(number: int, made: Any, repeats: bool) -> None:
        turned = torch.isinf(made)
        for infinite in read:
            turned = turned & ~infinite.to(made.device).broadcast_to(made.shape)
        found.append(bool(turned.any()))
        if found[-1] or not repeats:
            raise _Ended

    checks = [(slot, run.plan.checks[slot])]
    try:
        with as_before(run):
            NodeByNode(run.graph_module, checks, visit, before=before).run(*copies_of(run))
    except _Ended:
        pass
    except Exception:  # whatever stops the second run, today's answer stands
        return None
    return any(found) if found else None

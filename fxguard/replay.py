"""Run a captured graph again, to look at one value that only the graph has seen."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from fxguard import stats
from fxguard.batch import GraphRun

__all__ = ["detail_of"]


# How far the largest magnitudes of the two runs may be apart: compilers keep more digits between
# fused operations. Other random numbers differ by more.
TOLERANCE = 0.02


class _Ended(Exception):  # noqa: N818 - a signal, not an error
    def __init__(self, detail: stats.Detail | None) -> None:
        self.detail = detail


class _UpTo(Interpreter):
    """Runs a graph up to one check and describes what is measured there.

    The checks on the way are compared with the numbers of the first run.
    """

    def __init__(self, run: GraphRun, slot: int) -> None:
        super().__init__(run.graph_module)
        self.slot = slot
        self.checks = run.plan.checks
        self.expected = run.statistics.tolist()
        self.by_name = {node.name: node for node in run.graph_module.graph.nodes}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        for slot, check in enumerate(self.checks):
            if check.after != n.name:
                continue
            value = result if check.node == n.name else self.env.get(self.by_name[check.node])
            if value is None:
                continue  # freed already: nobody reads it any more
            for index in check.path:
                value = value[index]
            if slot == self.slot:
                detail = stats.describe(value)
                same = _severity(detail) == _severity_of(self.expected[slot])
                raise _Ended(detail if same else None)
            if not _agree(float(stats.abs_min_max(value)[1]), self.expected[slot][1]):
                raise _Ended(None)
        return result


def detail_of(run: GraphRun, value: int) -> stats.Detail | None:
    """What a value of a graph held that is not finite.

    Returns:
        None where the second run did not give the numbers of the first: under a compiler whose
        random numbers differ from eager ones, or after an input was overwritten.
    """
    slot = run.plan.values[value].slot
    if slot is None or run.args is None:
        return None
    used = [a.device.index for a in run.args if isinstance(a, Tensor) and a.device.type == "cuda"]
    with (
        torch.random.fork_rng(devices=sorted(set(used))),
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
    ):
        if run.random_state is not None:
            run.random_state.restore()
        try:
            _UpTo(run, slot).run(*_copies(run))
        except _Ended as ended:
            return ended.detail
        except Exception:  # whatever stops the second run, the report goes out without counts
            return None
    return None


def _agree(one: float, other: float) -> bool:
    if math.isfinite(one) and math.isfinite(other):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-30)
    return str(one) == str(other)


def _severity(detail: stats.Detail) -> int:
    return 2 if detail.nan_count else int(detail.posinf_count + detail.neginf_count > 0)


def _severity_of(pair: list[float]) -> int:
    number = stats.decode(*pair)
    return 0 if isinstance(number, str) else number.severity


def _copies(run: GraphRun) -> list[Any]:
    """The graph's inputs, with everything that it may write copied."""
    assert run.args is not None
    writable = {value.argument for value in run.plan.values if value.kind in ("input", "buffer")}
    return [
        a.detach().clone() if i in writable and isinstance(a, Tensor) else a
        for i, a in enumerate(run.args)
    ]

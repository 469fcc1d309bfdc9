"""Run a captured graph again, to look at one value that only the graph has seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxguard import stats
from fxguard.batch import GraphRun

__all__ = ["detail_of"]


class _Found(Exception):  # noqa: N818 - a signal, not an error
    def __init__(self, detail: stats.Detail) -> None:
        self.detail = detail


class _UpTo(Interpreter):
    """Runs a graph up to one check and describes what is measured there."""

    def __init__(self, graph_module: GraphModule, run: GraphRun, slot: int) -> None:
        super().__init__(graph_module)
        self.check = run.plan.checks[slot]
        self.measured: Node | None = None

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.name == self.check.node:
            self.measured = n
        if n.name == self.check.after and self.measured is not None:
            value = result if n is self.measured else self.env[self.measured]
            for index in self.check.path:
                value = value[index]
            raise _Found(stats.describe(value))
        return result


def detail_of(run: GraphRun, value: int) -> stats.Detail | None:
    """What a value of a graph held that is not finite.

    Returns:
        None where the second run did not give the same kind of value: under a compiler whose
        random numbers differ from eager ones, or after an input was overwritten.
    """
    slot = run.plan.values[value].slot
    if slot is None or run.args is None:
        return None
    low, high = run.statistics[slot].tolist()
    expected = stats.decode(low, high)
    used = [a.device.index for a in run.args if isinstance(a, Tensor) and a.device.type == "cuda"]
    with (
        torch.random.fork_rng(devices=sorted(set(used))),
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
    ):
        if run.random_state is not None:
            run.random_state.restore()
        try:
            _UpTo(run.graph_module, run, slot).run(*_copies(run))
        except _Found as found:
            detail = found.detail
        except Exception:  # whatever stops the second run, the report goes out without counts
            return None
        else:
            return None
    severity = 2 if detail.nan_count else int(detail.posinf_count + detail.neginf_count > 0)
    if isinstance(expected, str) or severity != expected.severity:
        return None
    return detail


def _copies(run: GraphRun) -> list[Any]:
    """The graph's inputs, with everything that it may write copied."""
    assert run.args is not None
    writable = {value.argument for value in run.plan.values if value.kind in ("input", "buffer")}
    return [
        a.detach().clone() if i in writable and isinstance(a, Tensor) else a
        for i, a in enumerate(run.args)
    ]

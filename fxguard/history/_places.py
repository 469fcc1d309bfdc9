"""Which operation of its module and line a series is of: ``#2 run 3``, the detail of the series."""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["MOST", "Place", "detail_of", "place_of", "placed"]

MOST = 8  # operations of one kind, module and line, and runs of one graph: others count as the last

# Which one it is in a run of its graph, and in which run of the graph in the step; from 1.
Place = tuple[int, int]


def detail_of(which: int, run: int) -> str:
    """The detail of a series; "" for the first operation in the first run of its graph."""
    return " ".join([f"#{which}"] * (which > 1) + [f"run {run}"] * (run > 1))


def place_of(detail: str) -> Place:
    """What :func:`detail_of` was given."""
    which, run = re.search(r"#(\d+)", detail), re.search(r"run (\d+)", detail)
    return int(which[1]) if which else 1, int(run[1]) if run else 1


def placed(index: int, count: int, known: Collection[Place]) -> Place | None:
    """Where an operation of a batch has its series.

    A batch has no runs of graphs any more, but the operations of one kind, module and line in the
    order of execution.

    Args:
        index: of the operation among them, from 0.
        count: how many there are in the batch.
        known: the places of their series.

    Returns:
        One of these; None if the batch has others, so that nobody can tell which one it is.
    """
    in_graph = max((which for which, _ in known), default=1)
    runs = max((run for _, run in known), default=1)
    if runs == 1 and (count <= in_graph or in_graph == MOST):
        found = min(index + 1, MOST), 1
    elif runs == 1 and count % in_graph == 0:  # several graphs
        found = index % in_graph + 1, 1
    elif runs > 1 and in_graph < MOST and (count <= in_graph * runs or runs == MOST):
        if count % in_graph:
            return None
        found = index % in_graph + 1, min(index // in_graph + 1, MOST)
    else:
        return None
    return found if found in known else None

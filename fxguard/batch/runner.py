"""Who runs the operations of a batch in the place of Python: a tool that runs them twice."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from fxguard.batch.events import GraphRun
from fxguard.batch.watchers import BatchWatcher

__all__ = ["Runner", "runner_of"]


class Runner(BatchWatcher, abc.ABC):
    """Runs what a batch runs, with the same results."""

    @abc.abstractmethod
    def run_graph(self, run: GraphRun, ran: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run a graph.

        Args:
            run: the run, which is beginning.
            ran: what runs it.
            args: its arguments.

        Returns:
            What it returns.
        """

    @abc.abstractmethod
    def run_operation(
        self, function: Callable[..., Any], args: Any, kwargs: Any, kind: str, module: str
    ) -> Any:
        """Run an operation between graphs.

        Args:
            function: what is called.
            args: its arguments.
            kwargs: likewise.
            kind: its name.
            module: in which it runs.

        Returns:
            What it returns.
        """


def runner_of(watchers: Sequence[BatchWatcher]) -> Runner | None:
    """The runner among those who watch a batch."""
    return next((each for each in watchers if isinstance(each, Runner)), None)

"""In which batches every operation of a graph is measured, if not in all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fxguard.options import Options

__all__ = ["FullBatches"]


@dataclass(frozen=True, slots=True)
class FullBatches:
    """The batches in which every operation is measured. In the others only outputs of graphs are.

    Attributes:
        is_now: whether the graphs that run now belong to one.
        are_any: whether there will be any.
    """

    is_now: Callable[[], bool]
    are_any: bool

    @classmethod
    def of(cls, options: Options, number: Callable[[], int | None]) -> FullBatches | None:
        """What the options ask for; None if every batch is a full one.

        Args:
            options: what the user asked for.
            number: the number of the batch that the graphs belong to; None if that is unknown.
        """
        if not options.postpones:
            return None

        def is_now() -> bool:
            now = number()
            return now is not None and options.is_full(now)

        return cls(is_now, options.full_every is not None or bool(options.trace_batch_nums))

"""The user's options, checked in one place.

The fields of :class:`Options` are the only list of options: the command line is built from them,
and ``tests/guard/test_options.py`` compares the functions that take options with the list.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import TypedDict  # torch needs it too

from fxguard import globs
from fxguard.errors import UsageError
from fxguard.plan.plan import Step
from fxguard.report.report import Report

__all__ = ["Granularity", "InstrumentOptions", "OnDetect", "Options"]

OnDetect = Literal["raise", "warn"] | Callable[[Report], Any]
Granularity = Literal["op", "module"]


class InstrumentOptions(TypedDict, total=False):
    """The options of :func:`fxguard.instrument`, for functions that pass them on."""

    max_frames_to_save: int
    trace_batch_nums: Iterable[int]
    abort_after_batch_num: int | None
    on_detect: OnDetect
    granularity: Granularity
    strict: bool
    ignore: Iterable[str]
    replay: bool
    full_every: int | None
    backward: bool
    loss_scale: float | Callable[[], float] | None
    underflow: float | None
    reproduce_to: str | os.PathLike[str] | None
    reproduce_ranges_only: bool
    sync_ranks: bool
    trace_to: str | os.PathLike[str] | None
    history: str | os.PathLike[str] | None
    history_weights: bool
    stop_at_event: bool
    recheck: int | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of :func:`fxguard.instrument`, checked on construction."""

    # The metadata are argparse's arguments for the option.
    max_frames_to_save: int = field(
        default=21, metadata={"help": "how many frames a report shows (21)", "metavar": "N"}
    )
    trace_batch_nums: Iterable[int] = field(
        default=(),
        metadata={
            "help": "print every frame of these batches; turns detection off",
            "metavar": "N,N",
        },
    )
    trace_to: str | os.PathLike[str] | None = field(
        default=None,
        metadata={
            "help": "write traced batches and detections into files in this folder",
            "metavar": "FOLDER",
        },
    )
    history: str | os.PathLike[str] | None = field(
        default=None,
        metadata={
            "help": "keep the numbers of every training step in this folder, and say why the loss "
            "jumped",
            "metavar": "FOLDER",
        },
    )
    history_weights: bool = field(
        default=False,
        metadata={
            "help": "when the loss jumps, also try the weights of the four steps before: takes the "
            "memory of four copies of the weights"
        },
    )
    stop_at_event: bool = field(
        default=False,
        metadata={"help": "end the run at the first event of the history, with status 4"},
    )
    recheck: int | None = field(
        default=None,
        metadata={
            "help": "run the operations of every N-th step twice, forward and backward, and note "
            "what does not repeat bit for bit",
            "metavar": "N",
        },
    )
    abort_after_batch_num: int | None = field(
        default=None,
        metadata={
            "help": "end the run after this batch; batches are counted from 0",
            "metavar": "N",
        },
    )
    on_detect: OnDetect = field(
        default="raise",
        metadata={
            "help": "stop at a detection (raise), or print it and go on (warn)",
            "choices": ("raise", "warn"),
        },
    )
    granularity: Granularity = field(
        default="op",
        metadata={
            "help": "show frames of operations and modules (op), or of modules only (module)",
            "choices": ("op", "module"),
        },
    )
    strict: bool = field(
        default=False, metadata={"help": "also stop at bad values that reach no output"}
    )
    ignore: Iterable[str] = field(
        default=(),
        metadata={
            "help": 'modules ("decoder.*") or operations in them ("*.SelfAttention:log"); '
            "repeatable",
            "metavar": "GLOB",
        },
    )
    replay: bool = field(
        default=False,
        metadata={
            "help": "check only what leaves the captured graphs, and run them again, fully "
            "checked, when a bad value does"
        },
    )
    full_every: int | None = field(
        default=None,
        metadata={
            "help": "check every operation in each N-th batch, and in the others only what leaves "
            "the captured graphs, as --replay does",
            "metavar": "N",
        },
    )
    backward: bool = field(
        default=True,
        metadata={"help": "also check the gradients of weights and inputs after each backward"},
    )
    loss_scale: float | Callable[[], float] | None = field(
        default=None,
        metadata={
            "help": "the factor by which the script multiplies its loss, and later divides its "
            "gradients; a GradScaler is found without it",
            "metavar": "N",
        },
    )
    underflow: float | None = field(
        default=None,
        metadata={
            "help": "stop at an operation that turns this share of its elements (such as 0.5) into "
            "0 although they are not 0 in float64; checked in the first batch and every 100th",
            "metavar": "SHARE",
        },
    )
    reproduce_to: str | os.PathLike[str] | None = field(
        default=None,
        metadata={
            "help": "write the blamed operation and its operands into this folder, as a test that "
            "fails",
            "metavar": "FOLDER",
        },
    )
    reproduce_ranges_only: bool = field(
        default=False,
        metadata={
            "help": "with --reproduce-to: write random numbers of the same ranges in place of the "
            "model's own"
        },
    )
    sync_ranks: bool = field(
        default=False,
        metadata={
            "help": "under torchrun: all ranks stop together; each must call the model equally "
            "often"
        },
    )

    def __post_init__(self) -> None:
        switches = ("strict", "replay", "backward", "reproduce_ranges_only", "sync_ranks")
        for name in (*switches, "history_weights", "stop_at_event"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} has to be True or False, got {getattr(self, name)!r}")
        if not _is_int(self.max_frames_to_save) or self.max_frames_to_save < 1:
            raise UsageError(
                f"max_frames_to_save has to be 1 or more, got {self.max_frames_to_save!r}"
            )
        given, limit = self.trace_batch_nums, self.abort_after_batch_num
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise UsageError(f"trace_batch_nums has to be a list of batch numbers, got {given!r}")
        object.__setattr__(self, "trace_batch_nums", tuple(given))  # a generator is read once
        for number in (*self.trace_batch_nums, *(() if limit is None else (limit,))):
            if not _is_int(number) or number < 0:
                raise UsageError(f"batch numbers are integers from 0 on, got {number!r}")
        if not callable(self.on_detect) and self.on_detect not in ("raise", "warn"):
            raise UsageError(
                f'on_detect has to be "raise", "warn" or a callable, got {self.on_detect!r}'
            )
        if self.granularity not in ("op", "module"):
            raise UsageError(f'granularity has to be "op" or "module", got {self.granularity!r}')
        scale = self.loss_scale
        if scale is not None and not callable(scale) and not _is_positive(scale):
            raise UsageError(
                f"loss_scale has to be a number above 0, or a function that returns one, "
                f"got {scale!r}"
            )
        share = self.underflow
        if share is not None and not (_is_positive(share) and share <= 1):
            raise UsageError(
                f"underflow has to be a share above 0 and at most 1, such as 0.5, got {share!r}"
            )
        every = self.full_every
        if every is not None and not (_is_int(every) and every >= 1):
            raise UsageError(f"full_every has to be a number of batches from 1 on, got {every!r}")
        recheck = self.recheck
        if recheck is not None and not (_is_int(recheck) and recheck >= 1):
            raise UsageError(f"recheck has to be a number of steps from 1 on, got {recheck!r}")
        if self.replay and every is not None:
            raise UsageError(
                "replay=True is for no full batch, and full_every for each N-th: take one of them"
            )
        if self.replay and self.strict:
            raise UsageError(
                "strict asks for values that leave no graph, and replay looks at no others: "
                "take one of them"
            )
        for name in ("trace_to", "reproduce_to", "history"):
            folder = getattr(self, name)
            if folder is None:
                continue
            if not isinstance(folder, (str, os.PathLike)):
                raise UsageError(f"{name} has to be a folder, got {folder!r}")
            if os.path.exists(folder) and not os.path.isdir(folder):
                raise UsageError(f"{name} has to be a folder, and {folder} is a file")
        if self.reproduce_ranges_only and self.reproduce_to is None:
            raise UsageError(
                "reproduce_ranges_only says what is written into reproduce_to: give it"
            )
        if self.history_weights and self.history is None:
            raise UsageError("history_weights adds to what a history tries: give history too")
        if self.stop_at_event and self.history is None:
            raise UsageError("stop_at_event stops at an event of a history: give history too")
        patterns = self.ignore
        if isinstance(patterns, str) or not isinstance(patterns, Iterable):
            raise UsageError(f"ignore has to be a list of globs, got {patterns!r}")
        object.__setattr__(self, "ignore", tuple(patterns))
        for pattern in self.ignore:
            if not isinstance(pattern, str):
                raise UsageError(f"ignore has to be a list of globs, got {pattern!r} in it")

    def traces(self, number: int) -> bool:
        """Whether a batch is traced."""
        return number in self.trace_batch_nums

    @property
    def postpones(self) -> bool:
        """Whether there are batches in which only what leaves the captured graphs is measured."""
        return self.replay or (self.full_every is not None and self.full_every > 1)

    def is_full(self, number: int) -> bool:
        """Whether every operation is measured in a batch.

        With ``full_every=100`` these are the batches 99, 199 and so on, and traced ones.
        """
        if not self.postpones or self.traces(number):
            return True
        return self.full_every is not None and (number + 1) % self.full_every == 0

    def ignores(self, step: Step) -> bool:
        """Whether a glob such as ``decoder.*`` or ``*.SelfAttention:log`` names the operation."""
        return any(globs.matches(pattern, step.module, step.kind) for pattern in self.ignore)


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

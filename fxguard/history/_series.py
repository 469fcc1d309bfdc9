"""A series: one number that is measured in every step of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BUFFER", "ROWS", "ROW_SIZE", "SUMMED", "Kind", "Row", "Series"]

# Details of series.
BUFFER = "buffer"  # of a weight that no optimizer steps
ROWS = "number of rows"  # of an input or targets: their first dimension
ROW_SIZE = "size of a row"
SUMMED = "summed"  # of gradients: how many backwards they are the sum of

Kind = Literal[
    "input",  # of the model: largest magnitude, mean, share of zeros, distinct integers, shape
    "target",  # what the loss reads beside the model's outputs, likewise
    "graph",  # which form of a captured graph runs: one more for each that was captured anew
    "number",  # what an operation of the loss reads that is no tensor: a factor, a bound
    "operation",  # of the forward or the loss: smallest and largest magnitude of what it made
    "loss",  # the root of a backward
    "backward",  # of the gradients of an operation
    "gradient",  # of one weight, as the optimizer's step reads it: its norm
    "setting",  # of an optimizer: its learning rate
    "state",  # the largest magnitude of a state of an optimizer
    "step",  # how much the optimizer's step changes a weight, relative to its norm
    "weight",  # its norm when the step begins
    "drift",  # how much something else than the step has changed it since the last step
    "time",  # seconds
]


@dataclass(frozen=True, slots=True)
class Series:
    """What is measured.

    Within a step, series stand in the order of execution: inputs, operations of the forward,
    targets and operations of the loss, the loss, gradients, the optimizer's settings and states,
    steps and weights.
    """

    name: (
        str  # unique in a run, the same in a resumed one: "operation blocks.0 matmul gpt.py:31 #2"
    )
    kind: Kind
    what: str  # as an event names it: "blocks.0 matmul", "blocks.0.qkv.weight", "input 0"
    source: str = ""  # "gpt.py:31"
    order: int = 0  # position in the order of execution
    detail: str = ""  # of inputs and targets: "mean", "share of zeros", "distinct"
    dtype: str = ""  # of what an operation made: "float16"; "" if that is not known

    def __post_init__(self) -> None:
        for name in ("name", "what", "source", "detail"):
            text = getattr(self, name)
            if not text.isascii() and (written := _as_unicode(text)) != text:
                object.__setattr__(self, name, written)

    @property
    def has_sign(self) -> bool:
        """Whether it is judged with its sign: magnitudes have none."""
        return self.detail == "mean" or self.kind == "number"

    @property
    def is_gradient(self) -> bool:
        """Whether it is the norm of a weight's gradient, and not what else is known of that."""
        return self.kind == "gradient" and not self.detail

    @property
    def where(self) -> str:
        """The line to stand behind its name: `` (train.py:31)``; "" if that is not known."""
        return f" ({self.source})" if self.source else ""

    def told(self) -> dict[str, str]:
        """Which number it is, as plain data of records."""
        return {"series": self.name, "kind": self.kind, "what": self.what, "source": self.source}


@dataclass(frozen=True, slots=True)
class Row:
    """The numbers of one step; NaN where a series was not measured.

    Where NaN was measured, ``high`` is inf, and ``low`` NaN.
    """

    step: int
    low: list[float]  # by the position of the series in the order of their registration
    high: list[float]  # equal to `low` where there is one number


def _as_unicode(text: str) -> str:
    """A text with its lone surrogates written out: no file holds them."""
    return text.encode("utf-8", "backslashreplace").decode()

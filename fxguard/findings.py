"""Frozen data: what was found, and what to do about it: origins, fixes. Knows nothing of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fxguard.records import Frame, Role, Row, RowRole, Source

__all__ = ["Climb", "Fix", "Growth", "Origin", "OriginKey", "columns_text"]


@dataclass(frozen=True, slots=True)
class Growth:
    """A weight that is far larger than it was."""

    name: str  # "conv1.weight"
    now: float  # largest magnitude
    before: float  # the same, at the end of an earlier batch
    batch_number: int  # of that earlier batch
    # How far above what it began with the learning rate is, and what set it: "it is 8, 400 times
    # the 0.02 that SGD was given: LambdaLR set it, by `warmup` (train.py:4)"; "" if it is not.
    rate: str = ""

    @property
    def as_reason(self) -> str:
        """``fc.weight up to 250, it was 0.12 in batch 0: the weights``."""
        return (
            f"{self.name} up to {self.now:.2g}, it was {self.before:.2g} in batch "
            f"{self.batch_number}: the weights"
        )


@dataclass(frozen=True, slots=True)
class Climb:
    """One operation on the way to an origin, and how much larger it made what it read."""

    title: str  # "encoder.block.0 mul"
    before: float  # largest magnitude that it read
    after: float  # largest magnitude that it made
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class Fix:
    """What to do about an origin: one line."""

    # "exact": the same function in exact arithmetic. "tried": this batch was run with the fix.
    # "advice": a change of the data or the set-up, or one that changes the function.
    kind: str
    text: str  # "scale q before the product"
    # How an expression of the program becomes another, the letters being its operands; the first
    # that fits is meant: "log(1 - sigmoid(x)) -> logsigmoid(-x)". Or operations of one expression,
    # the failing one first, and their dtype: "pow, mean -> float32". Or an optimizer's step that a
    # GradScaler has to make, with what belongs to it: "o.step() -> s.step(o)".
    rewrites: tuple[str, ...] = field(default=(), compare=False)
    # The line and the operation that are rewritten, if they are not those of the origin.
    at: Source | None = field(default=None, compare=False)
    of: str = field(default="", compare=False)
    # The same as `rewrites` for a run alone: no patch is made of it, "log(a) -> log(a + 1e-12)".
    tries: tuple[str, ...] = field(default=(), compare=False)
    # What the rest of the graph did when it was run with the fix in the operation's place: "with it
    # the model's output is finite", "with it sqrt (net.py:9) makes NaN next". "" if it was not run.
    then: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.kind})"


# Prefixes of `Origin.what` if no operation made the value.
GIVEN = {
    "weight ": Role.WEIGHT,
    "buffer ": Role.BUFFER,
    "constant ": Role.CONSTANT,
    "argument ": Role.INPUT,
    "input ": Role.INPUT,
    "input[": Role.INPUT,
}

# Operations that make nothing: what they bring was made on another rank.
BROUGHT = frozenset(
    (
        *("recv", "irecv", "broadcast", "distributed.gather", "distributed.scatter"),
        *("all_gather", "all_gather_single", "all_gather_into_tensor", "all_gather_coalesced"),
        *("all_to_all", "all_to_all_single"),
    )
)
GRADIENT_OF = "gradient of "  # the same, if the operation that made a gradient is unknown

LOSS = "the loss"  # the same, if the operation that made the loss is unknown

OriginKey = tuple[str, str, str, Source | None]  # what, problem, module, source


@dataclass(frozen=True, slots=True)
class Origin:
    """The place that a bad value came from: an operation, a weight, or a model input.

    The counts describe the first bad tensor of that place. They are None if the tensor is gone and
    running its graph again did not give the same numbers.
    """

    frame: Frame
    problem: str  # "inf", "nan", or "underflow": elements that are 0 because of their dtype
    what: str  # "mul", "weight lin.weight", "argument `x` of Model.forward", "input[0] of mul"
    row: str  # label of the frame's row that is bad
    numel: int | None = None  # number of elements of the bad tensor
    nan_count: int | None = None
    posinf_count: int | None = None
    neginf_count: int | None = None
    largest_finite: float | None = None  # largest finite magnitude; None also if there is none
    first_index: tuple[int, ...] | None = None  # of the first element that is not finite
    rows: tuple[int, ...] = ()  # the first indices of dimension 0 that hold such an element
    row_count: int | None = None  # how many such rows; None if it has fewer than two dimensions
    # Of a matrix with several such rows: the columns that hold all such elements, if they are few.
    columns: tuple[int, ...] = ()
    dtype: str = ""  # of the bad tensor, "float16"
    limit: float | None = None  # the largest number that this dtype holds
    # The first element that is not finite; None if nobody looked at it.
    first_bad: float | None = None
    needed: float | None = None  # the largest magnitude that the operation makes in float64, or inf
    autocast: tuple[Row, ...] = ()  # what autocast cast to `dtype`, which cannot hold it
    follows: bool = False  # made from a bad value of another origin
    climb: tuple[Climb, ...] = ()  # where the magnitude grew most on the way to the origin
    # The first operations that the bad value reached, by title; for an optimizer's step, the other
    # weights that it made bad.
    spread: tuple[str, ...] = ()
    spread_count: int = 0  # how many there are in all
    reached_output: bool = False  # whether it is in what the guarded module returned
    # That module, if it is not the model: "criterion", "CrossEntropyLoss". "" for the model.
    returned_by: str = ""
    # "overflow", "underflow", "rounding", "zero divisor", "domain", "empty", "masked row",
    # "no alignment", "data", "weight", "memory"; "unknown" if it could not be determined.
    cause: str = "unknown"
    cause_in_words: str = ""  # as it is printed, "log of zero"; "" if its name says enough
    # What gave the operand its value: "`S` comes from kalman.py:23: S = P + R"; for a masked row,
    # where its mask was made, too; "" if unknown.
    comes_from: str = ""
    operands: str = ""  # the numbers at the first bad element: "at [5, 0]: 0.0 / 0.0"
    # Which call in a loop: "call 37 of `cell` in this forward; grew 2.0 times a call since call 0".
    turn: str = ""
    # The effect of an inf that left nothing bad behind: "the model's output is finite and wrong:
    # …"; "div (net.py:25) is computed of it".
    harm: str = ""
    # For an underflow: which share of the elements that are not 0 in float64, on the same operands,
    # is 0; and the largest magnitude of those elements in float64.
    lost_share: float | None = None
    largest_lost: float | None = None
    fixes: tuple[Fix, ...] = ()  # what to do about the origin, the best first
    # For a weight that was written since: the number of the last batch, which found it finite.
    good_in: int | None = None
    # Why it is unknown whether an absorbed inf or NaN does harm: "no float64 kernel for X".
    not_judged: str = ""

    @property
    def not_finite(self) -> str:
        """What it holds: ``NaN``, or its infinities by their signs, ``inf and -inf``.

        Infinities that nobody has counted are those of the first element that somebody looked at.
        """
        if self.problem == "nan":
            return "NaN"
        if self.nan_count is not None:
            signs = ("inf", self.posinf_count), ("-inf", self.neginf_count)
            return " and ".join(sign for sign, count in signs if count) or "inf"
        return "-inf" if self.first_bad == -math.inf else "inf"

    @property
    def masked_row(self) -> bool:
        """Whether the NaN comes from a row of nothing but -inf: every position is masked."""
        return self.cause == "masked row"

    @property
    def phase(self) -> str:
        """``"data"`` if the bad value was in the model's inputs; else ``"forward"``, ``"loss"``, …

        A gradient that was already bad when it came into the model has the phase ``"loss"``.
        """
        return "data" if self.role is Role.INPUT else self.frame.phase

    @property
    def role(self) -> Role:
        """What the bad value is to the batch: made by an operation, a weight, an input."""
        starts = (role for start, role in GIVEN.items() if self.what.startswith(start))
        return next(starts, Role.MADE)

    @property
    def is_operation(self) -> bool:
        """Whether an operation made the value; if not, a weight, a buffer or an input held it."""
        known = not self.what.startswith(GRADIENT_OF) and self.what != LOSS
        return self.role is Role.MADE and known

    @property
    def read_infinity(self) -> bool:
        """Whether an operation made it of an infinity that was taken for a mask's."""
        rows = self.frame.rows if self.is_operation and self.cause == "domain" else ()
        inputs = (row for row in rows if row.role is not RowRole.OUTPUT)
        return any(row.abs_max == math.inf for row in inputs)

    @property
    def is_lost_gradient(self) -> bool:
        """Whether the origin represents gradients that are 0 because of their dtype."""
        return self.problem == "underflow" and self.what.startswith(GRADIENT_OF)

    @property
    def key(self) -> OriginKey:
        """What two detections of one origin have in common: what it is, and where."""
        return (self.what, self.problem, self.frame.name, self.frame.source)

    @property
    def standing(self) -> str:
        """``weight`` or ``buffer`` if one of those held the value, else ``""``."""
        return self.role.value if self.role.is_standing else ""

    @property
    def message(self) -> str:
        """``mul in encoder.block.0 made inf (modeling_t5.py:109)``.

        For an optimizer: ``AdamW's step made weight fc.weight NaN``. For an underflow: ``mul in
        encoder.block.0 made 97% of its nonzero elements 0 (modeling_t5.py:109)``. For lost
        gradients: ``all gradients of fc.weight are 0 in float16: the largest would be 3e-09; a loss
        scale of 2**12 lifts them``.

        The line is that of the operation that made the value, not of one that only read it.
        """
        if self.is_lost_gradient:
            gradients = self.what.removeprefix(GRADIENT_OF)
            lifts = self.fixes[0].text
            return f"all gradients of {gradients} are 0 in {self.dtype}: {self.operands}; {lifts}"
        problem = self.not_finite
        if self.problem == "underflow":
            problem = f"{_percent(self.lost_share or 0.0)} of its nonzero elements 0"
        if self.phase == "optimizer":
            return f"{self.what} made {_weight(self.frame.name)} {problem}"
        if self.is_operation:
            place = f" in {self.frame.name}" if self.frame.name else ""
            where = f" ({self.frame.source.place})" if self.frame.source else ""
            backward = "backward of " if self.frame.phase == "backward" else ""
            if self.cause == "data":
                return f"{self.what}{place} was given {self._held() or problem}{where}"
            if not backward and self.what in BROUGHT:
                return f"{self.what}{place} brought {problem} from another rank{where}"
            return f"{backward}{self.what}{place} made {problem}{where}"
        if self.what.startswith(GRADIENT_OF):
            return f"{self.what} {'came in as' if self.phase == 'loss' else 'is'} {problem}"
        if self.good_in is not None:
            return f"{self.what} turned {problem} {self.turned_between}"
        if self.role is not Role.INPUT or not (held := self._held()):
            return f"{self.what} holds {problem}"
        return f"{self.what}: {held}"

    @property
    def turned_between(self) -> str:
        """``between batch 1 and batch 2``, for a weight."""
        return f"between batch {self.good_in} and batch {self.frame.batch_number}"

    def _held(self) -> str:
        """``1 NaN, in row 5``; "" if the elements were not counted."""
        counts = [(self.nan_count, "NaN"), (self.posinf_count, "+inf"), (self.neginf_count, "-inf")]
        found = [f"{count} {name}" for count, name in counts if count]
        total = sum(count or 0 for count, _ in counts)
        if total == self.numel and total > 1:
            found.append("every element")
        elif self.row_count is not None and self.rows:
            found.append(_rows(self.rows, self.row_count))
            if self.columns:
                found.append(f"all {columns_text(self.columns)}")
        elif self.first_index:
            found.append(f"{'at' if total == 1 else 'first at'} {list(self.first_index)}")
        return ", ".join(found)


def _weight(name: str) -> str:
    """``weight fc.weight``; ``parameter `mean```, which could be read as a mean of weights."""
    is_word = name.isalpha() and name not in ("weight", "bias")
    return f"parameter `{name}`" if is_word else f"weight {name}"


def _percent(share: float) -> str:
    """``97%``; 100% only if it is all of them."""
    return f"{math.floor(share * 1000) / 10:g}%"


def columns_text(columns: tuple[int, ...]) -> str:
    """``in columns 2 and 4``."""
    return _rows(columns, len(columns)).replace("row", "column")


def _rows(first: tuple[int, ...], count: int) -> str:
    """``in rows 1, 2 and 5``."""
    if count > len(first):
        return f"in {count} rows, the first is {first[0]}"
    if count == 1:
        return f"in row {first[0]}"
    return f"in rows {', '.join(map(str, first[:-1]))} and {first[-1]}"

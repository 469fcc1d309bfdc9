"""What the numbers of one origin tell the rules for fixes.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxguard.advice.causes import lost_eps, number_beyond
from fxguard.advice.free_terms import free_terms
from fxguard.advice.positive import (
    LAYERS,
    cut_at_zero,
    free_layers,
    free_parameters,
    made_at,
    other_pole,
)
from fxguard.advice.surroundings import Surroundings, is_scaling, names_of
from fxguard.advice.written_operands import operand_in, without_parentheses
from fxguard.formats import FORMATS, is_mask
from fxguard.graph.evidence import Evidence, Operand
from fxguard.graph.poles import SOFTMAXES, plain
from fxguard.graph.tables import MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.source.parameters import parameter_read

__all__ = ["DOMAINS", "LARGEST_WHOLE", "Numbers"]

BY_ROUNDINGS = 1e-3  # how far outside of a domain roundings may lead
HOPELESS = 1e10  # no number of a healthy training is as large
LARGEST_WHOLE = 256  # up to which bfloat16 holds all whole numbers
WIDE = ("float32", "float64")

# The domains of operations: their ends.
DOMAINS = {
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (-1.0, 1.0)),
    **dict.fromkeys(("logit", "ndtri"), (0.0, 1.0)),
    "acosh": (1.0, math.inf),
    "log1p": (-1.0, math.inf),
    "sqrt": (0.0, math.inf),
}


LOGARITHMS = frozenset({"log", "log2", "log10"})
MASKABLE = SOFTMAXES | {"exp", "exp2"}  # their results are 0 where a mask is


@dataclass(frozen=True, slots=True)
class Numbers:
    """One origin: its cause, the evidence, and its surroundings.

    The methods are signs in its numbers; signs in the graph are functions of
    :mod:`~fxguard.advice.signs`.
    """

    cause: str
    evidence: Evidence | None  # None if there was no closer look
    around: Surroundings

    @property
    def name(self) -> str:
        """The plain name of the operation."""
        return plain(self.around.step.kind)

    @property
    def dtype(self) -> str:
        """The dtype of its result."""
        known = self.around.values[self.around.made].dtype
        return known if self.evidence is None else self.evidence.dtype

    @property
    def operands(self) -> tuple[Operand, ...]:
        """What it read at the first bad element; () if there was no closer look."""
        return () if self.evidence is None else self.evidence.operands

    @property
    def limit(self) -> float:
        """The largest number of that dtype."""
        return FORMATS[self.dtype].max if self.dtype in FORMATS else math.inf

    def _parameters(self) -> list[str]:
        """By the graph; where a parameter was only indexed, by the program's text."""
        source = self.around.step.source
        if (names := free_parameters(self.around)) or source is None:
            return names
        index = () if self.evidence is None else self.evidence.index
        if names := free_terms(self.around, self.negative_operand, index):
            return names
        name = parameter_read(without_parentheses(operand_in(self.around)), source)
        return [name] if name else []

    def eps_has_gradient(self) -> bool:
        """At an eps that the dtype holds, the derivative fits the dtype as well."""
        divides = self.name in ("addcdiv", "div", "reciprocal", "rsqrt")
        is_inverse = self.name in ("float_power", "pow") and any(
            number < 0 for number in self.around.step.literals
        )
        return self.dtype != "float16" or not (divides or is_inverse)

    def is_cut_at_zero(self) -> bool:
        """A relu or a clamp made it 0."""
        return cut_at_zero(self.around) is not None

    def has_other_pole(self) -> bool:
        """Another operation has a pole where the operand is 0."""
        return other_pole(self.around) is not None

    def has_operands(self) -> bool:
        """Whether it is known what the operation read; not of a step of an optimizer."""
        return bool(self.around.step.inputs)

    def is_of_layer(self) -> bool:
        """Whether the operand comes out of a layer as it is: any number may."""
        step = made_at(self.around, self.around.culprit)
        return step is not None and plain(step.kind) in LAYERS

    def is_differentiated(self) -> bool:
        """Whether a gradient flows to the operand in question, or whether that is not known."""
        culprit, tensors = self.around.culprit, [each for each in self.operands if each.dtype]
        if culprit is None or not tensors or tensors[-1].needs_gradient is not False:
            return True
        return self.around.is_learned(culprit)

    def is_of_parameters(self) -> bool:
        """It is computed of parameters that may turn negative."""
        return bool(self._parameters())

    def is_of_layers(self) -> bool:
        """It is computed of what layers make, which may turn negative."""
        return bool(free_layers(self.around))

    def is_returned_by(self, name: str) -> bool:
        """Whether the operand is what a model returned, and such an operation made it there."""
        around = self.around
        value = around.culprit
        step = made_at(around, value)
        is_beyond = step is not None and not any(step is each for each in around.steps)
        return is_beyond and step is not None and plain(step.kind) == name

    def is_far_outside(self) -> bool:
        """The operand is outside of the domain by more than roundings, in float64 too."""
        if self.cause != "domain" or not self.operands or self.name not in DOMAINS:
            return False
        low, high = DOMAINS[self.name]
        found = self.operands[0].low
        return math.isfinite(found) and not low - BY_ROUNDINGS <= found <= high + BY_ROUNDINGS

    def reads_whole_numbers(self) -> bool:
        """It was given whole numbers that bfloat16 rounds: times, counts, positions."""
        return any(
            each.dtype.startswith(("int", "uint"))
            or (each.dtype in WIDE and abs(each.low) > LARGEST_WHOLE and each.low % 1 == 0)
            for each in self.operands
        )

    def is_hopeless(self) -> bool:
        """Its result is far too large to train with in any dtype."""
        needed = None if self.evidence is None else self.evidence.needed
        return needed is not None and HOPELESS < needed < math.inf

    def reads_infinity(self) -> bool:
        """An operand is infinite."""
        return any(math.isinf(each.low) or math.isinf(each.high) for each in self.operands)

    def inherits_infinity(self) -> bool:
        """An operand is infinite only because an earlier value did not fit."""
        inherited = (o for o in self.operands if math.isinf(o.low) or math.isinf(o.high))
        return any(o.wide is not None and math.isfinite(o.wide) for o in inherited)

    def lost_mask(self) -> bool:
        """It read a row that is masked only because a sum with the mask's number did not fit."""
        is_masked = self.evidence is not None and self.evidence.masked_row
        return is_masked and self.name in SOFTMAXES and self.inherits_infinity()

    def reads_mask(self) -> bool:
        """An operand is -inf on purpose: a number, a mask, an input."""
        is_literal = self.around.step.infinite_literal and self.reads_infinity()
        masked = any(map(self.around.is_masked, self.infinite_operands()))
        return is_literal or (masked and not self.reads_log_of_zero())

    def reads_log_of_zero(self) -> bool:
        """Its infinite operands are logarithms of 0, which no mask has made 0."""
        found = [self.around.behind_all_of([value]) for value in self.infinite_operands()]
        return bool(found) and all(map(_is_log_of_zero, found))

    @property
    def negative_operand(self) -> float | None:
        """The first operand at the first bad element, if it is a negative number."""
        number = self.operands[0].low if self.operands else math.nan
        return number if -math.inf < number < 0 else None

    def reads_plus_infinity(self) -> bool:
        """An operand holds +inf."""
        return any(each.dtype and each.high == math.inf for each in self.operands)

    def infinite_operands(self) -> list[int]:
        """The values among its operands that are -inf."""
        tensors = [operand for operand in self.operands if operand.dtype]
        pairs = zip(self.around.step.inputs, tensors, strict=False)
        return [value for value, operand in pairs if operand.low == -math.inf]

    def infinities(self) -> list[int]:
        """The values among its operands that hold -inf or +inf."""
        tensors = [operand for operand in self.operands if operand.dtype]
        pairs = zip(self.around.step.inputs, tensors, strict=False)
        return [value for value, x in pairs if math.isinf(x.low) or math.isinf(x.high)]

    def adds_limit(self) -> bool:
        """An operand is a mask of the dtype's limit."""
        return any(is_mask(self.dtype, abs(each.low)) for each in self.operands)

    def number_of_mask(self) -> bool:
        """A number that its dtype cannot hold masks: it scales a mask, or is chosen by one."""
        numbers = [each.low for each in self.operands if self.limit < abs(each.low) < math.inf]
        inputs, around = self.around.step.inputs, self.around
        if not numbers or self.name not in ("add", "mul", "sub", "where"):
            return False
        is_negative = any(number < 0 for number in numbers)
        if self.name == "where":
            return is_negative
        is_made = any(map(around.behind, inputs))  # 1 - mask, mask == 0
        return all(map(around.is_given, inputs)) and (is_negative or is_made)

    def is_beyond(self) -> bool:
        """It was given a number because of which it overflows."""
        return self.evidence is not None and number_beyond(self.evidence) is not None

    def is_degenerate(self) -> bool:
        """It decomposes a matrix with equal eigenvalues or singular values, or not of full rank."""
        return self.evidence is not None and bool(self.evidence.degeneracy)

    def loses_eps(self) -> bool:
        """An eps is 0 in the dtype."""
        return self._lost_eps() is not None

    def lost_number(self) -> float | None:
        """An eps that is 0 in the dtype; None if there is none."""
        found = self._lost_eps()
        return None if found is None else found[0]

    def _lost_eps(self) -> tuple[float, Step] | None:
        if self.evidence is not None and (own := lost_eps(self.evidence)):
            return own, self.around.step
        form = FORMATS.get(self.dtype)
        for step in self.around.culprit_roots:
            for number in step.literals:
                if form is not None and form.loses(number):
                    return number, step
        return None

    def fits_float32(self) -> bool:
        """It computes in float16, and float32 holds its result, as far as that is known."""
        needed = None if self.evidence is None else self.evidence.needed
        fits = needed is None or not FORMATS["float32"].overflows(needed)
        return self.dtype == "float16" and fits

    def is_half(self) -> bool:
        """It computes in 16 bits."""
        return self.dtype in ("float16", "bfloat16")

    def is_wide(self) -> bool:
        """It computes in 32 bits or more."""
        return not self.is_half()

    def is_scale(self, step: Step) -> bool:
        """Whether an operation makes its operand smaller by one factor."""
        name, literals = plain(step.kind), step.literals
        if is_scaling(step):
            return abs(literals[-1]) < 1 if name == "mul" else abs(literals[-1]) > 1
        if len(set(step.inputs)) != 2 or literals:
            return False
        by = step.inputs[-1]
        is_root = "sqrt" in names_of(self.around.behind(by))
        return name == "div" and (is_root or self.around.values[by].role.is_given)


def _is_log_of_zero(behind: Sequence[Step]) -> bool:
    """Whether the last of some operations is a logarithm, apart from views, and none masks."""
    made = next((step for step in behind if plain(step.kind) not in MOVES | SELECTS), None)
    if made is None or plain(made.kind) not in LOGARITHMS:
        return False
    masks = any(step.infinite_literal for step in behind)
    return not masks and names_of(behind).isdisjoint(MASKABLE)

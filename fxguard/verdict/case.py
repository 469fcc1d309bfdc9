"""One origin as the rules for fixes see it: signs in its numbers, and in the graph around it.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fxguard.formats import FORMATS, is_mask
from fxguard.graph.evidence import Evidence
from fxguard.graph.poles import PRODUCTS, plain
from fxguard.plan.plan import Step
from fxguard.records import Role
from fxguard.verdict.causes import lost_eps
from fxguard.verdict.surroundings import Surroundings, is_scaling

__all__ = ["Case"]


def _names(steps: Iterable[Step]) -> set[str]:
    return {plain(step.kind) for step in steps}


@dataclass(frozen=True, slots=True)
class Case:
    """One origin: its cause, what was seen of it, and what stands around it.

    The methods are signs, which rules ask for. The properties are words for the texts of fixes.
    """

    cause: str
    evidence: Evidence | None  # None where nobody could look closer
    around: Surroundings

    @property
    def name(self) -> str:
        """Of the operation, plain."""
        return plain(self.around.step.kind)

    @property
    def where(self) -> str:
        """The module in which it stands, else the operation."""
        module = self.around.step.module
        return f"`{module}`" if module else f"this {self.name}"

    @property
    def dtype(self) -> str:
        """Of its result."""
        known = self.around.values[self.around.made].dtype
        return known if self.evidence is None else self.evidence.dtype

    @property
    def limit(self) -> float:
        """The largest number of that dtype."""
        return FORMATS[self.dtype].max if self.dtype in FORMATS else math.inf

    @property
    def largest_root(self) -> float:
        """The largest number whose square fits."""
        return math.sqrt(self.limit)

    @property
    def largest_exponent(self) -> int:
        """The largest integer whose exp fits."""
        return math.floor(math.log(self.limit))

    @property
    def wider(self) -> str:
        """Dtypes that hold more."""
        return "float32 or bfloat16" if self.dtype == "float16" else "float32"

    @property
    def scale(self) -> str:
        """``* 0.125``: what the result of a product is scaled by."""
        step = next(filter(self._is_scale, self.around.read_by))
        sign = "*" if plain(step.kind) == "mul" else "/"
        return f"{sign} {step.literals[-1]:.4g}" if step.literals else f"{sign} scale"

    @property
    def norm(self) -> str:
        """The norm that follows, with its line."""
        step = self.around.norm_ahead()
        return f" ({step.source.place})" if step is not None and step.source else ""

    @property
    def eps(self) -> str:
        """``1e-08 in clamp (pool.py:12)``: an eps that is lost, and where it stands."""
        found = self._lost_eps()
        assert found is not None
        eps, step = found
        is_elsewhere = step is not self.around.step and step.source is not None
        place = f" ({step.source.place})" if is_elsewhere and step.source else ""
        return f"{eps:.0e} in {plain(step.kind)}{place}"

    @property
    def near_zero(self) -> str:
        """An eps that the dtype holds, with its square root and its reciprocal."""
        return "1e-4" if self.dtype == "float16" else "1e-12"

    @property
    def near_one(self) -> str:
        """An eps that the dtype can take from 1."""
        return f"{4 * FORMATS[self.dtype].eps:.0e}" if self.dtype in FORMATS else "eps"

    # What the operand in question is.

    def is_of_softmax(self) -> bool:
        """A softmax made it."""
        return "softmax" in _names(self.around.culprit_made_by)

    def is_of_sigmoid(self) -> bool:
        """A sigmoid made it."""
        return "sigmoid" in _names(self.around.culprit_made_by) and not self.is_taken_from_one()

    def is_one_minus_sigmoid(self) -> bool:
        """It is 1 - sigmoid(x), or log1p's -sigmoid(x)."""
        return "sigmoid" in _names(self.around.culprit_made_by) and self.is_taken_from_one()

    def is_taken_from_one(self) -> bool:
        """It is 1 - p, or log1p's -p."""
        if self.name == "log1p":
            return "neg" in _names(self.around.culprit_made_by)
        return self._is_by_one("sub", "rsub")

    def is_exp_minus_one(self) -> bool:
        """It is exp(x) - 1."""
        return "exp" in _names(self.around.culprit_made_by) and self._is_by_one("sub")

    def is_one_plus(self) -> bool:
        """It is 1 + x."""
        return self._is_by_one("add")

    def _is_by_one(self, *names: str) -> bool:
        made_by = self.around.culprit_made_by
        return any(plain(step.kind) in names and 1 in step.literals for step in made_by)

    def is_one_minus_exp(self) -> bool:
        """It is 1 - exp(x), or log1p's -exp(x)."""
        return "exp" in _names(self.around.culprit_made_by) and self.is_taken_from_one()

    def is_one_minus_tanh_squared(self) -> bool:
        """It is 1 - tanh(x)²: how a density changes when tanh squashes."""
        squares = [s for s in self.around.culprit_made_by if plain(s.kind) in _SQUARES]
        return self.is_taken_from_one() and "tanh" in _names(self.around.behind_all(squares))

    def is_of_tanh(self) -> bool:
        """A tanh made it."""
        return "tanh" in _names(self.around.culprit_made_by)

    def is_ratio_of_exp(self) -> bool:
        """It is an exponential divided by a sum of them."""
        ratios = [step for step in self.around.culprit_made_by if plain(step.kind) == "div"]
        return any("exp" in _names(self.around.behind(step.inputs[0])) for step in ratios)

    def is_sum_of_exp(self) -> bool:
        """It is a sum or a mean of exponentials, perhaps weighted."""
        made_by = self.around.culprit_made_by
        sums = [step for step in made_by if plain(step.kind) in {"mean", "sum"} | PRODUCTS]
        behind = self.around.behind_all(sums)
        weighted = [step for step in behind if plain(step.kind) == "mul"]
        return "exp" in _names((*behind, *self.around.behind_all(weighted)))

    def is_difference_of_squares(self) -> bool:
        """It is E[x²] - E[x]²."""
        for step in self.around.culprit_made_by:
            if plain(step.kind) == "sub" and len(set(step.inputs)) == 2:
                sides = [_names(self.around.behind(value)) for value in step.inputs]
                if all(side & {*_SQUARES, "mean"} for side in sides):
                    return True
        return False

    def is_count_of_mask(self) -> bool:
        """It is the sum of a mask."""
        counted = (s.inputs[0] for s in self.around.culprit_made_by if plain(s.kind) == "sum")
        # x / x.sum() is no mean over a mask.
        read = self.around.step.inputs
        return any(self.around.is_given(value) and value not in read for value in counted)

    def is_of_weight(self) -> bool:
        """It is a weight, perhaps cast or with its sign changed."""
        culprit = self.around.culprit
        values = self.around.values
        made_by = [value for step in self.around.culprit_made_by for value in step.inputs]
        roots = made_by if culprit is None else [culprit, *made_by]
        return any(values[value].role is Role.WEIGHT for value in roots)

    # What the numbers are.

    def reads_infinity(self) -> bool:
        """An operand is infinite."""
        found = () if self.evidence is None else self.evidence.operands
        return any(math.isinf(each.low) or math.isinf(each.high) for each in found)

    def inherits_infinity(self) -> bool:
        """An operand is infinite only because something before did not fit."""
        found = () if self.evidence is None else self.evidence.operands
        inherited = (o for o in found if math.isinf(o.low) or math.isinf(o.high))
        return any(o.wide is not None and math.isfinite(o.wide) for o in inherited)

    def lost_mask(self) -> bool:
        """It read a row that is masked only because a sum did not fit beside the mask's number."""
        return self.evidence is not None and self.evidence.masked_row and self.inherits_infinity()

    def reads_mask(self) -> bool:
        """An operand is -inf because somebody wrote it: a number, a mask, an input."""
        if self.evidence is None:
            return False
        step, behind = self.around.step, self.around.behind
        tensors = [operand for operand in self.evidence.operands if operand.dtype]
        infinite = [
            value
            for value, operand in zip(step.inputs, tensors, strict=False)
            if operand.low == -math.inf
        ]
        return (step.infinite_literal and self.reads_infinity()) or any(
            self.around.is_given(value) or any(each.infinite_literal for each in behind(value))
            for value in infinite
        )

    def adds_limit(self) -> bool:
        """An operand is a mask of the dtype's limit."""
        found = () if self.evidence is None else self.evidence.operands
        return any(is_mask(self.dtype, abs(each.low)) for each in found)

    def has_number_beyond(self) -> bool:
        """It was given a number that the dtype of its result does not hold."""
        found = () if self.evidence is None else self.evidence.operands
        return any(self.limit < abs(operand.low) < math.inf for operand in found)

    def loses_eps(self) -> bool:
        """An eps is 0 in the dtype."""
        return self._lost_eps() is not None

    def _lost_eps(self) -> tuple[float, Step] | None:
        if self.evidence is not None and (own := lost_eps(self.evidence)):
            return own, self.around.step
        form = FORMATS.get(self.dtype)
        for step in self.around.culprit_roots:
            for number in step.literals:
                if form is not None and form.loses(number):
                    return number, step
        return None

    def is_half(self) -> bool:
        """It computes in 16 bits."""
        return self.dtype in ("float16", "bfloat16")

    def is_wide(self) -> bool:
        """It computes in 32 bits or more."""
        return not self.is_half()

    def is_near_limit(self) -> bool:
        """It computes in the dtype whose limit is near, and does not square."""
        return self.dtype == "float16" and not self.is_square()

    # What the operation does, and what comes of its result.

    def is_square(self) -> bool:
        """It squares."""
        step = self.around.step
        is_power = self.name == "pow" and 2 in step.literals
        is_product = self.name == "mul" and len(set(step.inputs)) == 1 and not step.literals
        return is_power or is_product or self.name == "square"

    def is_by_weight_in_half(self) -> bool:
        """It computes in 16 bits on a weight."""
        return self.is_half() and self.is_of_weight()

    def is_free_exponent(self) -> bool:
        """It is an exponential of an activation that no sum or logarithm takes back."""
        taken_back = (self.is_logged, self.is_normalized, self.is_softplus, self.is_by_hand_sigmoid)
        return not self.is_by_weight_in_half() and not any(sign() for sign in taken_back)

    def adds_exponentials(self) -> bool:
        """It sums what exponentials made."""
        behind = [s for value in self.around.step.inputs for s in self.around.behind(value)]
        further = [step for step in behind if plain(step.kind) in ("add", "mul")]
        return "exp" in _names((*behind, *self.around.behind_all(further)))

    def is_weighted(self) -> bool:
        """Its result is multiplied by what it is made of: p * log(p)."""
        culprit = self.around.culprit
        made_by = [value for s in self.around.culprit_made_by for value in s.inputs]
        roots = {*made_by, *(() if culprit is None else (culprit,))}
        products = (step for step in self.around.read_by if plain(step.kind) == "mul")
        return any(roots.intersection(step.inputs) for step in products)

    def is_ratio_of_softmaxes(self) -> bool:
        """It divides by a softmax, and the logarithm is taken."""
        return self.is_of_softmax() and "log" in _names(self.around.read_by)

    def is_softplus(self) -> bool:
        """The logarithm of 1 + its result is taken."""
        read_by = self.around.read_by
        adds_one = any(plain(s.kind) == "add" and 1 in s.literals for s in read_by)
        return "log1p" in _names(read_by) or (adds_one and "log" in _names(read_by))

    def is_by_hand_sigmoid(self) -> bool:
        """Its result is divided by 1 + the same."""
        return any(
            plain(step.kind) == "div"
            and any(
                plain(s.kind) == "add" and 1 in s.literals
                for s in self.around.behind(step.inputs[-1])
            )
            for step in self.around.read_by
        )

    def is_scaled_after(self) -> bool:
        """Its result is made smaller by a number."""
        return any(map(self._is_scale, self.around.read_by))

    def _is_scale(self, step: Step) -> bool:
        """Whether an operation makes what it reads smaller, all of it alike."""
        name, literals = plain(step.kind), step.literals
        if is_scaling(step):
            return abs(literals[-1]) < 1 if name == "mul" else abs(literals[-1]) > 1
        if len(set(step.inputs)) != 2 or literals:
            return False
        by = step.inputs[-1]
        role, made_by = self.around.values[by].role, _names(self.around.behind(by))
        if name == "div":
            return "sqrt" in made_by or role.is_given
        return name == "mul" and role in (Role.BUFFER, Role.CONSTANT)

    def is_logged(self) -> bool:
        """A logarithm is taken of a sum or of a ratio of its results."""
        if self.is_softplus():
            return False
        steps = self.around.read_by
        for _ in range(2):
            steps += self.around.ahead_all(s for s in steps if plain(s.kind) in _SUMMED)
        return not _names(steps).isdisjoint(("log", "log2", "log10"))

    def is_normalized(self) -> bool:
        """Its results are divided by a sum of them, and that is all."""
        if self.is_logged():
            return False
        read_by = self.around.read_by
        sums = [step for step in read_by if plain(step.kind) in ("mean", "sum")]
        return "div" in _names(self.around.ahead_all(sums))

    def norm_follows(self) -> bool:
        """A norm divides out any scale of its result, and the dtype's limit is near."""
        return self.dtype == "float16" and self.around.norm_ahead() is not None


_SQUARES = ("mul", "pow", "square")
_SUMMED = ("add", "div", "mean", "sum")

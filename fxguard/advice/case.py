"""One origin as the rules for fixes see it: its numbers, and words for the texts of fixes.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxguard.advice.causes import lost_eps, number_beyond
from fxguard.advice.positive import (
    LAYERS,
    cut_at_zero,
    free_layers,
    free_parameters,
    made_at,
    other_pole,
    other_steep,
)
from fxguard.advice.surroundings import Surroundings, is_scaling, names_of
from fxguard.formats import FORMATS, is_mask
from fxguard.graph.evidence import Evidence
from fxguard.graph.poles import SOFTMAXES, plain
from fxguard.graph.tables import LIMITERS
from fxguard.plan.plan import Step
from fxguard.records import Source
from fxguard.source.assigned import assignments_of, in_words, statement_at, target_of
from fxguard.source.named import (
    factor_text,
    innermost_operand_text,
    operand_text,
    operand_texts,
    other_text,
    unbounded,
    variable_in,
    variables_in,
)
from fxguard.source.parameters import parameter_read

__all__ = ["DOMAINS", "Case", "titled", "without_parentheses", "written_operand"]

MASKED = "log_p.masked_fill(mask, 0)"  # a product's operand whose name is not known
MOST_NAMES = 4  # of parameters
MOST_LAYERS = 2  # that are named
MOST_STEPS = 16  # back from an operand
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


def titled(step: Step) -> str:
    """``relu (model.py:25)``."""
    return plain(step.kind) + (f" ({step.source.place})" if step.source else "")


def without_parentheses(text: str) -> str:
    """Without the parentheses that only a method needs."""
    is_whole = text.startswith("(") and text.endswith(")") and text.count("(") == 1
    return text[1:-1] if is_whole else text


def _free_letter(step: Step, letter: str) -> str:
    """A letter, or a word, for an operand; another letter where the program has such a variable."""
    taken = variables_in("" if step.source is None else statement_at(step.source))
    return letter if letter not in taken else next((x for x in "uvzrst" if x not in taken), letter)


class _Inner:
    """The operands of the operations behind an operand, or of the operation itself, by its name."""

    def __init__(self, around: Surroundings) -> None:
        self.around = around

    def __getitem__(self, name: str) -> str:
        around = self.around
        todo, seen = [around.step], list[Step]()
        while todo and len(seen) < MOST_STEPS:
            step = todo.pop(0)
            if step is around.step and name == plain(step.kind):
                return without_parentheses(operand_in(around)) or _free_letter(step, "x")
            if plain(step.kind) == name:
                return without_parentheses(written_operand(step)) or _free_letter(step, "x")
            seen.append(step)
            makers = map(around.maker_of, step.inputs)
            todo += [each for each in makers if each is not None and each not in seen]
        return _free_letter(around.step, "x")


def written_operand(step: Step) -> str:
    """The operand in question as the program has it; "" if that is not certain."""
    if step.source is None:
        return ""
    name = plain(step.kind)
    return operand_text(step.source.code, name) or operand_text(statement_at(step.source), name)


def operand_in(around: Surroundings) -> str:
    """The operand in question as the program has it, also of a line with several such operations.

    Among these it is the one whose variable is assigned where the operand was made.
    """
    if text := written_operand(around.step):
        return text
    source, step = around.step.source, made_at(around, around.culprit)
    if source is None or step is None or step.source is None:
        return ""
    name = target_of(step.source)
    found = operand_texts(source.code, plain(around.step.kind))
    found = found or operand_texts(statement_at(source), plain(around.step.kind))
    is_elsewhere = step.source.position != source.position
    return name if is_elsewhere and name in found else ""


@dataclass(frozen=True, slots=True)
class Case:
    """One origin: its cause, the evidence, and its surroundings.

    The methods are signs in its numbers; signs in the graph are functions of
    :mod:`~fxguard.advice.signs`. The properties are words for the texts of fixes.
    """

    cause: str
    evidence: Evidence | None  # None if there was no closer look
    around: Surroundings

    @property
    def name(self) -> str:
        """The plain name of the operation."""
        return plain(self.around.step.kind)

    @property
    def where(self) -> str:
        """The module that contains it, or else the operation."""
        module = self.around.step.module
        return f"`{module}`" if module else f"this {self.name}"

    @property
    def dtype(self) -> str:
        """The dtype of its result."""
        known = self.around.values[self.around.made].dtype
        return known if self.evidence is None else self.evidence.dtype

    @property
    def limit(self) -> float:
        """The largest number of that dtype."""
        return FORMATS[self.dtype].max if self.dtype in FORMATS else math.inf

    @property
    def largest_root(self) -> float:
        """The largest number whose square fits the dtype."""
        return math.sqrt(self.limit)

    @property
    def largest_exponent(self) -> int:
        """The largest integer whose exp fits the dtype."""
        return math.floor(math.log(self.limit))

    @property
    def exponent_with_room(self) -> int:
        """An integer whose exp fits the dtype and leaves room for a sum of many."""
        return math.floor(0.75 * math.log(self.limit))

    @property
    def wider(self) -> str:
        """Dtypes with a larger range."""
        is_enough = self.dtype == "float16" and not self.reads_whole_numbers()
        return "float32 or bfloat16" if is_enough else "float32"

    @property
    def why_not_bfloat16(self) -> str:
        """Why :attr:`wider` leaves out a dtype whose range is large enough; "" if it does not."""
        is_left_out = self.dtype == "float16" and self.reads_whole_numbers()
        reason = f", and bfloat16 does not tell whole numbers above {LARGEST_WHOLE} apart"
        return reason if is_left_out else ""

    @property
    def widest(self) -> str:
        """The dtype that holds a number which this one does not."""
        number = None if self.evidence is None else number_beyond(self.evidence)
        fits = number is not None and not FORMATS["float32"].overflows(number)
        return "float32" if fits else "float64"

    @property
    def scale(self) -> str:
        """``* 0.125``: the factor that scales the result of a product."""
        step = next(filter(self.is_scale, self.around.read_by))
        sign = "*" if plain(step.kind) == "mul" else "/"
        return f"{sign} {step.literals[-1]:.4g}" if step.literals else f"{sign} scale"

    @property
    def log(self) -> str:
        """The logarithm; ``log`` of 1 + x for ``log1p``."""
        return "log" if self.name == "log1p" else self.name

    @property
    def scaled_before(self) -> str:
        """``(a @ b) * s -> (a * s) @ b``; "" where the factor may be more than one number."""
        step = next(filter(self.is_scale, self.around.read_by))
        sign = "*" if plain(step.kind) == "mul" else "/"
        return f"(a @ b) {sign} s -> (a {sign} s) @ b" if is_scaling(step) else ""

    @property
    def weighted_log(self) -> str:
        """``p * log(q) -> xlogy(p, q)``; "" where q has a gradient, which is NaN if both are 0."""
        culprit = self.around.culprit
        is_given = culprit is not None and self.around.maker_of(culprit) is None
        if culprit is None or not is_given or self.around.is_differentiated(culprit):
            return ""
        return f"p * {self.name}(q) -> xlogy(p, q){self.per_log}"

    @property
    def bounded_exponent(self) -> str:
        """A rewrite that bounds an exponential's argument; "" where not all that reads it is."""
        todo, bound = [self.around.made], self.exponent_with_room
        for value in todo:
            readers = self.around.readers_of(value)
            if not readers or len(todo) > MOST_STEPS:
                return ""
            for step in readers:
                if step.kind not in LIMITERS and plain(step.kind) not in ("add", "neg", "sub"):
                    return ""
                todo += [] if step.kind in LIMITERS else step.outputs
        return f"{self.name}(a) -> {self.name}(a.clamp(max={bound}))"

    @property
    def per_log(self) -> str:
        """``" / log(2)"``: what turns a natural logarithm into that of the operation."""
        return {"log2": " / log(2)", "log10": " / log(10)"}.get(self.name, "")

    @property
    def norm(self) -> str:
        """The norm that follows, with its line."""
        step = self.around.norm_ahead()
        return f" ({step.source.place})" if step is not None and step.source else ""

    @property
    def eps(self) -> str:
        """``1e-08 in clamp (pool.py:12)``: an eps that is lost, and its place."""
        found = self._lost_eps()
        assert found is not None
        eps, step = found
        is_elsewhere = step is not self.around.step and step.source is not None
        place = f" ({step.source.place})" if is_elsewhere and step.source else ""
        return f"{eps:.0e} in {plain(step.kind)}{place}"

    @property
    def x(self) -> str:
        """The operand in question as the program's line has it: ``deg``, ``(ms + eps)``, or x."""
        return self._written("x")

    @property
    def argument(self) -> str:
        """The same of an exponential: ``logvar``, or its argument."""
        return self._written("its argument")

    @property
    def operand(self) -> str:
        """The same, or its operand."""
        return self._written("its operand")

    @property
    def bare(self) -> str:
        """The same among the arguments of a call, where it needs no parentheses."""
        return without_parentheses(self.x)

    @property
    def unbounded(self) -> str:
        """The same without the program's own bound: ``cos`` of ``cos.clamp(-1, 1)``."""
        return unbounded(self.x)

    @property
    def base(self) -> str:
        """The base of the innermost power: ``x`` of ``x.pow(p).mean(-1).pow(1 / p)``."""
        source = self.around.step.source
        found = "" if source is None else innermost_operand_text(source.code, self.name)
        return found or _free_letter(self.around.step, "x")

    @property
    def other(self) -> str:
        """The other one of two: the exponent of a power, or y."""
        source, step = self.around.step.source, self.around.step
        return (source and other_text(source.code, self.name)) or _free_letter(step, "y")

    @property
    def dividend(self) -> str:
        """What a quotient divides: ``x``."""
        source, step = self.around.step.source, self.around.step
        return (source and without_parentheses(other_text(source.code, self.name))) or _free_letter(
            step, "x"
        )

    @property
    def size(self) -> str:
        """How a program asks how many elements it reduces."""
        is_whole = self.evidence is None or not self.evidence.index
        return "numel()" if is_whole else "shape[dim]"

    @property
    def share(self) -> str:
        """`` (3 of 360)``: how many of its results are bad."""
        found = self.evidence
        return "" if found is None or found.numel == 1 else f" ({found.share} of {found.numel})"

    @property
    def torch_dtype(self) -> str:
        """``torch.float32``."""
        return f"torch.{self.dtype}"

    @property
    def of(self) -> _Inner:
        """``of[softmax]``: what the softmax behind the operand was given, ``logits``; or x."""
        return _Inner(self.around)

    @property
    def divisor(self) -> str:
        """The same for a divisor that has a name: ``sigma``, or d."""
        text = self._written("d")
        return text if text.replace(".", "_").isidentifier() else "d"

    @property
    def definition(self) -> str:
        """`` d = adj.sum(1)``: what a divisor without a name is; "" of one that has a name."""
        text = self._written("d")
        return "" if text == self.divisor else f" {self.divisor} = {without_parentheses(text)}"

    @property
    def number(self) -> str:
        """The operand at the first bad element: ``-0.3067``."""
        operands = () if self.evidence is None else self.evidence.operands
        return f"{operands[0].low:.4g}" if operands else "outside"

    @property
    def needed(self) -> str:
        """The largest magnitude that the operation makes in float64: ``5.9e+28``."""
        found = None if self.evidence is None else self.evidence.needed
        return "" if found is None else f"{found:.2g}"

    @property
    def counted(self) -> str:
        """The same for a count: ``deg``, or n."""
        return self._written("n")

    def _written(self, fallback: str) -> str:
        return operand_in(self.around) or _free_letter(self.around.step, fallback)

    @property
    def assignments(self) -> list[tuple[str, Source]]:
        """The variable that the operand is, and what gave it its value, as far as is certain."""
        source, name = self.around.step.source, variable_in(operand_in(self.around))
        return [] if source is None or not name else assignments_of(name, source)

    @property
    def comes_from(self) -> str:
        """`` `S` comes from kalman.py:23: S = P + R``: what gave the operand its value, or "".

        Where the source does not tell, as of a function's argument, it is the line that made it.
        """
        source, text = self.around.step.source, operand_in(self.around)
        if source is None or not (name := variable_in(text)):
            return ""
        step = made_at(self.around, self.around.culprit)
        known = in_words(self.assignments)
        if known or name != text or step is None or step.source is None:
            return known
        is_here = step.source.position == source.position
        return "" if is_here else f"`{name}` comes from {step.source}"

    @property
    def made_at(self) -> str:
        """``, in place of relu (model.py:25)``: where the operand was made 0; "" if unknown."""
        step = cut_at_zero(self.around)
        if step is not None:
            return f" in place of {titled(step)}"
        step = made_at(self.around, self.around.culprit)
        return "" if step is None else f" in {titled(step)}"

    @property
    def positive(self) -> str:
        """``softplus(...) + 1e-3``: a number that stays away from 0, with its gradient."""
        return f"softplus(...) + {self.above_zero}"

    @property
    def above_zero(self) -> str:
        """A number to add to what is positive: its reciprocal is an ordinary number."""
        return "1e-2" if self.dtype == "float16" else "1e-3"

    @property
    def apart(self) -> str:
        """The largest of distinct numbers for the diagonal of a matrix: a part of its own."""
        operands = () if self.evidence is None else self.evidence.operands
        ends = (abs(end) for x in operands if x.dtype for end in (x.low, x.high))
        return f"{1e-3 * (max(filter(math.isfinite, ends), default=0.0) or 1.0):.0e}"

    @property
    def reader(self) -> str:
        """``log (model.py:31)``: another operation that has a pole where the operand is 0."""
        step = other_pole(self.around)
        return "" if step is None else titled(step)

    @property
    def steep(self) -> str:
        """The same of a derivative: ``pow (weibull.py:21)``; "" if there is none."""
        step = other_steep(self.around)
        return "" if step is None else titled(step)

    @property
    def variable(self) -> str:
        """`` `var` ``: the variable that the operand is computed from; or it."""
        name = variable_in(operand_in(self.around))
        return f"`{name}`" if name else "it"

    @property
    def made_in(self) -> str:
        """`` (gmm.py:41)``: the line that made the operand, if it is another one."""
        source, step = self.around.step.source, made_at(self.around, self.around.culprit)
        if source is None or step is None or step.source is None:
            return ""
        is_here = step.source.position == source.position
        return "" if is_here else f" ({step.source.place})"

    @property
    def layers(self) -> str:
        """``linear (kalman.py:21)``: the layers whose results the operand grows with."""
        return " and ".join(dict.fromkeys(map(titled, free_layers(self.around)[:MOST_LAYERS])))

    @property
    def parameters(self) -> str:
        """The parameters that the operand grows with: ``r, q_pos and q_vel``."""
        names = self._parameters()
        names, more = names[:MOST_NAMES], len(names) - MOST_NAMES
        if more > 0:
            return f"{', '.join(names)} and {more} more"
        return " and ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])

    def _parameters(self) -> list[str]:
        """By the graph; where a parameter was only indexed, by the program's text."""
        source = self.around.step.source
        if (names := free_parameters(self.around)) or source is None:
            return names
        name = parameter_read(without_parentheses(operand_in(self.around)), source)
        return [name] if name else []

    @property
    def near_zero(self) -> str:
        """An eps that the dtype can hold, with its square root and its reciprocal."""
        return "1e-4" if self.dtype == "float16" else "1e-12"

    @property
    def near_one(self) -> str:
        """An eps that the dtype can subtract from 1."""
        return f"{4 * FORMATS[self.dtype].eps:.0e}" if self.dtype in FORMATS else "eps"

    @property
    def safe(self) -> str:
        """A number at which the operation has a value and a finite derivative."""
        return "0" if self.name in ("acos", "asin", "atanh", "erfinv", "log1p") else "1"

    @property
    def without_infinity(self) -> str:
        """The product ``a * b`` with 0 in place of the operand's -inf."""
        operands = () if self.evidence is None else self.evidence.operands
        filled = '{0}.masked_fill({0} == float("-inf"), 0)'
        if operands and math.isinf(operands[0].low):
            return f"{filled.format('a')} * b"
        return f"a * {filled.format('b')}"

    @property
    def masked(self) -> str:
        """The operand that is -inf with 0 in its place, as the program's line has it."""
        operands = () if self.evidence is None else self.evidence.operands
        source = self.around.step.source
        is_first = bool(operands) and math.isinf(operands[0].low)
        found = "" if source is None else factor_text(source.code, is_first=is_first)
        return f'{found}.masked_fill({found} == float("-inf"), 0)' if found else MASKED

    # Signs in the graph around the operand.

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

    # Signs in the numbers.

    def is_far_outside(self) -> bool:
        """The operand is outside of the domain by more than roundings, in float64 too."""
        operands = () if self.evidence is None else self.evidence.operands
        if self.cause != "domain" or not operands or self.name not in DOMAINS:
            return False
        low, high = DOMAINS[self.name]
        found = operands[0].low
        return math.isfinite(found) and not low - BY_ROUNDINGS <= found <= high + BY_ROUNDINGS

    def reads_whole_numbers(self) -> bool:
        """It was given whole numbers that bfloat16 rounds: times, counts, positions."""
        found = () if self.evidence is None else self.evidence.operands
        return any(
            each.dtype.startswith(("int", "uint"))
            or (each.dtype in WIDE and abs(each.low) > LARGEST_WHOLE and each.low % 1 == 0)
            for each in found
        )

    def is_hopeless(self) -> bool:
        """Its result is far too large to train with in any dtype."""
        needed = None if self.evidence is None else self.evidence.needed
        return needed is not None and HOPELESS < needed < math.inf

    def reads_infinity(self) -> bool:
        """An operand is infinite."""
        found = () if self.evidence is None else self.evidence.operands
        return any(math.isinf(each.low) or math.isinf(each.high) for each in found)

    def inherits_infinity(self) -> bool:
        """An operand is infinite only because an earlier value did not fit."""
        found = () if self.evidence is None else self.evidence.operands
        inherited = (o for o in found if math.isinf(o.low) or math.isinf(o.high))
        return any(o.wide is not None and math.isfinite(o.wide) for o in inherited)

    def lost_mask(self) -> bool:
        """It read a row that is masked only because a sum with the mask's number did not fit."""
        is_masked = self.evidence is not None and self.evidence.masked_row
        return is_masked and self.name in SOFTMAXES and self.inherits_infinity()

    def reads_mask(self) -> bool:
        """An operand is -inf on purpose: a number, a mask, an input."""
        is_literal = self.around.step.infinite_literal and self.reads_infinity()
        return is_literal or any(map(self.around.is_masked, self.infinite_operands()))

    def infinite_operands(self) -> list[int]:
        """The values among its operands that are -inf."""
        found = () if self.evidence is None else self.evidence.operands
        tensors = [operand for operand in found if operand.dtype]
        pairs = zip(self.around.step.inputs, tensors, strict=False)
        return [value for value, operand in pairs if operand.low == -math.inf]

    def adds_limit(self) -> bool:
        """An operand is a mask of the dtype's limit."""
        found = () if self.evidence is None else self.evidence.operands
        return any(is_mask(self.dtype, abs(each.low)) for each in found)

    def number_of_mask(self) -> bool:
        """A number that its dtype cannot hold masks: it scales a mask, or is chosen by one."""
        found = () if self.evidence is None else self.evidence.operands
        numbers = [each.low for each in found if self.limit < abs(each.low) < math.inf]
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

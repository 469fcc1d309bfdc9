"""One origin as the rules for fixes see it: what its numbers tell, and words for their texts.

Knows nothing of torch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from fxguard.advice.bounds import Bounds
from fxguard.advice.causes import number_beyond
from fxguard.advice.numbers import LARGEST_WHOLE
from fxguard.advice.positive import (
    cut_at_zero,
    free_layers,
    made_at,
    other_pole,
    other_steep,
)
from fxguard.advice.surroundings import Surroundings, is_scaling
from fxguard.advice.written_operands import (
    free_letter,
    operand_in,
    titled,
    without_parentheses,
    written_operand,
)
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.graph.tables import LIMITERS
from fxguard.plan.plan import Step
from fxguard.records import Source
from fxguard.source.assigned import assignments_of, in_words
from fxguard.source.named import (
    factor_text,
    innermost_operand_text,
    other_text,
    unbounded,
    variable_in,
)
from fxguard.source.terms import negated

__all__ = ["Case"]

_VIEWED = re.compile(r"\[[:, ]*None[:, ]*\]$")  # ``d[:, None]`` holds what ``d`` does
MASKED = "log_p.masked_fill(mask, 0)"  # a product's operand whose name is not known
MOST_NAMES = 4  # of parameters
MOST_LAYERS = 2  # that are named
MOST_STEPS = 16  # back from an operand


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
                return without_parentheses(operand_in(around)) or free_letter(step, "x")
            if plain(step.kind) == name:
                return without_parentheses(written_operand(step)) or free_letter(step, "x")
            seen.append(step)
            makers = map(around.maker_of, step.inputs)
            todo += [each for each in makers if each is not None and each not in seen]
        return free_letter(around.step, "x")


@dataclass(frozen=True, slots=True)
class Case(Bounds):
    """One origin, and words for the texts of fixes: its properties."""

    @property
    def where(self) -> str:
        """The module that contains it, or else the operation."""
        module = self.around.step.module
        return f"`{module}`" if module else f"this {self.name}"

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
    def negated(self) -> str:
        """The same with the other sign: ``-x`` of ``x``, ``x`` of ``-x``."""
        return negated(self.bare)

    @property
    def unbounded(self) -> str:
        """The same without the program's own bound: ``cos`` of ``cos.clamp(-1, 1)``."""
        return unbounded(self.x)

    @property
    def base(self) -> str:
        """The base of the innermost power: ``x`` of ``x.pow(p).mean(-1).pow(1 / p)``."""
        source = self.around.step.source
        found = "" if source is None else innermost_operand_text(source.code, self.name)
        return found or free_letter(self.around.step, "x")

    @property
    def other(self) -> str:
        """The other one of two: the exponent of a power, or y."""
        source, step = self.around.step.source, self.around.step
        return (source and other_text(source.code, self.name)) or free_letter(step, "y")

    @property
    def dividend(self) -> str:
        """What a quotient divides: ``x``."""
        source, step = self.around.step.source, self.around.step
        return (source and without_parentheses(other_text(source.code, self.name))) or free_letter(
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
        text = _VIEWED.sub("", self._written("d"))
        return text if text.replace(".", "_").isidentifier() else "d"

    @property
    def definition(self) -> str:
        """`` d = adj.sum(1)``: what a divisor without a name is; "" of one that has a name."""
        text = _VIEWED.sub("", self._written("d"))
        return "" if text == self.divisor else f" {self.divisor} = {without_parentheses(text)}"

    @property
    def number(self) -> str:
        """The operand at the first bad element: ``-0.3067``."""
        return f"{self.operands[0].low:.4g}" if self.operands else "outside"

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
        return operand_in(self.around) or free_letter(self.around.step, fallback)

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
        number = self.operands[0].low if self.operands else math.nan
        step = made_at(self.around, self.around.culprit, number)
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
        number = self.operands[0].low if self.operands and self.operands[0].count == 1 else None
        step = made_at(self.around, self.around.culprit, number)
        return "" if step is None else f" in {titled(step)}"

    @property
    def positive(self) -> str:
        """``softplus(...) + 1e-3``: a number that stays away from 0, with its gradient."""
        return f"softplus(...) + {self.above_zero}"

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

    @property
    def without_infinity(self) -> str:
        """The product ``a * b`` with 0 in place of the operand's -inf."""
        filled = '{0}.masked_fill({0} == float("-inf"), 0)'
        if self.operands and math.isinf(self.operands[0].low):
            return f"{filled.format('a')} * b"
        return f"a * {filled.format('b')}"

    @property
    def masked(self) -> str:
        """The operand that is -inf with 0 in its place, as the program's line has it."""
        source = self.around.step.source
        is_first = bool(self.operands) and math.isinf(self.operands[0].low)
        found = "" if source is None else factor_text(source.code, is_first=is_first)
        return f'{found}.masked_fill({found} == float("-inf"), 0)' if found else MASKED

"""The rules by which an origin is told what to do: a table, keyed by the cause and what is around.

A new fix is one entry in :data:`RULES`; those of zeros and exact rewrites have tables of their own.
Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice import signs
from fxguard.advice._divisor_rules import DIVISOR_RULES
from fxguard.advice._domain_rules import DOMAIN_RULES
from fxguard.advice._gradient_rules import GRADIENT_RULES
from fxguard.advice._mask_rules import MASK_RULES
from fxguard.advice._overflow_rules import OVERFLOW_RULES
from fxguard.advice._rewrites import REWRITES
from fxguard.advice._rule import Rule
from fxguard.advice._rule import names_in as _names
from fxguard.advice._special_rules import SPECIAL_RULES
from fxguard.advice._text_rules import TEXT_RULES
from fxguard.advice._zero_rules import ZERO_RULES
from fxguard.advice.alignments import words_of_short
from fxguard.advice.beginnings import REJECT
from fxguard.advice.case import Case
from fxguard.advice.converged import words_of_change, words_of_residual
from fxguard.advice.effective_numbers import words_of_count
from fxguard.advice.fill_values import words_of_fill
from fxguard.advice.masked_products import words_of_mask
from fxguard.advice.masked_sums import words_of_masked_sum
from fxguard.advice.of_infinities import words_of_infinite_divisor
from fxguard.advice.outside_ball import words_of_ball
from fxguard.advice.samplers import is_of_sampler, words_of_acceptance
from fxguard.graph.poles import LOSSES_OF_TARGETS, SPREADS, plain
from fxguard.graph.tables import MEANS_OF_NUMBERS, SELECTS

__all__ = ["RULES"]


def _last_batch(case: Case) -> Mapping[str, str]:
    """Of rows that were not chosen by an index it may be a last batch that has only one."""
    culprit = case.around.culprit
    maker = None if culprit is None else case.around.maker_of(culprit)
    is_chosen = maker is not None and plain(maker.kind) in SELECTS
    return {"last": "" if is_chosen else "; drop_last=True in a DataLoader leaves it out"}


RULES = (
    *TEXT_RULES,
    Rule("unknown, domain", _names("mul"), "advice",
         "choose before {maker}, by where({mask}, ..., 0) of what it reads, in place of a product "
         "with {mask}: its result is infinite, and inf * 0 is NaN, also in its backward",
         lambda c: bool(words_of_mask(c)), words=words_of_mask, alone=True),
    Rule("overflow", _names("exp"), "advice",
         "mask with masked_fill({mask} == 0, -inf) what {c.name} reads, in float32, and take "
         "logsumexp in place of the log of the sum: a product with {mask} comes after inf",
         lambda c: bool(words_of_masked_sum(c)), words=words_of_masked_sum),
    Rule("overflow", None, "advice",
         "leave out, before the arithmetic, what {fill} fills with {number}: it stands for what is "
         "missing, and {c.name} has computed with it",
         lambda c: bool(words_of_fill(c)), words=words_of_fill, alone=True),
    Rule("domain", _names("acosh log pow rsqrt sqrt"), "advice",
         "keep points inside the unit ball: 1 - {norm} is negative in {less}, as |x| is above 1; "
         "after each step scale back what left it, x.mul_((1 - 1e-5) / "
         "x.norm(dim=-1, keepdim=True).clamp(min=1 - 1e-5))",
         lambda c: bool(words_of_ball(c)), alone=True, words=words_of_ball),
    Rule("overflow", None, "advice",
         REJECT + " that diverges: take 0 for {name} ({place}) where it is not finite, "
         "before anything is adapted to it", is_of_sampler, words=words_of_acceptance),
    Rule("domain", _names("sub"), "advice",
         "begin inside the support: a state of density 0, as here, has no ratio to a proposal, "
         "-inf - (-inf); with finfo.min in place of -inf it would accept any",
         lambda c: is_of_sampler(c) and signs.is_difference_of_masks(c)),
    Rule("zero divisor, underflow", _names("div reciprocal"), "advice",
         "stop where `{name}`{made} is 0 throughout, with `{what}` as it was before: {divides} by "
         "{by}; or guard {all}",
         lambda c: bool(words_of_change(c)), alone=True, words=words_of_change),
    Rule("zero divisor, underflow", _names("div"), "advice",
         "leave the loop once `{residual}` is 0, or far below what it began with: it has converged "
         "there, and {divides} by it, too",
         lambda c: bool(words_of_residual(c)), alone=True, words=words_of_residual),
    Rule("zero divisor", _names("div reciprocal"), "advice",
         "give what does not occur the weight 0, by torch.where({count} > 0, ..., 0): {rest} is 0 "
         "where {count} is, and an eps would give it the largest weight",
         lambda c: bool(words_of_count(c)), alone=True, words=words_of_count),
    Rule("zero divisor", _names("div reciprocal"), "advice",
         "do without {quotient} where {infinite} is infinite, by if or where: {made} makes that, "
         "and {quotient} is 0 because of it; an eps in this divisor makes a huge number of it",
         lambda c: bool(words_of_infinite_divisor(c)), alone=True,
         words=words_of_infinite_divisor),
    *ZERO_RULES,
    *REWRITES,
    *SPECIAL_RULES,
    *OVERFLOW_RULES,
    *DIVISOR_RULES,
    *DOMAIN_RULES,
    *GRADIENT_RULES,
    *MASK_RULES,
    # Empty operands.
    Rule("empty", SPREADS, "advice",
         "take {c.name} of more than one element (if {c.x}.{c.size} > 1){last}; "
         "{c.name}(..., correction=0) makes 0", words=_last_batch,
         rewrites=("{c.name}(...) -> {c.name}(..., correction=0)",)),
    Rule("empty", LOSSES_OF_TARGETS, "advice",
         'skip the batch, or take reduction="sum" and divide by max(valid targets, 1)',
         rewrites=(
             'cross_entropy(a, b) -> cross_entropy(a, b, reduction="sum") / '
             '(b != -100).sum().clamp(min=1)',)),
    Rule("empty", MEANS_OF_NUMBERS, "advice",
         "leave out what holds nothing but NaN before {c.name}, or say what stands for it: "
         "{c.name}(...).nan_to_num(nan=0.0)",
         rewrites=("{c.name}(...) -> {c.name}(...).nan_to_num(nan=0.0)",)),
    Rule("empty", None, "advice",
         "skip what is empty, or divide the sum by max(n, 1)", last=True),
    Rule("no alignment", None, "advice",
         "leave the input more frames, by less stride or pooling in front of it, as {share} "
         "samples have too few; take zero_infinity=True for the rest, which then have no gradient",
         lambda c: bool(words_of_short(c)), words=words_of_short, alone=True,
         rewrites=("ctc_loss(...) -> ctc_loss(..., zero_infinity=True)",)),
    Rule("no alignment", None, "advice",
         "drop samples with labels + repeats > frames before training, as a filter by labels alone "
         "keeps them; zero_infinity=True gives them no gradient",
         rewrites=("ctc_loss(...) -> ctc_loss(..., zero_infinity=True)",)),
    Rule("memory", None, "advice",
         "take zeros instead of {c.name}, or write all of it before it is read"),
)  # fmt: skip

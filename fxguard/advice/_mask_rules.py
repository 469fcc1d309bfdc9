"""The rules for infinities that were intended, as those of masks.

Knows nothing of torch.
"""

from __future__ import annotations

from fxguard.advice import becomes, signs
from fxguard.advice._kinds import REDUCED
from fxguard.advice._rule import Rule
from fxguard.advice._rule import names_in as _names
from fxguard.advice.case import Case
from fxguard.advice.filtered_rows import filter_of, words_of_filter, words_of_masked
from fxguard.advice.impossible_rows import has_impossible_row, words_of_emptied, words_of_row
from fxguard.advice.infinite_terms import words_of_infinities
from fxguard.advice.reduced_rows import words_of_rows
from fxguard.advice.triangles import words_of_triangle
from fxguard.graph.poles import LOSSES_OF_TARGETS, PRODUCTS, SOFTMAXES
from fxguard.source.assigned import statement_at
from fxguard.source.named import smooths

__all__ = ["MASK_RULES"]


def _is_smoothed(case: Case) -> bool:
    """A loss that smooths its targets over all classes reads -inf."""
    source = case.around.step.source
    is_masked = case.reads_infinity() and not case.reads_plus_infinity()
    return is_masked and source is not None and smooths(statement_at(source))


_LOSSES = LOSSES_OF_TARGETS | _names("kl_div")


MASK_RULES = (
    Rule("domain", _names("mul"), "exact",
         "take xlogy(p, q) instead of p * log(q): it is 0 where p is", becomes.is_product_with_log,
         rewrites=("p * log(q) -> xlogy(p, q)",)),
    Rule("domain", PRODUCTS | _names("exp mul"), "advice",
         "keep 0 out of {log}: leave that element out, such as by a range that begins at 1, or "
         "bound the argument by {x}.clamp(min=...): 0 * inf is NaN, in a gradient, too",
         lambda c: bool(becomes.words_of_log(c)), words=becomes.words_of_log),
    # Intended infinities.
    Rule("domain", _names("mul"), "exact",
         "set masked entries to 0 before this product, {c.masked}: 0 * -inf is NaN",
         lambda c: signs.is_masked_log(c) or signs.is_masked_value(c),
         rewrites=("a * b -> {c.without_infinity}",)),
    Rule("domain", _names("mul"), "exact",
         "mask after this product, not before it: 0 * -inf is NaN", signs.is_masked_score),
    Rule("domain", _names("mul"), "exact",
         "take masked_fill(mask, -inf) instead of a product with inf: 0 * inf is NaN",
         lambda c: c.reads_mask() and not (signs.is_masked_log(c) or signs.is_masked_score(c)
                                           or signs.is_masked_value(c) or becomes.words_of_log(c)),
         rewrites=(
             'a * b + (1 - b) * float("-inf") -> a.masked_fill(b != 1, float("-inf"))',
             'a + (1 - b) * float("-inf") -> a.masked_fill(b != 1, float("-inf"))',
             'a + b * float("-inf") -> a.masked_fill(b != 0, float("-inf"))')),
    Rule("domain", _names("add sub"), "exact",
         "join masks by where or a boolean or, not by addition: inf - inf is NaN",
         lambda c: c.reads_mask() and not signs.is_difference_of_masks(c)),
    Rule("domain", PRODUCTS | REDUCED, "advice",
         "begin {logsumexp} with finite numbers, or leave a row out of which all is -inf: nothing "
         "in it is possible", lambda c: c.reads_mask() and bool(words_of_emptied(c)),
         words=words_of_emptied),
    Rule("domain", None, "advice",
         "{filled} behind {reduce}: it has put nothing into some rows, and the infinity that they "
         "began with is left", lambda c: bool(words_of_rows(c)), words=words_of_rows),
    Rule("domain", PRODUCTS | REDUCED, "advice",
         "set masked entries to 0 before the {c.name}: masked_fill(mask, 0)",
         lambda c: c.reads_mask() and not words_of_emptied(c) and not words_of_rows(c)),
    Rule("domain", _names("kl_div"), "advice",
         "give {c.name} probabilities, log_p.exp() with log_target=False: it takes 0 * log(0) as 0 "
         "then; with log_target=True it computes 0 * -inf where a target is masked",
         signs.has_log_target),
    Rule("domain", _names("kl_div"), "advice",
         "compare both where both are possible, such as on the same top-k, normalised again, or "
         "leave every class a small probability: the input is -inf where the target is not, and "
         "the divergence infinite", signs.has_impossible_input, alone=True),
    Rule("domain", _names("logaddexp"), "advice",
         "begin with torch.finfo({c.torch_dtype}).min in place of -inf for what cannot be reached: "
         "{c.name} of -inf alone has no derivative", Case.reads_infinity),
    Rule("domain", _LOSSES, "advice",
         "see what makes {c.operand} +inf{c.made_at}: a score may be -inf on purpose, and +inf is "
         "no mask; x - log(n) is +inf where a count n is 0", Case.reads_plus_infinity),
    Rule("domain", _LOSSES, "advice",
         "smooth over the classes that the mask leaves: label_smoothing gives each class a share, "
         "those at -inf, too; or mask only where the program decodes", _is_smoothed),
    Rule("domain", _LOSSES, "advice",
         "leave out targets that the mask excludes: their probability is 0",
         lambda c: c.reads_infinity() and not (c.reads_plus_infinity() or _is_smoothed(c))),
    Rule("domain", _names("sub"), "advice",
         "take a number of your data's range for the infinities before the difference, such as "
         "{name}.clamp({bound}=...), or leave them out: inf - inf is NaN",
         lambda c: not c.reads_mask() and bool(words_of_infinities(c)), words=words_of_infinities),
    Rule("domain", None, "advice", "look at what made its operand infinite", Case.reads_infinity,
         last=True),
    Rule("masked row", _names("sub"), "advice",
         "mask with torch.finfo({c.torch_dtype}).min in place of -inf: -inf - (-inf) is NaN"),
    Rule("masked row", _names("logsumexp"), "advice",
         "{extend}: all {count} terms of a row are -inf{where}; or leave such rows out",
         has_impossible_row, words=words_of_row, alone=True),
    Rule("masked row", _names("logsumexp logcumsumexp"), "advice",
         "begin with torch.finfo({c.torch_dtype}).min in place of -inf for what cannot be reached: "
         "{c.name} of -inf alone has no derivative"),
    Rule("masked row", SOFTMAXES, "advice",
         "leave each row its own entry, diagonal={diagonal} in {call} ({place}): as it is, the "
         "first row of the mask is empty",
         lambda c: bool(words_of_triangle(c)), words=words_of_triangle, alone=True),
    Rule("masked row", SOFTMAXES, "advice",
         "keep the largest entry of each row, whatever {mask} says: it is made of the scores that "
         "it hides, and hid all of a row",
         lambda c: filter_of(c) is not None, words=words_of_filter),
    Rule("masked row", SOFTMAXES, "advice",
         "mask with torch.finfo({c.torch_dtype}).min in place of -inf in {filled}, and set to 0 "
         "what {c.name} returns there, by masked_fill({mask}, 0): no entry of such a row counts",
         lambda c: filter_of(c) is None and bool(words_of_masked(c)), words=words_of_masked),
    Rule("masked row", None, "advice",
         "drop the row in which everything is masked, or unmask one position of it",
         lambda c: filter_of(c) is None and c.name != "sub"),
)  # fmt: skip

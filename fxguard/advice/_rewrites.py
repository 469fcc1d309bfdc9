"""Rules for fixes that compute the same in another way: logarithms, exponentials, another order.

A rule is *exact* if its expression and the one that it replaces are the same function, in value and
in gradient, also where the replaced one has no number. ``tests/verdict/test_exact_fixes.py`` runs
each of them there. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice import _expressions as made
from fxguard.advice import becomes, signs
from fxguard.advice import special_functions as special
from fxguard.advice._rule import Rule, names_in
from fxguard.advice.case import Case
from fxguard.advice.exps_in_divisors import divides, words_of_quotient
from fxguard.advice.zeros import is_normalized_in_turn
from fxguard.graph.poles import PRODUCTS, SUMS, plain

__all__ = ["REWRITES"]

_LOG = names_in("log log10 log2")
_LOGS = _LOG | names_in("log1p")
_DIVISIONS = names_in("div reciprocal")
_EXPS = names_in("cosh exp exp2 expm1 sinh")
_BASES = {"log": "", "log2": " / log(2)", "log10": " / log(10)"}
_PLAIN_PRODUCTS = PRODUCTS - names_in("addbmm addmm addmv addr baddbmm")
_LOST = "zero divisor, underflow, rounding"


def _less_one(divisor: str) -> tuple[str, ...]:
    instead = "exp(-x) / -expm1(-x)"
    return (
        f"1 / ({divisor}) -> {instead}",
        f"a / ({divisor}) -> a * {instead}",
        f"1 / (b * ({divisor})) -> {instead} / b",
        f"a / (b * ({divisor})) -> a * {instead} / b",
    )


def _is_sum_of_densities(case: Case) -> bool:
    own_rules = (
        made.is_weighted_sum_of_exp(""),
        made.is_log_of_products,
        made.is_sum_of_exp("sum"),
        made.is_sum_of_exp("mean"),
    )
    return made.is_sum_of_densities(case) and not any(fits(case) for fits in own_rules)


def _instead_of_log(case: Case) -> Mapping[str, str]:
    is_running = becomes.is_summed_in_turn(case)
    return {"instead": "logcumsumexp" if is_running else "logsumexp or log_softmax"}


REWRITES = (
    # Logarithms of exponentials, and small numbers next to 1.
    Rule(_LOST, _LOG, "exact",
         "take log_softmax({c.of[softmax]}, dim){c.per_log} "
         "instead of {c.name}(softmax({c.of[softmax]}, dim)), and "
         "masked_fill(mask, 0) it before the product: 0 * -inf is NaN",
         becomes.is_of_masked_softmax),
    Rule(_LOST, _LOG, "exact",
         "take log_softmax({c.of[softmax]}, dim){c.per_log} "
         "instead of {c.name}(softmax({c.of[softmax]}, dim))",
         lambda c: made.is_of("softmax")(c) and not becomes.is_of_masked_softmax(c),
         rewrites=("{c.name}(softmax(x, d)) -> log_softmax(x, d){c.per_log}",)),
    Rule(_LOST, names_in("div"), "exact",
         "take log_softmax(a, dim) - log_softmax(b, dim) instead of the logarithm of their ratio",
         becomes.is_ratio_of_softmaxes),
    Rule(_LOST, names_in("div"), "exact",
         'take kl_div(log_softmax(x, dim), p, reduction="none") instead of '
         "p * log(p / softmax(x, dim))", becomes.is_weighted_ratio),
    Rule(_LOST, names_in("div"), "exact",
         "take log(p) - log_softmax({c.of[softmax]}, dim) "
         "instead of log(p / softmax({c.of[softmax]}, dim))",
         lambda c: becomes.is_ratio_to_softmax(c) and not becomes.is_weighted_ratio(c)),
    Rule(_LOST, _LOG, "exact",
         "take logsigmoid({c.of[sigmoid]}){c.per_log} "
         "instead of {c.name}(sigmoid({c.of[sigmoid]}))", made.is_of("sigmoid"),
         rewrites=("{c.name}(sigmoid(x)) -> logsigmoid(x){c.per_log}",)),
    Rule(_LOST, _LOGS, "exact",
         "take logsigmoid(-x){c.per_log} instead of log(1 - sigmoid(x))",
         made.is_one_minus("sigmoid"),
         rewrites=("{c.log}(1 - sigmoid(x)) -> logsigmoid(-x){c.per_log}",
                   "log1p(-sigmoid(x)) -> logsigmoid(-x)")),
    Rule(_LOST, _LOGS, "advice",
         "take logsigmoid(x) instead of log(1 / (1 + exp(-x))), and logsigmoid(-x) of 1 minus it: "
         "binary_cross_entropy_with_logits has both", made.is_sigmoid_by_hand),
    Rule(_LOST, _LOG, "exact",
         "take log_softmax(x, dim){c.per_log} instead of {c.name}(exp(x) / sum(exp(x), dim))",
         made.is_ratio_of_same_exp,
         rewrites=("{c.name}(exp(x) / sum(exp(x), d, True)) -> log_softmax(x, d){c.per_log}",)),
    Rule(_LOST, _LOG, "exact",
         "take (a - logsumexp(b, dim)){c.per_log} instead of {c.name}(exp(a) / sum(exp(b), dim))",
         lambda c: made.is_ratio_of_exps(c) and not made.is_ratio_of_same_exp(c),
         rewrites=("{c.name}(exp(a) / sum(exp(b), d, k)) -> "
                   "(a - logsumexp(b, d, k)){c.per_log}",)),
    Rule(_LOST, _LOG, "exact",
         "take (a - log(b)){c.per_log} instead of {c.name}(exp(a) / b)",
         lambda c: made.is_ratio_of_exp(c) and not made.is_ratio_of_exps(c),
         rewrites=("{c.name}(exp(a) / b) -> (a - log(b)){c.per_log}",)),
    Rule(_LOST, _LOG, "exact",
         "take (a + log(b)){c.per_log} instead of {c.name}(exp(a) * b)",
         made.is_log_of_product_with_exp,
         rewrites=("{c.name}(exp(a) * b) -> (a + log(b)){c.per_log}",)),
    Rule(_LOST, _LOGS, "exact",
         "take log(-expm1(x)){c.per_log} instead of log(1 - exp(x))", made.is_one_minus("exp"),
         rewrites=("{c.log}(1 - exp(x)) -> {c.log}(-expm1(x))",
                   "log1p(-exp(x)) -> log(-expm1(x))")),
    Rule(_LOST, _LOGS, "exact",
         "take 2 * (log(2) - x - softplus(-2 * x)){c.per_log} instead of log(1 - tanh(x)²)",
         made.is_one_minus_tanh_squared,
         rewrites=("{c.log}(1 - tanh(x) ** 2) -> "
                   "2 * (log(2) - x - softplus(-2 * x)){c.per_log}",)),
    Rule("zero divisor, rounding", names_in("atanh"), "exact",
         "keep {c.of[tanh]} instead of taking atanh(tanh({c.of[tanh]}))", made.is_of("tanh"),
         rewrites=("atanh(tanh(x)) -> x",)),
    Rule(_LOST, _LOG, "exact",
         "take logsumexp({c.of[exp]}, dim){c.per_log} "
         "instead of {c.name}(sum(exp({c.of[exp]}), dim))",
         made.is_sum_of_exp("sum"),
         rewrites=("{c.name}(sum(exp(x), d, k)) -> logsumexp(x, d, k){c.per_log}",)),
    Rule(_LOST, _LOG, "exact",
         "take (logsumexp(x, dim) - log(n)){c.per_log} instead of {c.name}(mean(exp(x), dim)) "
         "of n numbers", made.is_sum_of_exp("mean")),
    Rule(_LOST, _LOG, "exact",
         "take logaddexp(a, b){c.per_log} instead of {c.name}(exp(a) + exp(b))",
         made.is_sum_of_exps,
         rewrites=("{c.name}(exp(a) + exp(b)) -> logaddexp(a, b){c.per_log}",)),
    Rule(_LOST, _LOG, "exact",
         "take logsumexp(log_softmax(w, dim) + x, dim){c.per_log} instead of "
         "{c.name}(sum(softmax(w, dim) * exp(x), dim))", made.is_weighted_sum_of_exp("softmax"),
         rewrites=("{c.name}(sum(softmax(w, d) * exp(x), d, k)) -> "
                   "logsumexp(log_softmax(w, d) + x, d, k){c.per_log}",)),
    Rule(_LOST, _LOG, "advice",
         "take logsumexp(log(w) + x, dim){c.per_log} instead of {c.name}(sum(w * exp(x), dim))",
         lambda c: made.is_weighted_sum_of_exp("")(c)
         and not made.is_weighted_sum_of_exp("softmax")(c)),
    Rule(_LOST, _LOG, "advice",
         "take log({c.of[prod]}).sum(dim){c.per_log} instead of {c.name}(prod({c.of[prod]}, dim))",
         made.is_of("prod")),
    Rule(_LOST, _LOG, "advice",
         "take log({c.of[cumprod]}).cumsum(dim){c.per_log} instead of "
         "{c.name}(cumprod({c.of[cumprod]}, dim)); log1p(-h) is "
         "log(1 - h)", made.is_of_running_product, alone=True),
    Rule(_LOST, _LOG, "advice",
         "work with logarithms: logsumexp(log(w) + log(x).sum(dim), dim) instead of "
         "log(sum(w * prod(x, dim), dim))", made.is_log_of_products),
    Rule(_LOST, _LOG, "advice",
         "work with logarithms: logsumexp of the exponents and the logarithms of what they are "
         "multiplied with, in place of log(sum(... * exp(...), dim))", _is_sum_of_densities),
    Rule("zero divisor, underflow", _LOG, "exact",
         "take xlogy(p, q){c.per_log} instead of p * {c.name}(q): it is 0 where p is",
         becomes.is_weighted_given,
         rewrites=("{c.weighted_log}",)),
    Rule("rounding", _DIVISIONS, "exact", "take log1p(x) instead of log(1 + x)",
         made.is_log_of_one_plus,
         rewrites=("log(1 + x) -> log1p(x)",)),
    Rule("rounding", _DIVISIONS | _LOG, "exact", "take expm1(x) instead of exp(x) - 1",
         made.is_exp_minus_one,
         rewrites=("exp(x) - 1 -> expm1(x)",)),
    Rule("rounding", _DIVISIONS, "exact", "take -expm1(x) instead of 1 - exp(x)",
         made.is_one_minus("exp"), rewrites=("1 - exp(x) -> -expm1(x)",)),
    Rule("rounding, domain", None, "exact",
         "take ((x - x.mean(dim, keepdim=True)) ** 2).mean(dim) instead of E[x²] - E[x]², which "
         "cancels", made.is_difference_of_squares),
    Rule(_LOST, _LOGS, "advice",
         "take logsumexp over the other classes of log_softmax(x, dim) instead of "
         "log(1 - softmax(x, dim))", made.is_one_minus("softmax")),
    Rule(_LOST, _LOGS, "advice",
         "return the logit x in place of p = sigmoid(x), which rounded to 1: logsigmoid(-x) is "
         "log(1 - p), and so takes binary_cross_entropy_with_logits", made.is_one_minus_returned),
    Rule(_LOST, _LOG, "advice",
         "return logits from the model, without its sigmoid: logsigmoid(logits) is this logarithm, "
         "and binary_cross_entropy_with_logits takes it",
         lambda c: c.is_returned_by("sigmoid")),
    Rule(_LOST, _LOG, "advice",
         "return logits from the model, without its softmax: log_softmax(logits, dim) is this "
         "logarithm, and cross_entropy takes it", lambda c: c.is_returned_by("softmax")),
    Rule(_LOST, _LOG, "advice",
         "take slogdet({c.of[det]}).logabsdet "
         "instead of log(det({c.of[det]})), and add an eps to the diagonal where "
         "the matrix is singular", made.is_of("det")),
    Rule("underflow, singular gradient, zero divisor", names_in("pow"), "exact",
         "take exp({c.other} * log_softmax({c.of[softmax]}, dim)) instead of "
         "softmax({c.of[softmax]}, dim) ** {c.other}", made.is_of("softmax"),
         rewrites=("softmax(x, d) ** a -> exp(a * log_softmax(x, d))",)),
    # Overflows avoided by another order of operations.
    Rule("overflow", names_in("exp"), "exact", "take softplus({c.bare}) "
                                               "instead of log(1 + exp({c.bare}))",
         becomes.is_softplus,
         rewrites=("log(1 + exp(x)) -> softplus(x)", "log1p(exp(x)) -> softplus(x)")),
    Rule("overflow", names_in("cosh"), "exact",
         "take logaddexp({c.bare}, -{c.x}) - log(2) instead of log(cosh({c.bare}))",
         lambda c: any(plain(step.kind) == "log" for step in c.around.read_by),
         rewrites=("log(cosh(x)) -> logaddexp(x, -x) - log(2)",)),
    Rule("overflow", names_in("exp"), "exact", "take sigmoid(x) instead of exp(x) / (1 + exp(x))",
         becomes.is_sigmoid_by_hand,
         rewrites=("exp(x) / (1 + exp(x)) -> sigmoid(x)",)),
    Rule("overflow", names_in("exp"), "exact",
         "take a * sigmoid(x) instead of a * exp(x) / (1 + exp(x))",
         becomes.is_scaled_sigmoid_by_hand,
         rewrites=("a * exp(x) / (1 + exp(x)) -> a * sigmoid(x)",)),
    Rule("overflow", names_in("exp"), "exact",
         "take tanh(x / 2) instead of (exp(x) - 1) / (exp(x) + 1)", becomes.is_tanh_by_hand,
         rewrites=("(exp(x) - 1) / (exp(x) + 1) -> tanh(x / 2)",)),
    Rule("overflow", names_in("exp"), "exact",
         "take a * sigmoid({c.negated}) instead of a / (1 + exp({c.bare}))",
         becomes.divides_by_one_plus,
         rewrites=("1 / (1 + exp(-x)) -> sigmoid(x)", "a / (1 + exp(-x)) -> a * sigmoid(x)")),
    Rule("overflow", names_in("exp"), "exact",
         "take a * exp({c.negated}) instead of a / exp({c.bare})", divides("x"),
         rewrites=("1 / exp(x) -> exp(-x)", "a / exp(x) -> a * exp(-x)")),
    Rule("overflow", names_in("exp"), "advice",
         "take a * exp({c.negated}) / -expm1({c.negated}) instead of a / (exp({c.bare}) - 1): "
         "equal for {c.bare} above 0",
         divides("x - 1"), rewrites=_less_one("exp(x) - 1")),
    Rule("overflow", names_in("expm1"), "advice",
         "take a * exp({c.negated}) / -expm1({c.negated}) instead of a / expm1({c.bare}): equal "
         "for {c.bare} above 0",
         divides("x"), rewrites=_less_one("expm1(x)")),
    Rule("overflow", names_in("exp expm1"), "advice",
         "divide both sides of {quotient} by exp({c.bare}) or a power of it, so that "
         "exp({c.negated}) is left: that becomes 0, not inf, and its gradient, too",
         lambda c: bool(words_of_quotient(c)), words=words_of_quotient),
    *(Rule("overflow", names_in(of), "exact", text, becomes.is_logged_by(log, of),
           rewrites=rewrites)
      for log, per in _BASES.items()
      for of, text, rewrites in (
          ("sum", f"take logsumexp({{c.of[exp]}}, dim){per} "
                  f"instead of {log}(sum(exp({{c.of[exp]}}), dim))",
           (f"{log}(sum(exp(x), d, k)) -> logsumexp(x, d, k){per}",)),
          ("mean", f"take (logsumexp(x, dim) - log(n)){per} instead of {log}(mean(exp(x), dim)) "
                   "of n numbers", ()),
          ("add", f"take logaddexp(a, b){per} instead of {log}(exp(a) + exp(b))",
           (f"{log}(exp(a) + exp(b)) -> logaddexp(a, b){per}",)))),
    Rule("overflow", names_in("exp"), "advice",
         "take x + log(-expm1(-x)) instead of log(exp(x) - 1)", becomes.is_inverse_softplus),
    Rule("overflow", _EXPS, "exact",
         "take {instead}: a logarithm is taken of these exponentials anyway",
         lambda c: becomes.is_logged(c) and c.name not in ("cosh", "sinh")
         and not (special.is_logged(c) or special.is_log_of_gamma(c)),
         words=_instead_of_log,
         rewrites=("log(sum(exp(x), d, k)) -> logsumexp(x, d, k)",
                   "log(cumsum(exp(x), d)) -> logcumsumexp(x, d)",
                   "log(exp(x) / sum(exp(x), d, True)) -> log_softmax(x, d)",
                   "log(diag(exp(x)) / sum(exp(x), d)) -> x.diag() - logsumexp(x, d)",
                   "log(exp(a) / sum(exp(b), d, k)) -> a - logsumexp(b, d, k)")),
    Rule("overflow", _EXPS, "exact",
         "subtract the row's maximum first, exp({c.bare} - {c.x}.amax(dim, keepdim=True)): the "
         "division cancels it", lambda c: becomes.is_normalized(c) and not is_normalized_in_turn(c),
         rewrites=("exp(x) / sum(exp(x), d, True) -> softmax(x, d)",)),
    Rule("overflow", _PLAIN_PRODUCTS, "exact",
         "scale an operand before the product: (q {c.scale}) @ k instead of (q @ k) {c.scale}",
         becomes.is_scaled_after,
         rewrites=("{c.scaled_before}",)),
    Rule("overflow", SUMS | names_in("add logcumsumexp mean"), "exact",
         "subtract the running maximum from all exponents before their sum",
         becomes.adds_exponentials),
    Rule("overflow", None, "exact",
         "rescale what is summed here by a constant: the norm that follows{c.norm} divides it out",
         signs.only_norm_follows),
)  # fmt: skip

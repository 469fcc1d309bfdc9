"""Calls of a statement behind which torch runs operations that the statement does not show."""

from __future__ import annotations

import ast

from fxguard.source.named import called_name
from fxguard.source.syntax import tree_of

__all__ = ["hides_operations", "only_argument_in"]

# Methods and functions of torch.distributions, and those of them that are given a sample.
OF_SAMPLES = frozenset(["cdf", "icdf", "log_prob"])
OF_DISTRIBUTIONS = OF_SAMPLES | frozenset(
    ["entropy", "kl_divergence", "log_abs_det_jacobian", "perplexity", "rsample"]
)


def hides_operations(code: str) -> bool:
    """Whether a statement calls a distribution.

    Example:
        >>> hides_operations("x = dist.log_prob(u) - u"), hides_operations("x = u.log() - u")
        (True, False)
    """
    return bool(_calls(code))


def only_argument_in(code: str) -> str:
    """The variable that is all that such a call is given; "" if there are several, or others.

    Example:
        >>> only_argument_in("inside = dist.log_prob(u) - torch.log(1 - a)")
        'u'
    """
    calls = _calls(code)
    if len(calls) != 1 or called_name(calls[0]) not in OF_SAMPLES:
        return ""
    given = calls[0].args
    is_one = len(given) == 1 and not calls[0].keywords and isinstance(given[0], ast.Name)
    return ast.unparse(given[0]) if is_one else ""


def _calls(code: str) -> list[ast.Call]:
    tree = tree_of(code)
    nodes = () if tree is None else ast.walk(tree)
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return [each for each in calls if called_name(each) in OF_DISTRIBUTIONS]

"""Eigenvalues that roundings have made 0 or negative, of which a root or a logarithm is taken.

The roundings of a decomposition are as large as its largest eigenvalue times eps, so a bound has to
be a share of that. Knows nothing of torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fxguard.advice._patterns import made_by
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain

__all__ = ["words_of_eigenvalues"]

ROUNDINGS = 10  # bounds are that many eps of the largest
LARGEST_ROUNDING = 1e-3  # of the largest: beyond that an eigenvalue is negative by itself

_ASSIGNED = re.compile(r"=\s*(torch\.)?linalg\.(eigh|eigvalsh|svd|svdvals)\(")
_DECOMPOSE = names_in("eigh eigvalsh linalg_eigh linalg_eigvalsh linalg_svd linalg_svdvals svd")


def words_of_eigenvalues(case: Case) -> Mapping[str, str]:
    """``{"share": "1e-06"}`` where the operand is what a decomposition made; {} of others."""
    step = made_by(case.around, case.around.culprit)
    form = FORMATS.get(case.dtype)
    is_made = step is not None and plain(step.kind) in _DECOMPOSE
    lines = [source.code for _, source in case.assignments] if step is None else []
    if form is None or not (is_made or any(map(_ASSIGNED.search, lines))):
        return {}
    found = None if case.around.culprit is None else case.around.range_of(case.around.culprit)
    largest = 1.0 if found is None else found.abs_max  # an optimizer's step measures nothing
    if case.operands and abs(case.operands[0].low) > LARGEST_ROUNDING * largest:
        return {}  # an indefinite matrix
    return {"share": f"{ROUNDINGS * form.eps:.0e}"}

"""Functions of a symmetric matrix by its eigenvectors: ``vec @ diag(log(lam)) @ vec.mT``.

Their derivative is finite where eigenvalues are equal (Daleckii and Krein), but that of ``eigh``,
which divides by the differences of eigenvalues, is not. Knows nothing of torch.
"""

from __future__ import annotations

from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.surroundings import is_passed
from fxguard.graph.poles import plain

__all__ = ["is_matrix_function"]

_PRODUCTS = names_in("bmm einsum matmul mm mul")
MOST_STEPS = 64  # from the eigenvectors to their product


def is_matrix_function(case: Case) -> bool:
    """Whether a product with the eigenvectors is multiplied with them once more."""
    made = set(case.around.step.outputs[-1:])  # of the eigenvectors alone
    products = set[int]()  # of them with something else
    steps = list(case.around.steps)
    at = next((i for i, each in enumerate(steps) if each is case.around.step), len(steps))
    for step in steps[at + 1 :][:MOST_STEPS]:
        of_vectors = [each for each in step.inputs if each in made]
        of_products = [each for each in step.inputs if each in products]
        if not (of_vectors or of_products):
            continue
        is_product = plain(step.kind) in _PRODUCTS
        if is_product and of_products and of_vectors:
            return True
        if is_product and len(set(of_vectors)) > 1:
            return True  # an outer product of them
        if is_product:
            products.update(step.outputs)
        elif is_passed(step):
            (products if of_products else made).update(step.outputs)
    return False

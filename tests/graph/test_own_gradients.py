"""The gradient that one operation returns in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from fxguard.graph.own_gradients import gradient_in_float64


def test_a_complex_gradient_keeps_its_imaginary_part() -> None:
    """The gradient of ``x + i * x**2``, of its imaginary part alone, is ``2 * x``."""

    def function(x: Tensor) -> Tensor:
        return torch.complex(x, x * x)

    incoming = {0: torch.tensor([1j], dtype=torch.complex64)}
    found = gradient_in_float64("complex", function, ((torch.tensor([3.0]),), {}), 0, incoming)
    assert found is not None
    assert (found.dtype, found.tolist()) == (torch.float64, [6.0])


def test_a_decomposition_has_none_where_only_roundings_would_make_one() -> None:
    """Whatever the roundings of this CPU are: at one matrix of a batch there is no gradient."""
    batch = torch.stack([torch.ones(3, 3), torch.diag(torch.tensor([1.0, 2.0, 3.0]))])
    ones = torch.ones(2, 3, 3)
    for kind, function, position in (
        ("linalg_qr", torch.linalg.qr, 0),
        ("linalg_eigh", torch.linalg.eigh, 1),
        ("linalg_svd", torch.linalg.svd, 0),
    ):
        found = gradient_in_float64(kind, function, ((batch,), {}), 0, {position: ones})
        assert found is not None
        assert bool(found[0].isnan().all())
        assert bool(found[1].isfinite().all())
    values = {0: torch.ones(2, 3)}
    found = gradient_in_float64("linalg_eigh", torch.linalg.eigh, ((batch,), {}), 0, values)
    assert found is not None
    assert bool(found.isfinite().all())

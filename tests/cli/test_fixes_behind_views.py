"""A view between two operations hides nothing: ``x.T`` is told what ``x`` is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("form_of_operations")

RunHere = Callable[[str], Any]

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\ntorch.manual_seed(0)\n"

VIEWS = (
    *("{}.T", "{}.mT", "{}.H", "{}.mH", "{}.real", "{}.data", "{}[...]", "{}[:, None]"),
    *("{}.adjoint()", "torch.atleast_3d({})", "{}.movedim(0, 1)", "torch.real({})"),
)

# Programs with a view in one place, and what is said of them.
PROGRAMS = {
    "a logarithm of a softmax": (
        "p = torch.softmax(torch.tensor([[0.0, 200.0], [1.0, 2.0]]), 1)\n"
        "print(torch.log({view}).sum().item())\n",
        "p",
        "log_softmax",
    ),
    "exponentials of one row": (
        "x = torch.tensor([[-200.0, -300.0], [-250.0, -400.0]])\ne = torch.exp(x)\n"
        "print(torch.log({view}.sum()).item())\n",
        "e",
        "logsumexp",
    ),
    "a count of a mask": (
        "x, mask = torch.ones(2, 3), torch.tensor([[1.0, 1, 0], [0, 0, 0]])\n"
        "n = mask.sum(1, keepdim=True)\nprint(((x * mask).sum() / {view}).sum().item())\n",
        "n",
        "clamp(min=1)",
    ),
}


@pytest.mark.parametrize(("name", "view"), itertools.product(PROGRAMS, VIEWS))
def test_the_fix_is_that_without_the_view(run_here: RunHere, name: str, view: str) -> None:
    text, operand, fix = PROGRAMS[name]
    plain = run_here(HEAD + text.format(view=operand)).err
    viewed = run_here(HEAD + text.format(view=view.format(operand))).err
    first, second = (err.partition("fix: ")[2].partition("\n")[0] for err in (plain, viewed))
    assert fix in first, plain
    assert fix in second, viewed


def test_a_part_of_complex_numbers_is_something_else(run_here: RunHere) -> None:
    """The logarithm of a real part of exponentials is no ``logsumexp``."""
    text = (
        "z = torch.complex(torch.full((3,), -200.0), torch.ones(3))\n"
        "print(torch.log(torch.exp(z).real.sum()).item())\n"
    )
    err = run_here(HEAD + text).err
    assert "log" in err.splitlines()[0], err
    assert "(exact)" not in err, err


def test_a_gradient_is_no_view_of_its_weight(run_here: RunHere) -> None:
    text = (
        "w = torch.softmax(torch.zeros(2, 2), 1).requires_grad_()\n(w * 0).sum().backward()\n"
        "print(torch.log(w.grad).sum().item())\n"
    )
    err = run_here(HEAD + text).err
    assert "log_softmax" not in err, err

"""What a script computes on a device, whose numbers are asked for later."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxguard.script import late

RunHere = Callable[[str], Any]

HEAD = "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"

# What is wrong, and the first lines of the verdict.
WRONG = {
    "a loss": (
        "w = torch.full((2, 1), 9.0, requires_grad=True)\n"
        "x = torch.ones(3, 2)\n"
        "loss = -torch.log(1 - torch.sigmoid(x @ w)).mean()\n"
        "loss.backward()\n",
        ["log made -inf (script.py:6): log of zero", "at [0, 0]: log(0.0)"],
    ),
    "a gradient": (
        "w = torch.zeros(3, requires_grad=True)\n"
        "(w - torch.tensor([0.0, 1.0, 2.0])).square().sqrt().sum().backward()\n",
        ["backward of sqrt made inf (script.py:5): its derivative is infinite there"],
    ),
    "what was long gone": (
        "def share(x):\n"
        "    total = x.sum()\n"
        "    return x / total\n"
        "z = share(torch.zeros(3))\n"
        "for _ in range(50):\n"
        "    z = z * 0.5 + 1\n"
        "print(z[0].item())\n",
        ["div made NaN (script.py:6): 0 / 0", "at [0]: 0.0 / 0.0"],
    ),
    "what was written before it is asked for": (
        "x = torch.zeros(3)\n"
        "y = x.log()\n"
        "x.fill_(7.0)\n"
        "y.clamp_(min=-5.0)\n"
        "print((y * 0).sum().item(), x.sum().item())\n"
        "print((y.new_zeros(1) / x.new_zeros(1)).item())\n",
        ["div made NaN (script.py:9): 0 / 0"],
    ),
    "data of a model": (
        "x = torch.ones(4, 3)\n"
        "x = (x - x.mean(0)) / x.std(0)\n"
        "model = nn.Linear(3, 1)\n"
        "model(x).sum().backward()\n",
        ["div made NaN (script.py:5): 0 / 0", "it was read as argument `input` of Linear"],
    ),
    "what a loss reads": (
        "model = nn.Linear(3, 2)\n"
        "weights = torch.tensor([0.0, 0.0])\n"
        "weights = weights / weights.sum()\n"
        "(model(torch.ones(4, 3)) * weights).sum().backward()\n",
        ["div made NaN (script.py:6): 0 / 0"],
    ),
    "what raised": (
        "p = torch.zeros(3)\np = p / p.sum()\ntorch.multinomial(p, 1)\n",
        ["div made NaN (script.py:5): 0 / 0"],
    ),
    "an index": (
        "p = torch.zeros(3)\np = p / p.sum()\ni = p[0].long()\ntorch.ones(3)[i]\n",
        ["div made NaN (script.py:5): 0 / 0"],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_made_it_is_named(what: str, run_here: RunHere, numbers_come_late: list[int]) -> None:
    text, lines = WRONG[what]
    ran = run_here(HEAD + text)
    assert ran.status == 3, ran.err
    verdict = ran.err[ran.err.index(lines[0]) :]
    assert all(line in verdict for line in lines), ran.err
    assert any(numbers_come_late)


def test_no_number_is_of_another_time(run_here: RunHere, numbers_come_late: list[int]) -> None:
    """What was written since has the magnitudes that it had, and no elements."""
    err = run_here(
        HEAD + "x = torch.zeros(3)\ny = x.log()\nz = y + 1\nx.fill_(7.0)\nprint(z.sum().item())\n"
    ).err
    assert "log made -inf (script.py:5)" in err  # a logarithm makes no other
    assert "0.00e+00 0.00e+00 input[0]" in err
    assert "7.0" not in err


def test_a_healthy_script_asks_seldom(
    ends_as_ever: Callable[[str], str], numbers_come_late: list[int]
) -> None:
    """Where it reads a number, and after so many operations."""
    text = HEAD + (
        "z = torch.ones(3)\n"
        "for step in range(3000):\n"
        "    z = z * 0.5 + 1\n"
        "    i = z.argmax()\n"
        "    mask = z > 0\n"
        "print(z.sum().item())\n"
    )
    err = ends_as_ever(text)
    assert "nothing found" in err
    assert "not checked" not in err
    assert max(numbers_come_late) == late.MOST
    assert len(numbers_come_late) < 12


def test_nothing_large_is_kept(
    run_here: RunHere, numbers_come_late: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the memory that a view looks into; the operation is named all the same."""
    monkeypatch.setattr(late, "LARGE", 64)
    ran = run_here(
        HEAD
        + textwrap.dedent(
            """
            import gc, weakref
            x = torch.ones(100) * 2
            there = weakref.ref(x.untyped_storage())
            small = x[:2] * 3
            del x, small
            gc.collect()
            print(there() is None)
            big = torch.zeros(100)
            print((big / big).sum().item())
            """
        )
    )
    assert ran.out == "True\nnan\n"
    assert "div made NaN (script.py:13): 0 / 0" in ran.err, ran.err
    assert "at [0]" not in ran.err


# There an assertion of the device ends all that could be asked of it, and NaN is another integer.
OF_MEMORY = ("what raised", "an index")


@pytest.mark.parametrize("what", [each for each in WRONG if each not in OF_MEMORY])
def test_on_the_device(what: str, run_here: RunHere, device: torch.device) -> None:
    """On a GPU, where there is one: the same verdicts."""
    text, lines = WRONG[what]
    where = f"with torch.device({str(device)!r}):\n"
    ran = run_here(HEAD + where + textwrap.indent(text, "    "))
    assert ran.status == 3, ran.err
    assert lines[0].partition(" (")[0] in ran.err, ran.err

"""Each sentence of a verdict is true of the program that it is said of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from support.programs import IMPORTS

RunHere = Callable[[str], Any]

HEAD = "import torch, torch.nn.functional as F\ntorch.manual_seed(0)\n"


def verdict_of(run_here: RunHere, text: str) -> str:
    """What is said before the frames."""
    status, _, err = run_here(HEAD + text)
    assert status == 3, err
    return str(err.partition("Detected inf/nan")[0])


LOGS = (
    "p, q = torch.randn(4, 3), torch.randn(4, 3, requires_grad=True)\n"
    "p[0, 1] = -torch.inf\n"
    "log_p = F.log_softmax(p, 1)\nlog_q = F.log_softmax(q, 1)\n"
)


@pytest.mark.parametrize("reduction", ["batchmean", "sum", "mean"])
def test_the_operand_of_a_loss_that_is_bad_is_named(run_here: RunHere, reduction: str) -> None:
    """The target, and not the healthy input; and all of it, not a row, made the number."""
    said = verdict_of(
        run_here,
        LOGS + f"loss = F.kl_div(log_q, log_p, reduction='{reduction}', log_target=True)\n"
        "loss.backward()\n",
    )
    assert "`log_p` comes from script.py:5: log_p = F.log_softmax(p, 1)" in said
    assert "`log_q`" not in said
    assert "kl_div of numbers from -inf to " in said
    assert "(12 elements)" in said
    assert "a row" not in said


def test_the_first_operand_is_named_where_it_is_bad(run_here: RunHere) -> None:
    said = verdict_of(
        run_here,
        "x = torch.tensor([1.0, 2.0], requires_grad=True)\ny = x * 1e38 * 9\nz = x + 1\n"
        "loss = F.mse_loss(y, z)\nloss.backward()\n",
    )
    assert "`z`" not in said


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("torch.mul(zero, scores)", "scores"),
        ("torch.matmul(zero, scores)", "scores"),
        ("torch.mul(scores, zero)", "scores"),
    ],
)
def test_the_operand_of_a_function_that_is_bad_is_named(
    run_here: RunHere, call: str, name: str
) -> None:
    """In any place of the call."""
    said = verdict_of(
        run_here,
        "w = torch.zeros(2, 2, requires_grad=True)\nzero = w * 2\n"
        "scores = torch.ones(2, 2).masked_fill(torch.eye(2).bool(), -torch.inf)\n"
        f"out = {call}\nout.sum().backward()\n",
    )
    assert "`zero` comes" not in said
    assert f"`{name}` comes from script.py:5" in said


def test_a_number_beside_the_end_of_a_domain_has_the_digits_that_tell_it(
    run_here: RunHere,
) -> None:
    """In float64 it is above 1; with four digits it looked like 1."""
    said = verdict_of(
        run_here,
        "a = torch.tensor([1.0, 2.0], requires_grad=True)\n"
        "x = (a + 1e-8).clamp(min=1)\nx.acosh().sum().backward()\n",
    )
    assert "acosh(1.0); in float64 acosh(1.00000001); " in said


@pytest.mark.parametrize(
    "bad",
    [
        "loss = (w - 3 / (5 - t)).square().sum()\n    loss.backward()",
        "loss = w.square().sum()\n    loss.backward()\n    w.grad /= 5 - t",
    ],
)
def test_the_batch_of_a_script_is_the_step_of_its_optimizer(run_here: RunHere, bad: str) -> None:
    """It has no model whose calls could be counted."""
    found = run_here(
        f"{HEAD}w = torch.tensor([1.0, 0.0], requires_grad=True)\n"
        "optimizer = torch.optim.Adam([w], lr=0.0)\nfor t in torch.arange(8.0):\n"
        f"    optimizer.zero_grad()\n    {bad}\n    optimizer.step()\n"
    )
    assert "Detected inf/nan during batch_number=5\n" in found.err, found.err


@pytest.mark.parametrize("bad", ["p", "q", "r"])
def test_the_operand_of_several_on_a_line_is_the_bad_one(run_here: RunHere, bad: str) -> None:
    """They are told apart by what reads their results."""
    said = verdict_of(
        run_here,
        "a = torch.ones(3, requires_grad=True)\n"
        + "".join(f"{x} = torch.tensor([1.0, {0.0 if x == bad else 2.0}, 1.0])\n" for x in "pqr")
        + "(a / p[:, None] + (a * 2 / q - a / r)).sum().backward()\n",
    )
    assert f"`{bad}` comes from script.py:" in said
    assert f"where({bad} == 0, 1, {bad})" in said


@pytest.mark.parametrize(
    "line",
    ["[(a / p + a / q).sum() for _ in range(2)]", "[f(a / p), f(a / q)]", "[a / p, a / q]"],
)
def test_no_operand_is_named_where_it_is_not_certain(run_here: RunHere, line: str) -> None:
    """A comprehension runs both several times, and nothing of the statement tells them apart."""
    said = verdict_of(
        run_here,
        "a = torch.ones(3, requires_grad=True)\np, q = torch.ones(3), torch.zeros(3)\n"
        f"f = lambda x: x.sum()\nparts = {line}\nsum(x.sum() for x in parts).backward()\n",
    )
    assert "division by zero" in said
    assert "comes from" not in said
    assert not any(f"({name} == 0" in said for name in "pq")


def test_an_operand_that_is_long_is_not_taken_for_another_one(run_here: RunHere) -> None:
    """Of two divisors one has a short name, and the other one is 0."""
    said = verdict_of(
        run_here,
        "a = torch.ones(3, requires_grad=True)\nb, c, k = torch.zeros(3), torch.ones(3), 2.0\n"
        "y = (a / (b[:, None].squeeze(1).clone().reshape(3).contiguous() * k) * a).abs() / c\n"
        "y.sum().backward()\n",
    )
    assert "division by zero" in said
    assert "`c`" not in said
    assert "c == 0" not in said


STEPS = (
    "net = nn.Linear(3, 1)\n{opt}\nx = torch.ones(4, 3)\n"
    "for step in range(4):\n    if step == 2:\n        x = x / 0\n"
    "    loss = (net(x) - net({second})).sum()\n{learns}"
)
LEARNS = "    opt.zero_grad()\n    loss.backward()\n    opt.step()\n"


def test_the_step_is_told_where_a_model_is_called_several_times_in_it(run_here: RunHere) -> None:
    """As the number of the batch counts the calls."""
    opt = "opt = torch.optim.SGD(net.parameters(), 0.1)"
    ran = run_here(IMPORTS + STEPS.format(opt=opt, second="x * 2", learns=LEARNS))
    assert "Detected inf/nan during batch_number=4 optimizer_step=2\n" in ran.err, ran.err
    alone = STEPS.format(opt="", second="x * 2", learns="")
    assert "Detected inf/nan during batch_number=4\n" in run_here(IMPORTS + alone).err


def test_the_step_is_not_told_where_it_is_the_batch(run_here: RunHere) -> None:
    text = STEPS.format(
        opt="opt = torch.optim.SGD(net.parameters(), 0.1)", second="x", learns=LEARNS
    )
    ran = run_here(IMPORTS + text.replace(" - net(x)", " * 1.0"))
    assert "Detected inf/nan during batch_number=2\n" in ran.err, ran.err


@pytest.mark.parametrize("number", [118.99401, 88.7561, 95.0, 104.00449])
def test_an_exponent_has_the_digits_that_its_exponential_takes(
    run_here: RunHere, number: float
) -> None:
    said = verdict_of(run_here, f"x = torch.tensor([{number}])\nprint(torch.exp(x).sum().item())\n")
    told, made = said.split("at [0]: exp(")[1].split(" in float64")[0].split(") is ")
    assert math.exp(float(told)) == pytest.approx(float(made), rel=2e-3)

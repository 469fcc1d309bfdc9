"""``fxguard run`` of scripts that compute with tensors of their own, and call no module."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

from fxguard.batch.batch import Batch
from fxguard.script.beside import Beside
from fxguard.script.operations import kind_of_code
from support.forms import FORMS

pytestmark = [
    pytest.mark.usefixtures("form_of_operations"),
    pytest.mark.parametrize("form_of_operations", FORMS, indirect=True),
]

RunHere = Callable[[str], Any]
EndsAsEver = Callable[[str], str]

HEAD = "import torch\ntorch.manual_seed(0)\n"

# What is wrong, the first line of the verdict, a part of the fix.
WRONG = {
    "a forward": (
        "w = torch.full((2, 1), 9.0, requires_grad=True)\n"
        "x = torch.ones(3, 2)\n"
        "loss = -torch.log(1 - torch.sigmoid(x @ w)).mean()\n"
        "loss.backward()\n",
        "log made -inf (script.py:5): log of zero",
        "logsigmoid(-x)",
    ),
    "a backward": (
        "w = torch.zeros(3, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([w], 0.1)\n"
        "x = torch.tensor([0.0, 1.0, 2.0])\n"
        "for _ in range(3):\n"
        "    d = (w - x) ** 2\n"
        "    loss = d.sqrt().sum()\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n",
        "backward of sqrt made inf (script.py:8): its derivative is infinite there",
        "sqrt(d + 1e-12)",
    ),
    "one of several results": (
        "a = torch.eye(3, requires_grad=True)\n"
        "values, vectors = torch.linalg.eigh(a * 2)\n"
        "(values.sum() + vectors.pow(3).sum()).backward()\n",
        "backward of linalg_eigh made NaN (script.py:4): equal eigenvalues",
        "",
    ),
    "numbers without gradients": (
        "counts = torch.zeros(4)\n"
        "counts[1:3] += 2\n"
        "share = counts / counts.sum()\n"
        "entropy = -(share * share.log()).sum()\n"
        "print(f'{entropy:.3f}')\n",
        "log made -inf (script.py:6): log of zero",
        "",
    ),
    "a number that Python gets": (
        "x = torch.tensor([1.0, 1.0])\nx.sub_(x.mean())\nz = x / x.std()\ntotal = float(z.sum())\n",
        "div made NaN (script.py:5): 0 / 0",
        "",
    ),
    "a function of the script": (
        "def energy(v):\n"
        "    return torch.exp(v * 100).sum()\n"
        "v = torch.ones(3, requires_grad=True)\n"
        "energy(v).backward()\n",
        "exp made inf (script.py:4): overflow",
        "",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_made_it_is_named(run_here: RunHere, name: str) -> None:
    """Operation, line and cause, as in a model, with the status of a detection."""
    text, verdict, fix = WRONG[name]
    found, _, err = run_here(HEAD + text)
    assert found == 3
    assert err.splitlines()[0] == verdict
    assert fix in err


# Scripts that are right, though inf or NaN occurs in them.
RIGHT = {
    "a minimum begins with inf": "best = torch.tensor(float('inf'))\n"
    "for x in torch.rand(100):\n"
    "    best = torch.minimum(best, x)\n"
    "    print(best.item())\n",
    "infinite entries that are read": "d = torch.full((9, 9), float('inf'))\n"
    "for i in range(8):\n"
    "    d[i, i + 1] = min(d[i, i + 1].item(), 1.0)\n"
    "    d[i + 1, i] = d[i, i + 1]\n"
    "print(d)\n",
    "a masked logarithm": "x = torch.tensor([0.0, 1.0, 2.0])\n"
    "y = torch.where(x > 0, x.log(), torch.zeros(3))\n"
    "print(y.sum().item())\n",
    "what is not finite is left out": "x = torch.tensor([0.0, 1.0]) / torch.tensor([0.0, 1.0])\n"
    "print(x[x.isfinite()].mean().item(), x.nan_to_num().sum().item())\n",
    "missing values": "x = torch.tensor([1.0, float('nan'), 3.0])\nprint(x.nanmean().item())\n",
    "padding of an embedding": "w = torch.randn(4, 2, requires_grad=True)\n"
    "with torch.no_grad():\n"
    "    w[0].fill_(0)\n"
    "(w * 2).sum().backward()\n",
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_script_that_is_right_ends_as_ever(ends_as_ever: EndsAsEver, name: str) -> None:
    """It prints what it prints without fxguard, and a line tells how much was checked."""
    assert "operations of the script; nothing found" in ends_as_ever(HEAD + RIGHT[name])


def test_random_numbers_gradients_and_memory_are_those_of_python(ends_as_ever: EndsAsEver) -> None:
    """Nothing is drawn, written or kept."""
    text = (
        "import gc, weakref\n"
        "w = torch.randn(3, requires_grad=True)\n"
        "for _ in range(3):\n"
        "    x = torch.randn(4, 3)\n"
        "    big = x.repeat(100, 1)\n"
        "    gone = weakref.ref(big)\n"
        "    loss = torch.nn.functional.dropout((big @ w).tanh(), 0.5).pow(2).mean()\n"
        "    loss.backward()\n"
        "    del big, loss\n"
        "    gc.collect()\n"
        "    assert gone() is None\n"
        "    print(w.grad.tolist(), torch.rand(2).tolist())\n"
    )
    ends_as_ever(HEAD + text)


def test_a_script_with_a_model_is_looked_at_until_then(run_here: RunHere) -> None:
    """What was read before is told by nobody, and the model as ever."""
    text = (
        "print((torch.zeros(2) / 0).sum().item())\n"
        "model = torch.nn.Linear(2, 1)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
    )
    found, out, err = run_here(HEAD + text)
    assert found == 0
    assert out == "nan\n"
    assert "1 batch of Linear" in err
    assert "of the script" not in err


def test_an_exception_of_the_script_has_what_it_read(run_here: RunHere) -> None:
    """A bad number that was read is told in front of the error that came of it."""
    text = (
        "p = torch.zeros(3)\n"
        "p = p / p.sum()\n"
        "if p.sum().item() != 1:\n"
        "    raise ValueError('not a distribution')\n"
    )
    found, _, err = run_here(HEAD + text)
    assert found == 3
    assert err.splitlines()[0] == "div made NaN (script.py:4): 0 / 0"
    assert "not a distribution" in err


def test_a_traceback_is_that_of_python(run_here: RunHere) -> None:
    """One that the script prints itself has no frames of fxguard."""
    text = (
        "import traceback\n"
        "try:\n"
        "    torch.ones(2) @ torch.ones(3)\n"
        "except RuntimeError:\n"
        "    print(traceback.format_exc())\n"
    )
    found, out, _ = run_here(HEAD + text)
    assert found == 0
    assert "fxguard" not in out
    assert out.count("File") == 1


def test_the_numbers_of_a_backward_are_those_of_the_gradient_that_it_was_given(
    run_here: RunHere,
) -> None:
    """What is computed once more begins with the same one."""
    text = (
        "w = torch.tensor([0.0, 4.0], requires_grad=True)\n"
        "w.sqrt().backward(torch.tensor([3.0, 5.0]))\n"
    )
    ran = run_here(HEAD + text)
    assert ran.status == 3
    assert "at [0]: sqrt(0.0); grad of output 3.0, grad of w inf" in ran.err


def test_a_value_that_was_noted_has_its_own_dtype(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits are told of it."""
    noted, measured_before = [], Batch.measured_before

    def measured(self: Batch, name: str, dtype: str, *rest: Any) -> Any:
        noted.append((name, dtype))
        return measured_before(self, name, dtype, *rest)

    monkeypatch.setattr(Batch, "measured_before", measured)
    text = (
        "x = torch.ones(2, dtype=torch.float16) - 1\nprint((x.double() + 0).log().sum().item())\n"
    )
    assert run_here(HEAD + text).status == 3
    assert noted == [
        ("ones", "float16"),
        ("sub", "float16"),
        ("double", "float64"),
        ("add", "float64"),
    ]


def test_what_a_graph_of_the_script_computes_has_no_lines(run_here: RunHere) -> None:
    """Behind a break of a compiled function, lines of its code would be those of nothing."""
    text = (
        "@torch.compile(backend='eager')\n"
        "def f(x):\n"
        "    y = x * 2\n"
        "    print('break')\n"
        "    return y.log()\n"
        "print(f(-torch.ones(2)).sum().item())\n"
    )
    ran = run_here(HEAD + text)
    assert "log made" not in ran.err


def test_an_operation_that_cannot_be_looked_at_is_counted(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script goes on, and so does looking at it."""

    def objects(code: CodeType) -> int:
        if code.co_name == "odd":
            raise RuntimeError("not this one")
        return kind_of_code(code)

    monkeypatch.setattr(Beside, "kind_of", staticmethod(objects))
    text = "x = torch.ones(2)\ndef odd():\n    return x.sin()\n"
    ran = run_here(HEAD + text + "print((odd() * 0 + x.log()).sum().item())\n")
    assert ran.status == 0
    assert "nothing found; not checked: 1 operation of the script" in ran.err


READ = [
    *("print(z)", "print(z.tolist())", "str(z.sum())", "z.numpy()", "z.sum().item()"),
    *("int(z.sum() > 0) or float(z[1])", "f'{z.sum():.2f}'", "bool(z.sum())"),
    "list(map(float, z))",
]


@pytest.mark.parametrize("read", READ)
def test_every_way_to_read_a_number(run_here: RunHere, read: str) -> None:
    """What is printed, compared, or given to Python and NumPy."""
    found, _, err = run_here(f"import torch\nx = torch.zeros(3)\nz = x / x.sum()\n{read}\n")
    assert found == 3
    assert err.splitlines()[0] == "div made NaN (script.py:3): 0 / 0"


def test_the_cause_is_known_after_much_else_was_bad(run_here: RunHere) -> None:
    """Many lines may hand on a bad number before the one that matters makes its own."""
    lines = "".join(f"b = b * {n}\n" for n in range(2, 22))
    err = run_here(
        f"import torch\nb = torch.zeros(2) / torch.zeros(2)\n{lines}"
        "e = torch.zeros(1)\nprint(torch.log(e).item())\n"
    ).err
    assert err.splitlines()[0] == "log made -inf (script.py:24): log of zero"


@pytest.mark.parametrize(
    "call",
    [
        "grad(loss, w)",
        "grad([loss], [w])",
        "grad(d, w, torch.ones(3))",
        "grad(outputs=d, inputs=w, grad_outputs=torch.ones(3))",
    ],
)
def test_a_gradient_that_a_script_asks_for(run_here: RunHere, call: str) -> None:
    """``torch.autograd.grad`` gives it back; a step is made by hand."""
    found, _, err = run_here(
        "import torch\nfrom torch.autograd import grad\n"
        "w = torch.tensor([0.0, 1.0, 2.0], requires_grad=True)\n"
        "for _ in range(3):\n"
        "    d = (w ** 2).sqrt()\n"
        "    loss = d.sum()\n"
        f"    (g,) = {call}\n"
        "    with torch.no_grad():\n        w -= 0.1 * g\n"
        "print(w)\n"
    )
    assert found == 3
    assert err.splitlines()[0].startswith("backward of sqrt made inf (script.py:5)")


CHAIN = "for i in range(200):\n    y = y * 0.5 + i\n"
OTHERS = "for _ in range(12000):\n    torch.full((1,), float('nan'))\n"


def test_what_is_bad_and_alive_is_led_back(run_here: RunHere) -> None:
    """Whatever else was bad meanwhile, and is gone: nothing that only handed it on is blamed."""
    chain = f"zero = torch.zeros(3)\ny = zero / zero\n{CHAIN}{OTHERS}{CHAIN}{OTHERS}"
    err = run_here(f"{HEAD}{chain}print(y.sum().item())\n").err
    assert err.startswith("div made NaN (script.py:4): 0 / 0"), err


def test_what_was_bad_and_is_gone_is_forgotten(run_here: RunHere) -> None:
    """But for the last some thousand, of which the records are still known."""
    # Earlier scripts of this process may have left theirs.
    bad = (
        "import gc\nfrom fxguard.script.bad_values import BadValues\n"
        "def bad():\n"
        "    alive = (each for each in gc.get_objects() if type(each) is BadValues)\n"
        "    return [each for each in alive if each.are_any]\n"
        "before = bad()\n"
    )
    counted = "print(max(len(each.batch.values) for each in bad() if each not in before))\n"
    out = run_here(f"{HEAD}{bad}{OTHERS}{counted}").out
    assert 0 < int(out) < 9000


def test_a_sum_that_is_logged_may_be_of_others(run_here: RunHere) -> None:
    """Then no logsumexp is the same."""
    head = HEAD + "w = torch.full((2,), 99.0, requires_grad=True)\np = torch.ones(2)\n"
    of_others = run_here(head + "loss = torch.log(p + w.exp()).sum()\nloss.backward()\n").err
    assert "exp made inf (script.py:5): overflow" in of_others
    assert "logsumexp" not in of_others
    alone = run_here(head + "loss = torch.log(w.exp().sum())\nloss.backward()\n").err
    assert "logsumexp" in alone

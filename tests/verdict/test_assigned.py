"""The statement that gave a name its value, and nothing where another one may have."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fxguard
from fxguard.records import Source
from fxguard.source.assigned import assignment_of, assignments_of, in_words
from fxguard.source.named import variable_in
from fxguard.source.suspects import Bad, suspects_in
from fxguard.testing.watch import as_module
from support.programs import run_python

# Each program reads `x` in the line with READ, and the line with HERE assigned it, if one does.
PROGRAMS = {
    "before": """
        x = 1
        x = 2  # HERE
        y = x  # READ
    """,
    "of several": """
        y, (x, z) = f()  # HERE
        print(x)  # READ
    """,
    "in a function": """
        x = 1
        def f(a):
            x = a + 1  # HERE
            return x  # READ
        x = 2
    """,
    "an argument": """
        x = 1
        def f(x):
            return x  # READ
    """,
    "a constant of the module": """
        x = 0.04  # HERE
        def f(a):
            return a / x  # READ
    """,
    "a variable of the module that is assigned twice": """
        x = 0.04
        def f(a):
            return a / x  # READ
        x = 0.05
    """,
    "under no_grad": """
        for step in range(3):
            with torch.no_grad():
                x = teacher(step)  # HERE
            loss = student(step) - x  # READ
    """,
    "in a branch that may not have run": """
        x = 1
        if flip:
            x = 2
        y = x  # READ
    """,
    "after a branch": """
        if flip:
            x = 2
        x = 3  # HERE
        y = x  # READ
    """,
    "in the same branch": """
        x = 1
        if flip:
            x = 2  # HERE
            y = x  # READ
        else:
            x = 3
    """,
    "in the turn before": """
        x = 1
        for step in range(3):
            y = x  # READ
            x = 2
    """,
    "in this turn": """
        for step in range(3):
            x = f(step)  # HERE
            x = g(x)  # READ
    """,
    "by the loop": """
        for x in loader:  # HERE
            y = x  # READ
    """,
    "by a loop that may be empty": """
        x = 1
        for _ in range(n):
            x = 2
        y = x  # READ
    """,
    "in a try": """
        try:
            x = 1
        except ValueError:
            pass
        y = x  # READ
    """,
    "in a comprehension": """
        x = 1
        y = [x for x in z]  # READ
    """,
    "over several lines": """
        x = f(  # HERE
            1,
        )
        y = g(
            x,  # READ
        )
    """,
}


def saved(folder: Path, program: str) -> tuple[Source, int | None]:
    """A program's reading line, and the number of the assigning one."""
    lines = textwrap.dedent(program).splitlines()
    file = folder / "program.py"
    file.write_text("\n".join(lines))
    numbers = {
        mark: i for i, line in enumerate(lines, 1) for mark in ("HERE", "READ") if mark in line
    }
    read = numbers["READ"]
    return Source(str(file), read, lines[read - 1].strip()), numbers.get("HERE")


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_only_statement_that_can_have_given_a_value(program: str, tmp_path: Path) -> None:
    """It is the marked one; where none is marked, several can have, or a caller."""
    read_at, line = saved(tmp_path, program)
    found = assignment_of("x", read_at)
    assert (None if found is None else found.line) == line


def test_a_statement_over_several_lines_is_quoted_in_one(tmp_path: Path) -> None:
    """As Python itself writes it."""
    read_at, _ = saved(tmp_path, PROGRAMS["over several lines"])
    assert in_words(assignments_of("x", read_at)) == "`x` comes from program.py:2: x = f(1)"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("S", "S"),
        ("(1 - p)", "p"),
        ("p.float().clamp(min=0)", "p"),
        ("torch.exp(a)", "a"),
        ("(a + b)", ""),
        ("self.net(x)", ""),
        ("model(x)", ""),
        ("", ""),
    ],
)
def test_the_variable_of_an_operand(text: str, name: str) -> None:
    """One that operators and torch alone lie on."""
    assert variable_in(text) == name


def verdict_of(function: object, *args: Tensor) -> list[str]:
    with pytest.raises(fxguard.NonFiniteError) as caught:
        fxguard.instrument(as_module(function))(*args)  # type: ignore[arg-type]
    return str(caught.value.report).splitlines()


def test_a_report_quotes_the_line_of_the_operand() -> None:
    """Behind the line that failed, before the numbers and the fix."""

    def loss(x: Tensor) -> Tensor:
        spread = x - x.mean()
        return torch.log(spread).sum()

    lines = verdict_of(loss, torch.tensor([1.0, 3.0]))
    assert lines[2].endswith("spread = x - x.mean()")
    assert lines[2].startswith("  `spread` comes from test_assigned.py:")
    assert lines[4].startswith("  fix: ")


def test_a_report_on_an_argument_quotes_no_line() -> None:
    """The twin: fxguard does not know the caller."""

    def loss(x: Tensor) -> Tensor:
        return torch.log(x).sum()

    assert not any("comes from" in line for line in verdict_of(loss, torch.tensor([-1.0, 3.0])))


NAN = {"has_nan": True, "has_plus": False, "has_minus": False}
SUSPECTS = [
    ("a = (a - a.mean()) / (a.std() + 1e-8)", Bad(**NAN, count=1), "a.std() of a single element"),
    ("a = (a - a.mean()) / (a.std() + 1e-8)", Bad(**NAN, count=9), "look at a.std() (p.py:1): std"),
    ("a = (b.std() - 1) / 2", Bad(**NAN, count=1), "look at b.std()"),  # of any number of elements
    ("w = torch.exp(s) / torch.exp(s).sum()", Bad(**NAN, count=9), "look at torch.exp(s) (p.py:1)"),
    ("d = (x - y).sqrt()", Bad(**NAN, count=9), "look at (x - y).sqrt() (p.py:1): sqrt is NaN"),
    ("m = s / n", Bad(**NAN, count=9), "look at s / n (p.py:1): 0 / 0 is NaN"),
    ("m = (s - a.mean()) / a.std()", Bad(**NAN, count=9), "look at (s - a.mean()) / a.std() (p."),
    ("m = s / a.std()", Bad(**NAN, count=9, is_all=True), "look at a.std() (p.py:1): std of a"),
    ("m = s / (n + 1)", Bad(**NAN, count=9), ""),
    ("m = s / 8", Bad(**NAN, count=9), ""),
    ("m = s + n", Bad(**NAN, count=9), ""),
    ("t = torch.log(t)", Bad(False, False, True, 9), "look at torch.log(t) (p.py:1): log(0)"),
    ("t = torch.exp(t)", Bad(False, True, False, 9), "look at torch.exp(t) (p.py:1): exp is inf"),
    ("t = torch.exp(t)", Bad(False, False, True, 9), ""),  # it is never -inf
    ("t = f(s)\ndef f(s):\n    return s / s.sum()", Bad(**NAN, count=9), "look at s / s.sum() (p."),
    ("t = g(s)\ndef f(s):\n    return s / s.sum()", Bad(**NAN, count=9), ""),
]  # fmt: skip


@pytest.mark.parametrize(("code", "bad", "said"), SUSPECTS)
def test_what_can_have_made_a_value_is_named(
    code: str, bad: Bad, said: str, tmp_path: Path
) -> None:
    """Also in a function of the file that the statement calls, and only if it can give that."""
    file = tmp_path / "p.py"
    file.write_text(code)
    found = suspects_in(Source(str(file), 1, code.splitlines()[0]), bad)
    text = "" if found is None else found.text
    assert text.startswith(said)
    assert bool(text) == bool(said)


DIFFUSION = """
    import fxguard, torch
    from torch import nn
    class Eps(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
        def forward(self, t, x):
            return self.fc(x) * t
    model = fxguard.instrument(Eps())
    alpha = torch.tensor([0.5, -0.1])[:, None]
    noise = torch.randn(2, 4)
    noisy = alpha.sqrt() * torch.randn(2, 4) + noise
    loss = ({call} - noise).pow(2).mean()
    loss.backward()
"""


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            "model(2.0, noisy)",
            "it is made from `noisy`, which comes from train.py:13: noisy",
        ),
        (
            "model(x=noisy, t=2.0)",
            "it is made from `noisy`, which comes from train.py:13: noisy",
        ),
        ("model(2.0, noisy + noise)", ""),  # one of two
        ("model(*[2.0, noisy])", ""),
    ],
)
def test_an_argument_of_the_model_is_the_variable_of_its_caller(
    call: str, says: str, tmp_path: Path
) -> None:
    """The statement that assigned it is quoted, with what in it can be NaN."""
    (tmp_path / "train.py").write_text(textwrap.dedent(DIFFUSION.format(call=call)))
    text = run_python(tmp_path, "train.py").stderr
    lines = text[text.index("argument `x` of Eps.forward: 4 NaN") :].splitlines()
    told = [line for line in lines if "comes from train.py" in line]
    assert bool(told) == bool(says)
    if says:
        assert told[0].startswith(f"  {says}")
        assert any("fix: look at alpha.sqrt() (train.py:13): sqrt is NaN" in x for x in lines[:5])

"""A bad number that NumPy has warned of is led back to NumPy's line, with what it computed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.programs import IMPORTS

RunHere = Callable[[str], Any]

PROGRAM = (
    f"{IMPORTS}{{}}"
    "net = nn.Linear(4, 1)\nfor row in range(3):\n"
    "    x = torch.stack([torch.from_numpy(prepare(i)) for i in range(2)]).float()\n"
    "    net(x).mean().backward()\n"
)
RAN = 'fix: look at {} (script.py:{}), where NumPy warned "{}"'

TOLD = {
    "counts that wrap": (
        "a = np.array([[3, 255, 7, 0], [1, 2, 3, 4]], np.uint8)\n"
        "def prepare(i):\n    echo = a[i]\n    return np.log(echo + 1, dtype=np.float32)\n",
        RAN.format("np.log(echo + 1, dtype=np.float32)", 8, "divide by zero encountered in log")
        + ": `echo` is uint8, in which 255 + 1 is 0; convert it first, echo.astype(np.float32)",
    ),
    "a product that wraps": (
        "class Rows:\n    a = None\nrows = Rows()\nrows.a = np.array([3, 128, 7, 9], np.uint8)\n"
        "def prepare(i):\n    return np.log(rows.a * 2)\n",
        RAN.format("np.log(rows.a * 2)", 10, "divide by zero encountered in log")
        + ": `rows.a` is uint8, in which 128 * 2 is 0; convert it first",
    ),
    "an infinity of which a NaN comes": (
        "def prepare(i):\n    x = np.log(np.arange(4.0))\n    x = x - x.min()\n    return x\n",
        RAN.format("np.log(np.arange(4.0))", 6, "divide by zero encountered in log")
        + ": log(0) is -inf; of a count take log1p",
    ),
    "a channel that is constant": (
        "a = np.zeros((2, 4))\na[1] = [1, 2, 3, 4]\n"
        "def prepare(i):\n    x = a[i]\n    return (x - x.mean()) / x.std()\n",
        RAN.format("(x - x.mean()) / x.std()", 9, "invalid value encountered in divide")
        + ": 0 / 0 is NaN; choose the divisor d = x.std() by np.where(d == 0, 1, d)",
    ),
    "a root of what is negative": (
        "def prepare(i):\n    x = np.linspace(-1, 1, 4)\n    return np.sqrt(x)\n",
        RAN.format("np.sqrt(x)", 7, "invalid value encountered in sqrt")
        + ": sqrt is NaN of a negative number",
    ),
    "half precision, and a NaN of its infinity": (
        "a = {'x': np.array([3e2, 4e2, 1.0, 2.0], np.float16)}\ndef prepare(i):\n"
        "    x = a['x'] * a['x']\n    return (x - x.mean()) / x.std()\n",
        RAN.format("a['x'] * a['x']", 7, "overflow encountered in multiply")
        + ": `a['x']` is float16, whose maximum is 65504; convert it first",
    ),
    "a mean of nothing": (
        "def prepare(i):\n    x = np.ones(4)\n    return x - x[x > 2].mean()\n",
        'where NumPy warned "Mean of empty slice"',
    ),
}

TWINS = {
    "a warning of something else": (
        "print(np.float64(1) / np.float64(0))\n"
        "def prepare(i):\n    return np.array([1.0, np.nan, 2.0, 3.0]) if i else np.ones(4)\n",
        "0 / 0 is NaN",
    ),
    "an infinity, where NumPy has met a NaN": (
        "print(np.sqrt(np.float64(-1)))\n"
        "def prepare(i):\n    return np.array([1.0, np.inf, 2.0, 3.0])\n",
        "where NumPy warned",
    ),
    "what was meant": (
        "def prepare(i):\n    with np.errstate(divide='ignore'):\n"
        "        return np.log(np.arange(4.0))\n",
        "where NumPy warned",
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_the_line_of_numpy_is_named(run_here: RunHere, name: str) -> None:
    lines, told = TOLD[name]
    assert told in run_here(PROGRAM.format(lines)).err


@pytest.mark.parametrize("name", TWINS)
def test_no_other_line_is(run_here: RunHere, name: str) -> None:
    lines, other = TWINS[name]
    err = run_here(PROGRAM.format(lines)).err
    assert "fix: " in err
    assert other not in err.partition("fix: ")[2]

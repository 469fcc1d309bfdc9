"""The examples do what they are there to show."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FXGUARD_RUN = ("-m", "fxguard", "run")
BYT5 = "examples/byt5_overflow.py"
REPAIR = "examples/repair.py"
MULTIPLICATION = "hidden_states = hidden_gelu * hidden_linear"

# the arguments of Python: the exit status, and a text that is printed
EXAMPLES = {
    (BYT5,): (0, "step 2: loss nan"),
    ("examples/train.py",): (0, "step 3: loss nan"),
    (*FXGUARD_RUN, "examples/train.py"): (3, "rsqrt in 1 made inf"),
    (*FXGUARD_RUN, BYT5): (3, "Detected inf/nan during batch_number=0"),
    ("examples/compiled_training.py",): (0, "operations in 1 graph"),
    ("-m", "pytest", "-q", "examples/numerical_tests.py"): (0, "5 passed"),
    (REPAIR,): (0, "verified with model.to(torch.float16)"),
    ("examples/trace_two_batches.py",): (0, "*** Finished batch number=3 ***"),
}


ELSEWHERE = ((BYT5,), (REPAIR,))  # run by other tests of this file


@functools.cache
def run_python(*args: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def last_frame(printed: str) -> list[str]:
    """The lines of the last frame below the verdict."""
    _, _, frames = printed.partition("\n\nDetected inf/nan during batch_number=")
    assert frames
    frames, _, _ = frames.partition("\nfxguard: look at ")
    return re.split(r"^(?= {18})", frames, flags=re.MULTILINE)[-1].splitlines()


def line_of_multiplication() -> int:
    """Where the installed T5 multiplies."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name("models") / "t5" / "modeling_t5.py"
    lines = source.read_text(encoding="utf-8").splitlines()
    return 1 + next(i for i, line in enumerate(lines) if line.strip() == MULTIPLICATION)


def test_every_example_is_run_here():
    """Every script in examples/ has a row in the table above."""
    scripts = {f"examples/{file.name}" for file in (ROOT / "examples").glob("*.py")}
    assert scripts == {args[-1] for args in EXAMPLES}


@pytest.mark.parametrize(
    "args",  # without fxguard the example just ends in NaN
    [pytest.param(a, marks=pytest.mark.campaign if a in ELSEWHERE else ()) for a in EXAMPLES],
    ids=" ".join,
)
def test_an_example_ends_as_it_should(args):
    """An example ends with the exit status, and prints the text, that the table gives."""
    status, printed = EXAMPLES[args]
    done = run_python(*args)
    assert done.returncode == status, done.stdout + done.stderr
    assert printed in done.stdout + done.stderr


def test_byt5_overflow_ends_at_the_multiplication():
    """The last frame is the product that overflowed, with its line in the installed T5."""
    line = line_of_multiplication()
    done = run_python(*FXGUARD_RUN, BYT5)
    title, *rows = last_frame(done.stderr)
    assert title == (
        " " * 18 + "encoder.block.0.layer.1.DenseReluDense mul"
        f"  # modeling_t5.py:{line}: {MULTIPLICATION}"
    )
    assert [row.split()[-1] for row in rows] == ["input[0]", "input[1]", "output"]
    assert ["inf" in row for row in rows] == [False, False, True]
    # The one line of advice names the same place.
    assert f"modeling_t5.py:{line}: {MULTIPLICATION}" in done.stderr
    assert "Traceback" not in done.stderr


# On each change: `test_the_plan_of_a_stream_that_does_not_fit`.
@pytest.mark.campaign
def test_a_repaired_training_goes_on():
    """In float16 the loss was NaN in the first step."""
    done = run_python(REPAIR)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert "verified with model.to(torch.float16)" in printed
    assert printed.startswith("in float16: batch 0: mul in encoder.block.0")
    losses = printed.partition("losses in float16, repaired: ")[2].split()
    assert len(losses) == 3
    assert all(math.isfinite(float(loss)) for loss in losses)

"""Tests hold on any CPU: with other kernels, and other numbers of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fxguard
from support.same_text import same_text

ROOT = Path(fxguard.__file__).parents[1]

# What has failed on a CPU with other kernels, and what measures and judges roundings.
SAMPLE = (
    "comparison/test_elements.py::test_the_side_that_is_nearer_to_float64",
    "measure/test_eager.py",
    "measure/test_fingerprints.py",
    "repository/test_famous_nans.py::test_the_page_shows_what_is_printed",
    "trace/test_fingerprints.py",
    "verdict/test_bounds.py",
    "verdict/test_decompositions.py",
    "verdict/test_why.py",
    "verdict/test_underflow.py::test_roundings_of_float64_are_no_underflow",
    "whole/nothing_unseen/test_odd_tensors.py",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "lapack", "threads"),
    [
        pytest.param("default", "COMPATIBLE", 4, marks=pytest.mark.campaign),
        pytest.param("avx2", "AVX2", 2, marks=pytest.mark.campaign),
    ],
)
def test_a_sample_holds_with_other_kernels(capability: str, lapack: str, threads: int) -> None:
    """As on a CPU without the newer instructions.

    ``ATEN_CPU_CAPABILITY`` chooses the kernels of torch, and ``MKL_CBWR`` those of MKL, which
    decomposes matrices and multiplies them.
    """
    tests = [f"tests/{test}" for test in SAMPLE]
    chosen = ["-m", "not campaign and not slow", "-q", "-p", "no:cacheprovider", *tests]
    variables = {"ATEN_CPU_CAPABILITY": capability, "MKL_CBWR": lapack}
    env = {**os.environ, **variables, "FXGUARD_TEST_THREADS": str(threads)}
    command = [sys.executable, "-m", "pytest", *chosen]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("linear is -104232 in float64", "linear is -104226 in float64"),
        ("at [0, 3]: 6.5e+04 * 1.2 in 3 graphs", "at [0, 3]: 6.6e+04 * 1.2 in 3 graphs"),
        ("(likewise in 26 more elements); 24 +inf", "(likewise in 25 more elements); 25 +inf"),
        ("finite, error 0.001 (tried)", "finite, error 0.0009 (tried)"),
        ("nothing to measure", "nothing to measure"),
    ],
)
def test_digits_of_a_sum_may_differ(shown: str, printed: str) -> None:
    assert same_text(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("model.py:109: 2.5 of 3", "model.py:110: 2.5 of 3"),
        ("at [0, 3]: 1.5", "at [0, 4]: 1.5"),
        ("1 NaN, 25 more", "1 NaN, 26 more"),
        ("1.0e+04 is finite", "1.0e+05 is finite"),
        ("it is 1.5", "it is -1.5"),
        ("it is 1.55", "it is 1.65"),
        ("(likewise in 26 more elements); 24 +inf", "(likewise in 36 more elements); 24 +inf"),
        ("error 0.001", "error 0.002"),
        ("it is 1.5", "it is inf"),
    ],
)
def test_words_counts_and_places_may_not(shown: str, printed: str) -> None:
    assert not same_text(shown, printed)

"""Fingerprints of tensors: the numbers of their elements in order, and of nothing else."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxguard.measure.fingerprints import (
    BLOCK,
    PIECE,
    PROJECTIONS,
    fingerprint_of,
    sign,
    splitmix64,
)
from fxguard.records import Fingerprint

INF, NAN = math.inf, math.nan


def by_hand(elements: list[float], left_out: int = 0) -> tuple[float, ...]:
    """Mean, norm and projections as the words say them, exactly summed; NaN stands for a gap."""
    taken = len(elements) - left_out
    kept = [(i, x) for i, x in enumerate(elements) if not math.isnan(x)]
    signed = [math.fsum(sign(k, i) * x for i, x in kept) for k in range(PROJECTIONS)]
    norm = math.sqrt(math.fsum(x * x for _, x in kept))
    return (
        math.fsum(x for _, x in kept) / taken,
        norm,
        *(each / math.sqrt(taken) for each in signed),
    )


def numbers(found: Fingerprint) -> tuple[float, ...]:
    assert not found.note
    return found.mean, found.norm, *found.projections


def close(found: Fingerprint, expected: tuple[float, ...]) -> bool:
    """Up to the last digits of float64, next to the size of the elements."""
    pairs = zip(numbers(found), expected, strict=True)
    return all(math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12 * expected[1]) for a, b in pairs)


def test_the_generator_is_splitmix64() -> None:
    """The first numbers that Vigna's C code prints for the seed 1234567."""
    assert [splitmix64(1234567, i) for i in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_numbers_are_those_of_their_definition(elements: list[float], dtype: torch.dtype) -> None:
    assert close(fingerprint_of(torch.tensor(elements, dtype=dtype)), by_hand(elements))


@pytest.mark.parametrize(
    ("value", "elements"),
    [
        (torch.tensor([[3, -4], [2**40, 7]]), [3, -4, 2**40, 7]),
        (torch.tensor([True, False, True]), [1, 0, 1]),
        (torch.tensor([255, 1], dtype=torch.uint8), [255, 1]),
        (torch.tensor([1.5, -0.25], dtype=torch.float16), [1.5, -0.25]),
        (torch.tensor([1.5, -0.25], dtype=torch.bfloat16), [1.5, -0.25]),
        (torch.tensor([1.5, 448.0]).to(torch.float8_e4m3fn), [1.5, 448.0]),  # not a mask
        (torch.tensor([1 + 2j, 3 - 4j]), [1, 2, 3, -4]),
        (torch.tensor([1 + 2j, 3 - 4j]).conj(), [1, -2, 3, 4]),
        (torch.tensor(2.5), [2.5]),
        (
            torch.nested.nested_tensor([torch.ones(2), 2 * torch.ones(3)], layout=torch.jagged),
            [1, 1, 2, 2, 2],
        ),
    ],
)
def test_dtypes_and_layouts(value: Tensor, elements: list[float]) -> None:
    found = fingerprint_of(value)
    assert close(found, by_hand([float(x) for x in elements]))
    assert (found.count, found.left_out) == (len(elements), 0)


def test_more_than_one_block() -> None:
    """Blocks have other signs each, and elements keep theirs across the border of two."""
    x = torch.sin(torch.arange(2 * BLOCK + 7, dtype=torch.float64))
    assert close(fingerprint_of(x), by_hand(x.tolist()))
    first, second = ([sign(0, block * BLOCK + i) for i in range(200)] for block in (0, 1))
    assert first != second
    assert first != [-each for each in second]


def views(x: Tensor) -> list[Tensor]:
    """The same elements at the same indices, in other memory."""
    wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return [
        x.transpose(0, -1).contiguous().transpose(0, -1),
        wide[..., ::2],
        torch.empty_like(x).copy_(x),
        x.flip(0).flip(0),
    ]


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, PIECE // 2 + 3), (PIECE // 2 + 3, 2)])
def test_memory_does_not_matter(shape: tuple[int, ...]) -> None:
    """Strides, offsets, and whether a tensor is read in pieces."""
    x = torch.cos(torch.arange(math.prod(shape), dtype=torch.float32)).view(shape)
    expected = fingerprint_of(x)
    for view in views(x):
        assert torch.equal(view, x)
        found = fingerprint_of(view)
        assert close(found, numbers(expected))
        assert found.count == expected.count
    image = x[None, None].expand(2, 2, *shape) if len(shape) == 2 else x[None]
    channels_last = image.contiguous()
    assert close(fingerprint_of(image), numbers(fingerprint_of(channels_last)))


def test_expanded_tensors_are_not_copied_as_a_whole() -> None:
    """2 ** 42 bytes would be more than there is."""
    huge = torch.full((1, 1), 2.0).expand(3, PIECE // 2)
    found = fingerprint_of(huge)
    assert (found.mean, found.count) == (2.0, 3 * (PIECE // 2))
    assert found.norm == pytest.approx(2.0 * math.sqrt(found.count))


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    """So are elements at the limit of the dtype, which masks are made of; the others stay."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        limit = torch.finfo(dtype)
        elements = [1.0, NAN, -2.0, INF, limit.min, 0.5, -INF, limit.max]
        found = fingerprint_of(torch.tensor(elements, dtype=torch.float64).to(dtype))
        assert (found.count, found.left_out) == (8, 5)
        kept = [x if abs(x) < 4 else NAN for x in elements]
        assert close(found, by_hand(kept, 5))
    nothing = fingerprint_of(torch.tensor([NAN, INF]))
    assert (nothing.left_out, *numbers(nothing)) == (2, 0.0, 0.0, 0.0, 0.0)
    assert fingerprint_of(torch.empty(0)) == Fingerprint(0, 0, 0.0, 0.0, (0.0, 0.0))


def test_large_numbers_of_float16_are_not_taken_for_masks() -> None:
    """The norm is beyond the limit of the dtype, and no element is."""
    x = torch.full((1000,), 60000.0, dtype=torch.float16)
    found = fingerprint_of(x)
    assert found.left_out == 0
    assert found.mean == float(x[0])


@pytest.mark.parametrize(
    ("value", "note"),
    [
        (torch.ones(2, device="meta"), "meta"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.eye(3).to_sparse_csr(), "sparse"),
        ((torch.ones(2), torch.ones(2)), "not one tensor"),
        (torch.full((2,), 1e200, dtype=torch.float64), "its squares are beyond float64"),
        (torch.ones(2).to(torch.float64).expand(2), ""),
    ],
)
def test_why_there_is_none(value: object, note: str) -> None:
    assert fingerprint_of(value).note == note


def test_threads_change_the_last_bits_only() -> None:
    x = torch.sin(torch.arange(300_000, dtype=torch.float32))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(fingerprint_of(x))
    finally:
        torch.set_num_threads(before)
    assert all(close(each, numbers(found[0])) for each in found[1:])


def test_another_process_with_another_seed_has_the_same() -> None:
    """Nothing hangs on hashes of Python or on generators of torch; and none is drawn from."""
    state = torch.get_rng_state()
    x = torch.sin(torch.arange(140_000, dtype=torch.float32))
    found = fingerprint_of(x)
    assert torch.equal(torch.get_rng_state(), state)
    code = (
        "import torch; from fxguard.measure.fingerprints import fingerprint_of; "
        "torch.manual_seed(7); torch.set_num_threads(1); "
        "x = torch.sin(torch.arange(140_000, dtype=torch.float32)); "
        "f = fingerprint_of(x); print(f.mean, f.norm, *f.projections)"
    )
    text = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    mean, norm, *projections = map(float, text.split())
    assert close(found, (mean, norm, *projections))


def test_autocast_and_inference_mode_change_nothing() -> None:
    x = torch.sin(torch.arange(1000, dtype=torch.float32))
    expected = fingerprint_of(x)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert fingerprint_of(x) == expected
    with torch.device("meta"):
        assert fingerprint_of(x) == expected

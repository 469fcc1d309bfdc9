"""Run by ``test_gpu.py`` in a process of its own, in which Triton interprets kernels.

``./dev gpu`` runs it without the interpreter, on a GPU.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxguard.measure import eager, gpu, gpu_table, traceable, ways
from fxguard.passes.checks import with_checks
from fxguard.plan.reader import make_plan
from support.pretended_gpu import pretended

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPES = pytest.mark.parametrize("dtype", list(gpu.BITS), ids=str)


def numbers(pair: Any) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


@DTYPES
@pytest.mark.parametrize(
    "size", [1, 7, gpu.BLOCK - 1, gpu.BLOCK, gpu.BLOCK + 1, 2 * gpu.BLOCK, 20_000]
)
def test_no_element_is_left_out(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ends of blocks, and of the turns in which programs take them."""
    monkeypatch.setattr(gpu, "PROGRAMS", 3)
    for place in {0, 1, size // 2, size - 1} & set(range(size)):
        tensor = torch.full((size,), -2.0, dtype=dtype, device=DEVICE)
        tensor[place] = -math.inf
        assert numbers(gpu.read(tensor)) == (math.inf if size == 1 else 2.0, math.inf)
        tensor[place] = 0.5
        assert numbers(gpu.read(tensor)) == (0.5, 0.5 if size == 1 else 2.0)


@DTYPES
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_the_numbers_are_those_of_torch(dtype: torch.dtype, data: st.DataObject) -> None:
    width = {torch.float16: 16, torch.bfloat16: 32, torch.float32: 32, torch.float64: 64}[dtype]
    # Triton's interpreter makes 0 of a subnormal bfloat16 when it converts it to float32.
    exact = not (INTERPRETED and dtype is torch.bfloat16)
    drawn = st.floats(width=width, allow_nan=False, allow_subnormal=exact)
    values = data.draw(st.lists(drawn, min_size=1, max_size=40))
    tensor = torch.tensor(values, dtype=torch.float64).to(DEVICE, dtype)
    assert numbers(gpu.read(tensor)) == numbers(traceable.abs_min_max(tensor))


@DTYPES
def test_nan_is_above_all(dtype: torch.dtype) -> None:
    """The smallest magnitude is that of the others."""
    low, high = numbers(
        gpu.read(torch.tensor([math.inf, math.nan, -3.0], dtype=dtype, device=DEVICE))
    )
    assert low == 3.0
    assert math.isnan(high)


@DTYPES
def test_the_dtype_of_the_numbers(dtype: torch.dtype) -> None:
    pair = gpu.read(torch.ones(2, dtype=dtype, device=DEVICE))
    assert pair is not None
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert [number.dtype for number in pair] == [wide, wide]


VIEWS = {
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(5, -1),
    "part": lambda x: x[1:],
    "with gaps": lambda x: x[:, ::2],
    "empty": lambda x: x[:0],
    "requires grad": lambda x: x.requires_grad_(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str) -> None:
    """What is dense in any order is read; gaps, and what is empty, are left to others."""
    tensor: Tensor = VIEWS[view](torch.arange(-4.0, 8.0, device=DEVICE).view(3, 4))
    pair = gpu.read(tensor)
    if view in ("with gaps", "empty"):
        assert pair is None
    else:
        assert numbers(pair) == numbers(traceable.abs_min_max(tensor))


def test_each_result_has_a_row_of_its_own() -> None:
    """More than are prepared at once, kept until the end as a graph keeps them."""
    pairs = [
        gpu.read(torch.tensor([float(i), i + 0.5], device=DEVICE)) for i in range(3 * gpu.ROWS)
    ]
    assert [numbers(pair) for pair in pairs] == [(i, i + 0.5) for i in range(3 * gpu.ROWS)]
    kept: list[Any] = list(pairs)
    assert torch.equal(eager.collect(kept)[:, 1].cpu(), torch.arange(3 * gpu.ROWS) + 0.5)


def test_rows_may_be_read_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        pair = gpu.read(torch.ones(2, device=DEVICE))
    assert pair is not None
    assert not pair[0].is_inference()


@DTYPES
def test_it_is_tried_before_it_is_trusted(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel with another answer, or none, is not used."""
    works = gpu._works.__wrapped__
    assert works(DEVICE, dtype)
    monkeypatch.setattr(gpu, "KNOWN_RANGE", (0.25, 3.0))
    assert not works(DEVICE, dtype)

    def fails() -> Any:
        raise ImportError("planted")

    monkeypatch.setattr(gpu, "_kernel", fails)
    assert not works(DEVICE, dtype)


OF_TABLES = pytest.mark.parametrize("dtype", list(gpu_table.BITS), ids=str)


def together(tensors: list[Tensor]) -> list[tuple[float, float]]:
    """What one launch reads."""
    pieces = [gpu_table.piece_of(tensor) for tensor in tensors]
    bits = gpu_table.BITS[tensors[0].dtype]
    stream = torch.cuda.current_stream().cuda_stream if DEVICE.type == "cuda" else 0
    rows, first = gpu.rows_for(len(pieces), tensors[0].device, bits, stream)
    order = list(range(first, first + len(pieces)))[::-1]
    gpu_table.read([piece for piece in pieces if piece is not None], rows, order)
    return [tuple(row) for row in rows.numbers[order].tolist()]


def one_by_one(tensors: list[Tensor]) -> list[tuple[float, float]]:
    """What torch's operations read."""
    return [numbers(traceable.abs_min_max(tensor)) for tensor in tensors]


def many(dtype: torch.dtype) -> list[Tensor]:
    """As many as a table has places, with sizes around those of a block, and bad elements."""
    sizes = [1, 7, gpu.BLOCK, gpu.BLOCK + 1, 2 * gpu.BLOCK - 1, 9_000]
    bad = (math.inf, -1e4, math.nan, 1e-4) if dtype.is_floating_point else (0, -100, 17, 127)
    tensors = []
    for place in range(gpu_table.PLACES):
        tensor = torch.randn(sizes[place % len(sizes)], dtype=torch.float64) + 3 * place
        tensor[(0, -1, tensor.numel() // 2)[place % 3]] = bad[place % 4]
        tensors.append(tensor.to(DEVICE, torch.int64 if dtype not in gpu.BITS else dtype).to(dtype))
    return tensors


@OF_TABLES
@pytest.mark.parametrize("programs", [3, gpu.PROGRAMS])
def test_one_launch_reads_what_torch_reads(
    dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full table and a short one; sizes around those of a block; the ends of each tensor."""
    monkeypatch.setattr(gpu, "PROGRAMS", programs)
    for count in (1, 2, 5, gpu_table.PLACES):
        tensors = many(dtype)[-count:]
        # In the other elements of a NaN's tensor torch's operations see no smallest one.
        assert same_or_nan(together(tensors), one_by_one(tensors))


def same_or_nan(ours: Any, theirs: Any) -> bool:
    return all(
        one == other or (math.isnan(one[1]) and math.isnan(other[1]))
        for one, other in zip(ours, theirs, strict=True)
    )


GAPS = {
    "rows": lambda x: x[:, :5],
    "columns": lambda x: x[:, 1:2],
    "every second": lambda x: x.view(-1)[::2],
    "transposed rows": lambda x: x[:, 2:9].t(),
    "parts of three": lambda x: x.view(20, 3, 10)[:, 1],
    "heads": lambda x: x.view(4, 5, 3, 2, 5)[:, :, 0].transpose(1, 2),
    "one further": lambda x: x.view(-1)[1:],
    "expanded": lambda x: x[:, :3, None].expand(20, 3, 4),
    "one element": lambda x: x[3:4, 7:8],
}


@OF_TABLES
def test_one_launch_reads_tensors_with_gaps(dtype: torch.dtype) -> None:
    """None but the elements between the gaps, which hold what is larger and what is smaller."""
    for view in GAPS.values():
        whole = torch.full((20, 30), 120, dtype=dtype, device=DEVICE)
        whole.view(-1)[::7] = 0
        tensor = view(whole)
        written = whole[:, :3] if 0 in tensor.stride() else tensor
        written.copy_((torch.arange(written.numel(), device=DEVICE) % 90 + 3).view_as(written))
        piece = gpu_table.piece_of(tensor)
        assert piece is not None
        assert piece.has_gaps
        assert together([tensor, tensor]) == 2 * one_by_one([tensor])


def test_what_has_no_place_in_a_table() -> None:
    whole = torch.arange(1000.0, device=DEVICE).view(10, 10, 10)
    assert gpu_table.piece_of(whole[:3, :3, :3]) is None
    assert gpu_table.piece_of(whole[:0]) is None


@pytest.mark.parametrize("view", VIEWS)
def test_what_a_table_reads_of_views(view: str) -> None:
    tensor: Tensor = VIEWS[view](torch.arange(-4.0, 8.0, device=DEVICE).view(3, 4))
    if view != "empty":
        assert together([tensor]) == one_by_one([tensor])


@OF_TABLES
@pytest.mark.parametrize("has_gaps", [False, True])
def test_the_table_is_tried_before_it_is_trusted(
    dtype: torch.dtype, has_gaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = gpu_table.works.__wrapped__
    assert works(DEVICE, dtype, has_gaps)

    def reads_nothing(*table: Any) -> None:
        pass

    def fails() -> Any:
        raise ImportError("planted")

    monkeypatch.setattr(gpu_table, "_kernel", fails)
    monkeypatch.setattr(gpu_table, "_known", {})
    assert not works(DEVICE, dtype, has_gaps)
    monkeypatch.setattr(gpu_table, "read", reads_nothing)
    assert not works(DEVICE, dtype, has_gaps)


@pytest.mark.parametrize("places", [[0], [1, 0, 15, 16], list(range(gpu_table.PLACES))], ids=len)
def test_no_number_of_a_table_is_compiled_into_the_kernel(
    places: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton leaves an argument of 1 out of what the driver is given: all behind it would shift."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    given: list[Any] = []

    class Kernel:
        def __getitem__(self, programs: Any) -> Any:
            return lambda *table, **options: given.extend(table[:6])

    monkeypatch.setattr(gpu_table, "_kernel", lambda: (Kernel(), gpu_table.BITS))
    monkeypatch.setattr(gpu_table, "_known", {})
    monkeypatch.setattr(gpu_table, "known_to_the_driver", lambda *kernel: None)
    tensors = [torch.ones(1 + 16 * (place % 3), device=DEVICE) for place in places]
    pieces = [piece for each in tensors if (piece := gpu_table.piece_of(each))]
    gpu_table.read(pieces, gpu.Rows(DEVICE, torch.int32), places)
    assert len(given) == 6
    for column in given:
        types, known = native_specialize_impl(CUDABackend, column, False, False, True)
        assert set(types) <= {"i32", "i64"}
        assert set(known) == {""}


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the tests of devices run whole models")
def test_a_graph_whose_values_wait_has_the_same_numbers() -> None:
    """Written in place, in three dtypes, of odd sizes, spoilt: by one launch and one by one."""

    def function(x: Tensor) -> Any:
        hidden = (x * 2).mul_(3)
        half, double = hidden.half() + 1, hidden.double() / 7
        return half, double / 0, x[1:, :5] * 4, (-hidden).sqrt(), hidden.t() * 1

    def backend(graph: Any, _: Any) -> Any:
        plan = make_plan(graph)

        def measured(*args: Any) -> Any:
            for together in (False, True):
                with pretended(interpreted=True, together=together) as launches:
                    checked = with_checks(graph, plan, ways.WAYS["eager"])
                    checked(*args)
                    launches.clear()  # with those in which each kernel was tried
                    *_, found = checked(*args)
                    statistics.append((found, len(launches)))
            return graph(*args)

        return measured

    statistics: list[tuple[Tensor, int]] = []
    torch.compile(function, backend=backend)(torch.arange(77.0).view(7, 11))
    (wanted, most), (found, few) = statistics
    assert wanted.numpy().tobytes() == found.numpy().tobytes()
    assert (most, few) == (12, 6)

"""One tensor to its range, against number formats decoded by ``struct`` and plain Python loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxguard import guard_of, instrument
from fxguard.measure import traceable
from fxguard.measure.details import describe
from fxguard.measure.traceable import abs_min_max, collect, decode, numbers
from fxguard.records import Range
from fxguard.types import Report
from support.exact_ranges import (
    FORMATS,
    VIEWS,
    WIDE_ENOUGH_FOR_TORCH,
    Format,
    exact,
    expected,
    floats,
    often,
    read,
    shapes,
)

pytestmark = [  # torch's own, where it first meets what is tested here
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:Sparse CSR"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

seldom = settings(deadline=None, max_examples=25)  # where each example is traced


INTEGERS = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)


def measured(*tensors: Any) -> Tensor:
    return collect([abs_min_max(tensor) for tensor in tensors])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: str(form.dtype))
def test_the_oracle_reads_bits_as_torch_does(form: Format) -> None:
    """The decoders and torch agree on every edge of every format."""
    ours = [form.decode(pattern) for pattern in form.edges]
    torchs = form.tensor(form.edges).to(torch.float64).tolist()
    assert [value.hex() for value in ours] == [value.hex() for value in torchs]


# The range of one tensor.


@often
@given(floats())
def test_range_is_that_of_a_plain_loop(case: tuple[Tensor, np.ndarray]) -> None:
    """abs min and abs max are exact for every float dtype, shape and stride; NaN wins."""
    tensor, values = case
    assert read(measured(tensor)) == [exact(expected(values))]


@pytest.mark.parametrize("form", WIDE_ENOUGH_FOR_TORCH, ids=lambda form: str(form.dtype))
def test_range_reaches_the_ends_of_finfo(form: Format) -> None:
    """The largest and the smallest numbers of a dtype stay finite and are no zeros."""
    info = torch.finfo(form.dtype)
    ends = torch.tensor([info.min, info.smallest_normal], dtype=form.dtype)
    assert read(measured(ends)) == [exact(Range(info.smallest_normal, info.max))]
    (beyond,) = read(measured(torch.cat([ends, ends[:1] * 2])))
    assert beyond == exact(Range(info.smallest_normal, math.inf))


@often
@given(st.sampled_from(INTEGERS), shapes, st.sampled_from(VIEWS), st.data())
def test_integers_are_measured_as_float32(dtype: Any, shape: Any, view: Any, data: Any) -> None:
    """Integers of every width, the most negative one included, are rounded to float32."""
    info, size = torch.iinfo(dtype), math.prod(shape)
    item = st.one_of(st.sampled_from([info.min, 0, info.max]), st.integers(info.min, info.max))
    items = data.draw(st.lists(item, min_size=size, max_size=size))
    array = np.array(items, dtype=str(dtype).removeprefix("torch.")).reshape(shape)
    tensor = torch.from_numpy(array.copy())
    values = np.abs(array.astype(np.float32)).astype(np.float64)
    assert read(measured(view(tensor))) == [exact(expected(view(values)))]
    assert describe(view(tensor)).first_index is None


@often
@given(st.lists(st.booleans(), max_size=5))
def test_booleans_count_as_zero_and_one(items: list[bool]) -> None:
    """False is 0 and True is 1."""
    tensor = torch.tensor(items, dtype=torch.bool)
    assert read(measured(tensor)) == [exact(expected(np.array(items, dtype=np.float64)))]


@often
@given(
    st.sampled_from([torch.complex32, torch.complex64, torch.complex128]),
    st.lists(st.tuples(st.integers(-100, 100), st.integers(-100, 100)), min_size=1, max_size=6),
)
def test_complex_numbers_have_their_modulus(dtype: Any, parts: list[tuple[int, int]]) -> None:
    """The range of complex numbers is that of their absolute values."""
    items = [complex(*pair) for pair in parts]
    number = decode(*measured(torch.tensor(items).to(dtype)).tolist()[0])
    assert isinstance(number, Range)
    tolerance = 1e-3 if dtype == torch.complex32 else 1e-6
    assert math.isclose(number.abs_min, min(map(abs, items)), rel_tol=tolerance)
    assert math.isclose(number.abs_max, max(map(abs, items)), rel_tol=tolerance)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("item", [complex(0, math.inf), complex(-math.inf, 1)])
def test_complex_infinities_are_infinite(dtype: Any, item: complex) -> None:
    """An infinite part makes the modulus infinite; without it the modulus is finite."""
    low, high = measured(torch.tensor([1, item], dtype=dtype)).tolist()[0]
    assert (low, high) == (1, math.inf)
    assert measured(torch.tensor([1, 2], dtype=dtype)).tolist() == [[1, 2]]


def test_complex_nan_is_nan() -> None:
    """A NaN part beside a finite one makes both numbers NaN."""
    assert read(measured(torch.tensor([complex(1, math.nan), 2]))) == [
        exact(Range(math.nan, math.nan))
    ]


def test_complex_nan_beside_infinity_is_nan() -> None:
    """Both numbers are NaN when any element is NaN, as torch.isnan understands it."""
    tensor = torch.tensor([complex(math.inf, math.nan)])
    assert torch.isnan(tensor).all()
    assert read(measured(tensor)) == [exact(Range(math.nan, math.nan))]


def test_finite_complex_numbers_are_finite() -> None:
    """What torch.isfinite calls finite has a finite range."""
    tensor = torch.tensor([complex(3e38, 3e38)])
    assert torch.isfinite(tensor).all()
    assert math.isfinite(float(abs_min_max(tensor)[1]))


def test_largest_finite_complex_number_is_finite() -> None:
    """The largest finite magnitude is finite."""
    assert math.isfinite(describe(torch.tensor([complex(3e38, 3e38)])).largest_finite or 0.0)


@often
@given(floats())
def test_numbers_are_the_elements_without_gradient(case: tuple[Tensor, np.ndarray]) -> None:
    """`numbers` has the elements of the tensor, in a dtype that holds them all."""
    tensor, values = case
    dense = numbers(tensor)
    assert dense.shape == values.shape
    assert [x.hex() for x in dense.double().flatten().tolist()] == [
        x.hex() for x in values.ravel().tolist()
    ]


def test_measuring_leaves_autograd_alone() -> None:
    """A range has no gradient, and measuring changes no gradient."""
    weight = torch.tensor([1.0, -2.0], requires_grad=True)
    product = weight * 3
    low, high = abs_min_max(product)
    assert not low.requires_grad
    assert not high.requires_grad
    product.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3]


# What is no dense tensor of numbers.


NONZERO = torch.tensor([[0.0, -3.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.5]])
LAYOUTS = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_tensors_show_their_stored_elements(layout: str) -> None:
    """Of a sparse tensor the stored elements are measured; one NaN among them shows."""
    assert read(measured(LAYOUTS[layout](NONZERO))) == [exact(Range(0.5, 3.0))]
    bad = NONZERO.clone()
    bad[1, 3] = math.nan
    assert read(measured(LAYOUTS[layout](bad))) == [exact(Range(math.nan, math.nan))]
    assert describe(LAYOUTS[layout](bad)).nan_count == 1


COMPLEX_LAYOUTS = {
    **LAYOUTS,
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "in Python"])
@pytest.mark.parametrize("layout", COMPLEX_LAYOUTS)
def test_complex_sparse_tensors_are_measured(layout: str, capture: bool) -> None:
    """A model that is given one runs as without fxguard, and a NaN in it is found."""

    class Negative(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -x

    if not capture:
        Negative.forward = torch.compiler.disable(Negative.forward)
    model = instrument(Negative(), on_detect=(reports := []).append)
    for value in (3.0, math.nan):
        dense = (NONZERO + 1j * NONZERO).clone()
        dense[0, 1] = value
        made = model(COMPLEX_LAYOUTS[layout](dense)).to_dense()
        torch.testing.assert_close(made, -dense, rtol=0, atol=0, equal_nan=True)
        frame = guard_of(model).frames()[0]
        largest = dense.to_sparse().values().abs().max().item()
        assert frame.rows[-1].abs_max == pytest.approx(largest, nan_ok=True)
    assert len(reports) == 1
    assert reports[0].origins[0].nan_count == 1


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "in Python"])
def test_what_cannot_be_measured_is_counted(capture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement that raises, of a tensor that knows few operations, ends no healthy model."""

    def fails(dense: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no abs here")

    class Exp(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(x) * torch.ones(2, 2, dtype=torch.complex64)

    if not capture:
        Exp.forward = torch.compiler.disable(Exp.forward)
    monkeypatch.setattr(traceable, "magnitudes", fails)
    model = instrument(Exp())
    assert torch.equal(model(torch.zeros(2, 2)), torch.ones(2, 2, dtype=torch.complex64))
    assert "that made what cannot be measured" in guard_of(model).coverage()
    assert [row.note for row in guard_of(model).frames()[-1].rows][-1] == "not measured"


@pytest.mark.parametrize("layout", ["to_sparse_bsr", "to_sparse_bsc"])
def test_block_sparse_tensors_show_their_blocks(layout: str) -> None:
    """Of a block-sparse tensor the stored blocks are measured, their zeros included."""
    assert read(measured(getattr(NONZERO, layout)((2, 2)))) == [exact(Range(0.0, 3.0))]
    bad = NONZERO.clone()
    bad[1, 2] = -math.inf  # beside stored elements of its block
    assert read(measured(getattr(bad, layout)((2, 2)))) == [exact(Range(0.0, math.inf))]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_show_all_their_parts(layout: torch.layout) -> None:
    """The range of a nested tensor is that of its parts together."""
    parts = [torch.tensor([1.0, -2.0]), torch.tensor([0.5]), torch.tensor([4.0, 3.0, 1.0])]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    assert read(measured(nested)) == [exact(Range(0.5, 4.0))]
    parts[1] = torch.tensor([-math.inf])
    nested = torch.nested.nested_tensor(parts, layout=layout)
    assert read(measured(nested)) == [exact(Range(1.0, math.inf))]
    assert describe(nested).neginf_count == 1


def test_holes_of_a_jagged_tensor_do_not_count() -> None:
    """What stands between the parts of a narrowed jagged tensor is no element of it."""
    padded = torch.tensor([[1.0, math.nan], [2.0, 3.0]])
    starts, lengths = torch.tensor([0, 0]), torch.tensor([1, 2])
    nested = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    assert [part.tolist() for part in nested.unbind()] == [[1.0], [2.0, 3.0]]
    assert read(measured(nested)) == [exact(Range(1.0, 3.0))]


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_show_what_they_stand_for() -> None:
    """A quantized element q stands for (q - zero_point) * scale."""
    floating = torch.tensor([[-3.0, 0.5], [7.5, 1.0]])
    whole = torch.quantize_per_tensor(floating, 0.5, 2, torch.qint8)
    values = (whole.int_repr().numpy().astype(np.float64) - 2) * 0.5
    assert read(measured(whole)) == [exact(expected(values))] == [exact(Range(0.5, 7.5))]
    scales, zeros = torch.tensor([0.5, 0.25]), torch.tensor([0, 0])
    rows = torch.quantize_per_channel(floating, scales, zeros, 0, torch.qint8)
    values = rows.int_repr().numpy() * np.array([[0.5], [0.25]])
    assert read(measured(rows)) == [exact(expected(values))]


def test_meta_tensors_have_no_numbers() -> None:
    """A meta tensor is not measured; the same tensor with data is."""
    assert read(measured(torch.ones(2, device="meta"))) == ["not measured"]
    assert read(measured(torch.ones(2))) == [exact(Range(1.0, 1.0))]


@pytest.mark.parametrize("value", [None, 3, "text", [], (), {}])
def test_other_objects_are_not_tensors(value: Any) -> None:
    """What is no tensor says so in place of a number."""
    assert read(measured(value)) == ["not a tensor"]


@seldom
@given(st.lists(floats(WIDE_ENOUGH_FOR_TORCH), min_size=1, max_size=3))
def test_lists_of_tensors_have_one_range(cases: list[tuple[Tensor, np.ndarray]]) -> None:
    """The range of a list is that of all its elements together."""
    elements = np.concatenate([values.ravel() for _, values in cases])
    assert read(measured([tensor for tensor, _ in cases])) == [exact(expected(elements))]


def test_lists_with_a_meta_tensor_keep_the_range_of_the_others() -> None:
    """A magnitude is never negative."""
    number = decode(*measured((torch.ones(2, device="meta"), torch.ones(2))).tolist()[0])
    assert isinstance(number, str) or number.abs_min >= 0


def test_lists_in_lists_count() -> None:
    """The range of nested lists is that of all their elements together."""
    nested = [torch.ones(2), [torch.full((1,), 5.0)]]
    assert read(measured(nested)) == [exact(Range(1.0, 5.0))]


# Many results in one tensor.


@often
@given(st.lists(floats(), max_size=5))
def test_collecting_changes_no_number(cases: list[tuple[Tensor, np.ndarray]]) -> None:
    """Each row of the collected numbers is exact, whatever dtypes stand beside it."""
    statistics = measured(*[tensor for tensor, _ in cases])
    assert statistics.shape == (len(cases), 2)
    wide = any(t.dtype == torch.float64 and t.numel() for t, _ in cases)
    assert statistics.dtype == (torch.float64 if wide else torch.float32)
    assert read(statistics) == [exact(expected(values)) for _, values in cases]


def test_double_precision_does_not_overflow() -> None:
    """A float64 beyond the range of float32 stays finite, also beside float16."""
    huge = torch.tensor([1e300, -1e-300], dtype=torch.float64)
    assert huge.float().isinf().any()
    rows = measured(huge, torch.ones(1, dtype=torch.float16)).tolist()
    assert rows == [[1e-300, 1e300], [1.0, 1.0]]
    assert measured(huge * 1e300).tolist()[0][1] == math.inf


@often
@given(st.floats(min_value=0), st.floats(min_value=0) | st.just(math.nan))
def test_decoding_gives_the_numbers_back(low: float, high: float) -> None:
    """Every pair of magnitudes is a Range, no magnitude is mistaken for a mark, and NaN is both."""
    assert exact(decode(low, high)) == exact(Range(high if math.isnan(high) else low, high))


# The same numbers from a traced graph.


@seldom
@given(floats())
def test_traced_form_agrees(case: tuple[Tensor, np.ndarray]) -> None:
    """A graph that was traced with zeros gives the exact range of other numbers."""
    tensor, values = case
    traced = make_fx(measured)(torch.zeros_like(tensor))
    assert read(traced(tensor)) == [exact(expected(values))]


def compiled_cases() -> dict[str, Tensor]:
    cases = {str(form.dtype): form.tensor(form.edges) for form in FORMATS}
    clean = [0x3C, 0x01, 0x00, 0x3A]
    cases |= {f"clean {form.dtype}": form.tensor(clean) for form in FORMATS}
    cases |= {str(dtype): torch.tensor([3, 0, 7]).to(dtype) for dtype in INTEGERS}
    return cases | {
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([3 + 4j, 1j]),
        "empty": torch.empty(2, 0),
        "no dimension": torch.tensor(-2.5),
        "transposed": torch.tensor([[1.0, 2.0], [3.0, -4.0]]).T,
        "expanded": torch.tensor([1.5]).expand(4),
        "gradient": torch.tensor([1.0, -2.0], requires_grad=True),
    }


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_form_agrees(backend: str) -> None:
    """One compiled graph gives every range that eager execution gives, to the bit."""
    cases = compiled_cases()
    compiled = torch.compile(measured, backend=backend, fullgraph=True)
    rows = read(compiled(*cases.values()))
    alone = [read(measured(tensor))[0] for tensor in cases.values()]
    assert dict(zip(cases, rows, strict=True)) == dict(zip(cases, alone, strict=True))


ANY_NUMBER = [[], [0.5, 2.0], [2.0, math.inf], [math.nan, 1.0]]


def padded(items: list[float]) -> Tensor:
    """Five elements, of which those that are not negative are the items."""
    return torch.tensor([*items, *[-1.0] * (5 - len(items))])


@pytest.mark.parametrize("items", ANY_NUMBER)
def test_sizes_known_only_at_run_time(items: list[float]) -> None:
    """A graph that takes any number of elements measures none, some, and bad ones."""
    traced = make_fx(lambda x: measured(x[~(x <= 0)]), tracing_mode="symbolic")(padded([1.0]))
    assert read(traced(padded(items))) == [exact(expected(np.array(items)))]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_sizes_known_only_at_run_time_under_a_compiler(backend: str) -> None:
    """Compiled with one graph for any number of elements, the rows are those of a plain loop."""

    class Positive(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[~(x <= 0)].relu()

    seen: list[Report] = []
    model = instrument(Positive(), on_detect=seen.append)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for items in ANY_NUMBER:
            assert compiled(padded(items)).tolist() == pytest.approx(items, nan_ok=True)
            (frame,) = (f for f in guard_of(model).frames() if f.kind == "relu")
            number = expected(np.array(items))
            if isinstance(number, str):
                assert frame.rows[-1].note == number
            else:
                pair = Range(frame.rows[-1].abs_min, frame.rows[-1].abs_max)
                assert exact(pair) == exact(number)
    assert [report.origins[0].problem for report in seen] == ["inf", "nan"]


# What a bad tensor holds.

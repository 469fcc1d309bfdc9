"""The two manual helpers, against those of transformers and against the shape of their rows."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.debug_utils as original
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxguard
from fxguard import detect_overflow, get_abs_min_max

pytestmark = [  # torch's own, where it first meets what is tested here
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:Sparse CSR"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.*quantize"),
]

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def printed(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """What a call returns and what it prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        result = function(*args)
    return result, text.getvalue()


# Differential: floating-point numbers, with which the original can deal.


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.floats() | st.floats(-10, 10), min_size=1, max_size=8),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_helpers_agree_with_the_original(items: list[float], dtype: Any, column: bool) -> None:
    """Result, printed text and row are those of transformers for every float tensor."""
    tensor = torch.tensor(items, dtype=torch.float64).to(dtype)
    if column:
        tensor = tensor.reshape(-1, 1)
    ours, theirs = (
        printed(detect_overflow, tensor, "x"),
        printed(original.detect_overflow, tensor, "x"),
    )
    assert ours == theirs
    assert get_abs_min_max(tensor, "x[0]") == original.get_abs_min_max(tensor, "x[0]")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([1.0, -2.0, 0.0], ""),
        ([1.0, math.inf], "here has infs\n"),
        ([1.0, -math.inf], "here has infs\n"),
        ([math.nan, 1.0], "here has nans\n"),
        ([math.nan, 1.0, -math.inf], "here has nans\nhere has infs\n"),
    ],
)
def test_detection_says_what_it_found(dtype: Any, items: list[float], text: str) -> None:
    """nan, inf, both and neither give two, one or no lines, the same as the original's."""
    tensor = torch.tensor(items, dtype=dtype)
    assert printed(detect_overflow, tensor, "here") == (bool(text), text)
    assert printed(original.detect_overflow, tensor, "here") == (bool(text), text)


# What the original cannot take, and what it can.

ROWS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "bool": (lambda: torch.tensor([True, False]), "0.00e+00 1.00e+00 x"),
    "uint8": (lambda: torch.tensor([3, 250], dtype=torch.uint8), "3.00e+00 2.50e+02 x"),
    "int8": (lambda: torch.tensor([-128, 1], dtype=torch.int8), "1.00e+00 1.28e+02 x"),
    "int64": (lambda: torch.tensor([-(2**63), 7]), "7.00e+00 9.22e+18 x"),
    "uint64": (lambda: torch.tensor([2**63, 7], dtype=torch.uint64), "7.00e+00 9.22e+18 x"),
    "e4m3fn": (lambda: torch.tensor([-448.0, 0.5]).to(torch.float8_e4m3fn), "5.00e-01 4.48e+02 x"),
    "e5m2": (lambda: torch.tensor([57344.0, 0.0]).to(torch.float8_e5m2), "0.00e+00 5.73e+04 x"),
    "complex64": (lambda: torch.tensor([3 + 4j, 1j]), "1.00e+00 5.00e+00 x"),
    "complex32": (lambda: torch.tensor([3 + 4j]).to(torch.complex32), "5.00e+00 5.00e+00 x"),
    "empty": (lambda: torch.empty(0, 3), "            empty x"),
    "empty int": (lambda: torch.empty(0, dtype=torch.int64), "            empty x"),
    "empty bool": (lambda: torch.empty(2, 0, dtype=torch.bool), "            empty x"),
    "no dimension": (lambda: torch.tensor(-2.5), "2.50e+00 2.50e+00 x"),
    "meta": (lambda: torch.ones(2, device="meta"), "             meta x"),
    "meta int": (lambda: torch.ones(2, dtype=torch.int64, device="meta"), "             meta x"),
    "coo": (lambda: torch.tensor([[0.0, -3.0], [0.5, 0.0]]).to_sparse(), "5.00e-01 3.00e+00 x"),
    "csr": (lambda: torch.tensor([[0.0, -3.0], [0.5, 0.0]]).to_sparse_csr(), "5.00e-01 3.00e+00 x"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.tensor([4.0])]),
        "1.00e+00 4.00e+00 x",
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor(
            [torch.ones(2), torch.tensor([4.0])], layout=torch.jagged
        ),
        "1.00e+00 4.00e+00 x",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.tensor([1.0, -2.0]), 0.5, 0, torch.qint8),
        "1.00e+00 2.00e+00 x",
    ),
    "mkldnn": (lambda: torch.tensor([[2.0, 1.0]]).to_mkldnn(), "1.00e+00 2.00e+00 x"),
    "weight": (lambda: nn.Parameter(torch.tensor([1.0, -3.0])), "1.00e+00 3.00e+00 x"),
    "inference": (lambda: torch.inference_mode()(torch.ones)(2), "1.00e+00 1.00e+00 x"),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_dtype_and_layout_has_a_row(name: str) -> None:
    """Any tensor gives a row of two numbers, or the reason why there are none."""
    make, row = ROWS[name]
    assert get_abs_min_max(make(), "x") == row


@pytest.mark.parametrize("name", ROWS)
def test_every_dtype_and_layout_can_be_clean(name: str) -> None:
    """A tensor without inf and NaN prints nothing and gives False, whatever it is made of."""
    assert printed(detect_overflow, ROWS[name][0](), "x") == (False, "")


BAD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "e4m3fn": (lambda: torch.tensor([math.nan]).to(torch.float8_e4m3fn), "nans"),
    "e5m2": (lambda: torch.tensor([math.inf]).to(torch.float8_e5m2), "infs"),
    "e5m2fnuz": (lambda: torch.tensor([math.nan]).to(torch.float8_e5m2fnuz), "nans"),
    "complex64": (lambda: torch.tensor([complex(1, math.nan)]), "nans"),
    "complex128": (lambda: torch.tensor([complex(0, -math.inf)], dtype=torch.complex128), "infs"),
    "no dimension": (lambda: torch.tensor(-math.inf), "infs"),
    "coo": (lambda: torch.tensor([[0.0, math.nan]]).to_sparse(), "nans"),
    "csr": (lambda: torch.tensor([[0.0, math.inf]]).to_sparse_csr(), "infs"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.tensor([math.inf])], layout=torch.jagged),
        "infs",
    ),
    "weight": (lambda: nn.Parameter(torch.tensor([1.0, math.nan])), "nans"),
}


@pytest.mark.parametrize("name", BAD)
def test_every_dtype_and_layout_can_be_bad(name: str) -> None:
    """inf and NaN are found in each dtype and layout that can hold them."""
    make, what = BAD[name]
    assert printed(detect_overflow, make(), "x") == (True, f"x has {what}\n")
    assert ("nan" if what == "nans" else "inf") in get_abs_min_max(make(), "x")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("bool", NotImplementedError, "not implemented for 'Bool'"),
        ("empty", RuntimeError, "Expected reduction dim"),
        ("meta", TypeError, "unsupported format string"),
        ("e4m3fn", NotImplementedError, "not implemented for 'Float8_e4m3fn'"),
    ],
)
def test_original_cannot_take_these(name: str, error: type[Exception], message: str) -> None:
    """The rows above go beyond the original: there these are exceptions."""
    with pytest.raises(error, match=message):
        original.get_abs_min_max(ROWS[name][0](), "x")


@pytest.mark.parametrize("dtype", ["float4_e2m1fn_x2", "bits8", "uint4", "int4", "quint4x2"])
def test_opaque_dtypes_have_a_row(dtype: str) -> None:
    """A dtype without arithmetic gives a row without numbers, not an exception."""
    tensor = torch.empty(4, dtype=getattr(torch, dtype))
    assert get_abs_min_max(tensor, "x").endswith(" x")
    assert printed(detect_overflow, tensor, "x") == (False, "")


@pytest.mark.parametrize("helper", [detect_overflow, get_abs_min_max])
@pytest.mark.parametrize("value", [None, 1.0, "text", [torch.ones(1)], torch.float16])
def test_what_is_no_tensor_is_refused(helper: Any, value: Any) -> None:
    """Anything but a tensor is a TypeError that names the helper and the type."""
    with pytest.raises(
        TypeError, match=rf"^{helper.__name__} needs .* got {type(value).__name__}$"
    ):
        helper(value, "x")


def test_helpers_change_nothing() -> None:
    """The tensor, its gradient and the random state are what they were."""
    weight = torch.tensor([1.0, math.inf], requires_grad=True)
    version, state = weight._version, torch.get_rng_state()
    printed(detect_overflow, weight, "x")
    get_abs_min_max(weight, "x")
    assert weight._version == version
    assert weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


# Inside the forward of an instrumented model.


class Labelled(nn.Module):
    """Names two of its values by hand, as the guide of transformers shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(4)
        self.answers: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer_norm(x)
        self.answers.append(detect_overflow(hidden, "after layer_norm"))
        flat = (hidden * 2).view(-1)
        self.answers.append(detect_overflow(flat, "doubled"))
        return torch.log(flat + 1)


CLEAN = torch.tensor([[1.0, 1.0, 1.0, 1.0]])  # layer norm makes zeros of it
OVERFLOWING = torch.tensor([[1.0, 1.0, 1.0, math.nan]])


def labels(model: nn.Module) -> dict[str, str]:
    """Kind of each frame to the label of its last row."""
    return {frame.kind: frame.rows[-1].label for frame in fxguard.guard_of(model).frames()}


EXPECTED = {
    "LayerNorm": "output (after layer_norm)",
    "mul": "output (doubled)",
    "add": "output",
    "log": "output",
    "Labelled": "output",
}


def test_label_names_the_row_of_an_eager_model(capsys: Any) -> None:
    """The row of the value shows the label; nothing is printed and the answer is False."""
    model = fxguard.instrument(Labelled())
    assert model(CLEAN).tolist() == [0.0] * 4
    assert model.answers == [False, False]
    assert labels(model) == EXPECTED
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_label_names_the_row_of_a_compiled_model(backend: str, capsys: Any) -> None:
    """Under torch.compile with fullgraph=True it does the same and breaks no graph."""
    model = fxguard.instrument(Labelled())
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert compiled(CLEAN).tolist() == [0.0] * 4
    assert model.answers == [False, False]
    assert labels(model) == EXPECTED
    assert "in 1 graph" in fxguard.guard_of(model).coverage()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("compiled", [False, True])
def test_label_stands_in_the_report(compiled: bool, capsys: Any) -> None:
    """The verdict comes with the batch, and its rows carry the labels."""
    model = fxguard.instrument(Labelled())
    call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with pytest.raises(fxguard.NonFiniteError) as raised:
        call(OVERFLOWING)
    assert model.answers == [False, False]
    out = capsys.readouterr().err
    assert out.strip() == str(raised.value.report).strip()
    assert "has nans" not in out
    assert "     nan      nan output (after layer_norm)" in out.splitlines()


class Broken(nn.Module):
    """Names a value outside every graph, and one that is made after the break."""

    @torch.compiler.disable
    def outside(self, x: Tensor) -> Tensor:
        y = x.exp()
        assert detect_overflow(y, "outside every graph") is False
        return y

    def forward(self, x: Tensor) -> Tensor:
        y = self.outside(x + 1).sin()
        assert detect_overflow(y, "after the break") is False
        return y


def test_label_names_values_outside_a_graph_and_after_it(capsys: Any) -> None:
    """Where a graph breaks the labels stand at their rows all the same."""
    model = fxguard.instrument(Broken())
    model(torch.zeros(2))
    assert labels(model)["exp"] == "output (outside every graph)"
    assert labels(model)["sin"] == "output (after the break)"
    assert labels(model)["add"] == "output"
    assert capsys.readouterr().out == ""


def test_helper_speaks_again_once_the_guard_is_gone(capsys: Any) -> None:
    """After remove the helper prints and answers, as in any model."""
    model = fxguard.remove(fxguard.instrument(Labelled()))
    model(OVERFLOWING)
    assert model.answers == [True, True]
    assert capsys.readouterr().out == "after layer_norm has nans\ndoubled has nans\n"


def test_helper_does_nothing_under_a_compiler_without_fxguard(capsys: Any) -> None:
    """In a compiled function that nobody guards it breaks no graph and prints nothing."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def double(x: Tensor) -> Tensor:
        assert not detect_overflow(x, "x")
        return x * 2

    assert double(torch.tensor([1.0, math.inf])).tolist() == [2.0, math.inf]
    assert capsys.readouterr().out == ""


class Printing(nn.Module):
    """Prints the range of a value by hand."""

    def forward(self, x: Tensor) -> Tensor:
        print(get_abs_min_max(x + 1, "x + 1"))
        return x * 2


def test_row_can_be_printed_inside_a_guarded_forward(capsys: Any) -> None:
    """The row that is made inside an instrumented forward is the one made outside."""
    model = fxguard.instrument(Printing())
    assert model(torch.tensor([1.0, -3.0])).tolist() == [2.0, -6.0]
    assert capsys.readouterr().out == "2.00e+00 2.00e+00 x + 1\n"


def test_helpers_own_arithmetic_is_no_operation_of_the_model() -> None:
    """Frames are the user's operations only, whatever the helper does."""
    model = fxguard.instrument(Printing())
    printed(model, torch.tensor([1.0, -3.0]))
    assert set(labels(model)) == {"add", "mul", "Printing"}

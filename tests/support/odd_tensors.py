"""Tensors that are not dense float32 ones, in functions: a healthy input and a faulty one of each.

Each case is one function inside a submodule. It runs three ways: left to Python by TorchDynamo, so
that the observer sees it, captured and run eagerly, and captured and run by AOTAutograd. A healthy
input gives the bits of the plain model and no report; a faulty one gives its bits too, and a report
that blames the right operation.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from support import subclasses
from support.needs import TORCH
from support.subclasses import (
    Quantized,
    QuantizedByFunction,
    Tagged,
    Wrapper,
    replaced_inside,
    tagged_given,
    tagged_inside,
    wrapper_given,
    wrapper_inside,
)
from support.ways import AOT, EAGER, PYTHON, assert_same_bits, prepared, the_way

QUIET = [  # torch's own, where it first meets what is tested here
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.*quantize"),
    pytest.mark.filterwarnings("ignore:Using `torch.compile"),
]


SMALL = torch.tensor([[1.0, 2.0, 3.0, -4.0], [0.5, 0.0, 1.0, 2.0], [3.0, 2.0, 1.0, 0.5]])
POSITIVE = SMALL.abs() + 1
REAL = SMALL * torch.tensor([1.0, 0.0, 1.0, 0.0])  # as complex numbers: no sum of infinities


class Odd(nn.Module):
    """One function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Model(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.odd = inner() if isinstance(inner, type) else Odd(inner)

    def forward(self, *args: Any) -> Any:
        return self.odd(*args)


# Dtypes.


def float8_e5m2(x: Tensor) -> Tensor:
    return x.to(torch.float8_e5m2).float() * 2


def float8_e4m3fn_bits(x: Tensor) -> Tensor:
    return x.to(torch.uint8).view(torch.float8_e4m3fn).float() * 2


def float8_e4m3fnuz(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fnuz).float() * 2


def float8_e5m2fnuz(x: Tensor) -> Tensor:
    return x.to(torch.float8_e5m2fnuz).float() * 2


def float8_returned(x: Tensor) -> Tensor:
    return x.to(torch.float8_e5m2)


def float16_product(x: Tensor) -> Tensor:
    half = x.half()
    return half * half


def bfloat16_product(x: Tensor) -> Tensor:
    return x.bfloat16() * 1e30


def float64_beyond_float32(x: Tensor) -> Tensor:
    return torch.exp(x.double()) * 1e200


def float64_to_float32(x: Tensor) -> Tensor:
    wide = x.double() * x.double()
    return wide.float()


def complex64_fft(x: Tensor) -> Tensor:
    spectrum = torch.fft.fft(x)
    scaled = spectrum * 1e20
    return torch.fft.ifft(scaled).real


def complex64_square(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.view(-1, 2))
    return torch.view_as_real(pairs.square())


def complex64_near_the_top(x: Tensor) -> Tensor:
    return torch.view_as_complex(x) * 2.0


def complex32_cast(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.view(-1, 2))
    return torch.view_as_real(pairs.to(torch.complex32))


def bits_of_float32_as_float16(x: Tensor) -> Tensor:
    return x.view(torch.float16) * 1.0


def from_bits(*patterns: int) -> Tensor:
    return torch.tensor(patterns, dtype=torch.int32).view(torch.float32)


# Layouts.


def coo_product(x: Tensor) -> Tensor:
    return torch.sparse.mm(x.to_sparse(), x.T)


def coo_elementwise(x: Tensor) -> Tensor:
    return (x.to_sparse() * 1e30).to_dense()


def coo_returned(x: Tensor) -> Tensor:
    return x.to_sparse() * 1e30


def csr_product(x: Tensor) -> Tensor:
    return torch.sparse.mm(x.to_sparse_csr(), x.T)


def csr_elementwise(x: Tensor) -> Tensor:
    return (x.to_sparse_csr() * 1e30).to_dense()


def jagged_made_inside(x: Tensor) -> Tensor:
    parts = [x[0, :1], x[1], x[2, :2]]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    return (nested * 1e30).values()


def jagged_given(x: Tensor) -> Tensor:
    return torch.exp(x) * 2


def jagged(scale: float) -> Tensor:
    parts = [SMALL[0, :1] * scale, SMALL[1] * scale, SMALL[2, :2] * scale]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def quantized_inside(x: Tensor) -> Tensor:
    whole = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    return torch.log(whole.dequantize())


def quantized_and_moved(x: Tensor) -> Tensor:
    whole = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    return torch.log(whole.reshape(-1).dequantize())


def quantized_given(x: Tensor) -> Tensor:
    return torch.log(x.dequantize())


def quantized(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


# Sizes.


def elementwise(x: Tensor) -> Tensor:
    return torch.exp(x * 2)


def mean_of_all(x: Tensor) -> Tensor:
    return x.mean() * 2


def chosen_by_nonzero(x: Tensor) -> Tensor:
    chosen = x[torch.nonzero(x > 0, as_tuple=True)]
    return torch.exp(chosen)


def chosen_by_mask(x: Tensor) -> Tensor:
    chosen = x[x > 0]
    return torch.exp(chosen) * 2


class Experts(nn.Module):
    """Tokens choose among three experts; nobody chooses the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        route = (x[:, 0] > 0.75).long()
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = route == index
            result[chosen] = torch.exp(expert(x[chosen]))
        return result


# Devices.


def beside_meta(x: Tensor) -> Tensor:
    shape = torch.empty(3, 4, device="meta") * 2
    return torch.exp(x) * shape.shape[0]


def meta_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.empty(3, 4, device="meta") * 2
    return torch.exp(x), shape.sum(dim=0)


# The table.

NO_TENSOR_SUBCLASS_HERE = "AOTAutograd takes no input with a __torch_function__ of its own"


@dataclass(frozen=True)
class Case:
    function: Any
    clean: Any
    faulty: Any
    what: str | dict[str, str]  # the operation to blame; by way where torch itself differs
    problem: str = "inf"
    refused: dict[str, str] = field(default_factory=dict)  # ways that torch has not, and why
    name: str = "odd"

    def blamed(self, way: str) -> str:
        return self.what if isinstance(self.what, str) else self.what[way]


CASES = [
    Case(float8_e5m2, SMALL, SMALL * 1e5, "to"),
    Case(float8_e4m3fn_bits, SMALL.abs(), torch.full((3, 4), 127.0), "view", "nan"),
    Case(float8_e4m3fnuz, SMALL, SMALL * 1e5, "to", "nan"),
    Case(float8_e5m2fnuz, SMALL, SMALL * 1e5, "to", "nan"),
    Case(float8_returned, SMALL, SMALL * 1e5, "to"),
    Case(float16_product, SMALL, SMALL * 300, "mul"),
    Case(bfloat16_product, SMALL, SMALL * 1e10, "mul"),
    Case(float64_beyond_float32, SMALL, SMALL * 1e3, "exp"),
    Case(float64_to_float32, SMALL, SMALL * 1e30, "float"),
    Case(complex64_fft, SMALL, SMALL * 1e20, "mul"),
    Case(complex64_square, SMALL, REAL * 1e20, "square"),
    Case(complex64_near_the_top, torch.full((3, 2), 1.6e38), torch.full((3, 2), 3e38), "mul"),
    Case(complex32_cast, SMALL, SMALL * 1e5, "to"),
    Case(
        bits_of_float32_as_float16,
        from_bits(0x3C003C00, 0x40004000),
        from_bits(0x3C007C01, 0x40004000),  # finite as float32, a NaN as float16
        "view",
        "nan",
    ),
    Case(coo_product, SMALL, SMALL.abs() * 1e20, "_sparse_mm"),
    Case(coo_elementwise, SMALL, SMALL * 1e20, "mul"),
    Case(coo_returned, SMALL, SMALL * 1e20, "mul"),
    Case(csr_product, SMALL, SMALL.abs() * 1e20, "_sparse_mm"),
    Case(csr_elementwise, SMALL, SMALL * 1e20, "mul"),
    Case(jagged_made_inside, SMALL, SMALL * 1e20, "mul"),
    Case(jagged_given, jagged(1), jagged(100), "exp"),
    Case(quantized_inside, POSITIVE, SMALL * 0, "log"),
    Case(quantized_and_moved, POSITIVE, SMALL * 0, "log"),
    Case(quantized_given, quantized(POSITIVE), quantized(SMALL * 0), "log"),
    Case(elementwise, SMALL[:0], SMALL * 100, "exp"),
    Case(mean_of_all, SMALL, SMALL[:0], "mean", "nan"),
    Case(chosen_by_nonzero, SMALL, SMALL * 100, "exp"),
    Case(chosen_by_mask, SMALL, SMALL * 100, "exp"),
    Case(Experts, SMALL, SMALL * 1e5, "exp"),
    Case(beside_meta, SMALL, SMALL * 100, "exp"),
    Case(meta_returned, SMALL, SMALL * 100, "exp"),
    Case(
        tagged_given,
        SMALL.as_subclass(Tagged),
        (SMALL * 100).as_subclass(Tagged),
        "exp",
        refused={AOT: NO_TENSOR_SUBCLASS_HERE} if TORCH < (2, 15) else {},
    ),
    Case(tagged_inside, SMALL, SMALL * 100, "exp"),
    Case(
        replaced_inside,
        SMALL,
        SMALL * 100,
        {PYTHON: "exp", EAGER: "expm1", AOT: "expm1"},  # a graph has what was put in its place
    ),
    Case(wrapper_given, Wrapper(SMALL), Wrapper(SMALL * 100), "exp"),
    Case(wrapper_inside, SMALL, SMALL * 100, "exp"),
    Case(Quantized, SMALL, SMALL * 1e3, "exp"),
    Case(QuantizedByFunction, SMALL, SMALL * 1e3, "exp"),
]
BY_NAME = {case.function.__name__: case for case in CASES}


def check(case: Case, way: str) -> fxguard.types.Report:
    """Both twins of one case; the report of the faulty one."""
    with the_way(way):
        plain = prepared(Model(case.function), way)
        expected = [plain(case.clean), plain(case.faulty)]
        torch._dynamo.reset()
        reports: list[fxguard.types.Report] = []
        model = fxguard.instrument(Model(case.function), on_detect=reports.append)
        guarded = prepared(model, way)
        assert_same_bits(guarded(case.clean), expected[0])
        assert not reports, f"false alarm: {reports[0].message}"
        assert_same_bits(guarded(case.faulty), expected[1])
    assert [report.batch_number for report in reports] == [1], "not reported"
    (report,) = reports
    origin = report.origins[0]
    assert (origin.what, origin.problem) == (case.blamed(way), case.problem), origin.message
    assert origin.frame.name.split(".")[0] == "odd"
    assert origin.frame.source is not None
    assert origin.frame.source.file in (inspect.getfile(case.function), subclasses.__file__)
    return report

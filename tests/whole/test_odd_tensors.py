"""Tensors that are not dense float32 ones: unharmed when healthy, blamed where they turn bad.

Each case is one function inside a submodule. It runs three ways: left to Python by TorchDynamo, so
that the observer sees it, captured and run eagerly, and captured and run by AOTAutograd. A healthy
input gives the bits of the plain model and no report; a faulty one gives its bits too, and a report
that blames the right operation. Every protection is taken away once, to show that the check fails.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

import fxguard
from fxguard.measure import eager, traceable
from support.needs import TORCH
from support.ways import AOT, EAGER, PYTHON, WAYS, assert_same_bits, prepared, the_way

pytestmark = [  # torch's own, where it first meets what is tested here
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.*quantize"),
    pytest.mark.filterwarnings("ignore:Using `torch.compile"),
]

SMALL = torch.tensor([[1.0, 2.0, 3.0, -4.0], [0.5, 0.0, 1.0, 2.0], [3.0, 2.0, 1.0, 0.5]])
POSITIVE = SMALL.abs() + 1


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


# Subclasses.


class Tagged(Tensor):
    """A user's subclass that watches torch functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Replacing(Tensor):
    """A user's subclass that replaces one function by another."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = torch.expm1 if func is torch.exp else func
        return super().__torch_function__(replaced, types, args, kwargs or {})


class Wrapper(Tensor):
    """A wrapper subclass: what it computes is done by the tensor inside."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # torch writes its logs with it
        return f"Wrapper({self.inner})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, meta: Any, size: Any, stride: Any) -> Wrapper:
        return Wrapper(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inside = pytree.tree_map_only(Wrapper, lambda t: t.inner, (args, kwargs))
        result = pytree.tree_map_only(Tensor, Wrapper, func(*inside[0], **inside[1]))
        return return_and_correct_aliasing(func, args, kwargs, result)


aten = torch.ops.aten


class Int8(Tensor):
    """A quantized weight as torchao has it: it knows a handful of operations and no others."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Int8:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, whole.size(), dtype=scale.dtype, device=whole.device
        )

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __repr__(self) -> str:
        return f"Int8({tuple(self.whole.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, meta: Any, size: Any, stride: Any) -> Int8:
        return cls(tensors["whole"], tensors["scale"])

    @classmethod
    def of(cls, weight: Tensor) -> Int8:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def floating(self) -> Tensor:
        return self.whole.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight = args[0]
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return cls(func(weight.whole), func(weight.scale))
        if func is aten.t.default:
            return weight.floating().t()
        raise NotImplementedError(f"{func}")


class Int8Function(Int8):
    """The same, but it takes ``linear`` as a torch function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = args
            return nn.functional.linear(x, weight.floating(), bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.t.default:
            raise NotImplementedError("linear was not taken as a function")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Quantized(nn.Module):
    """A linear layer with such a weight."""

    kind: type[Int8] = Int8

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3).requires_grad_(False)
        self.linear.weight = nn.Parameter(self.kind.of(self.linear.weight), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.linear(x))


class QuantizedByFunction(Quantized):
    kind = Int8Function


def tagged_given(x: Tensor) -> Tensor:
    return torch.exp(x * 2)


def tagged_inside(x: Tensor) -> Tensor:
    return torch.exp(x.as_subclass(Tagged) * 2).as_subclass(Tensor)


def replaced_inside(x: Tensor) -> Tensor:
    return torch.exp(x.as_subclass(Replacing) * 2).as_subclass(Tensor)


def wrapper_given(x: Tensor) -> Tensor:
    return torch.exp(x * 2)


def wrapper_inside(x: Tensor) -> Tensor:
    return torch.exp(Wrapper(x) * 2).inner


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
    Case(complex64_square, SMALL, SMALL * 1e20, "square"),
    Case(complex64_near_the_top, torch.full((3, 2), 1.6e38), torch.full((3, 2), 3e38), "mul"),
    Case(complex32_cast, SMALL, SMALL * 1e5, "to"),
    Case(
        bits_of_float32_as_float16,
        from_bits(0x3C003C00, 0x40004000),
        from_bits(0x3C007C01, 0x40004000),  # finite as float32, a NaN as float16
        "view",
        "nan",
    ),
    Case(coo_product, SMALL, SMALL * 1e20, "_sparse_mm"),
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


# The check.


def check(case: Case, way: str) -> fxguard.Report:
    """Both twins of one case; the report of the faulty one."""
    with the_way(way):
        plain = prepared(Model(case.function), way)
        expected = [plain(case.clean), plain(case.faulty)]
        torch._dynamo.reset()
        reports: list[fxguard.Report] = []
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
    assert Path(origin.frame.source.file).name == Path(__file__).name
    return report


RUNS = [
    pytest.param(case, way, id=f"{name}-{way}")
    for name, case in BY_NAME.items()
    for way in WAYS
    if way not in case.refused
]
REFUSED = [
    pytest.param(case, way, id=f"{name}-{way}")
    for name, case in BY_NAME.items()
    for way in case.refused
]


@pytest.mark.parametrize(("case", "way"), RUNS)
def test_odd_tensors_are_checked_like_others(case: Case, way: str) -> None:
    """The bits are those of the plain model; what turned bad is blamed, counted and located."""
    origin = check(case, way).origins[0]
    if case.function is not QuantizedByFunction:  # its graph is not run again
        assert origin.numel is not None
        assert origin.nan_count + origin.posinf_count + origin.neginf_count > 0
    if not isinstance(case.function, type) and case.function not in (
        *(tagged_given, tagged_inside, replaced_inside),  # the subclass's own line is the last one
    ):
        lines, first = inspect.getsourcelines(case.function)
        assert first < origin.frame.source.line < first + len(lines)


@pytest.mark.parametrize(("case", "way"), REFUSED)
def test_what_torch_refuses_is_refused_without_fxguard(case: Case, way: str) -> None:
    """The table's gaps are torch's own: the plain model fails in the same way."""
    with the_way(way), pytest.raises(TypeError, match="Multiple dispatch failed"):
        prepared(Model(case.function), way)(case.clean)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("way", [EAGER, AOT])
@pytest.mark.parametrize("name", ["chosen_by_nonzero", "chosen_by_mask", "Experts"])
def test_sizes_known_only_at_run_time(name: str, way: str, capture: bool) -> None:
    """Captured in one graph or left between two, tensors of any number of elements are checked."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=capture):
        check(BY_NAME[name], way)


@pytest.mark.parametrize("way", WAYS)
def test_an_expert_without_tokens_is_no_fault(way: str) -> None:
    """Nobody chose the last expert: its rows are empty, and its frames say so."""
    with the_way(way):
        model = fxguard.instrument(Model(Experts))
        prepared(model, way)(SMALL)
    unused = [f for f in fxguard.guard_of(model).frames() if f.name == "odd.experts.2"]
    assert [(row.label, row.note) for row in unused[-1].rows[2:]] == [
        ("input[0]", "empty"),
        ("output", "empty"),
    ]


def wrapping(x: Tensor) -> Tensor:
    whole = x.to(torch.int32) * 2**30 * 4
    return whole.float() / x


def quantized_returned(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(torch.log(x), 0.1, 0, torch.qint8)


def cast_to_e4m3fn(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float() * 2


@pytest.mark.parametrize("way", WAYS)
def test_integers_that_wrap_around_are_no_report(way: str) -> None:
    """Integer overflow is silent in torch and out of scope; a float made of it is checked."""
    assert wrapping(POSITIVE).eq(0).all()  # 2**32 and its multiples
    check(Case(wrapping, POSITIVE, SMALL, "div", "nan"), way)


@pytest.mark.parametrize("way", WAYS)
def test_what_quantizing_swallows_is_a_note(way: str) -> None:
    """Integers hold no infinity: one that was quantized reaches no output, and is not reported."""
    with the_way(way):
        model = fxguard.instrument(Model(quantized_returned))
        guarded = prepared(model, way)
        for x, notes in ((POSITIVE, []), (POSITIVE * 0, ["log"])):
            assert_same_bits(guarded(x), quantized_returned(x))
            assert [note.what for note in fxguard.guard_of(model).notes] == notes


@pytest.mark.parametrize("way", WAYS)
def test_what_a_cast_to_e4m3fn_makes_is_what_counts(way: str) -> None:
    """Versions of torch differ in whether this cast saturates: there is a report where it does not.

    The dtype has no infinity; a NaN that comes to it stays one, and keeps its cause.
    """
    large = SMALL * 1e5
    with the_way(way):
        reports: list[fxguard.Report] = []
        model = fxguard.instrument(Model(cast_to_e4m3fn), on_detect=reports.append)
        guarded = prepared(model, way)
        for x in (SMALL, large, torch.log(-POSITIVE)):
            assert_same_bits(guarded(x), cast_to_e4m3fn(x))
    *overflow, given = [report.origins[0].what for report in reports]
    assert overflow == (["to"] if cast_to_e4m3fn(large).isnan().any() else [])
    assert given.startswith(("argument `", "input["))


# Inputs that are bad themselves.


def doubled(x: Tensor) -> Tensor:
    return x * 2


def increased(x: Tensor) -> Tensor:
    return x + 1


def widened(x: Tensor) -> Tensor:
    return x.float() * 2


def dense_doubled(x: Tensor) -> Tensor:
    return x.to_dense() * 2


PLUS = SMALL.clone()
PLUS[0, 0] = math.inf
MINUS = SMALL.clone()
MINUS[0, 0] = -math.inf

BAD_INPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "float8_e5m2": (lambda x: x.to(torch.float8_e5m2), widened),
    "float64": (Tensor.double, doubled),
    "complex64": (lambda x: x.to(torch.complex64), increased),
    "coo": (Tensor.to_sparse, dense_doubled),
    "csr": (Tensor.to_sparse_csr, dense_doubled),
    "jagged": (
        lambda x: torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged),
        doubled,
    ),
    "function subclass": (lambda x: x.as_subclass(Tagged), doubled),
    "wrapper": (Wrapper, doubled),
}


@pytest.mark.parametrize("way", [PYTHON, EAGER])
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_an_odd_input_that_is_bad_is_blamed_itself(name: str, way: str) -> None:
    """An infinite input is the cause; one with -inf alone is a mask, and no report."""
    make, function = BAD_INPUTS[name]
    reports: list[fxguard.Report] = []
    with the_way(way):
        model = fxguard.instrument(Model(function), on_detect=reports.append)
        for x in (SMALL, MINUS, PLUS):
            assert_same_bits(model(make(x)), function(make(x)))
    assert [report.batch_number for report in reports] == [2]
    assert reports[0].origins[0].what.startswith(("argument `", "input["))
    assert reports[0].origins[0].posinf_count == 1


# DTensor.


@pytest.fixture(params=["gloo", "fake"])
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One rank that computes; or the first of two, whose communication is counted, not done."""
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("torch was built without distributed")
    if request.param == "gloo":
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
    finally:
        distributed.destroy_process_group()


class Sharded(nn.Module):
    """A linear layer whose rows are spread over the ranks, and what only the whole of it knows."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        from torch.distributed.tensor import DTensor, Shard

        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        for name, parameter in list(self.linear.named_parameters()):
            # Not `distribute_tensor`: in torch 2.11 a fake process group scatters nothing.
            own = parameter.detach().chunk(mesh.size())[mesh.get_rank()]
            spread = DTensor.from_local(own, mesh, [Shard(0)])
            self.linear.register_parameter(name, nn.Parameter(spread))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.exp(self.linear(x))
        return hidden.sum(dim=-1)


def replicated(x: Tensor, mesh: Any) -> Tensor:
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(x, mesh, [Replicate()])


def collectives(model: Callable[..., Any], x: Tensor) -> dict[str, int]:
    """How often each was called, in a forward that nothing has to be captured for."""
    from torch.distributed.tensor.debug import CommDebugMode

    model(x)
    with CommDebugMode() as communication:
        model(x)
    return {str(name): count for name, count in communication.get_comm_counts().items()}


@pytest.mark.parametrize("way", WAYS)
def test_checks_communicate_nothing(way: str, mesh: Any) -> None:
    """A healthy forward has the collectives of the plain model: each rank looks at its shard."""
    x = replicated(SMALL, mesh)
    with the_way(way):
        expected = collectives(prepared(Sharded(mesh), way), x)
        torch._dynamo.reset()
        model = fxguard.instrument(Sharded(mesh))
        assert collectives(prepared(model, way), x) == expected


@pytest.mark.parametrize("way", WAYS)
def test_a_dtensor_is_checked_where_it_is(way: str, mesh: Any) -> None:
    """The shard of this rank has the bits of the plain model, and a fault in it is blamed."""
    inputs = [replicated(x, mesh) for x in (SMALL, SMALL * 1e3)]
    with the_way(way):
        plain = prepared(Sharded(mesh), way)
        expected = [plain(x).to_local() for x in inputs]
        torch._dynamo.reset()
        reports: list[fxguard.Report] = []
        model = fxguard.instrument(Sharded(mesh), on_detect=reports.append)
        guarded = prepared(model, way)
        for x, shard in zip(inputs, expected, strict=True):
            assert_same_bits(guarded(x).to_local(), shard)
    assert [report.batch_number for report in reports] == [1]
    assert reports[0].origins[0].what == "exp"
    assert reports[0].rank == 0


# Every protection taken away once.


def not_measured(value: Any) -> Any:
    return traceable.mark(traceable.NO_DATA, torch.device("cpu"))


def as_float32(pairs: Any, collect: Any = traceable.collect) -> Tensor:
    return collect(pairs).float()


def by_modulus_alone(dense: Tensor) -> Tensor:
    return dense.abs()


def as_it_is(value: Tensor) -> Tensor:
    return value.detach()


def with_data(value: Tensor) -> bool:
    return True


MISSED = (AssertionError, "not reported")
PROTECTIONS = [  # where it stands, what is put in its place, a case that then fails, and how
    (traceable, "CONVERTED", {}, "float8_e5m2", (AssertionError, "^float in odd made inf")),
    (traceable, "CONVERTED", {}, "float8_returned", MISSED),
    (traceable, "CONVERTED", {}, "float8_e4m3fnuz", (AssertionError, "^float in odd made NaN")),
    (
        traceable,
        "CONVERTED",
        {},
        "complex32_cast",
        (AssertionError, "^view_as_real in odd made inf"),
    ),
    (traceable, "COMPLEX", (), "complex64_fft", (AssertionError, "^getattr in odd made NaN")),
    (
        traceable,
        "COMPLEX",
        (),
        "complex64_square",
        (AssertionError, "^view_as_real in odd made inf"),
    ),
    (traceable, "FLOATS", (), "float16_product", MISSED),
    (traceable, "FLOATS", (), "bfloat16_product", MISSED),
    (traceable, "FLOATS", (), "float64_to_float32", MISSED),
    (
        traceable,
        "collect",
        as_float32,
        "float64_beyond_float32",
        (AssertionError, "^false alarm: "),
    ),
    (
        traceable,
        "magnitudes",
        by_modulus_alone,
        "complex64_near_the_top",
        (AssertionError, "^false alarm: "),
    ),
    (traceable, "numbers", as_it_is, "coo_elementwise", (AssertionError, "^to_dense in odd")),
    (traceable, "numbers", as_it_is, "csr_elementwise", (AssertionError, "^to_dense in odd")),
    (traceable, "numbers", as_it_is, "jagged_given", MISSED),
    *(
        (place, "abs_min_max", not_measured, case, MISSED)
        for place in (traceable, eager)
        for case in ("elementwise", "jagged_made_inside", "chosen_by_mask")
    ),
]


@pytest.mark.parametrize(
    ("place", "name", "instead", "case", "failure"),
    [pytest.param(*row, id=f"{row[0].__name__[8:]}.{row[1]}-{row[3]}") for row in PROTECTIONS],
)
def test_without_its_protection_the_check_fails(
    place: Any,
    name: str,
    instead: Any,
    case: str,
    failure: tuple[type[Exception], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each line of the table above is what its case is a test of, and fails as it says."""
    monkeypatch.setattr(place, name, instead)
    way = EAGER if place is eager else PYTHON if name == "numbers" else AOT
    with pytest.raises(failure[0], match=failure[1]):
        check(BY_NAME[case], way)


@pytest.mark.parametrize("name", ["chosen_by_nonzero", "chosen_by_mask"])
def test_without_sizes_of_run_time_being_told_apart_the_check_fails(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether such a tensor is empty is no question to ask while it is traced."""
    monkeypatch.setattr(traceable, "_known_only_at_run_time", lambda size: False)
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Could not guard on data"),
    ):
        check(BY_NAME[name], AOT)

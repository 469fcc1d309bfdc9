"""One reading of an operation, for graphs and for Python between them.

Each case of the table runs captured and left to Python. What fxguard measured is compared with an
oracle that knows no table: it looks at what every call returned, and which of its arguments hold
something else afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_methods_invocations import op_db

import fxguard
from fxguard.batch.assemble import assemble
from fxguard.graph.operations import is_move, name_of, read_call
from fxguard.graph.tables import MOVES, NOT_OPERATIONS, SELECTS
from support import zoo

BIG = 1e30  # its square overflows


@torch.library.custom_op("fxguard_tests::scale", mutates_args={"x"})
def scale(x: Tensor, factor: float) -> None:
    x.mul_(factor)


@torch.library.custom_op("fxguard_tests::accumulate", mutates_args={"total"})
def accumulate(x: Tensor, total: Tensor) -> Tensor:
    total.add_(x * x)
    return x + 1


@accumulate.register_fake
def _(x: Tensor, total: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxguard_tests::half", mutates_args=())
def half(x: Tensor) -> Tensor:
    return x / (x - x)


@half.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxguard_tests::softmax", mutates_args=())
def softmax(x: Tensor) -> Tensor:
    return x * float("nan")


@softmax.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Model(nn.Module):
    """Runs a function of itself and its inputs."""

    def __init__(self, function: Callable[..., Any], *, captured: bool) -> None:
        super().__init__()
        self.register_buffer("scratch", torch.zeros(3))
        self.register_buffer("other", torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)
        self.instance_norm = nn.InstanceNorm1d(3, track_running_stats=True)
        self.function = function if captured else torch.compiler.disable(function)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


@dataclass(frozen=True)
class Case:
    function: Callable[..., Any]
    blamed: str  # the operation that overflows where the input is large
    healthy: Tensor = field(default_factory=lambda: torch.tensor([0.5, 1.0, 2.0]))
    # A large input, of which a part is small: what is read from elsewhere shows.
    faulty: Tensor = field(default_factory=lambda: torch.tensor([0.5, 1.0, BIG]))
    blamed_next: str = ""  # in the batch after that, where what it left is read again


def out_of_two(model: Model, x: Tensor) -> Tensor:
    low, high = torch.zeros(()), torch.zeros(())
    torch.aminmax(x * x, out=(low, high))
    return low + high


def by_keyword(model: Model, x: Tensor) -> Tensor:
    y = torch.mul(other=x, input=x)
    return torch.add(input=y, other=y) + torch.as_tensor(data=[1.0, 2.0, 3.0])


def as_another_dtype(model: Model, x: Tensor) -> Tensor:
    y = torch.square(x)
    mask = (x[:1] > 0).expand_as(y)
    small = torch.ones(1, dtype=torch.float64).expand_as(y).type_as(x)
    return torch.where(mask, y, small.view_as(x))


def in_place_by_position(model: Model, x: Tensor) -> Tensor:
    y = x * 1
    nn.functional.hardtanh(y, -1e25, 1e25, True)
    nn.functional.relu(y, True)
    nn.functional.dropout(y, 0.5, False, True)
    nn.functional.leaky_relu(y, 0.1, True)
    return y * y


def custom(model: Model, x: Tensor) -> Tensor:
    y = x + 1
    scale(y, 2.0)
    torch.ops.fxguard_tests.scale(y, 2.0)
    torch.ops.fxguard_tests.scale.default(y, BIG)
    return y * 0.5


def custom_with_result(model: Model, x: Tensor) -> Tensor:
    total = torch.zeros(3)
    y = torch.ops.fxguard_tests.accumulate(x, total)
    return y.clamp(max=1) + total


def running_statistics(model: Model, x: Tensor) -> Any:
    y = model.norm(x)
    return y.sum(), model.norm.running_mean * 1, model.norm.running_var * 1


def running_statistics_of_instances(model: Model, x: Tensor) -> Any:
    y, norm = model.instance_norm(x), model.instance_norm
    return y.sum(), norm.running_mean * 1, norm.running_var * 1


def renormalised(model: Model, x: Tensor) -> Tensor:
    table = x.clone()
    first = nn.functional.embedding(torch.tensor([0, 1]), table, None, 1.0)
    return first.sum() + (table * table).sum()


def lists(model: Model, x: Tensor) -> Tensor:
    y, z = x * 1, x * 2
    torch._foreach_mul_([y, z], BIG)
    return y + z


def overwritten(model: Model, x: Tensor) -> Tensor:
    model.scratch[:] = x * x
    model.other.copy_(model.scratch)
    return model.scratch + model.other


MATRIX = torch.tensor([[0.5, 1.0, 2.0], [2.0, -1.0, 0.0]])
INSTANCES = torch.arange(12.0).view(2, 3, 2)

CASES = {
    "keyword only": Case(by_keyword, "mul"),
    "out": Case(lambda m, x: torch.mul(x, x, out=m.scratch) * 0 + m.scratch, "mul"),
    "out of two": Case(out_of_two, "mul"),
    "as another dtype": Case(as_another_dtype, "square"),
    "read as another dtype": Case(
        lambda m, x: (x * 1).view(torch.float16) * 1,
        "view",
        torch.ones(2),
        torch.tensor([0x3F807C00, 0], dtype=torch.int32).view(torch.float32),  # 1.003
    ),
    "in place by position": Case(in_place_by_position, "mul"),
    "in place": Case(lambda m, x: (x * 1).mul_(x).sub_(1).clamp_(min=0), "mul_"),
    "custom": Case(custom, "scale"),
    "custom with a result": Case(custom_with_result, "accumulate"),
    "batch norm": Case(
        running_statistics, "batch_norm", MATRIX, MATRIX * BIG, "buffer norm.running_var"
    ),
    "instance norm": Case(
        running_statistics_of_instances,
        "instance_norm",
        INSTANCES,
        INSTANCES * BIG,
        "buffer instance_norm.running_var",
    ),
    "renormalised": Case(renormalised, "mul", torch.ones(3, 2), torch.ones(3, 2) * BIG),
    "lists": Case(lists, "_foreach_mul_", faulty=torch.full((3,), BIG)),
    "overwritten": Case(overwritten, "mul"),
}


class Oracle(TorchFunctionMode):
    """Notes what every call returned and changed, by looking at all of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [x for x in zoo.tensors_in((args, kwargs or {})) if x.is_floating_point()]
        before = [x.detach().clone() for x in operands]
        result = func(*args, **(kwargs or {}))
        name = name_of(func)
        if name in NOT_OPERATIONS or name in SELECTS:
            return result
        returned = [x for x in zoo.tensors_in(result) if x.is_floating_point()]
        moved = name in MOVES | {"type_as"} and returned and returned[0].dtype == args[0].dtype
        changed = [
            x
            for x, old in zip(operands, before, strict=True)
            if not same_bits(x, old) and not any(x is y for y in returned)
        ]
        for x in [] if moved else [*returned, *changed]:
            self.seen.append((normal(name), numbers_of(x)))
        return result


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a, nan=0.125), torch.nan_to_num(b, nan=0.125))


def normal(name: str) -> str:
    """Python, TorchDynamo and operators call some operations by different names."""
    name = name.partition(".")[0]
    return {"iadd": "add", "isub": "sub", "imul": "mul"}.get(name, name)


def numbers_of(x: Tensor) -> str:
    magnitude = x.detach().double().abs()
    return f"{magnitude.min():.2e} {magnitude.max():.2e}"


def measured_by(model: nn.Module) -> list[tuple[str, str]]:
    """Operation and numbers of everything that was made or written, parts and joins aside."""
    flow = assemble(fxguard.guard_of(model).recorder.last_batch)
    found = []
    for step in flow.steps:
        for value in () if step.kind in SELECTS else step.outputs:
            stat = flow.ranges[value]
            text = stat if isinstance(stat, str) else f"{stat.abs_min:.2e} {stat.abs_max:.2e}"
            found.append((normal(step.kind), text))
    return found


@pytest.fixture(params=[True, False], ids=["captured", "in Python"])
def captured(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_what_is_made_and_written_is_measured(name: str, captured: bool) -> None:
    """Every result and every changed argument has the numbers that the oracle saw, in order."""
    case = CASES[name]
    torch.manual_seed(0)
    plain = Model(case.function, captured=captured)
    with Oracle() as oracle:
        expected = plain(case.healthy.clone())
    torch.manual_seed(0)
    model = Model(case.function, captured=captured)
    fxguard.instrument(model, on_detect=(reports := []).append)
    torch.testing.assert_close(model(case.healthy.clone()), expected, rtol=0, atol=0)
    assert not reports
    assert ("0 graphs" in fxguard.guard_of(model).coverage()) != captured
    assert sorted(measured_by(model)) == sorted(oracle.seen)


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_an_overflow_is_blamed_on_what_made_it(name: str, captured: bool) -> None:
    """Twice in a row, with the memory that the first batch has left full of infinities."""
    case = CASES[name]
    model = Model(case.function, captured=captured)
    fxguard.instrument(model, on_detect=(reports := []).append)
    for _ in range(2):
        model(case.faulty.clone())
    assert [report.origins[0].what for report in reports] == [
        case.blamed,
        case.blamed_next or case.blamed,
    ]
    model.load_state_dict(Model(case.function, captured=captured).state_dict())
    model(case.healthy.clone())
    assert len(reports) == 2


def operators(model: Model, x: Tensor) -> Tensor:
    x = 1 / (x / 2) // 0.1 % 3
    x -= 1
    x += 1
    x *= 2
    x /= 2
    x **= 2
    x = 1 + x - 2 * x
    x = 2 ** (1 - x) @ torch.eye(3)
    return 7 // abs(-x) + 1 % x


def test_operators_have_one_name() -> None:
    """Graphs and calls of tensors name Python's operators differently; reports do not."""
    named = []
    for captured in (True, False):
        model = fxguard.instrument(Model(operators, captured=captured))
        model(torch.full((3,), 0.5))
        named.append([frame.kind for frame in fxguard.guard_of(model).frames()])
    assert named[0] == named[1]
    assert set(named[0]) == {
        *("div", "floor_divide", "remainder", "sub_", "add_", "mul_", "div_", "pow_"),
        *("add", "sub", "mul", "pow", "matmul", "eye", "neg", "abs", "Model"),
    }


def test_what_out_held_is_no_row(captured: bool) -> None:
    """The frame shows what was multiplied, and what was made; the whole row of ``out=`` is new."""
    model = Model(CASES["out"].function, captured=captured)
    fxguard.instrument(model)
    model.scratch.fill_(7e7)
    model(torch.ones(3))
    frame = fxguard.guard_of(model).frames()[0]
    assert frame.kind == "mul"
    assert [(row.label, row.abs_max) for row in frame.rows] == [
        *[("input[0]", 1.0), ("input[1]", 1.0), ("output", 1.0)],
    ]


def test_what_was_written_by_position_is_what_is_read(captured: bool) -> None:
    """``hardtanh(y, low, high, True)`` leaves smaller numbers to the product behind it."""

    def written(model: Model, x: Tensor) -> Tensor:
        y = x * 1
        nn.functional.hardtanh(y, -1.0, 1.0, True)
        return y * y

    model = fxguard.instrument(Model(written, captured=captured))
    model(torch.full((3,), 3.0))
    *_, product, _ = fxguard.guard_of(model).frames()
    assert product.kind == "mul"
    assert {row.label: row.abs_max for row in product.rows}["input[0]"] == 1.0


def test_what_a_custom_operation_writes_has_a_row(captured: bool) -> None:
    """Named as the parameter is, next to what the operation returned."""
    model = Model(custom_with_result, captured=captured)
    fxguard.instrument(model)
    model(torch.full((3,), 3.0))
    frames = {frame.kind: frame for frame in fxguard.guard_of(model).frames()}
    rows = {row.label: row.abs_max for row in frames["accumulate"].rows}
    assert rows == {"input[0]": 3.0, "input[1]": 0.0, "output": 4.0, "output[total]": 9.0}


def test_a_custom_operation_of_a_name_of_torch_is_none_of_torch(captured: bool) -> None:
    """Somebody's own ``half`` casts nothing, and no row of somebody's ``softmax`` is masked."""
    reports: list[fxguard.types.Report] = []
    model = Model(lambda model, x: half(x) * 3, captured=captured)
    fxguard.instrument(model, on_detect=reports.append)(torch.ones(3))
    assert [origin.what for origin in reports[0].origins] == ["fxguard_tests.half"]
    model = Model(lambda model, x: softmax(x), captured=captured)
    masked = torch.full((3,), float("-inf"))
    fxguard.instrument(model, on_detect=reports.append)(masked)
    given, made = reports[1].origins  # what a row of torch's softmax would be taken for a mask
    assert (given.what, made.what) == (
        "argument `inputs[0]` of Model.forward",
        "fxguard_tests.softmax",
    )
    assert "masked" not in str(reports[1])


def test_a_view_of_another_dtype_counts_as_an_operation() -> None:
    """It reads the bits anew, and may be where a NaN comes from."""
    model = Model(lambda m, x: x.view(torch.float16) * 1, captured=False)
    fxguard.instrument(model)(torch.ones(4))
    assert fxguard.guard_of(model).coverage().startswith("checked 2 of 2 operations")


def test_a_tensor_that_is_given_other_data_is_measured_again() -> None:
    """Between graphs, ``x.data = y`` changes what x holds."""

    def function(model: Model, x: Tensor) -> Tensor:
        y = x * 1
        y.data = torch.log(x - x)
        return y + 1

    model = Model(function, captured=False)
    fxguard.instrument(model, on_detect=(reports := []).append)
    model(torch.ones(3))
    assert [origin.what for origin in reports[0].origins] == ["log"]


# A closer look runs an operation once more, and nobody is to notice.


def drawn(model: Model, x: Tensor) -> Tensor:
    x = x.flatten().repeat(20)
    return torch.normal(x, torch.full_like(x, 3e38), generator=model.generator)


def written(model: Model, x: Tensor) -> Tensor:
    return torch.mul(x, x, out=model.scratch)


def normalised(model: Model, x: Tensor) -> Tensor:
    y = nn.functional.batch_norm(x, model.scratch, model.other, training=True) * BIG
    return y * BIG


def registered(model: Model, x: Tensor) -> Tensor:
    return torch.ops.fxguard_tests.accumulate(x, model.scratch) * model.scratch


@pytest.mark.parametrize("function", [drawn, written, normalised, registered])
def test_a_detection_leaves_tensors_and_generators_alone(function: Any, captured: bool) -> None:
    """Two batches with a detection each leave all memory and generators as without fxguard."""
    states = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = Model(function, captured=captured)
        model.generator = torch.Generator().manual_seed(0)
        if guarded:
            fxguard.instrument(model, on_detect=(reports := []).append)
        x = torch.tensor([[0.5, 1.0, BIG], [2.0, 1.0, 0.5]]).clone()
        x = x[0] if function in (written, registered) else x
        given = x.clone()
        for _ in range(2):
            model(x)
        torch.testing.assert_close(x, given, rtol=0, atol=0)
        states.append(
            [
                model.scratch.clone(),
                model.other.clone(),
                model.generator.get_state(),
                torch.get_rng_state(),
            ]
        )
    assert len(reports) == 2
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0, equal_nan=True)


# The rules themselves, against PyTorch's own database of operations.


@pytest.mark.sampled
@pytest.mark.parametrize(
    "letter",
    [
        *"_abdeghikopqtuvwxz",
        *(pytest.param(letter, marks=pytest.mark.campaign) for letter in "cflmnrs"),
    ],
)
def test_the_rules_hold_for_the_operator_database(letter: str) -> None:
    """Nothing changes but what is read as written; moves have the elements of the first operand."""
    checks = Checks()
    for op in op_db:
        if op.name[0] != letter or torch.float32 not in op.dtypes:
            continue
        sample = next(iter(op.sample_inputs("cpu", torch.float32)), None)
        for function in filter(None, (op.op, op.inplace_variant) if sample else ()):
            args = torch.utils._pytree.tree_map_only(
                Tensor, lambda x: x.detach().clone(), (sample.input, *sample.args)
            )
            # No in-place form for these arguments, or no kernel on this machine.
            with checks, contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
                function(*args, **sample.kwargs)
    assert checks.tried


class Checks(TorchFunctionMode):
    """Compares what each call does with what is read of it."""

    def __init__(self) -> None:
        super().__init__()
        self.tried = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if name_of(func) in NOT_OPERATIONS:
            return func(*args, **kwargs)
        call = read_call(func, args, kwargs)
        operands = zoo.tensors_in((args, kwargs))
        before = [x.clone() for x in operands]
        other_args, other_kwargs = torch.utils._pytree.tree_map_only(
            Tensor, torch.clone, (args, kwargs)
        )
        torch.default_generator.manual_seed(1)
        result = func(*args, **kwargs)
        for x, old in zip(operands, before, strict=True):
            assert any(x is y for y in call.written) or same(x, old), (func, "writes")
        torch.default_generator.manual_seed(2)
        other = func(*other_args, **other_kwargs)
        made, others = zoo.tensors_in(result), zoo.tensors_in(other)
        if not call.kind.startswith(("empty", "new_empty")):
            assert call.random or all(map(same, made, others)), (func, "draws")
        if len(made) == 1 and is_move(call, call.first, made[0]):
            assert same(made[0].unique(), before[0].unique()), (func, "moves")
        self.tried += 1
        return result


def same(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided:
        return True
    return a.shape == b.shape and (a.dtype is torch.bool or same_bits(a, b))

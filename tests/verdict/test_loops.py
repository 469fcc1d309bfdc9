"""In which turn of a loop an origin was made, and how much its result grew until then."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as hop_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import fxguard
from fxguard.verdict.loops import turn_text

HALF = torch.full((2, 4), 1.0, dtype=torch.float16)
FIRST_OVERFLOW = 15  # 2 ** 16 is the first power of two beyond 65504; call 0 makes 2 ** 1


@pytest.fixture(params=["captured", "between graphs"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    stance = "default" if request.param == "captured" else "force_eager"
    torch.compiler.set_stance(stance)
    try:
        yield request.param
    finally:
        torch.compiler.set_stance("default")


class Cell(nn.Module):
    """Doubles, by a layer that is called as often as the cell."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.linear.weight.data = 2 * torch.eye(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Unrolled(nn.Module):
    """Calls a cell some times, with or without a graph break in between."""

    def __init__(self, calls: int, breaks: bool = False) -> None:
        super().__init__()
        self.cell, self.calls, self.breaks = Cell(), calls, breaks

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.cell(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def turn_in(model: nn.Module, x: Tensor) -> str:
    """That of the first origin."""
    with pytest.raises(fxguard.NonFiniteError) as caught:
        fxguard.instrument(model)(x)
    report = caught.value.report
    turn = report.origins[0].turn
    assert not turn or f"  {turn}" in report.verdict
    return turn


@pytest.mark.parametrize("breaks", [False, True])
def test_a_cell_that_is_called_in_a_loop(breaks: bool) -> None:
    """The call, counted from 0, and the growth of each, which is the cell's factor.

    The cell is named, and not the layer in it, which is called as often.
    """
    turn = turn_in(Unrolled(20, breaks).half(), HALF)
    assert (
        turn
        == f"call {FIRST_OVERFLOW} of `cell` in this forward; grew 2.0 times a call since call 0"
    )


def test_a_module_that_is_called_twice_is_shared() -> None:
    """It is no loop."""
    assert turn_in(Unrolled(2).half(), HALF * 3e4) == ""


def test_a_module_that_is_called_once_is_no_loop() -> None:
    """A model of many layers, each with a name of its own."""
    layers = [Cell() for _ in range(20)]
    assert turn_in(nn.Sequential(*layers).half(), HALF) == ""


def test_values_that_do_not_grow_are_not_said_to() -> None:
    """The fourth call divides by zero: no growth led to it."""

    class Divides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.divide = Divide()

        def forward(self, x: Tensor) -> Tensor:
            total = x
            for i in range(6):
                total = total + self.divide(x, int(i != 3))
            return total

    class Divide(nn.Module):
        def forward(self, x: Tensor, by: int) -> Tensor:
            return x / (x * by)

    assert turn_in(Divides(), HALF.float()) == "call 3 of `divide` in this forward"


def long_body(x: Tensor) -> Tensor:
    for _ in range(20):
        y = x * 2
        x = y + 0
    return x


def short_body(x: Tensor) -> Tensor:
    for _ in range(20):
        x = x * 2
    return x


def many_in_a_line(x: Tensor) -> Tensor:
    for _ in range(20):
        x = x * 1 * 2 * 1
    return x


@pytest.mark.parametrize("function", [long_body, short_body, many_in_a_line])
def test_a_loop_over_a_line(function: Callable[[Tensor], Tensor]) -> None:
    """Iterations are counted also where one of them runs an operation more than once."""
    assert turn_in(Function(function), HALF) == (
        f"run {FIRST_OVERFLOW} of this line in this call, from 0; grew 2.0 times a run since run 0"
    )


def among_numbers(x: Tensor) -> Tensor:
    """Logarithms of numbers, products of numbers and signs are no operations on tensors."""
    total = x
    for i in range(20):
        y = -0.5 * (math.log(2 * math.pi) + torch.log(x - (2 * i - 30)) + 1e-3)
        total = total + y
    return total


def in_two_loops(x: Tensor) -> Tensor:
    """The line runs 4 times in each turn of the outer loop."""
    for _ in range(6):
        for _ in range(4):
            x = x * 2
        x = x + 0
    return x


def in_a_while_loop(x: Tensor) -> Tensor:
    count = 0
    while count < 20:
        y = x * 2
        x, count = y + 0, count + 1
    return x


def in_a_function_called_again(x: Tensor) -> Tensor:
    def three(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x * 2
        return x

    for _ in range(7):
        x = three(x) + 0
    return x


def between_breaks(x: Tensor) -> Tensor:
    """Each run is in another graph."""
    for _ in range(20):
        x = x * 2
        torch._dynamo.graph_break()
    return x


LOOPS_OVER_A_LINE: list[tuple[Callable[[Tensor], Tensor], int]] = [
    (in_two_loops, FIRST_OVERFLOW),
    (in_a_while_loop, FIRST_OVERFLOW),
    (in_a_function_called_again, FIRST_OVERFLOW),
    (between_breaks, FIRST_OVERFLOW),
    (among_numbers, 16),  # log(1 + 30 - 32)
]


@pytest.mark.parametrize(("function", "run"), LOOPS_OVER_A_LINE)
def test_all_runs_of_a_line_count(function: Callable[[Tensor], Tensor], run: int) -> None:
    """Whatever loops they are in: the inner or the outer turn alone would be another number."""
    turn = turn_in(Function(function), HALF)
    assert turn.startswith(f"run {run} of this line in this call, from 0")
    assert ("grew 2.0 times a run" in turn) == (function is not among_numbers)


def numbers_in_products(x: Tensor) -> Tensor:
    for k in range(1, 20):
        x = x * (2 * k)
    return x


def twice_with_other_lines_between(x: Tensor) -> Tensor:
    def half(x: Tensor) -> Tensor:
        return x / 2

    for _ in range(20):
        x = torch.exp(half(x)) + torch.exp(half(x))
    return x


def in_a_comprehension(x: Tensor) -> Tensor:
    return torch.stack([torch.exp(x * k) for k in range(20)])


def of_methods(x: Tensor) -> Tensor:
    for _ in range(20):
        x = Names().mul(x) * 2 + 0
    return x


class Names:
    def mul(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    "function",
    [numbers_in_products, twice_with_other_lines_between, in_a_comprehension, of_methods],
)
def test_a_run_is_not_told_where_it_is_uncertain(function: Callable[[Tensor], Tensor]) -> None:
    """How many of the signs of a line are operations on tensors, and in how many stretches."""
    assert turn_in(Function(function), HALF) == ""


def test_a_loop_over_modules_is_none_over_a_line() -> None:
    """Their common line runs once in each."""

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    assert turn_in(nn.Sequential(*(Doubles() for _ in range(20))), HALF) == ""


def test_the_runs_of_a_line_are_those_of_one_call() -> None:
    """A module that is called again begins anew."""

    class Grows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = x * 2
            return x

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grows = Grows()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(5):
                x = self.grows(x)
            return x

    turn = turn_in(Twice(), HALF)
    assert turn == "run 3 of this line in this call, from 0; grew 2.0 times a run since run 0"


def over_rows(x: Tensor) -> Tensor:
    total = x.new_zeros(())
    for row, scale in zip(x, SCALES, strict=False):
        total = total + (row * scale * 3).exp().mean()
    return total


def over_outputs(x: Tensor) -> Tensor:
    losses = []
    for row, scale in zip(x, SCALES, strict=False):
        losses.append(torch.exp(row * scale * 3))
    return torch.stack(losses)


def of_its_own_input(x: Tensor) -> Tensor:
    """A loop that carries a value, and an operation beside it that nothing reads."""
    state, total = x, x.new_zeros(())
    for _ in range(20):
        state = state + 1
        total = total + torch.exp(state * 3).mean()
    return total


SCALES = [float(i) for i in range(20)]


@pytest.mark.parametrize("function", [over_rows, over_outputs, of_its_own_input])
def test_what_does_not_lead_to_the_next_turn_does_not_grow(
    function: Callable[[Tensor], Tensor],
) -> None:
    """Rows, images and layers are larger or smaller, but nothing grows from one to the next."""
    turn = turn_in(Function(function), torch.ones(20, 4, dtype=torch.float16))
    assert re.fullmatch(r"run \d of this line in this call, from 0", turn), turn


def test_a_module_that_sees_one_image_after_the_other_does_not_grow() -> None:
    """Its calls read the images, and not each other's results."""

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Cell()

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.cell(row * 2**i) for i, row in enumerate(x)])

    assert re.fullmatch(
        r"call 1\d of `cell` in this forward",
        turn_in(Images().half(), torch.ones(20, 4, dtype=torch.float16)),
    )


def test_one_line_of_many_operations_is_no_loop() -> None:
    """It runs once."""
    assert turn_in(Function(lambda x: x * 100 * 100 * 100 * 100), HALF) == ""


def in_scan(x: Tensor) -> Tensor:
    def combine(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return carry * 3 + 0, carry + row

    return scan(combine, torch.ones(4, dtype=x.dtype), x, dim=0)[1]


def in_while_loop(x: Tensor) -> Tensor:
    return while_loop(
        lambda i, y: i < 30, lambda i, y: (i + 1, y * 3), (torch.tensor(0), x[0].clone())
    )[1]


def in_map(x: Tensor) -> Tensor:
    return hop_map(lambda row: row * row, torch.arange(len(x), dtype=x.dtype)[:, None] * 16)


def in_nested_loops(x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return while_loop(lambda i, z: i < 4, lambda i, z: (i + 1, z * 3), (torch.tensor(0), y))[1]

    def combine(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return inner(carry) + 0, carry + row

    return scan(combine, torch.ones(4, dtype=x.dtype), x, dim=0)[1]


# 3 ** 11 is the first power of three beyond 65504; (16 * 16) ** 2 the first square.
BODIES = [
    (in_scan, "iteration 10 of scan; grew 3.0 times an iteration since iteration 0"),
    (in_while_loop, "iteration 10 of while_loop; grew 3.0 times an iteration since iteration 0"),
    (in_map, "iteration 16 of map"),
    (in_nested_loops, "iteration 2 of while_loop; grew 3.0 times an iteration since iteration 0"),
]


@pytest.mark.parametrize(
    ("function", "turn"), BODIES, ids=lambda case: getattr(case, "__name__", "")
)
def test_loops_in_a_graph(function: Callable[[Tensor], Tensor], turn: str, way: str) -> None:
    """Their statistics are one for all iterations: a second run counts them."""
    if way == "captured":
        assert turn_in(Function(function), torch.ones(20, 4, dtype=torch.float16)) == turn


def test_growth_is_the_geometric_mean_over_what_is_known() -> None:
    """Turns without a number are left out, and growth of less than a tenth is not told."""
    grew = turn_text(3, [math.nan, 1.0, 100.0, 1e9], what="call", where="`x`")
    assert grew == "call 3 of `x`; grew 100.0 times a call since call 1"
    assert turn_text(2, [1.0, 1.05], what="call", where="`x`") == "call 2 of `x`"
    assert turn_text(2, [0.0, 5.0], what="call", where="`x`") == "call 2 of `x`"
    assert turn_text(2, [1.0, 1e6], what="call", where="`x`").endswith(
        "1e+06 times a call since call 0"
    )

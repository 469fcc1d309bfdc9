"""The cause of a bad value, and the numbers that show it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fxguard.advice.causes import cause_of, cause_of_given
from fxguard.advice.operands import LONGEST, operands_text
from fxguard.advice.surroundings import Surroundings
from fxguard.formats import FORMATS
from fxguard.graph.evidence import Evidence, Operand
from fxguard.graph.poles import LAWS
from fxguard.graph.tables import UNINITIALISED
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Step, Value
from fxguard.records import Role, Severity

INF, NAN = math.inf, math.nan


def one(x: float, wide: float | None = None, dtype: str = "float16") -> Operand:
    """An operand of an operation that works element by element."""
    return Operand(x, x, wide, wide, dtype=dtype)


def row(low: float, high: float, count: int, wide: float | None = None) -> Operand:
    """A row that a reduction read."""
    return Operand(low, high, wide, wide, count, dtype="float16")


def number(x: float, name: str = "") -> Operand:
    """A Python number."""
    return Operand(x, x, x, x, name=name)


@dataclass(frozen=True, slots=True)
class Case:
    """What was seen of an operation, and what is said of it."""

    evidence: Evidence
    cause: str
    text: str


def case(
    kind: str,
    made: float,
    operands: tuple[Operand, ...],
    same: float | None,
    wide: float | None,
    cause: str,
    text: str,
    *,
    dtype: str = "float16",
    masked_row: bool = False,
    inner: Evidence | None = None,
) -> Case:
    """One line of the table."""
    found = Evidence(
        kind, dtype, (1,), made, operands, same, wide, masked_row=masked_row, inner=inner
    )
    return Case(found, cause, text)


MASKED = row(-INF, -INF, 4)
ZEROS = row(0.0, 0.0, 8)
ROW = row(-170.5, 203.0, 64)
DIVISION = Evidence("div", "float16", (0,), NAN, (one(0.0), one(0.0, 1e-12)), NAN, 0.0)

CASES = (
    # In float64 finite and beyond the limit, or infinite at no pole.
    case("mul", INF, (one(454.0), one(485.0)), 220190.0, 220190.0, "overflow",
         "454.0 * 485.0 is 220190 in float64"),
    case("mul_", INF, (one(454.0), number(485.0)), 220190.0, 220190.0, "overflow",
         "454.0 * 485 is 220190 in float64"),
    case("pow", INF, (one(400.0), number(2)), 160000.0, 160000.0, "overflow",
         "pow(400.0, 2) is 160000 in float64"),
    case("exp", INF, (one(800.0),), INF, INF, "overflow", "exp(800.0) is inf in float64, too"),
    case("to", INF, (one(80000.0),), 80000.0, 80000.0, "overflow",
         "80000 as float16, whose maximum is 65504"),
    case("matmul", INF, (ROW, ROW), 90000.0, 90000.0, "overflow",
         "a row from -170.5 to 203.0 times a column from -170.5 to 203.0 (64 elements) is 90000 in "
         "float64"),
    case("sum", INF, (row(200.0, 400.0, 512),), 1.5e5, 1.5e5, "overflow",
         "sum of a row from 200.0 to 400.0 (512 elements) is 150000 in float64"),
    case("add", -INF, (one(-20.0), one(-65504.0)), -65524.0, -65524.0, "overflow",
         "-20.0 + -6.55e+04 is -65524 in float64"),
    # A kernel fails inside.
    case("var", NAN, (row(-300.0, 300.0, 8),), 9e3, 9e3, "overflow",
         "var of a row from -300.0 to 300.0 (8 elements) is 9000 in float64"),
    case("normalize", NAN, (ZEROS,), 0.0, 0.0, "underflow",
         "normalize of zeros (8 elements), eps 1e-12 is 0 in float16"),
    case("normalize", NAN, (ZEROS, number(1e-9, "eps")), 0.0, 0.0, "underflow",
         "normalize of zeros (8 elements), eps 1e-09 is 0 in float16"),
    case("normalize", NAN, (ZEROS,), 0.0, 0.0, "underflow",
         "inside normalize, 0.0 / 0.0; in float64 0.0 / 1e-12", inner=DIVISION),
    case("layer_norm", NAN, (row(1e-5, 2e-5, 8), number(1e-5, "eps")), 0.5, 0.5, "underflow",
         "layer_norm of a row from 1e-05 to 2e-05 (8 elements) is 0.5 in float64"),
    case("stft", NAN, (row(0.5, 1.0, 8),), 0.5, 0.5, "rounding",
         "stft of a row from 0.5 to 1.0 (8 elements) is 0.5 in float64"),
    # Bad on those operands, and healthy where everything was computed in float64.
    case("div", NAN, (one(0.0, 0.0), one(0.0, 1e-9)), NAN, 0.0, "underflow",
         "0.0 / 0.0; in float64 0.0 / 1e-09"),
    case("log", -INF, (one(0.0, 1e-12),), -INF, -27.0, "underflow",
         "log(0.0); in float64 log(1e-12)"),
    case("log", -INF, (one(0.0, 8.4e-5),), -INF, -9.4, "rounding",
         "log(0.0); in float64 log(8.4e-05)"),
    case("log1p", -INF, (one(-1.0, -1 + 1e-6),), -INF, -13.8, "rounding",
         "log1p(-1.0); in float64 log1p(-0.999999)"),
    case("sqrt", NAN, (one(-1e-3, 1e-9),), NAN, 3e-5, "rounding",
         "sqrt(-0.001); in float64 sqrt(1e-09)"),
    case("acos", NAN, (Operand(1.0000001, 1.0000001, 1.0, 1.0, dtype="float32"),), NAN, 0.0,
         "rounding", "acos(1.0000001); in float64 acos(1.0)", dtype="float32"),
    # An operand that had overflowed before.
    case("softmax", NAN, (row(-INF, -INF, 4, -65524.0), number(-1)), NAN, 0.25, "overflow",
         "all 4 elements of the row are -inf", masked_row=True),
    # Bad in both.
    case("div", NAN, (one(0.0, 0.0), one(0.0, 0.0)), NAN, NAN, "zero divisor", "0.0 / 0.0"),
    case("div", INF, (one(0.0, 0.0), number(1)), INF, INF, "zero divisor", "1 / 0.0"),
    case("log", -INF, (one(0.0, 0.0),), -INF, -INF, "zero divisor", "log(0.0)"),
    case("special_logit", INF, (one(1.0, 1.0),), INF, INF, "zero divisor", "logit(1.0)"),
    case("_weight_norm", NAN, (ZEROS, one(0.0)), NAN, NAN, "zero divisor",
         "weight_norm of zeros (8 elements)"),
    case("sqrt", NAN, (one(-2.0, -2.0),), NAN, NAN, "domain", "sqrt(-2.0)"),
    case("pow", NAN, (one(-2.0, -2.0), number(0.5)), NAN, NAN, "domain", "pow(-2.0, 0.5)"),
    case("mul", NAN, (one(0.0, 0.0), number(-INF)), NAN, NAN, "domain", "0.0 * -inf"),
    case("sub", NAN, (one(INF, INF), one(INF, INF)), NAN, NAN, "domain", "inf - inf"),
    case("matmul", NAN, (row(-INF, 0.0, 4), row(-1.0, 1.0, 4)), NAN, NAN, "domain",
         "a row from -inf to 0.0 times a column from -1.0 to 1.0 (4 elements)"),
    case("sum", -INF, (row(-INF, 0.0, 4),), -INF, -INF, "domain",
         "sum of a row from -inf to 0.0 (4 elements)"),
    case("mean", NAN, (Operand(NAN, NAN, count=0, dtype="float16"),), NAN, NAN, "empty",
         "mean of 0 elements is NaN"),
    case("nanmean", NAN, (row(NAN, NAN, 4),), NAN, NAN, "empty",
         "all 4 elements of the row are NaN"),
    case("std", NAN, (one(0.5, 0.5), number(1)), NAN, NAN, "empty", "std of 1 element is NaN"),
    case("cross_entropy", NAN, (ROW,), NAN, NAN, "empty", "cross_entropy without a valid target"),
    case("softmax", NAN, (MASKED, number(-1)), NAN, NAN, "masked row",
         "all 4 elements of the row are -inf", masked_row=True),
    case("softmax", NAN, (MASKED, number(-1)), NAN, NAN, "masked row",
         "all 4 elements of the row are -inf"),  # nobody could look at all rows
    case("std", NAN, (MASKED,), NAN, NAN, "domain", "all 4 elements of the row are -inf"),
    case("sub", NAN, (one(-INF), one(-INF)), NAN, NAN, "masked row", "-inf - -inf",
         masked_row=True),
    case("scaled_dot_product_attention", NAN, (ROW, ROW, ROW), NAN, NAN, "masked row",
         "scaled_dot_product_attention of a row from -170.5 to 203.0 (64 elements)",
         masked_row=True),
    case("ctc_loss", INF, (row(-3.0, -1.0, 5),), INF, INF, "no alignment",
         "a target has no alignment with its input"),
    # Nobody could compute it in float64.
    case("log", -INF, (one(0.0),), None, None, "zero divisor", "log(0.0)"),
    case("mul", INF, (one(454.0), one(485.0)), None, None, "overflow", "454.0 * 485.0"),
    case("linear", NAN, (ROW, ROW), None, None, "overflow",
         "a row from -170.5 to 203.0 times a column from -170.5 to 203.0 (64 elements)"),
    case("my_operation", NAN, (one(0.5),), None, None, "unknown", "my_operation(0.5)"),
    case("my_operation", NAN, (one(0.5),), NAN, NAN, "unknown", "my_operation(0.5)"),
    case("var", NAN, (ROW,), None, None, "unknown",
         "var of a row from -170.5 to 203.0 (64 elements)"),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.evidence.kind}-{case.cause}")
def test_what_is_said_of_an_operation(case: Case) -> None:
    """The cause, and the numbers in one line."""
    assert cause_of(case.evidence) == case.cause
    assert operands_text(case.evidence) == f"at [1]: {case.text}"


def test_how_many_share_it_is_said_last() -> None:
    """Also where the line is too long: the numbers are cut, and the count is not."""
    zero = one(0.0)
    x = Evidence(
        "div", "float16", (5, 0), NAN, (zero, zero), NAN, NAN, share=12, numel=100, sample=5
    )
    assert operands_text(x) == "at [5, 0]: 0.0 / 0.0 (in sample 5; likewise in 11 more elements)"
    x = Evidence("div", "float16", (5, 0), NAN, (zero, zero), NAN, NAN, share=12, numel=12)
    assert operands_text(x) == "at [5, 0]: 0.0 / 0.0 (likewise in all 12 elements)"
    x = Evidence("div", "float16", (), NAN, (zero, zero), NAN, NAN)
    assert operands_text(x) == "0.0 / 0.0"
    x = Evidence("x" * 200, "float16", (1,), NAN, (zero,), NAN, NAN, share=2, numel=12)
    assert len(operands_text(x)) == LONGEST
    assert operands_text(x).endswith("x… (likewise in 1 more element)")


def test_a_number_is_divided_by_a_tensor() -> None:
    """Whose order the numbers tell."""
    tiny, number = Operand(1e-42, 1e-42, dtype="float32"), Operand(0.05, 0.05)
    x = Evidence("div", "float32", (4,), INF, (tiny, number), 5e40)
    assert operands_text(x).startswith("at [4]: 0.05 / 1e-42")
    x = Evidence("div", "float32", (4,), 2e-41, (tiny, number), 2e-41)
    assert operands_text(x).startswith("at [4]: 1e-42 / 0.05")


@pytest.mark.parametrize(
    ("share", "told"),
    [(4, ""), (12, " (likewise in 2 more rows)"), (24, " (likewise in all 6 rows)")],
)
def test_rows_that_are_masked_are_counted(share: int, told: str) -> None:
    """Each of their elements is NaN."""
    row = Operand(-INF, -INF, count=4, dtype="float32")
    x = Evidence("softmax", "float32", (1, 0), NAN, (row,), NAN, NAN, share=share, numel=24)
    assert operands_text(x) == f"at [1, 0]: all 4 elements of the row are -inf{told}"


@pytest.mark.parametrize("kind", sorted(UNINITIALISED))
def test_uninitialised_memory_is_no_arithmetic(kind: str) -> None:
    """Whatever it held."""
    x = Evidence(kind, "float32", (1,), NAN, ())
    assert cause_of(x) == "memory"
    assert operands_text(x) == f"at [1]: {kind.rstrip('_')}: whatever the memory held"


@pytest.mark.parametrize("role", [role for role in Role if role.is_given])
def test_what_was_given_has_a_cause(role: Role) -> None:
    """An input is data; what the model keeps, and constants, are weights."""
    assert cause_of_given(role) == ("data" if role is Role.INPUT else "weight")


def test_the_root_of_an_eps_that_is_lost_is_an_underflow() -> None:
    """A root of 1e-12 is 1e-6, which the dtype holds: what stands around it tells."""
    values = [Value(Role.INPUT, "x"), *(Value(Role.MADE, "") for _ in range(4))]

    def graph(kind: str, eps: float) -> Surroundings:
        steps = (
            Step("add", "", (0,), (1,), literals=(eps,)),
            Step(kind, "", (1,), (2,)),
            Step("div", "", (0, 2), (3,)),
        )
        return Surroundings(steps, values, Blame(3, 2, Severity.NAN))

    found = Evidence("div", "float16", (0,), NAN, (one(0.0, 0.0), one(0.0, 1e-3)), NAN, 0.0)
    assert cause_of(found) == "rounding"
    assert cause_of(found, graph("sqrt", 1e-6)) == "rounding"
    assert cause_of(found, graph("sqrt", 1e-12)) == "underflow"
    assert cause_of(found, graph("relu", 1e-12)) == "rounding"


NUMBERS = (0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 100.0, -100.0, INF, -INF)


def function_of(name: str) -> object:
    """The function of torch that has a name of the table."""
    places = (torch, torch.special, functional)
    return next(getattr(place, name) for place in places if hasattr(place, name))


def value(name: str, numbers: tuple[float, ...], dtype: torch.dtype) -> float:
    """What torch makes of numbers."""
    given = [torch.tensor([x], dtype=dtype) for x in numbers]
    made = function_of(name)(*given)  # type: ignore[operator]
    assert isinstance(made, Tensor)
    return made.double().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAWS)
def test_each_operation_of_the_table_that_fails_has_its_cause(
    name: str, dtype: torch.dtype
) -> None:
    """Run at its poles, outside its domain and beyond the dtype, and again in float64."""
    label = str(dtype).removeprefix("torch.")
    for numbers in itertools.product(NUMBERS, repeat=LAWS[name].arity):
        try:
            made = value(name, numbers, dtype)
        except RuntimeError:
            pytest.skip(f"no kernel for {label}")
        is_inherited = math.isinf(made) and not all(map(math.isfinite, numbers))
        if math.isfinite(made) or is_inherited:
            continue
        same = value(name, numbers, torch.float64)
        operands = tuple(one(x, x, label) for x in numbers)
        found = cause_of(Evidence(name, label, (0,), made, operands, same, same))
        if math.isfinite(same):
            assert abs(same) > FORMATS[label].max
            assert found == "overflow", numbers
        else:  # 100 ** 100 fits float64: what is infinite there is a pole, or the end of a domain
            assert found in ("zero divisor", "domain"), numbers

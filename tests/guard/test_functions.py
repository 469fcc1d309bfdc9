"""Plain functions, methods and partials are instrumented like models."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard import FxguardError, NonFiniteError, guard_of, instrument, remove

ZEROS, ONES = torch.zeros(2, 4), torch.ones(2, 4)
WEIGHT = torch.zeros(3, requires_grad=True)


def loss_of(x: Tensor, scale: float = 1.0) -> Tensor:
    """A loss."""
    return torch.log(x * scale).sum()


def message_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(NonFiniteError) as raised:
        call(*args, **kwargs)
    return raised.value.report.origins[0].message


def test_a_function_looks_and_works_as_before() -> None:
    """Name, documentation, signature and result are the function's; it is left as it is."""
    guarded = instrument(loss_of)
    assert (guarded.__name__, guarded.__doc__) == ("loss_of", "A loss.")
    assert inspect.signature(guarded) == inspect.signature(loss_of)
    assert torch.equal(guarded(ONES, scale=2.0), loss_of(ONES, scale=2.0))
    line = inspect.getsourcelines(loss_of)[1] + 2
    assert message_of(guarded, ZEROS) == f"log made -inf (test_functions.py:{line})"
    assert guard_of(guarded).coverage() == "checked 6 of 6 operations in 2 graphs"
    assert "<fxguard.types.Guard of loss_of, batch 2: batch 1: log made -inf" in repr(
        guard_of(guarded)
    )
    assert not loss_of(ZEROS).isfinite()  # plain
    assert remove(guarded) is loss_of
    with pytest.raises(FxguardError, match="not instrumented"):
        guard_of(guarded)


def test_modules_that_a_function_reads_have_its_names_for_them() -> None:
    """In frames, and in what is said of gradients."""
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        return (model(x) * 0).sqrt().sum()

    guarded = instrument(step)
    loss = guarded(ONES)
    assert [frame.name for frame in guard_of(guarded).frames()][:1] == ["model"]
    with pytest.raises(NonFiniteError) as raised:
        loss.backward()
    assert "backward of sqrt made inf" in raised.value.report.verdict[0]
    assert "the gradients of model.bias, model.weight" in str(raised.value)


def test_what_a_function_reads_is_named_like_its_variables() -> None:
    """Arguments and globals."""

    def root(x: Tensor) -> Tensor:
        return (x * WEIGHT).sqrt().sum()

    loss = instrument(root)(torch.ones(3, requires_grad=True))
    with pytest.raises(NonFiniteError, match="it spread to the gradient") as raised:
        loss.backward()
    spread = next(line for line in str(raised.value).splitlines() if "it spread" in line)
    assert "WEIGHT" in spread
    assert "__import" not in spread


class Doubles(nn.Identity):
    """Its forward is guarded in the body of the class, before the class is there."""

    @instrument
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def recursive() -> Any:
    @instrument
    def power(x: Tensor, n: int) -> Tensor:
        return x if n == 0 else power(x * x, n - 1)

    return power


def mutual() -> Any:
    @instrument
    def even(x: Tensor, n: int) -> Tensor:
        return x * x if n == 0 else odd(x, n - 1)

    def odd(x: Tensor, n: int) -> Tensor:
        return even(x, n - 1)

    return even


def defined_before_its_module() -> Any:
    @instrument
    def step(x: Tensor) -> Tensor:
        return layer(x) * 1e38

    layer = nn.Identity()
    return step


@pytest.mark.parametrize(
    ("make", "args"),
    [(Doubles, ()), (recursive, (2,)), (mutual, (2,)), (defined_before_its_module, ())],
)
def test_a_variable_may_have_no_value_yet_when_a_function_is_guarded(make: Any, args: Any) -> None:
    """``super()`` reads the class, a recursive function itself: both are there later."""
    function = make()
    plain = {Doubles: 2.0, recursive: 1.0, mutual: 1.0}.get(make, 1e38)
    assert torch.equal(function(ONES, *args), ONES * plain)
    message = message_of(function, ONES * 2e38, *args)
    assert message.startswith("mul made inf (test_functions.py:")


class Task:
    """Its step is guarded in the body of the class."""

    def __init__(self) -> None:
        self.net = nn.Linear(4, 4)

    @instrument
    def step(self, x: Tensor) -> Tensor:
        return torch.rsqrt(self.net(x) * 0)

    def plain(self, x: Tensor) -> Tensor:
        return torch.rsqrt(self.net(x) * 0)


class Called:
    """An object that is called like a function."""

    def __call__(self, x: Tensor) -> Tensor:
        return x.log()


@pytest.mark.parametrize(
    ("make", "operation"),
    [
        (lambda: Task().step, "rsqrt"),
        (lambda: instrument(Task().plain), "rsqrt"),
        (lambda: instrument(functools.partial(loss_of, scale=2.0)), "log"),
        (lambda: instrument(Called()), "log"),
        (lambda: instrument(lambda x: x.log()), "log"),
        (lambda: instrument(torch.log), "log"),
        (lambda: copy.deepcopy(instrument(loss_of)), "log"),
        (lambda: torch.compile(instrument(loss_of), backend="aot_eager"), "log"),
        (lambda: torch.compile(instrument(loss_of), backend="eager", fullgraph=True), "log"),
        (lambda: torch.compile(lambda x: GUARDED(x) * 2, backend="eager"), "log"),
    ],
)
def test_whatever_is_called(make: Any, operation: str) -> None:
    """Methods, partials, objects, lambdas, torch's own functions, copies, compiled functions."""
    assert re.match(f"{operation} made -?inf ", message_of(make(), ZEROS))


GUARDED = instrument(loss_of)


def test_transforms_of_functions() -> None:
    """`vmap` and `grad` take it like the function."""

    def square(x: Tensor) -> Tensor:
        return (x * x).sum()

    guarded, x = instrument(square), torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.func.vmap(guarded)(x), torch.func.vmap(square)(x))
    assert torch.equal(torch.func.grad(guarded)(x), torch.func.grad(square)(x))


def test_whole_steps_of_a_function() -> None:
    """`watch` takes what was instrumented, and says what to do with a plain function."""
    model = nn.Linear(4, 1)

    def predict(x: Tensor) -> Tensor:
        return model(x)

    with fxguard.watch(instrument(predict)) as guard:
        guarded: Any = guard.model
        with pytest.raises(NonFiniteError, match="backward of sqrt"):
            (guarded(ONES) * 0).sqrt().sum().backward()
    with pytest.raises(FxguardError, match="watch what fxguard\\.instrument makes"):
        fxguard.watch(loss_of).__enter__()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (nn.Linear, "Linear is a class; instrument an instance of it"),
        (3, "needs a torch.nn.Module or a function, got int"),
        (None, "needs a torch.nn.Module or a function, got NoneType"),
        (torch.jit.script(loss_of), "a TorchScript function has no Python code"),
        (torch.compile(loss_of), "instrument the function first, then compile it"),
    ],
)
def test_what_is_no_function_is_refused(value: Any, words: str) -> None:
    """With what to do."""
    with pytest.raises(FxguardError, match=words):
        instrument(value)


def test_a_function_that_calls_a_guarded_model() -> None:
    """One guard is enough: the other one is named."""
    model = instrument(nn.Linear(4, 4))

    def step(x: Tensor) -> Tensor:
        return model(x)

    with pytest.raises(FxguardError, match="its submodule 'model' is instrumented already"):
        instrument(step)

"""What stands in a ``try`` block of a model is caught there, as in plain Python."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.capture._handlers import tried_lines

X = torch.ones(2, 8)


class Falls(nn.Module):
    """Takes another way where a Cholesky factorization fails."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        nn.init.constant_(self.a.weight, -1.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        try:
            y = torch.linalg.cholesky(y)
        except RuntimeError:
            y = y * 0 + 7
        return y + 1


def test_an_exception_that_the_model_catches_is_caught() -> None:
    """The handler of a `try` block runs, and what it computes is checked."""
    guarded = fxguard.instrument(Falls())
    for _ in range(2):
        assert torch.equal(guarded(torch.ones(3, 3)), torch.full((3, 3), 8.0))
    assert "checked 4 of 4 operations" in fxguard.guard_of(guarded).coverage()
    assert [f.kind for f in fxguard.guard_of(guarded).frames()][-3:] == ["add", "add", "Falls"]


def test_what_stands_under_finally_runs() -> None:
    """An exception in a `try` block without a handler still runs its `finally`."""
    seen = []

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            try:
                y = torch.linalg.cholesky(x * 1)
            finally:
                seen.append("finally")
            return y

    model = fxguard.instrument(Fails())
    with pytest.raises(torch.linalg.LinAlgError):
        model(-torch.eye(3))
    assert seen == ["finally"]


class Copies(nn.Module):
    """Writes rows into memory as caches do that wait for kernels."""

    def forward(self, memory: Tensor, rows: Tensor) -> Tensor:
        at = torch.tensor([1, 0])
        try:
            memory.index_copy_(0, at, rows)
        except NotImplementedError:
            memory[at] = rows
        return memory.float() + 1


FLOAT8 = torch.float8_e4m3fn  # there is no kernel


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, FLOAT8], ids=str)
def test_a_kernel_that_does_not_exist_is_replaced_as_in_python(dtype: torch.dtype) -> None:
    """Where there is one the block is part of the graph."""
    memory, rows = torch.zeros(3, 8).to(dtype), torch.ones(2, 8).to(dtype)
    expected = Copies()(memory.clone(), rows)
    guarded = fxguard.instrument(Copies())
    for _ in range(2):
        assert torch.equal(guarded(memory.clone(), rows), expected)
    captured = "between graphs" not in fxguard.guard_of(guarded).coverage()
    assert captured == (dtype is not FLOAT8)


class Guesses(nn.Module):
    """Waits for a kernel and for an index out of range."""

    def forward(self, memory: Tensor, at: Tensor) -> Tensor:
        try:
            memory.index_copy_(0, at, torch.ones(1, 2))
        except (NotImplementedError, IndexError):
            memory.fill_(7)
        return memory + 1


def test_an_index_that_is_out_of_range_is_caught() -> None:
    """A block that waits for more than kernels is left to Python."""
    guarded = fxguard.instrument(Guesses())
    for _ in range(2):
        output = guarded(torch.zeros(3, 2), torch.tensor([5]))
        assert torch.equal(output, torch.full((3, 2), 8.0))


def test_a_try_block_around_the_call_of_the_model_is_no_reason_to_leave_it_to_python() -> None:
    """Only a `try` block in the model counts: this test's own is the usual way to use fxguard."""
    model = fxguard.instrument(nn.Linear(8, 8))
    try:
        model(X)
    except fxguard.NonFiniteError:
        pytest.fail("a healthy model")
    assert fxguard.guard_of(model).coverage() == "checked 1 of 1 operations in 1 graph"


class OwnError(RuntimeError):
    """An exception of this package."""


class Waits(nn.Module):
    """Waits for an exception that no operation raises, as einops does around its operations."""

    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.fail = fail

    def forward(self, x: Tensor) -> Tensor:
        try:
            y = x.exp()
            if self.fail:
                raise OwnError
        except OwnError:
            y = x.abs()
        return y + 1


class WaitsForTorch(nn.Module):
    """Gives another exception the name of its own."""

    def forward(self, x: Tensor) -> Tensor:
        OwnError = RuntimeError  # it hides the class
        try:
            y = torch.linalg.cholesky(x)
        except OwnError:
            y = x.abs()
        return y + 1


@torch.library.custom_op("fxguard_tests::raises_its_own", mutates_args=())
def raises_its_own(x: Tensor) -> Tensor:
    raise OwnError


@raises_its_own.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class WaitsForCustom(nn.Module):
    """Waits for an exception of an operation that is not torch's."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            y: Tensor = raises_its_own(x)
        except OwnError:
            y = x.abs()
        return y + 1


@pytest.mark.parametrize("fail", [False, True])
def test_a_block_that_waits_for_no_exception_of_torch_is_captured(fail: bool) -> None:
    """An operation cannot raise what another package has defined."""
    guarded = fxguard.instrument(Waits(fail))
    for _ in range(2):
        assert torch.equal(guarded(X), Waits(fail)(X))
    assert "between graphs" not in fxguard.guard_of(guarded).coverage()


@pytest.mark.parametrize("kind", [WaitsForTorch, WaitsForCustom])
def test_a_block_that_waits_for_an_exception_of_its_operation_is_left_to_python(
    kind: type[nn.Module],
) -> None:
    """A name may be bound anew in the function, and an operation may be the user's."""
    guarded = fxguard.instrument(kind())
    for _ in range(2):
        assert torch.equal(guarded(-torch.eye(3)), torch.eye(3) + 1)


class Layers(nn.Module):
    """Five layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Releases(nn.Module):
    """Calls its layers in a `try` block, and releases something after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()
        self.released = 0

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.layers(x)
        finally:
            self.released += 1


def test_a_forward_in_a_try_block_is_not_traced_to_its_end(traced: list[str]) -> None:
    """It is left to Python at its first operation, and its layers are traced once."""
    guarded = fxguard.instrument(Releases())
    guarded(X)
    assert len(traced) == 5
    assert guarded.released == 1
    assert "checked 5 of 5 operations" in fxguard.guard_of(guarded).coverage()


class Begins(nn.Module):
    """Has an operation in a `try` block before its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = x * 2
        except RuntimeError:
            x = x * 3
        return self.layers(x)


def test_a_forward_is_left_at_its_first_operation_in_a_try_block(
    traced: list[str],
) -> None:
    """What follows is not traced in vain."""
    guarded = fxguard.instrument(Begins())
    guarded(X)
    assert len(traced) == 5
    assert "checked 6 of 6 operations" in fxguard.guard_of(guarded).coverage()


TRACED: list[str] = []


@torch._dynamo.assume_constant_result
def note() -> float:
    """Called when it is traced, and not when the graph runs."""
    TRACED.append("traced")
    return 2.0


class Notes(nn.Module):
    """Notes that it is traced before its first operation."""

    def forward(self, x: Tensor) -> Tensor:
        factor = note()
        return x * factor


class Tries(nn.Module):
    """Calls a module in a `try` block of a function that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = Notes()

    def forward(self, x: Tensor) -> Tensor:
        return self.safe(x.tanh()) + 1

    def safe(self, x: Tensor) -> Tensor:
        """Its place."""
        try:
            found: Tensor = self.notes(x)
        except RuntimeError:
            return x
        return found


def test_a_module_in_a_try_block_is_traced_once() -> None:
    """What calls it is left to Python before it is traced."""
    TRACED.clear()
    guarded = fxguard.instrument(Tries())
    for _ in range(2):
        assert torch.equal(guarded(X), X.tanh() * 2 + 1)
    assert TRACED == ["traced"]
    assert "checked 3 of 3 operations in 1 graph and 2" in fxguard.guard_of(guarded).coverage()


class Deep(nn.Module):
    """Has an operation in a ``try`` block of a function that others call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(x) * 2

    def middle(self, x: Tensor) -> Tensor:
        """Two calls above it."""
        return self.safe(self.layer(x)) + 1

    def safe(self, x: Tensor) -> Tensor:
        """Its place."""
        try:
            return x.tanh()
        except RuntimeError:
            return x


def test_functions_around_a_try_block_are_not_traced_to_it_in_turn(traced: list[str]) -> None:
    """The layer is traced once, and then captured, and none of them in vain."""
    guarded = fxguard.instrument(Deep())
    assert torch.equal(guarded(X), guarded(X))
    assert traced == ["middle"]
    assert "checked 4 of 4 operations in 0 graphs and 4" in fxguard.guard_of(guarded).coverage()


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="this torch leaves a function to Python for everybody",
)
def test_what_a_guard_leaves_to_python_is_captured_for_others() -> None:
    """A function of the model that the user compiles has a whole graph."""
    fxguard.instrument(Deep())(X)
    graphs = []

    def backend(graph_module: Any, _: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    torch.compile(Deep().middle, backend=backend, fullgraph=True)(X)
    assert len(graphs) == 1


class Scaled(nn.Module):
    """A layer that torch runs in a try block, behind another module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)
        self.runs = 0

    def __call__(self, x: Tensor, *, at_once: bool = False) -> Tensor:
        """Runs it."""
        x = self.scale(x)
        if at_once:
            x = x * 2
        try:
            return super().__call__(x)
        finally:
            self.runs += 1

    def forward(self, x: Tensor) -> Tensor:
        """Its own operation."""
        output: Tensor = self.inner(x)
        return output


class MayReturn(Scaled):
    """Need not come to its try block."""

    def __call__(self, x: Tensor, *, at_once: bool = False) -> Tensor:
        """Runs it, or not."""
        x = self.scale(x)
        if not at_once:
            return x * 2
        try:
            return super().__call__(x)
        finally:
            self.runs += 1


class Outer(nn.Module):
    """Runs such a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Its output."""
        try:
            output: Tensor = self.layer(x)
        except RuntimeError as error:
            raise ValueError("the layer has failed") from error
        return output


def test_a_call_that_surely_comes_to_a_try_block_is_not_traced_to_it(traced: list[str]) -> None:
    """What stands before the block is traced once: where it runs."""
    model = Outer(Scaled())
    expected = model(X)
    guarded = fxguard.instrument(model)
    assert torch.equal(guarded(X), expected)
    assert traced.count("__call__") == 0
    assert "checked 2 of 2 operations" in fxguard.guard_of(guarded).coverage()


def test_a_call_that_may_return_before_its_try_block_is_traced(traced: list[str]) -> None:
    """It is captured as long as it does."""
    guarded = fxguard.instrument(Outer(MayReturn()))
    guarded(X)
    assert "__call__" in traced
    assert "checked 2 of 2 operations in 1 graph" in fxguard.guard_of(guarded).coverage()


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("x = super().__call__(x)", 3),
        ("return super().__call__(x)", 3),
        ("with x:\n   super().__call__(x)", 4),
        ("if x:\n   super().__call__(x)\n  else:\n   super().__call__(x)", 4),
        ("if x:\n   super().__call__(x)", None),
        ("if x:\n   return x\n  super().__call__(x)", None),
        ("x = lambda: super().__call__(x)", None),
        ("x = self.__call__(x)", None),
        ("def f():\n   return x\n  super().__call__(x)", 5),
    ],
)
def test_which_calls_are_sure(body: str, line: int | None, tmp_path: Path) -> None:
    """The line of the call that is made whichever way the method takes."""
    file = tmp_path / "model.py"
    file.write_text(f"def __call__(self, x):\n try:\n  {body}\n finally:\n  pass\n")
    (tried,) = tried_lines(str(file))
    assert tried.calls == (None if line is None else (1, line))

"""Plain functions as models: :func:`instrument` wraps a function in a module that calls it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Module

from fxguard.errors import UsageError

__all__ = ["FunctionModule", "module_of"]


class FunctionModule(Module):
    """A function as a module that looks like the function and is called like it.

    Modules that the function reads, as variables of an enclosing function, as globals or as
    attributes of ``self``, become submodules under these names. So reports name them, and the
    gradients of their weights are checked.

    Attributes:
        function: the function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        if inspect.isfunction(function) or inspect.ismethod(function):
            # TorchDynamo then calls arguments and variables by their own names.
            vars(self)["forward"] = function
        for name, module in _modules_read_by(function):
            self.add_module(name, module)
        # Our attributes come later: if the function has one of the same name, ours stays.
        own = vars(self).copy()
        functools.update_wrapper(self, function)
        vars(self).update(own)

    def forward(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        # In the body of a class it becomes a method, as the function would.
        return self if owner is None else types.MethodType(self, owner)


def module_of(function: Any) -> FunctionModule:
    """A function as a module whose class has the function's name, as reports show it.

    Raises:
        FxguardError: when it is not a function, or not one that TorchDynamo can trace.
    """
    if isinstance(function, type):
        raise UsageError(
            f"{function.__name__} is a class; instrument an instance of it, or a function"
        )
    if not callable(function):
        what = type(function).__name__
        raise UsageError(f"instrument needs a torch.nn.Module or a function, got {what}")
    if isinstance(function, torch.jit.ScriptFunction):
        raise UsageError(
            "a TorchScript function has no Python code to capture; instrument the function that "
            "it was made from"
        )
    if hasattr(function, "_torchdynamo_orig_callable"):
        raise UsageError(
            "this is the result of torch.compile; instrument the function first, then compile "
            "it: torch.compile(fxguard.instrument(function))"
        )
    name = getattr(_innermost(function), "__name__", type(function).__name__)
    kind = type(name, (FunctionModule,), {"__module__": FunctionModule.__module__})
    return kind(function)  # type: ignore[no-any-return]


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _modules_read_by(function: Any) -> Iterator[tuple[str, Module]]:
    """Names and modules: those that the function finds by name, and those that its object holds."""
    inner = _innermost(function)
    found: dict[str, Any] = {}
    plain = inspect.unwrap(getattr(inner, "__func__", inner))
    if inspect.isfunction(plain):
        found = _variables_of(plain)
    owner = getattr(inner, "__self__", None)
    if isinstance(owner, Module):
        found["self"] = owner
    elif owner is not None:
        found |= getattr(owner, "__dict__", {})
    seen: set[int] = set()
    for name, value in found.items():
        if isinstance(value, Module) and id(value) not in seen and _is_free(name):
            seen.add(id(value))
            yield name, value


def _variables_of(function: types.FunctionType) -> dict[str, Any]:
    """Globals and variables of enclosing functions that a function reads and that have a value.

    A variable may get its value later: ``__class__``, which ``super()`` reads, or the function's
    own name.
    """
    code = function.__code__
    found = {
        name: function.__globals__[name] for name in code.co_names if name in function.__globals__
    }
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is empty
            found[name] = cell.cell_contents
    return found


def _is_free(name: str) -> bool:
    """Whether a module can have a submodule with this name."""
    return "." not in name and not hasattr(Module, name) and name not in ("function", "training")

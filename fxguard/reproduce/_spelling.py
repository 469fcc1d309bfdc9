"""One operation as Python source: its call, and the imports that the call needs."""

from __future__ import annotations

import importlib.util
import inspect
import keyword
import math
import operator
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxguard.graph.one_operation import OneOperation
from fxguard.graph.operations import is_custom
from fxguard.graph.wide_form import NotJudged
from fxguard.torch_names import OPDEFS, OpOverload, OpOverloadPacket

__all__ = ["Spelled", "spelled"]

# The preferred modules for a function that is in several modules.
PUBLIC = ("torch", "torch.nn.functional", "torch.special", "torch.linalg", "torch.fft", "math")

INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "matmul": "@",
}
PREFIX = {"neg": "-", "pos": "+", "invert": "~"}

# Names of operands if the operation has no names for them.
NAMES = ("x", "y", "z", "u", "v", "w")


@dataclass(frozen=True, slots=True)
class Spelled:
    """The source of an operation."""

    imports: tuple[str, ...]  # "import torch"
    names: tuple[str, ...]  # of the tensors among its arguments, in order
    lines: tuple[str, ...]  # the body of a function of these, which returns the requested result


def spelled(operation: OneOperation, returned: tuple[tuple[int, ...], ...] = ()) -> Spelled:
    """Write an operation as the body of a function of its tensors.

    Args:
        operation: the operation.
        returned: paths to the items of its result that the function returns; () for the requested
            one.

    Raises:
        NotJudged: when the operation or one of its arguments cannot be written.

    Example:
        >>> spelled(OneOperation("mul", operator.mul, (x, x))).lines
        ('return x * y',)
    """
    writer = _Writer(operation)
    called = writer.call()
    results = returned or (operation.path,)
    lines: list[str] = []
    if operation.written is not None:
        lines = [called, f"return {writer.name_of_argument(operation.written)}"]
    elif len(results) == 1:
        lines = [f"return {called}{_indexed(results[0])}"]
    else:
        items = ", ".join(f"made{_indexed(path)}" for path in results)
        lines = [f"made = {called}", f"return {items}"]
    if operation.autocast is not None:
        device = next((x.device.type for x in operation.tensors), "cpu")
        head = f'with torch.autocast("{device}", dtype={operation.autocast}):'
        lines = [head, *(f"    {line}" for line in lines)]
    imports = tuple(f"import {name}" for name in sorted({"torch", *writer.modules}))
    return Spelled(imports, tuple(writer.names.values()), tuple(lines))


def _indexed(path: tuple[int, ...]) -> str:
    return "".join(f"[{index}]" for index in path)


class _Writer:
    """Writes one call."""

    def __init__(self, operation: OneOperation) -> None:
        self.operation = operation
        self.modules: set[str] = set()
        # By position among the tensors, because one tensor may be given twice.
        self.names: dict[int, str] = {}
        self._next = 0
        wanted: dict[Any, str] = dict(_parameters_of(operation))
        for slot, value in (*enumerate(operation.args), *operation.kwargs.items()):
            for _ in _tensors_in(value):
                self._name(wanted.get(slot))

    def _name(self, wanted: str | None) -> None:
        position = len(self.names)
        known = {"torch", *self.names.values()}
        names = (wanted, *NAMES, f"x{position}")
        self.names[position] = next(
            name
            for name in names
            if name and name.isidentifier() and not keyword.iskeyword(name) and name not in known
        )

    def name_of_argument(self, position: int) -> str:
        """The name of an argument that is a tensor."""
        before = (_tensors_in(value) for value in self.operation.args[:position])
        return self.names[sum(len(list(found)) for found in before)]

    def call(self) -> str:
        """The call itself."""
        target, args = self.operation.target, list(self.operation.args)
        parts = [self.text(arg) for arg in args]
        defaults = _defaults_of(target)
        named = [
            f"{name}={self.text(value)}"
            for name, value in self.operation.kwargs.items()
            if name not in defaults or value is not defaults[name]
        ]
        if isinstance(target, str) or inspect.ismethoddescriptor(target):
            name = target if isinstance(target, str) else target.__name__
            return f"{parts[0]}.{name}({', '.join([*parts[1:], *named])})"
        name = getattr(target, "__name__", "")
        if getattr(operator, name, None) is target and not named:
            return self.operator(name, parts)
        return f"{self.function(target)}({', '.join([*parts, *named])})"

    def operator(self, name: str, parts: list[str]) -> str:
        """A function of the module ``operator``, written as its sign if that is known."""
        if name in INFIX and len(parts) == 2:
            return f"{parts[0]} {INFIX[name]} {parts[1]}"
        if name in PREFIX and len(parts) == 1:
            return f"{PREFIX[name]}{parts[0]}"
        if name == "getitem":
            return f"{parts[0]}[{parts[1]}]"
        if name == "setitem":
            return f"{parts[0]}[{parts[1]}] = {parts[2]}"
        self.modules.add("operator")
        return f"operator.{name}({', '.join(parts)})"

    def function(self, target: Any) -> str:
        """The name of a function, with its module."""
        if isinstance(target, (OpOverload, OpOverloadPacket)):
            self.modules.update(_registered_by(target))
            return f"torch.ops.{str(target).replace('::', '.')}"
        for module in (*PUBLIC, getattr(target, "__module__", None) or ""):
            if (name := _name_in(module, target)) is not None:
                self.modules.add(module.partition(".")[0] if module in PUBLIC else module)
                return f"{module}.{name}"
        raise NotJudged(f"{self.operation.kind} cannot be written as a call")

    def text(self, value: Any) -> str:
        """An argument."""
        if isinstance(value, Tensor):
            position = self._next
            self._next += 1
            return self.names[position]
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or value is Ellipsis or isinstance(value, (bool, int, float, str)):
            return "..." if value is Ellipsis else repr(value)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        if isinstance(value, torch.device):
            return f'torch.device("{value}")'
        bounds = (value.start, value.stop, value.step) if isinstance(value, slice) else ()
        if bounds and not any(isinstance(bound, Tensor) for bound in bounds):
            parts = ", ".join(map(self.text, bounds))
            return f"slice({parts})"
        if type(value) in (tuple, list, torch.Size):
            items = [self.text(item) for item in value]
            if isinstance(value, list):
                return f"[{', '.join(items)}]"
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if type(value) is dict:
            items = [f"{self.text(key)}: {self.text(item)}" for key, item in value.items()]
            return f"{{{', '.join(items)}}}"
        raise NotJudged(f"{self.operation.kind} was given a {type(value).__name__}")


def _name_in(module: str, target: Any) -> str | None:
    """A module's name for an object; None if it has no name for it."""
    names = vars(sys.modules[module]) if module in sys.modules else {}
    name = getattr(target, "__name__", "")
    found = [name] if names.get(name) is target else [n for n, v in names.items() if v is target]
    return next(iter(found), None)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument, in the order of writing."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)


def _parameters_of(operation: OneOperation) -> Iterator[tuple[int | str, str]]:
    """The operation's names for its arguments, if it has any."""
    yield from ((name, name) for name in operation.kwargs)
    target = operation.target
    names: list[str] = []
    if inspect.isfunction(target):
        names = list(inspect.signature(target).parameters)
    elif not isinstance(target, str) and getattr(operator, operation.kind, None) is not target:
        name = operation.kind if isinstance(operation.kind, str) else ""
        packet = getattr(torch.ops.aten, re.sub(r"\W", "_", name), None) if name else None
        packet = getattr(target, "overloadpacket", packet)
        if isinstance(packet, OpOverloadPacket):
            overload = getattr(packet, packet.overloads()[0])
            names = [argument.name for argument in overload._schema.arguments]
    for position, name in enumerate(names[: len(operation.args)]):
        yield position, "x" if name in ("self", "args") else name


def _defaults_of(target: Any) -> dict[str, Any]:
    """The default values of a function's parameters."""
    if not inspect.isfunction(target):
        return {}
    found = inspect.signature(target).parameters.values()
    return {each.name: each.default for each in found if each.default is not each.empty}


def _registered_by(target: Any) -> Iterator[str]:
    """The module whose import registers a custom operator."""
    if not is_custom(target):
        return
    name = getattr(target, "overloadpacket", target)._qualified_op_name
    definition = _definitions().get(name)
    module = getattr(getattr(definition, "_init_fn", None), "__module__", None)
    if module is None or module == "__main__" or not _can_import(module):
        raise NotJudged(
            f"{name} is a custom operation, and no module is known that registers it when it is "
            "imported"
        )
    yield module


def _definitions() -> Mapping[str, Any]:
    """Operators that were defined in Python, by name."""
    found: Mapping[str, Any] = OPDEFS
    return found


def _can_import(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False

"""Where NumPy has warned of a number that is not finite, and what the line computed it from.

Knows nothing of torch. Only texts are kept, no arrays.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from fxguard.records import Source
from fxguard.source.assigned import statement_node
from fxguard.source.lines import source_at
from fxguard.source.named import SIGNS, called_name
from fxguard.source.suspects import Bad, Suspected

__all__ = ["WARNED", "NumpyWarnings"]

MOST = 16  # places that are kept
MOST_ELEMENTS = 1_000_000  # of an array that is computed again
LONGEST = 50  # characters of an expression

_OF_NUMBERS = re.compile(
    r"(divide by zero|invalid value|overflow) encountered in (?:scalar )?(\w+)"
)
_OF_NONE = ("Mean of empty slice", "Degrees of freedom <= 0", "All-NaN slice encountered")
_SIGNS: Mapping[type[ast.operator], tuple[str, Any]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
}
_OPERATORS: Mapping[str, type[ast.operator]] = {
    "add": SIGNS["add"],
    "divide": SIGNS["div"],
    "multiply": SIGNS["mul"],
    "power": SIGNS["pow"],
    "subtract": SIGNS["sub"],
    "true_divide": SIGNS["div"],
}
# They make NaN of infinities, too.
_OF_INFINITIES = ("add", "matmul", "multiply", "reduce", "subtract")
_WHY = {
    ("divide by zero", "log"): "log(0) is -inf; of a count take log1p, else a floor by np.maximum",
    ("divide by zero", "divide"): "choose the divisor d = {} by np.where(d == 0, 1, d)",
    ("divide by zero", "power"): "0 to a negative power is inf",
    ("invalid value", "log"): "log is NaN of a negative number",
    ("invalid value", "sqrt"): "sqrt is NaN of a negative number",
    ("invalid value", "power"): "a fractional power of a negative number is NaN",
    (
        "invalid value",
        "divide",
    ): "0 / 0 is NaN; choose the divisor d = {} by np.where(d == 0, 1, d)",
    ("overflow", "exp"): "exp is inf for large numbers",
    ("overflow", "cast"): "the number is too large for the dtype",
}


@dataclass(frozen=True, slots=True)
class _Warned:
    """One warning."""

    event: str  # "divide by zero"; "" of what an empty array gave
    name: str  # "log"
    at: Source
    text: str  # "np.log(echo + 1) (data.py:24), where NumPy warned ..."

    @property
    def is_infinite(self) -> bool:
        """Whether an infinity was made, not a NaN."""
        return self.event in ("divide by zero", "overflow")


class NumpyWarnings:
    """What NumPy has warned of in this process, the latest last.

    Example:
        >>> WARNED.suspected(Bad(has_nan=False, has_plus=False, has_minus=True, count=1)).text
        'look at np.log(echo + 1) (data.py:24), where NumPy warned "divide by zero encountered ...'
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, str], _Warned] = {}

    def note(self, message: str, frame: FrameType | None) -> None:
        """Take a warning that is about to be shown, if it is NumPy's and of numbers.

        Args:
            message: its text.
            frame: the innermost that runs: NumPy's functions in Python are stepped over.
        """
        found = _OF_NUMBERS.match(message)
        if found is None and not message.startswith(_OF_NONE):
            return
        while frame is not None and frame.f_globals.get("__name__", "").startswith("numpy."):
            frame = frame.f_back
        if frame is None:
            return
        event, name = found.groups() if found is not None else ("", "")
        at = source_at((frame.f_code.co_filename, frame.f_lineno))
        known = {**frame.f_globals, **frame.f_locals}
        text = _in_words(message.rstrip("."), event, name, at, known)
        self._found[at.file, at.line, message] = _Warned(event, name, at, text)
        if len(self._found) > MOST:
            del self._found[next(iter(self._found))]  # the oldest

    def clear(self) -> None:
        """Forget all, when a script begins."""
        self._found.clear()

    def suspected(self, bad: Bad) -> tuple[Suspected, tuple[Source, ...]] | None:
        """What explains what a tensor holds, and its lines; None if no warning does.

        That is the latest warning of such numbers, or the one before of what became a NaN there.
        """
        found = [*self._found.values()]
        ends = [i for i, each in enumerate(found) if _explains(each, bad)]
        if not ends:
            return None
        told = last = found[ends[-1]]
        if told.name in _OF_INFINITIES:  # inf - inf, after what made the infinity
            told = next((x for x in reversed(found[: ends[-1]]) if x.is_infinite), told)
        told = next(x for x in found if x.at == told.at)  # the first of its line
        return Suspected(f"look at {told.text}", was_seen=True), (told.at, last.at)


def _explains(each: _Warned, bad: Bad) -> bool:
    if bad.has_nan:
        return not each.is_infinite
    is_log = each.name.startswith("log")
    return each.is_infinite and (bad.has_minus if is_log else bad.has_plus or bad.has_minus)


# Of this process.
WARNED = NumpyWarnings()


def _in_words(message: str, event: str, name: str, at: Source, known: Mapping[str, Any]) -> str:
    statement = statement_node(at)
    nodes = [] if statement is None else [x for x in ast.walk(statement) if _is_of(x, name)]
    node = nodes[0] if len(nodes) == 1 else None
    shown = at.code if node is None else ast.unparse(node)
    shown = shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"
    text = f'{shown} ({at.place}), where NumPy warned "{message}"'
    reasons = [] if node is None else [*_wrapped(node, known)]
    if node is not None and event == "overflow":
        reasons += _narrow(node, known)
    if reasons:
        return f"{text}: {reasons[0]}"
    kind = "divide" if name == "true_divide" else re.sub(r"^log\w+", "log", name)
    why = _WHY.get((event, kind), "")
    if "{}" in why:
        divisor = ast.unparse(node.right) if isinstance(node, ast.BinOp) else ""
        why = why.format(divisor) if 0 < len(divisor) <= LONGEST else ""
    return f"{text}: {why}" if why else text


def _is_of(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call):
        return called_name(node) == name
    return isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS.get(name, ()))


def _wrapped(node: ast.AST, known: Mapping[str, Any]) -> Iterator[str]:
    """What is computed in a dtype of integers that does not hold it."""
    for each in ast.walk(node):
        if not isinstance(each, ast.BinOp) or type(each.op) not in _SIGNS:
            continue
        sign, compute = _SIGNS[type(each.op)]
        operands = [_whole(side, known) for side in (each.left, each.right)]
        arrays = [x for x in operands if hasattr(x, "dtype")]
        if not arrays or any(x is None for x in operands):
            continue
        narrow = compute(*operands)
        wide = compute(*(x.astype("int64") if hasattr(x, "dtype") else x for x in operands))
        if not (narrow != wide).any():
            continue
        first = int((narrow != wide).argmax())
        one, other = (int((arrays[0] * 0 + x).flat[first]) for x in operands)
        name = ast.unparse(each.left if arrays[0] is operands[0] else each.right)
        yield (
            f"`{name}` is {arrays[0].dtype}, in which {one} {sign} {other} is "
            f"{int(narrow.flat[first])}; convert it first, {name}.astype(np.float32)"
        )


def _narrow(node: ast.AST, known: Mapping[str, Any]) -> Iterator[str]:
    """What is computed in half precision."""
    for each in ast.walk(node):
        found = _value(each, known)
        if _is_array(found) and found.dtype.name == "float16":
            name = ast.unparse(each)
            yield (
                f"`{name}` is float16, whose maximum is 65504; convert it first, "
                f"{name}.astype(np.float32)"
            )


def _whole(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """An array of whole numbers or a number that a variable or a constant is; else None."""
    found = _value(node, known)
    if type(found) is int:
        return found
    is_whole = _is_array(found) and found.dtype.kind in "iu" and 0 < found.size <= MOST_ELEMENTS
    return found if is_whole else None


def _value(node: ast.AST, known: Mapping[str, Any]) -> Any:
    """What a constant, a variable, an attribute or an entry of a dictionary is; else None."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return getattr(known.get(node.value.id), "__dict__", {}).get(node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = _value(node.value, known)
        return owner.get(node.slice.value) if type(owner) is dict else None
    return None


def _is_array(found: Any) -> bool:
    return type(found).__module__ == "numpy" and type(found).__name__ == "ndarray"

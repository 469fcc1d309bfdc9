"""What in a statement of a script can make an inf or a NaN, where nobody saw the numbers.

The operations with a pole or a domain are named with their lines, also in a function of the same
file that the statement calls. Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from fxguard.records import Source
from fxguard.source.assigned import function_called_in, statement_node
from fxguard.source.named import called_name, operand_text

__all__ = ["Bad", "Suspected", "suspects_in"]

LONGEST = 50  # characters of one of them
MOST_NAMED = 2


@dataclass(frozen=True, slots=True)
class Bad:
    """What a tensor holds."""

    has_nan: bool
    has_plus: bool  # +inf
    has_minus: bool  # -inf
    count: int  # of its elements
    of_counts: bool = False  # whether its finite elements are logarithms of whole numbers
    is_all: bool = False  # whether every element is bad


@dataclass(frozen=True, slots=True)
class Suspected:
    """What may have made a value."""

    text: str  # "a.std() of a single element is NaN: take more elements, or std(correction=0)"
    of: str = ""  # the operation that a rewrite is about, if one certainly helps
    line: int = 0  # its line
    at: Source | None = None  # likewise, with its text
    rewrites: tuple[str, ...] = ()  # as in :class:`~fxguard.findings.Fix`
    was_seen: bool = False  # whether something has told of it as it ran


@dataclass(frozen=True, slots=True)
class _Suspect:
    name: str  # "exp"
    text: str  # "torch.exp(scores / 0.04)"
    line: int


_LOGS = ("log", "log10", "log2")
_ROOTS = ("sqrt", "rsqrt")
_SPREADS = ("std", "var")
_EXPONENTIALS = ("exp", "exp2")
_INVERSES = ("acos", "asin", "arccos", "arcsin", "atanh", "arctanh", "erfinv", "logit")
_REDUCTIONS = ("scatter_reduce", "scatter_reduce_", "index_reduce", "index_reduce_")
_FILLED = "filled with -inf"
_FILLS = ("full", "full_like", "new_full", "masked_fill", "masked_fill_", "fill_")
_KNOWN = (*_LOGS, *_ROOTS, *_SPREADS, *_EXPONENTIALS, *_INVERSES, *_REDUCTIONS, "div", _FILLED)


def suspects_in(assigned: Source, bad: Bad) -> Suspected | None:
    """What may have made a value, with the reason; None if the statement holds no candidate.

    Args:
        assigned: the statement that gave the value.
        bad: what the value holds.

    Example:
        >>> line = assignment_of("a", read_at)  # a = (a - a.mean()) / a.std()
        >>> suspects_in(line, Bad(has_nan=True, has_plus=False, has_minus=False, count=1)).text
        'a.std() of a single element is NaN: take more elements, or std(correction=0)'
    """
    statement = statement_node(assigned)
    found = [] if statement is None else list(_in(statement))
    called = None if statement is None or found else function_called_in(statement, assigned.file)
    found = found if called is None else list(_in(called))
    by_name = {each.name: each for each in reversed(found)}
    spread = next((by_name[name] for name in _SPREADS if name in by_name), None)
    is_single = bad.has_nan and bad.count == 1 and called is None
    if spread is not None and is_single and statement is not None and _scales(statement, spread):
        name = spread.name
        return Suspected(
            f"{spread.text} of a single element is NaN: take more elements, or "
            f"{name}(correction=0)",
            name,
            spread.line,
            rewrites=(f"{name}(...) -> {name}(..., correction=0)",),
        )
    reasons = list(_reasons(by_name, bad))
    if not reasons:
        return None
    names, why = reasons[0]
    told = [by_name[name] for name in names if name in by_name][:MOST_NAMED]
    if bad.of_counts and names[0] == "log" and called is None and len(_logs(found)) == 1:
        line = by_name["log"].line
        return Suspected(
            f"take log1p in place of {by_name['log'].text}: the numbers are counts, and log(0) is "
            "-inf",
            "log",
            line,
            rewrites=("log(a) -> log1p(a)",),
        )
    places = [Source(assigned.file, each.line, "").place for each in told]
    texts = [f"{each.text} ({place})" for each, place in zip(told, places, strict=True)]
    return Suspected(f"look at {' and '.join(texts)}: {why}")


def _logs(found: list[_Suspect]) -> list[_Suspect]:
    return [each for each in found if each.name in _LOGS]


def _reasons(found: dict[str, _Suspect], bad: Bad) -> Iterator[tuple[tuple[str, ...], str]]:
    """The kinds of operations that explain what is bad, the likeliest first."""
    exps = tuple(name for name in _EXPONENTIALS if name in found)
    if exps and bad.has_nan and "div" in found:
        yield (
            exps,
            "exp is inf for large numbers, and inf / inf is NaN; subtract the maximum first, or "
            "work with logarithms",
        )
    if _FILLED in found and not bad.has_nan and bad.has_minus and not bad.has_plus:
        why = (
            "what it fills stays -inf: fill it with 0, or choose by the mask before the arithmetic"
        )
        yield (_FILLED,), why
    reductions = tuple(name for name in _REDUCTIONS if name in found)
    if reductions and not bad.has_nan and bad.has_minus != bad.has_plus:
        why = "rows into which it puts nothing keep what they began with: put 0 there, masked_fill"
        yield reductions, why
    if bad.has_nan:
        for names in (_LOGS, _ROOTS, _INVERSES):
            if here := tuple(name for name in names if name in found):
                yield here, f"{here[0]} is NaN outside its domain"
        here = tuple(name for name in _SPREADS if name in found)
        if here and (bad.is_all or "div" not in found):
            yield here, f"{here[0]} of a single element is NaN"
        if "div" in found:
            why = f"; divide by 1 where {found[here[0]].text} is 0" if here else ""
            yield ("div",), f"0 / 0 is NaN{why}"
    elif bad.has_minus and not bad.has_plus:
        if here := tuple(name for name in _LOGS if name in found):
            yield here, "log(0) is -inf"
    else:
        if exps:
            yield exps, "exp is inf for large numbers"
        if "div" in found:
            yield ("div",), "a division by 0 gives inf"


def _scales(statement: ast.AST, spread: _Suspect) -> bool:
    """Whether the statement also computes with the elements whose spread it takes."""
    operand = operand_text(spread.text, spread.name)
    sides = [x for node in ast.walk(statement) if isinstance(node, ast.BinOp)
             for x in (node.left, node.right)]  # fmt: skip
    return operand in map(ast.unparse, sides)


def _in(node: ast.AST) -> Iterator[_Suspect]:
    """The candidates in a statement or a function, in the order of their lines."""
    found = [each for child in ast.walk(node) for each in _of(child)]
    yield from sorted(found, key=lambda each: each.line)


def _has_eps(divisor: ast.expr) -> bool:
    """Whether a number is added to a divisor."""
    if not isinstance(divisor, ast.BinOp) or not isinstance(divisor.op, ast.Add):
        return False
    return any(isinstance(each, ast.Constant) for each in (divisor.left, divisor.right))


def _is_minus_infinity(node: ast.expr) -> bool:
    """Whether it is ``float("-inf")``, ``-math.inf`` or the like."""
    text = ast.unparse(node).lower().replace("'", "")
    return text in ("float(-inf)", "-float(inf)", "-inf", "-math.inf", "-np.inf", "-torch.inf")


def _of(node: ast.AST) -> Iterator[_Suspect]:
    if not isinstance(node, (ast.AugAssign, ast.BinOp, ast.Call)):
        return
    if isinstance(node, ast.Call):
        name = called_name(node)
        if name in _FILLS and node.args and _is_minus_infinity(node.args[-1]):
            name = _FILLED
    else:
        divisor = node.value if isinstance(node, ast.AugAssign) else node.right
        divides = isinstance(node.op, ast.Div) and not isinstance(divisor, ast.Constant)
        name = "div" if divides and not _has_eps(divisor) else ""
    if name in _KNOWN:
        text = ast.unparse(node)
        text = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
        yield _Suspect(name, text, node.lineno)

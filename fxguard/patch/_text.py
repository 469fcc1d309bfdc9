"""Changes in the text of a file: exact spans of expressions, and what surely stays as it was.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
import difflib
import io
import itertools
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Change", "FileText", "changed", "unified"]


@dataclass(frozen=True)
class Change:
    """One expression or statement of a file, and what comes in its place."""

    node: ast.expr | ast.stmt
    text: str  # statements for a statement, each without indentation; "" takes it out


class FileText:
    """The text of a file with the offsets of its nodes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = _lines(text)
        self._starts = [0, *itertools.accumulate(map(len, self._lines))]

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Begin and end of a node, in characters."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(node.end_lineno, node.end_col_offset),
        )

    def of(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node."""
        begin, end = self.span(node)
        return self.text[begin:end]

    def with_changes(self, node: ast.expr, changes: Sequence[Change]) -> str:
        """The text of a node with changes inside it."""
        begin, end = self.span(node)
        text = self.text[:end]
        for change in sorted(changes, key=lambda each: self.span(each.node), reverse=True):
            first, last = self.span(change.node)
            text = text[:first] + change.text + text[last:]
        return text[begin:]

    def line(self, number: int) -> str:
        """A line without indentation, counted from 1; "" beyond the end."""
        return self._lines[number - 1].strip() if 0 < number <= len(self._lines) else ""

    def whole_lines(self, node: ast.stmt) -> tuple[int, int] | None:
        """The span of the lines of a statement; None if they hold anything else."""
        assert node.end_lineno is not None
        begin, end = self._starts[node.lineno - 1], self._starts[node.end_lineno]
        first, last = self.span(node)
        rest = self.text[begin:first] + self.text[last:end].partition("#")[0]
        return None if rest.strip() else (begin, end)

    def _offset(self, line: int, column: int) -> int:
        """The ast counts columns in UTF-8."""
        before = self._lines[line - 1].encode()[:column]
        return self._starts[line - 1] + len(before.decode())


def changed(old: FileText, changes: Sequence[Change]) -> str | None:
    """The text of a file with changes; None if it would not be exactly that.

    Parentheses are added where they are needed, and nowhere else: the syntax tree of the new text
    is that of the old text with each node exchanged. No comment is lost.
    """
    wanted = _wanted(old.text, changes)
    for ways in itertools.product(_WAYS, repeat=len(changes)):
        new = _applied(old, [*zip(changes, ways, strict=True)])
        if new is None:
            continue
        try:
            is_wanted = ast.dump(ast.parse(new)) == wanted
        except SyntaxError:
            continue
        if is_wanted:
            return new if _comments(new) == _comments(old.text) else None
    return None


# What becomes of the parentheses around an expression: they go with it, stay, or are added.
_WAYS = ("without", "as it is", "held")


def _applied(old: FileText, changes: Sequence[tuple[Change, str]]) -> str | None:
    spans = list[tuple[int, int, str]]()
    for change, way in changes:
        if isinstance(change.node, ast.stmt):
            lines = old.whole_lines(change.node)
            if lines is None:
                return None
            indent = old.text[lines[0] : old.span(change.node)[0]]
            text = change.text.replace("\n", f"\n{indent}")
            spans.append((*old.span(change.node), text) if text else (*lines, ""))
            continue
        begin, end = old.span(change.node)
        text = f"({change.text})" if way == "held" else change.text
        if way == "without":
            before, after = old.text[:begin], old.text[end:]
            is_call = before[-2:-1].isalnum() or before[-2:-1] in ("_", ")", "]")
            if not (before.endswith("(") and after.startswith(")")) or is_call:
                return None
            begin, end = begin - 1, end + 1
        spans.append((begin, end, text))
    new = old.text
    for begin, end, text in sorted(spans, reverse=True):
        new = new[:begin] + text + new[end:]
    return new


_Key = tuple[type, int, int, int | None, int | None]


def _key(node: ast.expr | ast.stmt) -> _Key:
    return type(node), node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _wanted(text: str, changes: Sequence[Change]) -> str:
    """The syntax tree of the new text."""
    new = {_key(x.node): _parsed(x) for x in changes}

    class Exchange(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            if isinstance(node, (ast.expr, ast.stmt)) and (key := _key(node)) in new:
                return new[key]
            return self.generic_visit(node)

    tree = ast.parse(text)
    Exchange().visit(tree)
    return ast.dump(tree)


def _parsed(change: Change) -> ast.expr | list[ast.stmt]:
    if isinstance(change.node, ast.stmt):
        return ast.parse(change.text).body
    return ast.parse(f"({change.text}\n)", mode="eval").body


def _comments(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sorted(token.string for token in tokens if token.type == tokenize.COMMENT)


def unified(old: str, new: str, name: str) -> str:
    """A unified diff, as ``patch -p1`` and ``git apply`` read it.

    Args:
        old: the text.
        new: the text with the changes.
        name: of the file; a relative name begins with ``a/`` and ``b/``.
    """
    is_relative = not name.startswith("/")
    names = (f"a/{name}", f"b/{name}") if is_relative else (name, name)
    lines = difflib.unified_diff(_lines(old), _lines(new), *names)
    return "".join(_ended(lines))


def _lines(text: str) -> list[str]:
    """Lines as Python counts them: a form feed ends none."""
    return io.StringIO(text, newline="").readlines()


def _ended(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"

"""Finds the expression of a rule in the user's file: ``log(1 - sigmoid(x))``.

A rule writes functions of torch by their names, and operands as letters. Names of the file that
were certainly computed by one statement stand for what that statement computes. Knows nothing of
torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fxguard.patch._definitions import Definitions
from fxguard.patch._operations import OF_RULES, Imports, Operation, number_in

__all__ = ["Found", "Matcher"]

_COMMUTES = ("add", "mul")
LARGEST_EPS = 1e-2  # an added number up to this is an eps
MOST_DEFINITIONS = 4  # in one match


@dataclass(frozen=True)
class Found:
    """Where a rule's expression stands."""

    operands: dict[str, ast.expr | None] = field(default_factory=dict)  # by the rule's letters
    # The operations of the rule, each with that of the file.
    operations: tuple[tuple[ast.expr, ast.expr], ...] = ()
    letters: tuple[tuple[ast.expr, ast.expr | None], ...] = ()  # likewise, and numbers
    definitions: tuple[ast.Assign, ...] = ()  # statements whose variable was looked through

    def stands_for(self, rule: ast.expr) -> ast.expr | None:
        """What stands in the file where the rule has a letter or an operation."""
        pairs = (*self.operations, *self.letters)
        return next((node for each, node in pairs if each is rule), None)

    @property
    def root(self) -> ast.expr:
        """The whole expression."""
        return self.operations[0][1]


@dataclass(frozen=True)
class Matcher:
    """Compares rules with expressions of one file."""

    definitions: Definitions
    imports: Imports

    def found(self, rule: ast.expr, node: ast.expr) -> Found | None:
        """The operands of a rule in an expression; None if it is another one."""
        first = next(self._each(rule, node, Found()), None)
        if first is None or not first.operations or first.root is not node:
            return None
        statement = self.definitions.statement_of(node)
        same = (self.definitions.is_same_at(each, statement) for each in first.definitions)
        return first if all(same) else None

    def _each(self, rule: ast.expr, node: ast.expr | None, so_far: Found) -> Iterator[Found]:
        if isinstance(rule, ast.Name) and len(rule.id) == 1:
            known = replace(so_far, letters=(*so_far.letters, (rule, node)))
            yield from self._operand(rule.id, node, known)
            return
        if isinstance(rule, ast.Constant) and isinstance(rule.value, (bool, type(None))):
            is_alike = isinstance(node, ast.Constant) and node.value is rule.value
            if is_alike or (node is None and rule.value is None):
                yield so_far
            return
        if node is None:
            return
        if (wanted := number_in(rule, OF_RULES)) is not None:
            if number_in(node, self.imports) == wanted:
                yield replace(so_far, letters=(*so_far.letters, (rule, node)))
            return
        for each, known in self._looked_through(node, so_far):
            yield from self._operation(rule, each, known)

    def _operand(self, letter: str, node: ast.expr | None, so_far: Found) -> Iterator[Found]:
        if letter not in so_far.operands:
            if node is None and letter == "d":
                return  # a dimension that the call leaves out
            if letter in "ne" and number_in(node, self.imports) is None:
                return  # these letters are numbers
            yield replace(so_far, operands={**so_far.operands, letter: node})
            return
        known = so_far.operands[letter]
        if known is None or node is None:
            if known is node:
                yield so_far
            return
        for each, found in self._looked_through(node, so_far):
            for other, both in self._looked_through(known, found):
                if ast.dump(each) == ast.dump(other):
                    yield both
                    return

    def _looked_through(self, node: ast.expr, so_far: Found) -> Iterator[tuple[ast.expr, Found]]:
        """An expression; what gave the variable its value; what was bounded, or got an eps."""
        yield node, so_far
        if isinstance(node, ast.Name) and len(so_far.definitions) < MOST_DEFINITIONS:
            given = self.definitions.definition(node)
            if given is not None:
                known = so_far.definitions
                known = known if given in known else (*known, given)
                yield from self._looked_through(given.value, replace(so_far, definitions=known))
            return
        if so_far.operations and (inner := self._bounded(node)) is not None:
            yield from self._looked_through(inner, so_far)

    def _bounded(self, node: ast.expr) -> ast.expr | None:
        found = self.imports.operation(node)
        if found is None or not found.operands:
            return None
        first, *others = found.operands
        numbers = [number_in(each, self.imports) for each in others if each is not None]
        if found.name == "clamp" and numbers and None not in numbers:
            return first
        if found.name == "add" and numbers[:1] != [None]:
            return first if abs(numbers[0] or 0) <= LARGEST_EPS else None
        return None

    def _operation(self, rule: ast.expr, node: ast.expr, so_far: Found) -> Iterator[Found]:
        wanted, got = OF_RULES.operation(rule), self.imports.operation(node)
        if wanted is None or got is None or wanted.name != got.name:
            return
        has_rest, wanted = without_rest(wanted)
        if not has_rest and (
            len(wanted.operands) != len(got.operands)
            or wanted.keywords.keys() != got.keywords.keys()
        ):
            return
        if has_rest and len(got.operands) < len(wanted.operands):
            return
        known = replace(so_far, operations=(*so_far.operations, (rule, node)))
        for operands in _orders(got):
            yield from self._operands(wanted, operands, got, known)

    def _operands(
        self,
        wanted: Operation,
        operands: tuple[ast.expr | None, ...],
        got: Operation,
        so_far: Found,
    ) -> Iterator[Found]:
        pairs = [*zip(wanted.operands, operands, strict=False)]
        pairs += [(value, got.keywords.get(name)) for name, value in wanted.keywords.items()]

        def rest(position: int, known: Found) -> Iterator[Found]:
            if position == len(pairs):
                yield known
                return
            rule, node = pairs[position]
            if rule is None:
                if node is None:
                    yield from rest(position + 1, known)
                return
            for each in self._each(rule, node, known):
                yield from rest(position + 1, each)

        yield from rest(0, so_far)


def _orders(got: Operation) -> Iterator[tuple[ast.expr | None, ...]]:
    yield got.operands
    if got.name in _COMMUTES:
        yield got.operands[::-1]


def without_rest(wanted: Operation) -> tuple[bool, Operation]:
    """Whether a rule leaves further arguments open, ``std(...)``, and the operation without."""
    is_open = [isinstance(x, ast.Constant) and x.value is ... for x in wanted.operands]
    if not any(is_open):
        return False, wanted
    kept = tuple(x for x, opens in zip(wanted.operands, is_open, strict=True) if not opens)
    return True, replace(wanted, operands=kept)

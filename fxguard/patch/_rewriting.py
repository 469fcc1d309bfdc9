"""Rewrites an expression of the user's file as a rule says: ``log(1 - sigmoid(x))``.

A rule is the text ``old -> new``. Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fxguard.graph.poles import SPREADS
from fxguard.graph.tables import CASTS
from fxguard.patch._definitions import Definitions
from fxguard.patch._matching import Found, Matcher
from fxguard.patch._operations import OF_RULES, Imports, Operation, number_in, plain_name
from fxguard.patch._rendering import ATOM, CannotRender, Renderer, precedence_of
from fxguard.patch._text import Change, FileText

__all__ = ["IN_FLOAT32", "SCALED_STEP", "Refused", "Rewriter", "sides_of"]

ARROW = " -> "
# An optimizer's step that a scaler has to make, with what belongs to it.
SCALED_STEP = "o.step() -> s.step(o)"
IN_FLOAT32 = " -> float32"
BINARY = ("add", "div", "mul", "pow", "sub")
PROMOTED = ("matmul", "linear", "conv1d", "conv2d", "conv3d")  # these do not promote an operand


class Refused(Exception):  # noqa: N818 - a reason, which reaches the user
    """Why there is no patch."""


def sides_of(rule: str) -> tuple[ast.expr, ast.expr]:
    """The old and the new expression of a rule.

    Example:
        >>> [ast.unparse(side) for side in sides_of("log(sigmoid(x)) -> logsigmoid(x)")]
        ['log(sigmoid(x))', 'logsigmoid(x)']
    """
    old, new = rule.split(ARROW)
    return ast.parse(old, mode="eval").body, ast.parse(new, mode="eval").body


@dataclass(frozen=True)
class Rewriter:
    """Rewrites expressions of one file.

    Args:
        text: the file.
        definitions: its statements.
        imports: its names for torch.
        is_pure: whether a method or a function of torch of that name only computes.
    """

    text: FileText
    definitions: Definitions
    imports: Imports
    is_pure: Callable[[str], bool]

    def changes(
        self, rule: str, operation: str, line: int, *, both_tensors: bool = False
    ) -> list[Change] | None:
        """The changes that make a rule's old expression the new one, around a failing operation.

        Args:
            rule: ``log(sigmoid(x)) -> logsigmoid(x)``.
            operation: plain name of the operation that failed.
            line: the line that it stands in.
            both_tensors: whether its operands are known to be tensors, and not numbers.

        Returns:
            None if no such expression stands there.

        Raises:
            Refused: when it is not certain which expression it is, or what it means.
        """
        if rule == SCALED_STEP:
            return self.scaled_step(line)
        scope = self.definitions.scope_at(line)
        blamed = [
            node
            for node in self.definitions.expressions_in(scope)
            if self._is(node, operation) and node.lineno <= line <= (node.end_lineno or line)
        ]
        if not blamed:
            raise Refused(f"the line has no expression that is certainly this {operation}")
        if rule.endswith(IN_FLOAT32):
            names = rule.removesuffix(IN_FLOAT32).split(", ")
            return self.in_float32(names, blamed, both_tensors=both_tensors)
        old, new = sides_of(rule)
        matcher = Matcher(self.definitions, self.imports)
        matches = [
            each
            for node in self.definitions.expressions_in(scope)
            if (each := matcher.found(old, node))
        ]
        tests = self._is_of, self._is_in, self._is_read_by
        found = next((x for test in tests if (x := [y for y in matches if test(y, blamed)])), [])
        if not found:
            return None
        if len(found) > 1:
            raise Refused(
                f"{len(found)} expressions there are {ast.unparse(old)}: which of them failed is "
                "not certain"
            )
        return self._changes(found[0], old, new, blamed)

    def in_float32(
        self, names: list[str], blamed: list[ast.expr], *, both_tensors: bool
    ) -> list[Change]:
        """The changes that run operations of one expression, or of two statements, in float32.

        Args:
            names: of the operations; the first is the one that failed.
            blamed: the expressions that may be that one.
            both_tensors: whether the operands of the failing one are all tensors.

        Raises:
            Refused: where the operations are not of one expression, or that is not certain.
        """
        others = list(map(plain_name, names[1:]))
        tops = [(node, top) for node in blamed if (top := self._outermost(node, others))]
        if not tops:
            raise Refused("the operations are not those of one expression")
        if len(tops) > 1:
            raise Refused(
                f"{len(tops)} expressions there are {names[0]}: which of them failed is not certain"
            )
        [(failing, top)] = tops
        first = self.imports.operation(failing)
        assert first is not None
        operand = self._tensor_of(first, both_tensors=both_tensors)
        if first.name in PROMOTED or any(name in PROMOTED for name in others):
            raise Refused("these operations take no operands of different dtypes")
        if any(name in CASTS for name in others):
            raise Refused("one of these operations is a cast")
        if not self._computes(operand):
            raise Refused(f"`{self.text.of(operand)}` may be another value if it is run again")
        text, binds = self.text.of(operand), precedence_of(operand)
        held = text if binds == ATOM else f"({text})"
        inner = Change(operand, f"{held}.float()")
        begin, end = self.definitions.statement_of(operand), self.definitions.statement_of(top)
        whole = self.text.with_changes(top, [inner] if begin is end else [])
        whole = whole if precedence_of(top) == ATOM else f"({whole})"
        outer = Change(top, f"{whole}.to({held}.dtype)")
        if begin is end:
            return [outer]
        read = {x.id for x in ast.walk(operand) if isinstance(x, ast.Name)}
        if self.definitions.are_written_between(read, begin, end):
            raise Refused(f"`{text}` may be another value when the dtype is taken back")
        return [inner, outer]

    def _tensor_of(self, operation: Operation, *, both_tensors: bool) -> ast.expr:
        """The operand of an operation that is certainly a tensor."""
        if operation.name not in BINARY:
            found = [x for x in operation.operands[:1] if x is not None]
        else:
            known = [x for x in operation.operands[:2] if x is not None]
            found = [x for x in known if number_in(x, self.imports) is None]
            if len(found) > 1 and not both_tensors:
                raise Refused("which of its operands is a tensor is not certain")
        if not found:
            raise Refused("it has no operand that is certainly a tensor")
        return found[0]

    def scaled_step(self, line: int) -> list[Change] | None:
        """The changes that let a scaler make the optimizer's step of a line.

        Raises:
            Refused: where the file does more with the scaler than to scale a loss.
        """
        scope = self.definitions.scope_at(line)
        calls = [x for x in self.definitions.expressions_in(scope) if isinstance(x, ast.Call)]
        steps = [
            x for x in calls if x.lineno == line and _method_of(x) == "step" and not x.args
            and isinstance(self.definitions.parents[x], ast.Expr)
        ]  # fmt: skip
        scaled = [x for x in calls if _method_of(x) == "scale" and len(x.args) == 1]
        scalers = {ast.unparse(x.func.value) for x in scaled if isinstance(x.func, ast.Attribute)}
        if len(steps) != 1 or len(scalers) != 1:
            return None
        [step], [scaler] = steps, scalers
        assert isinstance(step.func, ast.Attribute)
        optimizer = self.text.of(step.func.value)
        others = {
            x.func.attr
            for x in calls
            if isinstance(x.func, ast.Attribute) and ast.unparse(x.func.value) == scaler
        }
        if others != {"scale"}:
            raise Refused(f"the program calls {scaler}.{min(others - {'scale'})} itself")
        statement = self.definitions.statement_of(step)
        changes = [Change(statement, f"{scaler}.step({optimizer})\n{scaler}.update()")]
        clips = [self.definitions.statement_of(x) for x in calls if _method_of(x) in CLIPS]
        for each in clips:
            if self.definitions.parents[each] is not self.definitions.parents[statement]:
                raise Refused(f"line {each.lineno} clips gradients, perhaps of another step")
            unscaled = f"{scaler}.unscale_({optimizer})\n{self.text.of(each)}"
            changes.append(Change(each, unscaled))
        if len(clips) > 1:
            raise Refused("the program clips gradients more than once")
        return changes

    def _outermost(self, node: ast.expr, names: list[str]) -> ast.expr | None:
        """The last of some operations, each of which reads the one before; None if they do not."""
        parents, names = self.definitions.parents, list(names)
        while names:
            above = parents[node]
            if isinstance(above, ast.Attribute) and isinstance(parents[above], ast.Call):
                above = parents[above]  # the method of an operand
            if isinstance(above, ast.Assign) and len(loads := self._loads(above)) == 1:
                node = loads[0]
                continue
            found = self.imports.operation(above) if isinstance(above, ast.expr) else None
            if found is None or found.name not in names or node not in found.operands:
                return None
            assert isinstance(above, ast.expr)
            names.remove(found.name)
            node = above
        return node

    def _loads(self, assigned: ast.Assign) -> list[ast.Name]:
        is_name = len(assigned.targets) == 1 and isinstance(assigned.targets[0], ast.Name)
        return self.definitions.loads_of(assigned) if is_name else []

    def _is(self, node: ast.expr, name: str) -> bool:
        found = self.imports.operation(node)
        return found is not None and found.name == plain_name(name)

    @staticmethod
    def _is_of(found: Found, blamed: list[ast.expr]) -> bool:
        """Whether the failing operation is one of a rule's expression."""
        return any(node in blamed for _, node in found.operations)

    def _is_in(self, found: Found, blamed: list[ast.expr]) -> bool:
        """Whether the expression stands in the failing operation."""
        return any(each in blamed for each in self.definitions.around(found.root))

    def _is_read_by(self, found: Found, blamed: list[ast.expr]) -> bool:
        """Whether the failing operation reads a variable that the expression gave its value."""
        around = set(self.definitions.around(found.root))
        names = (x for each in blamed for x in ast.walk(each) if isinstance(x, ast.Name))
        given = (self.definitions.definition(x) for x in names if isinstance(x.ctx, ast.Load))
        return any(each is not None and each in around for each in given)

    def _changes(
        self, found: Found, old: ast.expr, new: ast.expr, blamed: list[ast.expr]
    ) -> list[Change]:
        for each in (found.root, *(node for _, node in found.operations)):
            if any(isinstance(x, ast.JoinedStr) for x in self.definitions.around(each)):
                raise Refused("the expression stands in an f-string")
        here = self.definitions.statement_of(found.root)
        operations = [node for _, node in found.operations]
        failing = [node for node in blamed if node in operations]
        elsewhere = [x for x in failing if self.definitions.statement_of(x) is not here]
        own: dict[str, tuple[str, int]] = {}
        extra: list[Change] = []
        if elsewhere:
            extra = self._of_definition(found, elsewhere[0], own)
        renderer = Renderer(self.imports, lambda letter: self._operand(found, letter, own))
        try:
            changes = [*self._differences(found, old, new, renderer), *extra]
        except CannotRender as reason:
            raise Refused(str(reason)) from None
        self._expect_certain(found, old, new, own)
        for change in changes:
            statement = self.definitions.statement_of(change.node)
            if statement is not here:
                self._expect_read_only_in(statement, found.root)
        return changes

    def _operand(
        self, found: Found, letter: str, own: dict[str, tuple[str, int]]
    ) -> tuple[str, int] | None:
        if letter in own:
            return own[letter]
        node = found.operands[letter]
        if node is None:
            return None
        text, binds = self.text.of(node), precedence_of(node)
        return text, (binds if "\n" not in text or binds == ATOM else 0)

    def _of_definition(
        self, found: Found, failing: ast.expr, own: dict[str, tuple[str, int]]
    ) -> list[Change]:
        """What becomes of the statement before, which holds the operation that failed."""
        statement = self.definitions.statement_of(failing)
        if not isinstance(statement, ast.Assign):
            raise Refused("another statement computes it")
        self._expect_read_only_in(statement, found.root)
        [target] = statement.targets
        assert isinstance(target, ast.Name)
        operation = self.imports.operation(failing)
        is_unary = operation is not None and len(operation.operands) == 1
        inner = operation.operands[0] if operation is not None and is_unary else None
        letters = [letter for letter, node in found.operands.items() if node is inner]
        if statement.value is failing and inner is not None and letters:
            own[letters[0]] = target.id, ATOM  # the variable now holds the operand itself
            return [Change(failing, self.text.of(inner))]
        return [Change(statement, "")]

    def _expect_read_only_in(self, statement: ast.stmt, root: ast.expr) -> None:
        if not isinstance(statement, ast.Assign):
            raise Refused("another statement computes it")
        for name in self.definitions.loads_of(statement):
            if root not in (name, *self.definitions.around(name)):
                raise Refused(f"line {name.lineno} reads `{name.id}`, too")

    def _differences(
        self, found: Found, old: ast.expr, new: ast.expr, renderer: Renderer
    ) -> Iterator[Change]:
        if ast.dump(old) == ast.dump(new):
            return
        one, other = OF_RULES.operation(old), OF_RULES.operation(new)
        node = found.stands_for(old)
        if node is None:
            raise Refused(f"the program does not write {ast.unparse(old)} itself")
        if one is not None and other is not None and one.name == other.name:
            if one.keywords != other.keywords and one.keywords.keys() < other.keywords.keys():
                if one.name in SPREADS:
                    self._expect_no_divisor(node)
                yield self._with_keywords(node, other.keywords)
                return
            are_alike = len(one.operands) == len(other.operands) and (
                one.keywords.keys() == other.keywords.keys()
            )
            pairs = [*zip(one.operands, other.operands, strict=False)] if are_alike else []
            if pairs and all((a is None) == (b is None) for a, b in pairs):
                for before, after in pairs:
                    if before is not None and after is not None:
                        yield from self._differences(found, before, after, renderer)
                return
        yield Change(node, renderer.text(new))

    def _expect_no_divisor(self, node: ast.expr) -> None:
        """The deviation of one element is 0, and nothing must divide by it."""
        parents, todo = self.definitions.parents, [node]
        for each in todo:
            above = parents[each]
            while isinstance(above, (ast.Subscript, ast.Attribute)):
                above = parents[above]
            if isinstance(above, ast.BinOp) and isinstance(above.op, ast.Add):
                continue
            if isinstance(above, ast.Assign):
                todo += self._loads(above)
                continue
            found = self.imports.operation(above) if isinstance(above, ast.Call) else None
            if found is not None and found.name in ("add", "clamp"):
                continue
            is_divided = isinstance(above, ast.BinOp) and isinstance(above.op, ast.Div)
            if is_divided or isinstance(above, (ast.Call, ast.AugAssign)):
                raise Refused(f"`{self.text.of(node)}` would be 0, and may be a divisor")

    def _with_keywords(self, node: ast.expr, keywords: dict[str, ast.expr]) -> Change:
        """A call with more arguments by name."""
        text = self.text.of(node)
        got = self.imports.operation(node)
        known = {} if got is None else got.keywords
        is_there = bool(known.keys() & {*keywords, "unbiased"})
        operands = () if got is None else got.operands
        # `std(dim, unbiased, keepdim)`, and the seventh argument of a loss, by position.
        is_there = is_there or len(operands) > MOST_OPERANDS or any(map(_is_bool, operands))
        if not text.endswith(")") or is_there or not isinstance(node, ast.Call):
            raise Refused("the call has arguments that the fix would change")
        told = ", ".join(f"{name}={ast.unparse(value)}" for name, value in keywords.items())
        inside = text[:-1].rstrip()
        tail = text[len(inside) : -1]
        if inside.endswith(","):
            return Change(node, f"{inside} {told},{tail})")
        comma = "" if inside.endswith("(") else ", "
        return Change(node, f"{inside}{comma}{told}{tail})")

    def _expect_certain(
        self, found: Found, old: ast.expr, new: ast.expr, own: dict[str, tuple[str, int]]
    ) -> None:
        """Operands that are computed again, or at another time, have to be the same then."""
        here = self.definitions.statement_of(found.root)
        for letter, node in found.operands.items():
            if node is None or letter in own:
                continue
            is_moved = self.definitions.statement_of(node) is not here
            if (is_moved or _uses(new, letter) > _uses(old, letter)) and not self._computes(node):
                raise Refused(f"`{self.text.of(node)}` may be another value if it is run again")

    def _computes(self, node: ast.expr) -> bool:
        """Whether an expression gives the same each time, and does nothing else."""
        for each in ast.walk(node):
            if isinstance(each, (ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom)):
                return False
            if isinstance(each, ast.Call):
                called = self.imports.operation(each)
                of_self = isinstance(each.func, ast.Attribute) and _is_self(each.func.value)
                if called is None or of_self or not self.is_pure(called.name):
                    return False
        return True


MOST_OPERANDS = 6  # by position, of a call that gets one more argument by name
CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def _method_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _is_bool(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _uses(rule: ast.expr, letter: str) -> int:
    return sum(isinstance(x, ast.Name) and x.id == letter for x in ast.walk(rule))

"""The exact span of an expression, in the user's spelling and layout; or that it is not certain."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path

import pytest

from fxguard.patch._definitions import Definitions
from fxguard.patch._operations import Imports
from fxguard.patch._rewriting import SCALED_STEP, Refused, Rewriter
from fxguard.patch._text import FileText, changed, unified

HEAD = "import math\nimport numpy as np\nimport torch\nimport torch.nn.functional as F\n"
SIGMOID = "log(1 - sigmoid(x)) -> logsigmoid(-x)"
ROOT = "sqrt(a) -> sqrt(a + 1e-12)"
SCALED = "(a @ b) * s -> (a * s) @ b"


def patched(
    folder: Path,
    code: str,
    operation: str,
    rule: str,
    *,
    line: int = 0,
    head: str = HEAD,
    both_tensors: bool = False,
) -> str | None:
    """The code after the rule's changes; None if the rule's expression is not there.

    Args:
        folder: for the file.
        code: below the imports.
        operation: the one that failed.
        rule: the rule.
        line: its line in the code, counted from 1; 0: the last.
        head: the imports.
        both_tensors: whether the operands are tensors.
    """
    file, text = folder / "train.py", head + code
    file.write_text(text, encoding="utf-8", newline="")
    linecache.checkcache(str(file))
    tree, found = ast.parse(text), FileText(text)
    rewriter = Rewriter(found, Definitions(str(file), tree), Imports.of(tree), is_pure)
    number = head.count("\n") + (line or code.count("\n"))
    changes = rewriter.changes(rule, operation, number, both_tensors=both_tensors)
    if changes is None:
        return None
    new = changed(found, changes)
    assert new is not None, "lost"
    assert new.startswith(head)
    return new.removeprefix(head)


def is_pure(name: str) -> bool:
    return not name.endswith("_") and name not in ("dropout", "rand")


@pytest.mark.parametrize(
    ("before", "operation", "rule", "after"),
    [
        # A call of a function, of a method, an operator.
        ("y = torch.log(1 - torch.sigmoid(x))", "log", SIGMOID, "y = F.logsigmoid(-x)"),
        ("y = (1 - x.sigmoid()).log()", "log", SIGMOID, "y = F.logsigmoid(-x)"),
        ("y = (1.0 - x.sigmoid()).log()", "log", SIGMOID, "y = F.logsigmoid(-x)"),
        (
            "y = 1.0 / (k ** 5 * (torch.exp(x) - 1.0))",
            "exp",
            "1 / (b * (exp(x) - 1)) -> exp(-x) / -expm1(-x) / b",
            "y = torch.exp(-x) / -torch.expm1(-x) / k ** 5",
        ),
        ("y = x**0.5 + 1", "pow", "a ** y -> (a + 1e-12) ** y", "y = (x + 1e-12)**0.5 + 1"),
        ("y = x.pow(0.5)", "pow", "a ** y -> (a + 1e-12) ** y", "y = (x + 1e-12).pow(0.5)"),
        ("y = (2*x).sqrt()", "sqrt", ROOT, "y = (2*x + 1e-12).sqrt()"),
        ("y = torch.sqrt(2*x)", "sqrt", ROOT, "y = torch.sqrt(2*x + 1e-12)"),
        # Nested in a longer line.
        (
            "y = -(t * torch.log(p) + (1-t) * torch.log(1 - torch.sigmoid(z+1))).mean()  # all",
            "log",
            SIGMOID,
            "y = -(t * torch.log(p) + (1-t) * F.logsigmoid(-(z+1))).mean()  # all",
        ),
        ("g = lambda x: torch.sqrt(x)", "sqrt", ROOT, "g = lambda x: torch.sqrt(x + 1e-12)"),
        ("y = [torch.sqrt(x) for x in z]", "sqrt", ROOT, "y = [torch.sqrt(x + 1e-12) for x in z]"),
        # Columns count characters, and not bytes.
        ("y = 'é' and torch.sqrt(größe)", "sqrt", ROOT, "y = 'é' and torch.sqrt(größe + 1e-12)"),
        # One number, one operand, one more argument.
        (
            "y = a / m.sum(1).clamp(min=1e-9)",
            "div",
            "a / clamp(b, min=n) -> a / clamp(b, min=1)",
            "y = a / m.sum(1).clamp(min=1)",
        ),
        (
            "y = deg.pow(-0.5)",
            "pow",
            "a ** y -> a.clamp(min=1) ** y",
            "y = deg.clamp(min=1).pow(-0.5)",
        ),
        (
            "y = g.std(1, keepdim=True)",
            "std",
            "std(...) -> std(..., correction=0)",
            "y = g.std(1, keepdim=True, correction=0)",
        ),
        ("y = g.std()", "std", "std(...) -> std(..., correction=0)", "y = g.std(correction=0)"),
        # An order of operations, with parentheses where they are needed.
        ("y = q @ k.mT * d ** -0.5", "matmul", SCALED, "y = (q * d ** -0.5) @ k.mT"),
        ("y = 0.1 * torch.matmul(q, k + 1)", "matmul", SCALED, "y = (q * 0.1) @ (k + 1)"),
        # Parentheses that nothing needs any more go.
        (
            'y = (s * k + (1 - k) * float("-inf")).softmax(-1)',
            "mul",
            'a * b + (1 - b) * float("-inf") -> a.masked_fill(b != 1, float("-inf"))',
            'y = s.masked_fill(k != 1, float("-inf")).softmax(-1)',
        ),
        # An operand that is needed twice.
        (
            "y = torch.where(x > 2, torch.log2(x), 2 * x)",
            "log2",
            "where(c, log2(a), b) -> where(c, log2(where(c, a, 1)), b)",
            "y = torch.where(x > 2, torch.log2(torch.where(x > 2, x, 1)), 2 * x)",
        ),
        (
            "r = p.norm() / update.norm()",
            "div",
            "a / b -> where((a > 0) & (b > 0), a / b, 1.0)",
            "r = torch.where((p.norm() > 0) & (update.norm() > 0), p.norm() / update.norm(), 1.0)",
        ),
        # In float32 and back.
        (
            "y = torch.exp(t * -torch.exp(self.A_log))",
            "exp",
            "exp, neg, mul -> float32",
            "y = torch.exp((t * -torch.exp(self.A_log.float())).to(self.A_log.dtype))",
        ),
    ],
)
def test_the_expression_is_rewritten_in_its_place(
    tmp_path: Path, before: str, operation: str, rule: str, after: str
) -> None:
    assert patched(tmp_path, f"{before}\n", operation, rule) == f"{after}\n"


def test_layout_and_comments_of_several_lines_stay(tmp_path: Path) -> None:
    """Those around the expression, and those between arguments that stay."""
    code = """
loss = (
    torch.log(1 - torch.sigmoid(x))  # the others

    + F.ctc_loss(
        a,  # of letters
        b, c, d,
    )
)
"""
    rule = "ctc_loss(...) -> ctc_loss(..., zero_infinity=True)"
    new = patched(tmp_path, code, "ctc_loss", rule, line=5)
    assert new == code.replace("c, d,", "c, d, zero_infinity=True,")
    new = patched(tmp_path, code, "log", SIGMOID, line=3)
    assert new == code.replace("torch.log(1 - torch.sigmoid(x))", "F.logsigmoid(-x)")


def test_a_comment_inside_would_be_lost(tmp_path: Path) -> None:
    code = "y = torch.log(\n    1  # all of it\n    - torch.sigmoid(x)\n)\n"
    with pytest.raises(AssertionError, match="lost"):
        patched(tmp_path, code, "log", SIGMOID, line=1)


def test_line_ends_stay(tmp_path: Path) -> None:
    """Those of Windows, and a last line without one."""
    code = "y = 1\r\nz = torch.sqrt(x)"
    new = patched(tmp_path, code, "sqrt", ROOT, line=2)
    assert new == "y = 1\r\nz = torch.sqrt(x + 1e-12)"
    assert unified(code, new, "train.py").endswith("x + 1e-12)\n\\ No newline at end of file\n")


def test_a_variable_stands_for_what_gave_it_its_value(tmp_path: Path) -> None:
    code = """
def f(x, t):
    p = torch.sigmoid(x).clamp(max=0.999)
    return (t * torch.log(1 - p)).sum()
"""
    new = patched(tmp_path, code, "log", SIGMOID)
    assert new == code.replace("torch.log(1 - p)", "F.logsigmoid(-x)")


@pytest.mark.parametrize(
    "between",
    [
        "x = x + 1",
        "x += 1",
        "x[0] = 1",
        "x.mul_(2)",
        "p = p + 0",
        "p.clamp_(0, 1)",
        "if t:\n        p = t",
        "for x in t:\n        pass",
    ],
)
def test_a_variable_that_was_written_since_stands_for_nothing(tmp_path: Path, between: str) -> None:
    code = f"""
def f(x, t):
    p = torch.sigmoid(x)
    {between}
    return torch.log(1 - p)
"""
    assert patched(tmp_path, code, "log", SIGMOID) is None


def test_a_variable_may_be_another_one_in_a_loop(tmp_path: Path) -> None:
    code = """
def f(x, t):
    p = torch.sigmoid(x)
    for each in t:
        y = torch.log(1 - p)
        x = x + each
"""
    assert patched(tmp_path, code, "log", SIGMOID, line=5) is None
    inside = """
def f(x, t):
    for each in t:
        p = torch.sigmoid(x)
        y = torch.log(1 - p)
        x = x + each
"""
    new = patched(tmp_path, inside, "log", SIGMOID, line=5)
    assert new == inside.replace("torch.log(1 - p)", "F.logsigmoid(-x)")


def test_a_statement_before_that_only_served_it_changes_too(tmp_path: Path) -> None:
    """It hands on the operand itself, or is taken out."""
    code = """
def f(a, b):
    e = torch.exp(a @ b.T / 0.01)
    return -(e.diag() / e.sum(1)).log().mean()
"""
    rule = "log(diag(exp(x)) / sum(exp(x), d)) -> x.diag() - logsumexp(x, d)"
    assert (
        patched(tmp_path, code, "exp", rule, line=3)
        == """
def f(a, b):
    e = a @ b.T / 0.01
    return -(e.diag() - torch.logsumexp(e, 1)).mean()
"""
    )
    code = """
def f(q, k):
    s = torch.matmul(q, k.mT)
    s = s / math.sqrt(8)
    return s
"""
    rule = "(a @ b) / s -> (a / s) @ b"
    assert (
        patched(tmp_path, code, "matmul", rule, line=3)
        == """
def f(q, k):
    s = (q / math.sqrt(8)) @ k.mT
    return s
"""
    )


def test_two_statements_run_in_float32(tmp_path: Path) -> None:
    code = """
def f(x):
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(mean_square + 1e-6)
"""
    rule = "pow, mean, add, rsqrt -> float32"
    assert (
        patched(tmp_path, code, "pow", rule, line=3)
        == """
def f(x):
    mean_square = x.float().pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(mean_square + 1e-6).to(x.dtype)
"""
    )


STEP = """
for x in data:
    loss = model(x)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # of all
"""


def test_a_scaler_makes_the_step(tmp_path: Path) -> None:
    """The gradients are unscaled before they are clipped."""
    assert (
        patched(tmp_path, STEP, "SGD", SCALED_STEP)
        == """
for x in data:
    loss = model(x)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()  # of all
"""
    )
    tabs = STEP.replace("    ", "\t")
    assert "\n\tscaler.step(optimizer)\n\tscaler.update()" in str(
        patched(tmp_path, tabs, "SGD", SCALED_STEP)
    )


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("    nn.utils", "    scaler.unscale_(optimizer)\n    nn.utils", "calls scaler.unscale_"),
        ("    nn.utils", "    if x:\n        nn.utils", "perhaps of another step"),
        ("1.0)\n", "1.0)\n    nn.utils.clip_grad_value_(p, 1.0)\n", "more than once"),
    ],
)
def test_a_scaler_that_does_more_is_refused(
    tmp_path: Path, before: str, after: str, reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        patched(tmp_path, STEP.replace(before, after), "SGD", SCALED_STEP)


@pytest.mark.parametrize(
    ("before", "after"), [("scaler.scale(loss)", "loss"), ("optimizer.step()", "optimizer.step(f)")]
)
def test_a_step_without_a_scaler_is_none_of_it(tmp_path: Path, before: str, after: str) -> None:
    assert patched(tmp_path, STEP.replace(before, after), "SGD", SCALED_STEP) is None


@pytest.mark.parametrize(
    ("code", "operation", "rule", "reason"),
    [
        ("y = torch.sqrt(a) + torch.sqrt(b)\n", "sqrt", ROOT, "2 expressions there are sqrt"),
        ("y = torch.sqrt(a) + torch.sqrt(a)\n", "sqrt", ROOT, "2 expressions there are sqrt"),
        ('y = f"{torch.sqrt(a)}"\n', "sqrt", ROOT, "f-string"),
        ("y = self.root(a)\n", "sqrt", ROOT, "no expression that is certainly this sqrt"),
        ("a.sqrt_()\n", "sqrt", ROOT, "no expression that is certainly this sqrt"),
        (
            "y = a.std(unbiased=True)\n",
            "std",
            "std(...) -> std(..., correction=0)",
            "has arguments that the fix would change",
        ),
        (
            "y = p * self.score(x)\n",
            "mul",
            "a * b -> a * b.masked_fill(b == 0, 0)",
            "may be another value",
        ),
        (
            "y = p * F.dropout(x)\n",
            "mul",
            "a * b -> a * b.masked_fill(b == 0, 0)",
            "may be another value",
        ),
        ("y = a / a.std(0)\n", "std", "std(...) -> std(..., correction=0)", "may be a divisor"),
        ("s = a.std(0)\ny = a / s\n", "std", "std(...) -> std(..., correction=0)", "a divisor"),
        ("y = a.exp().half()\n", "exp", "exp, half -> float32", "is a cast"),
        ("y = a.std(0, False)\n", "std", "std(...) -> std(..., correction=0)", "would change"),
        ("y = (a * b).softmax(-1)\n", "mul", "mul, softmax -> float32", "which of its operands"),
        ("y = self.sqrt(a)\n", "sqrt", ROOT, "no expression that is certainly this sqrt"),
        ("y = np.sqrt(a)\n", "sqrt", ROOT, "no expression that is certainly this sqrt"),
        ("y = norm(a * 16.0 + x)\n", "mul", "mul, add, float -> float32", "one expression"),
        ("y = q @ k\n", "matmul", "matmul -> float32", "different dtypes"),
        ("e = torch.exp(x)\ny = torch.log(e.sum(1)) + e\n", "exp",
         "log(sum(exp(x), d, k)) -> logsumexp(x, d, k)", "line 6 reads `e`, too"),
    ],
)  # fmt: skip
def test_it_is_refused_where_it_is_not_certain(
    tmp_path: Path, code: str, operation: str, rule: str, reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        patched(tmp_path, code, operation, rule, line=1)


@pytest.mark.parametrize(
    ("head", "after"),
    [
        ("import torch\n", "torch.nn.functional.logsigmoid(-x)"),
        ("import torch as th\n", "th.nn.functional.logsigmoid(-x)"),
        ("from torch import nn\n", "nn.functional.logsigmoid(-x)"),
        ("from torch.nn import functional\n", "functional.logsigmoid(-x)"),
        ("from torch.nn.functional import logsigmoid\n", "logsigmoid(-x)"),
        (
            "import torch\ndef g():\n    import torch.nn.functional as F\n",
            "torch.nn.functional.logsigmoid(-x)",
        ),
    ],
)
def test_functions_are_called_as_the_file_can(tmp_path: Path, head: str, after: str) -> None:
    code = "y = (1 - x.sigmoid()).log()\n"
    assert patched(tmp_path, code, "log", SIGMOID, head=head) == f"y = {after}\n"


def test_an_operand_that_is_a_number_has_no_dtype(tmp_path: Path) -> None:
    """The other one is cast; of two tensors the first."""
    rule, after = "mul, softmax -> float32", "y = (2 * a.float()).softmax(-1).to(a.dtype)\n"
    assert patched(tmp_path, "y = (2 * a).softmax(-1)\n", "mul", rule) == after
    code, after = "y = (a * b).softmax(-1)\n", "y = (a.float() * b).softmax(-1).to(a.dtype)\n"
    assert patched(tmp_path, code, "mul", rule, both_tensors=True) == after


def test_a_file_without_torch_has_only_methods(tmp_path: Path) -> None:
    code = "y = x.exp().sum(1).log()\n"
    rule = "log(sum(exp(x), d, k)) -> logsumexp(x, d, k)"
    assert patched(tmp_path, code, "log", rule, head="\n") == "y = x.logsumexp(1)\n"
    with pytest.raises(Refused, match="imports no torch"):
        patched(tmp_path, "y = (1 - x.sigmoid()).log()\n", "log", SIGMOID, head="\n")

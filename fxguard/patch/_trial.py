"""Tries the new expression of a rule on the numbers at which the old one failed."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxguard.forgiving import theirs
from fxguard.graph.evidence import Evidence, Operand
from fxguard.patch._matching import without_rest
from fxguard.patch._operations import OF_RULES, Imports
from fxguard.patch._rendering import ATOM, Renderer
from fxguard.patch._rewriting import IN_FLOAT32, SCALED_STEP, Refused, sides_of

__all__ = ["can_be_tried", "evaluated", "is_pure", "letter_of", "tried"]

_IMPORTS = Imports({"torch": "torch"}, {})
RANDOM = ("bernoulli", "dropout", "multinomial", "normal", "rand", "randn", "random")


def is_pure(name: str) -> bool:
    """Whether a method of tensors of that name only computes."""
    if name.endswith("_") or name in ("backward", "register_hook", *RANDOM):
        return False
    return hasattr(Tensor, name)


ON_NUMBERS = "tried on the numbers of the first bad element"
ON_SMALLEST = {
    "div": "tried on 0 / 0",
    "log": "tried on 0",
    "cross_entropy": "tried on a batch without a valid target",
    "ctc_loss": "tried on a target that is too long for its input",
    "std": "tried on a single element",
    "var": "tried on a single element",
}
# Operands at which an operation fails whose own ones are not known.
SMALLEST = {
    "div": (Operand(0.0, 0.0, dtype="float32"), Operand(0.0, 0.0, dtype="float32")),
    "log": (Operand(0.0, 0.0, dtype="float32"),),
}


def can_be_tried(rule: str, evidence: Evidence | None) -> bool:
    """Whether the numbers of the operation are those of all operands of a rule's new expression."""
    if evidence is None or rule.endswith(IN_FLOAT32):
        return False
    old, new = sides_of(rule)
    wanted = OF_RULES.operation(old)
    given = () if wanted is None else wanted.operands
    known = {x.id for x in given[: len(evidence.operands)] if isinstance(x, ast.Name)}
    return {x.id for x in ast.walk(new) if isinstance(x, ast.Name) and len(x.id) == 1} <= known


def tried(rule: str, evidence: Evidence | None, *, in_step: bool = False) -> str:
    """On what a rule's new expression was tried where the old one failed, and what it gives.

    Args:
        rule: ``sqrt(a) -> sqrt(a + 1e-12)``.
        evidence: the operation at the first bad element, if that is known.
        in_step: whether it is in an optimizer's step, where nothing has a gradient.

    Raises:
        Refused: when it is not finite there, or its gradient is not; or when it was not run.
    """
    if rule == SCALED_STEP:
        return _skipped()
    old, new = sides_of(rule)
    try:
        value, gradients = _run(old, new, evidence)
    except theirs() as error:  # an operation may not exist for the dtype, or take no such numbers
        raise Refused(f"the new expression could not be tried: {error}") from None
    if not bool(value.isfinite().all()):
        raise Refused(f"where the old expression failed, the new one is {value.flatten()[0]}")
    gradients = [] if in_step else gradients
    if not all(bool(each.isfinite().all()) for each in gradients):
        raise Refused("where the old expression failed, the gradient of the new one is not finite")
    wanted = OF_RULES.operation(old)
    is_known = wanted is None or (evidence is not None and wanted.name in SMALLEST)
    where = ON_NUMBERS if wanted is None or is_known else ON_SMALLEST.get(wanted.name, ON_NUMBERS)
    text = f"{where}: it is {value.flatten()[0].item():.4g} there"
    if gradients:
        text += f", its gradient {gradients[0].flatten()[0].item():.4g}"
    return text


def _run(old: ast.expr, new: ast.expr, evidence: Evidence | None) -> tuple[Tensor, list[Tensor]]:
    wanted = OF_RULES.operation(old)
    assert wanted is not None
    has_rest, wanted = without_rest(wanted)
    if has_rest:
        leaves, value = _sample(wanted.name, new)
    else:
        operands = SMALLEST.get(wanted.name, ()) if evidence is None else evidence.operands
        if not operands:
            raise Refused("the numbers of the operation are not known to try it on")
        letters = dict[str, Any]()
        for position, rule in enumerate(wanted.operands):
            letter = letter_of(rule)
            if letter and position < len(operands):
                letters[letter] = _of(operands[position])
        if wanted.name == "cross_entropy":
            letters = {"a": torch.zeros(2, 3, requires_grad=True), "b": torch.full((2,), -100)}
        value = evaluated(new, letters)
        leaves = [x for x in letters.values() if isinstance(x, Tensor)]
    leaves = [x for x in leaves if x.requires_grad]
    if not value.requires_grad:
        return value, []
    found = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    return value.detach(), [x for x in found if x is not None]


def _skipped() -> str:
    """What a scaler does with a step on a gradient that is not finite."""
    weight = torch.ones(1, requires_grad=True)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([weight], lr=1.0)
    (scaler.scale(weight.sum()) * torch.inf).backward()
    before = scaler.get_scale()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    if weight.item() != 1.0 or scaler.get_scale() >= before:
        raise Refused("this scaler does not skip a step on a gradient that is not finite")
    return "tried on a gradient that is inf: the step is left out, and the scale is halved"


def letter_of(rule: ast.expr | None) -> str:
    """The letter that an operand is, or that a bound is put on."""
    if isinstance(rule, ast.Call) and (inner := OF_RULES.operation(rule)) is not None:
        return letter_of(inner.operands[0]) if inner.name == "clamp" else ""
    return rule.id if isinstance(rule, ast.Name) else ""


def _of(operand: Operand) -> Any:
    if not operand.dtype:
        return operand.low
    dtype: torch.dtype = getattr(torch, operand.dtype)
    numbers = [operand.low] if operand.count == 1 else [operand.low, operand.high]
    return torch.tensor(numbers, dtype=dtype).requires_grad_(dtype.is_floating_point)


def evaluated(new: ast.expr, letters: dict[str, Any]) -> Tensor:
    text = Renderer(_IMPORTS, lambda letter: (letter, ATOM)).text(new)
    value: Tensor = torch.as_tensor(eval(text, {"torch": torch}, letters))  # a text of a rule
    return value


def _sample(name: str, new: ast.expr) -> tuple[list[Tensor], Tensor]:
    """A call whose arguments a rule leaves open, on the smallest operands that fail."""
    assert isinstance(new, ast.Call)
    keywords = {each.arg: ast.literal_eval(each.value) for each in new.keywords if each.arg}
    if name == "ctc_loss":
        log_p = torch.zeros(1, 1, 3).log_softmax(-1).requires_grad_()
        lengths = torch.tensor([1]), torch.tensor([2])
        loss = torch.nn.functional.ctc_loss(log_p, torch.tensor([[1, 1]]), *lengths, **keywords)
        return [log_p], loss
    operand = torch.tensor([0.5], requires_grad=True)  # a spread of one element
    function: Callable[..., Tensor] = getattr(torch, name)
    return [operand], function(operand, **keywords)

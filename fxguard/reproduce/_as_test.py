"""One operation as the text of a failing test: a function of its operands, and an assertion."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fxguard.graph.nodes import elements_of
from fxguard.graph.one_operation import OneOperation
from fxguard.graph.wide_form import NotJudged
from fxguard.measure.at_hand import name_of_dtype
from fxguard.reproduce._spelling import Spelled, spelled

__all__ = ["operands_of", "text_of"]

SHOWN = 8  # elements of an operand that the file shows

INCOMING = "gradient"  # name of the gradient of the result


def operands_of(operation: OneOperation) -> dict[str, Tensor]:
    """The tensors that the test reads from its file, by name.

    Raises:
        NotJudged: when the operation cannot be written.
    """
    names = _spelled(operation).names
    gradients = [INCOMING + (f"_{i}" if i else "") for i in range(len(operation.incoming))]
    return dict(zip([*names, *gradients], operation.tensors, strict=True))


def text_of(
    operation: OneOperation,
    *,
    name: str,
    file: str,
    story: Sequence[str],
    origin: str,
    problem: str,
    device: str = "cpu",
) -> str:
    """The text of the test.

    Args:
        operation: the operation, with the operands in the file.
        name: name of the test, "test_mul".
        file: name of the file of operands next to it.
        story: the report on the operation, as lines.
        origin: where the numbers in the file come from.
        problem: what it makes, "inf" or "NaN".
        device: the device where it fails.

    Raises:
        NotJudged: when the operation cannot be written.
    """
    found = _spelled(operation)
    operands = operands_of(operation)
    what = f"the backward of {operation.kind}" if operation.is_backward else operation.kind
    only = " where it is compiled, and not in eager mode" if operation.is_compiled else ""
    place = "" if device == "cpu" else f" On {device} only: on the CPU it does not fail."
    head = [
        f"{what} makes {problem} of these operands{only}.",
        "",
        "A model ran into it:",
        "",
        *(f"    {line}".rstrip() for line in story),
        "",
        *textwrap.wrap(f"{file} holds {origin}", 96),
        "",
        *(f"    {each}" for each in _listed(operands)),
        "",
        *textwrap.wrap(f"Written with torch {torch.__version__}. Run it with pytest.{place}", 96),
    ]
    text = "\n".join(line.replace("\\", "\\\\").replace('"""', "'''") for line in head)
    body = [
        f'"""{text}\n"""',
        "",
        "from pathlib import Path",
        "",
        *found.imports,
        "",
        f'OPERANDS = Path(__file__).with_name("{file}")',
        "",
        "",
        f"def operation({', '.join(found.names)}):",
        *(f"    {line}" for line in found.lines),
        "",
        "",
        f"def {name}():",
        *(f"    {line}" for line in _test(operation, found, problem, device)),
    ]
    return "\n".join(body) + "\n"


def _spelled(operation: OneOperation) -> Spelled:
    return spelled(operation, _returned(operation))


def _returned(operation: OneOperation) -> tuple[tuple[int, ...], ...]:
    """The items of its result that receive gradients; () if its backward is not requested."""
    if not operation.is_backward:
        return ()
    paths = [path for path, _ in elements_of(operation.result())]
    return tuple(paths[position] for position in operation.incoming)


def _listed(operands: dict[str, Tensor]) -> Iterator[str]:
    """``x: float16 [1, 2], -300.0 900.0``."""
    for name, tensor in operands.items():
        line = f"{name}: {name_of_dtype(tensor.dtype)} {list(tensor.shape)}"
        if 0 < tensor.numel() <= SHOWN:
            line += ", " + " ".join(map(str, tensor.reshape(-1).tolist()))
        yield line


def _test(operation: OneOperation, found: Spelled, problem: str, device: str) -> Iterator[str]:
    if device != "cpu":
        yield f'operands = torch.load(OPERANDS, map_location="{device}", weights_only=True)'
    else:
        yield "operands = torch.load(OPERANDS, weights_only=True)"
    call = "operation"
    if operation.is_compiled:
        call = "compiled"
        yield "in_eager_mode = operation(**{name: x.clone() for name, x in operands.items()})"
        yield f"assert {_holds('in_eager_mode', problem)}"
        yield "compiled = torch.compile(operation)"
    if operation.is_random:
        yield "torch.manual_seed(0)"
    if not operation.is_backward:
        yield f"made = {call}(**operands)"
        yield f'assert {_holds("made", problem)}, f"it made {{made}}"'
        return
    names = [name for name in operands_of(operation) if name not in found.names]
    gradients = [f'operands.pop("{name}")' for name in names]
    wanted = _operand_name(operation, found)
    yield f"gradients = [{', '.join(gradients)}]"
    yield f'operands["{wanted}"].requires_grad_()'
    yield f"made = {call}(**operands)"
    results = "[made]" if len(names) == 1 else "made"
    yield f'(found,) = torch.autograd.grad({results}, [operands["{wanted}"]], gradients)'
    yield f'assert {_holds("found", problem)}, f"its backward made {{found}}"'


def _holds(name: str, problem: str) -> str:
    if problem == "NaN":
        return f"not torch.isnan({name}).any()"
    return f"torch.isfinite({name}).all()"


def _operand_name(operation: OneOperation, found: Spelled) -> str:
    if operation.operand is None:
        raise NotJudged("its backward is not asked for")
    return found.names[operation.operand]

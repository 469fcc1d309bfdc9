"""Lets a graph go on where a model asks a tensor which way to go, and its inputs alone decide.

``if attention_mask.all()`` ends a graph: TorchDynamo has fake tensors, and nobody to ask. Where the
answer follows from the inputs of the captured code by a few cheap operations, it is found with
those inputs, and becomes a guard: with another answer the code is captured once more, as Python
would go another way. Where it follows from shapes alone (``torch.arange`` of a length), no guard is
needed. Models of transformers ask so in each forward, and would be four graphs instead of one.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- ``InstructionTranslatorBase.dispatch_table``: what traces each instruction.
- ``TensorVariable.proxy.node``: the node whose value decides.
- ``node.meta["grapharg"]``: the source and the real value of an input.
- ``install_guard``, ``Source.make_guard``, ``GuardBuilder.scope``,
  ``RootGuardManager.add_epilogue_lambda_guard``: look at something when all other guards hold.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.guards import install_guard
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx import Graph, GraphModule, Node

from fxguard.capture.instances import with_subclasses
from fxguard.capture.plain_python import follows_python
from fxguard.forgiving import theirs
from fxguard.graph import marks, nodes
from fxguard.graph.operations import is_custom, read_node
from fxguard.graph.tables import UNINITIALISED
from fxguard.measure.func_levels import are_levels_open
from fxguard.torch_names import DisableTorchFunction, HigherOrderOperator

__all__ = ["Jump", "follow_decisions", "wrap_jumps"]

Jump = Callable[[Any, Any], None]  # is given the translator and the instruction

MOST_OPERATIONS = 64
MOST_ELEMENTS = 2**18  # of all values together: they are computed once more at each call
MOST_GUARDS = 3  # in one stretch of code: each may double the captures


@functools.cache
def follow_decisions() -> None:
    """Teach TorchDynamo these answers; done once."""
    wrap_jumps(_asking)


def wrap_jumps(wrapped: Callable[[Jump], Jump]) -> None:
    """Exchange what traces a jump that depends on a condition.

    Args:
        wrapped: gives what traces it, from what has traced it before.
    """
    for kind in with_subclasses(InstructionTranslatorBase):
        table: dict[int, Jump] = kind.dispatch_table  # type: ignore[attr-defined]
        for name, code in dis.opmap.items():
            if name.startswith("POP_JUMP_") and name.endswith(("IF_TRUE", "IF_FALSE")):
                table[code] = wrapped(table[code])


def _asking(jump: Jump) -> Jump:
    """What traces a jump, with a tensor's answer in the place of the tensor."""

    def jump_as_told(tx: Any, instruction: Any) -> None:
        value = tx.stack[-1].realize()
        if type(value) is TensorVariable and follows_python(tx):
            answer = _answer_of(value.proxy.node, tx.output)
            if answer is not None:
                tx.stack[-1] = ConstantVariable.create(answer)
        jump(tx, instruction)

    return jump_as_told


def _answer_of(node: Node, output: Any) -> bool | None:
    """What a tensor answers, guarded; None if more decides than a little of the inputs.

    Args:
        node: of the tensor.
        output: what is captured so far, an ``OutputGraph``.
    """
    if output.current_tracer is not output.root_tracer or are_levels_open():
        return None
    steps = _steps_to(node)
    if steps is None:
        return None
    inputs: list[Any] = [each.meta.get("grapharg") for each in steps if each.op == "placeholder"]
    if any(getattr(each, "source", None) is None for each in inputs):
        return None
    guards = getattr(output, "_fxguard_decisions", 0)
    if inputs and guards == MOST_GUARDS:
        return None
    question = Question(_computing(steps), tuple(each.source.name for each in inputs))
    try:
        values = question.finder(output.global_scope)(output.local_scope)
        if not all(map(_is_value_of, inputs, values)):
            return None
        answer = question.answer_for(values)
    except theirs():  # an expression of closure names, an operation of wrong arguments
        return None
    if inputs:
        output._fxguard_decisions = guards + 1
        add_guard = functools.partial(_add_guard, question, answer)
        install_guard(inputs[0].source.make_guard(add_guard))
    return answer


class Question(NamedTuple):
    """What decides which way a model goes.

    Attributes:
        compute: computes the tensor that is asked.
        names: the expressions for its inputs, of local names L and global names G.
    """

    compute: Callable[..., Any]
    names: tuple[str, ...]

    def finder(self, global_names: Any) -> Callable[[Any], tuple[Any, ...]]:
        """A function that finds the inputs by the local names."""
        expressions = "".join(f"{name}, " for name in self.names)
        found: Callable[[Any], tuple[Any, ...]] = eval(
            f"lambda L: ({expressions})", {"G": global_names}
        )
        return found

    @torch.no_grad()
    def answer_for(self, values: Sequence[Any]) -> bool:
        """What the tensor says, given the inputs."""
        with DisableTorchFunction():
            return bool(self.compute(*values))


def _add_guard(question: Question, expected: bool, builder: Any, guard: Any) -> None:
    """Let code be used only where the answer is the expected one."""
    find = question.finder(builder.scope["G"])

    def holds(local_names: Any) -> bool:
        return question.answer_for(find(local_names)) is expected

    text = f"{', '.join(question.names)} answer {expected}"
    builder.guard_manager.root.add_epilogue_lambda_guard(holds, [text], guard.user_stack)


def _steps_to(node: Node) -> list[Node] | None:
    """The nodes that compute a value, in their order; None if they are not few and cheap.

    What writes to a tensor that the graph has made itself is one of them.
    """
    writes = [(each, written) for each in node.graph.nodes if (written := _memory_written(each))]
    needed, left = {node}, [node]
    while left:
        new = set(left.pop().all_input_nodes) - needed
        memory = _memory_of(needed | new)
        new |= {each for each, written in writes if not memory.isdisjoint(written)} - needed
        needed |= new
        left += new
        if len(needed) > MOST_OPERATIONS:
            return None
    inputs = _memory_of(each for each in needed if each.op == "placeholder")
    if not all(inputs.isdisjoint(_memory_written(each)) for each in needed):
        return None
    elements = sum(value.numel() for value in _values(needed))
    if elements > MOST_ELEMENTS or not all(map(_is_cheap, needed)):
        return None
    return [each for each in node.graph.nodes if each in needed]


def _values(steps: Iterable[Node]) -> Iterator[Tensor]:
    """The fake results of nodes."""
    for step in steps:
        for _, value in nodes.elements_of(nodes.example_of(step)):
            yield value


def _is_cheap(node: Node) -> bool:
    """Whether a node is an input, or an operation that gives the same when computed again."""
    if node.op == "placeholder":
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, HigherOrderOperator) or is_custom(node.target):
        return False
    call = read_node(node)
    return not (call.random or call.kind in UNINITIALISED or any(map(_is_cast, _values([node]))))


def _is_cast(value: Tensor) -> bool:
    """Whether autocast may have chosen the dtype of a value."""
    return value.is_floating_point() and torch.is_autocast_enabled(value.device.type)


def _memory_of(steps: Iterable[Node]) -> set[int | None]:
    """Keys of the memory that the fake results of nodes lie in."""
    return set(map(nodes.memory_of, _values(steps)))


def _memory_written(node: Node) -> set[int | None]:
    """Keys of the memory that a node writes to."""
    if node.op not in ("call_function", "call_method") or node.target in marks.MARKS:
        return set()
    return _memory_of(each for each in read_node(node).written if isinstance(each, Node))


def _is_value_of(argument: Any, value: Any) -> bool:
    """Whether a value is the one that was traced, and can be asked."""
    return type(value) is int or (type(value) is Tensor and value is argument.example)


def _computing(steps: Iterable[Node]) -> Callable[..., Any]:
    """A function that computes the last value from the inputs."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in steps:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta.clear()
    graph.output(copies[node])
    computing: Callable[..., Any] = GraphModule({}, graph).forward
    return computing

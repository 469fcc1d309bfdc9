"""Tables of operations: which only move data, which write in place, which draw random numbers.

A new case is one line here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

__all__ = [
    "MOVES",
    "SELECTS",
    "draws_random_numbers",
    "has_infinite_literal",
    "has_limit_literal",
    "name_of",
    "written_operands",
]

# The output has the elements of the first input, each at least once, and nothing else:
# it reuses that input's numbers and gets no frame.
MOVES = frozenset(
    """
    _add_batch_dim _remove_batch_dim _set_tensor_requires_grad _unwrap_for_grad _wrap_for_grad
    alias broadcast_to clone contiguous cpu cuda detach detach_ expand expand_as flatten flip
    fliplr flipud moveaxis movedim mT permute pin_memory pixel_shuffle pixel_unshuffle ravel
    repeat requires_grad_ reshape reshape_as roll rot90 squeeze swapaxes swapdims t tile
    transpose unflatten unsqueeze view view_as
    """.split()
)

# The output has some of the inputs' elements, and perhaps zeros: it cannot overflow and gets
# no frame, but its numbers are its own.
SELECTS = frozenset(
    """
    as_strided as_subclass cat chunk concat concatenate diag diag_embed diagonal dsplit dstack
    gather getattr getitem hsplit hstack index_select masked_select narrow repeat_interleave
    select slice split split_with_sizes stack take take_along_dim tensor_split tril triu unbind
    unfold vsplit vstack
    """.split()
)

# These turn into a move when neither the dtype nor the shape changes.
CASTS = frozenset(["to", "type", "type_as", "float", "half", "bfloat16", "double"])

# Results of attribute reads and the like: no operation that fxguard counts.
NOT_OPERATIONS = frozenset(
    """
    __get__ __set__ __len__ __bool__ __iter__ __contains__ __hash__ __repr__ __format__ backward
    data_ptr dim element_size get_device is_complex is_contiguous is_floating_point is_shared
    item ndimension numel nelement register_hook retain_grad share_memory_ size storage
    storage_offset stride tolist numpy untyped_storage
    """.split()
)

# The fake tensors of a capture do not know that what these make, and what is made of it, is
# quantized. It holds integers, which are finite.
QUANTIZES = frozenset(
    ["quantize_per_channel", "quantize_per_tensor", "quantize_per_tensor_dynamic"]
)
DEQUANTIZES = frozenset(["dequantize", "int_repr"])

# Python functions that run another function, and compile it for that.
RUN_FUNCTIONS = frozenset("associative_scan cond flex_attention map scan while_loop".split())

# Trailing underscores that write nothing.
NOT_IN_PLACE = frozenset({"requires_grad_", "share_memory_", "detach_"})

IN_PLACE_OPERATORS = frozenset(
    {
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.imatmul,
        operator.itruediv,
        operator.ifloordiv,
        operator.imod,
        operator.ipow,
        operator.iand,
        operator.ior,
        operator.ixor,
        operator.setitem,
    }
)

# The largest finite magnitude of each dtype.
LARGEST = frozenset(
    torch.finfo(dtype).max
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
)

# These take such a number to keep values in range, not to make a mask.
LIMITERS = frozenset(
    """
    clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clip clip_ hardtanh hardtanh_
    nan_to_num nan_to_num_
    """.split()
)

# Positions of running statistics: written when training, and then not read.
RUNNING_STATISTICS = {
    torch.nn.functional.batch_norm: (1, 2),
    torch.batch_norm: (3, 4),
    torch.nn.functional.instance_norm: (1, 2),
}

RANDOM = frozenset(
    """
    alpha_dropout bernoulli bernoulli_ cauchy_ dropout dropout1d dropout2d dropout3d dropout_
    exponential_ feature_alpha_dropout feature_dropout fractional_max_pool2d geometric_
    gumbel_softmax log_normal_ lstm gru rnn_tanh rnn_relu multi_head_attention_forward
    multinomial native_dropout normal normal_ poisson rand rand_like randint randint_like randn
    randn_like random_ randperm rrelu rrelu_ scaled_dot_product_attention uniform_
    """.split()
)


def name_of(target: Any) -> str:
    """The operation's name as the field writes it: ``mul``, ``softmax``, ``masked_fill_``."""
    if isinstance(target, str):
        name = target
    elif isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[-1]
    else:
        name = getattr(target, "__name__", None) or type(target).__name__
    if name.startswith("__") and name.endswith("__") and name not in NOT_OPERATIONS:
        name = name.strip("_")
    return name


def literals(values: Any) -> Iterator[float]:
    """Every Python float in nested arguments."""
    if isinstance(values, float):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from literals(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from literals(value)


def has_infinite_literal(args: Any, kwargs: Any) -> bool:
    """Whether the call was given an infinity on purpose, as ``masked_fill(mask, -inf)`` is."""
    return any(math.isinf(value) for value in literals((args, kwargs)))


def has_limit_literal(target: Any, args: Any, kwargs: Any) -> bool:
    """Whether the call was given a dtype's largest magnitude, as masks of ``finfo.min`` are."""
    if name_of(target) in LIMITERS:
        return False
    return any(abs(value) in LARGEST for value in literals((args, kwargs)))


def written_operands(node: Node) -> list[Node]:
    """The inputs whose memory the operation writes, as far as its name and arguments tell."""
    written: list[Node] = []
    if writes_first_operand(node.target, node.kwargs) and node.args:
        map_arg(node.args[0], written.append)
    if "out" in node.kwargs:
        map_arg(node.kwargs["out"], written.append)
    return written


def writes_first_operand(target: Any, kwargs: Any) -> bool:
    """Whether a call of ``target`` changes its first argument."""
    if target in IN_PLACE_OPERATORS or kwargs.get("inplace") is True:
        return True
    name = name_of(target)
    in_place = name.endswith("_") and not name.endswith("__") and name not in NOT_IN_PLACE
    return in_place or name in ("setitem", "__setitem__")


def ignored_operands(node: Node) -> set[Node]:
    """Inputs that the operation only writes: running statistics while training."""
    positions = RUNNING_STATISTICS.get(node.target, ()) if callable(node.target) else ()
    # training (batch_norm) or use_input_stats (instance_norm) is the sixth argument.
    training = node.args[5] if len(node.args) > 5 else node.kwargs.get("training", False)
    training = training or node.kwargs.get("use_input_stats", False)
    if not positions or training is False:
        return set()
    operands = [node.args[i] for i in positions if i < len(node.args)]
    operands += [node.kwargs.get("running_mean"), node.kwargs.get("running_var")]
    return {operand for operand in operands if isinstance(operand, Node)}


def draws_random_numbers(node: Node) -> bool:
    """Whether running the node again needs the same random state."""
    return name_of(node.target) in RANDOM

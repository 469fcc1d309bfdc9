"""Tables of operations by name: what moves data, what writes, what draws random numbers.

A new case is one line here. Names are those of :func:`fxguard.graph.operations.name_of`. Nothing
here knows torch: the rules that read these tables for a call are in
:mod:`fxguard.graph.operations`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ADDITIONS",
    "BIT_CASTS",
    "BY_ROW",
    "CASTS",
    "CHOOSES",
    "DEQUANTIZES",
    "DIM_IS_THIRD",
    "DRAWS",
    "DROPOUTS",
    "END_OF_MASKS",
    "ENTRIES",
    "FILLS",
    "IN_PLACE",
    "KEEPS",
    "LAST_DIMS",
    "LIMITERS",
    "LOSSES",
    "MATRIX_PRODUCTS",
    "MEANS_OF_NUMBERS",
    "MIXES",
    "MIX_AND_ADD",
    "MOVES",
    "NOT_IN_PLACE",
    "NOT_OPERATIONS",
    "OPERATORS",
    "OVERWRITES",
    "QUANTIZES",
    "RANDOM",
    "REPEATABLE",
    "RESHAPES_IN_PLACE",
    "RUN_FUNCTIONS",
    "SATURATES",
    "SEES_NAN",
    "SELECTS",
    "UNINITIALISED",
    "UNSAID_WRITES",
    "VANISHES",
    "WRITES_PARTS",
    "UnsaidWrite",
]

# Python's names of operators, as in graphs and in calls on tensors, to torch's names.
OPERATORS = {
    "floordiv": "floor_divide",
    "iadd": "add_",
    "ifloordiv": "floor_divide_",
    "imod": "remainder_",
    "imul": "mul_",
    "ipow": "pow_",
    "isub": "sub_",
    "itruediv": "div_",
    "mod": "remainder",
    "radd": "add",
    "rdiv": "div",
    "rfloordiv": "floor_divide",
    "rmatmul": "matmul",
    "rmod": "remainder",
    "rmul": "mul",
    "rpow": "pow",
    "rsub": "sub",
    "truediv": "div",
}

# What a result is.

# Numbers of Python, NumPy or a file become a tensor.
ENTRIES = frozenset(
    "Tensor as_tensor asarray from_dlpack from_file from_numpy frombuffer load tensor".split()
)

# The output has exactly the elements of the first operand, each at least once: it reuses that
# operand's numbers and gets no frame.
MOVES = frozenset(
    """
    _add_batch_dim _remove_batch_dim _reshape_alias _set_tensor_requires_grad _unsafe_view
    _unwrap_for_grad _wrap_for_grad alias broadcast_to clone contiguous cpu cuda detach detach_
    expand expand_as flatten flip fliplr flipud lift_fresh moveaxis movedim mT permute pin_memory
    pixel_shuffle pixel_unshuffle ravel repeat requires_grad_ reshape reshape_as roll rot90 squeeze
    swapaxes swapdims t tile transpose unflatten unsqueeze view view_as
    """.split()
)

# The output has some of the inputs' elements, and perhaps zeros: it cannot overflow and gets no
# frame, but has its own numbers. ``__get__`` reads a view of a tensor, such as ``x.T``.
SELECTS = frozenset(
    """
    __get__ adjoint as_strided as_subclass atleast_1d atleast_2d atleast_3d broadcast_tensors cat
    chunk column_stack concat concatenate diag diag_embed diagonal dsplit dstack gather getattr
    getitem hsplit hstack imag index_select masked_select matrix_H meshgrid narrow real
    repeat_interleave row_stack select slice split split_with_sizes stack take take_along_dim
    tensor_split tril triu unbind unfold view_as_complex view_as_real vsplit vstack
    """.split()
)

# These are moves if the dtype stays. If it does not, a mask of one dtype's largest magnitude
# becomes inf in a narrower dtype.
CASTS = frozenset(["to", "type", "type_as", "float", "half", "bfloat16", "double"])

# Attribute reads and the like: not operations that fxguard counts.
NOT_OPERATIONS = frozenset(
    """
    __get__ __set__ __len__ __bool__ __iter__ __contains__ __hash__ __repr__ __format__ backward
    data_ptr dim element_size get_device is_complex is_contiguous is_floating_point is_shared
    item ndimension numel nelement register_hook retain_grad share_memory_ size storage
    record_stream storage_offset stride tolist numpy untyped_storage
    """.split()
)

# The fake tensors of a capture do not know that results of these, and tensors derived from them,
# are quantized. Such tensors hold integers, which are finite.
QUANTIZES = frozenset(
    ["quantize_per_channel", "quantize_per_tensor", "quantize_per_tensor_dynamic"]
)
DEQUANTIZES = frozenset(["dequantize", "int_repr"])

# The results of these are uninitialised memory until something writes there.
UNINITIALISED = frozenset(
    """
    empty empty_like empty_permuted empty_quantized empty_strided new_empty new_empty_strided
    resize_
    """.split()
)

# They write some elements of their first operand, and leave the others as they are.
WRITES_PARTS = frozenset(
    """
    index_copy index_copy_ index_fill index_fill_ index_put index_put_ masked_fill masked_fill_
    masked_scatter masked_scatter_ scatter scatter_ select_scatter setitem slice_scatter
    """.split()
)

# Python functions that compile another function and run it.
RUN_FUNCTIONS = frozenset("associative_scan cond flex_attention map scan while_loop".split())

RANDOM = frozenset(
    """
    alpha_dropout bernoulli bernoulli_ cauchy_ dropout dropout1d dropout2d dropout3d dropout_
    exponential_ feature_alpha_dropout feature_dropout fractional_max_pool2d geometric_
    gumbel_softmax log_normal_ lstm gru rnn_tanh rnn_relu multi_head_attention_forward
    multinomial native_dropout normal normal_ poisson rand rand_like randint randint_like randn
    randn_like random_ randperm rrelu rrelu_ scaled_dot_product_attention uniform_
    """.split()
)

# What the results of those hold: only random numbers, or the first operand with a part set to zero
# and the rest scaled.
DRAWS = frozenset(
    """
    bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_
    poisson rand rand_like randint randint_like randn randn_like random_ randperm uniform_
    """.split()
)
DROPOUTS = frozenset(
    """
    dropout dropout1d dropout2d dropout3d dropout_ feature_dropout native_dropout
    """.split()
)

# These read the bits of a tensor as another dtype, if they are given one.
BIT_CASTS = frozenset({"view"})

# These change a tensor's view of its memory, not the contents.
RESHAPES_IN_PLACE = frozenset(
    """
    as_strided_ detach_ requires_grad_ resize_ resize_as_ set_ squeeze_ swapaxes_ swapdims_ t_
    transpose_ unsqueeze_
    """.split()
)

# What is written. A trailing underscore, ``out=`` and ``inplace=True`` also tell.

# These write their first operand although their names do not say so.
IN_PLACE = frozenset(
    """
    iand ilshift imatmul ior irshift ixor setitem
    """.split()
)

# Trailing underscores that write nothing.
NOT_IN_PLACE = frozenset("and_ detach_ is_ not_ or_ requires_grad_ share_memory_".split())

# These write their whole first operand without reading it.
OVERWRITES = frozenset(
    """
    bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_
    zero_
    """.split()
)

# These write values that do not depend on the old contents: repeating them changes nothing.
REPEATABLE = frozenset(
    """
    copy_ fill_ index_copy_ index_fill_ masked_fill_ scatter_ setitem zero_
    """.split()
)


@dataclass(frozen=True, slots=True)
class UnsaidWrite:
    """Operands that an operation writes although neither its name nor its schema says so."""

    operands: tuple[str, ...]  # names of parameters
    switch: str | None = None  # the parameter that switches it on; None if it is always on
    # Whether the result does not depend on them: they are updated from their old values, separately
    # from the result, like running statistics.
    apart: bool = False


_STATISTICS = ("running_mean", "running_var")

UNSAID_WRITES = {
    "_batch_norm_impl_index": UnsaidWrite(_STATISTICS, "training", apart=True),
    "_batch_norm_with_update": UnsaidWrite(_STATISTICS, apart=True),
    "_native_batch_norm_legit": UnsaidWrite(_STATISTICS, "training", apart=True),
    "batch_norm": UnsaidWrite(_STATISTICS, "training", apart=True),
    "batch_norm_gather_stats": UnsaidWrite(_STATISTICS, apart=True),
    "batch_norm_gather_stats_with_counts": UnsaidWrite(_STATISTICS, apart=True),
    "cudnn_batch_norm": UnsaidWrite(_STATISTICS, "training", apart=True),
    "embedding": UnsaidWrite(("weight",), "max_norm"),
    "embedding_bag": UnsaidWrite(("weight",), "max_norm"),
    "instance_norm": UnsaidWrite(_STATISTICS, "use_input_stats", apart=True),
    "miopen_batch_norm": UnsaidWrite(_STATISTICS, "training", apart=True),
    "native_batch_norm": UnsaidWrite(_STATISTICS, "training", apart=True),
}

# What an element of a result depends on.

# A row of the first operand, although the result has that operand's shape.
BY_ROW = frozenset(
    """
    _safe_softmax _softmax _weight_norm batch_norm cummax cummin cumprod cumsum group_norm
    instance_norm layer_norm log_softmax logcumsumexp logsumexp normalize rms_norm
    scaled_dot_product_attention softmax softmin sort
    """.split()
)
# These rows are the last dimensions, whose shape is given.
LAST_DIMS = frozenset(["layer_norm", "native_layer_norm", "rms_norm"])
# The dimension comes after another argument.
DIM_IS_THIRD = frozenset(["_weight_norm", "logsumexp_", "norm", "normalize", "vector_norm"])
# A row of the first operand and a column of the second one.
MATRIX_PRODUCTS = frozenset("bmm imatmul linear matmul mm".split())

# What becomes of masks.

# These take a dtype's largest number to keep values in range, not to make a mask.
LIMITERS = frozenset(
    """
    clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clip clip_ hardtanh hardtanh_
    nan_to_num nan_to_num_
    """.split()
)

# These recognise a NaN, and their results do not depend on it.
SEES_NAN = frozenset(
    """
    fmax fmin isfinite isinf isnan isneginf isposinf nan_to_num nan_to_num_ nanmean nanmedian
    nanquantile nansum
    """.split()
)

# Of these, the ones that make a NaN of nothing but NaN.
MEANS_OF_NUMBERS = frozenset("nanmean nanmedian nanquantile".split())

# These treat an infinity like any number that is large enough.
SATURATES = frozenset(
    """
    _safe_softmax _softmax atan clamp clamp_ clamp_max clamp_min clip clip_ elu erf exp gelu
    hardsigmoid hardswish hardtanh log_softmax relu relu6 scaled_dot_product_attention selu sigmoid
    silu softmax softplus tanh
    """.split()
)

# Small results of these are intended: they are not an underflow if they become 0.
VANISHES = frozenset(
    """
    _log_softmax _safe_softmax _softmax cross_entropy cross_entropy_loss gumbel_softmax log_softmax
    scaled_dot_product_attention softmax softmin
    """.split()
)

ADDITIONS = frozenset({"add", "add_", "sub", "sub_", "baddbmm"})

# A mask of -inf ends in these: no infinity in their results comes from it.
END_OF_MASKS = frozenset(
    """
    _native_multi_head_attention _safe_softmax _softmax _transformer_encoder_layer_fwd
    multi_head_attention_forward scaled_dot_product_attention softmax
    """.split()
)

# These mix elements, so that one intended infinity spoils others.
MIXES = frozenset(
    """
    _convolution _grouped_mm _scaled_mm adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    addbmm addbmm_ addmm addmm_ addmv addmv_ addr avg_pool1d avg_pool2d avg_pool3d baddbmm baddbmm_
    batch_norm bilinear bmm cdist chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d conv_transpose3d convolution cosine_similarity cumprod cumprod_ cumsum cumsum_
    dist dot einsum embedding_bag frobenius_norm group_norm gru inner instance_norm layer_norm
    linalg_matrix_norm linalg_multi_dot linalg_norm linalg_vector_norm linear
    local_response_norm lp_pool1d lp_pool2d lp_pool3d lstm matmul mean mm mv nanmean nansum
    native_batch_norm native_group_norm native_layer_norm norm normalize nuclear_norm
    pairwise_distance pdist prod renorm renorm_ rms_norm std std_mean sum tensordot trace
    trapezoid trapz var var_mean vdot
    """.split()
)

# Their first operand is only added to the result of the others.
MIX_AND_ADD = frozenset("addbmm addbmm_ addmm addmm_ addmv addmv_ addr baddbmm baddbmm_".split())

# No element of a result of these is larger than the elements of their operands ...
KEEPS = (
    MOVES
    | SELECTS
    | frozenset(
        """
        abs abs_ absolute amax amin aminmax copy_ cummax cummin fmax fmin index_copy index_copy_
        index_put index_put_ kthvalue max max_pool1d max_pool2d max_pool3d maximum min minimum msort
        neg neg_ negative negative_ relu relu_ sort topk
        """.split()
    )
)

# ... or than the numbers that they were given.
FILLS = LIMITERS | frozenset(
    """
    constant_pad_nd fill fill_ full full_like index_fill index_fill_ masked_fill masked_fill_
    masked_scatter masked_scatter_ new_full pad scatter scatter_ setitem where
    """.split()
)

# Their derivative jumps where two numbers that they compare are equal.
CHOOSES = frozenset(
    """
    abs absolute adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d amax amin aminmax
    clamp clamp_max clamp_min clip cummax cummin fmax fmin fmod fractional_max_pool2d
    fractional_max_pool3d hardshrink hardsigmoid hardswish hardtanh hinge_embedding_loss kthvalue
    l1_loss leaky_relu margin_ranking_loss max max_pool1d max_pool2d max_pool3d maximum median min
    minimum mode msort multi_margin_loss multilabel_margin_loss nanmedian prelu quantile relu relu6
    remainder sort softshrink threshold topk triplet_margin_loss
    """.split()
)

# Functions whose results are minimized. No infinity that they make is intended.
LOSSES = frozenset(
    """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy
    cross_entropy_loss ctc_loss gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss
    linear_cross_entropy margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
    multilabel_soft_margin_loss nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward
    nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
    triplet_margin_with_distance_loss
    """.split()
)

from torch import Tensor, dtype, layout

def bind(
    exchange: object,
    tensor: type[Tensor],
    parameter: type[Tensor],
    strided: layout,
    dtypes: frozenset[dtype],
    parallel_for: int,
    /,
) -> None: ...
def abs_min_max(tensor: object, /) -> tuple[float, float] | None: ...
def packed(pairs: object, /) -> bytearray | None: ...

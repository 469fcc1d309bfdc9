"""What to do about numbers that were bad when a model got them, or when they became a tensor.

Knows nothing of torch.
"""

from __future__ import annotations

from fxguard.findings import Fix
from fxguard.records import Role
from fxguard.source.suspects import Suspected

__all__ = ["fixes_of_entry", "fixes_of_given"]

HUGE = 1e30  # numbers as large as this are rarely computed


def fixes_of_given(
    role: Role,
    name: str,
    *,
    is_all_bad: bool = False,
    is_log: bool = False,
    is_inf: bool = False,
    row: int | None = None,
    written: str = "",
    has_nan: bool = False,
    largest: float = 0.0,
    suspects: Suspected | None = None,
    gradient: str = "",
    averaged: str = "",
) -> tuple[Fix, ...]:
    """What to do about a weight or an input that was already bad when the model got it.

    Args:
        role: its role in the model.
        name: the user's name for it.
        is_all_bad: whether every element is bad.
        is_log: whether all of its bad elements are -inf.
        is_inf: whether all of them are infinite, which memory that nobody wrote rarely is.
        row: the first bad sample of an input.
        written: the expression that the line itself computes it by, if that is known.
        has_nan: whether it holds a NaN.
        largest: the largest magnitude of its finite elements.
        suspects: what may have made it, by the statement that assigned it.
        gradient: the expression, if it is the gradient of a weight, ``p.grad``. Its backward was
            not told as the cause, since a loss scale explains it.
        averaged: the operation that averages over a buffer which began at inf, ``add (q.py:32)``.

    Example:
        >>> print(*fixes_of_given(Role.INPUT, "x", row=5))
        look at where sample 5 of x comes from: fxguard has not seen what made it (advice)
    """
    if role is Role.INPUT and gradient:
        unseen = ": isnan does not see inf" if is_inf else ""
        text = (
            f"skip a step where a gradient, here `{gradient}`, is not finite, by "
            f"torch.isfinite({gradient}).all(), and lower the loss scale if there is one{unseen}"
        )
    elif role is Role.INPUT:
        what = name if row is None else f"sample {row} of {name}"
        text = f"look at where {what} comes from: fxguard has not seen what made it"
        if written:
            text = f"look at `{written}` on this line, which is {name}"
        if is_log and "log" in written:
            text += ": log(0) is -inf"
        elif suspects is not None:
            text = suspects.text + _how_known(suspects)
            return (Fix("advice", text, suspects.rewrites, suspects.at, suspects.of),)
        elif is_log:
            text += "; -inf is what log(0), log1p(-1) and atanh(-1) give; of a count take log1p"
        elif is_inf and not written:
            text += "; +inf is what x / 0, -log(0) and atanh(1) give, and what is too large"
        elif largest > HUGE and not written:
            text += f"; with numbers as {largest:.2g}, NaN may be memory never written: torch.empty"
        elif has_nan and not written:
            text += "; NaN is a missing value, and what 0 / 0 and log of a negative number give"
    elif averaged:
        text = (
            f"begin with what the first batch gives: copy it while {name} is infinite, before "
            f"{averaged}: an average with inf stays inf, or turns NaN; a minimum or maximum may "
            "begin there"
        )
    elif role is Role.BUFFER and is_inf:
        made = "log(0) gives -inf" if is_log else "a division by zero gives inf"
        text = f"look at where {name} was computed: {made}; a checkpoint may hold it bad"
    elif is_all_bad:
        text = f"look at what wrote {name} before this call: it was bad when the call began"
    else:
        text = f"initialise {name}: the checkpoint may lack it, or hold it bad"
        if role is Role.WEIGHT:
            text += "; or look at what else wrote it, such as an update: this call found it so"
    return (Fix("advice", text),)


def fixes_of_entry(has_nan: bool, suspects: Suspected | None) -> tuple[Fix, ...]:
    """What to do about numbers that were bad when they became a tensor.

    Args:
        has_nan: whether there is a NaN among them.
        suspects: what may have made them, by the statement that assigned them.
    """
    if suspects is not None:
        return (Fix("advice", suspects.text + _how_known(suspects)),)
    missing = "NaN in a table or a file is a missing value" if has_nan else "no model takes inf"
    return (Fix("advice", f"drop it or fill it in where the data is read: {missing}"),)


def _how_known(suspects: Suspected) -> str:
    """What is added to a candidate that only its text tells of."""
    return "" if suspects.was_seen else "; fxguard has not seen it run"

"""Groups of origins that are one finding: one line of code, or weights that hold the same.

A line that failed in 26 turns of a loop, or in 12 equal layers, is told once. Knows nothing of
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxguard.findings import Origin

__all__ = ["by_cause", "group_headline", "more_text"]

MOST_NAMES = 3  # of weights that hold the same values, and of modules that failed alike


def by_cause(origins: Sequence[Origin]) -> list[list[Origin]]:
    """The origins in order, with those that are one finding in one group.

    Weights that hold the same form a group, and so do buffers. Weights that turned bad between the
    same batches also form one group, whatever they hold. Operations form a group if they are the
    same operation of the same line, and failed for the same cause.
    """
    groups: dict[object, list[Origin]] = {}
    for origin in origins:
        groups.setdefault(_finding(origin), []).append(origin)
    return list(groups.values())


def _finding(origin: Origin) -> object:
    """What two origins of one finding have in common."""
    if origin.standing and not origin.follows:
        since = origin.problem if origin.good_in is None else origin.good_in
        return origin.standing, since
    if not origin.is_operation or origin.frame.source is None:
        return origin
    place = (origin.phase, origin.frame.source, origin.what, origin.problem)
    if origin.follows:
        return place
    return *place, origin.cause, origin.cause_in_words, origin.not_judged, bool(origin.harm)


def group_headline(group: Sequence[Origin], totals: Mapping[str, int]) -> str:
    """``40 of 80 weights hold NaN: 0.weight, 0.bias, 1.weight and 37 more``.

    Args:
        group: one of :func:`by_cause`.
        totals: how many weights and buffers the model has, by ``"weight"`` and ``"buffer"``; 0 if
            not known.
    """
    first = group[0]
    held = first.standing
    if len(group) == 1 or not held:
        return first.message
    count = f"{len(group)}"
    if total := totals[held]:
        count = f"all {total}" if total == len(group) else f"{count} of {total}"
    names = [origin.what.removeprefix(f"{held} ") for origin in group]
    problems = {sign for origin in group for sign in origin.not_finite.split(" and ")}
    problem = " or ".join(sorted(problems, key=("NaN", "inf", "-inf").index))
    if first.good_in is not None:
        return f"{count} {held}s turned {problem} {first.turned_between}: {_listed(names)}"
    return f"{count} {held}s hold {problem}: {_listed(names)}"


def more_text(group: Sequence[Origin]) -> str:
    """``and 11 more like it: in blocks.1, blocks.2, blocks.3 and 8 more``; "" for one operation.

    In one module, it is the last turn of the loop: ``and 25 more like it, the last in run 29 of
    this line in this call, from 0``.
    """
    first, *others = group
    if not others or not first.is_operation:
        return ""
    names = dict.fromkeys(each.frame.name for each in others if each.frame.name)
    names.pop(first.frame.name, None)
    text = f"and {len(others)} more like it"
    if names:
        return f"{text}: in {_listed(list(names))}"
    turn = others[-1].turn.partition(";")[0]
    return f"{text}, the last in {turn}" if turn else text


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")

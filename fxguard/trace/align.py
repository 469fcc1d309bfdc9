"""Aligns the frames of two traces.

Names come first, as in ``git diff``: equal ends, then frames that are unique in both traces
(patience diff, Bram Cohen), then the same between them. In loops no frame is unique; they are
aligned by the fewest insertions and deletions (Eugene Myers, "An O(ND) Difference Algorithm and Its
Variations", 1986). The remaining frames are where the models differ: a frame may have another name
there, or correspond to several, and the numbers help to decide. Knows nothing of torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from typing import Any

from fxguard.records import Frame

__all__ = ["align", "renaming"]

LARGE = 100_000  # pairs of frames between two anchors; more are not weighed individually
MOST_EDITS = 400  # insertions and deletions in a loop; with more, its steps are counted

# Weights of the evidence that two frames correspond. Order is always kept. Evidence below SURE
# counts only if the numbers agree as well.
SAME_KIND, SAME_NAME, SAME_LAST_NAME, SAME_CODE, SAME_NUMBERS = 4, 4, 2, 2, 1
SURE = 6

SameNumbers = Callable[[Frame, Frame], bool]
Pair = tuple[int, int]


def align(a: Sequence[Frame], b: Sequence[Frame], same_numbers: SameNumbers) -> list[Pair]:
    """Pair the frames of two batches, in order.

    Args:
        a: the frames of one batch, in order of execution.
        b: those of the other batch.
        same_numbers: whether two frames made the same numbers; called where names do not decide.

    Returns:
        Pairs of indices, rising in both. A frame without a pair is in only one trace.
    """
    rename = renaming({frame.name for frame in a}, {frame.name for frame in b})
    keys_a = [(rename(frame.name), frame.kind_and_phase, frame.is_op) for frame in a]
    keys_b = [(frame.name, frame.kind_and_phase, frame.is_op) for frame in b]
    pairs: list[Pair] = []
    for low_a, high_a, low_b, high_b in _gaps(_common_subsequence(keys_a, keys_b), len(a), len(b)):
        part_a, part_b = a[low_a:high_a], b[low_b:high_b]
        if len(part_a) * len(part_b) > LARGE:
            between = _common_subsequence(
                [_last_name(f) for f in part_a], [_last_name(f) for f in part_b]
            )
        else:
            between = _best_alignment(part_a, part_b, rename, same_numbers)
        pairs += [(low_a + i, low_b + j) for i, j in between]
    return sorted(pairs + _common_subsequence(keys_a, keys_b))


def _last_name(frame: Frame) -> tuple[str, str, bool]:
    return frame.name.rpartition(".")[2], frame.kind_and_phase, frame.is_op


def renaming(names_a: Set[str], names_b: Set[str]) -> Callable[[str], str]:
    """Maps a module name of the first to the second: a wrapper adds or removes a first part."""
    renamings: list[Callable[[str], str]] = [lambda name: name]
    for first in sorted({name.partition(".")[0] for name in names_b} - {""}):
        renamings.append(lambda name, first=first: f"{first}.{name}".rstrip("."))  # type: ignore[misc]
    for first in sorted({name.partition(".")[0] for name in names_a} - {""}):
        renamings.append(  # other names stay
            lambda name, first=first: (  # type: ignore[misc]
                "" if name == first else name.removeprefix(f"{first}.")
            )
        )
    return max(renamings, key=lambda rename: len({rename(name) for name in names_a} & names_b))


def _gaps(pairs: Sequence[Pair], end_a: int, end_b: int) -> Iterator[tuple[int, int, int, int]]:
    """The gaps between pairs that have frames on both sides."""
    low_a = low_b = 0
    for i, j in [*pairs, (end_a, end_b)]:
        if i > low_a and j > low_b:
            yield low_a, i, low_b, j
        low_a, low_b = i + 1, j + 1


def _common_subsequence(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Pair]:
    """A long common subsequence of keys: equal ends, unique keys, then the same in each gap."""
    pairs: list[Pair] = []
    todo = [(0, len(a), 0, len(b))]
    while todo:
        low_a, high_a, low_b, high_b = todo.pop()
        while low_a < high_a and low_b < high_b and a[low_a] == b[low_b]:
            pairs.append((low_a, low_b))
            low_a, low_b = low_a + 1, low_b + 1
        while low_a < high_a and low_b < high_b and a[high_a - 1] == b[high_b - 1]:
            high_a, high_b = high_a - 1, high_b - 1
            pairs.append((high_a, high_b))
        part_a, part_b = a[low_a:high_a], b[low_b:high_b]
        anchors = _longest_rising(_unique(part_a), _unique(part_b))
        if not anchors:  # a loop: the same names over and over
            fewest = _fewest_edits(part_a, part_b)
            if fewest is not None:
                pairs += [(low_a + i, low_b + j) for i, j in fewest]
                continue
            anchors = _longest_rising(_numbered(part_a), _numbered(part_b))
        if anchors:
            pairs += [(low_a + i, low_b + j) for i, j in anchors]
            for from_a, to_a, from_b, to_b in _gaps(anchors, len(part_a), len(part_b)):
                todo.append((low_a + from_a, low_a + to_a, low_b + from_b, low_b + to_b))
    return sorted(pairs)


def _unique(keys: Sequence[Hashable]) -> dict[Any, int]:
    count = Counter(keys)
    return {key: i for i, key in enumerate(keys) if count[key] == 1}


def _numbered(keys: Sequence[Hashable]) -> dict[Any, int]:
    seen: Counter[Hashable] = Counter()
    places = {}
    for i, key in enumerate(keys):
        places[key, seen[key]] = i
        seen[key] += 1
    return places


def _fewest_edits(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Pair] | None:
    """The pairs of a longest common subsequence; None if there is little in common."""
    reached = {1: 0}  # on each diagonal, i - j, the furthest i
    history = []
    for edits in range(min(len(a) + len(b), MOST_EDITS) + 1):
        history.append(dict(reached))
        for diagonal in range(-edits, edits + 1, 2):
            i = _furthest(reached, diagonal, edits)
            while i < len(a) and i - diagonal < len(b) and a[i] == b[i - diagonal]:
                i += 1
            reached[diagonal] = i
            if i >= len(a) and i - diagonal >= len(b):
                return _backtracked(history, i, diagonal)
    return None


def _furthest(reached: dict[int, int], diagonal: int, edits: int) -> int:
    """How far an edit leads on a diagonal: a deletion in the first or in the second."""
    below = reached.get(diagonal - 1, -1)
    above = reached.get(diagonal + 1, -1)
    return above if diagonal == -edits or (diagonal != edits and below < above) else below + 1


def _backtracked(history: list[dict[int, int]], i: int, diagonal: int) -> list[Pair]:
    pairs = []
    for edits in reversed(range(len(history))):
        reached = history[edits]
        start = _furthest(reached, diagonal, edits)
        pairs += [(at, at - diagonal) for at in reversed(range(start, i))]
        came_from = diagonal + 1 if start == reached.get(diagonal + 1, -1) else diagonal - 1
        i, diagonal = reached.get(came_from, 0), came_from
    return pairs[::-1]


def _longest_rising(a: dict[Any, int], b: dict[Any, int]) -> list[Pair]:
    """The most pairs of equal keys that rise in both: a longest increasing subsequence."""
    pairs = [(i, b[key]) for key, i in a.items() if key in b]  # already rising in the first
    ends: list[int] = []  # for each length of a sequence, the smallest last position
    places: list[int] = []  # and its pair
    before = [-1] * len(pairs)
    for n, (_, j) in enumerate(pairs):
        length = bisect_left(ends, j)
        before[n] = places[length - 1] if length else -1
        ends[length : length + 1] = [j]
        places[length : length + 1] = [n]
    longest = []
    n = places[-1] if places else -1
    while n >= 0:
        longest.append(pairs[n])
        n = before[n]
    return longest[::-1]


def _best_alignment(
    a: Sequence[Frame], b: Sequence[Frame], rename: Callable[[str], str], same_numbers: SameNumbers
) -> list[Pair]:
    """The pairs, rising in both, with the most evidence (Needleman and Wunsch)."""
    best = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]  # best total weight from here on
    weights = [[_weight(x, y, rename, same_numbers) for y in b] for x in a]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            joined = weights[i][j] and weights[i][j] + best[i + 1][j + 1]
            best[i][j] = max(joined, best[i + 1][j], best[i][j + 1])
    pairs = []
    i = j = 0
    while i < len(a) and j < len(b):
        if best[i][j] == best[i + 1][j]:  # the last of equally good pairs: it ends a group
            i += 1
        elif best[i][j] == best[i][j + 1]:
            j += 1
        else:
            pairs.append((i, j))
            i, j = i + 1, j + 1
    return pairs


def _weight(x: Frame, y: Frame, rename: Callable[[str], str], same_numbers: SameNumbers) -> int:
    """The weight of the evidence that two frames correspond; 0 if it is not enough."""
    if x.phase != y.phase:
        return 0
    weight = SAME_KIND * (x.kind.lower() == y.kind.lower())  # nn.GELU or the function gelu
    if rename(x.name) == y.name:
        weight += SAME_NAME if x.is_op or y.is_op else SURE  # a module may be of another class
    elif _last_name(x)[0] == _last_name(y)[0]:
        weight += SAME_LAST_NAME
    if x.source is not None and y.source is not None and x.source.code == y.source.code != "":
        weight += SAME_CODE
    if not weight:
        return 0
    same = same_numbers(x, y)
    return weight + SAME_NUMBERS if same or weight >= SURE else 0

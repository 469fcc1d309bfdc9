"""What was kept for a backward, as runs of graphs in the order of the forward."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from fxguard.batch.kept_run import Kept, KeptRun, KeptTape, versions_of

__all__ = ["runs_of"]


def runs_of(kept: Iterable[Kept]) -> Iterator[KeptRun]:
    """What is kept, as runs in the order of the forward. What cannot run again is left out.

    What one tape has made at the same time is one run. A later run of that tape is cut where an
    earlier one ends: the gradients there are that one's.
    """
    ended: dict[int, set[int]] = {}  # id of a tape to the tensors with which earlier runs end
    in_order = sorted(kept, key=_when)
    for _, group in itertools.groupby(in_order, _when):
        together = list(group)
        tapes: dict[int, list[KeptTape]] = {}
        for each in together:
            if isinstance(each, KeptTape):
                if each.root not in ended.setdefault(id(each.tape), set()):
                    tapes.setdefault(id(each.tape), []).append(each)
            elif isinstance(each, KeptRun):
                yield each
        for key, parts in tapes.items():
            with contextlib.suppress(Exception):  # operations that do not run again
                yield _as_run(parts, ended[key])
            ended[key].update(part.root for part in parts)


def _when(kept: Kept) -> tuple[int, int]:
    return kept.batch_number, kept.index


def _as_run(parts: Sequence[KeptTape], ended: Collection[int]) -> KeptRun:
    """Parts of one tape as the run of a graph."""
    tape, roots = parts[0].tape, list(dict.fromkeys(part.root for part in parts))
    event = tape.run(roots, ended)
    assert event.args is not None
    assert tape.restore_settings is not None
    return KeptRun(
        event=event,
        batch_number=parts[0].batch_number,
        index=parts[0].index,
        args=event.args,
        random_state=event.random_state,
        versions=versions_of(event.args),
        restore_settings=tape.restore_settings,
        incoming={roots.index(part.root): part.incoming[0] for part in parts},
        of_tape=True,
    )

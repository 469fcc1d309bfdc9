"""Several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_threads(work: Callable[[int], Any], count: int = 2) -> list[Any]:
    """What each call returned, or the exception that it raised."""
    results: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            results[index] = work(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), name=str(i)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return results

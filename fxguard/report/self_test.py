"""The result of planting a NaN in every measured value of a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxguard.report.display import Display, Displayed
from fxguard.report.plain_page import plain_page, section, table
from fxguard.report.strict_json import plain_data, recorded, strict_json

__all__ = ["SelfTest"]


@dataclass(frozen=True, slots=True)
class SelfTest(Displayed):
    """The result of planting a NaN in every measured value.

    True if there was at least one, and each was found and named.
    """

    planted: int  # how many
    found: int  # how many were found and blamed on the operation where they were planted
    graphs: int  # captured graphs that ran
    missed: tuple[str, ...] = ()  # operations whose NaN was not
    left_out: tuple[tuple[str, int], ...] = ()  # why no NaN could be planted, and how often

    def __bool__(self) -> bool:
        return self.found == self.planted > 0

    def __str__(self) -> str:
        return "; ".join(self.verdict)

    @property
    def verdict(self) -> list[str]:
        """How many were found, which were not, and why some were not planted, in lines."""
        graphs = f"{self.graphs} graph" + ("" if self.graphs == 1 else "s")
        lines = [f"found {self.found} of {self.planted} planted NaN in {graphs}"]
        if self.missed:
            lines.append(f"missed: {', '.join(self.missed)}")
        if self.left_out:
            lines.append("not planted: " + ", ".join(f"{n} {why}" for why, n in self.left_out))
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The result as plain dicts, lists, strings and numbers; ``passed`` is its truth."""
        data = {**plain_data(self), "passed": bool(self), "verdict": self.verdict}
        return recorded("selftest", data)

    def to_json(self, indent: int | None = None) -> str:
        """The result as strict JSON."""
        return strict_json(self.to_dict(), indent)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network: what was missed, and what could not be planted.

        Args:
            path: path of the file; overwritten if it exists.
        """
        Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        return plain_page("Self-test", self.verdict, self._tables(), healthy=bool(self))

    def _tables(self) -> Iterator[str]:
        if self.missed:
            missed = ([title] for title in self.missed)
            yield section("Planted and not found", table(["operation"], missed))
        if self.left_out:
            counts = ([str(count), why] for why, count in self.left_out)
            yield section("Not planted", table(["values", "why"], counts))

    def _display(self) -> Display:
        return Display(self.verdict, healthy=bool(self), page=self._page, framed=False)

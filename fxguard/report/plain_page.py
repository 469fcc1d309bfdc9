"""A record as an HTML page without a script: its verdict, then drawings, tables and code.

All text that comes from a model is escaped, and a policy lets nothing be loaded. A record with
frames has a page with a chart of them: :mod:`fxguard.report.page`. Knows nothing of torch.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from fxguard.report.budget_chart import STYLE as STYLE_OF_BUDGET
from fxguard.report.error_chart import STYLE as STYLE_OF_CHART

__all__ = ["code", "paragraph", "plain_page", "section", "table"]

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { --ground: #fff; --text: #1c1f24; --quiet: #5d6673; --line: #d9dee5; --own: #c2410c;
  --inherited: #1d4ed8; --ill: #b91c1c; --well: #15803d; --panel: #f5f7fa; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --text: #e6e9ee; --quiet: #9aa5b4;
  --line: #343b46; --own: #fb923c; --inherited: #7aa2ff; --ill: #f87171; --well: #4ade80;
  --panel: #1d2229; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 72rem; background: var(--ground);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
.meta, .how { color: var(--quiet); } .how { max-width: 60rem; }
.verdict { border-left: 4px solid var(--well); background: var(--panel); padding: .6rem 1rem;
  margin: 1rem 0; } .verdict.ill { border-color: var(--ill); }
.framed h1, .framed .verdict { display: none; }
.verdict p { margin: 0; font-weight: 600; } pre { margin: .4rem 0 0; white-space: pre-wrap;
  font: 13px/1.5 ui-monospace, monospace; }
.scroll { overflow-x: auto; } table { border-collapse: collapse;
  font-size: 13px; width: 100%; } th, td { text-align: left; padding: .25rem .7rem .25rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; } td { font-variant-numeric: tabular-nums; }
tr.marked td { color: var(--ill); } td.why { white-space: normal; padding-left: 1.2rem; }
"""


def plain_page(
    title: str,
    verdict: Sequence[str],
    parts: Iterable[str],
    *,
    healthy: bool,
    meta: Sequence[str] = (),
) -> str:
    """The text of a page.

    Args:
        title: what the page is about.
        verdict: lines, the most important one first.
        parts: what follows, as HTML; the functions of this file make it.
        healthy: whether nothing is wrong.
        meta: lines below the title.
    """
    first, *more = verdict
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{STYLE}{STYLE_OF_CHART}"
        f"{STYLE_OF_BUDGET}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="meta">{"<br>".join(map(html.escape, meta))}</p>' if meta else "",
        f'<div class="verdict{"" if healthy else " ill"}"><p>{html.escape(first)}</p>',
        f"{code(chr(10).join(more))}</div>" if more else "</div>",
        *parts,
        "</body></html>",
        "",
    ]
    return "\n".join(lines).encode("utf-8", "xmlcharrefreplace").decode("utf-8")  # lone surrogates


def section(heading: str, *parts: str) -> str:
    """Some parts below a heading."""
    return "\n".join([f"<h2>{html.escape(heading)}</h2>", *parts])


def paragraph(text: str) -> str:
    """A quiet explanation."""
    return f'<p class="how">{html.escape(text)}</p>'


def code(text: str) -> str:
    """Text as it is, line by line."""
    return f"<pre>{html.escape(text)}</pre>"


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    marked: frozenset[int] = frozenset(),
    reasons: Sequence[str] = (),
) -> str:
    """A table.

    Args:
        headers: of the columns.
        rows: the cells of each row.
        marked: indices of the rows to look at.
        reasons: a line below each row; ``""`` for none. Empty for no row.
    """
    heads = "".join(f"<th>{html.escape(header)}</th>" for header in headers)
    lines = [f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>']
    for index, cells in enumerate(rows):
        mark = ' class="marked"' if index in marked else ""
        lines.append(f"<tr{mark}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
        if reasons and reasons[index]:
            reason = html.escape(reasons[index])
            lines.append(f'<tr{mark}><td class="why" colspan="{len(headers)}">{reason}</td></tr>')
    return "\n".join([*lines, "</tbody></table></div>"])

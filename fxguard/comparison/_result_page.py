"""Two models on one HTML page: the verdict, error against depth, a table. Knows nothing of torch.

The page has no script: the chart is drawn here and shows numbers as tooltips. All text from a model
is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from fxguard.comparison._result_chart import chart
from fxguard.comparison._result_text import Parts, cosine_text, number, verdict_lines
from fxguard.comparison.elements import Apart, Compared

__all__ = ["page_of"]

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
HEADERS = (
    *("operation", "own error", "own cosine", "inherited error", "total error"),
    *("A from float64", "B from float64", "nearer", "line"),
)
HOW_TO_READ = (
    "The own error is what an operation of B makes of the operands that A's operation had, against "
    "what A's made of them. The inherited error is the rest of the difference: it came with the "
    "operands. Both are the largest difference of an element, relative to the largest magnitude in "
    "A."
)
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
svg { width: 100%; height: auto; display: block; } svg text { font: 12px system-ui, sans-serif;
  fill: var(--quiet); } .grid { stroke: var(--line); } .own { stroke: var(--own); }
.inherited { stroke: var(--inherited); } path { fill: none; stroke-width: 1.8; }
circle.own { fill: var(--own); } circle.inherited { fill: var(--inherited); }
circle { stroke-width: 0; } svg text.of-own { fill: var(--own); font-weight: 600; }
svg text.of-inherited { fill: var(--inherited); font-weight: 600; }
.first { stroke: var(--ill); stroke-dasharray: 5 4; } svg text.of-first { fill: var(--ill);
  font-weight: 600; } .scroll { overflow-x: auto; } table { border-collapse: collapse;
  font-size: 13px; width: 100%; } th, td { text-align: left; padding: .25rem .7rem .25rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; } td { font-variant-numeric: tabular-nums; }
tr.significant td { color: var(--ill); } td.why { white-space: normal; padding-left: 1.2rem; }
"""


def page_of(found: Parts) -> str:
    """The text of the page."""
    first, *more = verdict_lines(found)
    title = "Where two models part" if found.significant else "Two models, by elements"
    state = "verdict" if found.outcome == "agree" else "verdict ill"
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        f'<p class="meta">A: {html.escape(found.a)}<br>B: {html.escape(found.b)}</p>',
        f'<div class="{state}"><p>{html.escape(first)}</p>',
        f"<pre>{html.escape(chr(10).join(more))}</pre></div>" if more else "</div>",
    ]
    if found.operations:
        lines += ["<h2>Error against depth</h2>", chart(found.operations), _paragraph(HOW_TO_READ)]
    for name, parts in (
        ("Operations", found.operations),
        ("What compiled graphs returned", found.graphs),
        ("Outputs", found.outputs),
        ("Gradients", found.gradients),
    ):
        if parts:
            lines += [f"<h2>{name}</h2>", *_table(parts)]
    text = "\n".join([*lines, "</body></html>", ""])
    return text.encode("utf-8", "xmlcharrefreplace").decode("utf-8")  # half a surrogate pair


def _paragraph(text: str) -> str:
    return f'<p class="how">{html.escape(text)}</p>'


def _table(parts: Sequence[Compared]) -> Iterator[str]:
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f"<th>{header}</th>" for header in HEADERS) + "</tr></thead><tbody>"
    for each in parts:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(each))
        mark = ' class="significant"' if each.is_significant else ""
        yield f"<tr{mark}>{cells}</tr>"
        if each.reason:
            reason = html.escape(each.reason)
            yield f'<tr{mark}><td class="why" colspan="{len(HEADERS)}">{reason}</td></tr>'
    yield "</tbody></table></div>"


def _cells(each: Compared) -> list[str]:
    own = each.own
    return [
        each.heading,
        _relative(own),
        "-" if own is None or own.cosine is None else cosine_text(own.cosine),
        _relative(each.inherited),
        _relative(each.total),
        *(["-", "-"] if each.errors is None else [number(error) for error in each.errors]),
        each.nearer or "-",
        "" if each.source is None else each.source.place,
    ]


def _relative(apart: Apart | None) -> str:
    return "-" if apart is None else number(apart.relative)

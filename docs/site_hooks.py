"""What ``mkdocs build`` puts into the site beside docs/: README.md and the like, and the reference.

The documents are written for GitHub: they link to ``../CONTRIBUTING.md``, and README.md links to
``docs/recipes.md``. In the site all of these are pages, and such links lead to them.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")

# Documents in the root of the repository, and where they are in the site. (MkDocs takes each
# README.md for the index of its folder.)
BESIDE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
SCHEMA = {"fxguard/report/schema.json": "schema.json"}  # which is no page

# The pages of the reference: title, then what is on it, in the order of `help(fxguard)`.
REFERENCE: dict[str, tuple[str, ...]] = {
    "Watching a model": (
        *("fxguard.instrument", "fxguard.remove", "fxguard.watch", "fxguard.guard_of"),
        *(f"fxguard.types.{name}" for name in ("Guard", "SelfTest")),
        *(f"fxguard.types.{name}" for name in ("InstrumentOptions", "OnDetect", "Granularity")),
        *("fxguard.DebugUnderflowOverflow", "fxguard.detect_overflow", "fxguard.get_abs_min_max"),
    ),
    "What it says": (
        "fxguard.NonFiniteError",
        *(
            f"fxguard.types.{name}"
            for name in ("Report", "Origin", "Frame", "Row", "Source", "Fix")
        ),
        *(f"fxguard.types.{name}" for name in ("Climb", "Growth", "QuietFault")),
        *("fxguard.FxguardError", "fxguard.BatchLimitReached", "fxguard.HistoryEvent"),
    ),
    "Training runs": (
        "fxguard.load_history",
        *(f"fxguard.types.{name}" for name in ("History", "Track", "Series", "Event")),
    ),
    "Other dtypes": (
        *("fxguard.forecast", "fxguard.types.Forecast", "fxguard.types.ForecastRow"),
        *("fxguard.types.PrecisionPlan", "fxguard.keep_float32", "fxguard.error_budget"),
        *(f"fxguard.types.{name}" for name in ("ErrorBudget", "ErrorShare", "Choice")),
        "fxguard.dependencies",
        *(f"fxguard.types.{name}" for name in ("Dependencies", "Dependence", "PathStep")),
    ),
    "Comparing": (
        "fxguard.compare",
        *(f"fxguard.types.{name}" for name in ("Comparison", "Compared", "Apart")),
        "fxguard.record",
        *(f"fxguard.types.{name}" for name in ("RunComparison", "RunDivergence", "OneSide")),
        *(f"fxguard.types.{name}" for name in ("OutputsApart", "RoundingShare")),
        "fxguard.load_trace",
        *(f"fxguard.types.{name}" for name in ("Trace", "TracedBatch", "Fingerprint")),
        "fxguard.diff",
        *(f"fxguard.types.{name}" for name in ("Diff", "BatchDiff", "Match", "RowPair")),
        "fxguard.types.UsualChange",
    ),
    "Compilers and graphs": (
        *("fxguard.backend", "fxguard.types.CompilerBackend"),
        *("fxguard.insert_checks", "fxguard.types.Plan", "fxguard.frames_of"),
    ),
    "Numerical tests": (
        *("fxguard.testing.find_overflow", "fxguard.testing.Overflow"),
        *("fxguard.testing.assert_finite", "fxguard.testing.numerically_stable"),
        *("fxguard.testing.Stability", "fxguard.testing.Deviation"),
        *("fxguard.testing.check_profile", "fxguard.testing.like", "fxguard.testing.tensors"),
        *("fxguard.testing.elements", "fxguard.testing.shapes"),
    ),
    "Trainers and TensorBoard": (
        "fxguard.integrations.transformers.FxguardCallback",
        "fxguard.integrations.transformers.use_for_debug_option",
        "fxguard.integrations.lightning.FxguardCallback",
        *(f"fxguard.integrations.tensorboard.log_{what}" for what in ("ranges", "report", "trace")),
    ),
}

# What of a class a user calls, where the rest of the house calls more.
MEMBERS = {
    "fxguard.types.Guard": (
        *("batch_number", "last_report", "trace_path", "notes", "plans", "optimizer_step"),
        *("frames", "coverage", "selftest"),
    ),
    "fxguard.types.CompilerBackend": ("last_report", "frames", "coverage"),
    "fxguard.integrations.transformers.FxguardCallback": (),
    "fxguard.integrations.lightning.FxguardCallback": (),
}


def reference() -> dict[str, str]:
    """The pages of the reference: the path of each in the site, and its Markdown."""
    made = {}
    for title, names in REFERENCE.items():
        blocks = [f"# {title}"]
        for name in names:
            options: dict[str, Any] = {"show_root_full_path": "integrations" in name}
            if name in MEMBERS:
                options["members"] = list(MEMBERS[name])
            blocks.append(f"::: {name}\n    options: {json.dumps(options)}")
        made[f"reference/{title.lower().replace(' ', '-')}.md"] = "\n\n".join(blocks) + "\n"
    return made


@event_priority(100)  # before mkdocstrings reads its options
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the sections that are lists of files, and say what has an entry."""
    decisions = sorted(f"decisions/{file.name}" for file in (DOCS / "decisions").glob("*.md"))
    lists: dict[str, list[str]] = {"Decisions": decisions, "API reference": list(reference())}
    for section in config.nav or []:
        for title in lists.keys() & section.keys():
            section[title] = lists[title]
    names = [name for page in REFERENCE.values() for name in page]
    options = config.plugins["mkdocstrings"].config.handlers["python"]["options"]
    options["extensions"] = [{"docs/site_docstrings.py": {"names": names}}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of the root, and the reference."""
    for name, path in {**BESIDE, **SCHEMA}.items():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / name)))
    for path, text in reference().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links lead to pages of the site, and write the rest as Python's Markdown reads it."""
    path = page.file.src_uri
    if path.startswith("reference/"):
        return markdown
    lines, in_code = [], False
    for line in LINK.sub(lambda link: in_site(link[1], path), markdown).split("\n"):
        in_code ^= line.startswith("```")
        if not in_code:  # a list in a list: two spaces on GitHub, four here
            line = " " * (len(line) - len(line.lstrip(" "))) + line
        lines.append(line.removesuffix(" no-run") if line.startswith("```") else line)
    return "\n".join(lines)


def on_page_content(html: str, **_: Any) -> str:
    """Leave out the dash behind an attribute that nothing is said about."""
    return re.sub(r"\s*\N{EN DASH}\s*<div class=.doc-md-description.>\s*</div>", "", html)


def in_site(link: str, path: str) -> str:
    """A relative link of a document as it has to be in the site.

    Args:
        link: as it stands in the document, without an anchor.
        path: of the document in the site, such as ``symptoms/which-dtype.md``.
    """
    at_root = path in BESIDE.values()
    folder = "" if at_root else posixpath.join("docs", posixpath.dirname(path))
    target = posixpath.normpath(posixpath.join(folder, link))
    target = {**BESIDE, **SCHEMA}.get(target, target.removeprefix("docs/"))
    return posixpath.relpath(target, posixpath.dirname(path) or ".")

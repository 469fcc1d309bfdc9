"""The site that ``./dev docs`` builds: whole, without the network, and of no particular machine."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fxguard
from fxguard import testing
from support.needs import needs

ROOT = Path(__file__).resolve().parents[2]
# What a browser fetches with a page. (Other addresses in it are links, or names of formats.)
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?([^"'\s>]+)"""
    r"""|<link\b[^>]*\brel=["']?(?:stylesheet|preload|icon|preconnect)["']?[^>]*\bhref=["']?([^"'\s>]+)"""
    r"""|@import\s+["']([^"']+)|url\(["']?((?!data:|\#)[^"')]+)"""
)

needs("mkdocs")
needs("mkdocstrings_handlers.python")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """docs/site_hooks.py."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``./dev docs`` builds it, with no way out to the network."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "https")}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_document_is_a_page(site: Path, hooks: ModuleType) -> None:
    """Those beside docs/ too, and Python files are none."""
    documents = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    documents += [Path(page) for page in hooks.BESIDE.values()]
    assert [page for page in documents if not (site / page).with_suffix(".html").is_file()] == []
    assert not list(site.rglob("*.py"))


def test_links_to_the_root_stay_in_the_site(site: Path) -> None:
    """From docs/ to CONTRIBUTING.md, and from README.md into docs/."""
    assert 'href="contributing.html#the-map-of-the-house"' in (site / "index.html").read_text()
    assert 'href="symptoms/my-loss-is-nan.html"' in (site / "overview.html").read_text()
    assert 'src="images/page.png"' in (site / "overview.html").read_text()


def test_every_public_name_has_an_entry(site: Path, hooks: ModuleType) -> None:
    """Those of fxguard, fxguard.types and fxguard.testing."""
    given_out = [name for name in fxguard.__all__ if not name.startswith("_") and name != "types"]
    public = {f"fxguard.{name}" for name in given_out}
    public |= {f"fxguard.types.{name}" for name in fxguard.types.__all__}
    public |= {f"fxguard.testing.{name}" for name in testing.__all__}
    listed = {name for names in hooks.REFERENCE.values() for name in names}
    assert public <= listed
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    assert [name for name in listed if f'id="{name}"' not in pages] == []


def test_docstrings_are_read_as_they_are_written(site: Path) -> None:
    """No role is left, an example is a block of code, and a field has the words of its comment."""
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    assert not re.search(r":(func|class|meth|attr):", pages)
    assert "<summary>Example" not in pages
    assert "<blockquote>" not in pages
    assert "counted from 0" in pages


def test_nothing_comes_from_the_network(site: Path) -> None:
    """Scripts, styles, fonts and pictures are files of the site."""
    files = [file for file in site.rglob("*") if file.suffix in {".html", ".css"}]
    fetched = {
        address
        for file in files
        for found in FETCHED.findall(file.read_text(encoding="utf-8"))
        for address in found
        if address.startswith(("http:", "https:", "//"))
    }
    assert len(files) > 50
    assert fetched == set()


def test_nothing_tells_where_it_was_built(site: Path) -> None:
    """No folder of the machine is in it."""
    files = [file for file in site.rglob("*") if file.suffix in {".html", ".json", ".xml", ".js"}]
    told = {str(ROOT), str(site), str(Path.home())} - {"/", "/root"}
    assert not [f.name for f in files if any(t in f.read_text(encoding="utf-8") for t in told)]


def test_the_reader_of_addresses_finds_them() -> None:
    """The clean twin."""
    found = FETCHED.findall('<script src="https://a/b.js"></script><a href="https://c">')
    assert [address for each in found for address in each if address] == ["https://a/b.js"]
    found = FETCHED.findall('<link rel="stylesheet" href="https://a/b.css">')
    assert [address for each in found for address in each if address] == ["https://a/b.css"]

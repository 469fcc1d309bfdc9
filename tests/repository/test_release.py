"""What would be published holds what it has to; ``./dev release`` also uses it."""

from __future__ import annotations

import email
import re
import shutil
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import fxguard
from support.loading import module_of
from support.needs import do_without, needs

pytestmark = pytest.mark.slow

ROOT = Path(fxguard.__file__).parents[1]
LINK = re.compile(r"(?<!`)\[[^\]]*\]\((?!https?:)([^)#]*)[^)]*\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


# Under another name than "release": pytest, run inside of a test, would warn of that one.
release = module_of(ROOT / "release.py", "the_rehearsal")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source distribution and the wheel without the part in C, built with what is here."""
    for module in ("build", "setuptools", "twine"):
        needs(module)
    if not (ROOT / ".git").exists():
        do_without("what git tracks: this is no clone")
    folder = tmp_path_factory.mktemp("release")
    kinds = ("pure wheel", "sdist")
    return release.build(folder / "dist", folder, "--no-isolation", kinds=kinds)


def text_in(file: Path, name: str) -> str:
    """The text of one file of a distribution, by the end of its name."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            (found,) = (each for each in wheel.namelist() if each.endswith(name))
            return wheel.read(found).decode()
    with tarfile.open(file) as sdist:
        found, *_ = sorted((each for each in sdist.getnames() if each.endswith(name)), key=len)
        content = sdist.extractfile(found)
        assert content is not None
        return content.read().decode()


def metadata(built: dict[str, Path]) -> Message:
    """What PyPI would show."""
    return email.message_from_string(text_in(built["pure wheel"], ".dist-info/METADATA"))


def test_all_that_builds_it_is_in_the_source_distribution(built: dict[str, Path]) -> None:
    """The build compares it with what git tracks, and these names stand there for themselves."""
    names = release.names_in(built["sdist"])
    assert names >= {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    assert names >= {"_fxguard_autoload.py", "_fxguard_pytest.py", "fxguard/measure/_native.c"}
    assert "fxguard/measure/_operations.h" in names
    assert names >= {f"fxguard/measure/_{name}.h" for name in ("described", "losses", "norms")}
    assert names >= {"fxguard/py.typed", "fxguard/report/page/uPlot-LICENSE"}


def test_the_wheel_holds_the_package_and_the_licences(built: dict[str, Path]) -> None:
    """Two modules, the package with the parts of its page, and both licences."""
    names = release.names_in(built["pure wheel"])
    assert {name.partition("/")[0] for name in names} == {
        *("fxguard", "_fxguard_autoload.py", "_fxguard_pytest.py"),
    }
    pages = {"fxguard/report/page/page.html", "fxguard/report/history_page/history.html"}
    assert names >= {"fxguard/py.typed", *pages}
    assert not [name for name in names if "_native.c" in name or "_native.abi3" in name]
    for name in ("LICENSE", "fxguard/report/page/uPlot-LICENSE"):
        text = text_in(built["pure wheel"], f"/licenses/{name}")
        assert text == (ROOT / name).read_text(encoding="utf-8")


def test_what_is_missing_or_too_much_is_noticed(built: dict[str, Path], tmp_path: Path) -> None:
    """The clean twin: the comparison fails for a wheel with a stray file, and without the C."""
    with_more = tmp_path / built["pure wheel"].name
    shutil.copy(built["pure wheel"], with_more)
    with zipfile.ZipFile(with_more, "a") as wheel:
        wheel.writestr("fxguard/notes.txt", "")
    with pytest.raises(release.ReleaseError, match=r"should not have \['fxguard/notes.txt'\]"):
        release.check_contents("pure wheel", with_more)
    with pytest.raises(release.ReleaseError, match=r"lacks \['fxguard/measure/_native.abi3.so'\]"):
        release.check_contents("native wheel", built["pure wheel"])


def test_metadata_says_what_is_so(built: dict[str, Path]) -> None:
    """The version, both licences, the supported versions of Python, and the commands."""
    says = metadata(built)
    assert says["Version"] == fxguard.__version__
    assert says["License-Expression"] == "Apache-2.0 AND MIT"
    assert f"Requires-Python: >={release.supported()[0]}\n" in str(says)
    assert says["Description-Content-Type"] == "text/markdown"
    points = text_in(built["pure wheel"], ".dist-info/entry_points.txt")
    assert "fxguard = fxguard.cli.main:main" in points
    assert {"[pytest11]", "[torch.backends]", "[torch_dynamo_backends]"} <= set(points.split("\n"))


def test_the_page_on_pypi_stands_alone(built: dict[str, Path]) -> None:
    """No relative link or picture is left; the files that it names are in the sdist."""
    page, readme = str(metadata(built).get_payload()), (ROOT / "README.md").read_text("utf-8")
    files = {file for file in LINK.findall(FENCED.sub("", readme)) if file}
    assert "CHANGELOG.md" in files
    assert not LINK.findall(FENCED.sub("", page))
    assert not [file for file in files if f"`{file}`" not in page]
    assert files <= release.names_in(built["sdist"])
    assert FENCED.findall(page) == FENCED.findall(readme)


ENTRY = "## {}\n\n### Added\n\n- A thing.\n"


@pytest.mark.parametrize(
    ("version", "titles", "is_right"),
    [
        ("0.2.0.dev0", ["Unreleased"], True),
        ("0.2.0.dev0", ["0.2.0 - 2026-12-01"], False),
        ("0.2.0", ["0.2.0 - 2026-12-01", "0.1.0 - 2026-01-01"], True),
        ("0.2.0", ["0.2.0"], False),
        ("0.2.0", ["Unreleased"], False),
        ("0.2.0", ["Unreleased", "0.2.0 - 2026-12-01"], False),
        ("0.2.0", ["0.1.0 - 2026-01-01"], False),
    ],
)
def test_a_version_has_its_section(version: str, titles: list[str], is_right: bool) -> None:
    """With a date where it is released, and as Unreleased where it is not."""
    changelog = "# Changes\n\n" + "\n".join(map(ENTRY.format, titles))
    if is_right:
        release.check_changelog(version, changelog)
        changelog = changelog.replace("- A thing.\n", "")
    with pytest.raises(release.ReleaseError, match=r"CHANGELOG.md .*0.2.0"):
        release.check_changelog(version, changelog)


def test_interpreters_are_found() -> None:
    """The one that runs, and none of a version that does not exist."""
    assert release.find(release.RUNNING) == sys.executable
    assert release.find("3.99") is None
    assert release.RUNNING in release.supported()


@pytest.mark.parametrize("error", [None, release.ReleaseError("it broke")])
def test_one_failure_ends_the_rehearsal_with_status_1(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each Python has a line when it has run, and a row in the table at the end."""
    files = {kind: Path(kind) for kind in release.KINDS}
    monkeypatch.setattr(release, "build", lambda *_: files)
    monkeypatch.setattr(
        release, "attempt", lambda _, file, *__: error if file.name == "sdist" else None
    )
    assert release.main(release.RUNNING) == (0 if error is None else 1)
    lines = capsys.readouterr().out.splitlines()
    assert ("FAILED  it broke" in "\n".join(lines)) == (error is not None)
    assert [line.split()[-1] for line in lines[-3:-1]] == ["passed", "passed"]
    assert lines[-1].endswith("passed" if error is None else "FAILED")


def test_a_python_that_was_asked_for_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of pyproject.toml that is not here is only said, if there is another one."""
    files = {kind: Path(kind) for kind in release.KINDS}
    monkeypatch.setattr(release, "build", lambda *_: files)
    monkeypatch.setattr(release, "attempt", lambda *_: None)
    monkeypatch.setattr(release, "find", {release.RUNNING: sys.executable}.get)
    assert release.main() == 0
    assert release.main("3.99") == 1
    assert release.main("3.99", release.RUNNING) == 1
    monkeypatch.setattr(release, "find", {}.get)
    assert release.main() == 1


def test_programs_are_run_without_the_checkout(tmp_path: Path) -> None:
    """Variables that would lead to it are taken away, and the exit status counts."""
    program = "import os, sys; print(sorted(set(os.environ) & {'PYTHONPATH', 'FXGUARD'}))"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("FXGUARD", "1")
        assert release.run([sys.executable, "-c", program], tmp_path) == "[]\n"
    with pytest.raises(release.ReleaseError, match="exit status 3 and not 0"):
        release.run([sys.executable, "-c", "raise SystemExit(3)"], tmp_path)

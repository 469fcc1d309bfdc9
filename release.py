"""The rehearsal of a release: build it, and use it where nothing else is installed.

    ./dev release            on every Python of pyproject.toml that is here
    ./dev release 3.11 3.13  on these

builds into dist/ what would be published: the source distribution, a wheel with the part in C for
this system, and one without it for every system. Twine looks at them. Each is then installed into
an empty environment in a temporary folder, with torch at the version of constraints.txt, and used
as a user would: the commands, a script that overflows and one that does not, the pytest plugin.
Every Python tries the wheel with the part in C. One of them, the one that runs this if it is among
them, tries the other two as well.

Nothing is published. The exit status is 1 where anything failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
DIST = ROOT / "dist"
RUNNING = f"{sys.version_info[0]}.{sys.version_info[1]}"
DETECTION = 3  # exit status of `fxguard run` after a detection

IN_C, NOT_IN_C = "measured in C", "measured by torch's operations"
KINDS = {  # what is built: its file, and how it measures where there is a C compiler
    "pure wheel": ("fxguard-*-py3-none-any.whl", NOT_IN_C),
    "native wheel": ("fxguard-*-cp310-abi3-*.whl", IN_C),
    "sdist": ("fxguard-*.tar.gz", IN_C),
}
OF_GIT = (".ci/", ".gitignore")  # tracked, and of no use without a clone
PART_IN_C = "fxguard/measure/_native.abi3.so"
# A Python that was built in a home folder lets the linker write the folder into all that it links.
LINKER = {"LDSHARED": "cc -shared"} if sys.platform == "linux" else {}

MODEL = """\
import sys

import torch


class Square(torch.nn.Module):
    def forward(self, x):
        return x * x


def train(value):
    return Square()(torch.full((4,), float(value), dtype=torch.float16)).sum()


if __name__ == "__main__":
    print("the sum is", train(sys.argv[1]).item())
"""
VERDICT = "mul made inf (model.py:8): overflow"
TESTS = """\
import pytest
from model import Square, train


def test_fixture(fxguard):
    with pytest.raises(Exception, match="mul made inf"):
        fxguard.instrument(Square())(train(2).new_full((4,), 300))


def test_option():
    train(300)
"""


class ReleaseError(Exception):
    """What is not as it should be."""


def main(*asked: str) -> int:
    """Build, try, and print a table; return the exit status."""
    rows = [("Python", "file", "seconds", "result")]
    with tempfile.TemporaryDirectory(prefix="fxguard-release-") as folder:
        try:
            files = build(DIST, Path(folder))
        except ReleaseError as error:
            print(f"FAILED: {error}")
            return 1
        pythons = {version: find(version) for version in asked or supported()}
        here = [version for version, python in pythons.items() if python]
        tries_all = RUNNING if RUNNING in here else "".join(here[:1])
        for version, python in pythons.items():
            if python is None:
                rows.append((version, "-", "-", "FAILED: not here" if asked else "not here"))
                print(*rows[-1], sep="  ", flush=True)
                continue
            for kind in KINDS if version == tries_all else ("native wheel",):
                start = time.monotonic()
                error = attempt(python, files[kind], KINDS[kind][1], Path(folder))
                seconds = f"{time.monotonic() - start:.0f}"
                result = "passed" if error is None else "FAILED"
                rows.append((version_of(python), files[kind].name, seconds, result))
                print(*rows[-1], *filter(None, [error]), sep="  ", flush=True)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    results = {row[-1].partition(":")[0] for row in rows[1:]}
    return 0 if "passed" in results and "FAILED" not in results else 1


# Build.


def build(
    target: Path, folder: Path, *options: str, kinds: Sequence[str] = tuple(KINDS)
) -> dict[str, Path]:
    """Build these kinds from a copy of what git tracks; return the file of each.

    The copy is clean: setuptools would take what earlier builds have left in a checkout.
    """
    version = package_version()
    check_changelog(version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    copy = folder / "checkout"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "build", *options, "--outdir", str(target), str(copy)]
    for kind in (each for each in kinds if each != "sdist"):  # a wheel is built from one, anew
        run(command, folder, FXGUARD_WITHOUT_C=str(int(kind == "pure wheel")), **LINKER)
    files = {}
    for kind in kinds:
        found = list(target.glob(KINDS[kind][0]))
        if len(found) != 1 or f"-{version}" not in found[0].name:
            raise ReleaseError(f"one {kind} of {version} expected in {target}, got {found}")
        files[kind] = found[0]
        check_contents(kind, found[0])
        print(f"built {found[0].name} ({found[0].stat().st_size / 1000:.0f} kB)", flush=True)
    paths = [str(file) for file in files.values()]
    run([sys.executable, "-m", "twine", "check", "--strict", *paths], folder)
    print("twine has nothing to say against them", flush=True)
    return files


def package_version() -> str:
    """The version that fxguard says it has."""
    text = (ROOT / "fxguard" / "__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)[0]


def check_changelog(version: str, changelog: str) -> None:
    """A release has a section with its date; what is developed has one called Unreleased."""
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    title = "Unreleased" if ".dev" in version else rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d"
    if not any(re.match(rf"{title}\n.*^- ", text, re.DOTALL | re.MULTILINE) for text in sections):
        raise ReleaseError(f"CHANGELOG.md has no section for {version}, or an empty one")
    if ".dev" not in version and any(text.startswith("Unreleased") for text in sections):
        raise ReleaseError(f"CHANGELOG.md still has what is not in {version}: Unreleased")


def tracked() -> list[str]:
    """What git tracks, as paths below the checkout."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]


def check_contents(kind: str, file: Path) -> None:
    """A distribution holds what git tracks of it, and nothing else."""
    surplus, missing = names_in(file) - expected(kind), expected(kind) - names_in(file)
    if surplus or missing:
        raise ReleaseError(
            f"{file.name} lacks {sorted(missing)} and should not have {sorted(surplus)}"
        )
    if kind == "native wheel":
        with zipfile.ZipFile(file) as wheel:
            if f"{Path.home()}/".encode() in wheel.read(PART_IN_C):
                raise ReleaseError(f"{PART_IN_C} names a folder of whoever built it")


def expected(kind: str) -> set[str]:
    """What a distribution of this kind has to hold, but for what describes it."""
    if kind == "sdist":
        return {name for name in tracked() if not name.startswith(OF_GIT)}
    modules = ("fxguard/", "_fxguard_autoload.py", "_fxguard_pytest.py")
    names = {
        name for name in tracked() if name.startswith(modules) and not name.endswith((".c", ".h"))
    }
    return names | {PART_IN_C} if kind == "native wheel" else names


def names_in(file: Path) -> set[str]:
    """The files of a distribution, but for what describes it."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            return {name for name in wheel.namelist() if ".dist-info/" not in name}
    with tarfile.open(file) as sdist:
        inside = [each.name.partition("/")[2] for each in sdist if each.isfile()]
    return {
        name
        for name in inside
        if not name.startswith(("fxguard.egg-info/", "PKG-INFO", "setup.cfg"))
    }


# Try.


def supported() -> list[str]:
    """The versions of Python that pyproject.toml names."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def find(version: str) -> str | None:
    """An interpreter of this version: this one, one on PATH, or one of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [sys.executable, shutil.which(f"python{version}")]
    candidates += sorted(map(str, pyenv.glob(f"{version}.*/bin/python")), reverse=True)
    return next(
        (each for each in candidates if each and version_of(each).startswith(f"{version}.")), None
    )


def version_of(python: str) -> str:
    """The full version of an interpreter, or nothing where it does not run."""
    command = [python, "-c", "import platform, ensurepip; print(platform.python_version())"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def attempt(python: str, file: Path, way: str, folder: Path) -> ReleaseError | None:
    """Try a file in an environment that is removed afterwards; return what went wrong."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            use(install(python, file, Path(place)), way, Path(place))
    except ReleaseError as error:
        return error
    return None


def install(python: str, file: Path, folder: Path) -> Path:
    """Make an environment with torch, pytest and this file; return where its programs are."""
    run([python, "-m", "venv", str(folder / "venv")], folder)
    programs = folder / "venv" / "bin"
    pip = [str(programs / "python"), "-m", "pip"]
    for what in (pinned("torch", "pytest"), [str(file)]):
        run([*pip, "install", "--quiet", *what], folder)
    run([*pip, "check"], folder)
    return programs


def pinned(*names: str) -> list[str]:
    """Packages at the versions of constraints.txt.

    Not the whole file: its Triton stands beside torch's CPU build, and other builds bring theirs.
    """
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found = dict(re.findall(r"^([\w-]+)==([^;\s]+)", text, re.MULTILINE))
    return [f"{name}=={found[name]}" for name in names]


def use(programs: Path, way: str, folder: Path) -> None:
    """What a user does with a fresh installation."""
    python, fxguard = str(programs / "python"), str(programs / "fxguard")
    (folder / "model.py").write_text(MODEL)
    (folder / "test_model.py").write_text(TESTS)
    version = package_version()
    where = Path(run([python, "-c", "import fxguard; print(fxguard.__file__)"], folder).strip())
    if folder.resolve() not in where.resolve().parents or "site-packages" not in where.parts:
        raise ReleaseError(f"fxguard was imported from {where}")
    about = run([python, "-m", "fxguard.about"], folder)
    expect([f"fxguard {version}\n", way], about)
    expect([f"fxguard {version}\n"], run([fxguard, "--version"], folder))
    expect(["usage: fxguard", "run", "report", "diff"], run([fxguard, "--help"], folder))
    expect([VERDICT], run([fxguard, "run", "model.py", "300"], folder, status=DETECTION))
    expect(["the sum is 16.0"], run([fxguard, "run", "model.py", "2"], folder))
    with_variable = run([python, "model.py", "300"], folder, status=DETECTION, FXGUARD="1")
    expect([VERDICT], with_variable)
    tested = run([python, "-m", "pytest", "--fxguard"], folder, status=1)
    expect([f"fxguard-{version}", "1 failed, 1 passed", "fxguard report", VERDICT], tested)


def run(command: Sequence[str], folder: Path, status: int = 0, **variables: str) -> str:
    """Run a program as somebody without a checkout would; return what it wrote."""
    ours = ("PYTHON", "VIRTUAL_ENV", "FXGUARD")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "NO_COLOR": "1", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode != status:
        ended = f"exit status {done.returncode} and not {status}"
        raise ReleaseError(f"{' '.join(command)}: {ended}\n{done.stdout}")
    return done.stdout


def expect(texts: Sequence[str], output: str) -> None:
    """All of these stand in what a program wrote."""
    for text in texts:
        if text not in output:
            raise ReleaseError(f"{text!r} is not in:\n{output}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

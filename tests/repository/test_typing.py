"""What a type checker tells a user of fxguard, who has installed it by ``pip install -e``."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import fxguard
from support.needs import do_without, needs

pytestmark = pytest.mark.campaign  # two minutes, and what it reads changes rarely

ROOT = Path(fxguard.__file__).parents[1]

PROGRAM = """
import fxguard
from fxguard.integrations import lightning, transformers
from fxguard.testing.session import Fixture
from torch import Tensor, nn
from typing_extensions import Unpack


class Net(nn.Linear):
    depth: int = 2


def stop(report: fxguard.types.Report) -> None:
    print(report.message)


model: Net = fxguard.instrument(Net(2, 2), on_detect=stop, granularity="module")
depth: int = fxguard.keep_float32(model, [":linear"]).depth
name: str = fxguard.keep_float32(model, [":linear"]).depth  # wrong
fxguard.instrument(model, on_detect="warn", ignore=["*:log"], underflow=0.5)
fxguard.instrument(model, on_detect="stop")  # wrong
fxguard.instrument(model, granularity="ops")  # wrong
fxguard.backend("eager", on_detect="raise", granularity="op")
fxguard.backend("eager", on_detect="stop")  # wrong
fxguard.backend("eager", granularity="ops")  # wrong
with fxguard.watch(model, on_detect="warn", trace_batch_nums=[1]) as guard:
    number: int = guard.batch_number
fxguard.watch(model, on_detect="stop")  # wrong
fxguard.watch(model, granularity="ops")  # wrong
fxguard.watch(model, strikt=True)  # wrong
fxguard.watch(model, replay=1)  # wrong
fxguard.no_such_name  # wrong
fxguard.types.no_such_name  # wrong
fxguard.Report  # wrong
frames: list[fxguard.types.Frame] = fxguard.guard_of(model).frames()
plain: Net = fxguard.remove(model)
fixture = Fixture({"strict": True})
again: Net = fixture.instrument(model, on_detect="warn")
fixture.instrument(model, on_detect="stop")  # wrong
transformers.FxguardCallback(on_detect="warn", replay=True)
transformers.FxguardCallback(strikt=True)  # wrong
lightning.FxguardCallback(granularity="ops")  # wrong


def guarded(model: Net, **options: Unpack[fxguard.types.InstrumentOptions]) -> Net:
    return fxguard.instrument(model, **options)


guarded(model, strict=True)
guarded(model, on_detect="stop")  # wrong


@fxguard.instrument
def loss(x: Tensor) -> Tensor:
    return x.log()


value: Tensor = loss(Tensor())
number = loss("x")  # wrong
outcome: bool = fxguard.compare(model, model).outcome == "same"  # wrong
chosen: fxguard.types.Granularity = "ops"  # wrong
budget: fxguard.types.PrecisionPlan = fxguard.forecast(model, dtype="fp16").plan()
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python in which a copy of this checkout is installed by ``pip install -e``."""
    needs("mypy")
    for module in ("pip", "setuptools"):  # which patch Python when they are imported
        if importlib.util.find_spec(module) is None:
            do_without(f"{module} is not there")
    checkout, environment = tmp_path / "checkout", tmp_path / "environment"
    checkout.mkdir()
    for each in ROOT.glob("[!.]*.*"):
        if each.is_file():
            shutil.copy(each, checkout)
    shutil.copy(ROOT / "LICENSE", checkout)
    shutil.copytree(ROOT / "fxguard", checkout / "fxguard")
    venv.create(environment)
    python = environment / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = Path(subprocess.check_output([python, "-c", asked], text=True).strip())
    others = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (folder / "others.pth").write_text("\n".join(others) + "\n")  # torch, and what builds fxguard
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-e", "."]
    subprocess.run(
        install, cwd=checkout, env={**plain, "FXGUARD_WITHOUT_C": "1"}, check=True, timeout=300
    )
    return python


def test_a_type_checker_finds_fxguard_and_refuses_wrong_options(
    python: Path, tmp_path: Path
) -> None:
    """Each line of the program that is marked as wrong is an error, and no other line is."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # With the settings and the cache of the checkout, torch need not be read again.
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--strict"]
    settings += ["--cache-dir", str(ROOT / ".mypy_cache"), "--python-executable", str(python)]
    plain = {name: value for name, value in os.environ.items() if "PYTHONPATH" not in name}
    found = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, program.name],
        cwd=tmp_path,
        env=plain,
        capture_output=True,
        text=True,
        timeout=600,
    )
    errors = re.findall(r"^program\.py:(\d+): error", found.stdout, re.MULTILINE)
    marked = [i for i, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")]
    assert sorted(set(map(int, errors))) == marked, found.stdout + found.stderr

"""Small real NaNs: where a patch is offered, it repairs; and the patches that were wrong once."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.errors import FxguardError
from support.loading import module_of
from support.masks import Function
from support.stories import overflows, poles, rounded
from support.stories.story import Story

TABLES = {"OVERFLOW": overflows, "POLES": poles, "PRECISION": rounded}
OF_TABLES = [(table, name) for table, module in TABLES.items() for name in getattr(module, table)]
REFUSED = {
    "a count as half": "a cast failed",
    "a picture of 16 bits as half": "a cast failed",
    "normalize, in half": "its gradient was not tried",
    "std of one sample": "may be a divisor",
    "PPO's ratio": "does not rewrite one expression",  # only a part of it is bounded after
}


def report_of(story: Story) -> fxguard.types.Report | None:
    reports: list[fxguard.types.Report] = []
    forward: Any = story.forward
    model = forward if isinstance(forward, nn.Module) else Function(forward)
    fxguard.instrument(model, on_detect=reports.append)
    try:
        with torch.no_grad():
            model(*story.inputs)
    except RuntimeError:
        assert reports, "the model raised, and there is no report"
    finally:
        fxguard.remove(model)
    return reports[0] if reports else None


def patch_of(report: fxguard.types.Report) -> tuple[str, str]:
    """The patch, and the reason why there is none."""
    try:
        return report.patch(), ""
    except FxguardError as error:
        return "", str(error)


@pytest.mark.sampled
@pytest.mark.parametrize(("table", "name"), OF_TABLES)
def test_a_patch_repairs(table: str, name: str, tmp_path: Path) -> None:
    story: Story = getattr(TABLES[table], table)[name]
    report = report_of(story)
    assert report is not None
    diff, refusal = patch_of(report)
    assert not diff or name not in REFUSED
    if not diff:
        assert refusal.startswith("no patch: ")
        assert REFUSED.get(name, "") in refusal
        return
    file = TABLES[table].__file__
    assert file is not None
    copy = tmp_path / Path(file).name
    copy.write_bytes(Path(file).read_bytes())
    hunks = diff[diff.index("--- ") :].splitlines(keepends=True)
    hunks[:2] = [f"--- a/{copy.name}\n", f"+++ b/{copy.name}\n"]
    subprocess.run(["git", "apply"], cwd=tmp_path, input="".join(hunks).encode(), check=True)
    patched: Story = getattr(module_of(copy, f"patched_{copy.stem}"), table)[name]
    assert report_of(patched) is None
    made = patched.forward(*patched.inputs)
    for each in made if isinstance(made, (list, tuple)) else [made]:
        assert isinstance(each, Tensor)
        assert each.isfinite().all()

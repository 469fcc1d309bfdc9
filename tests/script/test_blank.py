"""Memory without contents that holds bad numbers by chance, under ``fxguard run``."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.programs import run_python

START = "import torch\ntorch.use_deterministic_algorithms(True)\n"  # fills such memory with NaN

COUNTS = """
from fxguard.script.bad_values import BadValues

begins = BadValues._begin
all_of = []
def begin(self, *args):
    all_of.append(self)
    return begins(self, *args)
BadValues._begin = begin
"""

TRAINS = """
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
buffer = torch.empty(5)
buffer[:] = 1.0
for _ in range(3):
    loss = model(torch.ones(2, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(len(all_of) > 0, all_of[0]._operations.has_bad, all_of[0]._forward)
"""

READS = {
    "prints": ("print(torch.empty(3).tolist())", "empty"),
    "adds": ("print((torch.empty(3) + 1).sum().item())", "empty"),
    "a part": (
        "x = torch.empty(4)\nx[1:] = 1\nprint((x * 2).sum().item())",
        "uninitialised memory",
    ),
    "asks": ("x = torch.empty(4)\nif x.isnan().any(): raise ValueError('nan')", "empty"),
    "differentiates": (
        "x = torch.empty(4).requires_grad_()\n(x * 2).sum().backward()",
        "uninitialised memory",
    ),
}


def test_a_layer_that_fills_its_weights_is_well(tmp_path: Path) -> None:
    """Once they are written nothing is bad, and later operations are looked at in short."""
    (tmp_path / "train.py").write_text(START + COUNTS + TRAINS, encoding="utf-8")
    ran = run_python(tmp_path, "-m", "fxguard", "run", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "True False None"


@pytest.mark.parametrize("name", READS)
def test_reading_it_is_a_detection(name: str, tmp_path: Path) -> None:
    """Whether it was written in part, added to, or only read."""
    text, said = READS[name]
    (tmp_path / "reads.py").write_text(START + text, encoding="utf-8")
    ran = run_python(tmp_path, "-m", "fxguard", "run", "reads.py")
    assert ran.returncode == 3, ran.stderr
    assert said in ran.stderr

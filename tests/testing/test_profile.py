"""The file that keeps the headroom of every operation."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard.report.errors import NumericsError
from fxguard.testing import check_profile

HALF = torch.float16


class Net(nn.Module):
    def __init__(self, factor: float = 1.0, masked: bool = False) -> None:
        super().__init__()
        self.factor, self.masked = factor, masked

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.factor
        x = x * x
        if self.masked:
            return x.masked_fill(x > 1, -math.inf).softmax(-1)
        return x.softmax(-1)


X = torch.tensor([[1.0, 2.0, 16.0]], dtype=HALF)


def test_the_file(tmp_path: Path) -> None:
    """A line for each operation, with its range and its headroom in bits."""
    file = tmp_path / "deep" / "net.txt"
    check_profile(Net(), X, file, update=True)
    assert file.read_text() == (
        "# fxguard profile 2\n"
        "# not checked: 0\n"
        "# error of the output: 3.62e-110\n"  # of e^-252, of which float16 makes 0
        "#  abs min   abs max   over  under  dtype     operation\n"
        "  1.00e+00  1.60e+01   12.0   18.0  float16   mul\n"
        "  1.00e+00  2.56e+02    8.0   22.0  float16   mul #2\n"
        "  0.00e+00  1.00e+00   16.0   14.0  float16   softmax\n"
    )
    check_profile(Net(), X, file)
    check_profile(Net(), [X], file)
    check_profile(Net(), {"x": X}, file)


def test_bits_are_those_of_the_dtype(tmp_path: Path) -> None:
    """``log2`` to the largest and to the smallest normal number."""
    file = tmp_path / "net.txt"
    check_profile(torch.neg, torch.tensor([3.0]), file, update=True)
    over, under = map(float, file.read_text().splitlines()[-1].split()[2:4])
    info = torch.finfo(torch.float32)
    assert over == pytest.approx(math.log2(info.max / 3), abs=0.05)
    assert under == pytest.approx(math.log2(3 / info.tiny), abs=0.05)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Net(factor=2.1), "mul: over 12.0 -> 10.9 bits, largest 1.60e+01 -> 3.36e+01 in float16"),
        (Net(factor=0.4), "mul: under 18.0 -> 16.7 bits"),
        (Net(factor=64.0), "mul #2: made inf, and 2.56e+02 before"),
        (Net(factor=0.0), "mul: made zeros, and 1.60e+01 before"),
        (nn.Softmax(-1), "mul #2: is no longer there, or no longer checked"),
    ],
)
def test_losses(tmp_path: Path, model: nn.Module, message: str) -> None:
    """Headroom that is lost, a new inf, an operation that is gone: each is said."""
    file = tmp_path / "net.txt"
    check_profile(Net(), X, file, update=True)
    with pytest.raises(NumericsError) as caught:
        check_profile(model, X, file)
    assert message in str(caught.value)
    assert "--fxguard-update" in str(caught.value)
    assert (caught.value.report is not None) == ("inf" in message)


def test_what_may_change(tmp_path: Path) -> None:
    """Less than ``bits``, more headroom than before, and new operations that are well."""
    file = tmp_path / "net.txt"
    check_profile(Net(), X, file, update=True)
    check_profile(Net(factor=1.4), X, file)
    check_profile(Net(factor=2.1), X, file, bits=3)
    check_profile(Net(factor=0.9), X, file)
    with pytest.raises(NumericsError):
        check_profile(Net(factor=1.4), X, file, bits=0.1)


class Positions(nn.Module):
    """Adds phases, of positions in one dtype or another."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[-1], dtype=self.dtype)
        return x + (position * 1.5).cos().to(x.dtype)


def test_lost_digits(tmp_path: Path) -> None:
    """The headroom is the same; the output is not, and the line that it comes from is named."""
    file, x = tmp_path / "net.txt", torch.rand(2, 600).bfloat16()
    check_profile(Positions(torch.float32), x, file, update=True)
    before = float(file.read_text().splitlines()[2].removeprefix("# error of the output: "))
    assert 0 < before < torch.finfo(torch.bfloat16).eps
    check_profile(Positions(torch.float32), x, file)
    with pytest.raises(NumericsError) as caught:
        check_profile(Positions(torch.bfloat16), x, file, bits=4)
    said = str(caught.value)
    assert re.search(r"the output is \d+ % off, and was 0\.\d+ % off:\n +\d+ %  arange ", said)


def test_the_error_of_an_output_may_be_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "net.txt"
    check_profile(Net(), X / 9, file, update=True)
    monkeypatch.setattr("fxguard.testing.profile.budget_as_it_is", lambda *given: None)
    with pytest.raises(NumericsError, match=r"error of the output is not known, and was \d"):
        check_profile(Net(), X / 9, file)
    check_profile(Net(), X / 9, file, update=True)
    assert "# error of the output: not known\n" in file.read_text()
    check_profile(Net(), X / 9, file)
    monkeypatch.undo()
    check_profile(Net(), X / 9, file)


def test_roundings_may_change(tmp_path: Path) -> None:
    """An error of some roundings says nothing, however small it was."""
    file = tmp_path / "net.txt"
    check_profile(Net(), X / 3, file, update=True)
    text = file.read_text()
    file.write_text(re.sub("(output: ).*", r"\g<1>1e-9", text))
    check_profile(Net(), X / 3, file)


def test_a_mask_stays_a_mask(tmp_path: Path) -> None:
    """An infinity that was there when the file was written is nothing new; elsewhere it is."""
    file = tmp_path / "net.txt"
    x = X.clone()
    check_profile(Net(masked=True), x, file, update=True)
    assert "inf" in file.read_text()
    check_profile(Net(masked=True), x, file)
    check_profile(Net(), x, file, update=True)
    with pytest.raises(NumericsError, match="masked_fill: is new, and made inf"):
        check_profile(Net(masked=True), x, file)


def test_operations_that_stop_being_checked(tmp_path: Path) -> None:
    file = tmp_path / "net.txt"
    check_profile(Net(), X, file, update=True)
    text = file.read_text()
    file.write_text(text.replace("# not checked: 0", "# not checked: 5"))
    check_profile(Net(), X, file)
    file.write_text(text.replace("# not checked: 0", "# not checked: -1"))
    with pytest.raises(NumericsError, match="0 operations are not checked, -1 before"):
        check_profile(Net(), X, file)


def test_no_file(tmp_path: Path) -> None:
    """It is not made in silence: CI would pass for ever."""
    with pytest.raises(NumericsError, match=r"there is no profile .*--fxguard-update"):
        check_profile(Net(), X, tmp_path / "none.txt")
    assert not (tmp_path / "none.txt").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello\nworld\n!\n",
        "# fxguard profile 1\n# not checked: 0\n#\n",
        "# fxguard profile 2\n# not checked: x\n# error of the output: 0.0\n#\n",
        "# fxguard profile 2\n# not checked: 0\n# error of the output: x\n#\n",
        "# fxguard profile 2\n# not checked: 0\n# error of the output: 0.0\n#\n1 2 3\n",
        "# fxguard profile 2\n# not checked: 0\n# error of the output: 0.0\n#\n1 2 3 float16 mul\n",
        "# fxguard profile 2\n# not checked: 0\n# error of the output: 0\n#\n<<<<<<< HEAD and on\n",
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    """A merge that went wrong, or another file: a clear error."""
    file = tmp_path / "net.txt"
    file.write_text(text)
    with pytest.raises(fxguard.FxguardError, match="is not a profile of this version"):
        check_profile(Net(), X, file)


def test_a_model_whose_operations_are_not_measured(tmp_path: Path) -> None:
    model = fxguard.instrument(Net(), replay=True)
    with pytest.raises(
        fxguard.FxguardError, match="replay=True or full_every, which measures too little"
    ):
        check_profile(model, X, tmp_path / "net.txt", update=True)

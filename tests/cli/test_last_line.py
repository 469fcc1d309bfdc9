"""The last line of a run: what was checked and found, and how far that goes."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from fxguard.cli._summary import Headroom, Summary
from support.programs import run_python

HEAD = """
import os, signal, torch
from torch import nn
torch.manual_seed(0)
"""


def last_line(folder: Path, script: str, *options: str) -> str:
    """The last line of a run that succeeds."""
    folder.joinpath("script.py").write_text(HEAD + script)
    ended = run_python(folder, "-m", "fxguard", "run", *options, "script.py")
    assert ended.returncode == 0, ended.stderr
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("fxguard: ")
    return line.removeprefix("fxguard: ")


TRANSFORMS = """
class Scale(nn.Module):
    def forward(self, x):
        return x * 2
steps = [Scale() for _ in range(3)]
small, net = nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
for i in range(4):
    x = torch.randn(2, 4)
    for each in steps:
        x = each(x)
    net(x).mean().backward()
small(x)
nn.functional.mse_loss(x, x)
"""


def test_models_come_first_and_the_largest_leads(tmp_path: Path) -> None:
    """Modules without weights are counted, each once, however often they are called."""
    line = last_line(tmp_path, TRANSFORMS)
    assert line == (
        "checked 4 batches of net (3 operations), 1 batch of small (1 operation) "
        "and 3 modules without weights; nothing found"
    )


def test_modules_without_weights_are_named_if_there_is_nothing_else(tmp_path: Path) -> None:
    """A script that only calls a loss hears which one."""
    script = "nn.MSELoss()(torch.ones(2), torch.zeros(2))\n"
    assert last_line(tmp_path, script) == "checked 1 batch of MSELoss (1 operation); nothing found"


LOSS = """
net = nn.Linear(4, 4)
for i in range(3):
    (net(torch.ones(2, 4)) - SHIFT).log().sum().backward()
"""


@pytest.mark.parametrize("to_file", [False, True])
def test_with_traced_batches_it_says_that_detection_was_off(tmp_path: Path, to_file: bool) -> None:
    """The first inf or NaN of the trace is named; nothing is said to be found or not found."""
    options = ("--trace-batch-nums", "1", *(("--trace-to", "traces") if to_file else ()))
    off = "ran 3 batches of Linear (1 operation); detection was off, because batches were traced: "
    bad = last_line(tmp_path, LOSS.replace("SHIFT", "100"), *options)
    assert bad == off + "the trace holds inf or NaN, first in log, batch 1 (script.py:8)"
    good = last_line(tmp_path, LOSS.replace("SHIFT", "-100"), *options)
    assert good == off + "in the trace of batch 1 every output is finite"


def test_a_traced_batch_that_never_ran_is_no_good_news(tmp_path: Path) -> None:
    line = last_line(tmp_path, LOSS.replace("SHIFT", "100"), "--trace-batch-nums", "7,8")
    assert line.endswith("because batches were traced: none of batches 7, 8 ran")


MASKED = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        mask = torch.ones(4, 4).triu(1).bool()
        scores = self.fc(x).masked_fill(mask, float("-inf"))
        return SCORES.softmax(-1)
Attention()(torch.ones(4, 4))
"""


def test_a_mask_is_not_the_first_inf_of_a_trace(tmp_path: Path) -> None:
    """Intended infinities are none of its faults; the fault behind them is named."""
    options = ("--trace-batch-nums", "0")
    good = last_line(tmp_path, MASKED.replace("SCORES", "scores"), *options)
    assert good.endswith("in the trace of batch 0 every output is finite")
    bad = last_line(
        tmp_path, MASKED.replace("SCORES", "(scores - 100).abs().neg().log()"), *options
    )
    assert "the trace holds inf or NaN, first in log, batch 0 (script.py:" in bad


def test_headroom_is_told_where_it_is_narrow() -> None:
    """From 1,000 times on it is no news; the clean twin is test_run's model in float16."""
    summary = Summary(Counter({"Net": 2}), weights={"Net": 8}, operations={"Net": 3})
    summary.least = Headroom(1000.0, "linear", 65.5, "float16")
    assert summary.line() == "checked 2 batches of Net (3 operations); nothing found"
    summary.least = Headroom(999.4, "linear", 65.5, "float16")
    assert summary.line().endswith(
        "float16: the largest value of the last batch was 65.5, at linear: "
        "999 times below the limit"
    )


def test_memory_that_nobody_has_written_is_no_headroom(tmp_path: Path) -> None:
    """A tensor out of ``torch.empty`` holds any number until something is written."""
    script = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        out = torch.empty(2, 4)
        view = out.view(4, 2)
        out.copy_(self.fc(x))
        return out
junk = [torch.full((2, 4), 3e38) for _ in range(2000)]
del junk
Net()(torch.ones(2, 4))
"""
    assert "headroom" not in last_line(tmp_path, script)


CHILDREN = """
import multiprocessing
def child(ends):
    net = nn.Linear(4, 4)
    for i in range(4):
        net(torch.ones(1, 4))
    if ends == "at once":
        os._exit(0)
    if ends == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=child, args=("ENDS",))
    process.start()
    process.join()
"""


@pytest.mark.parametrize("ends", ["at once", "killed", "as usual"])
def test_a_process_without_a_last_word_counts_at_least(tmp_path: Path, ends: str) -> None:
    """What it had checked by its last note is said to be the least."""
    line = last_line(tmp_path, CHILDREN.replace("ENDS", ends))
    if ends == "as usual":
        assert line == "checked 4 batches of Linear (1 operation); nothing found"
    else:
        assert line == "checked at least 1 batch of Linear (1 operation); nothing found"


def test_a_note_survives_json() -> None:
    """What a process leaves is what another reads."""
    left = Summary(
        Counter({"Net": 2}),
        weights={"Net": 8},
        without_weights=3,
        operations={"Net": 3},
        least=Headroom(2.0, "here", 1.0, "float16"),
        unfinished=1,
        traced=(1, 2),
        seen_traced={1},
        traced_bad="log, batch 1",
        processes=1,
    )
    assert Summary.from_dict(left.to_dict()) == left


ENDS = """
net = nn.Linear(4, 1)
for i in range(5):
    net(torch.ones(2, 4)).sum().backward()
    if i == 3:
        END
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGINT)", -2),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("{}['missing']", 1),
    ],
)
@pytest.mark.parametrize("how", ["command", "module", "variable"])
def test_a_run_that_was_cut_short_is_summed_up(
    tmp_path: Path, end: str, status: int, how: str
) -> None:
    """After Ctrl-C, SIGTERM and an exception; with a module and with the variable, too."""
    script = HEAD + ENDS.replace("END", end)
    tmp_path.joinpath("script.py").write_text(script)
    before = "import _fxguard_autoload; _fxguard_autoload.start()\n"
    tmp_path.joinpath("armed.py").write_text(before + script)
    if how == "variable":
        ended = run_python(tmp_path, "armed.py", env={"FXGUARD": "1"})
    else:
        named = ("-m", "script") if how == "module" else ("script.py",)
        ended = run_python(tmp_path, "-m", "fxguard", "run", *named)
    assert ended.returncode == status, ended.stderr
    *shown, last = ended.stderr.splitlines()
    assert last == "fxguard: checked 4 batches of Linear (1 operation); nothing found"
    assert not any(f"fxguard{os.sep}" in line for line in shown)
    assert bool(shown) == (status != -15)


def test_a_rank_dies_of_sigterm_without_a_handler(tmp_path: Path) -> None:
    """It may be waiting for another rank inside one call; then no handler of Python's would run."""
    script = HEAD + ENDS.replace("END", "os.kill(os.getpid(), signal.SIGTERM)")
    tmp_path.joinpath("script.py").write_text(script)
    ended = run_python(tmp_path, "-m", "fxguard", "run", "script.py", env={"WORLD_SIZE": "2"})
    assert (ended.returncode, ended.stderr) == (-15, "")


REBUILT = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(4, 4)
    def forward(self, x):
        mask = torch.triu(torch.full((4, 4), float("-inf")), 1)
        return torch.softmax(self.score(x) + mask, -1)
model = Net()
for step in range(4):
    if step == 2:
        model = Net()
    loss = model(torch.randn(4, 4)).square().sum()
    loss.backward()
    del loss
"""


def test_nothing_is_noted_of_fxguards_own_arithmetic(tmp_path: Path) -> None:
    """A model that is dropped in the middle of a script is counted there."""
    tmp_path.joinpath("script.py").write_text(HEAD + REBUILT)
    ended = run_python(
        tmp_path, "-m", "fxguard", "run", "--history", str(tmp_path / "history"), "script.py"
    )
    assert ended.stderr == "fxguard: checked 4 batches of Net (5 operations); nothing found\n"

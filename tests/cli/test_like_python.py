"""A script prints under ``fxguard run`` what it prints under Python, and then one line of fxguard.

Each program runs twice, and the streams and exit statuses are compared. Python underlines parts of
lines in tracebacks. These marks are left out of the comparison.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import run_python, with_this_checkout

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
"""

MODEL = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)
    def forward(self, x):
        y = self.fc(x)
        return torch.cat([y, x[:, None]], 1)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.norm = Block(), nn.LayerNorm(8)
    def forward(self, x):
        return self.norm(self.block(x))
"""

# What programs do wrong, or only say, by what it is.
PROGRAMS = {
    "a shape error in nested modules": MODEL + "def main():\n    Net()(torch.ones(2, 4))\nmain()\n",
    "a shape error in a sequence": """
nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))(torch.ones(2, 4))
""",
    "a shape error in a loss": """
net = nn.Linear(4, 3)
loss = F.cross_entropy(net(torch.ones(2, 4)), torch.tensor([0, 1, 2]))
""",
    "a backward without a scalar": """
nn.Linear(4, 3)(torch.ones(2, 4)).backward()
""",
    "a second backward": """
y = nn.Linear(4, 3)(torch.ones(2, 4)).square().sum()
y.backward()
y.backward()
""",
    "an index out of range, in a graph that ran before": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.Embedding(10, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    def forward(self, x):
        y = self.words(x)
        return self.fc(y)
def main():
    net = Net()
    net(torch.tensor([1, 2]))
    net(torch.tensor([1, 200]))
main()
""",
    "an index out of range in a model of torch's modules": """
net = nn.Sequential(nn.Sequential(nn.Embedding(10, 4)), nn.Linear(4, 4))
for index in (1, 77):
    net(torch.tensor([index]))
""",
    "an error behind a graph break": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        y = self.fc(x)
        if y.abs().sum() > 0:
            raise ValueError(f"shape {tuple(y.shape)}")
        return y
try:
    Net()(torch.ones(2, 4))
except ValueError as error:
    raise RuntimeError("the batch is bad") from error
""",
    "errors that the script logs": MODEL
    + """
import logging, traceback
logging.basicConfig(format="%(levelname)s %(message)s")
def main():
    try:
        Net()(torch.ones(2, 4))
    except RuntimeError:
        logging.exception("batch failed")
    try:
        {}["lr"]
    except KeyError:
        traceback.print_exc()
    raise SystemExit(7)
main()
""",
    "a hook that raises": """
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
def hook(module, args, output):
    raise LookupError("from a hook")
net[1].register_forward_hook(hook)
net(torch.ones(1, 4))
""",
    "a thread that raises": """
import atexit, threading
atexit.register(print, "at exit")
net = nn.Linear(4, 4)
def work():
    net(torch.ones(1, 4))
    net(torch.ones(1, 5))
thread = threading.Thread(target=work, name="worker")
thread.start()
thread.join()
""",
    "a generator that raises": """
net = nn.Linear(4, 4)
def batches():
    yield torch.ones(1, 4)
    raise OSError("shard 3 is gone")
for y in (net(batch) for batch in batches()):
    y.sum().backward()
""",
    "a wrong option": """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", required=True)
nn.Linear(2, 2)(torch.ones(1, 2))
parser.parse_args()
""",
    "a message of sys.exit": """
nn.Linear(2, 2)(torch.ones(1, 2))
raise SystemExit("no such file: data")
""",
    "a hook of the script for exceptions": """
import sys
sys.excepthook = lambda kind, error, trace: print("mine:", kind.__name__, error)
nn.Linear(2, 2)(torch.ones(1, 2))
raise ValueError("x")
""",
    "an interrupt": """
import os, signal
net = nn.Linear(4, 1)
for i in range(5):
    net(torch.ones(2, 4)).sum().backward()
    if i == 3:
        os.kill(os.getpid(), signal.SIGINT)
""",
    "an interrupt in a model": """
import os, signal
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        y = self.fc(x)
        stop()
        return y
@torch._dynamo.disable
def stop():
    os.kill(os.getpid(), signal.SIGINT)
Net()(torch.ones(1, 4))
""",
    "an interrupt that the script handles": """
import os, signal
net = nn.Linear(4, 1)
try:
    net(torch.ones(2, 4))
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("stopped early")
""",
    "a signal that ends it": """
import os, signal
net = nn.Linear(4, 1)
net(torch.ones(2, 4))
print(signal.getsignal(signal.SIGTERM), flush=True)
print("lost in a buffer")
os.kill(os.getpid(), signal.SIGTERM)
""",
    "signals that the script handles": """
import os, signal
stop = []
before = signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
print(before)
nn.Linear(4, 1)(torch.ones(2, 4))
os.kill(os.getpid(), signal.SIGTERM)
print(stop, signal.signal(signal.SIGTERM, signal.SIG_DFL) is not before)
""",
    "child processes": """
import multiprocessing, os, signal, sys
def child(number):
    nn.Linear(4, 4)(torch.ones(1, 4))
    if number == 1:
        sys.exit(4)
    if number == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    if number == 3:
        raise ValueError("child failed")
if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    nn.Linear(4, 4)(torch.ones(1, 4))
    for number in range(4):
        process = fork.Process(target=child, args=(number,), name="child")
        process.start()
        process.join()
        print(process.exitcode)
""",
    "warnings of operations": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.loss = nn.Linear(4, 4), nn.MSELoss()
        self.last = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Softmax()))
    def forward(self, x):
        y = self.last(F.softmax(self.fc(x)))
        torch.meshgrid(y[0], y[0])
        self.loss(y, torch.zeros(4))
        return F.mse_loss(y, torch.zeros(4)) + F.l1_loss(y, torch.zeros(4))
net, head = Net(), nn.Linear(4, 1)
def step():
    loss = net(torch.ones(2, 4)) + F.mse_loss(head(torch.ones(8, 4)), torch.ones(8))
    more = F.mse_loss(head(torch.ones(8, 4)), torch.ones(8))
    (loss + more + nn.MSELoss()(head(torch.ones(8, 4)), torch.ones(8))).backward()
for _ in range(3):
    step()
nn.Softmax()(torch.ones(2, 2))
""",
    "warnings of the script": """
import warnings
def old(x):
    warnings.warn("old() goes away", DeprecationWarning, stacklevel=2)
    warnings.warn("at the caller of the caller", stacklevel=3)
    return x + 1
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        warnings.warn("in forward")
        return old(self.fc(x))
net = Net()
for _ in range(2):
    old(net(torch.ones(1, 4))).sum().backward()
""",
    "filters of the script": """
import logging, warnings
net = nn.Linear(4, 1)
def step():
    F.mse_loss(net(torch.ones(8, 4)), torch.ones(8))
    F.l1_loss(net(torch.ones(8, 4)), torch.ones(8)).backward()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step()
print([(each.lineno, each.category.__name__) for each in caught])
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Using a target size")
    step()
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", module="__main__")
    step()
with warnings.catch_warnings():
    warnings.simplefilter("error")
    try:
        step()
    except UserWarning as warning:
        print("raised", str(warning)[:20])
with warnings.catch_warnings():
    warnings.resetwarnings()
    warnings.simplefilter("once")
    step()
logging.basicConfig(format="%(name)s %(message)s")
logging.captureWarnings(True)
step()
""",
}

# Those that write nothing to stderr.
SILENT = (
    "a hook of the script for exceptions",
    "an interrupt that the script handles",
    "a signal that ends it",
    "signals that the script handles",
)


# Of [N, 1] and [N], of which torch warns: fxguard notes it.
BROADCASTS = ("warnings of operations", "filters of the script")


@pytest.mark.sampled
@pytest.mark.parametrize("what", PROGRAMS)
def test_a_script_prints_what_python_prints(tmp_path: Path, what: str) -> None:
    """Tracebacks, warnings, messages, output and the exit status; the last line comes on top."""
    tmp_path.joinpath("script.py").write_text(HEAD + PROGRAMS[what])
    plain = run_python(tmp_path, "script.py")
    watched = run_python(tmp_path, "-m", "fxguard", "run", "script.py")
    assert watched.returncode == plain.returncode
    assert watched.stdout == plain.stdout
    own = [line for line in watched.stderr.splitlines() if line.startswith("fxguard: ")]
    *notes, last = own
    assert bool(notes) == (what in BROADCASTS)
    assert all(line.startswith("fxguard: note: broadcast loss: ") for line in notes)
    assert last.startswith("fxguard: checked ")
    assert last.endswith("; nothing else found" if notes else "; nothing found")
    shown = compared(watched.stderr)
    assert [line for line in shown if line not in own] == compared(plain.stderr)
    assert bool(plain.stderr) != (what in SILENT)


def compared(text: str) -> list[str]:
    """The lines of a stream without the marks below the lines of a traceback."""
    return [line for line in text.splitlines() if not re.fullmatch(r"[ |]*[\^~]+", line)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups of exceptions")
def test_a_group_of_exceptions(tmp_path: Path) -> None:
    """Each exception of the group has the traceback that Python shows."""
    script = (
        HEAD
        + """
net, errors = nn.Linear(4, 2), []
for width in (3, 6):
    try:
        net(torch.ones(2, width))
    except RuntimeError as error:
        errors.append(error)
raise ExceptionGroup("batches", errors)
"""
    )
    tmp_path.joinpath("script.py").write_text(script)
    plain = run_python(tmp_path, "script.py")
    watched = run_python(tmp_path, "-m", "fxguard", "run", "script.py")
    *shown, last = compared(watched.stderr)
    assert shown == compared(plain.stderr)
    assert last.startswith("fxguard: checked ")
    assert plain.stderr.count("RuntimeError") == 2


@pytest.mark.parametrize(
    ("script", "module"),
    [("x = (\n", ""), ("import broken\n", "def f(:\n"), ("import gone_\n", "")],
)
def test_a_script_that_cannot_start(tmp_path: Path, script: str, module: str) -> None:
    """A SyntaxError of the script or of its module, an import that fails: as Python shows them."""
    tmp_path.joinpath("script.py").write_text(script)
    tmp_path.joinpath("broken.py").write_text(module)
    plain = run_python(tmp_path, "script.py")
    watched = run_python(tmp_path, "-m", "fxguard", "run", "script.py")
    assert (watched.returncode, watched.stderr) == (plain.returncode, plain.stderr)
    assert "Error" in plain.stderr


def test_torch_logs_that_the_user_asked_for_are_shown(tmp_path: Path) -> None:
    """The clean twin of the silence: TORCH_LOGS names what a capture then says."""
    tmp_path.joinpath("script.py").write_text(HEAD + PROGRAMS["a shape error in a sequence"])
    command = [sys.executable, "-m", "fxguard", "run", "script.py"]
    told = subprocess.run(
        command,
        cwd=tmp_path,
        env=with_this_checkout({"TORCH_LOGS": "torch._subclasses.fake_tensor"}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "failed while attempting to run meta" in told.stderr


def test_a_package_that_cannot_be_imported(tmp_path: Path) -> None:
    """The traceback begins in the package, whose module was to run."""
    package = tmp_path / "package"
    package.mkdir()
    package.joinpath("__init__.py").write_text("raise ValueError('in the package')\n")
    package.joinpath("train.py").write_text("")
    plain = run_python(tmp_path, "-m", "package.train")
    watched = run_python(tmp_path, "-m", "fxguard", "run", "-m", "package.train")
    assert watched.returncode == plain.returncode == 1
    first, *shown = watched.stderr.splitlines()
    assert first == plain.stderr.splitlines()[0]
    assert shown == plain.stderr.splitlines()[-len(shown) :]
    assert len(shown) == 3


def test_a_detection_repeats_no_warning(tmp_path: Path) -> None:
    """The second runs of an operation that warned say nothing: the warning is that of Python."""
    loss = "((h - h.mean(0)) / h.std(0)).sum().backward()"
    program = f"{HEAD}h = nn.Linear(4, 4)(torch.randn(1, 4))\n{loss}\n"
    (tmp_path / "train.py").write_text(program)
    plain = run_python(tmp_path, "train.py")
    watched = run_python(tmp_path, "-m", "fxguard", "run", "train.py")
    assert watched.returncode == 3
    assert "std made NaN" in watched.stderr
    assert plain.stderr.count("degrees of freedom") == 1
    assert watched.stderr.startswith(plain.stderr)

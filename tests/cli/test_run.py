"""A script that is watched runs as Python alone runs it; what is found in it decides its status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.needs import OF_PYTHON_3_13_0
from support.programs import run_python

ROOT = Path(__file__).resolve().parents[2]
SWITCHES = ("FXGUARD", "FXGUARD_OPTIONS", "FXGUARD_SESSION")


@pytest.fixture
def entry_point(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that declares the entry point as an installation would."""
    folder = tmp_path_factory.mktemp("installed")
    info = folder / "watched-0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: watched\nVersion: 0\n")
    info.joinpath("entry_points.txt").write_text(
        "[torch.backends]\nwatched = _fxguard_autoload:start\n"
    )
    return folder


def run(
    folder: Path, script: str, *argv: str, path: Path | None = None, **variables: str
) -> SimpleNamespace:
    """Run a script with these arguments of Python, ``script.py`` among them."""
    folder.joinpath("script.py").write_text(script)
    paths = [str(ROOT), *([] if path is None else [str(path)]), os.environ.get("PYTHONPATH", "")]
    environment = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    environment["PYTHONWARNINGS"] = f"ignore:{OF_PYTHON_3_13_0}"
    ended = subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return SimpleNamespace(status=ended.returncode, out=ended.stdout, err=ended.stderr)


def watch(folder: Path, script: str, *options: str, path: Path | None = None) -> SimpleNamespace:
    """``fxguard run script.py``."""
    argv = ("-m", "fxguard", "run", *options, "script.py")
    if path is not None:
        return run(folder, script, *argv, path=path)
    folder.joinpath("script.py").write_text(script)
    ended = run_python(folder, *argv, env=dict.fromkeys(SWITCHES, ""))
    return SimpleNamespace(status=ended.returncode, out=ended.stdout, err=ended.stderr)


def own_lines(ended: SimpleNamespace) -> list[str]:
    return [line for line in ended.err.splitlines() if line.startswith("fxguard: ")]


# What Python alone does.

MIRROR = """
import os, pickle, sys, __main__
os.chdir("/")
class Here: pass
print(sys.argv, sys.path[0], __name__, __file__, open(__file__).read()[:8].split())
print(sys.modules["__main__"] is __main__, __main__.Here is Here, __spec__ is None)
print(type(pickle.loads(pickle.dumps(Here()))).__module__, __builtins__.__name__)
"""


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("script.py", marks=pytest.mark.slow),
        pytest.param("below/script.py", marks=pytest.mark.campaign),
    ],
)
def test_a_script_sees_what_python_shows_it(tmp_path: Path, where: str) -> None:
    """Arguments, sys.path, __file__, and __main__, which pickles, are those of ``python x.py``."""
    folder = tmp_path / "below"
    folder.mkdir()
    folder.joinpath("script.py").write_text(MIRROR)
    plain = run(tmp_path, MIRROR, where, "a", "--b")
    watched = run(tmp_path, MIRROR, "-m", "fxguard", "run", where, "a", "--b")
    assert plain.status == watched.status == 0
    assert watched.out == plain.out
    assert str(tmp_path) in plain.out


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("script", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.campaign) for name in ("package", "package.part")),
    ],
)
def test_a_module_sees_what_python_shows_it(tmp_path: Path, name: str) -> None:
    """Likewise for ``python -m name``, packages included."""
    package = tmp_path / "package"
    package.mkdir()
    mirror = MIRROR.replace("__spec__ is None", "__spec__.name, __package__")
    for file in ("__init__", "__main__", "part"):
        package.joinpath(f"{file}.py").write_text("" if file == "__init__" else mirror)
    plain = run(tmp_path, mirror, "-m", name, "a")
    watched = run(tmp_path, mirror, "-m", "fxguard", "run", "-m", name, "a")
    assert plain.status == watched.status == 0
    assert watched.out == plain.out


def test_a_traceback_is_that_of_the_script(tmp_path: Path) -> None:
    """An exception of the script's own shows what Python shows, and no line of fxguard."""
    script = "def f():\n    raise KeyError('mine')\nf()\n"
    plain, watched = run(tmp_path, script, "script.py"), watch(tmp_path, script)
    assert watched.status == plain.status == 1
    assert watched.err == plain.err


# Healthy scripts stay healthy.

PICKLES = """
import copy, pickle, torch
net = torch.nn.Sequential(torch.nn.Linear(2, 1))
before = set(net.__dict__)
net(torch.ones(1, 2))
torch.save(net, "net.pt")
assert set(net.__dict__) == before
assert set(pickle.loads(pickle.dumps(net)).__dict__) == before
assert set(copy.deepcopy(net).__dict__) == before
torch.jit.script(net)
torch.fx.symbolic_trace(net)
"""
LOADS = """
import sys, torch
torch.load("net.pt", weights_only=False)(torch.ones(1, 2))
print("fxguard" in sys.modules)
"""


@pytest.mark.slow
def test_a_model_that_was_called_is_saved_as_it_is(tmp_path: Path) -> None:
    """Between its calls nothing stands on the model: it pickles whole, loads without fxguard."""
    ended = watch(tmp_path, PICKLES)
    assert ended.status == 0, ended.err
    assert "1 batch of Sequential" in own_lines(ended)[-1]
    loaded = run(tmp_path, LOADS, "script.py")
    assert loaded.out == "False\n", loaded.err


AVERAGES = """
import torch
from torch.optim.swa_utils import AveragedModel
net = torch.nn.Linear(8, 1)
x = torch.full((2, 8), SCALE)
net(torch.ones(2, 8))
ema = AveragedModel(net)
ema.update_parameters(net)
print(tuple(ema(x).shape))
"""


@pytest.mark.parametrize(("scale", "status"), [("1.0", 0), ("float('nan')", 3)])
def test_a_copy_of_a_called_model_is_a_model(tmp_path: Path, scale: str, status: int) -> None:
    """A copy inside another module is checked as part of that one."""
    ended = watch(tmp_path, AVERAGES.replace("SCALE", scale))
    assert ended.status == status, ended.err
    assert ("(2, 1)" in ended.out) == (status == 0)


COMPILED = """
import torch
net, loss = torch.nn.Linear(8, 1), torch.nn.MSELoss()
@torch.compile(backend="eager", fullgraph=FULL)
def step(x, y):
    return loss(net(x), y)
for _ in range(3):
    print(step(torch.ones(2, 8) * SCALE, torch.ones(2, 1)).item() >= 0)
"""


@pytest.mark.parametrize("full", ["True", "False"])
def test_a_step_that_is_compiled_around_the_model_is_checked(tmp_path: Path, full: str) -> None:
    """``torch.compile`` around a step, with ``fullgraph=True`` too, compiles it, and it is checked.

    So is a loss that is compiled without the model, behind the break of the graph.
    """
    script = COMPILED.replace("FULL", full)
    ended = watch(tmp_path, script.replace("SCALE", "1.0"))
    assert ended.status == 0, ended.err
    assert ended.out == "True\n" * 3
    assert "checked 3 batches of Linear" in own_lines(ended)[-1]
    assert "not checked" not in own_lines(ended)[-1]
    broken = watch(tmp_path, script.replace("SCALE", "float('nan')"))
    assert broken.status == 3, broken.err
    assert "Traceback" not in broken.err
    loss = script.replace("loss(net(x), y)", "(loss(net(x), y) * 0).log()").replace(
        ".item() >= 0", ".backward()"
    )
    broken = watch(tmp_path, loss.replace("SCALE", "1.0"))
    assert broken.status == 3, broken.err
    assert "log made -inf (script.py:6)" in own_lines(broken)[-1]


def test_a_healthy_run_ends_with_one_line(tmp_path: Path) -> None:
    """It says what was checked, how much, the least headroom and where."""
    script = "import torch\nnet = torch.nn.Linear(2, 1, bias=False).half()\n"
    script += "torch.nn.init.ones_(net.weight)\n"
    script += "for _ in range(3): net(torch.full((1, 2), 8188.0).half())\nprint('end')\n"
    ended = watch(tmp_path, script)
    assert ended.status == 0
    assert ended.out == "end\n"
    assert ended.err == (
        "fxguard: checked 3 batches of Linear (1 operation); nothing found; "
        "float16: the largest value of the last batch was 1.64e+04, at linear: "
        "4 times below the limit\n"
    )


UNDERFLOW = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.fc(x) * 1e-9
net = Net().to(DTYPE)
net(torch.ones(2, 4, dtype=DTYPE))
print('end')
"""


def test_an_underflow_ends_a_run(tmp_path: Path) -> None:
    """With --underflow, by its line and with status 3; the report has it as well."""
    half = UNDERFLOW.replace("DTYPE", "torch.float16")
    ended = watch(tmp_path, half, "--underflow", "0.5", "--report", "report.json")
    assert ended.status == 3, ended.err
    assert ended.out == ""
    assert own_lines(ended)[-1].startswith("fxguard: look at ")
    assert "script.py:8: return self.fc(x) * 1e-9" in own_lines(ended)[-1]
    assert "mul made 100% of its nonzero elements 0" in own_lines(ended)[-1]
    assert '"problem": "underflow"' in (tmp_path / "report.json").read_text()
    warned = watch(tmp_path, half, "--underflow=0.5", "--on-detect=warn")
    assert (warned.status, warned.out) == (0, "end\n")
    assert "; found underflow in 1 of them" in own_lines(warned)[-1]


LOSS = """
import torch
from torch.nn.functional import cross_entropy
model = torch.nn.Linear(4, 3)
target = torch.full((8,), -100)
cross_entropy(model(torch.rand(8, 4)), target).backward()
"""


def test_a_test_of_the_blamed_operation_is_written(tmp_path: Path) -> None:
    """With --reproduce-to, or --reproduce, of a loss too; the status is that of a detection."""
    ended = watch(tmp_path, LOSS, "--reproduce-to", "made/here")
    assert ended.status == 3, ended.err
    path = "made/here/test_cross_entropy.py"
    assert own_lines(ended)[0] == f"fxguard: {path} fails as the model did: pytest {path}"
    written = tmp_path.joinpath(path).read_text()
    assert "cross_entropy(input, target)" in written
    assert "target: int64 [1], -100" in written
    drawn = watch(tmp_path, LOSS, "--reproduce", "drawn", "--reproduce-ranges-only")
    assert drawn.status == 3
    text = tmp_path.joinpath("drawn/test_cross_entropy.py").read_text()
    assert "none of the model's" in text.replace("\n", " ")
    alone = watch(tmp_path, LOSS, "--reproduce-ranges-only")
    assert alone.status == 2
    assert "says what is written into reproduce_to: give it" in own_lines(alone)[-1]


def test_a_run_without_an_underflow(tmp_path: Path) -> None:
    """The clean twins: bfloat16, and float16 where nobody asked."""
    half, other = (UNDERFLOW.replace("DTYPE", f"torch.{name}16") for name in ("float", "bfloat"))
    for script, options in ((half, ()), (other, ("--underflow", "0.5"))):
        ended = watch(tmp_path, script, *options)
        assert (ended.status, ended.out) == (0, "end\n"), ended.err
        assert "nothing found" in own_lines(ended)[-1]
    tmp_path.joinpath("pyproject.toml").write_text("[tool.fxguard]\nunderflow = 0.5\n")
    assert watch(tmp_path, half).status == 3
    refused = watch(tmp_path, half, "--underflow", "2")
    assert refused.status == 2
    assert "underflow has to be a share above 0 and at most 1, such as 0.5, got 2.0" in refused.err


def test_the_last_line_counts_batches_that_were_not_full(tmp_path: Path) -> None:
    """Nobody may think that every operation was looked at in each of them."""
    script = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
for _ in range(5):
    model(torch.randn(3, 4))
"""
    ended = watch(tmp_path, script, "--full-every", "2")
    assert ended.status == 0
    left = "; not checked: 3 batches of Sequential, but for what left their graphs"
    assert own_lines(ended)[-1].endswith(left)


def test_losses_are_checked_without_a_capture(tmp_path: Path) -> None:
    """A module without parameters is no model: each of its operations is checked where it runs."""
    script = "import sys, torch\nloss = torch.nn.MSELoss()\n"
    script += "loss(torch.ones(2), torch.zeros(2))\n"
    script += "print('torch._inductor' in sys.modules, torch._dynamo.utils.counters['frames'])\n"
    healthy = watch(tmp_path, script)
    assert healthy.status == 0
    assert "1 batch of MSELoss (1 operation)" in own_lines(healthy)[-1]
    assert "Counter()" in healthy.out  # TorchDynamo has seen no frame
    assert watch(tmp_path, script.replace("torch.ones(2)", "torch.full((2,), 1e30)")).status == 3


def test_a_glob_is_idle_where_no_model_has_what_it_names(tmp_path: Path) -> None:
    """A glob for one model is no mistake at another; one that names nothing is told at the end."""
    script = "import torch\nloss, net = torch.nn.MSELoss(), torch.nn.Sequential(torch.nn.ReLU())\n"
    script += "loss(net(torch.ones(2)), torch.zeros(2))\n"
    ended = watch(tmp_path, script, "--ignore", "0", "--ignore", "decoder.*")
    assert ended.status == 0
    (line,) = ended.err.splitlines()
    assert line.endswith("; ignore='decoder.*' named nothing")
    assert "'0'" not in line


PARTS = """
import torch
class Coder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.d = torch.nn.Linear(4, 2), torch.nn.Linear(2, 4)
    def decode(self, z):
        return self.d(z).sigmoid()
    def forward(self, x):
        return self.decode(self.e(x))
coder = Coder()
coder(torch.ones(1, 4))
coder.decode(torch.full((1, 2), SCALE))
coder(torch.ones(1, 4))
"""


@pytest.mark.parametrize(("scale", "status"), [("1.0", 0), ("float('nan')", 3)])
def test_a_part_that_is_called_alone_is_checked(tmp_path: Path, scale: str, status: int) -> None:
    """``vae.decode`` after ``vae(x)``: parts have batches of their own, and nobody is warned."""
    ended = watch(tmp_path, PARTS.replace("SCALE", scale))
    assert ended.status == status, ended.err
    assert "Warning" not in ended.err
    if status == 0:
        assert "2 batches of Coder" in own_lines(ended)[-1]
        assert "1 batch of coder.d" in own_lines(ended)[-1]


SWALLOWS = """
import torch
net = torch.nn.Linear(2, 2)
try: net(torch.full((1, 2), float("nan")))
except Exception: pass
print("end")
"""


def test_a_detection_that_the_script_swallows_counts(tmp_path: Path) -> None:
    """The status is 3, and the last line says that the script went on."""
    ended = watch(tmp_path, SWALLOWS)
    assert ended.status == 3
    assert ended.out.endswith("end\n")
    assert "went on after a detection" in ended.err.splitlines()[-1]


# Other processes.

SPAWNS = """
import torch, torch.multiprocessing as mp
def work(rank):
    torch.nn.Linear(2, 2)(torch.full((1, 2), SCALE))
if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""


@pytest.mark.parametrize(
    ("scale", "status"),
    [
        pytest.param("1.0", 0, marks=pytest.mark.campaign),
        pytest.param("float('nan')", 3, marks=pytest.mark.slow),
    ],
)
def test_models_in_spawned_processes_are_checked(
    tmp_path: Path, entry_point: Path, scale: str, status: int
) -> None:
    """What a child process finds is the run's; what it checks is counted."""
    ended = watch(tmp_path, SPAWNS.replace("SCALE", scale), path=entry_point)
    assert ended.status == status, ended.err
    (line,) = own_lines(ended)
    if status == 0:
        assert "2 batches of Linear (1 operation), in 2 processes; nothing found" in line
    else:
        assert "Traceback" not in ended.err
        assert "argument `input` of Linear.forward: 2 NaN" in line


LOADER = """
import torch
class Transform(torch.nn.Module):
    def forward(self, x):
        return torch.log(x - SHIFT)
class Data(torch.utils.data.Dataset):
    transform = Transform()
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return self.transform(torch.full((3,), 2.0))
if __name__ == "__main__":
    net = torch.nn.Linear(3, 1)
    for batch in torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context=HOW):
        net(batch)
"""


@pytest.mark.parametrize(
    ("how", "shift", "status"),
    [
        pytest.param("spawn", "5", 3, marks=pytest.mark.slow),
        pytest.param("fork", "1", 0, marks=pytest.mark.campaign),
        pytest.param("fork", "5", 3, marks=pytest.mark.campaign),
        pytest.param("spawn", "1", 0, marks=pytest.mark.campaign),
    ],
)
def test_workers_of_a_data_loader_are_checked(
    tmp_path: Path, entry_point: Path, how: str, shift: str, status: int
) -> None:
    """A NaN that a transform makes in a worker ends the run with status 3."""
    script = LOADER.replace("SHIFT", shift).replace("HOW", repr(how))
    ended = watch(tmp_path, script, path=entry_point)
    assert ended.status == status, ended.err
    if status == 0:
        checked = "checked 4 batches of Linear (1 operation) and 1 module without weights"
        assert f"{checked}, in 2 processes; nothing found" in own_lines(ended)[-1]
    else:
        assert "return torch.log(x - 5)" in own_lines(ended)[-1]


RANKS = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
bad = dist.get_rank() == 1 and sys.argv[1] == "bad"
model(torch.full((1, 2), float("nan") if bad else 1.0)).sum().backward()
dist.destroy_process_group()
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("around torchrun", marks=pytest.mark.slow),
        pytest.param("variable", marks=pytest.mark.campaign),
    ],
)
def test_the_rank_that_fails_is_named(tmp_path: Path, entry_point: Path, how: str) -> None:
    """The whole job is watched, and ends with the status of a detection."""
    command = (*TORCHRUN, "script.py", "bad")
    if how == "variable":
        ended = run(tmp_path, RANKS, *command, path=entry_point, FXGUARD="1")
    else:
        ended = run(tmp_path, RANKS, "-m", "fxguard", "run", *command, path=entry_point)
    assert ended.status == 3, ended.err
    assert "during batch_number=0 rank=1" in ended.err
    assert "rank 1: batch 0: argument `input` of Linear.forward: 2 NaN" in own_lines(ended)[-1]


@pytest.mark.slow
def test_ranks_that_are_well_are_counted_together(tmp_path: Path, entry_point: Path) -> None:
    """One line for the job, and not one for each rank."""
    command = (*TORCHRUN, "script.py", "good")
    ended = run(tmp_path, RANKS, *command, path=entry_point, FXGUARD="1")
    assert ended.status == 0, ended.err
    (line,) = own_lines(ended)
    assert "2 batches of Linear (1 operation), in 2 processes; nothing found" in line


# The variable FXGUARD.

CALLS = "import torch\ntorch.nn.Linear(2, 2)(torch.full((1, 2), SCALE))\nprint('end')\n"


@pytest.mark.slow
def test_the_variable_does_what_the_command_does(tmp_path: Path, entry_point: Path) -> None:
    """A healthy script ends with the line, a detection with status 3 and without a traceback."""
    healthy = run(
        tmp_path, CALLS.replace("SCALE", "1.0"), "script.py", path=entry_point, FXGUARD="1"
    )
    assert (healthy.status, healthy.out) == (0, "end\n"), healthy.err
    assert healthy.err.startswith("fxguard: checked 1 batch of Linear (1 operation); nothing found")
    broken = CALLS.replace("SCALE", "float('nan')")
    ended = run(tmp_path, broken, "script.py", path=entry_point, FXGUARD="1")
    assert (ended.status, ended.out) == (3, "")
    assert "Traceback" not in ended.err
    assert "argument `input` of Linear.forward: 2 NaN" in own_lines(ended)[-1]


@pytest.mark.parametrize(
    "value",
    [
        *(pytest.param(value, marks=pytest.mark.slow) for value in ("", "0")),
        *(pytest.param(value, marks=pytest.mark.campaign) for value in ("false", "off")),
    ],
)
def test_other_values_switch_nothing_on(tmp_path: Path, entry_point: Path, value: str) -> None:
    """Without the variable the entry point does nothing: NaN goes through."""
    broken = (
        CALLS.replace("SCALE", "float('nan')") + "import sys; print('torch._dynamo' in sys.modules)"
    )
    ended = run(tmp_path, broken, "script.py", path=entry_point, FXGUARD=value)
    assert (ended.status, ended.out, ended.err) == (0, "end\nFalse\n", "")


@pytest.mark.slow
def test_the_variable_cannot_change_the_status_of_a_script(
    tmp_path: Path, entry_point: Path
) -> None:
    """A detection that the script swallows is told in the last line."""
    ended = run(tmp_path, SWALLOWS, "script.py", path=entry_point, FXGUARD="1")
    assert ended.status == 0
    assert "went on after a detection" in ended.err
    assert "status is the script's own" in ended.err.splitlines()[-1]


@pytest.mark.campaign  # on each change: `test_the_variable_does_what_the_command_does`
def test_the_variable_serves_spawned_processes(tmp_path: Path, entry_point: Path) -> None:
    """A NaN in a process that the script has spawned ends the script with status 3."""
    script = SPAWNS.replace("SCALE", "float('nan')")
    ended = run(tmp_path, script, "script.py", path=entry_point, FXGUARD="1")
    assert ended.status == 3, ended.err
    assert len(own_lines(ended)) == 1


@pytest.mark.slow
def test_torch_is_imported_whatever_happens(tmp_path: Path, entry_point: Path) -> None:
    """Wrong settings are told in a line, and the script runs without fxguard."""
    tmp_path.joinpath("pyproject.toml").write_text("[tool.fxguard]\nstrikt = true\n")
    broken = CALLS.replace("SCALE", "float('nan')")
    ended = run(tmp_path, broken, "script.py", path=entry_point, FXGUARD="1")
    assert (ended.status, ended.out) == (0, "end\n")
    (line,) = own_lines(ended)
    assert "has no effect" in line
    assert "'strikt'; did you mean strict?" in line


def test_the_package_declares_the_entry_point() -> None:
    """pyproject.toml has what the folder of these tests imitates."""
    text = ROOT.joinpath("pyproject.toml").read_text()
    assert '[project.entry-points."torch.backends"]' in text
    assert 'fxguard = "_fxguard_autoload:start"' in text
    assert '"_fxguard_autoload"' in text.partition("py-modules")[2].partition("]")[0]

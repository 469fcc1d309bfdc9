"""Bad input gets a clear error and changes nothing; `fxguard run` says it in its exit status."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxguard
from fxguard import FxguardError, NonFiniteError, backend, guard_of, instrument, remove
from fxguard.cli import main

ROOT = Path(__file__).resolve().parents[2]


class Model(nn.Module):
    """Two operations, of which the second makes -inf out of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x * self.scale)


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that a module and its submodules hold, containers by content."""
    return {
        f"{name}/{key}": dict(value) if isinstance(value, dict) else value
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
    }


def refused(call: Callable[[], Any], model: nn.Module, words: str) -> None:
    """The call fails with an error of fxguard that holds these words; the model is as before."""
    before = state(model)
    with pytest.raises(FxguardError) as raised:
        call()
    assert words in str(raised.value)
    assert state(model) == before


# Options.

BAD_OPTIONS: list[tuple[str, Any, str]] = [
    ("max_frames_to_save", 0, "0"),
    ("max_frames_to_save", -1, "-1"),
    ("max_frames_to_save", True, "True"),
    ("max_frames_to_save", 21.0, "21.0"),
    ("max_frames_to_save", "21", "'21'"),
    ("max_frames_to_save", None, "None"),
    ("trace_batch_nums", 3, "3"),
    ("trace_batch_nums", "12", "'12'"),
    ("trace_batch_nums", [-1], "-1"),
    ("trace_batch_nums", [1, True], "True"),
    ("trace_batch_nums", [1.0], "1.0"),
    ("trace_batch_nums", ["1"], "'1'"),
    ("abort_after_batch_num", -1, "-1"),
    ("abort_after_batch_num", True, "True"),
    ("abort_after_batch_num", 1.5, "1.5"),
    ("abort_after_batch_num", "1", "'1'"),
    ("on_detect", "explode", "'explode'"),
    ("on_detect", None, "None"),
    ("granularity", "ops", "'ops'"),
    ("granularity", None, "None"),
    ("ignore", "decoder.*", "'decoder.*'"),
]
UNCHECKED_OPTIONS = [
    ("trace_batch_nums", None, "trace_batch_nums"),
    ("trace_batch_nums", 1.5, "1.5"),
    ("abort_after_batch_num", False, "False"),
    ("abort_after_batch_num", 0.0, "0.0"),
    ("abort_after_batch_num", "", "''"),
    ("ignore", None, "None"),
    ("ignore", 3, "3"),
    ("ignore", [3], "3"),
]
OPTIONS = [*BAD_OPTIONS, *UNCHECKED_OPTIONS]


@pytest.mark.parametrize(("option", "value", "words"), OPTIONS)
def test_bad_option_is_refused(option: str, value: Any, words: str) -> None:
    """An option that cannot work is refused by name of its value, before the model is touched."""
    model = Model()
    refused(lambda: instrument(model, **{option: value}), model, words)


@pytest.mark.parametrize(("option", "value", "words"), OPTIONS)
def test_backend_refuses_the_same_options(option: str, value: Any, words: str) -> None:
    """`backend` has the options of `instrument`, and refuses what that refuses."""
    refused(lambda: backend("eager", **{option: value}), Model(), words)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [case for case in BAD_OPTIONS if case[0] in ("max_frames_to_save", "abort_after_batch_num")]
    + [("trace_batch_nums", 3, "3")]
    + [("trace_batch_nums", [-1], "-1")],
)
def test_drop_in_refuses_the_same_options(option: str, value: Any, words: str) -> None:
    """The drop-in refuses what `instrument` refuses."""
    model = Model()
    refused(lambda: fxguard.DebugUnderflowOverflow(model, **{option: value}), model, words)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_frames_to_save", 1),
        ("trace_batch_nums", []),
        ("trace_batch_nums", range(5, 7)),
        ("trace_batch_nums", {5}),
        ("abort_after_batch_num", 5),
        ("on_detect", print),
        ("on_detect", "warn"),
        ("granularity", "module"),
        ("ignore", ["decoder.*", "*:log"]),
        ("strict", True),
    ],
)
def test_good_option_is_taken(option: str, value: Any) -> None:
    """The clean twin: what is documented is taken, and the model computes what it computed."""
    model = instrument(Model(), **{option: value})
    assert model(torch.tensor([0.5])).tolist() == [0.0]


def test_batch_numbers_from_a_generator_are_traced(capsys: Any) -> None:
    """Batch numbers may come from any iterable."""
    model = instrument(Model(), trace_batch_nums=(number for number in [0]))
    model(torch.tensor([0.5]))
    assert "*** Starting batch number=0 ***" in capsys.readouterr().out


# Models.


@pytest.mark.parametrize("value", [None, 3, "model", Model, torch.relu, {"model": 1}])
def test_what_is_no_module_is_refused(value: Any) -> None:
    """Anything but a module is refused with its type; a class is no module."""
    for call in (instrument, fxguard.DebugUnderflowOverflow):
        with pytest.raises(FxguardError, match=rf"nn\.Module, got {type(value).__name__}$"):
            call(value)


def test_second_instrument_is_refused() -> None:
    """Instrumenting twice says so and how to undo it; the first guard goes on."""
    model = instrument(Model())
    guard = guard_of(model)
    refused(lambda: instrument(model), model, "instrumented already")
    refused(lambda: fxguard.DebugUnderflowOverflow(model), model, "fxguard.remove")
    assert guard_of(model) is guard
    with pytest.raises(NonFiniteError):
        model(torch.zeros(1))


def test_model_can_be_instrumented_again_after_remove() -> None:
    """The clean twin: after remove it is a model like any other."""
    model = instrument(remove(instrument(Model())))
    with pytest.raises(NonFiniteError):
        model(torch.zeros(1))


def test_parent_of_an_instrumented_module_is_refused() -> None:
    """A model with an instrumented part is refused, and the part is named."""
    parent = nn.Sequential(nn.ReLU(), nn.Sequential(Model()))
    instrument(parent[1][0])
    refused(lambda: instrument(parent), parent, "'1.0'")
    remove(parent[1][0])
    assert instrument(parent)(torch.tensor([0.5])).tolist() == [0.0]


def test_child_of_an_instrumented_module_is_refused() -> None:
    """A part of an instrumented model is refused: it is being checked already."""
    parent = instrument(nn.Sequential(Model()))
    refused(lambda: instrument(parent[0]), parent, "instrumented already")


def test_data_parallel_is_refused() -> None:
    """nn.DataParallel is refused with the class to use in its place; what it wraps is taken."""
    wrapped = Model()
    model = nn.DataParallel(wrapped)
    refused(lambda: instrument(model), model, "DistributedDataParallel")
    assert instrument(wrapped) is wrapped


def test_compiled_model_is_refused() -> None:
    """The result of torch.compile is refused with the right order; that order is taken."""
    model = torch.compile(Model(), backend="eager")
    refused(lambda: instrument(model), model, "torch.compile(fxguard.instrument(model))")
    compiled = torch.compile(instrument(Model()), backend="eager")
    with pytest.raises(NonFiniteError):
        compiled(torch.zeros(1))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(1))]
)
def test_torchscript_is_refused(make: Any) -> None:
    """A scripted or traced module has no Python to capture."""
    model = make(Model())
    with pytest.raises(FxguardError, match="TorchScript"):
        instrument(model)
    assert model(torch.tensor([0.5])).tolist() == [0.0]


def test_plain_model_has_no_guard() -> None:
    """remove and guard_of say that a model is not instrumented; so does a second remove."""
    model = Model()
    refused(lambda: remove(model), model, "Model is not instrumented")
    refused(lambda: guard_of(model), model, "Model is not instrumented")
    remove(instrument(model))
    refused(lambda: remove(model), model, "Model is not instrumented")


@pytest.mark.parametrize("value", [None, 3])
def test_guard_of_something_else(value: Any) -> None:
    """remove and guard_of name the type of what is no model."""
    for call in (remove, guard_of):
        with pytest.raises(FxguardError, match=f"{type(value).__name__} is not instrumented"):
            call(value)


def test_a_backend_is_not_copied() -> None:
    """With lightning imported, `torch.compile` copies its arguments; reports have one place."""
    one = backend("eager")
    assert copy.deepcopy({"backend": one})["backend"] is one


def test_unknown_backend_is_refused_at_once() -> None:
    """An unknown inner backend is refused when it is named, not at the first batch."""
    with pytest.raises(torch._dynamo.exc.InvalidBackend, match="nope"):
        backend("nope")
    compiled = torch.compile(Model(), backend=backend("eager"))
    assert compiled(torch.tensor([0.5])).tolist() == [0.0]


@pytest.mark.parametrize("inner", [None, 3])
def test_inner_backend_has_to_be_callable(inner: Any) -> None:
    """What is neither a name nor a callable is refused when it is given."""
    with pytest.raises(FxguardError):
        backend(inner)


@pytest.mark.parametrize("value", [Model(), None])
def test_insert_checks_needs_a_graph(value: Any) -> None:
    """A module that is no graph is refused with its type."""
    with pytest.raises(FxguardError, match=type(value).__name__):
        fxguard.insert_checks(value)


# The command line, without a model.


@pytest.fixture
def here(tmp_path: Path, monkeypatch: Any) -> Path:
    """An empty working directory; what a script does to sys is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    return tmp_path


def status(*argv: str) -> Any:
    """The exit status of ``fxguard`` with these arguments."""
    try:
        return main.main([*argv])
    except SystemExit as end:
        return end.code


SHOW_ARGUMENTS = "import sys\nprint('got', sys.argv[1:], __name__)\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "required"),
        (["walk"], "'walk'"),
        (["run"], "which script?"),
        (["run", "--strict"], "which script?"),
        (["run", "missing.py"], "missing.py"),
        (["run", "."], "no such script: ."),
        (["run", "-m", "fxguard_missing"], "fxguard_missing"),
        (["run", "-m", "fxguard_missing.part"], "fxguard_missing.part"),
        (["run", "-m"], "-m"),
        (["run", "--max-frames-to-save", "0", "script.py"], "max_frames_to_save"),
        (["run", "--max-frames-to-save", "many", "script.py"], "many"),
        (["run", "--trace-batch-nums", "x", "script.py"], "--trace-batch-nums"),
        (["run", "--trace-batch-nums", "1,x", "script.py"], "1,x"),
        (["run", "--trace-batch-nums", "7", "8", "script.py"], "no such script: 8"),
        (["run", "--trace-batch-nums=1,-1", "script.py"], "-1"),
        (["run", "--abort-after-batch-num=-1", "script.py"], "-1"),
        (["run", "--abort-after-batch-num", "1.5", "script.py"], "1.5"),
        (["run", "--on-detect", "explode", "script.py"], "explode"),
        (["run", "--granularity", "ops", "script.py"], "ops"),
        (["run", "--nonsense", "script.py"], "nonsense"),
    ],
)
def test_wrong_use_ends_with_status_two(
    here: Path, capsys: Any, argv: list[str], words: str
) -> None:
    """A wrong command line is told on stderr in a line with the value; no script has run."""
    here.joinpath("script.py").write_text(SHOW_ARGUMENTS)
    assert status(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_message_about_batch_numbers_is_in_words(capsys: Any) -> None:
    """The error about a bad list of batches names no function of fxguard's own."""
    assert status("run", "--trace-batch-nums", "1,x", "script.py") == 2
    assert " _" not in capsys.readouterr().err


SCRIPT_COMES_AFTER_OPTIONS = [
    [],
    ["--strict"],
    ["--max-frames-to-save", "3"],
    ["--trace-batch-nums", "7"],
    ["--trace-batch-nums", "7,8", "--strict"],
    ["--trace-batch-nums=7,8", "--abort-after-batch-num", "8"],
    ["--ignore", "decoder.*", "--ignore", "*:log"],
    ["--"],
]


@pytest.mark.parametrize("options", SCRIPT_COMES_AFTER_OPTIONS)
def test_script_gets_its_own_arguments(here: Path, capsys: Any, options: list[str]) -> None:
    """What stands behind the script is the script's, also where fxguard has such an option."""
    here.joinpath("script.py").write_text(SHOW_ARGUMENTS)
    own = ["--strict", "file", "--report", "--", "-m", "3"]
    assert status("run", *options, "script.py", *own) == 0
    out, err = capsys.readouterr()
    assert out == f"got {own} __main__\n"
    assert "nothing was checked" in err


@pytest.mark.parametrize(
    "own",
    [
        [],
        ["file", "--strict", "-x"],
        ["--epochs", "3"],
        ["--strict"],
    ],
)
def test_module_gets_its_own_arguments(here: Path, capsys: Any, own: list[str]) -> None:
    """What stands behind the name of the module is the module's, as with python -m."""
    here.joinpath("fxguard_tests_module.py").write_text(SHOW_ARGUMENTS)
    assert status("run", "-m", "fxguard_tests_module", *own) == 0
    out, err = capsys.readouterr()
    assert out == f"got {own} __main__\n"
    assert "nothing was checked" in err


def test_script_that_exits_and_calls_no_module_is_told_too(here: Path, capsys: Any) -> None:
    """A script that ends with sys.exit(main()) hears that nothing was checked."""
    here.joinpath("script.py").write_text("import sys\nsys.exit(0)\n")
    assert status("run", "script.py") == 0
    assert "nothing was checked" in capsys.readouterr().err


# The command line, with a model, as a process of its own.

MODEL = """\
import sys
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        doubled = x * 2
        return torch.log(doubled)

model = Model()
print("arguments", sys.argv[1:])
"""
LINE = 8  # of torch.log


def run_script(folder: Path, *argv: str, **files: str) -> SimpleNamespace:
    """Run ``fxguard run`` on files in a folder; ``a=...`` is the text of ``a.py``."""
    for name, text in files.items():
        folder.joinpath(f"{name}.py").write_text(text)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, "-m", "fxguard", "run", *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return SimpleNamespace(status=ended.returncode, out=ended.stdout, err=ended.stderr)


@pytest.fixture(scope="module")
def detection(tmp_path_factory: Any) -> SimpleNamespace:
    """A script whose second batch overflows, run with options and arguments."""
    folder = tmp_path_factory.mktemp("detection")
    script = MODEL + "model(torch.ones(2))\nmodel(torch.zeros(2))\nprint('not reached')\n"
    argv = ("--report", "report.json", "train.py", "--epochs", "3")
    ended = run_script(folder, *argv, train=script)
    ended.folder = folder
    return ended


def test_detection_ends_with_status_three_and_without_a_traceback(detection: Any) -> None:
    """The report is printed, the script goes no further, and no library frames are shown."""
    assert detection.status == 3
    assert "Traceback" not in detection.out + detection.err
    assert "Detected inf/nan during batch_number=1" in detection.err
    assert "     inf      inf output" in detection.err
    assert "not reached" not in detection.out


def test_detection_says_what_to_look_at(detection: Any) -> None:
    """One line names the file, the line and the code of the operation to blame."""
    (line,) = [line for line in detection.err.splitlines() if line.startswith("fxguard: ")]
    assert line.startswith("fxguard: look at ")
    assert f"train.py:{LINE}: return torch.log(doubled)" in line


def test_script_of_a_detection_got_its_arguments(detection: Any) -> None:
    """The script saw the arguments behind its name, and none of fxguard's."""
    assert "arguments ['--epochs', '3']\n" in detection.out


def test_report_file_is_json_where_its_name_says_so(detection: Any) -> None:
    """`--report file.json` writes the report as strict JSON."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    text = detection.folder.joinpath("report.json").read_text()
    report = json.loads(text, parse_constant=refuse)
    assert report["batch_number"] == 1
    assert report["origins"][0]["what"] == "log"
    assert report["origins"][0]["frame"]["source"]["line"] == LINE
    assert report["origins"][0]["neginf_count"] == 2


def test_report_file_is_text_otherwise(tmp_path: Path) -> None:
    """`--report file.txt` writes what is printed; a module run by name is checked, too."""
    ended = run_script(
        tmp_path,
        *("--report", "report.txt", "--max-frames-to-save", "1", "-m", "package", "x"),
        package=MODEL + "model(torch.zeros(2))\n",
    )
    assert ended.status == 3
    assert "arguments ['x']\n" in ended.out
    assert "Last 1 forward frames:" in ended.err
    report = tmp_path.joinpath("report.txt").read_text()
    assert report in ended.err
    assert "\nDetected inf/nan during batch_number=0\n" in report
    assert "Traceback" not in ended.err


def test_status_of_the_script_is_kept(tmp_path: Path) -> None:
    """A clean script that ends with sys.exit(5) ends with 5, and prints what it prints."""
    ended = run_script(tmp_path, "ok.py", ok=MODEL + "model(torch.ones(2))\nsys.exit(5)\n")
    assert ended.status == 5
    assert ended.out == "arguments []\n"
    assert ended.err.startswith("fxguard: checked 1 batch of Model")


@pytest.mark.parametrize("error", ["KeyError('mine')", "FileNotFoundError('mine')"])
def test_exception_of_the_script_is_kept(tmp_path: Path, error: str) -> None:
    """An exception of the script's own shows its traceback and fails, as without fxguard."""
    text = MODEL + f"model(torch.ones(2))\nraise {error}\n"
    ended = run_script(tmp_path, "own.py", own=text)
    assert ended.status == 1
    assert "Traceback (most recent call last)" in ended.err
    assert 'own.py", line 13' in ended.err
    assert "mine" in ended.err.splitlines()[-1]
    assert "Detected" not in ended.err


def test_early_stop_is_a_success(tmp_path: Path) -> None:
    """`--abort-after-batch-num 1` stops behind batch 1, traced before, and exits with 0."""
    text = MODEL + "for i in range(9):\n    model(torch.zeros(2))\n    print('finished', i)\n"
    options = ("--trace-batch-nums", "1,2", "--abort-after-batch-num", "1")
    ended = run_script(tmp_path, *options, "loop.py", loop=text)
    assert ended.status == 0
    assert "*** Starting batch number=1 ***" in ended.out
    assert "*** Starting batch number=0 ***" not in ended.out
    assert "finished 0\n" in ended.out
    assert "finished 1\n" not in ended.out
    assert "batch 1 has finished" in ended.err
    assert "Traceback" not in ended.err


def test_report_that_cannot_be_written_is_no_traceback(tmp_path: Path) -> None:
    """Where the report cannot be written the command says so."""
    text = MODEL + "model(torch.zeros(2))\n"
    ended = run_script(tmp_path, "--report", "missing/report.json", "own.py", own=text)
    assert ended.status in (2, 3)
    assert "Traceback" not in ended.err
    assert "missing/report.json" in ended.err


def test_report_is_written_for_a_warning_too(tmp_path: Path) -> None:
    """`--on-detect warn --report FILE` writes the report and lets the script finish."""
    text = MODEL + "model(torch.zeros(2))\nprint('finished')\n"
    options = ("--on-detect", "warn", "--report", "report.txt")
    ended = run_script(tmp_path, *options, "own.py", own=text)
    assert ended.status == 0
    assert "finished" in ended.out
    assert "\nDetected inf" in tmp_path.joinpath("report.txt").read_text()

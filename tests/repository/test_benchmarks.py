"""The benchmarks run, and what they write can be read. No time is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fxguard

pytestmark = pytest.mark.slow_unless_campaign

BENCHMARKS = Path(fxguard.__file__).parents[1] / "benchmarks"
ENVIRONMENT = {"date", "device", "device_name", "cpu", "threads", "torch", "fxguard"}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_on_one(script, "--threads", "1", *arguments)


def run_on_one(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script that takes one thread by itself."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(
        command, cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=120
    )


def is_spread(quartiles: dict[str, float]) -> bool:
    return quartiles["q1"] <= quartiles["median"] <= quartiles["q3"]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What overhead.py writes about a small ViT and the tiny MLP, eager, in two rounds."""
    file = tmp_path_factory.mktemp("benchmarks") / "overhead.json"
    chosen = "--models vit mlp --modes eager --work training forward --dtypes float32 --size small"
    ended = run("overhead.py", *chosen.split(), "--rounds", "2", "--json", str(file))
    assert ended.returncode == 0, ended.stderr
    assert "Targets" in ended.stdout
    return json.loads(file.read_text())


def test_overhead_runs_every_tool(record: Any) -> None:
    """Each case lists every tool that fits it, the plain model first, with all its numbers."""
    assert record["environment"].keys() >= ENVIRONMENT
    cases = {(r["case"]["model"], r["case"]["work"]): r for r in record["results"]}
    assert cases.keys() == {("vit", "training"), ("vit", "forward"), ("mlp", "forward")}
    for (_, work), result in cases.items():
        names = [tool["tool"] for tool in result["tools"]]
        assert names[0] == "plain"
        assert {"fxguard", "DebugUnderflowOverflow", "DebugMode"} <= set(names)
        assert ("detect_anomaly" in names) == (work == "training")
        assert result["rounds"] == 2
        for tool in result["tools"]:
            assert all(is_spread(tool[what]) for what in ("seconds", "ratio", "over_plain"))
            assert tool["peak_bytes"] > 0
        assert result["tools"][0]["ratio"]["median"] == 1


def test_overhead_scores_what_it_measured(record: Any) -> None:
    """One model's mean is the model's own ratio, and the targets are those that were measured."""
    for score in record["scores"]:
        if score["what"] == "time":
            (result,) = (
                r
                for r in record["results"]
                if r["case"]["model"] == "vit" and r["case"]["work"] == score["work"]
            )
            (tool,) = (t for t in result["tools"] if t["tool"] == score["tool"])
            assert score["value"] == pytest.approx(tool["ratio"]["median"])
    asked = {(t["what"], t["work"], t["most"]) for t in record["targets"]}
    assert asked == {
        ("time", "forward", 1.03),
        ("time", "training", 1.015),
        ("peak memory", "forward", 1.02),
        ("peak memory", "training", 1.02),
        ("fixed cost in µs", "forward", 60.0),
        ("fixed cost in µs", "forward", 40.0),
    }


@pytest.mark.campaign  # on each change: `test_overhead_runs_every_tool`
def test_whole_step_compares_steps_with_and_without_gradients() -> None:
    """A line for each model, with a ratio and the cost for each weight."""
    chosen = "--models mlp vit --sizes small --budget 0"
    ended = run("whole_step.py", *chosen.split())
    assert ended.returncode == 0, ended.stderr
    *_, mlp, vit = ended.stdout.splitlines()
    assert mlp.split()[:4] == ["small", "tiny", "MLP", "6"]
    assert vit.split()[:3] == ["small", "ViT", "40"]
    assert "on / off" in ended.stdout


def test_between_graphs_counts_what_python_ran() -> None:
    """Of a model that nobody captures each operation is counted; of the other ones none."""
    chosen = "--cases chain gcn --work forward --budget 0"
    ended = run("between_graphs.py", *chosen.split())
    assert ended.returncode == 0, ended.stderr
    *_, chain, gcn = (line.split() for line in ended.stdout.splitlines())
    assert chain[:2] == ["chain", "forward"]
    assert gcn[:2] == ["gcn", "forward"]
    between = {line[0]: line[6] for line in (chain, gcn)}  # after the median and two quartiles
    assert between == {"chain": "150", "gcn": "0"}


@pytest.mark.campaign  # on each change: `test_overhead_runs_every_tool`
def test_replay_measures_each_way() -> None:
    """A small model with momentum: times and memory of the guarded one and with replay."""
    ended = run("replay.py", *["--cases", "momentum", "--size", "small", "--budget", "0"])
    assert ended.returncode == 0, ended.stderr
    name, backend, _, guarded, *_ = ended.stdout.splitlines()[-1].split()
    assert (name, backend) == ("momentum", "none")
    assert float(guarded) > 0


def cells_of(ended: subprocess.CompletedProcess[str], name: str) -> list[str]:
    """The row of a model in the table that a script has printed."""
    assert ended.returncode == 0, ended.stderr
    rows = [line.split(" | ") for line in ended.stdout.splitlines()]
    (cells,) = (cells for cells in rows if cells[0] == f"| {name}")
    return cells[1:]


@pytest.mark.campaign  # on each change: `test_first_detection_measures_each_fault`
def test_first_call_measures_each_way() -> None:
    """A row of seconds, and the number of graphs; the longest functions of the own part."""
    ended = run_on_one("first_call.py", "--models", "gpt-24", "--rounds", "1", "--functions", "2")
    *seconds, graphs = cells_of(ended, "gpt-24")
    assert len(seconds) == 7
    assert all(float(cell) >= 0 for cell in seconds)
    assert int(graphs.removesuffix(" |")) > 0
    assert len(ended.stdout.rpartition("graphs")[2].splitlines()) == 5


@pytest.mark.campaign
def test_first_detection_measures_each_fault() -> None:
    """Each fault of a model of the zoo is found."""
    ended = run_on_one("first_detection.py", "--models", "cnn", "--rounds", "1")
    cells = cells_of(ended, "cnn")
    assert [bool(float(cell.removesuffix(" |"))) for cell in cells] == [True] * 4
    assert "the longest: " in ended.stdout


def test_unknown_models_are_refused() -> None:
    """A model that does not exist ends in one line that lists those that do."""
    ended = run("overhead.py", "--models", "nonsense")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert "invalid choice: 'nonsense' (choose from" in ended.stderr


@pytest.mark.campaign
def test_ranks_gives_one_number() -> None:
    """It runs under torchrun, and rank 0 alone prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = str(BENCHMARKS / "ranks.py")
    ended = subprocess.run(
        [*command, "--nproc_per_node", "2", script, "--rounds", "2"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("sync_ranks with")]
    assert len(lines) == 1
    assert "2 ranks on this machine" in lines[0]


@pytest.mark.campaign
def test_versions_compares_two_checkouts() -> None:
    """Each case has one line; against itself the ratio is that of two times of one round."""
    command = [sys.executable, str(BENCHMARKS / "versions.py"), str(BENCHMARKS.parent)]
    chosen = ["--rounds", "2", "--cases", "mlp forward", "graph breaks forward"]
    ended = subprocess.run([*command, *chosen], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    _, *lines = ended.stdout.splitlines()
    assert [line[:20].strip() for line in lines] == ["mlp forward", "graph breaks forward"]
    assert all(float(line.split()[-4]) > 0 for line in lines)


@pytest.mark.campaign  # on each change: `test_overhead_runs_every_tool`
def test_versions_needs_a_checkout(tmp_path: Path) -> None:
    """A folder without fxguard is refused: nothing else is measured in its place."""
    command = [sys.executable, str(BENCHMARKS / "versions.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "is no checkout of fxguard" in ended.stderr


def test_scripts_run_in_two_processes() -> None:
    """A line for each case, with a ratio."""
    ended = run("scripts.py", "--cases", "tiny", "--budget", "0")
    assert ended.returncode == 0, ended.stderr
    tiny = ended.stdout.splitlines()[-1].split()
    assert tiny[0] == "tiny"
    assert float(tiny[2]) > 0

"""The network check, with real processes that work, die, stop, come late or never start."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import pytest
import torch

from fxguard.ranks.netcheck import rounds_of_pairs

pytestmark = [
    pytest.mark.slow_unless_campaign,
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="torch was built without gloo",
    ),
]

CHECK = [sys.executable, "-m", "fxguard.netcheck", "--backend", "gloo"]
LONG = 60  # seconds in which everything here has ended, whatever went wrong


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def start(
    rank: int, size: int, port: int, command: Sequence[str] = CHECK, host: str = "localhost"
) -> subprocess.Popen[str]:
    """One rank, as srun would start it."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    arguments = [*command, "--timeout", "5"]
    return subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ends(*started: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """Status, standard output and standard error of each, once all have ended by themselves."""
    try:
        found = [process.communicate(timeout=LONG) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, *texts) for p, texts in zip(started, found, strict=True)]


def torchrun(count: int, *arguments: str) -> tuple[int, str, str]:
    """Status and texts of a job, once nothing of it is left running."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*command, "--nproc_per_node", str(count), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    running = {process.pid} | descendants(process.pid)
    while process.poll() is None and len(running) <= count:
        time.sleep(0.1)
        running |= descendants(process.pid)
    [found] = ends(process)
    assert len(running) > count, "the ranks were never seen"
    left = [pid for pid in running if os.path.exists(f"/proc/{pid}")]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    return found


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those that they have."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    with contextlib.suppress(OSError):
        own = {int(child) for child in children.read_text().split()}
        return own.union(*map(descendants, own))
    return set()


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux")


@needs_proc
@pytest.mark.parametrize("count", [1, 2, pytest.param(4, marks=pytest.mark.campaign)])
def test_torchrun(count: int) -> None:
    """Every rank says OK, every pair has its line, and nothing is left running."""
    status, out, err = torchrun(count, *CHECK[1:])
    assert status == 0, err
    name = socket.gethostname()
    assert {line for line in out.splitlines() if "OK" in line} == {
        f"[{name}-{rank}] OK" for rank in range(count)
    }
    assert f"{count} rank{'s' * (count > 1)} on 1 host, gloo, torch {torch.__version__}" in out
    words = [line.split()[:2] for line in out.splitlines()]
    pairs = {(int(a), int(b)) for a, b in (w for w in words if all(map(str.isdigit, w)) and w)}
    assert pairs == set(combinations(range(count), 2))


def test_a_rank_that_comes_late_is_waited_for() -> None:
    port = free_port()
    second = start(1, 2, port)
    time.sleep(2)
    for status, out, err in ends(start(0, 2, port), second):
        assert status == 0, err
        assert "OK" in out


def test_a_rank_that_never_starts() -> None:
    """It is named, with progress while it is waited for."""
    [(status, out, err)] = ends(start(0, 3, free_port()))
    assert (status, out) == (1, "")
    assert "FAILED: ranks 1, 2 did not arrive at localhost:" in err
    assert "within 5 s" in err
    assert "NCCL_DEBUG=INFO" in err
    assert "of 5 s: ranks 1, 2 to arrive" in err


def test_rank_0_never_starts() -> None:
    port = free_port()
    [(status, _, err)] = ends(start(1, 2, port))
    assert status == 1
    assert f"FAILED: cannot reach rank 0 at localhost:{port}" in err
    assert "Exception raised from" not in err  # torch's own stack


@contextlib.contextmanager
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_that_is_taken() -> None:
    with taken() as port:
        [(status, _, err)] = ends(start(0, 2, port))
    assert status == 1
    assert f"FAILED: port {port} of localhost is taken by another program" in err
    assert "NCCL_DEBUG" not in err  # that would not help


@pytest.mark.campaign
def test_somebody_else_listens() -> None:
    """Who connects, and gets no answer, is told so."""
    with taken() as port:
        [(status, _, err)] = ends(start(1, 2, port))
    assert status == 1
    assert f"FAILED: rank 0 at localhost:{port}, where something listens, perhaps another" in err
    assert "frame #" not in err  # torch's own stack


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_host_that_is_none(rank: int) -> None:
    [(status, _, err)] = ends(start(rank, 2, free_port(), host="host.invalid"))
    assert status == 1
    assert "FAILED: cannot reach rank 0 at host.invalid:" in err
    assert ("is MASTER_ADDR an address of this host" in err) == (rank == 0)
    assert "frame #" not in err


@pytest.mark.campaign
def test_world_sizes_that_differ() -> None:
    port = free_port()
    first, second = ends(start(0, 2, port), start(1, 3, port))
    assert first[0] == second[0] == 1
    assert "rank 1 was started with WORLD_SIZE 3, and rank 0 with 2" in first[2]
    assert "rank 0 was started with WORLD_SIZE 2, and rank 1 with 3" in second[2]


def test_one_rank_twice() -> None:
    port = free_port()
    found = ends(start(0, 3, port), start(1, 3, port), start(1, 3, port))
    assert [status for status, _, _ in found] == [1, 1, 1]
    assert any("two processes have rank 1: each needs its own RANK" in err for _, _, err in found)
    assert "rank 2 did not arrive" in found[0][2]


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    ran = subprocess.run(CHECK, capture_output=True, text=True, timeout=LONG, check=False)
    assert ran.returncode == 2
    assert "RANK is not set" in ran.stderr
    assert "torchrun --nproc_per_node 2 -m fxguard.netcheck" in ran.stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MASTER_PORT", "99999", "MASTER_PORT is 99999: ports are 1 to 65535"),
        ("MASTER_PORT", "no", "MASTER_PORT is 'no', and has to be a number"),
        ("RANK", "2", "RANK is 2 and WORLD_SIZE 2: ranks count from 0"),
    ],
)
def test_wrong_variables(name: str, value: str, message: str) -> None:
    """Told at once, by name."""
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    ran = subprocess.run(
        CHECK,
        env={**os.environ, **given, name: value},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert ran.returncode == 2
    assert message in ran.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu() -> None:
    command = [sys.executable, "-m", "fxguard.netcheck", "--backend", "nccl"]
    [(status, _, err)] = ends(start(0, 1, free_port(), command))
    assert status == 1
    assert "FAILED: LOCAL_RANK is 0, and torch sees 0 GPUs on this host" in err


FAULTS = {
    "dies": ("netcheck.all_reduce = lambda *_: os._exit(9)", "the all-reduce: "),
    "dies in a pair": ("netcheck.exchange = lambda *_: os._exit(9)", "pair 0 and 1: "),
    "stops": ("netcheck.exchange = lambda *_: os.kill(os.getpid(), 19)", "pair 0 and 1: "),
    "hangs": ("netcheck.exchange = lambda *_: time.sleep(600)", "pair 0 and 1: "),
    "adds wrongly": (
        "full = torch.full; torch.full = lambda *a, **k: full(*a, **k) + 1",
        "wrong sum: 1024 of 1024 elements are not 3",
    ),
    "changes data": (
        "send = netcheck.distributed.send\n"
        "netcheck.distributed.send = lambda data, to: send(data + 1, to)",
        "what rank 1 sent to rank 0 arrived changed",
    ),
}


def faulty(name: str, folder: Path) -> list[str]:
    """The network check, in which rank 1 has a fault."""
    script = folder / "rank.py"
    script.write_text(
        f"import os, sys, time, torch\nfrom fxguard.ranks import netcheck\n"
        f"if os.environ['RANK'] == '1':\n{textwrap.indent(FAULTS[name][0], '    ')}\n"
        "sys.exit(netcheck.main())"
    )
    return [str(script), "--backend", "gloo"]


@pytest.mark.parametrize(
    "name",
    [  # two find what "stops" finds
        pytest.param(name, marks=pytest.mark.campaign if name in ("hangs", "dies") else ())
        for name in FAULTS
    ],
)
def test_a_rank_that(name: str, tmp_path: Path) -> None:
    """The other one says where it stood, and ends."""
    port = free_port()
    command = [sys.executable, *faulty(name, tmp_path)]
    bad = start(1, 2, port, command)
    try:
        [(status, _, err)] = ends(start(0, 2, port, command))
    finally:
        if name in ("stops", "dies", "dies in a pair"):
            bad.kill()
    assert status == 1
    assert f"FAILED: {FAULTS[name][1]}" in err
    if name not in ("stops",):
        [(status, _, _)] = ends(bad)  # by itself
        assert status != 0


@needs_proc
@pytest.mark.campaign
@pytest.mark.parametrize(
    "name",
    # torchrun gives a stopped process 30 s before it kills it
    ["dies in a pair", "hangs", pytest.param("stops", marks=pytest.mark.campaign)],
)
def test_a_job_in_which_a_rank(name: str, tmp_path: Path) -> None:
    """The job fails, and nothing is left running."""
    status, out, _ = torchrun(2, *faulty(name, tmp_path), "--timeout", "5")
    assert status != 0
    assert "OK" not in out


@pytest.mark.parametrize("count", range(1, 10))
def test_each_pair_once(count: int) -> None:
    """No rank has two partners in one round."""
    rounds = list(rounds_of_pairs(count))
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    found = [pair for pairs in rounds for pair in pairs]
    assert sorted(found) == list(combinations(range(count), 2))

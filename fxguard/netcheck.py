"""Checks the network of a distributed run before the run does.

    torchrun --nproc_per_node 2 -m fxguard.netcheck

Every rank joins, takes part in a barrier and an all-reduce whose sum is verified, exchanges data
with every other rank, and allocates memory on its device. gloo is used on CPUs and NCCL on GPUs. A
rank that does not come, a pair that cannot talk, a wrong sum or a wrong set-up is named, within
``--timeout``; the exit status is not zero then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, distributed

__all__ = ["main"]

FAILED, WRONG_USE = 1, 2
LATENCY_ROUNDS = 20
SMALL = 8  # bytes of a message whose time is latency
SHOWN = 40  # pairs in the table; of more the slowest
DEVICE_BYTES = 2**28  # that each GPU is asked for
ADVICE = (
    "run again with NCCL_DEBUG=INFO (GPUs) or TORCH_DISTRIBUTED_DEBUG=DETAIL to see more; look for "
    "a firewall between the hosts; where a host has several networks, name the interface with "
    "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME"
)


@dataclass(frozen=True)
class Place:
    """Where this process stands, as torchrun and srun say it in the environment."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    store_is_there: bool  # torchrun's agent keeps it; else rank 0 does

    @classmethod
    def of_environment(cls) -> Place:
        """Read it.

        Raises:
            KeyError: with the name of a variable that is not set.
            ValueError: for a number that is none, or out of range.
        """
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK is {rank} and WORLD_SIZE {world_size}: ranks count from 0")
        return cls(
            rank,
            world_size,
            int(os.environ.get("LOCAL_RANK", "0")),
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    @property
    def name(self) -> str:
        """``[host-rank]``."""
        return f"[{socket.gethostname()}-{self.rank}]"


class Failure(Exception):  # noqa: N818 - it is what the check found
    """The network is not as it should be."""

    advice = ADVICE


class WrongStart(Failure):
    """The processes were not started as they should be."""

    advice = ""


class Progress:
    """Says what this rank is waiting for, and ends the process when that takes too long.

    Collectives of a GPU wait without end when a rank is gone, and cannot be interrupted.
    """

    def __init__(self, place: Place, timeout: float) -> None:
        self.place, self.timeout = place, timeout
        self.what = ""
        self.since = time.monotonic()
        self.last = self.since
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """One thing that may fail or take long; its name is in the message."""
        self.since, self.what = time.monotonic(), what
        try:
            yield
        except Failure:
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            raise Failure(f"{what}: {type(error).__name__}: {text[:300]}") from error
        finally:
            self.what = ""

    @property
    def waited(self) -> float:
        return time.monotonic() - self.since

    def _watch(self) -> None:
        while True:
            time.sleep(0.5)
            what, waited = self.what, self.waited
            if not what:
                continue
            if waited > self.timeout + 5:  # whoever can stop by itself has done so
                tell(self.place, Failure(f"{what}: no answer within {self.timeout:g} s"))
                os._exit(FAILED)
            if waited > 3 and time.monotonic() - self.last > 5:
                self.last = time.monotonic()
                say(self.place, f"waiting, {waited:.0f} of {self.timeout:g} s: {what}")


def say(place: Place, text: str) -> None:
    """One line, in one piece."""
    sys.stderr.write(f"{place.name} {text}\n")
    sys.stderr.flush()


def tell(place: Place, failure: Failure) -> None:
    """What is wrong, and what to do."""
    advice = f"\n{place.name} {failure.advice}" if failure.advice else ""
    say(place, f"FAILED: {failure}{advice}")
    sys.stdout.flush()


# The steps.


def join(place: Place, progress: Progress) -> Any:
    """Find the other ranks.

    Returns:
        The store in which they met.
    """
    where = f"{place.address}:{place.port}"
    keeps = place.rank == 0 and not place.store_is_there
    if not keeps:
        reach(place, progress)
    try:
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            place.address,
            place.port,
            is_master=keeps,
            wait_for_workers=False,
            timeout=timedelta(seconds=progress.timeout),
        )
    except Exception as error:
        if keeps and "EADDRINUSE" in str(error):
            taken = f"port {place.port} of {place.address} is taken by another program"
            raise WrongStart(f"{taken}: choose another MASTER_PORT") from None
        raise
    meeting = distributed.PrefixStore("fxguard netcheck", store)  # type: ignore[attr-defined]
    if meeting.add(f"here {place.rank}", 1) > 1:
        raise WrongStart(f"two processes have rank {place.rank}: each needs its own RANK")
    meeting.set(f"size {place.rank}", str(place.world_size))
    missing = list(range(place.world_size))
    while missing:
        for rank in [rank for rank in missing if meeting.check([f"size {rank}"])]:
            size = int(meeting.get(f"size {rank}"))
            if size != place.world_size:
                raise WrongStart(
                    f"rank {rank} was started with WORLD_SIZE {size}, and rank {place.rank} with "
                    f"{place.world_size}"
                )
            missing.remove(rank)
        progress.what = f"{_ranks(missing)} to arrive at {where}"
        if missing and progress.waited > progress.timeout:
            raise Failure(
                f"{_ranks(missing)} did not arrive at {where} within {progress.timeout:g} s"
            )
        time.sleep(0.1 if missing else 0)
    return meeting


def reach(place: Place, progress: Progress) -> None:
    """Wait until somebody listens where the ranks are to meet."""
    who = "torchrun's agent" if place.store_is_there else "rank 0"
    progress.what = f"{who} at {place.address}:{place.port}"
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=progress.timeout).close()
            return
        except OSError as error:
            if progress.waited > progress.timeout or isinstance(error, socket.gaierror):
                raise Failure(f"cannot reach {progress.what}: {error}; is it running?") from None
            time.sleep(0.2)


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:20])) + (", …" if len(ranks) > 20 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}"


def all_reduce(place: Place, device: torch.device) -> None:
    """A sum over all ranks, verified."""
    numbers = torch.full((1024,), float(place.rank + 1), device=device)
    distributed.all_reduce(numbers)
    expected = place.world_size * (place.world_size + 1) / 2
    wrong = int((numbers != expected).sum())
    if wrong:
        raise Failure(f"wrong sum: {wrong} of 1024 elements are not {expected:g}")


def rounds_of_pairs(count: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of so many ranks, in rounds in which each rank has one partner at most.

    That is the circle method for round-robin tournaments: one stays, the others move on.
    """
    circle = [*range(count), *([-1] if count % 2 else [])]  # -1: no partner in this round
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        circle[1:] = [circle[-1], *circle[1:-1]]


def exchange(first: bool, other: int, size: int, device: torch.device) -> tuple[float, float]:
    """Send data to another rank and back, and verify it.

    Returns:
        Seconds that a small message takes one way, and bytes per second of a large one.
    """
    small = torch.zeros(SMALL, dtype=torch.uint8, device=device)
    large = (torch.arange(size, device=device) % 251).to(torch.uint8)
    received = torch.zeros_like(large)
    _there_and_back(first, other, small, torch.zeros_like(small), device)  # connections are made
    latency = min(
        _there_and_back(first, other, small, torch.zeros_like(small), device)
        for _ in range(LATENCY_ROUNDS)
    )
    seconds = min(_there_and_back(first, other, large, received, device) for _ in range(3))
    if not torch.equal(large, received):
        own = distributed.get_rank()
        raise Failure(f"what rank {other} sent to rank {own} has arrived changed")
    return latency, size / seconds


def _there_and_back(
    first: bool, other: int, data: Tensor, received: Tensor, device: torch.device
) -> float:
    start = time.perf_counter()
    if first:
        distributed.send(data, other)
        distributed.recv(received, other)
    else:
        distributed.recv(received, other)
        distributed.send(data, other)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / 2


def exchange_with_all(
    place: Place, progress: Progress, size: int, device: torch.device
) -> list[tuple[int, int, float, float]]:
    """Every pair of ranks in turn: (rank, other rank, latency, bandwidth) of this rank's pairs."""
    found = []
    for pairs in rounds_of_pairs(place.world_size):
        for first, second in pairs:
            if place.rank in (first, second):
                other = second if place.rank == first else first
                with progress.step(f"pair {first} and {second}"):
                    numbers = exchange(place.rank == first, other, size, device)
                if place.rank == first:
                    found.append((first, second, *numbers))
        with progress.step("all ranks to finish their pairs"):
            distributed.barrier()
    return found


def allocate(device: torch.device) -> str:
    """Ask a GPU for memory, and use it."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    memory = torch.full((DEVICE_BYTES,), 7, dtype=torch.uint8, device=device)
    if int(memory[-1]) != 7:
        raise Failure("memory of the device does not keep what is written")
    name = torch.cuda.get_device_name(device)
    return f", {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


# All of it.


def check(place: Place, progress: Progress, backend: str, size: int) -> None:
    """Run all steps; what fails is raised as :class:`Failure`."""
    with progress.step("the other ranks"):
        store = join(place, progress)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    with progress.step(f"the {backend} process group"):
        distributed.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=progress.timeout),
        )
    with progress.step("the barrier"):
        distributed.barrier()
    with progress.step("the all-reduce"):
        all_reduce(place, device)
    with progress.step("memory of the device"):
        memory = allocate(device)
    found = exchange_with_all(place, progress, size, device)
    with progress.step("the numbers of all ranks"):
        gathered: list[Any] = [None] * place.world_size
        distributed.all_gather_object(gathered, (found, socket.gethostname()))
    sys.stdout.write(f"{place.name} OK{memory}\n")
    sys.stdout.flush()
    with progress.step("all ranks to finish"):
        distributed.barrier()
    if place.rank == 0:
        print(summary(place, backend, gathered), flush=True)
    distributed.destroy_process_group()


def summary(place: Place, backend: str, gathered: Sequence[Any]) -> str:
    """The table of pairs, and the versions."""
    hosts = [host for _, host in gathered]
    pairs = sorted((pair for found, _ in gathered for pair in found), key=lambda pair: pair[3])
    rows = [
        {
            "rank": first,
            "to": second,
            "host": hosts[first],
            "to host": hosts[second],
            "latency µs": f"{latency * 1e6:.0f}",
            "MB/s": f"{bandwidth / 1e6:.0f}",
        }
        for first, second, latency, bandwidth in pairs[:SHOWN]
    ]
    lines = [tabulate(rows, headers="keys", disable_numparse=True)] if rows else []
    if len(pairs) > SHOWN:
        lines.append(f"the slowest {SHOWN} of {len(pairs)} pairs")
    versions = [f"torch {torch.__version__}"]
    if torch.version.cuda:
        versions.append(f"CUDA {torch.version.cuda}")
    if backend == "nccl":
        versions.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[attr-defined]
    ranks = f"{place.world_size} ranks on {len(set(hosts))} hosts"
    return "\n".join([*lines, f"{ranks}, {backend}, {', '.join(versions)}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; the exit status is 0 where all is well. A failure ends the process here."""
    parser = argparse.ArgumentParser("fxguard.netcheck", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds for each step (60)", metavar="S"
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="nccl where there are GPUs")
    parser.add_argument(
        "--size", type=int, default=2**22, help="bytes of a large message (4 MiB)", metavar="B"
    )
    given = parser.parse_args(argv)
    if given.timeout <= 0 or given.size <= 0:
        parser.error("--timeout and --size have to be more than 0")
    try:
        place = Place.of_environment()
    except (KeyError, ValueError) as error:
        what = f"{error.args[0]} is not set" if isinstance(error, KeyError) else str(error)
        print(
            f"fxguard.netcheck: {what}; run it on all hosts, for example with\n"
            "  torchrun --nproc_per_node 2 -m fxguard.netcheck",
            file=sys.stderr,
        )
        return WRONG_USE
    backend = given.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    try:
        check(place, Progress(place, given.timeout), backend, given.size)
    except Failure as failure:
        tell(place, failure)
        if place.rank == 0 and not place.store_is_there:
            time.sleep(1)  # the others read in the store why, and it goes with this process
        os._exit(FAILED)  # threads may hang in a driver
    return 0


if __name__ == "__main__":
    sys.exit(main())

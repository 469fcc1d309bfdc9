"""Checks the network of a distributed run before the run does.

    torchrun --nproc_per_node 2 -m fxguard.netcheck

Every rank joins, takes part in a barrier and an all-reduce whose sum is verified, exchanges data
with every other rank, and allocates memory on its device. gloo is used on CPUs and NCCL on GPUs.
The check names a rank that does not join, a pair that cannot communicate, a wrong sum or a wrong
set-up, at the latest ``--timeout`` plus three seconds after a step began. The exit status is then
not zero.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, distributed

from fxguard.ranks.rendezvous import FAILED, Failure, Place, Progress, WrongStart, join, tell
from fxguard.report.strict_json import recorded, write_json

__all__ = ["main"]

WRONG_USE = 2
LATENCY_ROUNDS = 20
SMALL = 8  # bytes of a message that measures latency
SHOWN = 40  # pairs in the table; if there are more, the slowest
DEVICE_BYTES = 2**28  # allocated on each GPU


def all_reduce(place: Place, device: torch.device) -> None:
    """Compute a sum over all ranks, and verify it."""
    numbers = torch.full((1024,), float(place.rank + 1), device=device)
    distributed.all_reduce(numbers)
    expected = place.world_size * (place.world_size + 1) / 2
    wrong = int((numbers != expected).sum())
    if wrong:
        raise Failure(f"wrong sum: {wrong} of 1024 elements are not {expected:g}")


def rounds_of_pairs(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of ranks, in rounds in which each rank has at most one partner.

    This is the circle method for round-robin tournaments: one stays, the others move on.
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
        Seconds for a small message one way, and bytes per second for a large one.
    """
    small = torch.zeros(SMALL, dtype=torch.uint8, device=device)
    large = (torch.arange(size, device=device) % 251).to(torch.uint8)
    received = torch.zeros_like(large)
    _there_and_back(first, other, small, torch.zeros_like(small), device)  # sets up connections
    latency = min(
        _there_and_back(first, other, small, torch.zeros_like(small), device)
        for _ in range(LATENCY_ROUNDS)
    )
    seconds = min(_there_and_back(first, other, large, received, device) for _ in range(3))
    if not torch.equal(large, received):
        own = distributed.get_rank()
        raise Failure(f"what rank {other} sent to rank {own} arrived changed")
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
    """Test all pairs in turn; (rank, other rank, latency, bandwidth) of this rank's pairs."""
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
    """Allocate memory on a GPU, and use it."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    memory = torch.full((DEVICE_BYTES,), 7, dtype=torch.uint8, device=device)
    if int(memory[-1]) != 7:
        raise Failure("memory of the device does not keep what is written")
    name = torch.cuda.get_device_name(device)
    return f", {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def gpu_of(place: Place) -> torch.device:
    """The GPU of this rank, made the current one."""
    count = torch.cuda.device_count()
    if place.local_rank >= count:
        raise WrongStart(
            f"LOCAL_RANK is {place.local_rank}, and torch sees {count} GPUs on this host: start as "
            "many processes as there are GPUs, or use --backend gloo"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


# The whole check.


def check(place: Place, progress: Progress, backend: str, size: int) -> list[Any]:
    """Run all steps; a failed one raises :class:`Failure`.

    Returns:
        For each rank the pairs that it tested first, and its host.
    """
    with progress.step("the other ranks"):
        store = join(place, progress)
    device, patience = torch.device("cpu"), progress.timeout
    if backend == "nccl":
        device = gpu_of(place)
        patience = 2 * progress.timeout + 60  # NCCL's own watchdog aborts without naming a step
    with progress.step(f"the {backend} process group"):
        distributed.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=patience),
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
    return gathered


def summary(place: Place, backend: str, gathered: Sequence[Any]) -> str:
    """The table of pairs, and the versions."""
    hosts = [host for _, host in gathered]
    pairs = _slowest_first(gathered)
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
    where = f"{_count(place.world_size, 'rank')} on {_count(len(set(hosts)), 'host')}"
    return "\n".join([*lines, f"{where}, {backend}, {', '.join(versions(backend))}"])


def record_of(
    place: Place, backend: str, gathered: Sequence[Any] = (), problem: str = ""
) -> dict[str, Any]:
    """The check as plain data.

    Args:
        place: of this process.
        backend: "gloo" or "nccl".
        gathered: what :func:`check` returned; nothing if it failed.
        problem: why it failed.
    """
    names = ("rank", "to", "latency", "bandwidth")
    return recorded(
        "netcheck",
        {
            "works": not problem,
            "problem": problem,
            "ranks": place.world_size,
            "backend": backend,
            "versions": versions(backend),
            "hosts": [host for _, host in gathered],
            "pairs": [dict(zip(names, pair, strict=True)) for pair in _slowest_first(gathered)],
        },
    )


def versions(backend: str) -> list[str]:
    """Versions of torch, CUDA and NCCL."""
    found = [f"torch {torch.__version__}"]
    if torch.version.cuda:
        found.append(f"CUDA {torch.version.cuda}")
    if backend == "nccl":
        found.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[attr-defined]
    return found


def _slowest_first(gathered: Sequence[Any]) -> list[tuple[int, int, float, float]]:
    return sorted((pair for found, _ in gathered for pair in found), key=lambda pair: pair[3])


def _keep(file: str | None, place: Place, record: dict[str, Any]) -> None:
    if file is None or place.rank != 0:
        return
    try:
        write_json(file, record)
    except OSError as error:
        print(f"fxguard.netcheck: the record could not be written: {error}", file=sys.stderr)


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; the exit status is 0 if everything works. A failure ends the process here."""
    parser = argparse.ArgumentParser("fxguard.netcheck", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds for each step (60)", metavar="S"
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="nccl where there are GPUs")
    parser.add_argument(
        "--size", type=int, default=2**22, help="bytes of a large message (4 MiB)", metavar="B"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="rank 0 also writes what it found into this file"
    )
    given = parser.parse_args(argv)
    if given.timeout <= 0 or given.size <= 0:
        parser.error("--timeout and --size have to be more than 0")
    try:
        place = Place.of_environment()
    except WrongStart as error:
        print(
            f"fxguard.netcheck: {error}; run it on all hosts, for example with\n"
            "  torchrun --nproc_per_node 2 -m fxguard.netcheck",
            file=sys.stderr,
        )
        return WRONG_USE
    backend = given.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    try:
        gathered = check(place, Progress(place, given.timeout), backend, given.size)
        _keep(given.json, place, record_of(place, backend, gathered))
    except Failure as failure:
        tell(place, failure)
        _keep(given.json, place, record_of(place, backend, problem=str(failure)))
        if place.rank == 0 and not place.store_is_there:
            time.sleep(1)  # others read the reason in the store, which ends with this process
        os._exit(FAILED)  # threads may be stuck in a driver
    return 0

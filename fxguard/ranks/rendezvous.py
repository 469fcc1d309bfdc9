"""How the ranks of a distributed run find each other, and what each prints while it waits."""

from __future__ import annotations

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

from torch import distributed

from fxguard.forgiving import theirs

__all__ = ["FAILED", "Failure", "Place", "Progress", "WrongStart", "join", "say", "tell"]

FAILED = 1  # the exit status
MARGIN = 2  # seconds for gloo and other timeouts to stop by themselves with a better message
ADVICE = (
    "run again with NCCL_DEBUG=INFO (GPUs) or TORCH_DISTRIBUTED_DEBUG=DETAIL to see more; look for "
    "a firewall between the hosts; where a host has several networks, name the interface with "
    "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME"
)


@dataclass(frozen=True)
class Place:
    """The place of this process in the run, from the environment of torchrun or srun."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    store_is_there: bool  # whether torchrun's agent keeps the store; else rank 0 does

    @classmethod
    def of_environment(cls) -> Place:
        """Read the place from the environment.

        Raises:
            WrongStart: for a variable that is not set or has an impossible value.
        """
        rank, world_size = _number("RANK"), _number("WORLD_SIZE")
        if not 0 <= rank < world_size:
            raise WrongStart(f"RANK is {rank} and WORLD_SIZE {world_size}: ranks count from 0")
        port = _number("MASTER_PORT")
        if not 0 < port < 2**16:
            raise WrongStart(f"MASTER_PORT is {port}: ports are 1 to 65535")
        return cls(
            rank,
            world_size,
            _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0,
            _variable("MASTER_ADDR"),
            port,
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    @property
    def keeper(self) -> str:
        """The name of the process that keeps the store in which the ranks meet."""
        return "torchrun's agent" if self.store_is_there else "rank 0"

    @property
    def name(self) -> str:
        """``[host-rank]``."""
        return f"[{socket.gethostname()}-{self.rank}]"


class Failure(Exception):  # noqa: N818 - it is a finding of the check
    """The network does not work as it should."""

    advice = ADVICE


class WrongStart(Failure):
    """The processes were not started correctly."""

    advice = ""


def _variable(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise WrongStart(f"{name} is not set") from None


def _number(name: str) -> int:
    try:
        return int(text := _variable(name))
    except ValueError:
        raise WrongStart(f"{name} is {text!r}, and has to be a number") from None


class Progress:
    """Prints what this rank is waiting for, and ends the process when that takes too long.

    GPU collectives wait forever when a rank is gone, and cannot be interrupted.
    """

    def __init__(self, place: Place, timeout: float) -> None:
        self.place, self.timeout = place, timeout
        self.what = ""
        self.since = time.monotonic()
        self.last = self.since
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """One step that may fail or take long; its name appears in the message."""
        self.since, self.what = time.monotonic(), what
        try:
            yield
        except Failure:
            raise
        except theirs() as error:  # whatever torch's process group raises
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
            if waited > self.timeout + MARGIN:
                tell(self.place, Failure(f"{what}: no answer within {self.timeout:g} s"))
                os._exit(FAILED)
            if waited > 3 and time.monotonic() - self.last > 5:
                self.last = time.monotonic()
                say(self.place, f"waiting, {waited:.0f} of {self.timeout:g} s: {what}")


def say(place: Place, text: str) -> None:
    """Print one line in one piece."""
    sys.stderr.write(f"{place.name} {text}\n")
    sys.stderr.flush()


def tell(place: Place, failure: Failure) -> None:
    """Print what is wrong, and what to do."""
    advice = f"\n{place.name} {failure.advice}" if failure.advice else ""
    say(place, f"FAILED: {failure}{advice}")
    sys.stdout.flush()


def join(place: Place, progress: Progress) -> Any:
    """Find the other ranks.

    Returns:
        The store in which they met.
    """
    where = f"{place.address}:{place.port}"
    kept = place.rank == 0 and not place.store_is_there
    if kept:
        store = keep_store(place, progress)
    reach(place, progress)
    if not kept:
        progress.what = (
            f"{place.keeper} at {where}, where something listens, perhaps another program"
        )
        store = _store(place.address, place.port, False, progress)
    meeting = distributed.PrefixStore(_attempt(), store)  # type: ignore[attr-defined]
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


def keep_store(place: Place, progress: Progress) -> Any:
    """Open the store in which the ranks meet, on all interfaces of this host."""
    try:
        return _store("localhost", place.port, True, progress)
    except Exception as error:
        if "EADDRINUSE" in str(error):
            taken = f"port {place.port} of {place.address} is taken by another program"
            raise WrongStart(f"{taken}: choose another MASTER_PORT") from None
        raise


def _store(host: str, port: int, keeps: bool, progress: Progress) -> Any:
    return distributed.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=keeps,
        wait_for_workers=False,
        timeout=timedelta(seconds=progress.timeout),
    )


def _attempt() -> str:
    """The attempt of torchrun, whose store stays when it restarts the ranks."""
    return f"fxguard netcheck {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def reach(place: Place, progress: Progress) -> None:
    """Wait until somebody listens at the address where the ranks meet."""
    progress.what = f"{place.keeper} at {place.address}:{place.port}"
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=progress.timeout).close()
            return
        except OSError as error:
            why = f"cannot reach {progress.what}: {error}"
            if place.rank == 0 and not place.store_is_there:
                here = f"is MASTER_ADDR an address of this host, {socket.gethostname()}?"
                raise WrongStart(f"{why}; {here}") from None
            if progress.waited > progress.timeout or isinstance(error, socket.gaierror):
                raise Failure(f"{why}; is it running?") from None
            time.sleep(0.2)


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:20])) + (", …" if len(ranks) > 20 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}"

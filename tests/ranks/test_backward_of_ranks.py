"""A bad gradient on one of two ranks: said there, told everywhere if asked, and no rank hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.ranks_backward import FAULTY, WRAPPERS
from support.torchrun import torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="torch was built without gloo",
    ),
]

# Sharded weights are gone when the backward has ended, and DTensors issue collectives: there the
# weights are named, and no operation is accused. With sync_ranks all ranks gather them once more.
OPERATION = "backward of sqrt made inf (ranks_backward.py:"
MESSAGES = {
    ("ddp", False): OPERATION,
    ("ddp", True): OPERATION,
    ("fsdp", False): "gradient of weight down.bias",
    ("fsdp", True): OPERATION,
    ("blocks", False): "gradient of weight net.down.bias",
    ("blocks", True): "backward of sqrt in net made -inf (ranks_backward.py:",
    ("tp", False): "gradient of weight down.bias",
    ("tp", True): "gradient of weight down.bias",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks have left what they were told."""
    found = tmp_path_factory.mktemp("ranks")
    ran = torchrun(Path(__file__).parents[1] / "support" / "ranks_backward.py", str(found))
    assert ran.returncode == 0, ran.stderr[-3000:]
    return found


@pytest.mark.parametrize("sync_ranks", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_rank_with_the_bad_gradient_tells(wrapper: str, sync_ranks: bool, folder: Path) -> None:
    """Gradients are looked at before they are reduced; a healthy step before that says nothing."""
    files = [folder / f"{wrapper}-{sync_ranks}.{rank}.json" for rank in (0, 1)]
    told: list[list[str]] = [json.loads(file.read_text())[0] for file in files]
    is_everywhere = wrapper in ("tp", "blocks")  # all ranks have a bad gradient
    for rank, messages in enumerate(told):
        if not (sync_ranks or is_everywhere or rank == FAULTY):
            assert messages == []
            continue
        source = rank if is_everywhere else FAULTY
        (message,) = messages
        expected = MESSAGES[wrapper, sync_ranks]
        if wrapper == "blocks" and sync_ranks and rank != 0:  # the first rank that asks gathers
            expected = MESSAGES[wrapper, False]
        assert message.startswith(f"rank {source}: batch 1: {expected}")


@pytest.mark.parametrize("sync_ranks", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_next_step_is_what_it_was(wrapper: str, sync_ranks: bool, folder: Path) -> None:
    for rank in (0, 1):
        cases = [folder / f"{wrapper}-{sync}.{rank}.json" for sync in (None, sync_ranks)]
        plain, guarded = (json.loads(file.read_text())[1] for file in cases)
        assert plain == guarded

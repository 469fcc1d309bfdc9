"""What every test starts from."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No test sees what TorchDynamo compiled for another one."""
    torch.set_num_threads(1)
    torch._logging.set_logs(dynamo=logging.ERROR)  # graph breaks are expected here
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()

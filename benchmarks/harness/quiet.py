"""Keeps what is compared from filling the screen with warnings."""

from __future__ import annotations

import logging
import warnings

import torch
import transformers

__all__ = ["quieten"]


def quieten() -> None:
    """No warnings of graph breaks, dtypes and losses; errors still show."""
    transformers.logging.set_verbosity_error()
    torch._logging.set_logs(dynamo=logging.ERROR, inductor=logging.ERROR)
    warnings.simplefilter("ignore")

"""A mask that is made of the scores which it hides has to leave the largest of each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = "import torch\nimport torch.nn.functional as F\ntorch.manual_seed(0)\n"
LOGITS = "logits = torch.tensor([[9.0, 1.0, 0.0], [1.0, 1.0, 1.0]])\n"
KEEP = "fix: keep the largest entry of each row, whatever {} says: it is made of the scores"

# The program, and the mask with its line.
OF_SCORES = {
    "a nucleus": (
        "def nucleus(logits, p):\n    best, order = logits.sort(dim=-1, descending=True)\n"
        "    cum = best.softmax(-1).cumsum(-1)\n    remove = cum > p\n"
        "    drop = torch.zeros_like(remove).scatter(-1, order, remove)\n"
        "    return logits.masked_fill(drop, float('-inf'))\n"
        + LOGITS
        + "print(F.log_softmax(nucleus(logits, 0.9), dim=-1))\n",
        "`remove` (script.py:7: remove = cum > p)",
    ),
    "a threshold of probabilities": (
        LOGITS + "p = logits.softmax(-1)\nlow = p < 0.5\n"
        "kept = logits.masked_fill(low, -torch.inf)\nprint(kept.softmax(-1))\n",
        "`low` (script.py:6: low = p < 0.5)",
    ),
    "what is kept, by where": (
        LOGITS + "enough = logits >= 2.0\n"
        "kept = torch.where(enough, logits, -torch.inf)\nprint(torch.softmax(kept, -1))\n",
        "`enough` (script.py:5: enough = logits >= 2.0)",
    ),
    "a quantile of all, written in place, in a method": (
        "class Sampler:\n    def __call__(self, scores):\n        scores = scores.clone()\n"
        "        bound = scores.quantile(0.9)\n        gone = scores.lt(bound)\n"
        "        scores[gone] = float('-inf')\n        return scores.softmax(1)\n"
        + LOGITS
        + "print(Sampler()(logits))\n",
        "`gone` (script.py:8: gone = scores.lt(bound))",
    ),
    "scores by a temperature": (
        LOGITS + "scaled = logits / 2.0\nprobs = F.softmax(logits, dim=-1)\n"
        "weak = torch.lt(probs, 0.4)\n"
        "scaled = scaled.masked_fill(~weak.logical_not(), -torch.inf)\n"
        "print(scaled.log_softmax(-1))\n",
        "`weak` (script.py:7: weak = torch.lt(probs, 0.4))",
    ),
    "a nucleus behind the largest k": (
        "def top_k(x, k):\n    kth = x.topk(k, dim=-1).values[:, -1:]\n"
        "    return x.masked_fill(x < kth, float('-inf'))\n"
        "def top_p(x, p):\n    best, order = x.sort(dim=-1, descending=True)\n"
        "    cum = best.softmax(-1).cumsum(-1)\n    gone = cum > p\n"
        "    drop = torch.zeros_like(gone).scatter(1, order, gone)\n"
        "    return x.masked_fill(drop, float('-inf'))\n"
        + LOGITS
        + "logits = top_k(logits, 2)\nlogits = top_p(logits, 0.9)\n"
        "print(F.log_softmax(logits, dim=-1))\n",
        "`gone` (script.py:10: gone = cum > p)",
    ),
    "on one line": (
        LOGITS + "kept = logits.masked_fill(logits.softmax(-1) < 0.5, -torch.inf)\n"
        "print(kept.softmax(-1))\n",
        "the mask (script.py:5)",
    ),
}

# Masks of data: the row is to be dropped, as nothing of it is of use.
OF_DATA = {
    "padding": "lengths = torch.tensor([3, 0])\n"
    "pad = torch.arange(3)[None] >= lengths[:, None]\n"
    "print(logits.masked_fill(pad, -torch.inf).softmax(-1))\n",
    "padding of the shape of the scores": "lengths = torch.tensor([3, 0])\n"
    "pad = torch.arange(logits.size(1)).expand_as(logits) >= lengths[:, None]\n"
    "print(logits.masked_fill(pad, -torch.inf).softmax(-1))\n",
    "edges": "adj = torch.tensor([[1.0, 0, 0], [0, 0, 0]])\n"
    "w = torch.where(adj > 0, logits, -torch.inf)\nprint(w.softmax(-1))\n",
    "a filter and padding": "pad = torch.tensor([[False] * 3, [True] * 3])\n"
    "gone = (logits.softmax(-1) < 0.01) | pad\n"
    "print(logits.masked_fill(gone, -torch.inf).softmax(-1))\n",
    "entries that are 0": "logits = logits * torch.tensor([[1.0], [0.0]])\n"
    "none = logits <= 0\nprint(logits.masked_fill(none, -torch.inf).softmax(-1))\n",
}


@pytest.mark.parametrize("name", OF_SCORES)
def test_the_largest_is_kept(run_here: RunHere, name: str) -> None:
    text, mask = OF_SCORES[name]
    err = run_here(HEAD + text).err
    assert KEEP.format(mask)[:60] in err
    assert mask in err
    assert "drop the row" not in err


@pytest.mark.parametrize("name", OF_DATA)
def test_masks_of_data_are_left_alone(run_here: RunHere, name: str) -> None:
    err = run_here(HEAD + LOGITS + OF_DATA[name]).err
    assert "drop the row in which everything is masked" in err
    assert "keep the largest" not in err

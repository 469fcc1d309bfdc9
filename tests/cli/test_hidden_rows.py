"""A report says where the mask was made that hides a whole row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

HEAD = (
    "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\ntorch.manual_seed(0)\n"
)


def model(body: str, rest: str, layer: str = "nn.Linear(8, 8)", arguments: str = "x, m") -> str:
    """A model with a layer ``l``, and the script that calls it."""
    return (
        f"{HEAD}class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.l = {layer}\n    def forward(self, {arguments}):\n"
        + "".join(f"        {line}\n" for line in body.split("; "))
        + "net = M()\n"
        + "".join(f"{line}\n" for line in rest.split("; "))
    )


ATTENTION = "scores = self.l(x) @ x.transpose(1, 2)"
CALL = "net(torch.randn(2, 3, 8), mask).sum().backward()"
LENGTHS = "n = torch.tensor([2, 0])"

MADE = {
    "in the model": (
        model(
            f"keep = m != 0; {ATTENTION}; "
            "scores = scores.masked_fill(~keep[:, None, :], float('-inf')); "
            "return scores.softmax(-1) @ x",
            f"mask = torch.tensor([[1, 2, 0], [0, 0, 0]]); {CALL}",
        ),
        "its mask `keep` comes from script.py:10: keep = m != 0",
    ),
    "in the script": (
        model(
            f"{ATTENTION}; scores = scores.masked_fill(m[:, None], -torch.inf); "
            "return scores.softmax(-1) @ x",
            f"{LENGTHS}; mask = torch.arange(3) >= n[:, None]; {CALL}",
        ),
        "its mask `mask` comes from script.py:15: mask = torch.arange(3) >= n[:, None]",
    ),
    "by where": (
        model(
            "e = self.l(x).sum(-1); e = torch.where(m, e, torch.tensor(-torch.inf)); "
            "return F.softmax(e, dim=1)",
            f"{LENGTHS}; mask = torch.arange(3) < n[:, None]; {CALL}",
        ),
        "its mask `mask` comes from script.py:15: mask = torch.arange(3) < n[:, None]",
    ),
    "as numbers that are added": (
        model(
            f"return ({ATTENTION.partition(' = ')[2]} + m).softmax(-1)",
            "ok = torch.tensor([[1, 1, 0], [0, 0, 0]]); "
            f"mask = torch.zeros(2, 1, 3).masked_fill(ok[:, None] == 0, -torch.inf); {CALL}",
        ),
        "its mask `mask` comes from script.py:13: mask = torch.zeros(2, 1, 3)",
    ),
    "as numbers made in the model": (
        model(
            "bias = torch.zeros(2, 1, 3).masked_fill(m[:, None] == 0, -torch.inf); "
            f"{ATTENTION}; scores = scores + bias; return scores.softmax(-1)",
            f"mask = torch.tensor([[1, 1, 0], [0, 0, 0]]); {CALL}",
        ),
        "its mask `mask` comes from script.py:15: mask = torch.tensor([[1, 1, 0], [0, 0, 0]])",
    ),
    "in another function": (
        HEAD
        + "def padded(n, size):\n    return torch.arange(size) >= n[:, None]\n"
        + model(
            "w = self.l(x).sum(-1); w = w.masked_fill(padded(m, 3), -torch.inf); "
            "return w.softmax(1)",
            f"mask = torch.tensor([2, 0]); {CALL}",
        ).removeprefix(HEAD),
        "its mask is made in script.py:6: return torch.arange(size) >= n[:, None]",
    ),
    "by writing": (
        model(
            "logits = self.l(x); logits[~m] = float('-inf'); return logits.log_softmax(-1)[..., 0]",
            f"mask = torch.rand(2, 3, 8) > 0.4; mask[0, 1] = False; {CALL}",
        ),
        "its mask `mask` comes from script.py:14: mask = torch.rand(2, 3, 8) > 0.4",
    ),
    "as a key_padding_mask": (
        model(
            "out, _ = self.l(x, x, x, key_padding_mask=m); return out",
            f"{LENGTHS}; mask = torch.arange(3) >= n[:, None]; {CALL}",
            layer="nn.MultiheadAttention(8, 2, batch_first=True)",
        ),
        "its mask `mask`, which hides all 3 keys of sample 1, comes from script.py:14: mask = ",
    ),
    "of a graph": (
        model(
            "h = self.l(x); e = (h @ h.t()).masked_fill(m == 0, -torch.inf); "
            "return torch.softmax(e, dim=1) @ h",
            "mask = 1 - torch.eye(4)[2].expand(4, 4).t(); net(torch.randn(4, 8), mask).sum()",
        ),
        "its mask `mask` comes from script.py:14: mask = 1 - torch.eye(4)[2]",
    ),
    "without a model": (
        f"{HEAD}x = torch.randn(2, 3, 8, requires_grad=True)\n{LENGTHS}\n"
        "mask = torch.arange(3)[None] < n[:, None]\n"
        "w = x.sum(-1).masked_fill(~mask, float('-inf'))\n"
        "loss = (w.softmax(1)[..., None] * x).sum()\nloss.backward()\n",
        "its mask `mask` comes from script.py:7: mask = torch.arange(3)[None] < n[:, None]",
    ),
    "two masks": (
        model(
            f"early = torch.ones(3, 3).triu(1) > 0; {ATTENTION}; "
            "scores = scores.masked_fill(early, -torch.inf); "
            "scores = scores.masked_fill(m[:, None], -torch.inf); return scores.softmax(-1)",
            f"{LENGTHS}; mask = torch.arange(3) >= n[:, None]; {CALL}",
        ),
        "its mask `mask`, which alone hides the row, comes from script.py:17: mask = torch.arange",
    ),
}

PAIR = "its masks, which hide the row only together: "
EACH = "its masks, each of which hides the row: "
LOWER = "early = torch.ones(3, 3).triu(1) > 0"
# The first position is padding, so that the first query has no key that is not later.
FRONT = f"n = torch.tensor([0, 1]); mask = torch.arange(3) < n[:, None]; {CALL}"
KEYS = "net(torch.randn(2, 3, 8), mask)[0].sum().backward()"
LAYER = "nn.MultiheadAttention(8, 2, batch_first=True)"

# Which of several masks hides it.
WHICH = {
    "both together": (
        model(
            f"{LOWER}; {ATTENTION}; scores = scores.masked_fill(early, -torch.inf); "
            "scores = scores.masked_fill(m[:, None], -torch.inf); return scores.softmax(-1)",
            FRONT,
        ),
        PAIR + "`mask` comes from script.py:17: mask",
    ),
    "each of them": (
        model(
            f"{ATTENTION}; scores = scores.masked_fill(m[:, None], -torch.inf); "
            "also = m * 1 > 0; "
            "scores = scores.masked_fill(also[:, None], -torch.inf); return scores.softmax(-1)",
            f"{LENGTHS}; mask = torch.arange(3) >= n[:, None]; {CALL}",
        ),
        EACH + "`also` comes from script.py:12: also = m * 1 > 0, and `mask` comes from",
    ),
    "numbers that are added, and a view": (
        model(
            f"{LOWER}; bias = torch.zeros(3, 3).masked_fill(early, -torch.inf); {ATTENTION}; "
            "scores = (scores + bias[None]) / 2.0; "
            "scores = torch.where(m[:, None], torch.tensor(-torch.inf), scores); "
            "return scores.view(6, 3).softmax(-1).view(2, 3, 3)",
            FRONT,
        ),
        PAIR + "`mask` comes from script.py:18: mask",
    ),
    "a transposition": (
        model(
            f"{LOWER}; {ATTENTION}; scores = scores.masked_fill(early.t(), -torch.inf); "
            "scores = scores.transpose(1, 2).masked_fill(m[:, None], -torch.inf); "
            "return scores.softmax(-1)",
            FRONT,
        ),
        PAIR + "`mask` comes from script.py:17: mask",
    ),
    "what is kept, in place": (
        model(
            f"{LOWER}; {ATTENTION}; scores.masked_fill_(early, -torch.inf); "
            "keep = (~m)[:, None].expand(2, 3, 3); scores[~keep] = -torch.inf; "
            "return scores.softmax(-1)",
            f"{LENGTHS}; mask = torch.arange(3) >= n[:, None]; {CALL}",
        ),
        "its mask `mask`, which alone hides the row, comes from",
    ),
    "of keys": (
        model(
            f"{LOWER}; return self.l(x, x, x, key_padding_mask=m, attn_mask=early)",
            f"{LENGTHS}; mask = torch.arange(3) >= n[:, None]; {KEYS}",
            layer=LAYER,
        ),
        "its mask `mask`, which alone hides all 3 keys of sample 1, comes from script.py:14",
    ),
    "of keys, both together": (
        model(
            f"{LOWER}; return self.l(x, x, x, key_padding_mask=m, attn_mask=early)",
            FRONT.replace(CALL, KEYS),
            layer=LAYER,
        ),
        "its masks, which hide all 3 keys of query 0 of sample 1 only together: `mask` comes",
    ),
    "of one head": (
        model(
            "return self.l(x, x, x, attn_mask=m)",
            "mask = torch.zeros(4, 3, 3); mask[3, 2] = -torch.inf; " + KEYS,
            layer=LAYER,
        ),
        "its mask `mask`, which hides all 3 keys of query 2 of sample 1 in head 1, comes from",
    ),
}

# Nothing is said of a mask here.
WITHOUT = {
    "an infinity that was computed": model(
        "w = self.l(x).sum(-1); w = w - m; return w.softmax(1)",
        f"mask = torch.tensor([[1.0], [float('inf')]]).exp(); {CALL}",
    ),
    "a logarithm of 0": model(
        "p = (self.l(x) * m).square(); return p.log().sum()",
        f"mask = torch.tensor([1.0, 0.0])[:, None, None]; {CALL}",
    ),
    "a mask beside a division": model(
        "w = self.l(x).masked_fill(m[..., None], 0); return w / w.sum(-1, keepdim=True)",
        f"{LENGTHS}; mask = torch.arange(3) >= n[:, None]; {CALL}",
    ),
    "a mask written on the line itself": model(
        f"{ATTENTION}; "
        "return scores.masked_fill(m[:, None, :] * torch.arange(3) < 1, -torch.inf).softmax(-1)",
        f"mask = torch.zeros(2, 3); {CALL}",
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_the_line_that_made_the_mask_is_named(run_here: RunHere, name: str) -> None:
    text, told = MADE[name]
    ran = run_here(text)
    assert "masked row" in ran.err
    assert told in ran.err


@pytest.mark.parametrize("name", WHICH)
def test_the_mask_that_hides_the_row_is_named(run_here: RunHere, name: str) -> None:
    text, told = WHICH[name]
    ran = run_here(text)
    assert told in ran.err
    assert "note:" not in ran.err  # of the weights, which nobody reads


@pytest.mark.parametrize("name", WITHOUT)
def test_what_no_mask_hides_has_none(run_here: RunHere, name: str) -> None:
    ran = run_here(WITHOUT[name])
    assert "made" in ran.err
    assert "its mask" not in ran.err


def test_a_mask_of_a_layer_inside(run_here: RunHere) -> None:
    """The argument of a layer is followed to the model's own, and to the script."""
    inner = model(
        "return self.l(x).sum(-1).masked_fill(m, -torch.inf).softmax(1)",
        f"outer = nn.ModuleDict({{'pool': net}}); {LENGTHS}",
    )
    text = (
        inner + "class Outer(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.pool = net\n    def forward(self, x, lengths):\n"
        "        gone = torch.arange(3) >= lengths[:, None]\n        return self.pool(x, gone)\n"
        "Outer()(torch.randn(2, 3, 8), n).sum()\n"
    )
    assert "its mask `gone` comes from script.py:19: gone = " in run_here(text).err

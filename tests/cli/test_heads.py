"""Where all bad elements are of one head of an attention, the head is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

LARGE = "self.q.weight[8:12] *= 1e20; self.k.weight[8:12] *= 1e20"
SPLIT = "q, k, v = (l(x).view(b, t, 4, 4).transpose(1, 2) for l in (self.q, self.k, self.v))"
JOIN = "return (w @ v).transpose(1, 2).reshape(b, t, 16)"


def attention(*lines: str, large: str = LARGE, x: str = "torch.randn(3, 5, 16)") -> str:
    return (
        "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
        "torch.manual_seed(0)\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.q, self.k, self.v = "
        "(nn.Linear(16, 16, bias=False) for _ in range(3))\n"
        f"        with torch.no_grad():\n            {large}\n"
        "    def forward(self, x):\n        b, t = x.shape[:2]\n"
        + "".join(f"        {line}\n" for line in lines)
        + f"Net()({x}).sum().backward()\n"
    )


PRODUCT = "w = (q @ k.transpose(-2, -1) / 2).softmax(-1)"
CAUSAL = "w = w.masked_fill(torch.ones(t, t).triu(1) > 0, -torch.inf)"
MASK = (
    "w = q @ k.transpose(-2, -1)",
    "gone = torch.zeros(b, 4, t, t).bool()",
    "gone[1, 3, 2] = True",
    "w = w.masked_fill(gone, -torch.inf).softmax(-1)",
)

ONE_HEAD = {
    "the product": (attention(SPLIT, PRODUCT, JOIN), "all in head 2 of 4"),
    "a permutation": (
        attention(SPLIT.replace("transpose(1, 2)", "permute(0, 2, 1, 3)"), PRODUCT, JOIN),
        "all in head 2 of 4",
    ),
    "negative dimensions": (
        attention(SPLIT.replace("transpose(1, 2)", "transpose(-3, -2)"), PRODUCT, JOIN),
        "all in head 2 of 4",
    ),
    "the first head": (
        attention(SPLIT, PRODUCT, JOIN, large=LARGE.replace("8:12", "0:4")),
        "all in head 0 of 4",
    ),
    "with a causal mask": (
        attention(SPLIT, "w = q @ k.transpose(-2, -1)", CAUSAL, "w = w.softmax(-1)", JOIN),
        "all in head 2 of 4",
    ),
    "torch.matmul": (
        attention(SPLIT, "w = F.softmax(torch.matmul(q, k.transpose(2, 3)), dim=-1)", JOIN),
        "all in head 2 of 4",
    ),
    "a scale behind the product": (
        attention(
            SPLIT,
            "w = q @ k.transpose(-2, -1)",
            "w = (w * 1e20).softmax(-1)",
            JOIN,
            large=LARGE.replace("1e20", "1e10"),
        ),
        "all in head 2 of 4",
    ),
    "a masked row of one head": (
        attention(SPLIT, *MASK, JOIN, large="pass"),
        "all 5 elements of the row are -inf (in sample 1; in head 3 of 4)",
    ),
    "two masked rows of one head": (
        attention(SPLIT, *MASK[:3], "gone[1, 3, 4] = True", MASK[3], JOIN, large="pass"),
        "likewise in 1 more row, all in head 3 of 4",
    ),
    "the fused function": (
        attention(SPLIT, "w = F.scaled_dot_product_attention(q, k, v)", "return w.transpose(1, 2)"),
        "all in head 2 of 4",
    ),
    "values of one head": (
        attention(
            SPLIT,
            PRODUCT,
            JOIN,
            large="self.v.weight[8:12] *= 3e38",
            x="torch.ones(3, 5, 16)",
        ).replace("return (w @ v)", "return (w @ (v * 10))"),
        "head 2 of 4",
    ),
}

NO_HEAD = {
    "all heads": attention(SPLIT, PRODUCT, JOIN, large=LARGE.replace("8:12", ":")),
    "two heads": attention(SPLIT, PRODUCT, JOIN, large=LARGE.replace("8:12", "4:12")),
    "channels of a picture": attention(
        "h = x.view(b, 4, 4, -1)",
        "h = (h * torch.tensor([1.0, 1e38, 1, 1])[:, None, None] * 1e3)",
        "return h",
        large="pass",
    ),
    "channels, and a softmax over them": attention(
        "h = x.view(b, 4, 4, -1)",
        "h = (h * torch.tensor([1.0, 1e38, 1, 1])[:, None, None] * 1e3)",
        "return h.softmax(1)",
        large="pass",
    ),
    "one head for all": attention(
        "q, k, v = self.q(x), self.k(x), self.v(x)", PRODUCT, "return w @ v"
    ),
    "a group of rows": attention(
        "h = x.view(b, t, 4, 4).transpose(1, 2)", "return (h - 1e9).log()", large="pass"
    ),
}


@pytest.mark.parametrize("name", ONE_HEAD)
def test_the_head_is_named(run_here: RunHere, name: str) -> None:
    text, told = ONE_HEAD[name]
    assert told in run_here(text).err


@pytest.mark.parametrize("name", NO_HEAD)
def test_nothing_else_is_called_a_head(run_here: RunHere, name: str) -> None:
    ran = run_here(NO_HEAD[name])
    assert "made" in ran.err
    assert " head " not in ran.err

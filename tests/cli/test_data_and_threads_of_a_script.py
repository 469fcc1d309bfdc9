"""``fxguard run`` of what a data loader calls in the script's process, and of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunHere = Callable[[str], Any]

DATA = (
    "import torch\n"
    "from torch import nn\n"
    "from torch.utils.data import DataLoader, Dataset\n"
    "class Data(Dataset):\n"
    "    def __len__(self):\n"
    "        return 8\n"
    "    def __getitem__(self, i):\n"
    "        x = torch.zeros(3) + (i > 5)\n"
    "        return x / x.sum()\n"
    "def collate(rows):\n"
    "    x = torch.stack(rows).nan_to_num()\n"
    "    return (x - x) / (x - x).std()\n"
)
MODEL = "net = nn.Linear(3, 1)\nfor x in loader:\n    net(x).sum().backward()\n"
SUM = "print(sum(x.sum().item() for x in loader))\n"


@pytest.mark.parametrize("use", [MODEL, SUM], ids=["a model", "no model"])
@pytest.mark.parametrize(("collate", "line"), [("", 9), (", collate_fn=collate", 12)])
def test_the_line_of_the_data_is_named(
    run_here: RunHere, use: str, collate: str, line: int
) -> None:
    """Without workers a dataset and its collate function run in the script's thread."""
    ran = run_here(f"{DATA}loader = DataLoader(Data(), batch_size=4{collate})\n{use}")
    assert ran.status == 3
    assert ran.err.splitlines()[0] == f"div made NaN (script.py:{line}): 0 / 0"


def test_what_another_thread_makes_is_named_where_it_is_read(run_here: RunHere) -> None:
    """Threads that the script starts are not followed, and run as ever."""
    text = (
        "import threading\nimport torch\n"
        "made = []\n"
        "def work():\n"
        "    x = torch.zeros(3)\n"
        "    made.append(x / x.sum())\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
        "print(made[0].sum().item())\n"
    )
    ran = run_here(text)
    assert ran.status == 3
    assert ran.out == "nan\n"
    assert "`made.0`: 3 NaN" in ran.err
    assert "script.py:10" in ran.err

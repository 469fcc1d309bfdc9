"""``fxguard run`` names what made a bad number beside the model that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fxguard.api.whole_script import WholeScript
from fxguard.script.bad_values import MOST_VALUES, BadValues

pytestmark = pytest.mark.usefixtures("form_of_operations")

RunHere = Callable[[str], Any]
EndsAsEver = Callable[[str], str]

HEAD = (
    "import torch\n"
    "from torch import nn\n"
    "torch.manual_seed(0)\n"
    "net = nn.Linear(4, 1)\n"
    "x = torch.randn(5, 4)\n"
)

# What is wrong, and the first line of the verdict.
WRONG = {
    "an advantage": (
        "with torch.no_grad():\n"
        "    a = net(x[:1]).squeeze(-1) + 1\n"
        "    a = (a - a.mean()) / (a.std() + 1e-8)\n"
        "(net(x[:1]).squeeze(-1) * a).mean().backward()\n",
        "std made NaN (script.py:8): a single element has no deviation",
    ),
    "a target of a teacher": (
        "teacher = nn.Linear(4, 3)\n"
        "with torch.no_grad():\n"
        "    q = torch.exp(teacher(x) * 1000)\n"
        "    q = q / q.sum(1, keepdim=True)\n"
        "(q * net(x)).sum().backward()\n",
        "exp made inf (script.py:8): overflow",
    ),
    "weights of a schedule": (
        "snr = torch.linspace(1, 0, 5)\n"
        "weight = snr.clamp(max=0.5) / snr\n"
        "(weight * net(x).squeeze(-1) ** 2).mean().backward()\n",
        "div made NaN (script.py:7): 0 / 0",
    ),
    "an argument": (
        "x[:, 2] = 1\nx = (x - x.mean(0)) / x.std(0)\nnet(x).sum().backward()\n",
        "div made NaN (script.py:7): 0 / 0",
    ),
    "a table with a missing value": (
        "rows = [[1.0, 2.0, 3.0, 4.0], [1.0, float('nan'), 3.0, 4.0]]\n"
        "x = torch.tensor(rows)\n"
        "net((x - x.mean()) / 2).sum().backward()\n",
        "tensor was given 1 NaN, in row 1 (script.py:7)",
    ),
    "an array with a missing value": (
        "import numpy as np\n"
        "x = torch.as_tensor(np.array([[1.0, np.nan, 3.0, 4.0]]), dtype=torch.float32)\n"
        "net(x + 1).sum().backward()\n",
        "as_tensor was given 1 NaN, in row 0 (script.py:7)",
    ),
    "a sample with a missing value": (
        "samples = [torch.randn(4).tolist() for _ in range(4)]\n"
        "samples[2][1] = float('nan')\n"
        "collate = lambda rows: torch.tensor(rows)\n"
        "for x in torch.utils.data.DataLoader(samples, batch_size=4, collate_fn=collate):\n"
        "    net(x * 2).sum().backward()\n",
        "tensor was given 1 NaN, in row 2 (script.py:8)",
    ),
    "a number too large": (
        "x = torch.tensor([[1e39, 0.0, 0.0, 0.0]])\nnet(x * 2).sum().backward()\n",
        "tensor made inf (script.py:6): 1e+39 does not fit float32: the largest number is "
        "3.40282e+38",
    ),
}

# Scripts that are right.
# A loss or a step is what is found bad, and what made it stands before.
LED_BACK = {
    "targets that are written row by row": (
        "target = torch.zeros(5, 2)\n"
        "for i in range(5):\n"
        "    size = torch.tensor([1.0 * (i - 3) ** 2, 2.0])\n"
        "    target[i] = size.log()\n"
        "nn.functional.smooth_l1_loss(net(x).expand(5, 2), target).backward()\n",
        "log made -inf (script.py:9): log of zero",
    ),
    "a sample that is inverted before another model is called": (
        "from torch.distributions import Normal, TanhTransform, TransformedDistribution\n"
        "critic, action = nn.Linear(4, 1), torch.tensor([[1.0]] * 5)\n"
        "p = TransformedDistribution(Normal(net(x), torch.ones(1)), [TanhTransform()])\n"
        "log_p = p.log_prob(action)\n"
        "(log_p.mean() + critic(x).mean()).backward()\n",
        "atanh made inf (script.py:9): atanh of 1",
    ),
    "a target that hides every action": (
        "class Values(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.all = nn.Linear(4, 3)\n"
        "    def forward(self, x, legal):\n"
        "        return self.all(x).masked_fill(~legal, float('-inf'))\n"
        "target, legal, done = Values(), torch.ones(5, 3).bool(), torch.zeros(5)\n"
        "legal[2], done[2] = False, 1\n"
        "with torch.no_grad():\n"
        "    y = 0.5 * (1 - done) * target(x, legal).amax(1)\n"
        "nn.functional.mse_loss(net(x)[:, 0], y).backward()\n",
        "mul made NaN (script.py:15): 0 * inf of a mask",
    ),
    "a level behind complex numbers": (
        "wave = torch.randn(1, 64) * torch.log10(torch.tensor(-0.5))\n"
        "spectrum = torch.fft.rfft(wave)[:, :4]\n"
        "net(spectrum.abs()).sum().backward()\n",
        "log10 made NaN (script.py:6): log of a negative number",
    ),
    "a learning rate out of a table": (
        "rates = ((3 - torch.arange(6.0)) / 3).pow(0.9).tolist()\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for rate in rates:\n"
        "    for group in optimizer.param_groups:\n"
        "        group['lr'] = rate\n"
        "    net(x).sum().backward()\n"
        "    optimizer.step()\n",
        "pow made NaN (script.py:6): a fractional power of a negative number",
    ),
    "a learning rate of each step": (
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(6):\n"
        "    rate = (1 - torch.tensor(step) / 3) ** 0.9\n"
        "    optimizer.param_groups[0]['lr'] = rate.item()\n"
        "    net(x).sum().backward()\n"
        "    optimizer.step()\n",
        "pow made NaN (script.py:8): a fractional power of a negative number",
    ),
}

RIGHT = {
    "a gradient whose scale was too large": (
        "scaler = torch.amp.GradScaler('cpu', 2.0**120)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    scaler.scale(net(x * 1e10).sum()).backward()\n"
        "    scaler.unscale_(optimizer)\n"
        "    sizes = [p.grad.double().pow(2).sum().item() for p in net.parameters()]\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n"
        "    optimizer.zero_grad()\n"
    ),
    "a mask of a target that is left out": (
        "with torch.no_grad():\n"
        "    values = net(x).masked_fill(torch.tensor([[False]] * 4 + [[True]]), float('-inf'))\n"
        "    y = torch.where(values.isinf(), 0, values)\n"
        "nn.functional.mse_loss(net(x), y).backward()\n"
    ),
    "a metric of a class that does not occur": "net(x).sum().backward()\n"
    "print((torch.zeros(2) / torch.zeros(2)).mean().item())\n"
    "net(x).sum().backward()\n",
    "what is left out of a target": "target = torch.log(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]))\n"
    "keep = target.isfinite()\n"
    "(net(x).squeeze(-1)[keep] - target[keep]).pow(2).mean().backward()\n",
    "an intended mask": "mask = torch.full((5, 5), float('-inf')).triu(1)\n"
    "scores = (net(x) @ net(x).T + mask).softmax(-1)\n"
    "(scores @ net(x)).sum().backward()\n",
    "a best value": "best = float('inf')\n"
    "for _ in range(3):\n"
    "    loss = net(x).pow(2).mean()\n"
    "    loss.backward()\n"
    "    best = torch.minimum(torch.tensor(best), loss.detach()).item()\n"
    "print(round(best, 4))\n",
}


@pytest.mark.parametrize("name", WRONG)
def test_the_line_of_the_script_is_named(run_here: RunHere, name: str) -> None:
    """With its cause, and with what read it."""
    text, verdict = WRONG[name]
    found, _, err = run_here(HEAD + text)
    assert found == 3
    assert err.splitlines()[0] == verdict
    assert "it was read as " in err


@pytest.mark.parametrize("name", LED_BACK)
def test_what_made_it_comes_before_what_it_did(run_here: RunHere, name: str) -> None:
    """The loss, the model or the optimizer that was the first to turn bad is only told."""
    text, verdict = LED_BACK[name]
    found, _, err = run_here(HEAD + text)
    assert found == 3
    assert err.splitlines()[0] == verdict
    assert "iteration" not in err.partition("Detected")[0]
    assert "reached no output" not in err


def test_a_loss_reads_an_infinity_that_a_model_made_of_a_mask(run_here: RunHere) -> None:
    """In the model it was taken for one that was meant: the loss, before its backward, is not."""
    text = (
        "class Corrected(nn.Module):\n"
        "    def __init__(self, log_q):\n"
        "        super().__init__()\n"
        "        self.score = nn.Linear(4, 3)\n"
        "        self.register_buffer('log_q', log_q)\n"
        "    def forward(self, x):\n"
        "        return self.score(x) - self.log_q\n"
        "corrected = Corrected(torch.log(torch.tensor([0.5, 0.0, 0.5])))\n"
        "scores = corrected(x)\n"
        "nn.functional.cross_entropy(scores, torch.tensor([0, 2, 0, 2, 0])).backward()\n"
    )
    found, _, err = run_here(HEAD + text)
    lines = err.splitlines()
    assert found == 3
    assert lines[0] == "cross_entropy made NaN (script.py:15): it read +inf"
    fix = next(line for line in lines if line.startswith("  fix:"))
    assert "see what makes scores +inf in sub (script.py:12)" in fix


@pytest.mark.parametrize("cast", ["p.grad.float()", "p.grad.to(torch.float32)", "p.grad"])
def test_a_norm_of_a_scaled_gradient_is_worth_no_note(ends_as_ever: EndsAsEver, cast: str) -> None:
    """A cast that changes nothing has made nothing: the scaler's step is skipped."""
    text = (
        "scaler = torch.amp.GradScaler('cpu', 2.0**127)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    scaler.scale(net(x).pow(2).mean() * 100).backward()\n"
        f"    sizes = [{cast}.norm().item() for p in net.parameters()]\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n"
        "    optimizer.zero_grad()\n"
    )
    assert "note:" not in ends_as_ever(HEAD + text)


@pytest.mark.parametrize("name", RIGHT)
def test_a_script_that_is_right_ends_as_ever(ends_as_ever: EndsAsEver, name: str) -> None:
    """It prints what it prints without fxguard."""
    assert "nothing found" in ends_as_ever(HEAD + RIGHT[name])


def test_what_a_model_makes_is_blamed_on_the_model(run_here: RunHere) -> None:
    """Something bad beside it that it has not read is no reason."""
    text = (
        "unused = torch.zeros(2) / torch.zeros(2)\n"
        "with torch.no_grad():\n"
        "    net.weight.fill_(1e30)\n"
        "(net(x * 1e10) * 1.0).sum().backward()\n"
    )
    found, _, err = run_here(HEAD + text)
    assert found == 3
    assert "linear" in err.splitlines()[0]
    assert "it was read as " not in err


def test_an_intended_mask_is_judged_only_where_something_is_wrong(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that is made for each step costs no judgment, and what led to it is let go."""
    judged, sizes = [], []
    report = WholeScript._report
    turned, turned_late = BadValues.add, BadValues.add_late

    def counted(self: Any, *args: Any) -> Any:
        judged.append(args)
        return report(self, *args)

    def measured(self: Any, *args: Any) -> None:
        turned(self, *args)
        sizes.append(len(self.batch.values))

    def measured_late(self: Any, *args: Any) -> None:
        turned_late(self, *args)
        sizes.append(len(self.batch.values))

    monkeypatch.setattr(WholeScript, "_report", counted)
    monkeypatch.setattr(BadValues, "add", measured)
    monkeypatch.setattr(BadValues, "add_late", measured_late)
    text = (
        "layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)\n"
        "for _ in range(400):\n"
        "    mask = torch.full((5, 5), float('-inf')).triu(1)\n"
        "    layer(x[None], src_mask=mask).sum().backward()\n"
    )
    assert run_here(HEAD + text).status == 0
    assert not judged
    assert len(sizes) >= 600  # on a device the last ones are never asked for
    assert max(sizes) < 4 * MOST_VALUES


def test_what_was_given_bad_is_led_back_to_where_it_was_made(run_here: RunHere) -> None:
    """A tensor that only took the numbers of an array, which were computed before."""
    err = run_here(
        "import numpy as np\n"
        "import torch\n"
        "a = np.array([[1.0, 2.0], [3.0, 2.0]], dtype=np.float32)\n"
        "with np.errstate(invalid='ignore'):\n"
        "    a = (a - a.mean(0)) / a.std(0)\n"
        "x = torch.from_numpy(a[:2])\n"
        "w = torch.zeros(2, requires_grad=True)\n"
        "loss = (x @ w).sum()\n"
        "loss.backward()\n"
    ).err
    lines = err.splitlines()
    assert lines[0] == "input `x`: 2 NaN, in rows 0 and 1, all in column 1"
    assert lines[2] == (
        "  `x` comes from script.py:6: x = torch.from_numpy(a[:2]), and `a` from script.py:5: "
        "a = (a - a.mean(0)) / a.std(0)"
    )
    assert lines[3].startswith(
        "  fix: look at (a - a.mean(0)) / a.std(0) (script.py:5): 0 / 0 is NaN; divide"
    )


def test_what_a_line_converts_on_the_way_is_led_back_as_well(run_here: RunHere) -> None:
    """It has no variable of its own."""
    lines = run_here(
        "import numpy as np\n"
        "import torch\n"
        "a = np.array([[1.0, 2.0], [3.0, 2.0]])\n"
        "with np.errstate(invalid='ignore'):\n"
        "    a = (a - a.mean(0)) / a.std(0)\n"
        "net = torch.nn.Linear(2, 1)\n"
        "net(torch.from_numpy(a).float()).mean().backward()\n"
    ).err.splitlines()
    assert lines[2] == "  `a` comes from script.py:5: a = (a - a.mean(0)) / a.std(0)"
    assert lines[3].startswith("  fix: look at (a - a.mean(0)) / a.std(0) (script.py:5): 0 / 0")


def test_the_first_nan_behind_many_infinities_is_looked_at(run_here: RunHere) -> None:
    """Masks of -inf were read at the same line before, and did no harm."""
    err = run_here(
        HEAD + "net = torch.nn.Linear(3, 4)\n"
        "for i in range(40):\n"
        "    with torch.no_grad():\n"
        "        scores = net(torch.randn(2, 3))\n"
        "    mask = torch.arange(4) < (3 if i < 39 else 9)\n"
        "    logp = scores.masked_fill(mask, float('-inf')).log_softmax(-1)\n"
        "print(logp.sum().item())\n"
    ).err
    assert "masked row, all of the row is -inf; at [0, 0]: all 4 elements of the row" in err, err
    assert "fix: mask with torch.finfo(torch.float32).min in place of -inf in masked_fill" in err


def test_a_missing_value_is_filled_in_or_dropped(run_here: RunHere) -> None:
    """No operation is repaired where the data is bad."""
    err = run_here(WRONG["a table with a missing value"][0].join((HEAD, ""))).err
    fixes = [line for line in err.splitlines() if line.startswith("  fix")]
    assert fixes == [
        "  fix: drop it or fill it in where the data is read: NaN in a table or a file is a "
        "missing value (advice)"
    ]


def test_the_cause_is_known_behind_many_masks(run_here: RunHere) -> None:
    """What hands on the infinities of a mask is not what a closer look is kept for."""
    err = run_here(
        f"{HEAD}y = net(x).squeeze(-1)\n"
        "no = torch.zeros(5).bool()\n"
        "for _ in range(20):\n"
        "    no[0] = True\n"
        "    y = y.masked_fill(no, float('-inf')) + 1\n"
        "(y - y.min()).sum().backward()\n"
    ).err
    lines = err.splitlines()
    assert lines[0].startswith("sub made NaN (script.py:11): ")
    assert lines[2].startswith("  at [0]: -inf - -inf")


def test_a_row_of_many_tables_is_told_too(run_here: RunHere) -> None:
    """Each of many tensors is made on one line; the first ones are looked at closely."""
    err = run_here(
        f"{HEAD}rows = [[float('nan')] * 4, *[[float(n)] * 4 for n in range(6)]]\n"
        "tables = [torch.tensor([row, [float('nan')] * 4]) for row in rows]\n"
        "net(tables[-1] * 2).sum().backward()\n"
    ).err
    assert err.splitlines()[0] == "tensor was given 4 NaN, in row 1 (script.py:7)"


READ_ALONE = (
    f"{HEAD}with torch.no_grad():\n"
    "    density = torch.exp(-(net(x) - 100).pow(2)).sum(1)\n"
    "    nll = -torch.log(density).mean()\n"
    "print(f'validation {nll.item():.2f}')\n"
)


def test_a_bad_number_that_only_the_script_reads_is_noted(run_here: RunHere) -> None:
    """A metric that is computed of what a model returned: it harms no training."""
    found, out, err = run_here(READ_ALONE)
    assert (found, out) == (0, "validation inf\n")
    (line,) = [line for line in err.splitlines() if line.startswith("note: ")]
    assert line.startswith("note: log made -inf (script.py:8): log of zero; ")
    assert line.endswith("; the script has read that, and no model and no loss of one")


def test_what_was_meant_so_is_not_noted(ends_as_ever: EndsAsEver) -> None:
    """The best of no values yet, and a mask."""
    err = ends_as_ever(
        f"{HEAD}best = torch.tensor(float('inf'))\n"
        "for _ in range(3):\n"
        "    print(best.item() > 9)\n"
        "    best = torch.minimum(best, net(x).pow(2).mean().detach())\n"
        "scores = net(x).detach().squeeze(-1).masked_fill(torch.eye(5).bool()[0], float('-inf'))\n"
        "print(scores.softmax(0).tolist())\n"
    )
    assert "note" not in err


def test_what_waits_to_be_led_back_is_led_back_all_the_way(run_here: RunHere) -> None:
    """A place that turned bad so often that it is noted no more; deeper than what is kept."""
    for grad in "False", "True":
        err = run_here(
            HEAD + f"w = torch.ones(2, requires_grad={grad})\n"
            "z = torch.zeros(2) * w\n"
            "y = z / z\n"
            "for step in range(400):\n"
            "    low = y.detach().amin()\n"
            "    y = y * 0.5 + low\n"
            "model = nn.Linear(2, 1)\n"
            "model(y.detach()).sum().backward()\n"
        ).err
        place = HEAD.count("\n") + 3
        assert err.startswith(f"div made NaN (script.py:{place}): 0 / 0"), err

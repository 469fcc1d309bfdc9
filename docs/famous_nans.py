"""The stories of docs/famous-nans.md: models that went wrong, their reports, and their fixes.

    python docs/famous_nans.py            # prints every section
    python docs/famous_nans.py --write    # and puts each into the page, under its marker

Runs on a CPU in a minute and downloads nothing. tests/repository/test_famous_nans.py holds the
page against it, and every fix against float64.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everybody writes F
from torch import Tensor, nn

import fxguard

PAGE = Path(__file__).with_name("famous-nans.md")
# The block that follows a marker is the section of that name: ``t5_wo report``.
SECTION = re.compile(
    r"(<!-- famous nan: ([\w ]+) -->\n(?:```\w+\n)?)(.*?)(^(?:```|<!-- end -->)$)", re.DOTALL | re.M
)
HALF = torch.float16


@dataclass(frozen=True, slots=True)
class Story:
    """What is to be said of a model that went wrong. Three functions of this file are the rest.

    The story ``qk_before_scale`` has its model in ``qk_before_scale``, which is the model's
    forward, or, where it takes no argument, builds the model. ``qk_before_scale_fixed`` is the
    model after the fix, and ``qk_before_scale_inputs`` gives the arguments.
    """

    operation: str  # what is to blame: "matmul", "weight 1.weight"
    cause: str  # as `Origin.cause` has it
    fix: str  # in a few words
    exact: bool = False  # whether the fix gives what the broken model would give in float64
    phase: str = "forward"  # or "backward": the model returns its loss, which is finite


class Forward(nn.Module):
    """A model of which the forward is one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def t5_wo() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 1}
    config = T5Config(**sizes, vocab_size=100, feed_forward_proj="gated-gelu", dropout_rate=0.0)
    model = T5EncoderModel(config).eval()
    feed_forward = model.encoder.block[0].layer[1].DenseReluDense
    with torch.no_grad():  # trained weights are larger than fresh ones
        feed_forward.wi_0.weight.mul_(20)
        feed_forward.wi_1.weight.mul_(20)
        feed_forward.wo.weight.mul_(80)
    return model.half()


def t5_wo_fixed() -> nn.Module:
    model = t5_wo()
    for block in model.encoder.block:
        block.layer[1].DenseReluDense.wo.float()
    return model


def t5_wo_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return (torch.randint(0, 100, (2, 8)),)


def gemma3_residual() -> nn.Module:
    from transformers import Gemma3TextConfig, Gemma3TextModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "sliding_window": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = Gemma3TextModel(Gemma3TextConfig(**sizes, **heads, vocab_size=100)).eval()
    with torch.no_grad():  # those of the checkpoints are large too
        for layer in model.layers:
            layer.post_attention_layernorm.weight.fill_(9000)
            layer.post_feedforward_layernorm.weight.fill_(30000)
    return model.half()


def gemma3_residual_inputs() -> tuple[Tensor, ...]:
    return t5_wo_inputs()


def gemma3_residual_fixed() -> nn.Module:
    return gemma3_residual().bfloat16()


def qk_before_scale(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.softmax(-1)


def qk_before_scale_fixed(q: Tensor, k: Tensor) -> Tensor:
    scores = q * q.shape[-1] ** -0.5 @ k.mT
    return scores.softmax(-1)


def qk_before_scale_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 8, 64) * 60
    return (q.half(), q.half())


def rmsnorm_square(x: Tensor) -> Tensor:
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(mean_square + 1e-6)


def rmsnorm_square_fixed(x: Tensor) -> Tensor:
    mean_square = x.float().pow(2).mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(mean_square + 1e-6)).to(x.dtype)


def rmsnorm_square_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return (torch.randn(2, 64).half() * 400,)


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 64)
        nn.init.constant_(self.out.weight, 8.0)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x).clip(-65504, 65504)


def flux_clip_hides() -> nn.Module:
    return Clipped().half()


def flux_clip_hides_inputs() -> tuple[Tensor, ...]:
    return (torch.full((2, 64), 200.0, dtype=HALF),)


class InFloat32(Clipped):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.float())


def flux_clip_hides_fixed() -> nn.Module:
    return InFloat32()


def mask_min_minus_score(scores: Tensor, mask: Tensor) -> Tensor:
    return (scores + mask).softmax(-1)


def mask_min_minus_score_fixed(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask == 0, scores, mask).softmax(-1)


def mask_min_minus_score_inputs() -> tuple[Tensor, ...]:
    mask = torch.zeros(2, 4, dtype=HALF)
    mask[1] = torch.finfo(HALF).min
    return torch.full((2, 4), -20.0, dtype=HALF), mask


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(16, 16, bias=False)
        nn.init.constant_(self.experts.weight, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return norm(x + self.experts(x) * 16.0, eps=1e-6)


def norm(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def moe_residual_fp16() -> nn.Module:
    return Experts().half()


def moe_residual_fp16_inputs() -> tuple[Tensor, ...]:
    return (torch.full((2, 16), 150.0, dtype=HALF),)


class DividedResidual(Experts):
    def forward(self, x: Tensor) -> Tensor:
        return norm(x / 16.0 + self.experts(x), eps=1e-6 / 16.0**2)


def moe_residual_fp16_fixed() -> nn.Module:
    return DividedResidual().half()


def rwkv_exp_half(k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    total = weight = torch.zeros_like(k[:, 0])
    outputs = []
    for step in range(k.shape[1]):
        e = torch.exp(k[:, step])
        total = total * decay + e * v[:, step]
        weight = weight * decay + e
        outputs.append(total / weight)
    return torch.stack(outputs, 1)


def rwkv_exp_half_inputs() -> tuple[Tensor, ...]:
    k = torch.full((1, 6, 4), 10.0, dtype=HALF)
    return k, k / 20, torch.full((4,), 0.99, dtype=HALF)


def rwkv_exp_half_fixed(k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    total = weight = torch.zeros_like(k[:, 0])
    largest = torch.full_like(k[:, 0], torch.finfo(k.dtype).min)
    outputs = []
    for step in range(k.shape[1]):
        shift = torch.maximum(largest, k[:, step])
        before, e = torch.exp(largest - shift), torch.exp(k[:, step] - shift)
        total = total * before * decay + e * v[:, step]
        weight = weight * before * decay + e
        largest = shift
        outputs.append(total / weight)
    return torch.stack(outputs, 1)


def mask_times_inf(scores: Tensor, keep: Tensor) -> Tensor:
    return (scores * keep + (1 - keep) * float("-inf")).softmax(-1)


def mask_times_inf_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(2, 4), torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]])


def mask_times_inf_fixed(scores: Tensor, keep: Tensor) -> Tensor:
    return scores.masked_fill(keep == 0, float("-inf")).softmax(-1)


def distilbert_mask_row(scores: Tensor, keep: Tensor) -> Tensor:
    return scores.masked_fill(keep == 0, float("-inf")).softmax(-1)


def distilbert_mask_row_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(2, 4), torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])


def distilbert_mask_row_fixed(scores: Tensor, keep: Tensor) -> Tensor:
    used = keep.any(-1)  # samples that have a token
    return distilbert_mask_row(scores[used], keep[used])


def ce_all_ignored(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def ce_all_ignored_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(4, 10), torch.full((4,), -100)


def ce_all_ignored_fixed(logits: Tensor, labels: Tensor) -> Tensor:
    total = F.cross_entropy(logits, labels, reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)


def std_of_one(rewards: Tensor) -> Tensor:
    groups = rewards.view(-1, 1)  # num_generations is 1
    centred = groups - groups.mean(1, keepdim=True)
    return centred / (groups.std(1, keepdim=True) + 1e-4)


def std_of_one_inputs() -> tuple[Tensor, ...]:
    return (torch.tensor([0.2, 1.0, 0.7, 0.4]),)


def std_of_one_fixed(rewards: Tensor) -> Tensor:
    groups = rewards.view(-1, 1)
    centred = groups - groups.mean(1, keepdim=True)
    return centred / (groups.std(1, keepdim=True, correction=0) + 1e-4)


def batchnorm_one() -> nn.Module:
    return nn.BatchNorm1d(4).train()


def batchnorm_one_inputs() -> tuple[Tensor, ...]:
    return (torch.tensor([[0.2, 1.0, 0.7, 0.4]]),)


def batchnorm_one_fixed(samples: Tensor) -> Iterator[Tensor]:
    loader = torch.utils.data.DataLoader(samples, batch_size=4, drop_last=True)
    return map(batchnorm_one(), loader)


def weight_norm_zero() -> nn.Module:
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)
    nn.init.zeros_(linear.weight[0])
    return nn.utils.parametrizations.weight_norm(linear)


def weight_norm_zero_inputs() -> tuple[Tensor, ...]:
    return (torch.ones(2, 4),)


class WeightNorm(nn.Module):
    """Magnitude times direction, with a bound below the norm."""

    def forward(self, magnitude: Tensor, direction: Tensor) -> Tensor:
        return magnitude * direction / direction.norm(dim=1, keepdim=True).clamp(min=1e-12)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight.norm(dim=1, keepdim=True), weight


def weight_norm_zero_fixed() -> nn.Module:
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)
    nn.init.zeros_(linear.weight[0])
    nn.utils.parametrize.register_parametrization(linear, "weight", WeightNorm())
    return linear


def pool_clamp_eps(hidden: Tensor, mask: Tensor) -> Tensor:
    total = (hidden * mask[..., None]).sum(1)
    return total / mask.sum(1, keepdim=True).clamp(min=1e-9)


def pool_clamp_eps_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]], dtype=HALF)
    return torch.randn(2, 4, 8).half(), mask


def pool_clamp_eps_fixed(hidden: Tensor, mask: Tensor) -> Tensor:
    total = (hidden * mask[..., None]).sum(1)
    return total / mask.sum(1, keepdim=True).clamp(min=1)


def uninit_head() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight.data[0, 0] = float("nan")  # what torch.empty happened to hold
    return model


def uninit_head_inputs() -> tuple[Tensor, ...]:
    return (torch.ones(2, 4),)


def uninit_head_fixed() -> nn.Module:
    model = uninit_head()
    nn.init.normal_(model[1].weight, std=0.02)
    return model


def focal_fp16(x: Tensor, target: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    positive = target * (1 - p) ** 2 * p.log()
    negative = (1 - target) * p**2 * (1 - p).log()
    return -(positive + negative).mean()


def focal_fp16_inputs() -> tuple[Tensor, ...]:
    return torch.tensor([9.39, -4.2], dtype=HALF), torch.tensor([0.0, 1.0], dtype=HALF)


def focal_fp16_fixed(x: Tensor, target: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    positive = target * (1 - p) ** 2 * F.logsigmoid(x)
    negative = (1 - target) * p**2 * F.logsigmoid(-x)
    return -(positive + negative).mean()


def ctc_short(log_p: Tensor, target: Tensor, frames: Tensor, letters: Tensor) -> Tensor:
    return F.ctc_loss(log_p, target, frames, letters)


def ctc_short_fixed(log_p: Tensor, target: Tensor, frames: Tensor, letters: Tensor) -> Tensor:
    return F.ctc_loss(log_p, target, frames, letters, zero_infinity=True)


def ctc_short_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    log_p = torch.randn(3, 1, 5).log_softmax(-1)
    return log_p, torch.tensor([[1, 1, 2, 2]]), torch.tensor([3]), torch.tensor([4])


class Decay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.full((4,), 11.5))

    def forward(self, dt: Tensor) -> Tensor:
        return torch.exp(dt * -torch.exp(self.A_log))


def mamba_A_exp() -> nn.Module:  # noqa: N802
    return Decay().half()


def mamba_A_exp_inputs() -> tuple[Tensor, ...]:  # noqa: N802
    return (torch.zeros(2, 4, dtype=HALF),)


class Float32Decay(Decay):
    def forward(self, dt: Tensor) -> Tensor:
        return torch.exp(dt * -torch.exp(self.A_log.float()))


def mamba_A_exp_fixed() -> nn.Module:  # noqa: N802
    return Float32Decay().half()


def infonce_exp(a: Tensor, b: Tensor) -> Tensor:
    e = torch.exp(a @ b.T / 0.01)
    return -(e.diag() / e.sum(1)).log().mean()


def infonce_exp_fixed(a: Tensor, b: Tensor) -> Tensor:
    scores = a @ b.T / 0.01
    return -(scores.diag() - scores.logsumexp(1)).mean()


def infonce_exp_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    a = F.normalize(torch.randn(4, 8), dim=1)
    return a, a[[0, 1, 3, 2]]  # two pairs are mixed up


def where_double(x: Tensor) -> Tensor:
    return torch.where(x > 2, torch.log2(x), 2 * x).sum()


def where_double_fixed(x: Tensor) -> Tensor:
    safe = torch.where(x > 2, x, 1)  # log2 never sees what is left out
    return torch.where(x > 2, torch.log2(safe), 2 * x).sum()


def where_double_inputs() -> tuple[Tensor, ...]:
    return (torch.tensor([0.0, 2.0, 3.0], requires_grad=True),)


def sqrt_zero(x: Tensor) -> Tensor:
    return (x**2).sum(-1).sqrt().sum()


def sqrt_zero_fixed(x: Tensor) -> Tensor:
    return ((x**2).sum(-1) + 1e-12).sqrt().sum()


def sqrt_zero_inputs() -> tuple[Tensor, ...]:
    return (torch.zeros(2, 3, requires_grad=True),)


def acos_one(a: Tensor, b: Tensor) -> Tensor:
    return torch.acos(F.cosine_similarity(a, b).clamp(-1, 1)).sum()


def acos_one_fixed(a: Tensor, b: Tensor) -> Tensor:
    return torch.acos(F.cosine_similarity(a, b).clamp(-1 + 1e-6, 1 - 1e-6)).sum()


def acos_one_inputs() -> tuple[Tensor, ...]:
    a = torch.tensor([[3.0, 4.0]], requires_grad=True)
    return a, a.detach().clone()


def log1p_saturated(x: Tensor, mask: Tensor) -> Tensor:
    p = torch.sigmoid(x).clamp(max=1 - 1e-6)
    none = torch.log1p(-p).where(mask, 0).sum(-1)  # that none of them is chosen
    return (1 - torch.exp(none)).float().sum()


def log1p_saturated_fixed(x: Tensor, mask: Tensor) -> Tensor:
    none = F.logsigmoid(-x).where(mask, 0).sum(-1)
    return (1 - torch.exp(none)).float().sum()


def log1p_saturated_inputs() -> tuple[Tensor, ...]:
    x = torch.tensor([[12.0, 1.0, 2.0]], dtype=torch.bfloat16, requires_grad=True)
    return x, torch.tensor([[False, True, True]])


def k3_clip_after(difference: Tensor) -> Tensor:
    k3 = difference.exp() - 1 - difference
    return k3.clamp(-10, 10).mean()


def k3_clip_after_fixed(difference: Tensor) -> Tensor:
    difference = difference.clamp(-20, 20)
    k3 = difference.exp() - 1 - difference
    return k3.clamp(-10, 10).mean()


def k3_clip_after_inputs() -> tuple[Tensor, ...]:
    return (torch.tensor([100.0, 0.1], requires_grad=True),)


def pow_zero(x: Tensor) -> Tensor:
    return (x**0.5).sum()


def pow_zero_fixed(x: Tensor) -> Tensor:
    return ((x + 1e-12) ** 0.5).sum()


def pow_zero_inputs() -> tuple[Tensor, ...]:
    return (torch.zeros(2, requires_grad=True),)


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32, bias=False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).float() * self.scale).sum()


def fp16_grad_overflow() -> nn.Module:
    torch.manual_seed(0)
    return Scaled(65536.0).half()


def fp16_grad_overflow_fixed() -> nn.Module:
    torch.manual_seed(0)
    return Scaled(1024.0).half()


def fp16_grad_overflow_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return (torch.randn(4, 32).half(),)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.q(x)
        weights = (q @ q.mT + mask).softmax(-1)
        return (weights @ x)[:, 1:].sum()  # the row in which all is masked is dropped


def mask_add_grad() -> nn.Module:
    torch.manual_seed(0)
    return Attention()


class Unmasked(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.q(x)
        weights = (q[:, 1:] @ q.mT + mask[:, 1:]).softmax(-1)  # before the softmax
        return (weights @ x).sum()


def mask_add_grad_fixed() -> nn.Module:
    torch.manual_seed(0)
    return Unmasked()


def mask_add_grad_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    hidden = torch.tensor([[True, True, True], [False, False, True], [False, False, False]])
    return torch.randn(1, 3, 8), torch.zeros(1, 3, 3).masked_fill(hidden, -math.inf)


STORIES = {
    "t5_wo": Story("linear", "overflow", "`wo` in float32"),
    "gemma3_residual": Story("type_as", "overflow", "bfloat16"),
    "qk_before_scale": Story("matmul", "overflow", "scale q before the product", exact=True),
    "rmsnorm_square": Story("pow", "overflow", "`.float()` before the square", exact=True),
    "flux_clip_hides": Story("linear", "overflow", "the layer in float32"),
    "mask_min_minus_score": Story("add", "overflow", "`where`, not a sum", exact=True),
    "moe_residual_fp16": Story("mul", "overflow", "divide the residual", exact=True),
    "rwkv_exp_half": Story("add", "overflow", "subtract the running maximum", exact=True),
    "mask_times_inf": Story("mul", "domain", "`masked_fill`"),
    "distilbert_mask_row": Story("softmax", "masked row", "leave the sample out"),
    "ce_all_ignored": Story("cross_entropy", "empty", "divide by `max(n, 1)`"),
    "std_of_one": Story("std", "empty", "`correction=0`, or more generations"),
    "weight_norm_zero": Story("_weight_norm", "zero divisor", "a bound below the norm"),
    "pool_clamp_eps": Story("div", "underflow", "`clamp(min=1)`"),
    "uninit_head": Story("weight 1.weight", "weight", "initialise what the checkpoint lacks"),
    "focal_fp16": Story("log", "rounding", "`logsigmoid`", exact=True),
    "ctc_short": Story("ctc_loss", "no alignment", "`zero_infinity=True`"),
    "mamba_A_exp": Story("exp", "overflow", "`A_log` in float32", exact=True),
    "infonce_exp": Story("exp", "overflow", "`logsumexp`", exact=True),
    "where_double": Story("log2", "singular gradient", "`where` before it", phase="backward"),
    "sqrt_zero": Story("sqrt", "singular gradient", "`sqrt(x + eps)`", phase="backward"),
    "acos_one": Story("acos", "singular gradient", "clamp inside (-1, 1)", phase="backward"),
    "log1p_saturated": Story("log1p", "rounding", "`logsigmoid(-x)`", phase="backward"),
    "k3_clip_after": Story("exp", "overflow", "clamp before `exp`", phase="backward"),
    "pow_zero": Story("pow", "singular gradient", "`(x + eps) ** y`", phase="backward"),
    "fp16_grad_overflow": Story("float", "loss scale", "a smaller scale", phase="backward"),
    "mask_add_grad": Story("softmax", "masked row", "drop the row before", phase="backward"),
}
ALL = (*STORIES, "batchnorm_one")  # which raises by itself


def part(name: str, suffix: str = "") -> Callable[..., Any]:
    """A function of this file, by the name of its story."""
    function: Callable[..., Any] = globals()[name + suffix]
    return function


def model(name: str, suffix: str = "") -> nn.Module:
    """The model of a story; with ``"_fixed"`` the one after the fix."""
    function = part(name, suffix)
    if inspect.signature(function).parameters:
        return Forward(function)
    built: nn.Module = function()
    return built


@cache
def report(name: str, suffix: str = "") -> fxguard.types.Report | None:
    """The report on one batch of a story's model; None where it is healthy."""
    reports: list[fxguard.types.Report] = []
    guarded = fxguard.instrument(model(name, suffix), on_detect=reports.append)
    made = guarded(*part(name, "_inputs")())
    if name in STORIES and STORIES[name].phase == "backward":
        made.backward()
    return reports[0] if reports else None


def verdict(got: fxguard.types.Report) -> str:
    """What a report says above its frames."""
    return str(got).partition("\n\n")[0]


def source(name: str, suffix: str = "") -> str:
    """The code of a story's model: its class, where this file has one, and its function."""
    code = [part(name, suffix)]
    if not inspect.signature(code[0]).parameters:
        modules = {type(module) for module in model(name, suffix).modules()}
        code = [kind for kind in modules if kind.__module__ == __name__] + code
    return code_of(*code)


def code_of(*things: Any) -> str:
    """The source of classes and functions."""
    return "\n\n".join(map(inspect.getsource, things)).replace("  # noqa: N802", "")


def sections() -> dict[str, str]:
    """Name of each section to its text."""
    found = {}
    rows = ["| story | operation | cause | fix |", "|---|---|---|---|"]
    for name in ALL:
        found[f"{name} model"] = f"{source(name)}\n\n{code_of(part(name, '_inputs'))}"
        found[f"{name} fix"] = source(name, "_fixed")
    for name, story in STORIES.items():
        got = report(name)
        found[f"{name} report"] = verdict(got) + "\n" if got else "no report\n"
        first = got.origins[0] if got else None
        named = (first.what, first.cause) if first else ("none", "none")
        right = (story.operation, story.cause)
        what, cause = (
            one if one == other else f"**{one}**, should be {other}"
            for one, other in zip(named, right, strict=True)
        )
        what = f"backward of {what}" if story.phase == "backward" else what
        rows.append(f"| [{name}](#{name.lower()}) | {what} | {cause} | {story.fix} |")
    try:
        report("batchnorm_one")
    except ValueError as error:
        found["batchnorm_one report"] = f"ValueError: {error}\n"
    return found | {"table": "\n".join(rows) + "\n"}


def with_sections(page: str, found: dict[str, str]) -> str:
    """The page with the text of each section under its marker."""
    return SECTION.sub(lambda block: block[1] + found[block[2]] + block[4], page)


def main() -> None:
    """Print every section, and write the page where that is asked for."""
    torch._logging.set_logs(dynamo=logging.ERROR)  # it says where a model raises
    found = sections()
    for name, text in found.items():
        print(f"== {name} ==\n{text}")
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_sections(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()

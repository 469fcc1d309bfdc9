"""The famous NaNs: for more than half of them a patch is offered, and each of these repairs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fxguard.errors import FxguardError
from support.loading import DOCS, module_of, the_gallery
from support.needs import CLAMP_STOPS_AT_BOUNDS, needs

needs("transformers")

gallery = the_gallery()
OFFERED = (
    *("qk_before_scale", "rmsnorm_square", "mask_min_minus_score", "mask_times_inf"),
    *("ce_all_ignored", "std_of_one", "pool_clamp_eps", "focal_fp16", "ctc_short", "mamba_A_exp"),
    *("infonce_exp", "where_double", "sqrt_zero", "log1p_saturated", "k3_clip_after", "pow_zero"),
)
REFUSED = [name for name in gallery.STORIES if name not in OFFERED]
NOT_FINITE_IN_FLOAT64 = (
    *("mask_times_inf", "ce_all_ignored", "std_of_one", "ctc_short"),
    *("sqrt_zero", "pow_zero"),  # 0 there: an eps of 1e-12 adds 1e-6
)
SLACK = 8  # times the dtype's eps, relative to the largest magnitude


def test_most_become_a_patch() -> None:
    """Others are told in words: the data, a library, a layer, several functions."""
    assert len(OFFERED) >= len(gallery.ALL) / 2


@pytest.mark.sampled
@pytest.mark.parametrize("name", REFUSED)
def test_the_others_are_refused_with_a_reason(name: str) -> None:
    if name == "acos_one" and CLAMP_STOPS_AT_BOUNDS:
        return
    with pytest.raises(FxguardError, match="no patch: "):
        gallery.report(name).patch()


@pytest.mark.sampled
@pytest.mark.parametrize("name", OFFERED)
def test_the_patched_model_is_repaired(name: str, tmp_path: Path) -> None:
    """Nothing to report, the value of float64, and finite gradients of weights."""
    if name == "log1p_saturated" and CLAMP_STOPS_AT_BOUNDS:
        return
    diff = gallery.report(name).patch()
    file = tmp_path / "docs" / "famous_nans.py"
    file.parent.mkdir()
    file.write_bytes((DOCS / "famous_nans.py").read_bytes())
    hunks = diff[diff.index("--- ") :].splitlines(keepends=True)
    hunks[:2] = ["--- a/docs/famous_nans.py\n", "+++ b/docs/famous_nans.py\n"]
    subprocess.run(["git", "apply"], cwd=tmp_path, input="".join(hunks).encode(), check=True)
    patched = module_of(file, f"patched_{name}")
    assert patched.report(name) is None
    inputs = patched.part(name, "_inputs")()
    made = patched.model(name)(*inputs)
    assert made.isfinite().all()
    if name not in NOT_FINITE_IN_FLOAT64:
        wide = gallery.model(name).double()(*map(widened, inputs))
        eps = torch.finfo(made.dtype if made.dtype != torch.float32 else inputs[0].dtype).eps
        assert (made - wide).abs().max() <= SLACK * eps * wide.abs().max()
    assert all(each.isfinite().all() for each in gradients_of(patched.model(name), inputs))


def widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def gradients_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The gradients of its weights; of its inputs, if it has none."""
    weights = list(model.parameters())
    leaves = weights or [x.detach().requires_grad_() for x in inputs if x.is_floating_point()]
    given = inputs if weights else [*leaves, *inputs[len(leaves) :]]
    made = model(*given)
    made.float().sum().backward()
    return [each.grad for each in leaves if each.grad is not None]

"""The kernel that reads ranges on a GPU: under Triton's interpreter, and compiled for real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxguard.measure import gpu
from support.needs import do_without

ROOT = Path(__file__).resolve().parents[2]


# `./dev` installs it there, where only the processes of these tests find it.
TRITON = Path(sys.prefix) / "triton"


def run(command: list[str], **env: str) -> None:
    if not TRITON.is_dir():
        do_without(f"no Triton in {TRITON}")
    env = {**os.environ, "PYTHONPATH": str(TRITON), **env}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kernel_reads_what_torch_reads() -> None:
    """All tests of `kernel_alone.py`, in a process of their own: Triton asks once."""
    file = str(Path(__file__).with_name("kernel_alone.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    run(command, TRITON_INTERPRET="1")


COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from fxguard.measure import gpu
from fxguard.measure._kernel import read_range

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
NAMES |= {torch.float64: "fp64", torch.int32: "i32", torch.int64: "i64"}
for dtype, integer in gpu.BITS.items():
    signature = {"x": "*" + NAMES[dtype], "row": "*" + NAMES[integer], "size": "i64"}
    signature |= {"programs": "i32", "rounds": "i32", "most": "constexpr", "block": "constexpr"}
    known = {"most": torch.iinfo(integer).max, "block": gpu.BLOCK}
    source = ASTSource(fn=read_range, signature=signature, constexprs=known)
    for capability in (80, 90):
        code = compile(source, target=GPUTarget("cuda", capability, 32)).asm
        assert code["cubin"]
        assert "atom" in code["ptx"]
"""


def test_the_kernel_compiles_for_real_gpus() -> None:
    """To machine code of an A100 and an H100, which takes no GPU."""
    run([sys.executable, "-c", COMPILE])


def test_a_machine_without_gpu_asks_for_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is not even imported there."""
    monkeypatch.setattr(gpu, "_kernel", lambda: pytest.fail("imported"))
    assert gpu.abs_min_max(torch.ones(3)) is None
    assert gpu.abs_min_max(1.0) is None

"""The kernel that reads ranges on a GPU: under Triton's interpreter, and compiled for real ones."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxguard.measure import gpu
from support.needs import do_without

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


# `./dev` installs it there, where only the processes of these tests find it.
TRITON = Path(sys.prefix) / "triton"


def run(command: list[str], **env: str) -> str:
    """What a program prints that finds Triton."""
    paths = [os.environ.get("PYTHONPATH", "")]
    if not importlib.util.find_spec("triton"):
        if not TRITON.is_dir():
            do_without(f"no Triton in {TRITON}")
        paths.append(str(TRITON))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **env}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ALL = ""
LEFT_OUT = ("uint8", "int8", "int16", "int32", "float64", "float16")  # of each kind one is read
SOME = " and ".join(f"not torch.{dtype}" for dtype in LEFT_OUT)


@pytest.mark.parametrize("chosen", [SOME, pytest.param(ALL, marks=pytest.mark.campaign)])
def test_the_kernel_reads_what_torch_reads(chosen: str) -> None:
    """The tests of `kernel_alone.py`, in a process of their own: Triton asks once."""
    file = str(Path(__file__).with_name("kernel_alone.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", chosen]
    run(command, TRITON_INTERPRET="1")


GENERATIONS = {80: "A100", 90: "H100", 100: "B200"}
COMPILE = """
import pathlib, subprocess, sys, tempfile
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from fxguard.measure import gpu, gpu_table
from fxguard.measure._kernel import DTYPES, read_range, read_ranges

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
NAMES |= {torch.float64: "fp64", torch.int32: "i32", torch.int64: "i64"}

def compiled(kernel, dtype, capability, signature, known):
    constants = dict.fromkeys(known, "constexpr")
    source = ASTSource(fn=kernel, signature={**signature, **constants}, constexprs=known)
    options = {"num_warps": gpu.WARPS}
    code = compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm
    assert "atom" in code["ptx"]
    if kernel is read_ranges and dtype.itemsize < 8 and not known["has_gaps"]:
        assert "ld.global.v4" in code["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        pathlib.Path(file.name).write_bytes(code["cubin"])
        program = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [program, "--dump-resource-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    name = kernel.__name__
    print(name, dtype, capability, told.split(f"Function {name}:")[1].splitlines()[1].strip())

for dtype, integer in gpu.BITS.items():
    known = {"most": torch.iinfo(integer).max, "block": gpu.BLOCK}
    signature = {"x": "*" + NAMES[dtype], "row": "*" + NAMES[integer], "size": "i64"}
    signature |= {"programs": "i32", "rounds": "i32"}
    table = {"addresses": ("i64",) * gpu_table.PLACES}
    columns = ("sizes", "ends", "places", "lengths", "strides")
    table |= dict.fromkeys(columns, ("i32",) * gpu_table.PLACES)
    table |= {"rows": "*" + NAMES[integer], "rounds": "i32"}
    dense = {**known, "count": gpu_table.PLACES, "dtype": DTYPES[str(dtype)]}
    gaps = {**dense, "alignment": dtype.itemsize, "has_gaps": True}
    dense |= {"alignment": gpu.ALIGNED, "has_gaps": False}
    for capability in map(int, sys.argv[1:]):
        compiled(read_range, dtype, capability, signature, known)
        compiled(read_ranges, dtype, capability, table, dense)
        compiled(read_ranges, dtype, capability, table, gaps)
"""
# At most, of 65,536 for the programs of 512 threads that a multiprocessor runs at once.
REGISTERS = {"torch.float64": 128}
OTHERS = {"read_range": 64, "read_ranges": 128}


def test_the_kernels_compile_for_real_gpus() -> None:
    """To machine code of three generations, which takes no GPU; at most one register spills."""
    printed = run([sys.executable, "-c", COMPILE, *map(str, GENERATIONS)])
    lines = printed.splitlines()
    assert len(lines) == len(GENERATIONS) * len(gpu.BITS) * 3
    for line in lines:
        used = {name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", line)}
        kernel, dtype = line.split()[:2]
        assert 0 < used["REG"] <= max(REGISTERS.get(dtype, 0), OTHERS[kernel]), line
        assert used["LOCAL"] == 0, line
        assert used["STACK"] <= (8 if kernel == "read_ranges" else 0), line


def test_a_machine_without_gpu_asks_for_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is not even imported there."""
    monkeypatch.setattr(gpu, "_kernel", lambda: pytest.fail("imported"))
    assert gpu.abs_min_max(torch.ones(3)) is None
    assert gpu.abs_min_max(1.0) is None

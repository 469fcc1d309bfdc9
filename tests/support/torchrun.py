"""Scripts on several ranks of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(
    script: Path, *args: str, count: int = 2, at: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script, or ``-m`` and a module, on so many ranks: in the folder of the script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc_per_node", str(count), str(script), *args],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=at or script.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )

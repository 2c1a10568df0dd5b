"""Starts the project's scripts as a user does, under torchrun, and shows what they printed when they fail."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_script(
    nproc: int, script: str | Path, *args: str, env: dict[str, str] | None = None, timeout_s: float = 600, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """`script` (relative to the repository) on `nproc` ranks of one thread each, to its end; stderr is in stdout.

    check: a non-zero exit status is an AssertionError with the output. A script that runs longer than `timeout_s` is ended.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(script), *map(str, args)]
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    variables = inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"} | (env or {})
    process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as late:
        process.terminate()  # torchrun ends its ranks
        output, _ = process.communicate(timeout=60)
        raise AssertionError(f"{' '.join(command)}\nstill ran after {timeout_s} s:\n{output[-12000:]}") from late
    if check and process.returncode:
        raise AssertionError(f"{' '.join(command)}\nended with status {process.returncode}:\n{output[-12000:]}")
    return subprocess.CompletedProcess(command, process.returncode, output)

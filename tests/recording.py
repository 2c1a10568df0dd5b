"""A reward that writes down what it is asked, for tests that compare runs; and that can hang, so that a run can be killed there."""

import json
import os
import time
from pathlib import Path
from zlib import crc32


class Recording:
    """A reward that depends on every character. `folder`/rank_<r>.jsonl has [prompt, response] of all that rank r scored, in order.

    RECORDING_HANGS_AFTER in the environment: scores, after which the rank leaves rank_<r>.hangs and waits to be killed; every rank's
    process and that of torchrun are then in rank_<r>.pids. It is no option: the run goes on with the same configuration.
    """

    def __init__(self, *, folder: str):
        self.path, self.count = Path(folder) / f"rank_{os.environ.get('RANK', 0)}", 0
        self.hang_after = int(os.environ.get("RECORDING_HANGS_AFTER", -1))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.hang_after >= 0:
            self.path.with_suffix(".pids").write_text(f"{os.getpid()} {os.getppid()}")

    def __call__(self, prompt: str, response: str, target: str) -> float:
        if self.count == self.hang_after:
            self.path.with_suffix(".hangs").touch()
            time.sleep(3600)
        self.count += 1
        with open(self.path.with_suffix(".jsonl"), "a") as file:
            print(json.dumps([prompt, response]), file=file)
        return crc32(f"{prompt}{response}".encode()) % 8 / 8

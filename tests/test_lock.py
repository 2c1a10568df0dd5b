"""Two runs in one folder would mix their metrics and delete each other's checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lock import lock
from tests.world import ROOT

HOLDS = """
import sys, time
from pathlib import Path
from lock import lock

lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_folder_belongs_to_one_process_until_that_is_gone_however_it_ends(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"output={tmp_path}: another run .process {other.pid} on .*set another output"):
            lock(tmp_path)
        other.kill()
    lock(tmp_path)
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")

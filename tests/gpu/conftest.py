"""What the GPU tests share: nothing runs without CUDA, scripts start as a user starts them, and every verdict carries its figures.

Checkpoints and data come from the environment (tests/gpu/run.sh makes or finds them):
SMOLLM2 a folder with SmolLM2-135M-Instruct or its hub id, GSM8K a JSONL file or hub id, SHAPES the folder of tests/gpu/shapes.py,
VERDICTS the file to which a line a test is added. REHEARSE=4: what is for many GPUs runs on a CPU, on 4 ranks and with tiny models.
"""

import json
import os
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.world import ROOT, run_script

REHEARSED = int(os.environ.get("REHEARSE", 0))  # ranks of a rehearsal of test_many_*.py on a CPU; 0: none
FIGURES = pytest.StashKey[dict[str, Any]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not (torch.cuda.is_available() or (REHEARSED and item.path.stem.startswith("test_many_"))):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the test measured, by name, for the table."""
    return request.node.stash.setdefault(FIGURES, {})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if "VERDICTS" in os.environ and (report.when == "call" or report.skipped or (report.when == "setup" and report.failed)):
        line = {
            "file": item.path.stem.removeprefix("test_"), "test": item.name, "outcome": report.outcome,
            "seconds": round(report.duration, 1), "figures": item.stash.get(FIGURES, {}),
        }  # fmt: skip
        with open(os.environ["VERDICTS"], "a") as file:
            file.write(json.dumps(line) + "\n")
    return report


@pytest.fixture(scope="session")
def smollm2() -> str:
    return os.environ.get("SMOLLM2", "HuggingFaceTB/SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def gsm8k() -> str:
    return os.environ.get("GSM8K", "openai/gsm8k")


@pytest.fixture(scope="session")
def shape_of(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> Callable[[str], str]:
    """`shape_of("qwen3_06b")`: the folder of a checkpoint with random weights of that shape (tests/gpu/shapes.py)."""
    folder = Path(os.environ.get("SHAPES") or tmp_path_factory.mktemp("shapes"))

    def shape(name: str) -> str:
        from tests.gpu.shapes import make

        return str(folder / name if (folder / name / "config.json").exists() else make(folder / name, name, smollm2))

    return shape


def start(script: str, *args: str, nproc: int = 1, check: bool = True, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """`script` under torchrun, with the interpreter's own path in front of ours and more than one thread."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    threads = str(max(1, (os.cpu_count() or 8) // 4))
    return run_script(nproc, script, *args, env={"PYTHONPATH": path, "OMP_NUM_THREADS": threads}, check=check, timeout_s=timeout_s)


def scenario(name: str, folder: Path, *, nproc: int = 1, **arguments: Any) -> Any:
    """What the scenario of tests/gpu/driver.py reported."""
    spec, report = folder / f"{name}_spec.json", folder / f"{name}_report.json"
    spec.write_text(json.dumps({"run": name, "nproc": nproc, "arguments": arguments}))
    start("tests/gpu/driver.py", str(spec), str(report), nproc=nproc)
    return json.loads(report.read_text())


def steps_of(output: Path) -> list[dict[str, Any]]:
    """The training steps in a run's metrics.jsonl."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "time/step" in line]

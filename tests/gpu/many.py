"""What the tests of many GPUs share: how many ranks they have, and a model and prompts for them, which in a rehearsal are small."""

import os
from pathlib import Path

import pytest
import torch

from bench.shapes import texts_of, write_checkpoint, write_prompts
from tests.gpu.conftest import REHEARSED

RANKS = REHEARSED or next((n for n in (8, 4, 2) if n <= torch.cuda.device_count()), 1)
needs_two = pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")
DEVICE = "cpu" if REHEARSED else "cuda"
SHAPE = "tiny" if REHEARSED else "1.7b"


def devices() -> list[str]:
    """Of this machine, by the names that CUDA_VISIBLE_DEVICES takes; in a rehearsal none."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    return [] if REHEARSED else named.split(",")


def prompts_file(folder: Path) -> Path:
    """GSM8K where it is at hand as a file; else made-up problems."""
    given = Path(os.environ.get("GSM8K", ""))
    return given if given.is_file() and not REHEARSED else write_prompts(folder / "prompts.jsonl", 512)


def random_model(folder: Path, data: Path) -> Path:
    """A checkpoint with random weights whose answers are always as long as is allowed; kept in the folder SHAPES of tests/gpu/run.sh."""
    made = Path(os.environ.get("SHAPES", folder)) / f"random-{SHAPE}"
    return made if (made / "tokenizer.json").exists() else write_checkpoint(made, SHAPE, texts_of(data))

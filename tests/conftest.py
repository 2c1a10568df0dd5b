"""What several test files run on: tiny checkpoints and small problem sets, made once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import make_checkpoint, write_additions


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint_of("llama", tied=False)`: the folder of such a tiny checkpoint, made when first asked for."""
    made: dict[str, Path] = {}

    def checkpoint(family: str = "qwen3", **options) -> Path:
        name = "-".join([family, *(f"{k}={v}" for k, v in sorted(options.items()))])
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / family, family, **options)
        return made[name]

    return checkpoint


@pytest.fixture(scope="session")
def tiny_qwen3(checkpoint_of: Callable[..., Path]) -> Path:
    """A Qwen3 of two layers with a tied head, in fp32."""
    return checkpoint_of("qwen3")


@pytest.fixture(scope="session")
def additions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSONL file of 200 additions of one- and two-digit numbers."""
    return write_additions(tmp_path_factory.mktemp("additions") / "train.jsonl", 200)


@pytest.fixture(scope="session")
def held_out_additions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another 24, none of which is in `additions`."""
    return write_additions(tmp_path_factory.mktemp("held_out") / "test.jsonl", 24, first=200)

"""Whoever computes a row with shared prompts, and however it is cut, its numbers are those of prompts computed for each response."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_families import check, run

LENGTHS = [23, 3, 40, 7, 40, 12, 9, 30, 3, 3]  # of prompts and responses of three groups
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {"FSDP 2": {}, "TP 2": {"tp": 2}, "CP 2": {"cp": 2}, "PP 2": {"pp": 2}},
    4: {
        "FSDP 2 x TP 2": {"tp": 2}, "CP 2 x TP 2": {"cp": 2, "tp": 2}, "FSDP 2 x CP 2": {"cp": 2}, "PP 2 x TP 2": {"pp": 2, "tp": 2},
        "HSDP 2 x 2": {"replicate": 2}, "PP 2 x CP 2": {"pp": 2, "cp": 2},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_sharing_changes_no_logprob_and_no_gradient_in_any_layout(ranks: int, checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    cases = {
        (family, name, shared): {
            "model": checkpoint_of(family), "lengths": LENGTHS, "groups": 3, "shared_prompts": shared, **role,
        }
        for family in ("qwen3", "gemma2", "qwen3_moe") for name, role in LAYOUTS[ranks].items() for shared in (False, True)
    }  # fmt: skip
    found = run(ranks, tmp_path, {f"{key}": case for key, case in cases.items()})
    for family, name, shared in cases:
        if shared:
            on, off = (found[f"{(family, name, which)}"] for which in (True, False))
            assert any((a != b).any() for a, b in zip(on["logprobs"], off["logprobs"], strict=True)), "nothing was computed otherwise"
            check(on["logprobs"], on["gradients"], (off["logprobs"], off["gradients"]))

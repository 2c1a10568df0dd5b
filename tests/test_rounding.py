"""training.match_sampler, and training.fp32_logits too: the same numbers in fp32, other bits in bf16, and only where blocks are known."""

import pytest
import torch
from transformers import AutoConfig

from losses import GRPOLoss
from parallel.fit import check_switches
from parallel.roles import ParallelismConfig, Plan
from parallel.rounding import FAMILIES
from parallel.switches import Switches
from tests.steps import gradient, place, some_episodes, trainer_of  # noqa: F401 - two are fixtures

MATCHED = Switches(matched=True)


@pytest.mark.parametrize("key", ["match_sampler", "fp32_logits"])
def test_in_fp32_no_bit_of_a_step_changes(key, trainer_of):  # noqa: F811
    plain, matched = (trainer_of(GRPOLoss(beta=0.1), **{key: on}) for on in (False, True))
    assert plain.update(some_episodes(), 0) == matched.update(some_episodes(), 0)
    want, got = gradient(plain), gradient(matched)
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def test_in_bf16_other_bits_come_out_and_gradients_stay_as_near_to_those_in_fp32(trainer_of):  # noqa: F811
    exact, plain, matched = (
        trainer_of(GRPOLoss(beta=0.1), dtype=dtype, match_sampler=on)
        for dtype, on in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    )
    stats = [trainer.update(some_episodes(), 0) for trainer in (exact, plain, matched)]
    assert stats[1]["entropy/nll"] != stats[2]["entropy/nll"] == pytest.approx(stats[0]["entropy/nll"], rel=0.02)
    for name, want in gradient(exact).items():
        off = [(gradient(trainer)[name] - want).norm() / want.norm() for trainer in (plain, matched)]
        assert off[1] < 1.5 * off[0] + 0.01, name


def test_checkpointed_blocks_round_the_same(trainer_of):  # noqa: F811
    options = {"dtype": "bfloat16", "match_sampler": True}
    kept, full = (trainer_of(GRPOLoss(), activation_checkpointing=kind, **options) for kind in ("none", "full"))
    assert kept.update(some_episodes(), 0) == full.update(some_episodes(), 0)
    want, got = gradient(kept), gradient(full)
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def plan(**degrees: int) -> Plan:
    return Plan.make(None, ParallelismConfig(**degrees), colocate=False, wants_reference=False, world_size=2)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "llama"])
def test_a_family_that_adds_and_norms_otherwise_is_refused(checkpoint_of, family):
    config = AutoConfig.from_pretrained(checkpoint_of(family))
    check_switches(Switches(), plan(), config)
    if family in FAMILIES:
        check_switches(MATCHED, plan(), config)
        return
    with pytest.raises(ValueError, match=f"training.match_sampler=true: model family '{family}'.*set it to false"):
        check_switches(MATCHED, plan(), config)


def test_pipeline_stages_are_refused():
    check_switches(MATCHED, plan(), None)
    with pytest.raises(ValueError, match="training.match_sampler=true with parallelism.pipeline_parallel_degree=2"):
        check_switches(MATCHED, plan(pipeline_parallel_degree=2), None)

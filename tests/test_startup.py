"""What a run refuses before anything expensive, beyond its configuration's types."""

from pathlib import Path

import pytest

from config import Call
from losses import GRPOLoss
from startup import GRPOConfig, check_same_run, resolve_advantage

BEFORE = {"model": "m", "seed": 0, "training": {"steps": 10, "learning_rate": 1e-6}, "services": None, "loss": {"fn": "a", "scale": 1.0}}


@pytest.mark.parametrize("now", [
    BEFORE | {"training": {"steps": 20, "learning_rate": 1e-6}},
    BEFORE | {"services": {"trainer": {"procs": 2}}},
    BEFORE | {"resume": "auto", "metrics": {"jsonl": False}},
    BEFORE | {"training": {"steps": 10, "learning_rate": 1e-6, "stall_timeout_s": 0.0}, "grpo": {"reward_threads": 8}},
])  # fmt: skip
def test_a_run_goes_on_for_longer_and_on_other_ranks(now):
    check_same_run(Path("runs/x"), BEFORE, now)


@pytest.mark.parametrize(("now", "told"), [
    (BEFORE | {"seed": 1}, "seed was 0 and is 1"),
    (BEFORE | {"loss": {"fn": "a", "scale": 2.0}}, "loss.scale was 1.0 and is 2.0"),
    (BEFORE | {"training": {"steps": 10, "learning_rate": 1e-5}}, "training.learning_rate was 1e-06 and is 1e-05"),
    ({k: v for k, v in BEFORE.items() if k != "loss"}, "loss.fn was a and is None"),
])  # fmt: skip
def test_another_experiment_is_not_mixed_into_a_folder_with_checkpoints(now, told):
    with pytest.raises(ValueError) as error:
        check_same_run(Path("runs/x"), BEFORE, now)
    assert "runs/x holds checkpoints" in str(error.value) and told in str(error.value) and "resume: never" in str(error.value)


def test_an_advantage_gives_a_finite_number_for_every_reward(tmp_path):
    (tmp_path / "mine.py").write_text("def short(rewards): return rewards[1:]\ndef lost(rewards): return [float('nan')] * len(rewards)\n")
    for name in ("short", "lost"):
        with pytest.raises(ValueError, match="grpo.advantage=.*must give each sample (one|a finite number)"):
            resolve_advantage(GRPOLoss(), GRPOConfig(n_samples=3, advantage=Call(f"{tmp_path}/mine.py:{name}")))


def test_kl_in_the_reward_is_refused_where_the_advantage_would_not_see_it():
    with pytest.raises(ValueError, match="grpo.kl_in_reward=0.1 with grpo.advantage=losses.advantages.parts_zscore"):
        resolve_advantage(GRPOLoss(), GRPOConfig(kl_in_reward=0.1, advantage=Call("losses.advantages.parts_zscore")))


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 20), ("min_p", 0.05)])
def test_a_vocabulary_cut_by_the_sampler_is_refused_with_the_reason(key, value):
    with pytest.raises(ValueError, match=f"{key}={value}: must be .* in training.*off by the kept mass.*grpo.temperature"):
        GRPOConfig(**{key: value}).check()


@pytest.mark.parametrize(("key", "least"), [("n_samples", 1), ("max_policy_age", 0), ("reward_threads", 0)])
def test_a_count_that_is_too_small_is_refused_with_the_least(key, least):
    with pytest.raises(ValueError, match=f"^{key}={least - 1}: must be at least {least}$"):
        GRPOConfig(**{key: least - 1}).check()


def test_one_sample_a_prompt_cannot_be_compared_with_others():
    with pytest.raises(ValueError, match="set grpo.n_samples to at least 2"):
        resolve_advantage(GRPOLoss(), GRPOConfig(n_samples=1))

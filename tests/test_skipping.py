"""Answers without an advantage may be left out of a step where that changes no gradient, and only there."""

from typing import Any

import numpy as np
import pytest
from torch.testing import assert_close

from batch import Episode
from finetune import check
from losses import DAPOLoss, GRPOLoss, GSPOLoss, NLLLoss, PolicyLoss, SimpleGRPOLoss
from skipping import check_skips, largest_gradient, with_advantage
from tests.groups import grouped
from tests.steps import CustomLoss, assert_same_gradient, gradient, place, trainer_of, weights  # noqa: F401 - two are fixtures
from tests.switch_driver import weights_under
from trainer import TrainingConfig

LOSSES = {
    "GRPO": GRPOLoss, "mean over tokens": DAPOLoss, "a ratio of whole sequences": GSPOLoss,
    "mean over prompts": lambda: DAPOLoss(averaging="prompt"),
}  # fmt: skip


def some(idle: set[int], seed: int = 0) -> list[Episode]:
    """Four groups, those in `idle` without advantages; of another one an answer whose only advantages do not count."""
    episodes = grouped([(5, [9, 3, 14, 1]), (2, [8, 2]), (7, [6, 6, 12]), (1, [5, 4])], seed)
    for e in episodes:
        e.advantages = np.zeros_like(e.advantages) if e.group in idle else e.advantages
    episodes[0].advantages = np.where(episodes[0].loss_mask > 0, 0, episodes[0].advantages).astype(np.float32)
    return episodes


@pytest.mark.parametrize("shared_prompts", [False, True])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_step_that_skips_has_the_gradient_and_the_loss_of_the_whole_step(loss, shared_prompts, trainer_of):  # noqa: F811
    episodes = some({1, 3})
    every, few = (trainer_of(loss(), max_tokens=60, shared_prompts=shared_prompts, skip_zero_advantages=on) for on in (False, True))
    whole, part = (t.update(episodes, 0) for t in (every, few))
    assert_same_gradient(gradient(few), gradient(every))
    skipped = sum(e.loss_mask.sum() for e in episodes if e.group in {1, 3}) + episodes[0].loss_mask.sum()
    assert part["loss/tokens_skipped"] == skipped > 0 and part["loss/tokens"] == whole["loss/tokens"]
    assert part["perf/tokens_computed"] < whole["perf/tokens_computed"] and "loss/tokens_skipped" not in whole
    assert part["loss/policy"] == pytest.approx(whole["loss/policy"], rel=1e-5, abs=1e-7)
    assert part["grad/norm"] == pytest.approx(whole["grad/norm"], rel=1e-5)
    assert part["entropy/mean"] != pytest.approx(whole["entropy/mean"], rel=1e-5)  # of the tokens that were computed


def test_a_step_of_which_nothing_is_left_is_a_step_whose_gradient_is_zero(trainer_of):  # noqa: F811
    every, few = (trainer_of(GRPOLoss(), learning_rate=1e-2, adam_beta1=0.9, skip_zero_advantages=on) for on in (False, True))
    for t in (every, few):
        t.update(some(set()), 0)
    stats = [t.update(some({0, 1, 2, 3}), 1) for t in (every, few)]
    assert [s["grad/norm"] for s in stats] == [0, 0] and [s["loss/policy"] for s in stats] == [0, 0]
    assert stats[1]["loss/tokens_skipped"] == stats[1]["loss/tokens"] > 0 and stats[1]["perf/tokens_computed"] == 0
    assert stats[0]["optim/update_to_weight"] == pytest.approx(stats[1]["optim/update_to_weight"], rel=1e-4)
    for name, w in weights(every).items():
        assert (weights(few)[name] - w).norm() <= 1e-5 * w.norm(), name


def test_an_episode_is_kept_for_one_token_that_counts_and_has_an_advantage():
    mask, one = np.array([1, 1, 0], np.float32), np.zeros(3, np.float32)
    episodes = [Episode(np.arange(5), 2, mask, a) for a in (one, one + [0, -1e-30, 0], one + [0, 0, 5], one + [0, np.nan, 0])]
    assert with_advantage(episodes) == [episodes[1], episodes[3]]


class Surprise(PolicyLoss):
    """Trains on all that is uncertain, whatever came of it."""

    averaging = "token"

    def per_token(self, logprobs, advantages, entropy):
        return -logprobs.exp() * advantages + entropy.square()


@pytest.mark.parametrize(("loss", "options", "told"), [
    (GRPOLoss(beta=0.01), {}, "with GRPOLoss: in an example it has a gradient of .* whose advantage is 0.*grpo.beta"),
    (SimpleGRPOLoss(beta=0.1), {}, "with SimpleGRPOLoss"),
    (NLLLoss(), {}, "with NLLLoss: .* gradient of 1 "),
    (Surprise(), {}, "with Surprise"),
    (CustomLoss.resolve(), {}, "returns one scalar.*PolicyLoss"),
    (GRPOLoss(), {"entropy_coef": 0.01}, "training.entropy_coef=0.01.*entropy_coef to 0"),
    (GRPOLoss(), {"top_entropy": 0.2}, "grpo.top_entropy=0.2.*top_entropy to 1"),
])  # fmt: skip
def test_a_loss_that_trains_tokens_without_advantage_is_refused(loss, options, told, trainer_of):  # noqa: F811
    with pytest.raises(ValueError, match=f"training.skip_zero_advantages=true .*{told}"):
        check_skips(loss, **{"entropy_coef": 0.0, "top_entropy": 1.0} | options)
    training = {key: value for key, value in options.items() if key == "entropy_coef"}
    with pytest.raises(ValueError, match="training.skip_zero_advantages=true"):
        trainer_of(loss, top_entropy=options.get("top_entropy", 1.0), skip_zero_advantages=True, **training)


def test_what_a_gradient_is_not_a_number_of_is_not_zero():
    class Broken(PolicyLoss):
        averaging = "token"

        def per_token(self, logprobs, advantages):
            return (logprobs - logprobs.detach()).sqrt() * advantages

    assert not largest_gradient(Broken()) == 0


@pytest.mark.parametrize("keys", [{"skip_zero_advantages": True}, {"shared_prompts": False}])
def test_supervised_fine_tuning_refuses_the_keys_of_rollouts(keys):
    class Asked:
        training = TrainingConfig(**keys)

    with pytest.raises(ValueError, match=f"training.{next(iter(keys))}.*supervised fine-tuning.*remove the key"):
        check(Asked())


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{}, {"tensor_parallel_degree": 2}, {"context_parallel_degree": 2}, {"pipeline_parallel_degree": 2}])
def test_on_two_ranks_neither_skipping_nor_sharing_nor_compiling_changes_a_weight(degrees, tiny_qwen3, tmp_path):
    alone = {"shared_prompts": False}
    switches: list[dict[str, Any]] = [alone, alone | {"skip_zero_advantages": True}, {"skip_zero_advantages": True}]
    if "tensor_parallel_degree" not in degrees:
        switches.append({"compile": True})
    rounds = [some(idle, seed=step) for step, idle in enumerate([{1, 3}, {0, 1, 2, 3}, {0, 2}])]
    given = {"model": str(tiny_qwen3), "degrees": degrees, "max_tokens": 40, "loss": GRPOLoss()}
    want, *got = weights_under(tmp_path, switches=switches, rounds=rounds, **given)
    for found in got:
        for name, weight in want.items():
            assert_close(found[name], weight, rtol=1e-5, atol=1e-5)

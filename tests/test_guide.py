"""The files of torchforge's guide, as they stand in it, run: only what a laptop lacks is overridden."""

import dataclasses
import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import losses
from batch import Completion
from config import Call
from tests.world import run_script

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "tests/data/guide"
REWARD = "tests/data/guide/custom_math_reward.py:CustomMathReward"
LOSS = "tests/data/guide/custom_loss.py:CustomLoss"
# The guide's reward is 0 for all that an untrained model says; with a second one there is something to learn.
MORE = """
def share_of_digits(prompt, response, target):
    return sum(c.isdigit() for c in response) / max(len(response), 1)
"""


@pytest.mark.parametrize("name", ["grpo_math.yaml", "distributed.yaml", "custom_math_reward.py", "custom_loss.py"])
def test_the_files_are_the_guides_own_words(name):
    assert (GUIDE / name).read_text().rstrip() in (GUIDE / "guide.txt").read_text()


@pytest.fixture(scope="module")
def run_guide(tmp_path_factory, checkpoint_of):
    """`run_guide(ranks, key=value, ...)`: the guide's GRPO file on `ranks`, and its folder."""
    model = checkpoint_of("qwen2", characters=string.printable[:95] + "\n")
    more = tmp_path_factory.mktemp("rewards") / "more.py"
    more.write_text(MORE)
    laptop = [f"model={model}", "dataset.path=tests/data/gsm8k_shaped.jsonl", "training.seq_len=256", "device=cpu", "training.steps=2"]

    def run(ranks: int, *overrides: str, more_rewards: bool = True) -> Path:
        output = tmp_path_factory.mktemp("guide") / "run"
        rewards = [f"rewards.math={REWARD}", *([f"rewards.digits={more}:share_of_digits"] if more_rewards else [])]
        arguments = ["--config", "tests/data/guide/grpo_math.yaml", *laptop, f"output={output}", *rewards, *overrides]
        (output.parent / "console.txt").write_text(run_script(ranks, "train_grpo.py", *arguments).stdout)
        return output

    return run


def steps(output: Path) -> list[dict[str, float]]:
    """The lines of training steps; an evaluation before or after them is none."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/mean" in line]


@pytest.fixture(scope="module")
def grpo_math(run_guide):
    return run_guide(3, more_rewards=False)


def test_the_guides_configuration_trains_on_three_ranks_with_its_reward(grpo_math):
    first, last = steps(grpo_math)
    assert (first["step"], last["step"], first["policy_version"], last["policy_version"]) == (1, 2, 0, 1)
    assert first["reward/mean"] == first["reward/math/mean"] == 0.0  # an untrained model writes no \boxed{}
    assert first["optim/lr"] == 1e-6
    text = (grpo_math / "config.yaml").read_text()
    for line in ("batch_size: 4", "gradient_accumulation_steps: 4", "n_samples: 8", "temperature: 0.7", "beta: 0.1", "clip_high: 0.28"):
        assert line in text, f"{line}: the file's own value, untouched"


# The names of a step that people rely on, in metrics.jsonl and in TensorBoard.
NAMES = """
reward/mean reward/std reward/math/mean reward/math/std reward/solve_none reward/solve_all reward/frac_zero_std
adv/mean adv/std adv/abs_max adv/frac_pos
len/mean len/p50 len/p95 len/max len/mean_wrong trunc_rate stop/eos stop/stop_string stop/length stop/abort
entropy/mean entropy/nll kl/ref_k3 kl/old clip/high clip/low ratio/mean ratio/max mismatch/abs_mean mismatch/abs_max
staleness/mean staleness/max grad/norm grad/clipped optim/lr optim/update_to_weight loss/policy policy_version
time/generate time/reward time/logp_ref time/train time/sync time/ckpt time/wait time/step
time/generate_mean time/train_mean perf/tok_s_generate perf/tok_s_train
""".split()


def test_every_step_of_metrics_jsonl_has_the_promised_names_and_finite_values(grpo_math):
    lines = (grpo_math / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]  # one object a step, and nothing else without an evaluation
    for line in steps(grpo_math):
        assert set(NAMES) - line.keys() == set()
        assert [name for name in line if line[name] is None] == []


def test_tensorboard_has_the_same_numbers_and_the_table_of_samples(grpo_math):
    board = EventAccumulator(str(grpo_math / "tensorboard"))
    board.Reload()
    scalars = board.Tags()["scalars"]
    for line in steps(grpo_math):
        for name in NAMES:
            assert name in scalars
            (value,) = (e.value for e in board.Scalars(name) if e.step == line["step"])
            assert value == pytest.approx(line[name], rel=1e-6)
    assert any("samples" in tag for tag in board.Tags()["tensors"])


def test_the_run_folder_has_a_table_of_samples_with_the_guides_reward(grpo_math):
    for step in (1, 2):
        table = (grpo_math / f"samples/step_{step:06d}.md").read_text()
        assert "| prompt | response | target | reward | parts | stop | tokens |" in table
        assert table.count("| math 0 |") >= 4


def test_the_console_has_a_line_a_step(grpo_math):
    text = (grpo_math.parent / "console.txt").read_text()
    titles = "  step  reward     len    loss entropy      kl    ref    gen  train   sync    all   tok/s     eta"
    assert titles in text and "\n   1/2 " in text and "\n   2/2 " in text
    for noise in ("INFO ", "Traceback", "rank 1", "rank 2"):
        assert noise not in text


def test_the_guides_loss_plugs_in_with_a_reference_on_the_cpu(run_guide):
    # `loss` in place of grpo.clip_* and grpo.beta; ref_model.with_gpus, n_samples and entropy_coef as the guide's advice has them.
    nulled = ["grpo.clip_low=null", "grpo.clip_high=null", "grpo.beta=null", "training.learning_rate=1e-3"]
    advice = ["ref_model.with_gpus=false", "grpo.n_samples=4", "training.entropy_coef=0.01"]
    output = run_guide(2, f"loss={LOSS}", *nulled, *advice)
    first, last = steps(output)
    assert first["kl/ref_k3"] < 1e-4 < last["kl/ref_k3"]
    assert first["grad/norm"] > 0 and last["loss/policy"] != 0
    assert first["adv/abs_max"] <= 1.5  # (n - 1) / sqrt(n) bounds a z-score of n samples: 1.5 of 4, 2.47 of 8
    assert "(on the CPU)" in (output.parent / "console.txt").read_text()


@pytest.mark.slow
def test_without_a_reference_and_with_weights_sent_every_ten_steps_the_sampler_keeps_its_policy(run_guide):
    output = run_guide(2, "services.ref_model=null", "grpo.beta=0", "training.sync_interval=10", "training.learning_rate=1e-3")
    first, last = steps(output)
    assert (first["policy_version"], last["policy_version"], last["staleness/max"]) == (0, 0, 1.0)
    assert "kl/ref_k3" not in last
    assert first["mismatch/abs_mean"] < last["mismatch/abs_mean"]


# The guide's API -------------------------------------------------------------------------------------------------


def test_a_completion_has_the_guides_four_fields():
    fields: dict[str, Any] = {"text": "4", "token_ids": [7], "logprobs": [-0.5], "metadata": {"source": "test"}}
    assert dataclasses.asdict(Completion(**fields)).items() >= fields.items()
    assert Completion("4", [7], [-0.5]).metadata == {}


@pytest.fixture
def tensors():
    draw = torch.Generator().manual_seed(0)
    random = [torch.randn(2, 5, generator=draw) for _ in range(3)]
    mask = torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return {"logprobs": random[0].requires_grad_(), "ref_logprobs": random[1], "advantages": random[2][:, :1], "padding_mask": mask}


def test_the_guides_call_of_simple_grpo_loss_is_the_mean_over_sequences_of_minus_advantage_plus_beta_k3(tensors):
    loss = losses.SimpleGRPOLoss(beta=0.1)(**tensors)
    gap = tensors["ref_logprobs"] - tensors["logprobs"]
    terms = -tensors["advantages"] + 0.1 * (gap.exp() - gap - 1)
    mask = tensors["padding_mask"]
    torch.testing.assert_close(loss, ((terms * mask).sum(1) / mask.sum(1)).mean())
    loss.backward()
    assert tensors["logprobs"].grad[1, 3:].abs().sum() == 0 < tensors["logprobs"].grad.abs().sum()


def test_reinforce_loss_takes_the_guides_clip_ratio(tensors):
    given = {k: v for k, v in tensors.items() if k != "ref_logprobs"}
    gen = tensors["logprobs"].detach() - torch.tensor([[-1.0, -0.1, 0, 0.1, 1.0]])
    loss = losses.ReinforceLoss(clip_ratio=0.2)(**given, gen_logprobs=gen)
    weight = torch.tensor([0.8, 0.9048374, 1, 1.1051709, 1.2])
    mask = given["padding_mask"]
    want = -(weight * given["advantages"] * given["logprobs"] * mask).sum() / mask.sum()
    torch.testing.assert_close(loss, want)


def test_the_guides_own_loss_can_be_called_as_the_guide_calls_it(tensors):
    loss = Call(LOSS, {"clip_range": 0.2, "beta": 0.1}).resolve()(**tensors)
    assert loss.ndim == 0 and loss.requires_grad


def test_the_guides_reward_scores_a_box_that_holds_the_target_and_nothing_else():
    reward = Call(REWARD).resolve()
    assert [reward("", text, "42") for text in (r"so \boxed{42}", r"\boxed{ 42 }", r"\boxed{43}", "42")] == [1.0, 1.0, 0.0, 0.0]

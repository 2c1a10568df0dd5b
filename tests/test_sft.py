"""Supervised fine-tuning as a user runs it: the step against plain torch, evaluations, the best checkpoint, the end, and plans."""

import itertools
import json
import math
import pickle
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

import config
import finetune
import train_sft
from batch import Episode
from best import Best, of
from checkpoint import Saved, find, whole
from formats import SFTDataConfig, find_format
from losses import NLLLoss
from model import Model, ModelSource
from tests.chats import TALK, tokenizer_of
from tests.steps import place, weights  # noqa: F401 - place is a fixture
from tests.test_checkpoint import assert_same_state, state
from tests.world import ROOT, run_script
from trainer import Trainer, TrainingConfig, lr_at

# The step ---------------------------------------------------------------------------------------------------------------


def reference_loop(model: Any, steps: list[list[Episode]], rates: list[float]) -> None:
    """Fine-tuning as plain torch writes it, a document at a time."""
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) is m], "weight_decay": 0.1 * m} for m in (True, False)]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for documents, adamw.param_groups[0]["lr"] in zip(steps, rates, strict=True):
        adamw.param_groups[1]["lr"], tokens = adamw.param_groups[0]["lr"], sum(float(e.loss_mask.sum()) for e in documents)
        for e in documents:
            ids, mask = torch.tensor(e.token_ids), torch.tensor(e.loss_mask)
            logits = model.lm_head(model.model(ids[None]).last_hidden_state[0, e.num_prompt_tokens - 1 : -1])
            scores = logits - logits.detach().amax(-1, keepdim=True)
            logprobs = scores.gather(-1, ids[e.num_prompt_tokens :, None])[:, 0] - scores.exp().sum(-1).log()
            (-(logprobs * mask).sum() / tokens).backward()
        gradients = [p.grad for p in model.parameters()]
        norm = math.sqrt(sum(g.norm().item() ** 2 for g in gradients))
        torch._foreach_mul_(gradients, min(0.5 / norm, 1.0))
        adamw.step()
        adamw.zero_grad()


def documents(lengths: list[tuple[int, int]], seed: int) -> list[Episode]:
    """Of (prompt, response) tokens each; of the response of every second one a part is not trained, as in a chat of many turns."""
    draw = np.random.RandomState(seed)
    found = []
    for i, (prompt, response) in enumerate(lengths):
        mask = np.ones(response, np.float32)
        mask[2:4] = i % 2 == 0
        found.append(Episode(draw.randint(3, 17, prompt + response), prompt, mask, np.zeros(response, np.float32)))
    return found


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True)])
def test_two_steps_are_a_plain_torch_loop_bit_for_bit(family, tied, place, checkpoint_of):  # noqa: F811
    """In fp32, on one rank, a document to a pass, longest first, as the trainer takes them.

    The loop takes a token's gradient as softmax minus one-hot, the norm in float64, and AdamW fused, as the trainer does:
    torch's cross_entropy, clip_grad_norm_ and its AdamW for each tensor differ from these in the last bits.
    """
    folder = checkpoint_of(family, tied=tied)
    keys: dict[str, Any] = {"schedule": "linear", "warmup_steps": 1, "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
    cfg = TrainingConfig(steps=3, dtype="float32", seq_len=24, max_tokens_per_batch=24, **keys)
    policy = Model(ModelSource(str(folder)), place.trainer, dtype="float32", temperature=1.0, max_tokens=24, trainable=True)
    trainer = Trainer(policy, cfg, NLLLoss())
    before = weights(trainer)
    steps = [documents([(5, 18), (8, 13), (4, 9)], seed=0), documents([(3, 20), (1, 17), (9, 5)], seed=1)]
    numbers = [trainer.update(step, i) for i, step in enumerate(steps)]
    assert [n["grad/clipped"] for n in numbers] == [1.0, 1.0] and [len(policy.rows(step)) for step in steps] == [3, 3]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference_loop(plain, steps, [lr_at(0, cfg), lr_at(1, cfg)])
    ours, theirs = weights(trainer), dict(plain.named_parameters())
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert [name for name in ours if torch.equal(ours[name], before[name])] == [], "some weight was not trained"


def test_passes_are_counted_in_steps_where_the_schedule_needs_them(place, checkpoint_of):  # noqa: F811
    cfg = TrainingConfig(epochs=2, schedule="linear", learning_rate=1.0)
    assert [lr_at(step, cfg, total=4) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    policy = Model(ModelSource(str(checkpoint_of())), place.trainer, dtype="float32", temperature=1.0, max_tokens=24, trainable=True)
    with pytest.raises(ValueError, match="schedule=linear with epochs=2: the rows are not counted beforehand .*set training.steps"):
        Trainer(policy, cfg, NLLLoss(), total=None)


# Runs -------------------------------------------------------------------------------------------------------------------


class Run:
    def __init__(self, output: Path, log: str):
        self.output, self.log = output, log
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        self.lines = [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines]

    def column(self, name: str) -> list[float]:
        return [line[name] for line in self.lines if name in line]

    def at(self, step: int) -> Path:
        return self.output / f"checkpoints/step_{step}"


@pytest.fixture(scope="module")
def tune(tmp_path_factory, checkpoint_of, additions, held_out_additions):
    """`tune(ranks, *overrides, output=None)`: a run on streamed rows, evaluated after each step."""

    def start(ranks: int, *overrides: str, output: Path | None = None) -> Run:
        folder = tmp_path_factory.mktemp("tune")
        sections = {
            "model": str(checkpoint_of("qwen3")), "dataset": {"path": str(additions), "streaming": True},
            "training": {"steps": 6, "batch_size": 8, "seq_len": 24, "max_tokens_per_batch": 64, "dtype": "float32", "learning_rate": 1e-3},
            "eval": {"dataset": {"path": str(held_out_additions)}, "every": 1, "max_rows": 9}, "metrics": {"tensorboard": False},
        }  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(sections))
        output = output or folder / "run"
        return Run(output, run_script(ranks, "train_sft.py", folder / "config.yaml", f"output={output}", *overrides).stdout)

    return start


def plain_loss(folder: Path, data: Path, rows: int) -> tuple[float, int]:
    """Of a checkpoint on the first rows of a file, a row at a time in float64; and the number of trained tokens."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), AutoTokenizer.from_pretrained(folder)
    losses: list[float] = []
    for line in data.read_text().splitlines()[:rows]:
        row = json.loads(line)
        prompt, answer = tokenizer(row["prompt"]).input_ids, [*tokenizer(row["answer"]).input_ids, tokenizer.eos_token_id]
        ids = torch.tensor([prompt + answer])
        labels = ids.masked_fill(torch.arange(ids.shape[1]) < len(prompt), -100)
        losses += [model(ids, labels=labels).loss.item()] * len(answer)
    return sum(losses) / len(losses), len(losses)


@pytest.mark.parametrize("rows", [3, 1])
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_each_held_out_row_counts_once_however_many_ranks_there_are(ranks, rows, tune, checkpoint_of, held_out_additions, tmp_path):
    """Field case DI-01. No step is taken: training.steps=0 evaluates and ends."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(held_out_additions.read_text().splitlines(keepends=True)[:rows]))
    run = tune(ranks, "training.steps=0", f"eval.dataset.path={few}")
    loss, tokens = plain_loss(checkpoint_of("qwen3"), few, rows)
    (line,) = run.lines
    assert (line["step"], line["eval/rows"], line["eval/tokens"]) == (0, rows, tokens)
    assert line["eval/loss"] == pytest.approx(loss, rel=1e-6) and line["eval/perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)


# The loss falls, so that of the largest losses the first evaluation's is the best, and no later one is better.
WORST = ["checkpoint.best=eval/loss", "checkpoint.best_mode=max", "checkpoint.keep=1", "checkpoint.export_hf=true"]
STOP = "early_stop={metric: eval/loss, mode: max, patience: 4}"


@pytest.fixture(scope="module")
def straight(tune) -> Run:
    return tune(2, *WORST, STOP, "checkpoint.every=2")


@pytest.fixture(scope="module")
def halves(tune, straight, tmp_path_factory) -> Run:
    """The same run in two parts, of which the first ends after two steps."""
    output = tmp_path_factory.mktemp("halves") / "run"
    tune(2, *WORST, STOP, "checkpoint.every=2", "training.steps=2", output=output)
    shutil.copytree(output, output.with_name("copy"))
    return tune(2, *WORST, STOP, "checkpoint.every=2", output=output)


def test_a_run_ends_at_the_evaluation_that_is_the_last_of_its_patience(straight):
    losses = straight.column("eval/loss")
    assert losses == sorted(losses, reverse=True), "the loss did not fall"
    assert straight.lines[0].keys() >= {"eval/loss"} and "loss/policy" not in straight.lines[0]  # before the first step
    assert [line["step"] for line in straight.lines] == [0, 1, 2, 3, 4, 5]


def test_the_best_checkpoint_stays_beside_the_newest_and_has_a_name(straight):
    assert [path.name for path in whole(straight.output)] == ["step_1", "step_5"]
    assert (straight.output / "checkpoints/best").resolve() == straight.at(1).resolve()


def test_both_the_best_and_the_last_model_are_exported(straight):
    for folder, step in (("hf_best", 1), ("hf", 5)):
        exported, saved = load_file(straight.output / folder / "model.safetensors"), state(straight.at(step))
        assert [name for name in exported if not torch.equal(exported[name], saved[f"weight/{name}"])] == [], folder


def test_a_run_in_two_parts_remembers_the_best_and_its_patience_and_streams_on(halves, straight):
    assert "resuming from" in halves.log
    assert halves.lines == straight.lines
    assert [path.name for path in whole(halves.output)] == ["step_1", "step_5"]
    assert (halves.output / "checkpoints/best").resolve() == halves.at(1).resolve()
    assert_same_state(halves.at(5), straight.at(5))


def test_the_second_part_may_have_another_number_of_ranks(tune, halves, straight):
    run = tune(1, *WORST, STOP, "checkpoint.every=2", output=halves.output.with_name("copy"))
    assert [line["step"] for line in run.lines] == [0, 1, 2, 3, 4, 5]
    for ours, theirs in zip(run.lines, straight.lines, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"data/packing_efficiency"}:  # two replicas pack their rows apart
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), f"{name}, step {theirs['step']}"


def test_a_run_that_has_ended_early_does_not_go_on(tune, halves):
    again = tune(1, *WORST, STOP, "checkpoint.every=2", output=halves.output)
    assert again.lines == halves.lines


@pytest.mark.slow
def test_answers_to_held_out_prompts_are_scored_the_same_on_one_rank_and_two(tune, additions):
    recording = f"rewards={{digits: {{fn: {ROOT}/tests/tiny.py:share_of_digits}}}}"
    asked = ["eval.every=2", "eval.n_samples=3", "eval.max_prompts=5", "eval.max_new_tokens=6", "training.steps=3"]
    alone, two = (tune(r, recording, *asked, "generator.max_num_seqs=16", "checkpoint.best=eval/reward") for r in (1, 2))
    for name in ("reward", "accuracy", "len", "prompts", "sampled_reward", "sampled_accuracy", "sampled_pass", "loss"):
        ours, theirs = alone.column(f"eval/{name}"), two.column(f"eval/{name}")
        assert len(ours) == 3 and ours == pytest.approx(theirs, rel=1e-5), name
    assert alone.column("eval/prompts") == [5, 5, 5] and max(alone.column("eval/reward")) > 0
    assert alone.column("eval/reward") != alone.column("eval/sampled_reward")


def test_the_best_of_another_metric_is_forgotten_when_a_run_goes_on():
    best = Best("eval/loss", 0.5, step=3, since=4)
    assert of("eval/loss", best) is best
    assert of("eval/accuracy", best) is of(None, best) is of("eval/loss", None) is None


COUNTED = """
import checkpoint, train_sft
from parallel.launch import launch

save = checkpoint.save

def told(output, step, *rest, **options):
    print("saving step", step, flush=True)
    save(output, step, *rest, **options)

checkpoint.save = told
launch(train_sft.main)
"""


def test_no_checkpoint_is_removed_to_be_written_again(checkpoint_of, additions, held_out_additions, tmp_path):
    """Killed in between, a run that keeps one checkpoint would have none. All held-out rows are read where no number of them is given."""
    script = tmp_path / "counted.py"
    script.write_text(COUNTED)
    every = ["checkpoint.every=1", "checkpoint.best=eval/loss", "eval.every=1", f"eval.dataset.path={held_out_additions}"]
    training = ["training.seq_len=24", "training.dtype=float32", "training.batch_size=80", f"output={tmp_path}/run"]
    log = run_script(1, script, f"model={checkpoint_of('qwen3')}", f"dataset.path={additions}", *every, *training).stdout
    assert [line for line in log.splitlines() if line.startswith("saving")] == [f"saving step {step}" for step in (1, 2, 3)]
    assert Run(tmp_path / "run", log).column("eval/rows") == [24] * 4


def test_the_best_checkpoint_of_another_folder_is_not_sought_in_this_one(place, tmp_path):  # noqa: F811
    best = Best("eval/loss", 0.5, step=1)
    for output, step in itertools.product(("mine", "other"), (1, 2)):
        folder = tmp_path / output / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "run.pkl").write_bytes(pickle.dumps(Saved(step, best=best)))
        (folder / "WHOLE").touch()
    (tmp_path / "mine/checkpoints/best").symlink_to("step_2")
    for resume, known in (("auto", best), (f"{tmp_path}/mine/checkpoints/best", best), (f"{tmp_path}/other/checkpoints/step_2", None)):
        assert find(resume, tmp_path / "mine", place).best == known, resume


# What needs no run ------------------------------------------------------------------------------------------------------


@pytest.fixture
def printed(monkeypatch, capsys):
    """`printed(*arguments)`: what train_sft.py prints that starts nothing."""

    def call(*arguments: Any) -> str:
        monkeypatch.setattr(sys, "argv", ["train_sft.py", *map(str, arguments)])
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        train_sft.main()
        assert not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        return capsys.readouterr().out

    return call


def test_the_first_rows_are_shown_with_what_is_trained_marked(printed, checkpoint_of, additions, tmp_path):
    shown = printed(
        f"model={checkpoint_of()}", f"dataset.path={additions}", "dataset.streaming=true", f"output={tmp_path}/run", "--show-batch=2"
    )
    rows = [json.loads(line) for line in additions.read_text().splitlines()[:2]]
    for number, row in enumerate(rows, 1):
        assert f"row {number}: " in shown and f"{row['prompt']}⟦{row['answer']}<eos>⟧" in shown
    assert "row 3" not in shown and not (tmp_path / "run").exists()


def test_the_examples_of_one_row_are_shown_as_one_row(printed, tmp_path):
    tokenizer_of("Qwen 3").save_pretrained(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"messages": TALK[:2]}))
    shown = printed(f"model={tmp_path}/model", f"dataset.path={tmp_path}/chats.jsonl", "dataset.streaming=true", "--show-batch=2")
    assert re.findall("^--- (row .):", shown, re.MULTILINE) == ["row 1", "row 1", "row 2"]


@pytest.mark.parametrize("flag", ["--show-batch=0", "--show-batch=all"])
def test_no_number_of_rows_cannot_be_shown(flag, printed):
    with pytest.raises(ValueError, match=f"^{flag}: must be a number of rows, at least 1"):
        printed("model=m", "dataset.path=x.jsonl", flag)


@pytest.mark.parametrize(("row", "keys", "told"), [
    ({"instruction": "a", "input": "b", "output": "c"}, {}, "eval.dataset.format=alpaca: held-out prompts are not read by it; set eval"),
    ({"q": "a", "a": "b"}, {"columns": {"prompt": "q", "completion": "a"}}, "eval.dataset.columns=.*: held-out prompts are not read by it"),
    ({"prompt": "a", "completion": "b"}, {}, "rewards would see no target: .* has the columns .'completion', 'prompt'"),
    ({"instruction": "a", "input": "b", "output": "c"}, {"prompt": "{instruction} {input}", "target": "output"}, None),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, {}, None),
    ({"question": "a", "answer": "b"}, {}, None),
])  # fmt: skip
def test_rows_that_are_not_asked_as_they_are_trained_are_refused_with_rewards(row, keys, told):
    cfg = SFTDataConfig(path="x.jsonl", **keys)
    with pytest.raises(ValueError, match=told) if told else nullcontext():
        finetune.check_questions(cfg, find_format(cfg, row), row)


EIGHT_B = {
    "llama3_8b_sft": LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                                 num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072),
    "qwen3_8b_sft": Qwen3Config(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, head_dim=128,
                                num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=40960),
}  # fmt: skip


@pytest.mark.parametrize("name", EIGHT_B)
def test_a_configuration_of_eight_billion_parameters_fits_two_gpus_of_its_size(name, printed, tmp_path):
    file = ROOT / f"configs/{name}.yaml"
    assert file.read_text().startswith(f"# torchrun --nproc-per-node=2 train_sft.py configs/{name}.yaml\n")
    EIGHT_B[name].save_pretrained(tmp_path)
    plan = printed(file, "--plan=2x141", f"model={tmp_path}")  # the shape alone: there are no weights
    assert "  trainer     0-1            2 FSDP shards x TP 1\n" in plan and "generator" not in plan
    assert "8.03 billion" in plan or "8.19 billion" in plan
    assert "warning" not in plan and "train " in plan and "KV cache" not in plan


@pytest.mark.parametrize("file", [p for p in sorted(ROOT.glob("configs/*.yaml")) if "train_sft.py" in p.read_text()], ids=lambda p: p.stem)
def test_every_configuration_is_planned_without_weights_or_data(file, printed):
    assert printed(file, "--plan=2").startswith("2 ranks\n")


@pytest.mark.parametrize(("keys", "told"), [
    (["rewards.math=rollout.rewards.MathReward"], "rewards without eval.dataset"),
    (["checkpoint.best=eval/loss"], "checkpoint.best=eval/loss: the run has no evaluations: set eval.dataset"),
    (["checkpoint.best=eval/loss", "eval.dataset.path=y"], "checkpoint.best=eval/loss needs evaluations to choose from: set eval.every"),
    (["early_stop.metric=eval/accuracy", "eval.dataset.path=y", "eval.every=1"],
     r"early_stop.metric=eval/accuracy: the run's evaluations have eval/loss, eval/perplexity \(with rewards"),
    (["eval.dataset.path=y", "eval.n_samples=2"], "eval.n_samples=2 without rewards"),
    (["eval.max_new_tokens=9", "eval.dataset.path=y"], "eval.max_new_tokens=9 without rewards: nothing is answered"),
    (["eval.every=2"], "eval.every=2 without eval.dataset"),
    (["training.schedule=linear", "training.epochs=2", "dataset.streaming=true"], "schedule=linear with epochs=2: .*set training.steps"),
    (["training.schedule=wsd", "training.epochs=1", "overlong=split"], "schedule=wsd with epochs=1: .*set training.steps"),
    (["training.updates_per_rollout=2"], "training.updates_per_rollout=2: supervised fine-tuning has neither"),
    (["training.steps=4", "training.epochs=2"], "training.epochs=2 with steps=4: give one of the two"),
    (["training.schedule=wsd", "training.steps=20", "training.warmup_steps=15", "training.decay_steps=10"],
     "decay_steps=10 with warmup_steps=15: together more than the run's 20 steps"),
    (["training.schedule=cosine", "training.decay_steps=10", "training.steps=20"], "decay_steps=10 with schedule=cosine: it is wsd's"),
    (["training.schedule=wsd"], "schedule=wsd needs training.steps or training.epochs"),
    (["training.min_lr_ratio=2"], "min_lr_ratio=2.0: must be at least 0 and at most 1"),
    (["training.min_lr_ratio=0.1", "training.schedule=constant"], "min_lr_ratio=0.1 with schedule=constant, which does not fall"),
    (["checkpoint.best_mode=max"], "best_mode=max without best: name the metric"),
    (["eval.temperature=0.5"], "temperature=0.5 with n_samples=0"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_with_its_keys(keys, told):
    with pytest.raises(config.ConfigError, match=told):
        config.load(train_sft.Config, ["model=m", "dataset.path=x", *keys])

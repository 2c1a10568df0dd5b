"""The demo's data, tokenizer, model and configurations: what must hold for its last table to mean anything."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import config
import demo
import train_grpo
import train_sft
from batch import Completion, Group, Prompt
from data import encode_completion, encode_prompt
from parallel.roles import Plan
from rollout.rewards import Scorer

ROOT = Path(__file__).parent.parent
SCRIPTS = {"demo_sft": train_sft, "demo_grpo": train_grpo}

each_config = pytest.mark.parametrize("name", SCRIPTS)
each_seed = pytest.mark.parametrize("seed", [0, 1, 2])


def load(name: str):
    return config.load(SCRIPTS[name].Config, [str(ROOT / f"configs/{name}.yaml")])


@pytest.fixture(scope="module")
def tokenizer():
    return demo.make_tokenizer()


@pytest.fixture(scope="module")
def every_problem() -> list[dict[str, str]]:
    train, held_out = demo.problems(0)
    return train + held_out


@each_seed
def test_held_out_problems_are_never_trained_on_and_nothing_is_lost(seed):
    train, held_out = ([row["prompt"] for row in rows] for rows in demo.problems(seed))
    assert len(held_out) == demo.HELD_OUT
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == [f"{a:02d}+{b:02d}=" for a in range(100) for b in range(100)]


def test_the_split_is_a_function_of_the_seed():
    assert demo.problems(1) == demo.problems(1)
    assert demo.problems(1)[1] != demo.problems(2)[1]


def test_every_answer_is_the_sum(every_problem):
    for row in every_problem:
        a, b = row["prompt"].rstrip("=").split("+")
        assert int(row["answer"]) == int(a) + int(b)


def test_the_files_hold_the_split(tmp_path):
    demo.make_problems(tmp_path / "made", 1)
    read = [[json.loads(line) for line in (tmp_path / f"made/{name}.jsonl").open()] for name in ("train", "held_out")]
    assert read == list(demo.problems(1))


def test_every_problem_survives_the_tokenizer(tokenizer, every_problem):
    special = set(tokenizer.all_special_ids)
    for row in every_problem:
        prompt = encode_prompt(tokenizer, [{"role": "user", "content": row["prompt"]}])
        answer = encode_completion(tokenizer, row["answer"])
        assert not special & set(prompt)
        assert answer[-1] == tokenizer.eos_token_id and not special & set(answer[:-1])
        assert tokenizer.decode(prompt) == row["prompt"]
        assert tokenizer.decode(answer, skip_special_tokens=True) == row["answer"]


def test_the_model_is_a_checkpoint_with_this_tokenizer_and_a_function_of_the_seed(tmp_path, tokenizer):
    weights = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        demo.make_model(tmp_path / folder, seed)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        weights.append(model.get_input_embeddings().weight)
    assert weights[0].equal(weights[1]) and not weights[0].equal(weights[2])
    saved = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert saved.get_vocab() == tokenizer.get_vocab() and len(weights[0]) >= len(saved)
    assert saved.eos_token_id == model.config.eos_token_id and saved.pad_token_id != saved.eos_token_id


@each_config
def test_a_config_begins_with_its_command_and_fits_the_demos_ranks(name):
    first, second = (ROOT / f"configs/{name}.yaml").read_text().splitlines()[:2]
    assert first.startswith("#") and f"{SCRIPTS[name].__name__}.py configs/{name}.yaml" in first
    assert second.startswith("#") and "Tried on" in second
    cfg = load(name)
    for ranks in (1, demo.NUM_RANKS):
        Plan.make(None, cfg.parallelism, colocate=True, wants_reference=False, world_size=ranks)


@each_config
def test_a_problem_fits_the_length_limits(name, tokenizer, every_problem):
    cfg = load(name)
    prompts = max(len(encode_prompt(tokenizer, [{"role": "user", "content": r["prompt"]}])) for r in every_problem)
    answers = max(len(encode_completion(tokenizer, r["answer"])) for r in every_problem)
    assert prompts + answers <= cfg.training.seq_len
    assert name == "demo_sft" or answers <= cfg.grpo.max_new_tokens


def test_both_scripts_train_on_one_file_and_are_graded_on_another():
    sft, grpo = load("demo_sft"), load("demo_grpo")
    assert sft.dataset.path == grpo.dataset.path != grpo.eval.dataset.path
    assert grpo.eval.temperature == 0  # the table speaks of greedy accuracy
    assert Path(grpo.model).parent.name == "sft" and sft.checkpoint.export_hf


def test_only_the_sum_is_worth_a_whole_reward(every_problem):
    """Accuracy is the share of first rewards that are 1 or more."""
    scorer = Scorer(load("demo_grpo").rewards)
    for row in every_problem[:500]:
        wrong = [f"{(int(row['answer']) + error) % 200:03d}" for error in (1, 10, 100)]
        completions = [Completion(text, [], []) for text in (row["answer"], *wrong, row["answer"][1:], "")]
        group = scorer.score(Group(Prompt(0, [], row["prompt"], row["answer"]), completions))
        right, *others = next(iter(group.reward_parts.values()))
        assert right == 1 and all(r is not None and r < 1 for r in others)


def test_accuracies_are_read_in_the_order_of_the_run(tmp_path):
    lines = [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "reward/mean": 0.3}, {"step": 2, "eval/accuracy": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert demo.accuracies(tmp_path) == [0.5, 0.75]


@pytest.mark.slow
def test_a_script_that_fails_ends_the_demo_with_its_exit_code(capfd):
    with pytest.raises(SystemExit) as ended:
        demo.run("train_sft.py", "configs/no_such_file.yaml")
    assert ended.value.code == 1
    assert "no_such_file.yaml" in capfd.readouterr().err

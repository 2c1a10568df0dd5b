"""What counts as a right answer, what a reward may return, and that nothing a model wrote is executed."""

import json
import math
import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from batch import Completion, Group, Prompt
from config import Call
from rollout.rewards import MISSING, DigitsReward, MathReward, RewardError, Scorer, SoftOverlong, ThinkingReward
from tests.world import run_script

grade = MathReward()


def test_correct_and_wrong_are_the_two_values_of_the_reward():
    reward = MathReward(correct=2.0, wrong=-1.0)
    assert [reward("", "#### 3", "3"), reward("", "#### 4", "3")] == [2.0, -1.0]


def test_a_target_that_is_missing_is_an_error_and_not_a_wrong_answer():
    for reward in (MathReward(), DigitsReward()):
        with pytest.raises(ValueError, match="dataset.target"):
            reward("", "5", " ")


@pytest.mark.parametrize(
    "reward", [MathReward(), ThinkingReward(), DigitsReward(partial=0.5)], ids=lambda r: type(r).__name__
)
@pytest.mark.parametrize(
    "attack",
    [
        '\\boxed{__import__("os").system("touch MARK")}',
        "\\boxed{().__class__.__base__}",
        "\\boxed{9**9**9**9}",
        "9**9**9**9",
        "\\boxed{9^{9^{9^9}}}",
        "\\boxed{1e999999999}",
        "1e999999999",
        "\\boxed{" + "9" * 5000 + "}",
        "#### {target.__class__}",
    ],
)
def test_text_from_a_model_is_never_executed_nor_evaluated(reward, attack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for target in ("9", "1", "9**9**9"):
        assert reward("", attack, target) == 0.0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "piece",
    [
        "9",
        "1,",
        "{",
        "}",
        "\\boxed{",
        "\\frac{",
        "\\frac{1}{",
        "1/",
        "1 ",
        "-",
        "$",
        "####",
        "#### 1 ",
        "answer is ",
        "answer",
        "\\text{",
        " ",
        "\n",
        "*",
        "=",
        "(1=",
        "\\",
        "\\boxed",
        "<think>",
        "</think>",
        "1 1/",
        "$-",
        ".",
        "a ",
        "5 m ",
        "{,}",
        "9**",
    ],
)
def test_the_cost_of_grading_grows_no_faster_than_the_text(piece):
    """Eight times the text must cost far less than the 64 times that one quadratic pattern would."""

    def cost(characters: int, wrap: str) -> float:
        response = wrap.replace("TEXT", piece * (characters // len(piece)))
        begun = time.process_time()
        for reward in (grade, ThinkingReward(), DigitsReward()):
            assert reward("", response, "17") == 0.0
        return time.process_time() - begun

    for wrap in ("TEXT", "\\boxed{TEXT}", "answer is TEXT", "\\boxed{TEXT", "TEXT#### 3", "TEXT 5"):
        short, long = (min(cost(n, wrap) for _ in range(3)) for n in (12_500, 100_000))
        assert long < 24 * max(short, 0.002), wrap


def test_a_thought_counts_once_and_only_with_an_answer_after_it():
    reward = ThinkingReward()
    right = ["2 and 2.</think>\n\\boxed{4}", "<think>2 and 2.</think>\n\\boxed{4}", "\n<think>\nso\n</think>4"]
    wrong = [
        "<think>2 and 2. \\boxed{4}",
        "<think><think>2 and 2.</think>\\boxed{4}",
        "2 and 2",
        "",
        "<think>2</think>",
        "<think>2</think> \n",
        "<think> </think>4",
        "</think>4",
        "<think>a</think>b</think>c",
        "<think>a</think><think>b</think>c",
        "well <think>a</think>b",
    ]
    assert [reward("", r, "4") for r in right + wrong] == [1.0] * len(right) + [0.0] * len(wrong)


def test_partial_credit_is_the_share_of_places_that_agree():
    reward = DigitsReward(partial=0.5)
    answers = {
        "123": 1.0,
        " 123\n": 1.0,
        "124": 0.5 * 2 / 3,
        "321": 0.5 / 3,
        "456": 0.0,
        "12": 0.0,
        "1234": 0.0,
        "": 0.0,
    }
    assert {a: reward("", a, "123") for a in answers} == pytest.approx(answers)
    assert DigitsReward()("", "124", "123") == 0.0
    with pytest.raises(ValueError, match="partial=2"):
        DigitsReward(partial=2)


def group(responses: list[str], target: str = "4") -> Group:
    return Group(Prompt(7, [1], "2 + 2?", target), [Completion(r, [1], [0.0]) for r in responses])


def constant(prompt: str, response: str, target: str, *, value: float = 1.0) -> float:
    return value


def test_rewards_are_weighted_sums_of_unweighted_parts(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "def length(prompt, response, target, *, per_char=1.0):\n    return per_char * len(response)\n"
    )
    scorer = Scorer(
        {
            "math": Call("rollout.rewards.MathReward", {"weight": 2}),
            "length": Call(f"{tmp_path}/mine.py:length", {"weight": -0.5, "per_char": 0.1}),
        }
    )
    given = group(["#### 4", "#### 5"])
    scored = scorer.score(given)
    assert scored.reward_parts == {"math": [1.0, 0.0], "length": pytest.approx([0.6, 0.6])}
    assert scored.rewards == pytest.approx([1.7, -0.3])
    assert given.rewards == [] and scored.completions is given.completions


def test_the_guides_reward_class_works_from_its_file():
    scorer = Scorer({"custom": Call(f"{Path(__file__).parent}/data/guide/custom_math_reward.py:CustomMathReward", {})})
    assert scorer.score(group([r"\boxed{ 4 }", r"\boxed{5}", "4"])).rewards == [1.0, 0.0, 0.0]


REWARDS_THAT_FAIL = """
import math
def none(prompt, response, target): return None if response == "bad" else 1.0
def nan(prompt, response, target): return math.nan if response == "bad" else 1.0
def inf(prompt, response, target): return -math.inf if response == "bad" else 1.0
def word(prompt, response, target): return "1.0" if response == "bad" else 1.0
def crash(prompt, response, target): return {}[response] if response == "bad" else 1.0
"""


@pytest.mark.parametrize(
    "name, saying",
    [
        ("none", "returned None"),
        ("nan", "returned nan"),
        ("inf", "returned -inf"),
        ("word", "returned '1.0'"),
        ("crash", "raised KeyError"),
    ],
)
def test_a_reward_without_a_finite_number_stops_the_run_and_names_itself_and_the_sample(name, saying, tmp_path: Path):
    (tmp_path / "failing.py").write_text(REWARDS_THAT_FAIL)
    scorer = Scorer(
        {
            "fine": Call("tests.test_rewards.constant", {}),
            "shaky": Call(f"{tmp_path}/failing.py:{name}", {"weight": 0.5}),
        }
    )
    with pytest.raises(RewardError, match=rf"rewards\.shaky, prompt 7, sample 2 \(response 'bad'\) {saying}") as caught:
        scorer.score(group(["a", "b", "bad", "c"]))
    assert isinstance(caught.value.__cause__, KeyError) == (name == "crash")
    assert all(r is not None and math.isfinite(r) for r in scorer.score(group(["a", "b"])).rewards)


@pytest.mark.parametrize("weight", [math.nan, math.inf, "1", None, True])
def test_a_weight_is_a_finite_number(weight):
    with pytest.raises(ValueError, match=r"rewards\.math\.weight"):
        Scorer({"math": Call("rollout.rewards.MathReward", {"weight": weight})})


def test_rewards_that_cannot_score_are_refused_before_the_run():
    with pytest.raises(ValueError, match=r"rewards is empty.*rewards: \{math: \{fn: rollout.rewards.MathReward"):
        Scorer({})
    with pytest.raises(
        ValueError, match=r"rewards\.odd\.fn=.*is called as \(prompt, response, target\) but takes \(p\)"
    ):
        Scorer({"odd": Call("os.path.basename", {})})


def lazy(prompt: str, response: str, target: str) -> object:
    return MISSING if response == "?" else 1.0


def test_a_sample_that_a_reward_cannot_judge_has_none_and_the_others_keep_theirs():
    scorer = Scorer({"fine": Call("tests.test_rewards.constant", {}), "lazy": Call("tests.test_rewards.lazy", {"weight": 2.0})})
    scored = scorer.score(group(["a", "?", "b"]))
    assert scored.reward_parts["lazy"] == [1.0, None, 1.0] and scored.rewards[1] is None
    assert scored.rewards[0] == scored.rewards[2] == 3.0


@pytest.mark.parametrize(("tokens", "reward"), [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (21, -1.0), (500, -1.0)])
def test_a_long_answer_loses_linearly_over_the_cache_and_then_all(tokens, reward):
    scorer = Scorer({"length": Call("rollout.rewards.SoftOverlong", {"max_tokens": 20, "cache": 4})})
    completion = Completion("x", [1] * tokens, [0.0] * tokens)
    assert scorer.score(Group(Prompt(0, [1]), [completion])).rewards == [reward]


@pytest.mark.parametrize("cache", [0, 21])
def test_a_cache_that_does_not_fit_is_refused(cache):
    with pytest.raises(ValueError, match=rf"cache={cache} must be above 0 and at most max_tokens=20"):
        SoftOverlong(max_tokens=20, cache=cache)


together = threading.Barrier(2, timeout=60)


def meets(prompt: str, response: str, target: str) -> float:
    together.wait()  # for another answer that is being scored
    return float(len(response))


def group_of(index: int, *responses: str) -> Group:
    return Group(Prompt(index, [1]), [Completion(text, [1], [0.0], {}, "eos") for text in responses])


def test_threads_score_answers_at_once_and_what_they_score_is_the_same():
    groups = [group_of(i, "a" * i, "bb" * i) for i in range(4)]
    length = {"length": Call("tests.test_rewards.letters", {"weight": 2.0}), "custom": Call("rollout.rewards.ThinkingReward", {})}
    alone, pooled = Scorer(length), Scorer(length, threads=3)
    for group in groups:
        pooled.begin(group)
        alone.begin(group)  # nothing: it has no threads
    assert [pooled.score(g) for g in reversed(groups)] == [alone.score(g) for g in reversed(groups)]
    meeting = Scorer({"meets": Call("tests.test_rewards.meets", {})}, threads=2)
    meeting.begin(groups[3])
    assert meeting.score(groups[3]).rewards == [3.0, 6.0]


def letters(prompt: str, response: str, target: str) -> float:
    return float(len(response))


def test_a_reward_that_raises_in_a_thread_names_itself_and_the_sample():
    scorer = Scorer({"odd": Call("tests.test_rewards.refuses", {})}, threads=2)
    scorer.begin(group_of(7, "fine", "odd"))
    with pytest.raises(RewardError, match=r"rewards.odd, prompt 7, sample 1 \(response 'odd'\) raised KeyError: 'odd'"):
        scorer.score(group_of(7, "fine", "odd"))


def refuses(prompt: str, response: str, target: str) -> float:
    if response == "odd":
        raise KeyError(response)
    return 0.0


SAYS_WHEN = """
import threading
from parallel import launch

def grade(prompt, response, target):
    with open("TOLD", "a") as told:
        told.write(f"{launch.phase()} {threading.current_thread() is threading.main_thread()}\\n")
    return float(len(response))
"""


def test_answers_are_scored_while_others_are_sampled_and_the_run_is_the_same(tmp_path, tiny_qwen3, additions):
    numbers, told = {}, {}
    for threads in (0, 2):
        (tmp_path / f"when{threads}.py").write_text(SAYS_WHEN.replace("TOLD", str(tmp_path / f"told{threads}")))
        lines = [f"model={tiny_qwen3}", f"dataset.path={additions}", f"rewards={{long: '{tmp_path}/when{threads}.py:grade'}}"]
        lines += ["training={steps: 2, batch_size: 4, seq_len: 32, dtype: float32}", f"grpo={{n_samples: 2, reward_threads: {threads}}}"]
        lines += ["generator.max_num_seqs=2", "device=cpu", f"output={tmp_path / str(threads)}"]
        run_script(1, "train_grpo.py", *lines)
        told[threads] = Counter((tmp_path / f"told{threads}").read_text().splitlines())
        rows = [json.loads(line) for line in (tmp_path / str(threads) / "metrics.jsonl").read_text().splitlines()]
        numbers[threads] = [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "mem/"))} for row in rows]
    assert told[0] == {"reward True": 16}
    assert told[2].total() == 16 and told[2]["generate False"] > 0 and not any("True" in when for when in told[2])
    assert numbers[0] == numbers[2]

"""Every bench runs end to end on a CPU, says what was agreed in JSON, and has no figures where its ways disagree."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import balance, grpo_vs_trl, head, learn, measure, pack, step, train, trl_peer
from bench.measure import Seconds, compared, differences, exponent, line_through, spread, turns
from bench.shapes import make_tokenizer, texts_of, write_prompts

ROOT = Path(__file__).resolve().parent.parent
MACHINE = {"device", "dtype", "versions"}
MISSING = [name for name in ("trl", "accelerate") if importlib.util.find_spec(name) is None]
with_trl = pytest.mark.skipif(bool(MISSING), reason=f"not installed here: {', '.join(MISSING)} (bench/trl_peer.py says how)")


def started(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, JSON lines and stderr of a Python process; anything else on stdout is an error."""
    environment = measure.outside() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def bench(name: str, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    return started("-m", f"bench.{name}", "--device", "cpu", *arguments)


# One after the other in one process, which is spared seconds of imports; the last one ends it.
SEVERAL = """
import importlib, json, sys
for name, arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = ["--device", "cpu", *arguments]
    importlib.import_module(f"bench.{name}").main()
"""
PACK = ["--shape", "tiny", "--prompt", "8", "--longest", "8", "--rounds", "1"]
TOGETHER = [
    ("pack", [*PACK, "--sequences", "2", "4"]),
    ("train", ["--shape", "tiny", "--peer", "none", "--growing", "1", "2", "--longest", "8", "--prompt", "8", "--rounds", "1"]),
    ("pack", [*PACK, "--sequences", "3", "--tolerance", "1e-12"]),
]
SLOWER = {
    "head": ["--tokens", "32", "64", "--vocabulary", "64", "--rounds", "1"],
    "rollout": ["--prompts", "2", "--samples", "2", "--new", "4", "--rounds", "1", "--lengths", "8", "16"],
    "sync": ["--shapes", "tiny", "--layouts", "1, colocated", "--rounds", "1"],
    "ablation": ["--rounds", "1", "--longest", "8",
                 "--rows", "checkpointing", "shared_prompts", "zero_advantages", "old_logprobs", "reference", "head", "detokenising"],
    "step": ["--peer", "none", "--prompts", "2", "--samples", "2", "--new", "4", "--steps", "2", "--rounds", "1"],
}  # fmt: skip
KEYS = {
    "balance": {"way", "sequences", "cpu_ms", "cpu_ms_ratio", "imbalance", "padding"},
    "head": {"peer", "seconds", "cpu_seconds", "seconds_ratio", "peak_mib"},
    "pack": {"way", "tokens", "seconds", "cpu_seconds", "cpu_seconds_ratio", "token_ratio", "of_tokens", "gradient_error"},
    "train": {"way", "tokens", "tokens_per_s", "tokens_per_cpu_s", "seconds", "peak_mib"},
    "rollout": {"way", "tokens_per_s", "step_ms", "host_ms", "seconds", "seconds_ratio"},
    "sync": {"way", "layout", "bytes", "tensors", "seconds", "cpu_seconds", "gb_per_s"},
    "ablation": {"row", "without", "with", "speedup", "cpu_speedup"},
    "step": {"way", "step_s", "phases_s", "training_s", "unexplained", "response_tokens_per_s", "trained_tokens_per_s"},
}
LAWS = {"balance": 3, "head": 4, "pack": 4, "train": 1, "rollout": 1, "sync": 0, "ablation": 0, "step": 0}


def check_lines(name: str, lines: list[dict[str, Any]]) -> None:
    laws = [line for line in lines if line["case"].startswith("law")]
    assert len(laws) == LAWS[name]
    assert len(lines) > len(laws)
    for line in lines:
        assert line["bench"] == name and line.keys() >= MACHINE
        assert line in laws or line.keys() >= KEYS[name], KEYS[name] - line.keys()


def test_pack_and_train_say_of_each_case_what_was_agreed_and_end_with_1_and_no_figures_where_gradients_disagree():
    code, lines, error = started("-c", SEVERAL, json.dumps(TOGETHER))
    for name in ("pack", "train"):
        check_lines(name, [line for line in lines if line["bench"] == name])
    assert code == 1 and "the outputs disagree, so there are no figures" in error and "packed: the gradient of" in error
    assert {line["sequences"] for line in lines if line.get("way") == "packed" and "sequences" in line} == {2, 4}


def test_head_says_of_each_case_what_was_agreed():
    code, lines, error = bench("head", "--tokens", "64", "--vocabulary", "128", "--rounds", "1", "--peers", "naive", "one_pass")
    assert code == 0, error[-3000:]
    assert [line["peer"] for line in lines] == ["naive", "one_pass"]
    assert all(line.keys() >= KEYS["head"] | MACHINE for line in lines)


def test_balance_says_of_each_case_what_was_agreed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["balance", "--sequences", "64", "128", "--rounds", "1"])
    balance.main()
    check_lines("balance", [json.loads(line) for line in capsys.readouterr().out.splitlines()])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOWER)
def test_a_bench_of_many_processes_says_of_each_case_what_was_agreed(name):
    code, lines, error = bench(name, *SLOWER[name])
    assert code == 0, error[-3000:]
    check_lines(name, lines)


def refusal(action: Callable[[], Any], capsys: pytest.CaptureFixture) -> str:
    """What an action says that must end with exit code 1 and print no figure."""
    with pytest.raises(SystemExit) as ended:
        action()
    printed = capsys.readouterr()
    assert ended.value.code == 1 and printed.out == ""
    return printed.err


def test_a_head_with_a_wrong_gradient_is_refused(monkeypatch, capsys):
    monkeypatch.setitem(head.PEERS, "one_pass", lambda problem: 1.001 * head.naive(problem))
    wrong = head.disagreements(head.Problem(16, 32, torch.device("cpu")))
    assert [line.partition(":")[0] for line in wrong] == ["one_pass"] * 3
    assert "one_pass: weight's gradient differs from naive's by 1.0e-03" in refusal(lambda: measure.refuse(wrong), capsys)


def test_a_deal_that_loses_a_sequence_or_overfills_a_row_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["balance", "--sequences", "32", "--rounds", "1"])
    monkeypatch.setitem(balance.DEALS, "plan_rows", lambda lengths, replicas, row: balance.strided(lengths[1:], replicas, row))
    assert "plan_rows: 31 sequences dealt of 32" in refusal(balance.main, capsys)
    assert balance.wrong([[[0, 1]], [[2]]], [4, 5, 6], 8, "x") == ["x: a row of 9 tokens, and 8 is the most"]


def whole_run(**changed: Any) -> list[dict[str, float]]:
    one = {"tokens": 100, "loss/tokens": 64, "loss/policy": 0.0, "entropy/mean": 5.0, "entropy/nll": 5.0}
    one |= {"time/step": 2.0, "time/train": 1.0, "time/generate": 0.75, "parameters": 10.0, "reward/mean": 0.2}
    return [one | changed, one | changed]


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"tokens": 101}, "ours has tokens [101, 101], and trl has [100, 100]"),
        ({"loss/tokens": 63}, "ours sampled [63, 63] tokens a step, and 64 were asked for"),
        ({"entropy/mean": 5.2}, "ours: entropy/mean is 5.2 and should be 5"),
        ({"entropy/nll": float("nan")}, "ours: entropy/nll is nan and should be 5"),
        ({"loss/policy": 0.2}, "ours: loss/policy is 0.2 and should be 0"),
    ],
)
def test_whole_runs_that_do_not_do_the_same_work_are_refused(changed, said, capsys):
    work = step.Work("m", "d", 4, 4, 4, 2, 8, "float32", "cpu", {})
    options = type("Options", (), {"tolerance": None, "product": 0})
    found = [{"trl": whole_run(), "ours": whole_run(**changed)}]
    assert said in refusal(lambda: step.report("step", "c", work, found, "trl", options), capsys)


def test_whole_runs_that_agree_are_compared_phase_by_phase(capsys):
    work = step.Work("m", "d", 4, 4, 4, 2, 8, "float32", "cpu", {})
    options = type("Options", (), {"tolerance": None, "product": 0})
    slow = whole_run(**{"time/step": 4.0, "time/logp_old": 1.0, "time/train": 2.0})
    step.report("step", "c", work, [{"trl": slow, "ours": whole_run()}], "trl", options)
    trl, ours = map(json.loads, capsys.readouterr().out.splitlines())
    assert trl["step_s_ratio"]["median"] == 1.0 and ours["step_s_ratio"]["median"] == 0.5
    assert (trl["training_s"], ours["training_s"], ours["unexplained"]) == (3.0, 1.0, 0.125)
    assert ours["response_tokens_per_s"] == 32 and ours["trained_tokens_per_s"] == 100


def test_runs_that_start_from_other_policies_have_no_learning_curve(capsys):
    options = type("Options", (), {"tolerance": learn.TOLERANCE, "ways": ["ours", "trl"], "target": 0.1})
    found = {0: {"ours": whole_run(**{"reward/mean": 0.4}), "trl": whole_run()}}
    assert "seed 0, ours: reward/mean is 0.4 and should be 0.2" in refusal(lambda: learn.report(found, options, {}), capsys)


def test_the_exponent_is_the_power_of_a_law():
    sizes = [3, 7, 50, 1000]
    for power in (-1.0, 0.0, 0.5, 1.0, 2.0):
        assert exponent(sizes, [0.37 * n**power for n in sizes]) == pytest.approx(power, abs=1e-9)
    a, b = line_through(sizes, [2.5 + 0.125 * n for n in sizes])
    assert (a, b) == (pytest.approx(2.5), pytest.approx(0.125))


def test_ratios_are_taken_within_a_round_and_ways_take_turns():
    assert turns(["a", "b"], 4) == [["a", "b"], ["b", "a"], ["a", "b"], ["b", "a"]]
    # A machine that is three times slower in the second round changes no ratio.
    times = {"a": [Seconds(1, 1), Seconds(3, 3), Seconds(1, 1)], "b": [Seconds(2, 4), Seconds(6, 12), Seconds(2, 4)]}
    found = compared(times, "b")
    assert found["a"]["seconds_ratio"] == {"median": 0.5, "min": 0.5, "max": 0.5}
    assert found["a"]["cpu_seconds_ratio"] == {"median": 0.25, "min": 0.25, "max": 0.25}
    assert spread([1, 4], [2, 4]) == {"median": 0.75, "min": 0.5, "max": 1.0}


def test_a_difference_is_told_and_nan_is_one():
    assert differences({"x": 1.0}, {"x": 1.005}, {"x": 0.01}, "a") == []
    assert differences({"x": 1.0}, {"x": 1.1}, {"x": 0.01}, "a") == ["a: x is 1 and should be 1.1 (tolerance 0.01)"]
    assert len(differences({"x": float("nan")}, {"x": 1.0}, {"x": 0.01}, "a")) == 1


def test_no_word_of_a_model_with_random_weights_ends_a_sequence(tmp_path):
    tokenizer = make_tokenizer(texts_of(write_prompts(tmp_path / "p.jsonl", 20)), 400)
    assert len(tokenizer) == 401 and tokenizer.eos_token_id == 400
    assert tokenizer.decode(list(range(1, 400))) != ""
    text = "Anna has 7 apples and buys 12."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_packed_gradients_are_those_of_padded_rows():
    episodes = pack.drawn(3, 5, 9, 512)
    plain, ours = pack.models("tiny", torch.float32, torch.device("cpu"))
    wrong, errors = pack.disagreements(pack.Case(episodes, plain, ours, torch.device("cpu")), 1e-5)
    assert wrong == [] and errors.keys() == {"dense", "packed", "shared"}


@pytest.mark.parametrize("script, arguments", [(train, []), (step, []), (learn, []), (grpo_vs_trl, ["smoke"])])
def test_without_trl_a_comparison_with_it_ends_with_one_message(script, arguments, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cpu", *arguments])
    told = refusal(script.main, capsys)
    assert told.startswith("this bench compares with trl==1.16.0") and "pip install" in told and told.count("\n") == 1


@with_trl
@pytest.mark.slow
def test_a_training_step_of_trl_on_the_same_rollouts_has_the_same_gradient():
    small = ["--shape", "tiny", "--rounds", "1", "--prompts", "2", "--longest", "8", "--prompt", "8", "--growing"]
    code, lines, error = bench("train", *small)
    assert code == 0, error[-3000:]
    assert [line["way"] for line in lines] == ["ours", "trl"]
    code, lines, error = bench("train", *small[:-1], "--growing", "--tolerance", '{"grad/norm": 0.0}')
    assert (code, lines) == (1, []) and "grad/norm" in error


@with_trl
@pytest.mark.slow
def test_whole_steps_of_trl_and_ours_are_the_same_work():
    code, lines, error = bench("step", "--prompts", "4", "--samples", "4", "--new", "8", "--steps", "2", "--rounds", "1")
    assert code == 0, error[-3000:]
    assert {line["way"]: line["generation"] for line in lines} == {"ours": "vllm", "trl": "transformers"}


@with_trl
@pytest.mark.slow
def test_both_curves_of_the_demos_task_begin_where_sft_ended():
    small = ["--sft", "20", "--steps", "6", "--prompts", "16", "--seeds", "0", "--micro-batch", "128", "--target", "0.01"]
    code, lines, error = bench("learn", *small)
    assert code == 0, error[-3000:]
    assert [line["step"] for line in lines if line.get("way") == "trl" and "step" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["way"] for line in lines if line["case"].startswith("law")] == ["ours", "trl"]


def test_what_a_peer_needs_is_named_with_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "liger-kernel==0.8.5 (pip install" in refusal(lambda: trl_peer.need("liger_kernel"), capsys)

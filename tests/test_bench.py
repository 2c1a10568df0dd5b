"""Every bench runs end to end on a CPU, says what was agreed in JSON, and has no figures where its ways disagree."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import ablation, balance, grpo_vs_trl, head, learn, measure, pack, rollout, runs, step, train, trl_peer
from bench.measure import Seconds, compared, differences, exponent, line_through, spread, turns
from bench.shapes import make_tokenizer, texts_of, write_prompts
from losses.advantages import group_zscore

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
    code, lines, error = bench("head", "--tokens", "2048", "--vocabulary", "4096", "--rounds", "1", "--peers", "naive", "one_pass")
    assert code == 0, error[-3000:]
    assert [line["peer"] for line in lines] == ["naive", "one_pass"]
    assert lines[0]["peak_mib"] > 64 and lines[1]["peak_ratio"] < 1  # whole logits in fp32 are 32 MiB, and naive has several of them
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
    one = {"tokens": 100, "loss/tokens": 64, "loss/policy": 0.0, "entropy/mean": 5.0, "entropy/nll": 5.0, "grad/norm": 0.1}
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
        ({"grad/norm": 0.3}, "ours: grad/norm is 0.3 and should be 0.1"),  # advantages three times too large
        ({"grad/norm": 0.1 / 3}, "ours: grad/norm is 0.0333333 and should be 0.1"),
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


def test_what_a_share_of_a_product_counts_is_the_tokens_that_were_computed():
    plain, shared = step.figures(whole_run(), 1e4), step.figures(whole_run(**{"perf/tokens_computed": 40}), 1e4)
    assert (plain["mfu_of_product"], shared["mfu_of_product"], shared["computed_share"]) == (0.6, 0.24, 0.4)
    assert plain["trained_tokens_per_s"] == shared["trained_tokens_per_s"] == 100
    seconds = {"seconds": 2.0, "cpu_seconds": 4.0}
    line = train.line_of("ours", seconds, 100, 40, 10, 1e4)
    assert (line["mfu"], line["tokens_per_s"], line["tokens_per_cpu_s"]) == (0.12, 50, 25)
    assert "mfu" not in train.line_of("ours", seconds, 100, 40, 10, None)


def test_a_kept_run_is_made_again_where_work_versions_commit_or_device_are_others(monkeypatch, tmp_path):
    made: list[str] = []

    def run(work: step.Work, folder: Path) -> list[dict[str, float]]:
        made.append(folder.name)
        return whole_run()

    monkeypatch.setitem(step.WAYS, "ours", run)
    work, state = step.Work("m", "d", 4, 4, 4, 2, 8, "float32", "cpu", {}), runs.state_of("cpu")
    assert state.keys() == {"versions", "commit", "device"} and all(state.values())

    def times_made(work: step.Work, **changed: Any) -> int:
        made.clear()
        monkeypatch.setattr(runs, "state_of", lambda device: state | changed)
        assert step.take_turns(work, ["ours"], 1, tmp_path) == [{"ours": whole_run()}]
        return len(made)

    assert [times_made(work), times_made(work)] == [1, 0]
    others: list[dict[str, Any]] = [{"commit": "no git"}, {"device": "another"}, {"versions": {}}]
    for changed in others:
        assert [times_made(work, **changed), times_made(work, **changed)] == [1, 0]
    assert times_made(replace(work, new_tokens=5)) == 1


class TimedTRL:
    """What `Phases` wraps of a GRPOTrainer, each part of it a known number of seconds by a clock of its own."""

    def __init__(self, vllm: bool):
        self.now = 0.0
        if vllm:
            llm = SimpleNamespace(generate=self.part(100))
            inside = [self.part(1), lambda: llm.generate(), self.part(2)]  # wakes, sleeps
            self.vllm_generation = SimpleNamespace(llm=llm, sync_weights=self.part(20), generate=self.part(0, *inside))
            self._generate_single_turn = self.part(0, lambda: self.vllm_generation.sync_weights(), lambda: self.vllm_generation.generate())
        else:
            self._generate_single_turn = self.part(100)
        self._calculate_rewards = self.part(3)
        self._generate_and_score_completions = self.part(
            0.5, lambda: self._generate_single_turn(), lambda: self._calculate_rewards(), self.old_logprobs
        )
        self.get_batch_samples, self.log = self.part(0.25), self.part(7)

    def part(self, seconds: float, *inner: Callable[[], Any]) -> Callable[..., None]:
        def call() -> None:
            self.now += seconds
            for one in inner:
                one()

        return call

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, attention_mask: torch.Tensor, logits_to_keep: int) -> Any:
        self.now += 10
        return (torch.full_like(attention_mask[:, -logits_to_keep:], -2.0, dtype=torch.float32).requires_grad_(),)

    def old_logprobs(self) -> None:
        with torch.no_grad():
            self._get_per_token_logps_and_entropies(None, None, torch.ones(2, 4), 3)

    def step(self) -> None:
        self.get_batch_samples()
        self._generate_and_score_completions()
        for _ in range(2):
            self._get_per_token_logps_and_entropies(None, None, torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]), 3)
        self.now += 1000
        self.log()


@pytest.mark.parametrize("vllm", [True, False])
def test_of_trls_step_sampling_alone_is_generate_and_making_the_batch_is_not_train(vllm, monkeypatch):
    trl, phases = TimedTRL(vllm), trl_peer.Phases()
    monkeypatch.setattr(trl_peer.time, "perf_counter", lambda: trl.now)
    phases.watch(trl)
    phases.begin()
    trl.step()
    found = phases.end()
    of_engine = {"sleep": 3.0, "sync": 20.0} if vllm else {}
    seconds = {"generate": 100.0, "reward": 3.0, "data": 0.75, "logp_old": 10.0, "train": 1020.0, "log": 7.0} | of_engine
    assert {
        name.removeprefix("time/"): value for name, value in found.items() if name.startswith("time/") and name != "time/step"
    } == seconds
    assert found["time/step"] == sum(seconds.values()) and (found["tokens"], found["entropy/nll"]) == (10.0, 2.0)


def test_log_probs_of_trls_passes_stay_on_the_device_until_the_step_has_ended():
    trl, phases = TimedTRL(vllm=False), trl_peer.Phases()
    phases.watch(trl)
    phases.begin()
    with torch.device("meta"):  # of which no number can be read
        trl._get_per_token_logps_and_entropies(None, None, torch.ones(2, 4), 3)


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


def test_a_gradients_norm_is_compared_relative_to_itself_however_small():
    assert differences({"grad/norm": 1.04e-3}, {"grad/norm": 1e-3}, {"grad/norm": 0.05}, "a") == []
    assert len(differences({"grad/norm": 3e-3}, {"grad/norm": 1e-3}, {"grad/norm": 0.05}, "a")) == 1


@pytest.mark.parametrize(
    "script, arguments, said",
    [
        (balance, ["--rounds", "0"], "argument --rounds: 0 is no whole number of 1 or more"),
        (balance, ["--sequences", "64", "x"], "argument --sequences: x is no whole number of 1 or more"),
        (rollout, ["--new", "0"], "argument --new: 0 is no whole number of 1 or more"),
        (
            ablation,
            ["--device", "cpu", "--rows", "head", "graphs", "async"],
            "--rows graphs async: not on the device cpu, which has the rows",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_with_one_message(script, arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        script.main()
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == "" and said in printed.err.splitlines()[-1]


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
    assert all(line["phases_s"]["data"] > 0 and line["phases_s"]["log"] > 0 for line in lines)


def advantages_thrice_too_large(rewards: list[float | None]) -> list[float]:
    return [3 * value for value in group_zscore(rewards)]


@with_trl
@pytest.mark.slow
def test_whole_steps_with_other_advantages_than_trls_are_refused():
    small = ["--prompts", "4", "--samples", "4", "--new", "8", "--steps", "2", "--rounds", "1"]
    code, lines, error = bench("step", *small, "--ours", "grpo.advantage.fn=tests.test_bench.advantages_thrice_too_large")
    assert (code, lines) == (1, []) and error.count("should be") == 1 and "ours: grad/norm is" in error


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

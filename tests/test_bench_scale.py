"""bench.scale: its arithmetic, what it refuses, and real runs of it."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bench import scale
from bench.runs import Work
from bench.scale import Setup, compared, figures, law, report, setups, wrong
from bench.step import TOLERANCE
from metrics import Clock
from tests.test_bench import bench, refusal

WORK = Work("model", "data", 2, 2, 4, 3, 64, "float32", "cpu", {"fn": "bench.runs.vowels"})


def steps_of(setup: Setup, seconds: float = 2.0, **changed: Any) -> list[dict[str, float]]:
    one = {"tokens": 40 * setup.prompts, "loss/tokens": 8 * setup.prompts, "loss/policy": 0.0, "entropy/mean": 5.0, "entropy/nll": 5.0}
    one |= {"grad/norm": 0.1, "time/step": seconds, "time/train": 1.0, "time/generate": 0.5, "perf/bubble": 0.25, "perf/mfu": 0.4}
    first, last = {"time/step": 100.0, "perf/mfu": 0.0}, {"time/step": 0.01}
    return [one | changed | first, one | changed, one | changed | last]


def test_strong_shares_the_prompts_of_the_most_ranks_and_weak_gives_each_its_own():
    assert setups("strong", [1, 2, 4], 3, 0.5) == [Setup(1, 12), Setup(2, 12), Setup(4, 12)]
    assert setups("weak", [1, 2, 4], 3, 0.5) == [Setup(1, 3), Setup(2, 6), Setup(4, 12)]


def test_split_gives_both_sides_a_rank_at_least_and_leaves_out_one_rank():
    found = setups("split", [1, 2, 8], 3, 0.25)
    assert [(s.ranks, s.prompts, s.trainers, s.age) for s in found] == [(2, 6, 1, 0), (2, 6, 1, 1), (8, 24, 2, 0), (8, 24, 2, 1)]
    assert setups("split", [8], 3, 1.0)[0].trainers == 7
    assert "services.generator.num_replicas=6" in found[2].keys() and "grpo.max_policy_age=1" in found[3].keys()
    assert not any(key.startswith("services") for key in Setup(8, 24).keys())


def test_figures_are_of_the_steps_between_the_first_and_the_last():
    line = figures(Setup(4, 8, trainers=1), steps_of(Setup(4, 8)))
    assert (line["step_s"], line["tokens_per_s_rank"], line["response_tokens_per_s_rank"]) == (2.0, 320 / 2 / 4, 64 / 2 / 4)
    assert (line["idle"], line["sampled_to_trained_s"]) == (0.25, 0.5)
    assert line["mfu_training"] == 0.4 and line["mfu"] == pytest.approx(0.4 * 1 / 2 / 4)  # half of the step, a quarter of the ranks
    assert "mfu" not in figures(Setup(1, 8), [{k: v for k, v in s.items() if k != "perf/mfu"} for s in steps_of(Setup(1, 8))])


def test_efficiency_is_against_the_fewest_ranks_and_overlap_against_fresh_rollouts():
    strong, weak = setups("strong", [1, 4], 2, 0.5), setups("weak", [1, 4], 2, 0.5)
    assert compared("strong", strong, {strong[0]: [8.0], strong[1]: [2.5]})[strong[1]]["efficiency"]["median"] == 0.8
    assert compared("weak", weak, {weak[0]: [2.0], weak[1]: [2.5]})[weak[1]]["efficiency"]["median"] == 0.8
    fresh, old = setups("split", [2], 2, 0.5)
    found = compared("split", [fresh, old], {fresh: [3.0, 6.0], old: [2.0, 4.0]})
    assert found == {old: {"overlap": {"median": 1.5, "min": 1.5, "max": 1.5}}}


def test_the_law_finds_factor_and_power():
    a, b = law([1, 2, 8], [3 * n**-0.75 for n in (1, 2, 8)])
    assert (a, b) == (pytest.approx(3), pytest.approx(-0.75))


def test_runs_that_did_the_same_are_compared():
    assert wrong({setup: steps_of(setup) for setup in (Setup(1, 4), Setup(2, 4), Setup(1, 2))}, WORK, TOLERANCE) == []


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"loss/tokens": 31}, "2 ranks, 4 prompts, age 0 sampled [31, 31, 31] tokens a step, and 32 were asked for"),
        ({"tokens": 159}, "2 ranks, 4 prompts, age 0 has tokens [159, 159, 159], and 1 ranks, 4 prompts, age 0 has [160, 160, 160]"),
        ({"grad/norm": 0.2}, "2 ranks, 4 prompts, age 0: grad/norm is 0.2 and should be 0.1"),
        ({"entropy/mean": float("nan")}, "2 ranks, 4 prompts, age 0: entropy/mean is nan"),
    ],
)
def test_runs_that_did_not_do_the_same_have_no_figures(changed, said, capsys):
    found = {Setup(1, 4): steps_of(Setup(1, 4)), Setup(2, 4): steps_of(Setup(2, 4), **changed)}
    assert said in refusal(lambda: report({"strong": list(found)}, [found], WORK, TOLERANCE), capsys)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--steps", "2"], "--steps 2: the first and the last step are dropped, so 3 are needed"),
        (["--kinds", "split", "--ranks", "1"], "--kinds split: needs 2 ranks at least, and --ranks has [1]"),
        (["--ranks", "0"], "argument --ranks: 0 is no whole number of 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_one_message(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        scale.main()
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == "" and said in printed.err.splitlines()[-1]


def test_a_phase_after_all_ranks_have_come_counts_the_time_until_then_as_waiting(monkeypatch):
    clock, now = Clock(), SimpleNamespace(s=0.0)

    def others_come_late(group: Any) -> None:
        now.s += 3

    monkeypatch.setattr("metrics.time.perf_counter", lambda: now.s)
    monkeypatch.setattr("metrics.dist.barrier", others_come_late)
    clock._since = 0.0
    with clock.phase("sync", after=object()):  # type: ignore[arg-type]
        now.s += 1
    assert (clock.seconds["wait"], clock.seconds["sync"]) == (3, 1)


@pytest.mark.slow
def test_all_kinds_run_on_one_two_and_four_ranks(tmp_path):
    small = ["--prompts", "2", "--samples", "2", "--new", "4", "--steps", "3", "--rounds", "1", "--folder", str(tmp_path)]
    code, lines, error = bench("scale", *small, "--ranks", "1", "2", "4")
    assert code == 0, error[-3000:]
    laws = [line for line in lines if line["case"].startswith("law")]
    assert [line["case"] for line in laws] == ["law of strong, age 0", "law of weak, age 0", "law of split, age 0", "law of split, age 1"]
    efficient = [(line["kind"], line["ranks"]) for line in lines if "efficiency" in line]
    assert efficient == [(kind, ranks) for kind in ("strong", "weak") for ranks in (1, 2, 4)]
    assert [line["ranks"] for line in lines if "overlap" in line] == [2, 4]
    assert all(0 <= line["idle"] < 1 for line in lines if line not in laws)
    assert len(list(tmp_path.glob("0-*/done.json"))) == 9  # of 10 setups: the largest of strong and weak are one run
    assert json.loads((tmp_path / "0-4 ranks, 8 prompts, age 0/done.json").read_text())["work"]["ranks"] == 4

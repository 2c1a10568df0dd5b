"""python -m rollout.doctor: it names the place and the side that differ, and calls rounding rounding."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from rollout import doctor
from rollout.doctor import compare, read_prompts
from tests.world import ROOT, run_script

PLACES = [
    "embedding",
    *(
        f"layers.{layer}.{place}"
        for layer in (0, 1)
        for place in (
            "self_attn.input", "self_attn.qkv", "self_attn.heads", "after_attention", "mlp.input", "mlp.gate_up", "mlp.activated",
            "after_mlp",
        )
    ),
    "final_norm",
    "logits",
]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory, checkpoint_of):
    report = tmp_path_factory.mktemp("doctor") / "report.json"
    run_script(1, "tests/doctor_driver.py", checkpoint_of("qwen3"), report)
    return json.loads(report.read_text())


def test_both_sides_are_followed_through_every_place_in_the_order_of_computation(found):
    assert list(found["healthy"]["places"]) == PLACES


def test_equal_weights_begin_equal_and_end_within_rounding(found):
    report = found["healthy"]
    assert report["places"]["embedding"] == {side: {"mean": 0, "max": 0, "relative": 0} for side in ("gap", "engine", "trainer")}
    assert all(sides["gap"]["relative"] < 1e-5 for sides in report["places"].values())
    assert report["suspect"] is None
    for pair, numbers in report["logprobs"].items():
        assert numbers["mismatch/abs_max"] < 1e-5 and numbers["mismatch/k3"] < 1e-9 and numbers["is/ess_token"] > 1 - 1e-9, pair


def test_log_probs_are_compared_as_sampled_as_a_prompt_packed_alone_and_in_more_bits(found):
    pairs = {"trainer - sampled", "prefill - sampled", "trainer_alone - prefill", "trainer - trainer_alone"}
    wider = {"prefill - truth", "trainer - truth"}
    assert set(found["healthy"]["logprobs"]) == pairs | wider | {"sampled - truth"}
    assert set(found["given"]["logprobs"]) == {pair for pair in pairs | wider if "sampled" not in pair}  # nobody sampled given tokens
    blind, alone = found["compiled"], {"trainer - sampled", "trainer - trainer_alone", "trainer - truth", "sampled - truth"}
    assert blind["logprobs"] == {pair: numbers for pair, numbers in found["healthy"]["logprobs"].items() if pair in alone}
    assert blind["places"] == {} and blind["first_difference"] is blind["suspect"] is None
    assert found["given"]["sequences"] == 1 and 0 < found["given"]["response_tokens"] <= 12


def test_the_packed_row_has_a_prompt_once_for_its_two_answers(found):
    report = found["healthy"]
    assert report["sequences"] == 8
    assert report["row_tokens"] == report["response_tokens"] + found["tokens of prompts"]


@pytest.mark.parametrize(("side", "place"), [("engine", "layers.1.after_mlp"), ("trainer", "layers.0.self_attn.qkv")])
def test_a_weight_changed_on_one_side_is_found_at_its_layer_and_on_its_side(found, side, place):
    report = found[side]
    assert report["suspect"] == {"place": place, "side": side}
    healthy = PLACES[: PLACES.index(place)]
    assert all(report["places"][p]["gap"]["relative"] < 1e-5 for p in healthy)
    off, other = ("engine", "trainer") if side == "engine" else ("trainer", "engine")
    assert report["places"][place][off]["relative"] > 1e-3 > 1e-5 > report["places"][place][other]["relative"]
    assert report["logprobs"]["trainer_alone - prefill"]["mismatch/abs_mean"] > 1e-4


def test_examining_changes_nothing(found):
    assert found["healed"] == found["healthy"]


def test_the_text_says_what_the_report_says(found):
    said, report = found["text"], found["healthy"]
    assert f"first difference: {report['first_difference']}" in said and "more than rounding: nowhere" in said
    assert all(f"\n{pair} " in said for pair in report["logprobs"])
    assert all(f"\n{place} " in said for place in ("embedding", "layers.1.after_mlp", "final_norm", "logits"))


def test_a_gap_is_summed_up_as_in_a_runs_log():
    base = np.array([-1.0, -2.0, -3.0])
    gap = np.array([0.1, -0.2, 0.0])
    weights = np.exp(gap)
    found = compare(base + gap, base)
    assert found["mismatch/abs_mean"] == pytest.approx(0.1) and found["mismatch/abs_max"] == pytest.approx(0.2)
    assert found["mismatch/k3"] == pytest.approx((weights - 1 - gap).mean())
    assert found["is/ess_token"] == pytest.approx(weights.sum() ** 2 / (3 * (weights**2).sum()))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["/there/is/none"], "model=/there/is/none cannot be loaded: there is no such folder"),
        (["/there/is/none", "--temperature", "0"], "--temperature=0.0: must be above 0"),
        (["/there/is/none", "--tokens", "0"], "--tokens=0: must be at least 1"),
        (["/there/is/none", "--engine", "{max_num_seqs: 4}"], "--engine={max_num_seqs: 4}: must be a JSON object"),
        (["/there/is/none", "--engine", "[1]"], r"--engine=\[1\]: must be a JSON object"),
        (["TINY", "--prompts", "/there/is/none.jsonl"], "--prompts=/there/is/none.jsonl cannot be read: .*No such file"),
    ],
)
def test_what_cannot_be_examined_is_said_before_an_engine_starts(monkeypatch, tiny_qwen3, arguments, told):
    monkeypatch.setattr(sys, "argv", ["doctor", *(str(tiny_qwen3) if argument == "TINY" else argument for argument in arguments)])
    monkeypatch.setattr(doctor, "Doctor", None)
    with pytest.raises(ValueError, match=told):
        doctor.main()


def test_lines_are_to_be_sampled_from_or_have_their_response(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [3, 4], "response_token_ids": [5]}\n{"prompt_token_ids": [3]}\n')
    prompts, given = read_prompts(path, None, 17)
    assert [p.token_ids for p in prompts] == [[3]] and [g.completions[0].token_ids for g in given] == [[5]]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"text": "7+5="}', "has neither prompt nor prompt_token_ids"),
        ("7+5=", "is not JSON: "),
        ('{"prompt": 7}', "has a prompt without a token"),
        ('{"prompt_token_ids": []}', ": prompt_token_ids must be a list of at least one token id"),
        ('{"prompt_token_ids": [3, 17]}', ": prompt_token_ids has 17, which is no token id of the model: 0 to 16"),
        ('{"prompt_token_ids": [3], "response_token_ids": []}', ": response_token_ids must be a list of at least one token id"),
        ('{"prompt_token_ids": [3], "response_token_ids": [-1]}', ": response_token_ids has -1, which is no token id"),
        ('{"prompt_token_ids": [3], "response_token_ids": ["3"]}', ': response_token_ids has "3", which is no token id'),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line, told):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [3, 4]}\n\n' + line + "\n")
    with pytest.raises(ValueError) as error:
        read_prompts(path, None, 17)
    assert f"--prompts={path}: line 3" in str(error.value) and told in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "qwen3_moe"])
def test_the_command_prints_one_json_object_for_each_family(checkpoint_of, tmp_path, family):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [4, 13, 5, 14]}\n{"prompt_token_ids": [9, 8, 13, 3, 14]}\n')
    options = ["--prompts", prompts, "--tokens", "8", "--device", "cpu", "--json"]
    command = [sys.executable, "-m", "rollout.doctor", checkpoint_of(family), *options]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["dtype"] == "bfloat16" and report["places"]["embedding"]["gap"]["max"] == 0 and report["suspect"] is None
    assert 0 < report["logprobs"]["trainer - sampled"]["mismatch/abs_mean"] < 0.1
    assert all(math.isfinite(number) for numbers in report["logprobs"].values() for number in numbers.values())


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "AVX2", reason="there vLLM's attention rounds more (docs/mismatch.md)")
@pytest.mark.parametrize(("family", "both"), [("llama", []), ("qwen3", ["--fp32-logits"])])
def test_rounding_as_the_sampler_does_closes_most_of_the_gap(checkpoint_of, family, both):
    gaps = []
    for more in (both, [*both, "--match"]):
        command = [sys.executable, "-m", "rollout.doctor", checkpoint_of(family), "--device", "cpu", "--json", *more]
        done = subprocess.run(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        gaps.append(json.loads(done.stdout)["logprobs"]["trainer - sampled"]["mismatch/abs_mean"])
    assert gaps[1] < 0.25 * gaps[0]

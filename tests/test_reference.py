"""A reference that follows the policy: how far it moves, that it is the same on any ranks, and that a resumed run has it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from batch import Episode
from fingerprint import check_perplexity, check_weights
from tests.world import run_script


@pytest.fixture(scope="module")
def run(checkpoint_of, additions, tmp_path_factory):
    """`run(ranks, **keys)`: the folder of four steps with a reference, from which a checkpoint is kept every other step."""
    model, data = checkpoint_of("qwen3"), additions

    def start(ranks: int, output: Path | None = None, script: str | Path = "train_grpo.py", **keys: Any) -> Path:
        folder = tmp_path_factory.mktemp("run") if output is None else output.parent
        output = folder / "run" if output is None else output
        training = {"steps": 4, "batch_size": 4, "seq_len": 32, "dtype": "float32", "learning_rate": 1e-3, "ref_update_interval": 2}
        cfg: dict[str, Any] = {
            "model": str(model), "dataset": {"path": str(data)}, "training": training | keys.pop("training", {}),
            "grpo": {"n_samples": 4, "max_new_tokens": 8, "beta": 0.1}, "rewards": {"digits": {"fn": "tests.tiny.share_of_digits"}},
            "checkpoint": {"every": 2, "keep": 0, "export_hf": True}, "metrics": {"tensorboard": False}, "output": str(output),
        }  # fmt: skip
        (folder / "asked.yaml").write_text(json.dumps(cfg | keys))
        run_script(ranks, script, str(folder / "asked.yaml"))
        return output

    return start


def steps(output: Path) -> list[dict[str, float]]:
    return [line for line in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()) if "grad/norm" in line]


def tensors(folder: Path) -> dict[str, Tensor]:
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def policy(checkpoint: Path) -> dict[str, Tensor]:
    return {n.removeprefix("weight/"): t for n, t in tensors(checkpoint).items() if n.startswith("weight/")}


@pytest.fixture(scope="module")
def moved(run):
    return run(1)


def test_a_reference_that_has_moved_all_the_way_is_the_policy(moved):
    lines = steps(moved)
    kl = [line["kl/ref_k3"] for line in lines]
    assert kl[0] <= 1e-10 and kl[2] <= 1e-10  # before the first step, and after the move that follows the second
    assert kl[1] > 1e-8 and kl[3] > 1e-8
    reference = tensors(moved / "checkpoints/step_2/reference")
    assert reference.keys() == policy(moved / "checkpoints/step_2").keys()
    assert all(torch.equal(reference[n], t) for n, t in policy(moved / "checkpoints/step_2").items())


def test_a_run_keeps_the_objective_it_printed_with_its_numbers(moved):
    text = (moved / "objective.txt").read_text()
    assert "GRPOLoss, minimised" in text and "clip(r, 0.8, 1.28)" in text and "0.1 k3" in text and "a prompt's 4 samples" in text
    assert "\nnote: grpo.beta=0.1 with k3" in text and "warning:" not in text


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "keys"), [
    (2, {"parallelism": {"tensor_parallel_degree": 2}}),
    (2, {}),
    (4, {"services": {"trainer": {"procs": 2}, "ref_model": {"procs": 1}, "generator": {"procs": 1}}}),
    (3, {"services": {"trainer": {"procs": 2}, "ref_model": {"procs": 1, "with_gpus": False}, "generator": {"procs": 1}}}),
], ids=["TP 2", "FSDP 2", "trainer 2, reference 1, generator 1", "reference on the CPU"])  # fmt: skip
def test_the_reference_moves_alike_wherever_it_lives(ranks, keys, run, moved):
    for here, there in zip(steps(run(ranks, **keys)), steps(moved), strict=True):
        assert here["kl/ref_k3"] == pytest.approx(there["kl/ref_k3"], rel=1e-3, abs=1e-8)
        assert here["grad/norm"] == pytest.approx(there["grad/norm"], rel=1e-4)


@pytest.mark.slow
def test_a_reference_that_moves_in_part_is_the_mean_it_says(run, checkpoint_of):
    output = run(1, training={"ref_update_mix": 0.25})
    first, then = load_file(checkpoint_of("qwen3") / "model.safetensors"), policy(output / "checkpoints/step_2")
    reference = tensors(output / "checkpoints/step_2/reference")
    for name, tensor in reference.items():
        torch.testing.assert_close(tensor, 0.75 * first[name].float() + 0.25 * then[name], rtol=1e-6, atol=1e-7)


def test_a_resumed_run_has_the_reference_where_it_had_moved_to(run, moved, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(moved / "checkpoints/step_2", output / "checkpoints/step_2")
    shutil.copy(moved / "config.yaml", output)
    run(1, output)
    for here, there in zip(steps(output), steps(moved)[2:], strict=True):
        assert {n: v for n, v in here.items() if n.startswith(("kl/", "loss/", "grad/"))} == {
            n: v for n, v in there.items() if n.startswith(("kl/", "loss/", "grad/"))
        }


def test_a_reference_that_should_move_must_exist(run):
    with pytest.raises(AssertionError, match="training.ref_update_interval=2, and there is no reference to move"):
        run(1, grpo={"n_samples": 4, "max_new_tokens": 8})


@pytest.fixture
def driver(checkpoint_of, tmp_path):
    """`driver("first_step", ranks, "float32", services, own, **degrees)`: what that run of tests/reference_driver.py reported.

    own: of the reference's plan, where it differs from what the degrees say.
    """

    def start(run: str, ranks: int, dtype: str, services: Any = None, own: Any = None, **degrees: int) -> Any:
        spec = {"own": own or {}, "run": run, "model": str(checkpoint_of("qwen3")), "dtype": dtype, "services": services}
        spec["parallelism"] = {f"{name}_degree": degree for name, degree in degrees.items()}
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        run_script(ranks, "tests/reference_driver.py", tmp_path / "spec.json", tmp_path / "report.json")
        return json.loads((tmp_path / "report.json").read_text())

    return start


TP2, FSDP2, HSDP = {"tensor_parallel": 2}, {"data_parallel_shard": 2}, {"data_parallel_shard": 2, "data_parallel_replicate": 2}
BOTH = {"tensor_parallel": 2, "data_parallel_shard": 2}
CP2, PP2 = {"context_parallel": 2}, {"pipeline_parallel": 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("ranks", "degrees"), [
    (1, {}),
    pytest.param(2, FSDP2, marks=pytest.mark.slow),
    pytest.param(2, TP2, marks=pytest.mark.slow),
    pytest.param(4, BOTH, marks=pytest.mark.slow),
    pytest.param(4, HSDP, marks=pytest.mark.slow),
    pytest.param(2, CP2, marks=pytest.mark.slow),
    pytest.param(2, PP2, marks=pytest.mark.slow),
], ids=["1", "FSDP 2", "TP 2", "FSDP 2 x TP 2", "HSDP 2 x 2", "CP 2", "PP 2"])  # fmt: skip
def test_kl_at_step_0_is_exactly_0_with_the_policys_own_layout_and_dtype(ranks, degrees, dtype, driver):
    assert driver("first_step", ranks, dtype, **degrees) == {"kl": 0.0, "apart": 0.0, "sharded": True}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "services", "degrees", "own"), [
    (4, {"trainer": {"procs": 2}, "ref_model": {"procs": 1}}, {}, {}),
    (5, {"trainer": {"procs": 2}, "ref_model": {"procs": 2}}, TP2, {}),
    (5, {"trainer": {"procs": 2}, "ref_model": {"procs": 2}}, TP2, {"ranks": [2], "tp": 1}),
    (3, {"trainer": {"procs": 2}, "ref_model": {"with_gpus": False}}, {}, {}),
], ids=["ranks of its own", "ranks of its own, TP 2", "one rank, trainer TP 2", "on the CPU"])  # fmt: skip
def test_kl_at_step_0_is_below_1e5_in_float32_wherever_the_reference_lives(ranks, services, degrees, own, driver):
    report = driver("first_step", ranks, "float32", services, own, **degrees)
    assert 0 <= report["kl"] < 1e-5 and report["apart"] < 1e-5 and report["sharded"]


in_layouts = pytest.mark.parametrize(("ranks", "dtype", "degrees"), [
    (1, "bfloat16", {}),
    pytest.param(2, "float32", FSDP2, marks=pytest.mark.slow),
    pytest.param(4, "bfloat16", BOTH, marks=pytest.mark.slow),
    pytest.param(2, "bfloat16", PP2, marks=pytest.mark.slow),
], ids=["1", "FSDP 2", "FSDP 2 x TP 2", "PP 2"])  # fmt: skip


@in_layouts
def test_a_parked_reference_scores_and_moves_as_one_that_stays_and_has_no_bytes_while_idle(ranks, dtype, degrees, driver):
    report = driver("parked", ranks, dtype, **degrees)
    assert all(stays == idle for stays, idle in report["scores"])
    assert report["scores"][0] != report["scores"][1] != report["scores"][2]  # it did move
    assert set(report["bytes"]) == {0} and report["live"] == 0
    assert report["resident_bytes"] == report["staying_bytes"] > 0 and report["same_weights"]


@in_layouts
def test_a_weight_that_is_not_the_checkpoints_is_named_on_every_rank_that_has_a_part_of_it(ranks, dtype, degrees, driver):
    report = driver("damaged", ranks, dtype, **degrees)
    assert report["seen"] == [True] * ranks and report["weights"] > 10


def test_the_log_says_who_was_resident_at_each_border(moved):
    first, second = steps(moved)[:2]
    borders = {name.split("/")[1] for name in second if name.startswith("mem/")}
    assert borders == {"generate", "score", "train", "sync"}
    weights = second["mem/train/policy_gib"]
    assert all(second[f"mem/{border}/policy_gib"] == second[f"mem/{border}/reference_gib"] == weights > 0 for border in borders)
    assert all(step[f"mem/{border}/gradients_gib"] == 0 for step in (first, second) for border in borders)
    assert first["mem/train/moments_gib"] == 0 and first["mem/sync/moments_gib"] == second["mem/train/moments_gib"] == 2 * weights
    assert all(second[f"mem/{border}/engine_kv_cache_gib"] > 0 < second[f"mem/{border}/engine_weights_gib"] for border in borders)


def test_a_reference_that_differs_from_what_the_sampler_computes_ends_the_run_and_one_within_rounding_does_not():
    draw = np.random.default_rng(0)
    sampled = [draw.uniform(-3, -0.1, n).astype(np.float32) for n in (5, 9)]
    episodes = [Episode(np.zeros(n + 2, np.int64), 2, np.ones(n, np.float32), np.zeros(n, np.float32), values)
                for n, values in zip((5, 9), sampled, strict=True)]  # fmt: skip
    near = {i: values + draw.normal(0, 0.02, len(values)).astype(np.float32) for i, values in enumerate(sampled)}
    random = {i: np.full(len(values), -np.log(151936), np.float32) for i, values in enumerate(sampled)}
    check_perplexity(near, episodes, "m")
    with pytest.raises(RuntimeError, match=r"what model=m itself sampled a perplexity of 1.519e\+05, and the sampler gave it \d.*float32"):
        check_perplexity(random, episodes, "m")
    with pytest.raises(RuntimeError):
        check_perplexity({0: np.full(5, np.nan, np.float32)}, episodes, "m")
    later = [replace(e, policy_version=1) for e in episodes]
    check_perplexity(random, later, "m")  # what another policy sampled says nothing


def test_weights_that_were_drawn_by_chance_after_loading_end_the_run_at_its_first_scores(run, additions):
    """Past the comparison with the files: the reference of the first step is another model."""
    script = Path(__file__).parent / "data" / "random_reference.py"
    with pytest.raises(AssertionError, match="the reference gives what model=.* itself sampled a perplexity of"):
        run(1, script=script)


SHARDED = {"max_shard_size": "40KB"}


@pytest.mark.parametrize("options", [SHARDED, SHARDED | {"dtype": torch.bfloat16}], ids=["fp32", "bf16"])
def test_a_checkpoint_in_several_files_is_compared_with_all_of_them(options, checkpoint_of, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of("qwen3", tied=False), dtype=options.get("dtype", torch.float32))
    model.save_pretrained(tmp_path, max_shard_size=options["max_shard_size"])
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    shards = {name: p.detach().float() for name, p in model.named_parameters()}
    loaded = {name: p.dtype for name, p in model.named_parameters()}

    def fresh() -> dict[str, Tensor]:
        raise AssertionError("every name is in the files")

    check_weights(shards, loaded, str(tmp_path), None, fresh)
    name = "model.layers.1.mlp.down_proj.weight"
    shards[name] = torch.randn_like(shards[name])
    with pytest.raises(RuntimeError, match=rf"^1 of {len(shards)} weights are not those of model=.*{name}"):
        check_weights(shards, loaded, str(tmp_path), None, fresh)


def test_weights_that_the_files_call_otherwise_are_compared_with_another_load(checkpoint_of):
    folder = str(checkpoint_of("qwen3"))
    whole = {f"renamed.{name}": t for name, t in load_file(f"{folder}/model.safetensors").items()}
    loaded = {name: t.dtype for name, t in whole.items()}
    check_weights(whole, loaded, folder, None, lambda: {name: t.clone() for name, t in whole.items()})
    with pytest.raises(RuntimeError, match="weights are not those of"):
        check_weights(whole, loaded, folder, None, lambda: {name: t + 1 for name, t in whole.items()})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_with_a_parked_reference_is_the_run_without_resumed_or_not(ranks, run, moved, tmp_path):
    script = Path(__file__).parent / "data" / "parked_reference.py"
    whole = run(ranks, script=script)
    output = tmp_path / "run"
    shutil.copytree(whole / "checkpoints/step_2", output / "checkpoints/step_2")
    shutil.copy(whole / "config.yaml", output)
    resumed = run(ranks, output, script=script)
    for before, here in ((0, whole), (2, resumed)):
        for step, other in zip(steps(here), steps(moved)[before:], strict=True):
            assert step["kl/ref_k3"] == pytest.approx(other["kl/ref_k3"], rel=1e-3, abs=1e-8)
            assert {step[f"mem/{border}/reference_gib"] for border in ("generate", "score", "train", "sync")} == {0}
            assert step["mem/train/policy_gib"] > 0
    reference = tensors(whole / "checkpoints/step_2/reference")
    assert all(torch.equal(reference[n], t) for n, t in policy(whole / "checkpoints/step_2").items())

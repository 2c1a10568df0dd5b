"""A run that is killed and started again is the run that was not killed: bit for bit, and on other ranks up to rounding."""

import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint import Saved, whole
from tests.world import ROOT, run_script

STEPS, HELD_OUT = 10, 8
SETTINGS: dict[str, Any] = {
    "training": {
        "steps": STEPS, "batch_size": 4, "seq_len": 32, "dtype": "float32", "learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 3,
    },
    "grpo": {"n_samples": 4, "max_new_tokens": 8, "temperature": 0.8},
    "checkpoint": {"every": 5, "keep": 0},
    "metrics": {"tensorboard": False, "samples_every": 1},
}  # fmt: skip
PER_ROLLOUT = 4 * 4  # samples
ROUNDING = 1e-5
APART = {"services": {"trainer": {"procs": 1}, "generator": {"procs": 1}}}

Checkpoints = Callable[..., Path]


@dataclass
class Run:
    output: Path
    ranks: int
    log: str = ""

    def metrics(self) -> list[dict[str, Any]]:
        """Of each line what is no time."""
        lines = [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/", "mem/"))} for line in lines]

    def steps(self, first: int = 1) -> list[dict[str, Any]]:
        """The lines of training steps from `first` on."""
        return [line for line in self.metrics() if "grad/norm" in line and line["step"] >= first]

    def path(self, rank: int) -> Path:
        """Of what the rank scored."""
        return self.output / f"scored/rank_{rank}.jsonl"

    def scored(self, rank: int) -> list[tuple[str, str]]:
        return [tuple(json.loads(line)) for line in self.path(rank).read_text().splitlines()]

    def tables(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted((self.output / "samples").iterdir())}

    def at(self, step: int) -> Path:
        return self.output / f"checkpoints/step_{step}"


def state(folder: Path) -> dict[str, Tensor]:
    """Weights and moments of a checkpoint."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def rest(folder: Path) -> Saved:
    """All but weights and moments."""
    return pickle.loads((folder / "run.pkl").read_bytes())


def assert_same_state(a: Path, b: Path) -> None:
    ours, theirs = state(a), state(b)
    assert ours.keys() == theirs.keys() and len(ours) > 50
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    ours_rest, theirs_rest = rest(a), rest(b)
    plain = [(r.step, r.updates, r.position, r.cut, r.waiting) for r in (ours_rest, theirs_rest)]
    assert plain[0] == plain[1]


def assert_close_state(a: Path, b: Path) -> None:
    ours, theirs = state(a), state(b)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert float((ours[name] - theirs[name]).norm()) <= ROUNDING * float(theirs[name].norm()), name


def assert_close_metrics(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            near = 1e-4 if name.startswith("mismatch/") else 1e-6  # gaps between vLLM and the policy are rounding noise themselves
            assert a[name] == pytest.approx(b[name], rel=ROUNDING, abs=near), f"step {a['step']}, {name}"


class Factory:
    """Starts train_grpo.py and train_sft.py on the session's model and problems."""

    def __init__(self, folder: Path, checkpoint_of: Checkpoints, train: Path, test: Path):
        self.folder, self.checkpoint_of, self.train, self.test = folder, checkpoint_of, train, test

    def config(self, name: str, **sections: Any) -> str:
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"model": str(self.checkpoint_of("qwen3")), "dataset": {"path": str(self.train)}} | sections))
        return str(path)

    def _grpo(self, name: str, recipe: dict[str, Any]) -> str:
        sections = {key: SETTINGS.get(key, {}) | recipe.get(key, {}) for key in SETTINGS.keys() | recipe.keys()}
        held_out = {"dataset": {"path": str(self.test)}, "max_prompts": HELD_OUT}
        return self.config(name, **sections, eval=held_out)

    def _arguments(self, output: Path) -> list[str]:
        recording = {"fn": f"{ROOT}/tests/recording.py:Recording", "folder": str(output / "scored")}
        return [f"output={output}", f"rewards={{recording: {json.dumps(recording)}}}"]

    def grpo(self, name: str, ranks: int, recipe: dict[str, Any], *overrides: str) -> Run:
        output = self.folder / name
        done = run_script(ranks, "train_grpo.py", self._grpo(name, recipe), *self._arguments(output), *overrides)
        return Run(output, ranks, done.stdout)

    def grpo_killed(self, name: str, ranks: int, recipe: dict[str, Any], samplers: int, rollouts: float) -> Run:
        """The run, killed with all its processes while it scores: `samplers` ranks, after `rollouts` rollouts."""
        output = self.folder / name
        hang_after = (HELD_OUT + int(PER_ROLLOUT * rollouts)) // samplers
        deadline = time.monotonic() + 300
        with ThreadPoolExecutor() as pool:
            arguments = [self._grpo(name, recipe), *self._arguments(output)]
            hangs = {"RECORDING_HANGS_AFTER": str(hang_after)}
            job = pool.submit(run_script, ranks, "train_grpo.py", *arguments, env=hangs, check=False)
            while len(list(output.glob("scored/*.hangs"))) < samplers and not job.done() and time.monotonic() < deadline:
                time.sleep(0.2)
            pids = {int(pid) for path in output.glob("scored/*.pids") for pid in path.read_text().split()}
            for pid in () if job.done() else pids:
                os.kill(pid, signal.SIGKILL)
            done = job.result()
        assert done.returncode == -signal.SIGKILL and len(pids) == ranks + 1, done.stdout
        return Run(output, ranks, done.stdout)

    def sft(self, output: Path, *overrides: str) -> Run:
        """Some of the rows are longer than seq_len."""
        training = {"steps": 6, "batch_size": 8, "seq_len": 9, "dtype": "float32", "learning_rate": 1e-3}
        path = self.config("sft", model=str(self.checkpoint_of("llama", tied=False)), training=training, metrics={"tensorboard": False})
        done = run_script(2, "train_sft.py", path, f"output={output}", *overrides)
        return Run(output, 2, done.stdout)


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, checkpoint_of: Checkpoints, additions: Path, held_out_additions: Path
) -> Factory:
    return Factory(tmp_path_factory.mktemp("runs"), checkpoint_of, additions, held_out_additions)


# Two ranks that do everything, with rollouts a version old: checkpoints hold one that waits to be trained on.

STALE = {"grpo": {"max_policy_age": 1}}


@pytest.fixture(scope="module")
def straight(start: Factory) -> Run:
    return start.grpo("straight", 2, STALE, "checkpoint.export_hf=true")


@pytest.fixture(scope="module")
def killed(start: Factory) -> Run:
    """Killed in step 7, then started again with the same command; beside its last whole checkpoint lies one that is not."""
    run = start.grpo_killed("killed", 2, STALE, samplers=2, rollouts=7.5)
    assert [path.name for path in whole(run.output)] == ["step_5"]
    assert run.metrics()[-1]["step"] == 6
    shutil.copytree(run.at(5), run.at(7), ignore=shutil.ignore_patterns("WHOLE"))
    return start.grpo("killed", 2, STALE)


def test_a_killed_run_goes_on_from_the_last_whole_checkpoint(killed: Run) -> None:
    assert f"resuming from {killed.at(5)}" in killed.log


def test_weights_moments_and_data_after_a_kill_are_those_of_the_straight_run(killed: Run, straight: Run) -> None:
    assert_same_state(killed.at(10), straight.at(10))


def test_metrics_after_a_kill_are_those_of_the_straight_run_with_one_line_a_step(killed: Run, straight: Run) -> None:
    assert killed.metrics() == straight.metrics()
    assert [line["step"] for line in killed.steps()] == list(range(1, STEPS + 1))
    assert len({line["grad/norm"] for line in killed.steps()}) == STEPS, "no step of the run trained on anything"


def test_tokens_sampled_after_a_kill_are_those_of_the_straight_run(killed: Run, straight: Run) -> None:
    assert killed.tables() == straight.tables()
    for rank in range(2):
        whole_run, both = straight.scored(rank), killed.scored(rank)
        before, after = HELD_OUT // 2 + 7 * PER_ROLLOUT // 2 + PER_ROLLOUT // 4, 4 * PER_ROLLOUT // 2 + HELD_OUT // 2
        assert len(both) == before + after, "the rollout that the checkpoint held was sampled again, or one was lost"
        assert both == whole_run[:before] + whole_run[-after:]


def test_a_checkpoint_holds_what_was_sampled_and_not_yet_trained_on(straight: Run) -> None:
    saved = rest(straight.at(5))
    assert (saved.step, saved.updates, saved.position) == (5, 5, 6 * 4)
    assert [len(rollout) for rollout in saved.waiting] == [4]
    assert {c.policy_version for group in saved.waiting[0] for c in group.completions} == {4}
    assert rest(straight.at(10)).waiting == []


def check_resumed(resumed: Run, original: Run) -> None:
    assert f"resuming from {original.at(5)}" in resumed.log
    assert_close_metrics(resumed.steps(), original.steps(first=6))
    samples = [sorted(s for rank in range(run.ranks) if run.path(rank).exists() for s in run.scored(rank)) for run in (resumed, original)]
    assert set(samples[0]) <= set(samples[1]) and len(samples[0]) == 4 * PER_ROLLOUT + HELD_OUT
    assert {n: t for n, t in original.tables().items() if n in resumed.tables()} == resumed.tables()
    assert_close_state(resumed.at(10), original.at(10))


def test_another_number_of_ranks_goes_on_from_a_named_checkpoint(start: Factory, straight: Run) -> None:
    check_resumed(start.grpo("on_one_rank", 1, STALE, f"resume={straight.at(5)}"), straight)


def test_the_exported_model_is_the_last_policy(straight: Run) -> None:
    weights = {n.removeprefix("weight/"): t for n, t in state(straight.at(10)).items() if n.startswith("weight/")}
    model = AutoModelForCausalLM.from_pretrained(straight.output / "hf", dtype="auto")
    exported = dict(model.named_parameters())
    assert exported.keys() == weights.keys()
    assert [n for n in weights if not torch.equal(weights[n], exported[n])] == []


def test_vllm_loads_the_exported_model_and_answers_like_the_runs_last_engine(straight: Run, tmp_path: Path) -> None:
    answers = [pair for rank in range(2) for pair in straight.scored(rank)[-HELD_OUT // 2 :]]
    tokenizer = AutoTokenizer.from_pretrained(straight.output / "hf")
    prompts = [tokenizer(prompt).input_ids for prompt, _ in answers]
    case = {"name": "hf", "run": "greedy", "model": str(straight.output / "hf"), "prompts": prompts, "max_new_tokens": 8}
    (tmp_path / "spec.json").write_text(json.dumps({"services": {}, "parallelism": {}, "colocate": True, "ranks": None, "cases": [case]}))
    run_script(1, ROOT / "tests/sync_driver.py", str(tmp_path / "spec.json"), str(tmp_path / "report.json"))
    (tokens,) = json.loads((tmp_path / "report.json").read_text())["hf"]
    assert [tokenizer.decode(t, skip_special_tokens=True) for t in tokens] == [response for _, response in answers]


@pytest.mark.slow
def test_ranks_with_one_role_each_are_resumed_on_ranks_that_do_everything(start: Factory, straight: Run) -> None:
    apart = start.grpo("apart", 2, STALE | APART)
    check_resumed(start.grpo("together", 2, STALE, f"resume={apart.at(5)}"), apart)


@pytest.mark.slow
@pytest.mark.parametrize("age", [0, 1])
def test_with_syncs_every_other_step_checkpoints_fall_on_them_and_a_killed_run_is_the_straight_one(age: int, start: Factory) -> None:
    recipe = {"grpo": {"max_policy_age": age}, "training": {"sync_interval": 2, "updates_per_rollout": 2, "batch_size": 2}}
    straight = start.grpo(f"every_other_{age}", 2, recipe)
    killed = start.grpo_killed(f"every_other_{age}_killed", 2, recipe, samplers=2, rollouts=7.5 + age)
    assert [path.name for path in whole(killed.output)] == ["step_6"]
    killed = start.grpo(f"every_other_{age}_killed", 2, recipe)
    assert f"resuming from {killed.at(6)}" in killed.log
    assert_same_state(killed.at(10), straight.at(10))
    assert (killed.metrics(), killed.tables()) == (straight.metrics(), straight.tables())


@pytest.mark.slow
def test_ranks_with_one_role_each_that_are_killed_give_the_straight_run(start: Factory) -> None:
    straight = start.grpo("apart_straight", 2, STALE | APART)
    start.grpo_killed("apart_killed", 2, STALE | APART, samplers=1, rollouts=7.5)
    killed = start.grpo("apart_killed", 2, STALE | APART)
    assert_same_state(killed.at(10), straight.at(10))
    assert (killed.metrics(), killed.scored(1)[-4 * PER_ROLLOUT :]) == (straight.metrics(), straight.scored(1)[-4 * PER_ROLLOUT :])


# Supervised fine-tuning: no engine, so cheap enough for what does not concern one.


@pytest.fixture(scope="module")
def sft(start: Factory) -> Run:
    return start.sft(start.folder / "sft", "checkpoint.every=1", "checkpoint.keep=0", "checkpoint.export_hf=true")


@pytest.fixture(scope="module")
def sft_resumed(start: Factory, sft: Run) -> Run:
    return start.sft(start.folder / "sft_resumed", f"resume={sft.at(3)}", "checkpoint.every=1", "checkpoint.keep=2")


def test_six_steps_of_fine_tuning_equal_three_and_three(sft: Run, sft_resumed: Run) -> None:
    assert sft_resumed.metrics() == (later := [line for line in sft.metrics() if line["step"] > 3])
    assert later[-1]["data/truncated"] > later[0]["data/truncated"] > 0
    assert_same_state(sft_resumed.at(6), sft.at(6))


def test_every_ranks_random_numbers_go_on_where_the_checkpoint_left_them(sft: Run, sft_resumed: Run) -> None:
    """Nothing of ours draws from them, but a loss may."""
    ours, theirs = rest(sft_resumed.at(5)).random, rest(sft.at(3)).random
    assert len(ours) == 2
    for (python, numpy, cpu, _), (python_saved, numpy_saved, cpu_saved, _) in zip(ours, theirs, strict=True):
        assert python == python_saved and np.array_equal(numpy[1], numpy_saved[1]) and torch.equal(cpu, cpu_saved)


def test_all_checkpoints_are_kept_or_the_newest(sft: Run, sft_resumed: Run) -> None:
    assert [path.name for path in whole(sft.output)] == [f"step_{step}" for step in range(1, 7)]
    assert sorted(path.name for path in (sft_resumed.output / "checkpoints").iterdir()) == ["step_5", "step_6"]


def test_an_untied_model_is_exported_with_its_head(sft: Run) -> None:
    weights = state(sft.at(6))
    exported = dict(AutoModelForCausalLM.from_pretrained(sft.output / "hf", dtype="auto").named_parameters())
    assert torch.equal(exported["lm_head.weight"], weights["weight/lm_head.weight"])
    assert not torch.equal(exported["lm_head.weight"], exported["model.embed_tokens.weight"])


def test_never_starts_again_and_leaves_nothing_of_the_run_before(start: Factory, sft: Run, tmp_path: Path) -> None:
    """Neither its metrics nor its checkpoints: an automatic resume would go on from the newest of those."""
    again = tmp_path / "again"
    shutil.copytree(sft.output, again)
    run = start.sft(again, "resume=never", "training.steps=2", "checkpoint.every=1", "checkpoint.keep=2")
    assert "resuming" not in run.log
    assert run.metrics() == sft.metrics()[:2]
    assert [path.name for path in whole(again)] == ["step_1", "step_2"]
    assert_same_state(run.at(2), sft.at(2))


def test_a_named_folder_that_is_no_whole_checkpoint_is_refused(start: Factory, sft: Run, tmp_path: Path) -> None:
    shutil.copytree(sft.at(3), tmp_path / "step_3", ignore=shutil.ignore_patterns("WHOLE"))
    with pytest.raises(AssertionError, match="is not a whole checkpoint"):
        start.sft(tmp_path / "out", f"resume={tmp_path}/step_3")

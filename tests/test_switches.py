"""Each switch of training changes what it says, and not the result. What only a GPU can show is in tests/gpu/test_switches.py."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from batch import Episode, to_batch
from losses import GRPOLoss
from model import Model, ModelSource
from parallel.memory import training_bytes
from parallel.plans import reshard
from parallel.switches import MOMENTS, Switches, blank_state_on_host, step_by_parts, whole_step
from startup import GRPOConfig, check_repeatable
from tests.steps import TEMPERATURE, gradient, place, some_episodes, trainer_of  # noqa: F401 - two are fixtures
from tests.switch_driver import weights_under
from tests.world import run_script
from trainer import Trainer, TrainingConfig

CHECKPOINTING: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
WIDTHS: dict[str, Any] = {"hidden": 64, "intermediate": 192, "heads": 256, "layers": 2}  # of the tiny Qwen3


def forward(trainer: Trainer, episodes: list[Episode]) -> torch.Tensor:
    loss = trainer.objective.of_step(episodes, [episodes], trainer.model)
    return trainer.model.local(to_batch(episodes, trainer.model.device), loss.by_chunks(episodes))[0]


def costs(trainer: Trainer, episodes: list[Episode]) -> tuple[int, int]:
    """Bytes that a forward pass leaves behind beside the weights, and floating-point operations of forward and backward pass."""
    forward(trainer, episodes).backward()  # makes what is made once: gradients
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        share = forward(trainer, episodes)
        reshard(trainer.model.local)
    share.backward()
    with FlopCounterMode(display=False) as operations:
        forward(trainer, episodes).backward()
    return sum(event.self_cpu_memory_usage for event in memory.key_averages()), operations.get_total_flops()


def assert_same_bits(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def test_checkpointing_changes_bytes_and_operations_as_it_says_and_no_bit_of_a_gradient(trainer_of):  # noqa: F811
    episodes = some_episodes()
    made = {kind: trainer_of(GRPOLoss(beta=0.1), activation_checkpointing=kind) for kind in CHECKPOINTING}
    kept, operations = zip(*(costs(trainer, episodes) for trainer in made.values()), strict=True)
    assert kept[2] < 0.25 * kept[1] and kept[1] < 0.5 * kept[0]
    assert operations[0] == operations[1] < operations[2]
    tokens = sum(len(e.token_ids) for e in episodes)
    estimate = [training_bytes(0, tokens=tokens, itemsize=4, **WIDTHS, switches=Switches(kind)).peak for kind in CHECKPOINTING]
    of_layer = training_bytes(0, tokens=tokens, itemsize=4, **WIDTHS | {"layers": 1}).peak
    none_and_one_layer = estimate[0] + of_layer - training_bytes(0, tokens=0, itemsize=4, **WIDTHS).peak
    assert none_and_one_layer - estimate[2] == pytest.approx(kept[0] - kept[2], rel=0.02)
    assert estimate[1] - estimate[2] == pytest.approx(kept[1] - kept[2], rel=0.15)

    fresh = {kind: trainer_of(GRPOLoss(beta=0.1), activation_checkpointing=kind) for kind in CHECKPOINTING}
    stats = [trainer.update(episodes, 0) for trainer in fresh.values()]
    assert stats[0] == stats[1] == stats[2]
    assert_same_bits(gradient(fresh["selective"]), gradient(fresh["none"]))
    assert_same_bits(gradient(fresh["full"]), gradient(fresh["none"]))


@pytest.fixture
def compiler():
    """Without what earlier tests compiled."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("dtype", "checkpointing", "tolerance"), [("float32", "none", 1e-5), ("bfloat16", "full", 2e-2)])
@pytest.mark.parametrize("blocks", ["one", "all"])
def test_a_few_graphs_serve_all_blocks_and_rows_of_any_length_and_compute_what_eager_does(
    blocks, dtype, checkpointing, tolerance, trainer_of, monkeypatch  # noqa: F811
):  # fmt: skip
    """blocks: in a unit of FSDP's."""
    if blocks == "one":
        monkeypatch.setattr("parallel.plans.UNIT_PARAMETERS", 0)
    training: dict[str, Any] = {"dtype": dtype, "learning_rate": 0.0, "activation_checkpointing": checkpointing}
    eager, compiled = (trainer_of(GRPOLoss(beta=0.1), max_tokens=60, compile=on, **training) for on in (False, True))
    graphs = []
    for count in (7, 1, 2, 12, 5, 9, 3):
        episodes = some_episodes(count, seed=count)
        for ours, theirs in zip(compiled.model.logprobs(episodes), eager.model.logprobs(episodes), strict=True):
            assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=tolerance, atol=tolerance)
        want, got = eager.update(episodes, 0), compiled.update(episodes, 0)
        assert got["loss/policy"] == pytest.approx(want["loss/policy"], rel=tolerance, abs=tolerance)
        for name, tensor in gradient(eager).items():
            assert (gradient(compiled)[name] - tensor).norm() <= tolerance * tensor.norm(), name
        graphs.append(counters["stats"]["unique_graphs"])
    # Before and after attention, with and without gradients. With them the first block of a unit is given a view, which FSDP's hook makes
    # of its input, and the others are not: torch guards on that, and has another graph before and after attention for these.
    assert 0 < graphs[0] == graphs[-1] <= (12 if blocks == "one" else 13)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_larger_units_and_weights_that_stay_cast_from_row_to_row_change_no_bit(dtype, trainer_of, monkeypatch):  # noqa: F811
    def trained(alone: bool) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        if not alone:
            for module in ("parallel.plans", "model"):
                monkeypatch.setattr(f"{module}.is_alone", lambda *_: False)
        trainer = trainer_of(GRPOLoss(beta=0.1), dtype=dtype, max_tokens=60, learning_rate=1e-2)
        assert trainer.model._is_alone is alone and len(trainer.model.rows(some_episodes(12))) > 1
        scored = [trainer.model.logprobs(some_episodes(12))]
        stats = []
        for step, count in enumerate((12, 5, 12)):
            stats.append(trainer.update(some_episodes(count), step))
            scored.append(trainer.model.logprobs(some_episodes(12)))  # with the new weights, none left cast of the old ones
        logprobs = {f"{step}/{i}": torch.tensor(values) for step, found in enumerate(scored) for i, values in found.items()}
        assert not torch.equal(logprobs["0/0"], logprobs["1/0"]) and not torch.equal(logprobs["1/0"], logprobs["2/0"])
        return stats, {name: tensor.clone() for name, tensor in shards(trainer).items()} | logprobs

    (stats, alone), (apart_stats, apart) = trained(True), trained(False)
    assert stats == apart_stats
    assert_same_bits(alone, apart)


def offloading(place, tiny_qwen3, cpu_offload: Literal["none", "optimizer"]) -> Trainer:  # noqa: F811
    """A trainer whose moments are kept as asked, on a model of this CPU, which as a whole would refuse to offload."""
    cfg = TrainingConfig(dtype="float32", learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, cpu_offload=cpu_offload)
    source = ModelSource(str(tiny_qwen3))
    model = Model(source, place.trainer, dtype="float32", temperature=TEMPERATURE, max_tokens=60, trainable=True)
    return Trainer(model, cfg, GRPOLoss(beta=0.1))


def shards(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of weights and moments, the storage itself."""
    return {name: tensor.to_local() for name, tensor in trainer.state().items() if isinstance(tensor, DTensor)}


def test_a_trainer_with_its_moments_on_the_host_takes_the_same_steps_bit_for_bit(place, tiny_qwen3):  # noqa: F811
    plain, hosted = (offloading(place, tiny_qwen3, kind) for kind in ("none", "optimizer"))
    homes = {name: tensor.data_ptr() for name, tensor in shards(hosted).items()}
    for step in range(3):
        episodes = some_episodes(seed=step)
        assert hosted.update(episodes, step) == plain.update(episodes, step)
    assert_same_bits(shards(hosted), shards(plain))
    assert homes == {name: tensor.data_ptr() for name, tensor in shards(hosted).items()} and len(homes) > 50


def test_a_step_by_parts_has_the_moments_of_one_part_on_the_device_at_a_time_and_the_bits_of_a_whole_step():
    def problem() -> tuple[torch.optim.AdamW, list[torch.nn.Parameter]]:
        draw = torch.Generator().manual_seed(0)
        ps = [torch.nn.Parameter(torch.randn(n, 7, generator=draw)) for n in (3, 50, 1, 20, 8)]
        groups = [{"params": ps[:2], "weight_decay": 0.1}, {"params": ps[2:], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, fused=True), ps

    (whole, want), (by_parts, got) = problem(), problem()
    by_parts.state.update((p, blank_state_on_host(p)) for p in got)
    homes = {p: {kind: by_parts.state[p][kind].data_ptr() for kind in MOMENTS} for p in got}
    for step in range(3):
        for a, b in zip(want, got, strict=True):
            a.grad = torch.sin(a.detach() + step) if step != 1 or len(a) != 20 else None  # one has no gradient in one step
            b.grad = None if a.grad is None else a.grad.clone()
        assert [len(part) for part in whole_step(whole)] == [5]
        seen: list[torch.Tensor] = []
        for part in step_by_parts(by_parts, part_bytes=28 * 25):
            assert len(part) == 1 or sum(p.nbytes for p in part) <= 28 * 25
            away = [p for p in got if by_parts.state[p]["exp_avg"].data_ptr() != homes[p]["exp_avg"]]
            assert all(any(p is q for q in part) for p in away) and len(away) == len(part)
            seen += part
        assert len(seen) == 5 and all(any(p is q for q in seen) for p in got)
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)
        for kind in MOMENTS:
            assert torch.equal(whole.state[a][kind], by_parts.state[b][kind])
            assert by_parts.state[b][kind].data_ptr() == homes[b][kind]


@pytest.mark.parametrize("kind", ["optimizer", "parameters"])
def test_offload_on_a_cpu_is_refused_before_a_weight_is_read(kind, place):  # noqa: F811
    options: dict[str, Any] = {"dtype": "float32", "temperature": 1.0, "max_tokens": 60}
    with pytest.raises(ValueError, match=f"training.cpu_offload={kind} on a CPU.*set training.cpu_offload: none"):
        Model(ModelSource("/there/is/no/model"), place.trainer, trainable=True, switches=Switches(offload=kind), **options)


def test_a_compiled_block_with_selective_checkpointing_is_refused():
    with pytest.raises(ValueError, match="activation_checkpointing=selective with compile=true.*none, or to full"):
        TrainingConfig(activation_checkpointing="selective", compile=True).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "said"),
    [({"CXX": "no-such-compiler"}, "no C++ compiler no-such-compiler"), ({"TORCH_COMPILE_DISABLE": "1"}, "torch.compile is switched off")],
)
def test_compiling_without_a_compiler_is_one_message_before_the_model_is_read(environment, said, sft, tiny_qwen3, tmp_path):
    bare = shutil.copytree(tiny_qwen3, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    done = run_script(1, "train_sft.py", *sft, f"model={bare}", "training.compile=true", env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert done.returncode and len(lines) == 1 and said in lines[0] and "set training.compile: false" in lines[0], done.stdout


@pytest.fixture
def sft(tiny_qwen3, additions, tmp_path) -> list[str]:
    """The arguments of a short train_sft.py."""
    training = ["training.steps=3", "training.seq_len=32", "training.dtype=float32", "training.learning_rate=1e-3"]
    return [f"model={tiny_qwen3}", f"dataset.path={additions}", f"output={tmp_path}/run", "metrics.tensorboard=false", *training]


def numbers(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/", "mem/"))} for line in lines]


MODE_AT_THE_END = """
import os, torch, train_sft
try:
    train_sft.main()
finally:
    print("deterministic:", torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
"""


@pytest.mark.slow
def test_deterministic_mode_is_on_before_a_model_is_read_and_changes_no_number(sft, tmp_path):
    (tmp_path / "mode.py").write_text(MODE_AT_THE_END)
    found = {}
    for mode, told in (("false", "False None"), ("true", "True :4096:8")):
        done = run_script(1, tmp_path / "mode.py", *sft, f"training.deterministic={mode}", f"output={tmp_path}/{mode}")
        assert f"deterministic: {told}" in done.stdout
        found[mode] = numbers(tmp_path / mode)
        empty = run_script(1, tmp_path / "mode.py", *sft, f"training.deterministic={mode}", "model=/there/is/no/model", check=False)
        assert f"deterministic: {told}" in empty.stdout and "/there/is/no/model cannot be loaded" in empty.stdout
    assert found["true"] == found["false"] and len(found["true"]) == 3


def test_deterministic_mode_needs_seeds_for_samples():
    with pytest.raises(ValueError, match="seeded_sampling=never with training.deterministic=true.*auto or always"):
        check_repeatable(GRPOConfig(seeded_sampling="never"), TrainingConfig(deterministic=True))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{}, {"tensor_parallel_degree": 2}, {"context_parallel_degree": 2}, {"pipeline_parallel_degree": 2}])
def test_on_two_ranks_the_switches_change_no_weight_either(degrees, tiny_qwen3, tmp_path):
    exact: list[dict[str, Any]] = [{"activation_checkpointing": kind} for kind in CHECKPOINTING]
    rounded = [] if "tensor_parallel_degree" in degrees else [{"compile": True}]
    given = {"model": str(tiny_qwen3), "degrees": degrees, "max_tokens": 64, "loss": GRPOLoss(beta=0.1)}
    rounds = [some_episodes(5, seed=step) for step in range(2)]
    want, *got = weights_under(tmp_path, switches=exact + rounded, rounds=rounds, **given)
    for found in got[: len(exact) - 1]:
        assert_same_bits(found, want)
    for found in got[len(exact) - 1 :]:
        for name, weight in want.items():
            assert_close(found[name], weight, rtol=1e-5, atol=1e-5)


def test_compiled_layers_that_are_cut_over_ranks_are_refused():
    with pytest.raises(ValueError, match="training.compile=true with parallelism.tensor_parallel_degree=2"):
        Switches(compiled=True).check(torch.device("cpu"), tp=2)


BESIDE_AN_ENGINE = """
import json, sys
import torch
from torch._dynamo.utils import counters
from batch import Prompt, to_episodes
from losses import GRPOLoss
from losses.advantages import credit
from model import Model, ModelSource
from parallel.launch import launch
from parallel.placement import Placement
from parallel.roles import ParallelismConfig, Plan
from parallel.weights import stream_weights
from rollout.generator import Generator, GeneratorConfig
from rollout.sampling import Sampling
from trainer import Trainer, TrainingConfig

def main():
    place = Placement.build(Plan.make(None, ParallelismConfig(), colocate=False, wants_reference=False, world_size=1), "cpu")
    training, source = TrainingConfig(dtype="float32", learning_rate=1e-3, seq_len=32, compile=True), ModelSource(sys.argv[1])
    policy = Model(source, place.trainer, dtype="float32", temperature=1.0, max_tokens=64, trainable=True, switches=training.switches)
    trainer = Trainer(policy, training, GRPOLoss())
    generator = Generator(source, GeneratorConfig(), place, "float32", 32, switches=training.switches, seed=0)
    graphs, gaps = [counters["stats"]["unique_graphs"]], []
    for step in range(3):
        generator.load(stream_weights(policy.shards(), place, generator.dtype), step)
        groups = generator.generate([Prompt(i, [3 + i, 4, 5]) for i in range(4)], 2, Sampling(1.0, 8, seed=step))
        graphs.append(counters["stats"]["unique_graphs"])
        for g in groups:
            g.rewards = [0.0, 1.0]
        episodes = to_episodes(groups, mask_truncated=False, old_from_sampler=False)
        own = policy.logprobs(episodes)
        gaps.append(max(float(abs(e.gen_logprobs - values).max()) for e, values in zip(episodes, own, strict=True)))
        credit(groups, episodes, lambda rewards: rewards, kl_in_reward=0.0, weights={})
        trainer.train(episodes, step)
        graphs.append(counters["stats"]["unique_graphs"])
    generator.close()
    json.dump({"graphs": graphs, "gaps": gaps}, open(sys.argv[2], "w"))

launch(main)
"""


@pytest.mark.slow
def test_blocks_are_compiled_beside_an_engine_which_is_not(tiny_qwen3, tmp_path):
    (tmp_path / "beside.py").write_text(BESIDE_AN_ENGINE)
    run_script(1, tmp_path / "beside.py", str(tiny_qwen3), str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    probe, sampled, trained, *later = report["graphs"]
    assert probe == sampled < trained and set(later) == {trained}
    assert max(report["gaps"]) < 1e-4

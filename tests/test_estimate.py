"""What --plan says of memory, against the bytes of live tensors."""

import json
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import train_grpo
from estimate import Estimate, Shape
from parallel.memory import GIB, cpu_kv_cache
from parallel.roles import ParallelismConfig, Plan, ServiceConfig, ServicesConfig
from parallel.switches import ALL_OFF, Switches
from tests.world import run_script

SIZES = """
import json, sys
import torch
from batch import Episode
from losses import GRPOLoss
from model import Model, ModelSource
from parallel.exchange import from_each
from parallel.launch import launch
from parallel.placement import Placement
from parallel.roles import ParallelismConfig, Plan, ServiceConfig, ServicesConfig
from parallel.weights import stream_weights
from rollout.generator import Generator, GeneratorConfig
from tests.reference_driver import some_episodes
from trainer import Trainer, TrainingConfig

def main():
    model, world, degrees, engines, report = sys.argv[1], int(sys.argv[2]), *map(json.loads, sys.argv[3:5]), sys.argv[5]
    services = ServicesConfig(generator=ServiceConfig(procs=engines or 1))
    plan = Plan.make(services, ParallelismConfig(**degrees), colocate=True, wants_reference=True, world_size=world)
    place = Placement.build(plan, "cpu")
    spread = lambda grid, **options: Model(ModelSource(model), grid, dtype="bfloat16", temperature=1.0, max_tokens=64, **options)
    policy, reference = spread(place.trainer, trainable=True), spread(place.reference, trainable=False)
    trainer = Trainer(policy, TrainingConfig(), GRPOLoss())
    trainer._adamw.register_step_pre_hook(lambda *_: found.update(gradients=trainer.residents()["gradients"]))
    found = {}
    trainer.train(some_episodes(), 0)
    assert trainer.residents()["gradients"] == 0
    found |= {"weights": policy.local_bytes, "reference": reference.local_bytes, "moments": trainer.residents()["moments"]}
    if engines:
        generator = Generator(ModelSource(model), GeneratorConfig(max_num_seqs=3), place, dtype="bfloat16", seq_len=100, seed=0)
        generator.load(stream_weights(policy.shards(), place, generator.dtype), version=0)
        found |= {f"engine_{name}": count for name, count in generator.residents().items()}
        generator.close()
    ranks = from_each(found, place)
    if place.is_root:
        open(report, "w").write(json.dumps({name: max(each[name] for each in ranks) for name in found}))

launch(main)
"""


def estimate(model: str, world: int, engines: int = 1, **degrees: int) -> Estimate:
    services = ServicesConfig(generator=ServiceConfig(procs=engines or 1))
    plan = Plan.make(services, ParallelismConfig(**degrees), colocate=True, wants_reference=True, world_size=world)
    shape = Shape.read(model, None)
    assert shape is not None
    return Estimate(shape, plan, torch.bfloat16, torch.bfloat16, row_tokens=64, switches=ALL_OFF)


@pytest.mark.parametrize(("world", "engines", "degrees"), [
    (1, 1, {}),
    (2, 0, {}),
    (2, 0, {"tensor_parallel_degree": 2}),
    pytest.param(2, 2, {}, marks=pytest.mark.slow),
    pytest.param(4, 0, {"tensor_parallel_degree": 2}, marks=pytest.mark.slow),
    pytest.param(4, 0, {"data_parallel_replicate_degree": 2}, marks=pytest.mark.slow),
    pytest.param(4, 0, {"context_parallel_degree": 2}, marks=pytest.mark.slow),
    pytest.param(2, 0, {"pipeline_parallel_degree": 2}, marks=pytest.mark.slow),
    pytest.param(4, 0, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_bytes_are_those_of_the_largest_ranks_live_tensors_within_a_tenth(tied, world, engines, degrees, checkpoint_of, tmp_path):
    """engines: ranks of each; 0: none is started."""
    model = str(checkpoint_of("qwen3", tied=tied))
    (tmp_path / "sizes.py").write_text(SIZES)
    run_script(world, tmp_path / "sizes.py", model, world, json.dumps(degrees), engines, tmp_path / "report.json")
    live = json.loads((tmp_path / "report.json").read_text())
    told = estimate(model, world, engines, **degrees)
    expected = {"weights": told.weights, "gradients": told.gradients, "moments": told.training.kept, "reference": told.reference}
    if engines:
        expected["engine_weights"] = told.engine_weights
        expected["engine_kv_cache"] = cpu_kv_cache(100, told.kv_per_token, 3)
    assert expected.keys() == live.keys()
    for name, count in expected.items():
        assert count == pytest.approx(live[name], rel=0.1), name


@pytest.mark.parametrize("tied", [True, False])
def test_the_shape_counts_every_parameter_once(tied, checkpoint_of):
    folder = checkpoint_of("qwen3", tied=tied)
    shape = Shape.read(str(folder), None)
    assert shape is not None
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert shape.cut + shape.whole == sum(p.numel() for p in model.parameters())


def test_a_plan_of_a_model_at_hand_says_bytes_and_one_of_a_model_that_is_not_says_ranks_alone(checkpoint_of, monkeypatch, capsys):
    for model, told in ((str(checkpoint_of("qwen3")), True), ("nobody/has-this", False)):
        given = ["dataset.path=x.jsonl", "rewards.math=rollout.rewards.MathReward", "grpo.beta=0.1", "training.seq_len=64"]
        monkeypatch.setattr(sys, "argv", ["train_grpo.py", f"model={model}", *given, "--plan=2"])
        train_grpo.main()
        out = capsys.readouterr().out
        assert ("bytes per rank" in out) == told and "trainer     0-1" in out
        assert ("for a sequence of 64" in out) == told and ("  ref_model   weights" in out) == told


def test_what_will_not_fit_a_gpu_is_told_with_the_keys_to_change():
    shape = Shape(cut=7 * 10**9, whole=10**9, layers=32, hidden=4096, intermediate=14336, heads=6144, kv=2048, kv_heads=8)

    def told(services: ServicesConfig | None, world: int, **options: Any) -> list[str]:
        plan = Plan.make(services, ParallelismConfig(), colocate=False, wants_reference=False, world_size=world)
        sizes: dict[str, Any] = {"row_tokens": 16384, "switches": ALL_OFF} | options
        return Estimate(shape, plan, torch.bfloat16, torch.bfloat16, **sizes).warnings(80 * GIB, 0.5)

    apart = ServicesConfig(trainer=ServiceConfig(procs=8), generator=ServiceConfig())
    assert any("generator.gpu_memory_utilization" in line for line in told(None, 1))
    assert any("training.max_tokens_per_batch" in line for line in told(None, 1))
    assert any("activation_checkpointing" in line for line in told(apart, 9))
    assert told(apart, 9, switches=Switches("full")) == []



BIG = Shape(cut=7 * 10**9, whole=10**9, layers=32, hidden=4096, intermediate=14336, heads=6144, kv=2048, kv_heads=8)


def planned(services: ServicesConfig | None, world: int, **options: Any) -> Estimate:
    plan = Plan.make(services, ParallelismConfig(), colocate=False, wants_reference=services is None, world_size=world)
    return Estimate(BIG, plan, torch.bfloat16, torch.bfloat16, row_tokens=8192, switches=Switches("full"), **options)


def test_a_reference_waits_in_host_memory_only_where_it_shares_a_gpu_that_cannot_hold_it():
    shared = planned(None, 8)
    assert not shared.parks_reference(80 * GIB, 0.3) and shared.parks_reference(30 * GIB, 0.3)
    assert not shared.parks_reference(0, 0.3)  # a CPU
    assert [line for line in shared.lines(4096, 30 * GIB, 0.3) if "in host memory while idle" in line]
    alone = planned(ServicesConfig(trainer=ServiceConfig(procs=8), ref_model=ServiceConfig(), generator=ServiceConfig()), 10)
    assert not alone.parks_reference(30 * GIB, 0.3)
    on_cpu = planned(ServicesConfig(trainer=ServiceConfig(procs=8), ref_model=ServiceConfig(with_gpus=False), generator=ServiceConfig()), 9)
    assert not on_cpu.parks_reference(30 * GIB, 0.3)


def test_a_parked_reference_is_counted_while_it_scores_and_at_no_other_time():
    shared, total = planned(None, 8), 30 * GIB
    (phases,) = shared.phases(total, 0.3, kv_cache := int(total * 0.3) - shared.engine_weights).values()
    stays = shared.phases(0, 0.3, kv_cache)[tuple(range(8))]  # of a GPU that has no end
    assert stays["score"] == phases["score"] and stays["generate"] - phases["generate"] == shared.reference
    assert phases["train"] < stays["train"]


def test_the_phases_of_roles_on_ranks_of_their_own_do_not_touch():
    services = ServicesConfig(trainer=ServiceConfig(procs=4), ref_model=ServiceConfig(procs=2), generator=ServiceConfig(procs=2))
    told = planned(services, 8)
    table = told.phases(80 * GIB, 0.5, kv_cache := 40 * GIB - told.engine_weights)
    assert list(table) == [(0, 1, 2, 3), (4, 5), (6, 7)]
    trainer, reference, generator = table.values()
    assert trainer["train"] == told.weights + told.training.peak and trainer["score"] == told.weights + told.training.kept
    assert reference["score"] == told.reference + told.scoring and reference["train"] == told.reference
    assert set(generator.values()) == {told.engine_weights + kv_cache, told.engine_weights + kv_cache + told.syncing}


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_engine_ranks_beyond_the_key_value_heads_repeat_them_and_have_no_smaller_a_cache(tp, heads):
    services = ServicesConfig(trainer=ServiceConfig(procs=1), generator=ServiceConfig(procs=tp))
    assert planned(services, 1 + tp).kv_per_token == 2 * 32 * heads * 2 * 128  # bf16, 32 layers, keys and values of heads of 128


def test_weights_on_the_host_are_in_no_phase_on_the_gpu():
    here = planned(None, 8)
    there = replace(here, switches=Switches("full", offload="parameters"))
    assert there.gradients == 0 and there.weights == here.weights > 0
    for phase, count in there.phases(0, 0.3, 0)[tuple(range(8))].items():
        least = 4 if phase == "train" else 3  # weights and moments, and in training gradients
        assert here.phases(0, 0.3, 0)[tuple(range(8))][phase] - count == least * here.weights
    assert here.parks_reference(30 * GIB, 0.3) and not there.parks_reference(30 * GIB, 0.3)


def test_a_sync_counts_the_largest_tensor_twice():
    large = replace(BIG, largest=10**9)
    assert replace(planned(None, 8), shape=large).syncing == planned(None, 8).syncing + 2 * 2 * 10**9


@pytest.mark.parametrize("seqs", [None, 9000, 9300])
def test_a_plan_for_gpus_of_a_size_says_what_their_kv_cache_holds(seqs, checkpoint_of, monkeypatch, capsys):
    """What all sequences need, or, where that is more than three quarters of it, what the engine's share leaves."""
    given = ["training.seq_len=128", f"generator.max_num_seqs={seqs or 'null'}", "--plan=2x1.5GiB"]
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", f"model={checkpoint_of('qwen3')}", *given])
    train_grpo.main()
    out = capsys.readouterr().out
    per_token = 2 * 2 * 2 * 32 * 2  # k and v of 2 layers of 2 heads of 32 numbers of 2 bytes
    found = re.search(r"KV cache    at most ([\d.]+) GiB, (\d+) tokens or (\d+) sequences of 128 in each engine", out)
    assert found is not None, out
    expected = 0.75 * GIB / per_token if seqs == 9300 else ((seqs or 64) + 1) * 128  # tokens; 2 prompts a replica have 16 answers
    assert int(found[2]) == pytest.approx(expected, rel=0.01 if seqs == 9300 else 0) and int(found[3]) == int(found[2]) // 128
    assert float(found[1]) == round(int(found[2]) * per_token / GIB, 2)
    assert "16384 tokens, 128 sequences of 128, on each of 2 replicas" in out
    assert f"in use by phase, at most (GPUs of 1.50 GiB)\n  0-1         generate {found[1]} GiB" in out and "warning: " in out


@pytest.mark.parametrize("asked", ["0", "x80", "8x0", "8xlarge", "many"])
def test_a_plan_that_cannot_be_read_says_how_it_is_written(asked, checkpoint_of, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", f"model={checkpoint_of('qwen3')}", f"--plan={asked}"])
    if asked == "x80":  # as many ranks as the config needs
        train_grpo.main()
        assert "GPUs of 80.00 GiB" in capsys.readouterr().out
        return
    with pytest.raises(ValueError, match=f"--plan={asked}: must be a number of ranks, at least 1"):
        train_grpo.main()


def test_what_is_kept_on_the_host_is_in_no_phase_and_leaves_a_reference_its_place():
    least = []  # GiB of a GPU on which the reference stays
    offloads: list[tuple[Any, int]] = [("none", 3), ("optimizer", 1), ("parameters", 0)]
    for offload, copies in offloads:
        told = replace(planned(None, 8), switches=Switches("full", offload=offload))
        (phases,) = told.phases(0, 0.3, 0).values()
        assert phases["generate"] == copies * told.weights + told.reference + told.engine_weights
        least.append(next(size for size in range(1, 200) if not told.parks_reference(size * GIB, 0.3)))
    assert least[0] > least[1] > least[2]

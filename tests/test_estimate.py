"""What --plan says of memory, against the bytes of live tensors."""

import json
import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import train_grpo
from estimate import Estimate, Shape
from parallel.memory import GIB
from parallel.placement import ParallelismConfig, Plan, ServiceConfig, ServicesConfig
from parallel.switches import ALL_OFF, Switches
from tests.world import run_script

SIZES = """
import json, sys
import torch
from torch.distributed.tensor import DTensor
from parallel.placement import ParallelismConfig, Placement, Plan
from model import Model, ModelSource
from trainer import Trainer, TrainingConfig
from losses import NLLLoss
model, world, degrees, report = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
plan = Plan.make(None, ParallelismConfig(**degrees), colocate=False, wants_reference=False, world_size=world)
place = Placement.build(plan, "cpu")
policy = Model(ModelSource(model), place.trainer, dtype="float32", temperature=1.0, max_tokens=64, trainable=True)
trainer = Trainer(policy, TrainingConfig(), NLLLoss())
state = {n: t for n, t in trainer.state().items() if not n.startswith("weight/")}
moments = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in state.values())
everyone = [None] * world
torch.distributed.all_gather_object(everyone, [policy.local_bytes, moments], group=place.objects)
if place.is_root:
    open(report, "w").write(json.dumps(everyone))
"""


def estimate(model: str, world: int, **degrees: int) -> Estimate:
    plan = Plan.make(None, ParallelismConfig(**degrees), colocate=False, wants_reference=False, world_size=world)
    shape = Shape.read(model, None)
    assert shape is not None
    return Estimate(shape, plan, torch.float32, torch.float32, row_tokens=64, switches=ALL_OFF)


@pytest.mark.parametrize(("world", "degrees"), [
    (1, {}), (2, {}), (2, {"tensor_parallel_degree": 2}), (4, {"tensor_parallel_degree": 2}),
    (4, {"data_parallel_replicate_degree": 2}), (4, {"context_parallel_degree": 2}),
])  # fmt: skip
def test_weights_and_moments_are_those_of_the_largest_rank_within_a_tenth(world, degrees, checkpoint_of, tmp_path):
    model = str(checkpoint_of("qwen3"))
    (tmp_path / "sizes.py").write_text(SIZES)
    run_script(world, tmp_path / "sizes.py", model, str(world), json.dumps(degrees), str(tmp_path / "report.json"))
    weights, moments = map(max, zip(*json.loads((tmp_path / "report.json").read_text()), strict=True))
    expected = estimate(model, world, **degrees)
    assert expected.weights == pytest.approx(weights, rel=0.1)
    assert expected.training.kept == pytest.approx(moments, rel=0.1)


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
    shape = Shape(cut=7 * 10**9, whole=10**9, layers=32, hidden=4096, intermediate=14336, heads=6144, kv=2048)

    def told(services: ServicesConfig | None, world: int, **options: Any) -> list[str]:
        plan = Plan.make(services, ParallelismConfig(), colocate=False, wants_reference=False, world_size=world)
        sizes: dict[str, Any] = {"row_tokens": 16384, "switches": ALL_OFF} | options
        return Estimate(shape, plan, torch.bfloat16, torch.bfloat16, **sizes).warnings(80 * GIB, 0.5)

    apart = ServicesConfig(trainer=ServiceConfig(procs=8), generator=ServiceConfig())
    assert any("generator.gpu_memory_utilization" in line for line in told(None, 1))
    assert any("training.max_tokens_per_batch" in line for line in told(None, 1))
    assert any("activation_checkpointing" in line for line in told(apart, 9))
    assert told(apart, 9, switches=Switches("full")) == []


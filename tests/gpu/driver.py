"""Run by the GPU tests under torchrun: policy, trainer and engine as train_grpo.py builds them, and what was measured.

    torchrun --nproc-per-node=1 tests/gpu/driver.py spec.json report.json

The spec: {"run": the name of one of RUNS, "nproc": ranks, "arguments": {...}}. The report is what the run returned on the first rank.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from batch import Episode, Group, Prompt, to_episodes
from estimate import Estimate, Shape
from losses import GRPOLoss
from losses.advantages import credit
from model import Model, ModelSource
from parallel.exchange import everyone, from_each, in_order
from parallel.launch import launch
from parallel.memory import TrainingBytes, capacity, residency
from parallel.placement import Placement
from parallel.roles import ParallelismConfig, Plan, ServiceConfig, ServicesConfig
from parallel.weights import stream_weights
from rollout.generator import Generator, GeneratorConfig, _blocks
from rollout.loading import checkpoint_slices, verify
from rollout.sampling import Sampling
from tests.gpu.precision import first_step, moved
from tests.gpu.stages import stages
from tests.sync_driver import error_of, flip_last_bit, ids, watched
from trainer import Trainer, TrainingConfig

GIB = 2**30
RESIDENCIES = ("stays", "drops its KV cache", "sleeps")


@dataclass
class Job:
    place: Placement
    policy: Model
    trainer: Trainer
    generator: Generator
    sampling: Sampling
    step: int = 0

    @classmethod
    def start(
        cls, place: Placement, model: str, *, cfg: GeneratorConfig, seq_len: int = 1024, learning_rate: float = 1e-5, sampled: int = 64
    ) -> "Job":
        source, training = ModelSource(model), TrainingConfig(learning_rate=learning_rate, seq_len=seq_len)
        policy = Model(
            source, place.trainer, dtype=training.dtype, temperature=1.0, max_tokens=training.row_tokens, trainable=True
        )
        trainer = Trainer(policy, training, GRPOLoss())
        generator = Generator(source, cfg, place, dtype=training.dtype, seq_len=seq_len, row_tokens=training.row_tokens, seed=0)
        return cls(place, policy, trainer, generator, Sampling(1.0, sampled))

    def prompts(self, count: int, length: int) -> list[Prompt]:
        draw = np.random.default_rng(0)
        return [Prompt(i, draw.integers(100, 40_000, length).tolist()) for i in range(count)]

    def sample(self, prompts: list[Prompt], n_samples: int = 2, **sampling: Any) -> list[Group]:
        how = replace(self.sampling, **sampling)
        return everyone(self.generator.generate(prompts, n_samples, how), self.place.generator, self.place)

    def publish(self) -> None:
        self.generator.load(stream_weights(self.policy.shards(), self.place, self.generator.dtype), version=self.step)

    def train(self, groups: list[Group]) -> dict[str, float]:
        """One GRPO step with advantages drawn by chance: real gradients, whatever the model knows."""
        draw = np.random.default_rng(1000 + self.step)
        for group in groups:
            group.rewards = draw.normal(size=len(group.completions)).tolist()
        episodes = to_episodes(groups, mask_truncated=False, old_from_sampler=False)
        credit(groups, episodes, lambda rewards: rewards, kl_in_reward=0.0, weights={})
        stats = self.trainer.train(episodes, self.step)
        self.step += 1
        return stats

    def gap(self, groups: list[Group]) -> float:
        """Mean |engine's - policy's| log-prob of the sampled tokens."""
        episodes = to_episodes(groups, mask_truncated=False, old_from_sampler=False)
        own = in_order(self.policy.logprobs(episodes), self.policy.grid, self.place)
        return float(np.concatenate([np.abs(e.gen_logprobs - values) for e, values in zip(episodes, own, strict=True)]).mean())


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    yield
    torch.cuda.synchronize()
    seconds[name] = time.perf_counter() - start


def used() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def engine(place: Placement, *, model: str) -> dict[str, Any]:
    """CUDA graphs, asynchronous scheduling, prefix cache, seeds, and the three ways to share the GPU."""
    result: dict[str, Any] = {}
    with timed(result, "start_s"):
        job = Job.start(place, model, cfg=GeneratorConfig(gpu_memory_utilization=0.4))
    vllm = job.generator._llm.llm_engine.vllm_config
    result["async_scheduling"] = vllm.scheduler_config.async_scheduling
    result["graphs"] = vllm.compilation_config.cudagraph_mode.name
    result["graph_sizes"] = len(vllm.compilation_config.cudagraph_capture_sizes)
    job.publish()
    result |= seeds(job)
    job.publish()
    with watched(job.generator) as cached:
        long = job.prompts(2, 500)
        job.sample(long, n_samples=1)
        job.sample(long, n_samples=1)
        job.publish()
        job.sample(long, n_samples=1)
    result["cached"] = [sum(cached[i : i + 2]) for i in (0, 2, 4)]
    result["sharing"] = [sharing(job, kind, until_load) for until_load in (True, False) for kind in RESIDENCIES]
    result |= choices(place)
    job.generator.close()
    return result


def seeds(job: Job) -> dict[str, Any]:
    prompts = job.prompts(32, 64)

    def drawn(**how: Any) -> list:
        job.generator._wake_kv_cache()  # resets the prefix cache: each time as in a new run
        return ids(job.sample(prompts, n_samples=8, **how))

    first, again, other = drawn(seed=1), drawn(seed=1), drawn(seed=2)
    unseeded = drawn(), drawn()
    half = ids(job.sample(prompts[:16], n_samples=8, seed=1))
    result: dict[str, Any] = {"repeats": first == again, "other_seed_differs": first != other}
    result["unseeded_differ"] = unseeded[0] != unseeded[1]
    result["distinct"] = min(len({tuple(c) for c in group}) for group in first)
    pairs = [pair for x, y in zip(first[:16], half, strict=True) for pair in zip(x, y, strict=True)]
    result["same_in_half_a_batch"] = float(np.mean([a == b for a, b in pairs]))
    seconds: dict[str, list[float]] = {"unseeded": [], "seeded": []}
    for _ in range(4):
        for name, seed in (("unseeded", None), ("seeded", 1)):
            taken: dict[str, float] = {}
            with timed(taken, name):
                job.sample(prompts, n_samples=8, seed=seed, max_new_tokens=256)
            seconds[name].append(taken[name])
    best = {name: min(values[1:]) for name, values in seconds.items()}  # the first of each warms up
    return result | {f"{name}_s": value for name, value in best.items()} | {"seed_cost": best["seeded"] / best["unseeded"] - 1}


def sharing(job: Job, kind: str, until_load: bool) -> dict[str, Any]:
    """A step with the engine out of the way in the given manner, as train_grpo.py takes it."""
    job.generator._residency = kind  # type: ignore[assignment]
    groups = job.sample(job.prompts(16, 64), n_samples=4)
    result: dict[str, Any] = {"kind": kind, "until_load": until_load, "gap_before": job.gap(groups)}
    job.train(groups)
    job.publish()
    torch.cuda.empty_cache()
    result["used_before"] = used()
    window = job.generator.asleep(until_load=until_load)
    with timed(result, "sleep_s"):
        window.__enter__()
    torch.cuda.empty_cache()
    result["used_asleep"] = used()
    if until_load:
        job.train(groups)
    with timed(result, "wake_s"):
        window.__exit__(None, None, None)
    if until_load:
        with timed(result, "load_s"):
            job.publish()
    torch.cuda.empty_cache()
    result["used_after"] = used()
    result["gap_after"] = job.gap(job.sample(job.prompts(16, 64), n_samples=4))
    return result


def choices(place: Placement) -> dict[str, Any]:
    """What is chosen when training needs half of what is free, a little more than that, and more than the KV cache leaves."""
    free = torch.cuda.mem_get_info()[0]
    cache = sum(b.handle[1] for b in _blocks("kv_cache"))
    needs = (free // 2, free + cache // 2, free + 2 * cache)
    return {"choices": [residency(place.device, TrainingBytes(0, n), cache) for n in needs], "kv_gib": cache / GIB, "free_gib": free / GIB}


def sync(place: Placement, *, model: str, rounds: int, learning_rate: float) -> dict[str, Any]:
    """Real optimizer steps and syncs, with every way to share the GPU in turn."""
    cfg = GeneratorConfig(gpu_memory_utilization=0.1, enforce_eager=True, engine={"kv_cache_memory_bytes": 4 * GIB})
    job = Job.start(place, model, cfg=cfg, seq_len=256, learning_rate=learning_rate, sampled=24)
    job.publish()
    prompts = job.prompts(8, 32)
    groups = job.sample(prompts)
    first = {n: t.clone() for n, t in checkpoint_slices(job.generator._model()).items()}
    gaps, norms = [job.gap(groups)], []
    for number in range(rounds):
        job.generator._residency = RESIDENCIES[number % 3]  # type: ignore[assignment]
        with job.generator.asleep(until_load=True):
            norms.append(job.train(groups)["grad/norm"])
        job.publish()  # raises unless every checksum is equal
        groups = job.sample(prompts)
        gaps.append(job.gap(groups))
    slices = checkpoint_slices(job.generator._model())
    weights = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().bfloat16() for n, p in job.policy.shards().items()}
    result: dict[str, Any] = {"gaps": gaps, "norms": norms, "tensors": len(slices), "names": sorted(slices) == sorted(weights)}
    result["unequal"] = [n for n, t in weights.items() if not torch.equal(t, slices[n])]
    moved = {n: float((t != first[n]).float().mean()) for n, t in slices.items()}
    result |= {"moved": float(np.mean(list(moved.values()))), "moved_least": min(v for n, v in moved.items() if slices[n].ndim > 1)}
    sent = {t.name: (t.checksum, t.tensor.numel()) for b in stream_weights(job.policy.shards(), place, torch.bfloat16) for t in b}
    flip_last_bit(slices["model.layers.1.mlp.down_proj.weight"].data)
    result["fault"] = error_of(lambda: verify(job.generator._model(), sent, job.generator._replica))
    job.generator.close()
    return result


def tensor_parallel(place: Placement, *, model: str, rounds: int, engine_options: dict[str, Any]) -> dict[str, Any]:
    """One TP engine over all ranks, FSDP over the same ranks, asleep while they train."""
    cfg = GeneratorConfig(gpu_memory_utilization=0.4, engine=engine_options)
    job = Job.start(place, model, cfg=cfg)
    job.generator._residency = "sleeps"
    job.publish()
    prompts = job.prompts(16, 64)
    result: dict[str, Any] = {"async_scheduling": job.generator._llm.llm_engine.vllm_config.scheduler_config.async_scheduling, "gaps": []}
    result["graphs"] = job.generator._llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name
    agree = True
    for _ in range(rounds):
        mine = job.generator.generate(prompts, 4, job.sampling)
        each = from_each(ids(mine), place)
        agree = agree and all(e == each[0] for e in each)
        groups = everyone(mine, place.generator, place)
        result["gaps"].append(job.gap(groups))
        awake = used()
        with job.generator.asleep(until_load=True):
            result["freed_gib"] = awake - used()
            job.train(groups)
        job.publish()
    job.generator.close()
    return result | {"ranks_agree": agree}


def exported(place: Placement, *, model: str) -> dict[str, Any]:
    """vLLM's own loader on a checkpoint: its tensors against the file's, its log-probs against transformers'."""
    cfg = GeneratorConfig(
        gpu_memory_utilization=0.1, enforce_eager=True, engine={"load_format": "auto", "kv_cache_memory_bytes": 4 * GIB}
    )
    generator = Generator(ModelSource(model), cfg, place, dtype="bfloat16", seq_len=256, seed=0)
    generator.version = 0  # its weights came from the folder
    slices, file = checkpoint_slices(generator._model()), load_file(Path(model) / "model.safetensors", device="cuda")
    unequal = [n for n, t in file.items() if not torch.equal(t, slices[n])]
    prompts = [Prompt(i, np.random.default_rng(i).integers(100, 40_000, 32).tolist()) for i in range(8)]
    groups = generator.generate(prompts, 1, Sampling(1.0, 32))
    half, exact = (transformers_logprobs(model, groups, dtype) for dtype in (torch.bfloat16, torch.float32))
    sampled = torch.cat([torch.tensor(g.completions[0].logprobs) for g in groups])
    generator.close()
    gaps = {"gap": float((sampled - exact).abs().mean()), "bf16_gap": float((half - exact).abs().mean())}
    return {"tensors": len(file), "unequal": unequal} | gaps


@torch.no_grad()
def transformers_logprobs(model: str, groups: list[Group], dtype: torch.dtype) -> Tensor:
    """Of the first completion's tokens of each group, one after the other. [tokens]"""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).cuda()
    parts = []
    for g in groups:
        answer = torch.tensor(g.completions[0].token_ids, device="cuda")
        row = torch.cat([torch.tensor(g.prompt.token_ids, device="cuda"), answer])
        table = lm(row[None]).logits[0, len(g.prompt.token_ids) - 1 : -1].float().log_softmax(-1)
        parts.append(table.gather(-1, answer[:, None])[:, 0].cpu())
    return torch.cat(parts)


def waking(place: Placement, *, model: str) -> None:
    """Something else takes the GPU while the engine sleeps."""
    cfg = GeneratorConfig(gpu_memory_utilization=0.3, enforce_eager=True, engine={"kv_cache_memory_bytes": 8 * GIB})
    job = Job.start(place, model, cfg=cfg, seq_len=128)
    job.publish()
    job.generator._residency = "drops its KV cache"
    with job.generator.asleep(until_load=False):
        taken = torch.empty(torch.cuda.mem_get_info()[0] - GIB, dtype=torch.uint8, device=place.device)
        assert taken.numel()


def budget(place: Placement, *, model: str) -> dict[str, Any]:
    """Live bytes of every resident, and the peaks of training and scoring a full row, with what --plan says of each."""
    training, source, shape = TrainingConfig(seq_len=4096), ModelSource(model), Shape.read(model, None)
    assert shape is not None
    plan = replace(place.plan, reference=place.plan.trainer)
    told = Estimate(shape, plan, torch.bfloat16, torch.bfloat16, training.row_tokens, training.switches)
    live, found = torch.cuda.memory_allocated, {}

    def spread(**options: Any) -> Model:
        return Model(source, place.trainer, dtype="bfloat16", temperature=1.0, max_tokens=training.row_tokens, **options)

    start = live()
    policy = spread(trainable=True)
    found["weights"] = live() - start
    start = live()
    reference = spread(trainable=False)
    found["reference"] = live() - start
    start = live()
    idle = spread(trainable=False, parked=True)
    parked = live() - start
    trainer = Trainer(policy, training, GRPOLoss())
    trainer._adamw.register_step_pre_hook(lambda *_: found.update(gradients=trainer.residents()["gradients"]))
    draw = np.random.default_rng(0)
    ones = np.ones(320, np.float32)
    questions = draw.integers(100, 40_000, (8, 1536))  # four of them and their 8 answers each are a row: 16,384 tokens, 65,536 keys
    rows = [(i, np.concatenate([questions[i], draw.integers(100, 40_000, 320)])) for i in range(8) for _ in range(8)]
    episodes = [Episode(row, 1536, ones, draw.normal() * ones, group=i) for i, row in rows]
    torch.cuda.reset_peak_memory_stats()
    start = live()
    scored = [model.logprobs(episodes) for model in (reference, idle)]
    found["scoring"] = torch.cuda.max_memory_allocated() - start - found["reference"]
    equal = len(scored[0]) == 64 and all(np.array_equal(scored[0][i], scored[1][i]) for i in range(64))
    start = live()
    trainer.train(episodes, 0)
    found["moments"] = live() - start
    torch.cuda.reset_peak_memory_stats()
    trainer.train(episodes, 1)
    found["peak"] = torch.cuda.max_memory_allocated() - start
    cfg, total = GeneratorConfig(gpu_memory_utilization=0.3, enforce_eager=True), capacity(place.device)
    generator = Generator(source, cfg, place, dtype="bfloat16", seq_len=4096, seed=0, policy_bytes=policy.local_bytes)
    generator.load(stream_weights(policy.shards(), place, generator.dtype), version=0)
    found |= {f"engine_{name}": count for name, count in generator.residents().items()}
    with generator.asleep(until_load=True):
        asleep = generator.residents()
    generator.load(stream_weights(policy.shards(), place, generator.dtype), version=1)
    generator.close()
    expected = {
        "weights": told.weights, "reference": told.reference, "gradients": told.gradients, "scoring": told.scoring,
        "moments": told.training.kept, "peak": told.training.peak, "engine_weights": told.engine_weights,
        "engine_kv_cache": int(total * 0.3) - told.engine_weights,
    }  # fmt: skip
    return {"live": found, "told": expected, "parked": parked, "equal": equal, "asleep": asleep, "choice": generator._residency}


RUNS = (engine, sync, stages, tensor_parallel, exported, waking, first_step, moved, budget)


def main() -> None:
    spec_path, report_path = map(Path, sys.argv[1:])
    spec = json.loads(spec_path.read_text())
    arguments, nproc = spec["arguments"], spec["nproc"]
    services = ServicesConfig(generator=ServiceConfig(procs=nproc))
    plan = Plan.make(services, ParallelismConfig(), colocate=True, wants_reference=False, world_size=nproc)
    place = Placement.build(plan, arguments.pop("device", "cuda"))
    report = {run.__name__: run for run in RUNS}[spec["run"]](place, **arguments)
    if place.is_root:
        report_path.write_text(json.dumps(report))


if __name__ == "__main__":
    launch(main)

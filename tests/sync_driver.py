"""Run by tests/test_weight_sync.py under torchrun: policy, trainer and engine as train_grpo.py builds them, and what each rank saw.

    torchrun --nproc-per-node=2 tests/sync_driver.py spec.json report.json

The spec: `services`, `parallelism` and `colocate` as in a config, or `ranks` of trainer and generator (one engine), and `cases`, a
list of {name, run, ...}. `run` names one of RUNS, the other keys are its arguments. The report: {name: [what it returned, by rank]}.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from batch import Episode, Group, Prompt, to_episodes
from losses import GRPOLoss
from model import Model, ModelSource
from parallel.exchange import everyone, in_order
from parallel.launch import launch
from parallel.names import to_checkpoint
from parallel.placement import Placement
from parallel.roles import ParallelismConfig, Plan, RolePlan, ServiceConfig, ServicesConfig
from parallel.weights import Bucket, NamedTensor, stream_weights
from rollout.generator import Generator, GeneratorConfig
from rollout.loading import checkpoint_slices, verify
from rollout.sampling import Sampling
from tests.cases import answer
from trainer import Trainer, TrainingConfig

SEQ_LEN = 256
TEMPERATURE = 0.7
LONG = 200  # tokens of a prompt that fills a block of the CPU's prefix cache (128)
SAMPLED = Sampling(TEMPERATURE, max_new_tokens=16, seed=0)
GREEDY = Sampling(0.0, max_new_tokens=16)


@dataclass
class Job:
    """The handles of train_grpo.py, and what its loop does with them."""

    place: Placement
    policy: Model
    trainer: Trainer
    generator: Generator
    vocabulary: int
    step: int = 0

    @classmethod
    def start(cls, place: Placement, model: str, *, engine_dtype: str = "float32", seed: int = 0, engine: dict | None = None) -> "Job":
        source = ModelSource(model)
        tokenizer = source.tokenizer()
        training = TrainingConfig(dtype="float32", learning_rate=1e-2, seq_len=SEQ_LEN)
        policy = Model(
            source, place.trainer, dtype=training.dtype, temperature=TEMPERATURE, max_tokens=training.row_tokens, trainable=True
        )
        trainer = Trainer(policy, training, GRPOLoss())
        settings = GeneratorConfig(dtype=engine_dtype, engine=engine or {})
        generator = Generator(source, settings, place, dtype=training.dtype, seq_len=SEQ_LEN, seed=seed)
        return cls(place, policy, trainer, generator, len(tokenizer))

    def prompts(self, lengths: Iterable[int] = (3, 10, LONG, 40), seed: int = 0) -> list[Prompt]:
        draw = np.random.default_rng(seed)
        return [Prompt(i, draw.integers(3, self.vocabulary, n).tolist()) for i, n in enumerate(lengths)]

    def train(self, steps: int) -> list[dict[str, float]]:
        """Real optimizer steps on random episodes, the same on every rank."""
        results = []
        for _ in range(steps):
            draw = np.random.default_rng(1000 + self.step)
            episodes = []
            for i in range(8):
                ids = draw.integers(3, self.vocabulary, 30)
                advantages = np.full(20, draw.normal(), np.float32)
                episodes.append(Episode(ids, 10, np.ones(20, np.float32), advantages, group=i // 2))
            results.append(self.trainer.train(episodes, self.step))
            self.step += 1
        return results

    def buckets(self, bucket_bytes: int = 40_000) -> Iterator[Bucket]:
        """Small enough that there are several, and that one of them holds q while the next holds v."""
        return stream_weights(self.policy.shards(), self.place, self.generator.dtype, bucket_bytes=bucket_bytes)

    def publish(self) -> None:
        self.generator.load(self.buckets(), version=self.step)

    def sample(self, sampling: Sampling = SAMPLED, n_samples: int = 3, **options: Any) -> list[Group]:
        return everyone(self.generator.generate(self.prompts(**options), n_samples, sampling), self.place.generator, self.place)

    def gaps(self, groups: list[Group]) -> np.ndarray:
        """|engine's - policy's| log-prob of every sampled token."""
        episodes = to_episodes(groups, mask_truncated=False, old_from_sampler=False)
        own = in_order(self.policy.logprobs(episodes), self.policy.grid, self.place)
        return np.concatenate([np.abs(e.gen_logprobs - values) for e, values in zip(episodes, own, strict=True)])

    def weights(self) -> dict[str, Tensor]:
        """The policy's, whole, in the engine's dtype; {} on ranks that do not train."""
        whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in self.policy.shards().items()}
        return dict(pair for n, t in whole.items() for pair in to_checkpoint(n, t.detach().to(self.generator.dtype)))

    @torch.no_grad()
    def head_error(self) -> float | None:
        """How far the engine's head is from the weight it was sent, largest |difference of logits| on random hidden states.

        None where there is no engine, or its tensor-parallel peer has the logits.
        """
        weights = {t.name: t.tensor for bucket in self.buckets() for t in bucket}
        if self.generator._llm is None:
            return None
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        hidden = torch.randn(5, head.shape[1], generator=torch.Generator().manual_seed(0)).to(head.dtype)
        with self.generator._inside():
            engine = self.generator._model()
            logits = engine.compute_logits(hidden)
        want, cap = linear(hidden, head).float(), engine.config.to_dict().get("final_logit_softcapping")
        want = want if cap is None else cap * torch.tanh(want / cap)
        return None if logits is None else float((logits.float() - want).abs().max())


def tensors_in(folder: str) -> set[str]:
    with safe_open(Path(folder) / "model.safetensors", "pt") as file:
        return set(file.keys())


def error_of(action: Callable[[], Any]) -> str | None:
    """The message with which `action` fails; None when it does not."""
    try:
        action()
    except (RuntimeError, ValueError, KeyError) as error:
        return f"{error}"
    return None


def ids(groups: list[Group]) -> list[list[list[int]]]:
    return [[c.token_ids for c in g.completions] for g in groups]


# The runs


def agreement(place: Placement, *, model: str, engine_dtype: str) -> dict[str, Any]:
    """Publish, train, publish: log-probs and tensors before and after."""
    job = Job.start(place, model, engine_dtype=engine_dtype)
    job.publish()
    before = job.sample()
    first = job.gaps(before)
    job.train(3)
    stale = job.gaps(before)
    job.publish()
    groups = job.sample()
    gaps = job.gaps(groups)
    weights = job.weights()
    result: dict[str, Any] = {
        "first": float(first.max()), "stale": float(stale.max()), "gap": float(gaps.max()), "mean": float(gaps.mean()), "tokens": len(gaps),
        "versions": sorted({c.policy_version for g in groups for c in g.completions}), "head_error": job.head_error(),
    }
    if job.generator._llm is not None:
        slices = checkpoint_slices(job.generator._model())
        result["misnamed"] = sorted(tensors_in(model) ^ set(slices))
        result["tensors"] = len(slices)
        whole = [n for n, t in weights.items() if t.shape == slices[n].shape]  # all on TP 1; {} where the policy is elsewhere
        result["whole"] = len(whole)
        result["different"] = [n for n in whole if not torch.equal(weights[n], slices[n])]
        linears = [m for m in job.generator._model().modules() if "cpu_linear" in vars(m)]
        result["packed"] = sum(m.cpu_linear is not linear or not m.weight.numel() for m in linears)
        result["linears"] = len(linears)
    job.generator.close()
    return result


@torch.no_grad()
def ways(place: Placement, *, model: str, engine_dtype: str) -> dict[str, Any]:
    """The policy, copied by us and loaded by vLLM, each into an engine of which nothing is left, as after a deep sleep."""
    job = Job.start(place, model, engine_dtype=engine_dtype)
    job.publish()
    known = sorted(job.generator._loader.cuts) if job.generator._llm is not None else []
    with torch.enable_grad():
        job.train(1)
    generator, weights = job.generator, job.weights()
    if generator._llm is None:
        job.publish()
        job.publish()
        return {}
    engine = generator._model()
    result: dict[str, Any] = {"tensors": sorted(checkpoint_slices(engine)), "known": known}
    given: list[str] = []
    load_weights = engine.load_weights

    def watching(weights: Iterable[tuple[str, Tensor]]) -> Any:
        named = list(weights)
        given.extend(name for name, _ in named)
        return load_weights(named)

    engine.load_weights = watching
    loaded = []
    for forgets in (False, True):
        for parameter in engine.parameters():
            parameter.fill_(float("nan"))
        if forgets:
            generator._loader.cuts.clear()
        given.clear()
        job.publish()
        result["given again" if forgets else "given"] = sorted(given)
        loaded.append({name: parameter.clone() for name, parameter in engine.named_parameters()})
    result["different"] = [name for name, parameter in loaded[0].items() if not torch.equal(parameter, loaded[1][name])]
    slices = checkpoint_slices(engine)
    result["not the policy's"] = [n for n, t in weights.items() if t.shape == slices[n].shape and not torch.equal(t, slices[n])]
    generator.close()
    return result


def violations(place: Placement, *, model: str, engine_dtype: str, rank: int) -> dict[str, Any]:
    """What verification says to each fault; the engine's tensors are damaged on the world's `rank` alone."""
    job = Job.start(place, model, engine_dtype=engine_dtype)
    job.train(1)
    buckets = list(job.buckets())
    result: dict[str, Any] = {"clean": error_of(job.publish)}
    sent = {t.name: (t.checksum, t.tensor.numel()) for bucket in buckets for t in bucket}
    generator = job.generator
    here = generator._llm is not None and rank == torch.distributed.get_rank()
    for kind, name in (("q", "model.layers.1.self_attn.q_proj.weight"), ("down", "model.layers.0.mlp.down_proj.weight"),
                       ("norm", "model.norm.weight"), ("embedding", "model.embed_tokens.weight")):
        flip = [checkpoint_slices(generator._model())[name].data] if here else []
        for tensor in flip:
            flip_last_bit(tensor)
        result[kind] = error_of(lambda: verify(generator._model(), sent, generator._replica)) if generator._llm is not None else None
        for tensor in flip:
            flip_last_bit(tensor)
    result["mended"] = error_of(lambda: verify(generator._model(), sent, generator._replica)) if generator._llm is not None else None

    stranger = NamedTensor("model.layers.1.mlp.gate_up_norm.weight", torch.ones(4, dtype=generator.dtype), torch.tensor(0))
    result["unknown"] = error_of(lambda: generator.load(iter([*buckets, [stranger]]), 7))
    left_out = [[t for t in bucket if t.name != "model.layers.0.mlp.up_proj.weight"] for bucket in buckets]
    result["missing"] = error_of(lambda: generator.load(iter(left_out), 8))
    damaged = [[flipped(t) if t.name == "model.layers.0.mlp.up_proj.weight" else t for t in bucket] for bucket in buckets]
    result["on_the_way"] = error_of(lambda: generator.load(iter(damaged), 9))
    result["version"] = generator.version
    result["again"] = error_of(job.publish)
    generator.close()
    return result


def flip_last_bit(tensor: Tensor) -> None:
    """The least significant bit of the last element."""
    bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    bits[(-1,) * bits.ndim] ^= 1


def flipped(sent: NamedTensor) -> NamedTensor:
    copy = sent.tensor.clone()
    flip_last_bit(copy)
    return sent._replace(tensor=copy)


def packed_head(place: Placement, *, model: str) -> dict[str, Any]:
    """The trap: an engine that keeps its own copy of the head's weight, which a sync does not reach."""
    job = Job.start(place, model)
    job.publish()
    head = job.generator._model().lm_head
    copy = head.weight.detach().clone()
    plain = head.cpu_linear
    job.train(1)
    head.cpu_linear = lambda x, weight, bias=None: linear(x, copy, bias)
    job.publish()
    result: dict[str, Any] = {"head_error": job.head_error(), "gap": float(job.gaps(job.sample()).max())}
    head.cpu_linear = plain
    result |= {"plain_head_error": job.head_error(), "plain_gap": float(job.gaps(job.sample()).max())}
    job.generator.close()
    return result


@contextmanager
def watched(generator: Generator) -> Iterator[list[int]]:
    """Counts the prompt tokens that each request found in the prefix cache."""
    cached: list[int] = []
    generate = generator._llm.generate

    def watching(*args: Any, **kwargs: Any) -> list:
        outputs = generate(*args, **kwargs)
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    generator._llm.generate = watching
    yield cached
    generator._llm.generate = generate


def prefix_cache(place: Placement, *, model: str) -> dict[str, Any]:
    """Field case WS-01, on one rank: a long prompt, again, again after a sync, and in a new engine with the new weights."""
    job = Job.start(place, model)
    job.publish()
    asked: dict[str, Any] = {"sampling": GREEDY, "n_samples": 1, "lengths": [LONG]}
    result: dict[str, Any] = {}
    with watched(job.generator) as cached:
        old = job.sample(**asked)
        job.sample(**asked)
        job.train(3)
        kept = job.generator._llm.reset_prefix_cache
        job.generator._llm.reset_prefix_cache = lambda: True  # the violation
        job.publish()
        stale = job.sample(**asked)
        job.generator._llm.reset_prefix_cache = kept
        job.publish()
        new = job.sample(**asked)
        job.sample(**asked)
        result["cached"] = list(cached)
    job.generator.close()

    training = TrainingConfig(dtype="float32", seq_len=SEQ_LEN)
    generator = Generator(job.policy.source, GeneratorConfig(), place, dtype=training.dtype, seq_len=SEQ_LEN, seed=5)
    fresh_job = replace(job, generator=generator)
    fresh_job.publish()
    fresh = fresh_job.sample(**asked)
    generator.close()
    result |= {
        name: {"ids": ids(groups)[0][0], "logprobs": groups[0].completions[0].logprobs}
        for name, groups in (("old", old), ("stale", stale), ("new", new), ("fresh", fresh))
    }
    return result


def moved_embedding(place: Placement, *, model: str) -> dict[str, Any]:
    """Field case WS-02: 0.01 is added to a tied model's embedding."""
    job = Job.start(place, model)
    job.publish()
    shards = job.policy.shards()
    with torch.no_grad():
        shards["model.embed_tokens.weight"].add_(0.01)
    buckets = list(job.buckets())
    job.generator.load(iter(buckets), version=1)
    engine = job.generator._model()
    rows = job.weights()["model.embed_tokens.weight"]
    count = len(rows)
    result = {
        "embedding": torch.equal(engine.model.embed_tokens.weight[:count], rows),
        "head": torch.equal(engine.lm_head.weight[:count], rows),
        "head_error": job.head_error(),
        "gap": float(job.gaps(job.sample()).max()),
        "sent": sum(map(len, buckets)),
        "expected": len(tensors_in(model)),
    }
    job.generator.close()
    return result


def sampling(place: Placement, *, model: str, seeds: list[int], seeded: bool) -> list[list]:
    """Field case VL-01: tokens of the same prompts on every rank, one engine after the other, each with its run's seed."""
    runs = []
    for seed in seeds:
        job = Job.start(place, model, seed=seed)
        torch.rand(1 + torch.distributed.get_rank())  # ranks do not agree about torch's global random numbers
        job.publish()
        how = replace(SAMPLED, seed=seed if seeded else None)
        twice = [p for p in job.prompts([20, 20]) for _ in range(job.place.generator.num_replicas)]  # to every replica both
        groups = job.generator.generate(twice, 4, how) + job.generator.generate(twice, 4, how)
        runs.append(ids(groups))
        job.generator.close()
    return runs


def greedy(place: Placement, *, model: str, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """vLLM's own loader on a checkpoint: greedy tokens."""
    generator = Generator(
        ModelSource(model), GeneratorConfig(engine={"load_format": "auto"}), place, dtype="float32", seq_len=SEQ_LEN, seed=0
    )
    generator.version = 0  # its weights came from the folder
    groups = generator.generate([Prompt(i, p) for i, p in enumerate(prompts)], 1, replace(GREEDY, max_new_tokens=max_new_tokens))
    generator.close()
    return [g.completions[0].token_ids for g in groups]


RUNS = (agreement, ways, violations, packed_head, prefix_cache, moved_embedding, sampling, greedy)


def main() -> None:
    spec_path, report_path = map(Path, sys.argv[1:])
    spec = json.loads(spec_path.read_text())
    services = ServicesConfig(**{role: ServiceConfig(**options) for role, options in spec["services"].items()})
    world = int(os.environ.get("WORLD_SIZE", 1))
    parallelism = ParallelismConfig(**spec["parallelism"])
    plan = Plan.make(services, parallelism, colocate=spec["colocate"], wants_reference=False, world_size=world)
    if spec["ranks"]:
        trainer, generator = spec["ranks"]["trainer"], spec["ranks"]["generator"]
        plan = Plan(world, RolePlan(trainer), RolePlan(generator, tp=len(generator)), None)
    answer(RUNS, spec["cases"], Placement.build(plan, "cpu"), report_path)


if __name__ == "__main__":
    launch(main)

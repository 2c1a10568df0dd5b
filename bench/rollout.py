"""Sampling: Generator.generate against vLLM's own loop and transformers' generate: JSON lines on stdout.

    python -m bench.rollout [--shape tiny] [--prompts 8] [--samples 4] [--prompt 32] [--new 32] [--device auto]

Random weights, answers of fixed length. Three ways to the same number of tokens:

    ours            Generator.generate, to completions with text and log-probs
    bare            LLM.generate of the same engine, with the very requests and parameters that ours gave it
                    (so with what the project changes in vLLM, such as how it keeps log-probs, and without detokenising)
    transformers    generate of the same weights, sampling as well

`step_ms` is the wall time of a decode step, `host_ms` the CPU time of this process in it. Exit code 1, and no figures, where ours and
bare sample other tokens (on a GPU, where samples have no seeds of their own: have another mean log-prob), where a way makes another
number of tokens, or where the engine's log-probs are not those of transformers for the same tokens. With several --prompts or --lengths:
step = a + b x B x context of ours, fitted; a is weights and host, b the KV cache, which `kv_gb_per_s` compares with the memory's speed.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from batch import Group, Prompt
from bench.measure import alone, alternate, arguments, compared, dtype_of, figure, line_through, positive, refuse, say, stop, timed, where
from bench.shapes import PAD, SHAPES, write_checkpoint
from model import Model, ModelSource
from parallel.hardware import computes_reproducibly
from parallel.launch import launch
from parallel.placement import Placement
from parallel.weights import stream_weights
from rollout.generator import Generator, GeneratorConfig
from rollout.sampled import numbers
from rollout.sampling import Sampling

GAP = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # mean difference of log-probs between engine and transformers


def drawn(count: int, length: int, vocabulary: int) -> list[Prompt]:
    draw = np.random.default_rng(count)
    return [Prompt(i, draw.integers(1, vocabulary, length).tolist()) for i in range(count)]


def engine(folder: str, place: Placement, dtype: torch.dtype, options: argparse.Namespace, **arguments: Any) -> Generator:
    """With the checkpoint's weights in it, given as a run gives them. arguments: of generator.engine."""
    named, source = str(dtype).removeprefix("torch."), ModelSource(folder)
    longest = max(options.lengths) + options.new
    limits: dict[str, Any] = {"dtype": named, "temperature": 1.0, "max_tokens": longest}
    policy = Model(source, place.trainer, trainable=False, **limits)
    most = max(options.prompts) * options.samples
    cfg = GeneratorConfig(max_num_seqs=most, gpu_memory_utilization=options.memory, enforce_eager=options.eager, engine=arguments)
    generator = Generator(source, cfg, place, named, longest, longest, seed=0, policy_bytes=policy.local_bytes)
    generator.load(stream_weights(policy.shards(), place, generator.dtype), version=0)
    return generator


class Ways:
    """Of sampling the same prompts."""

    def __init__(self, generator: Generator, lm: Any, prompts: list[Prompt], samples: int, new: int, seed: int | None):
        """seed: of each sample's own; None: the engine's, as a run on a GPU has it."""
        self.generator, self.lm, self.prompts, self.samples, self.new = generator, lm, prompts, samples, new
        self.sampling = Sampling(1.0, new, seed=seed)
        self.asked: tuple[tuple, dict] | None = None  # what ours gives the engine
        llm = generator._llm
        self._generate = llm.generate

        def heard(*args: Any, **kwargs: Any) -> Any:
            self.asked = (args, kwargs)
            return self._generate(*args, **kwargs)

        llm.generate = heard
        self.groups = self.ours()
        llm.generate = self._generate
        if self.asked is None:
            stop("Generator.generate does not call the engine's generate any more: bench.rollout must follow it")

    def ours(self, new: int | None = None) -> list[Group]:
        sampling = self.sampling if new is None else replace(self.sampling, max_new_tokens=new)
        return self.generator.generate(self.prompts, self.samples, sampling)

    def bare(self) -> list[Any]:
        assert self.asked is not None
        args, kwargs = self.asked
        with self.generator._inside():
            return self._generate(*args, **kwargs)

    @torch.no_grad()
    def transformers(self) -> torch.Tensor:
        """[sequences, prompt + new]; the prompts are of one length."""
        ids = torch.tensor([p.token_ids for p in self.prompts for _ in range(self.samples)], device=self.lm.device)
        limits: dict[str, Any] = {"max_new_tokens": self.new, "pad_token_id": PAD}  # no word ends a sequence of this model
        return self.lm.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, temperature=1.0, **limits)

    @torch.no_grad()
    def logprobs(self) -> np.ndarray:
        """transformers' own, of the tokens that ours sampled, one after the other."""
        found = []
        for group in self.groups:
            for completion in group.completions:
                ids = torch.tensor([group.prompt.token_ids + completion.token_ids], device=self.lm.device)
                scores = self.lm(ids).logits[0, -len(completion.token_ids) - 1 : -1].float().log_softmax(-1)
                found.append(scores.gather(-1, ids[0, -len(completion.token_ids) :, None])[:, 0].cpu().numpy())
        return np.concatenate(found)


def wrong(ways: Ways, gap: float, same: bool) -> tuple[list[str], dict[str, float]]:
    """Where the ways do not do the same, and the figures of the comparison. same: bit for bit."""
    completions = [c for g in ways.groups for c in g.completions]
    ours = [c.token_ids for c in completions]
    outputs = [o for request in ways.bare() for o in request.outputs]
    bare = [list(o.token_ids) for o in outputs]
    count = len(ways.prompts) * ways.samples * ways.new
    lengths = {"ours": sum(map(len, ours)), "bare": sum(map(len, bare))}
    lengths["transformers"] = ways.transformers()[:, len(ways.prompts[0].token_ids) :].numel()
    found = [f"{way} made {n} tokens, and {count} were asked for" for way, n in lengths.items() if n != count]
    equal = float(np.mean([a == b for a, b in zip(ours, bare, strict=True)]))
    if same and equal < 1:
        found.append(f"ours and bare agree in {equal:.0%} of the sequences")
    sampled = np.concatenate([c.logprobs for c in completions])
    means = {"ours": float(sampled.mean()), "bare": float(np.mean([v for o in outputs for v in numbers(o.logprobs, list(o.token_ids))]))}
    if not abs(means["ours"] - means["bare"]) <= 0.02 * abs(means["bare"]):
        found.append(f"the mean log-prob of ours is {means['ours']:.4f}, and of bare {means['bare']:.4f}")
    gaps = np.abs(sampled - ways.logprobs())
    if not gaps.mean() <= gap:
        found.append(f"the engine's log-probs differ from transformers' by {gaps.mean():.2e} on average, and {gap:g} is allowed")
    return found, {"sequences_equal": round(equal, 4), "gap_mean": figure(float(gaps.mean())), "gap_max": figure(float(gaps.max()))}


def run(options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(options.threads)
    place = alone(options.device)
    device, sizes = place.device, SHAPES[options.shape][1]
    dtype = dtype_of(options.dtype, device)
    write_checkpoint(Path(folder), options.shape, dtype=dtype)
    generator = engine(folder, place, dtype, options)
    machine = where(device, dtype)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    points: list[tuple[float, float, float]] = []
    for count in options.prompts:
        for length in options.lengths:
            prompts = drawn(count, length, sizes["vocab_size"])
            repeats = computes_reproducibly(device)
            ways = Ways(generator, lm, prompts, options.samples, options.new, seed=1 if repeats else None)
            errors, checked = wrong(ways, options.gap or GAP[dtype], repeats)
            refuse(errors)
            tokens = count * options.samples * options.new
            tried: dict[str, Callable[[], Any]] = {"bare": ways.bare, "ours": ways.ours}
            tried |= {"transformers": ways.transformers} if options.peer == "transformers" else {}
            named = {"shape": options.shape, "sequences": count * options.samples, "prompt": length, "new": options.new}
            for way, figures in compared(alternate(tried, options.rounds), "bare").items():
                line = {"way": way, "tokens_per_s": figure(tokens / figures["seconds"])}
                line |= {"step_ms": figure(1e3 * figures["seconds"] / options.new)}
                line |= {"host_ms": figure(1e3 * figures["cpu_seconds"] / options.new)} | figures
                case = f"{options.shape}, {count} x {options.samples} x ({length} + {options.new})"
                say("rollout", case, **named, **line, **(checked if way == "ours" else {}), **machine)
            points.append(decode_step(ways, count * options.samples, length, options))
    if len({x for x, _, _ in points}) > 1:
        law(points, sizes, dtype, machine)
    generator.close()


def decode_step(ways: Ways, sequences: int, prompt: int, options: argparse.Namespace) -> tuple[float, float, float]:
    """B x context, and the wall and CPU milliseconds of a decode step there: half of the tokens against all of them."""
    half = max(options.new // 2, 1)
    ways.ours(half)
    runs = {n: [timed(partial(ways.ours, n)) for _ in range(options.rounds)] for n in (options.new, half)}
    walls, cpus = ([statistics.median(vars(s)[kind] for s in runs[n]) for n in (options.new, half)] for kind in ("wall", "cpu"))
    steps = max(options.new - half, 1)
    context = prompt + (options.new + half) / 2
    return sequences * context, 1e3 * (walls[0] - walls[1]) / steps, 1e3 * (cpus[0] - cpus[1]) / steps


def law(points: list[tuple[float, float, float]], sizes: dict[str, Any], dtype: torch.dtype, machine: dict[str, Any]) -> None:
    cached = 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"] * dtype.itemsize
    xs = [x for x, _, _ in points]
    (a, b), (cpu_a, cpu_b) = (line_through(xs, [p[i] for p in points]) for i in (1, 2))
    found = {"step_ms_a": figure(a), "step_ms_b": figure(b), "cpu_ms_a": figure(cpu_a), "cpu_ms_b": figure(cpu_b)}
    found |= {"kv_bytes_per_token": cached, "kv_gb_per_s": figure(cached / b / 1e6) if b > 0 else 0.0}
    say("rollout", "law: step = a + b x B x context", points=[[figure(v) for v in p] for p in points], **found, **machine)


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of the model")
    parser.add_argument("--prompts", type=positive, nargs="+", default=[4, 8], help="of a call; one case each")
    parser.add_argument("--samples", type=positive, default=4, help="of a prompt")
    parser.add_argument("--lengths", type=positive, nargs="+", default=[32, 96], help="tokens of a prompt; one case each")
    parser.add_argument("--new", type=positive, default=32, help="tokens of an answer")
    parser.add_argument("--memory", type=float, default=0.4, help="generator.gpu_memory_utilization")
    parser.add_argument("--eager", action="store_true", help="generator.enforce_eager")
    parser.add_argument("--gap", type=float, help="mean difference of log-probs that is allowed")
    parser.add_argument("--peer", choices=("transformers", "none"), default="transformers", help="timed besides vLLM's own loop")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        launch(lambda: run(options, folder))


if __name__ == "__main__":
    main()

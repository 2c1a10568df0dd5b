"""Where the sampler and the trainer part: one batch through both, layer by layer, against the same weights in more bits.

    python -m rollout.doctor MODEL [--dtype bfloat16] [--temperature 1.0] [--tokens 64] [--prompts FILE] [--match]
        [--fp32-logits] [--compiled] [--device auto] [--json]

MODEL is a folder or a hub id. The engine samples, then both sides compute the very same token ids: the engine as it sampled them
(token by token) and as a prompt, the trainer in one packed row with equal prompts in it once, as in a run, and a sequence at a time.
docs/mismatch.md says how to read it. --prompts: a JSON object a line with {"prompt": text} or {"prompt_token_ids": [...]}, and if
nothing is to be sampled "response_token_ids".
"""

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from batch import Completion, Episode, Group, Prompt, to_batch, to_episodes
from config import model_source
from model import Model, ModelSource
from parallel.launch import launch
from parallel.placement import Placement
from parallel.plans import reshard
from parallel.roles import ParallelismConfig, Plan
from parallel.switches import ALL_OFF, Switches
from parallel.weights import stream_weights
from rollout.generator import Generator, GeneratorConfig
from rollout.sampling import Sampling
from rollout.trace import STREAM, traced

PROMPTS = (  # whose answers any language model has something to choose in
    "Question: A shop sells pens at 3 dollars each. How much do 17 pens cost?\nAnswer:",
    "The three largest cities of Europe, and what they are known for:",
    "Once upon a time, in a village by the sea,",
    "12 + 35 = 47\n8 + 64 =",
)
# The wider type in which the same weights are computed, to say which side is off.
WIDER = {"bfloat16": "float32", "float32": "float64"}
# Log-probs that are compared: as sampled and as a prompt by the engine, in packed rows and alone by the trainer, in more bits.
PAIRS = (
    ("trainer", "sampled"), ("prefill", "sampled"), ("trainer_alone", "prefill"), ("trainer", "trainer_alone"), ("sampled", "truth"),
    ("prefill", "truth"), ("trainer", "truth"),
)  # fmt: skip
ANSWERS = 2  # sampled for each prompt, so that a row has a prompt that is shared
CHUNK = 256  # tokens whose logits are in memory at once


@dataclass
class Far:
    """How far two tensors are apart, piece by piece."""

    total: float = 0.0
    largest: float = 0.0
    squares: float = 0.0
    size: float = 0.0  # of the tensor itself: its sum of squares
    count: int = 0

    def add(self, value: Tensor, base: Tensor) -> "Far":
        value, base = value.double(), base.double()
        gap = (value - base).abs()
        self.total += float(gap.sum())
        self.largest = max(self.largest, float(gap.max())) if gap.numel() else self.largest
        self.squares += float(gap.square().sum())
        self.size += float(base.square().sum())
        self.count += gap.numel()
        return self

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the tensor."""
        return math.sqrt(self.squares / self.size) if self.size else float(self.squares > 0)


def compare(value: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """Of log-probs of the same tokens, `value` in the trainer's place and `base` in the sampler's; names and meanings as in a run's log.

    >>> compare(np.array([-1.0, -2.0]), np.array([-1.0, -2.0]))
    {'mismatch/abs_mean': 0.0, 'mismatch/abs_max': 0.0, 'mismatch/mean': 0.0, 'mismatch/k3': 0.0, 'is/ess_token': 1.0}
    """
    gap = value.astype(np.float64) - base.astype(np.float64)
    weight = np.exp(gap)
    return {
        "mismatch/abs_mean": float(np.abs(gap).mean()),
        "mismatch/abs_max": float(np.abs(gap).max()),
        "mismatch/mean": float(gap.mean()),
        "mismatch/k3": float((np.expm1(gap) - gap).mean()),
        "is/ess_token": float(weight.sum() ** 2 / (len(weight) * np.square(weight).sum())),
    }


class Doctor:
    """Both sides of one model in this process, a world of one rank, with the same weights."""

    def __init__(
        self, source: ModelSource, *, dtype: str, temperature: float, seq_len: int, device: str, engine: dict, seed: int,
        switches: Switches = ALL_OFF, compiled: bool = False,
    ):  # fmt: skip
        """Load trainer and truth, start the engine and give it the trainer's weights.

        switches: of the trainer, as training.* makes them. compiled: the engine is as in a run, and cannot be looked into.
        """
        plan = Plan.make(None, ParallelismConfig(), colocate=True, wants_reference=False, world_size=1)
        self.place = Placement.build(plan, device)
        self.temperature, self.seed, self.compiled = temperature, seed, compiled
        self.dtype: torch.dtype = getattr(torch, dtype)
        alike: dict[str, Any] = {"temperature": temperature, "max_tokens": 1 << 20}
        self.trainer = Model(source, self.place.trainer, dtype=dtype, trainable=True, switches=switches, **alike)
        self.truth = Model(source, self.place.trainer, dtype=WIDER[dtype], trainable=False, **alike)
        with torch.no_grad():
            for shard in self.truth.shards().values():
                shard.copy_(shard.to(self.dtype))  # the weights that both sides compute with
        settings = GeneratorConfig(dtype=dtype, enforce_eager=not compiled, engine=engine)
        self.generator = Generator(source, settings, self.place, dtype, seq_len, switches=switches, seed=seed, policy_bytes=0)
        self.sync()

    def sync(self) -> None:
        self.generator.load(stream_weights(self.trainer.shards(), self.place, self.generator.dtype), version=0)

    def sample(self, prompts: list[Prompt], tokens: int, answers: int = 1) -> list[Episode]:
        groups = self.generator.generate(prompts, answers, Sampling(self.temperature, max_new_tokens=tokens, seed=self.seed))
        return to_episodes(groups, mask_truncated=False, old_from_sampler=False)

    def examine(self, episodes: list[Episode]) -> dict[str, Any]:
        """The report, as `--json` prints it; see docs/mismatch.md."""
        places: dict[str, dict[str, Far]] = {}
        logprobs: dict[str, list[np.ndarray]] = {name: [] for name in ("prefill", "trainer_alone", "truth")}
        for episode in episodes:
            engine = {} if self.compiled else self.generator.trace([int(token) for token in episode.token_ids])
            trainer, logprobs_of_trainer = scored(self.trainer, [episode])
            truth, logprobs_of_truth = scored(self.truth, [episode])
            for place in [place for place in trainer if place in engine]:
                sides = places.setdefault(place, {"gap": Far(), "engine": Far(), "trainer": Far()})
                sides["gap"].add(engine[place], trainer[place])
                sides["engine"].add(engine[place], truth[place])
                sides["trainer"].add(trainer[place], truth[place])
            if engine:
                finals = [side["final_norm"] for side in (engine, trainer, truth)]
                logprobs["prefill"].append(self._logits(episode, finals, places))
            logprobs["trainer_alone"].append(logprobs_of_trainer)
            logprobs["truth"].append(logprobs_of_truth)
        found = {name: np.concatenate(parts) for name, parts in logprobs.items() if parts}
        row, found["trainer"] = scored(self.trainer, episodes, shared_prompts=True)
        if all(episode.gen_logprobs is not None for episode in episodes):
            found["sampled"] = np.concatenate([episode.gen_logprobs for episode in episodes if episode.gen_logprobs is not None])
        table = {place: {name: vars(far) | {"relative": far.relative} for name, far in sides.items()} for place, sides in places.items()}
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "temperature": self.temperature,
            "sequences": len(episodes),
            "response_tokens": len(found["truth"]),
            "row_tokens": len(row["embedding"]),
            "places": {place: {name: _shown(far) for name, far in sides.items()} for place, sides in table.items()},
            "first_difference": next((place for place, sides in places.items() if sides["gap"].largest > 0), None),
            "suspect": self._suspect(places),
            "logprobs": {f"{value} - {base}": compare(found[value], found[base]) for value, base in PAIRS if {value, base} <= set(found)},
        }

    @torch.no_grad()
    def _logits(self, episode: Episode, finals: list[Tensor], places: dict[str, dict[str, Far]]) -> np.ndarray:
        """Enter the logits of the response tokens, and the log-probs that the engine's head makes. finals: engine, trainer, truth."""
        sides = places.setdefault("logits", {"gap": Far(), "engine": Far(), "trainer": Far()})
        logprobs = []
        for start in range(episode.num_prompt_tokens - 1, len(episode.token_ids) - 1, CHUNK):
            rows = slice(start, min(start + CHUNK, len(episode.token_ids) - 1))
            engine = self.generator.logits(finals[0][rows])
            trainer, truth = (_logits(model, final[rows]) for model, final in zip((self.trainer, self.truth), finals[1:], strict=True))
            sides["gap"].add(engine, trainer)
            sides["engine"].add(engine, truth)
            sides["trainer"].add(trainer, truth)
            scores = engine.log_softmax(-1) if self.temperature == 1 else (engine / self.temperature).log_softmax(-1)
            targets = torch.as_tensor(episode.token_ids[rows.start + 1 : rows.stop + 1], device=scores.device)
            logprobs.append(scores.gather(-1, targets[:, None])[:, 0].cpu().numpy())
        return np.concatenate(logprobs)

    def _suspect(self, places: dict[str, dict[str, Far]]) -> dict[str, str] | None:
        """The first place where one side is off from the truth by more than rounding, as the other side shows it; None: nowhere."""
        for place, sides in places.items():
            engine, trainer = sides["engine"].relative, sides["trainer"].relative
            if max(engine, trainer) > 4 * min(engine, trainer) + 2 * torch.finfo(self.dtype).eps:
                return {"place": place, "side": "engine" if engine > trainer else "trainer"}
        return None


@torch.no_grad()
def scored(model: Model, row: list[Episode], *, shared_prompts: bool = False) -> tuple[dict[str, Tensor], np.ndarray]:
    """What the modules of a model compute of a packed row, and the log-probs of its response tokens. shared_prompts: as in `to_batch`."""
    with traced(model.local.lm) as found:
        logprobs, _ = model.local(to_batch(row, model.device, shared_prompts=shared_prompts))
    reshard(model.local)
    return found, logprobs.cpu().numpy()


def _logits(model: Model, hidden: Tensor) -> Tensor:
    """[n, V], before the temperature, as head.py makes them."""
    head = model.local.lm.get_output_embeddings()
    hidden, weight = hidden.to(model.device, model.dtype), whole(head.weight).to(model.dtype)
    wide = torch.promote_types(model.dtype, torch.float32)
    logits = F.linear(hidden.to(wide), weight.to(wide)) if model.local.fp32_logits else F.linear(hidden, weight).to(wide)
    softcap = model.local.lm.config.get_text_config().to_dict().get("final_logit_softcapping")
    return logits if softcap is None else (logits / softcap).tanh() * softcap


def whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _shown(far: dict[str, Any]) -> dict[str, float]:
    return {"mean": far["total"] / max(far["count"], 1), "max": far["largest"], "relative": far["relative"]}


def text(report: dict[str, Any]) -> str:
    """The report as tables: the residual stream's places, the others of the first block that differs, and the log-probs."""
    first = report["first_difference"]
    block = first.rpartition("layers.")[2].partition(".")[0] if first and "layers." in first else None
    head = f"{'place':<28}{'mean |diff|':>13}{'max |diff|':>13}{'relative':>11}   {'engine off':>11}{'trainer off':>13}"
    lines = [f"{report['dtype']}, temperature {report['temperature']:g}, {report['response_tokens']} response tokens", "", head]
    for place, sides in report["places"].items():
        if place.endswith(STREAM) or place == "logits" or (block and place.startswith(f"layers.{block}.")):
            gap, off = sides["gap"], [sides[side]["relative"] for side in ("engine", "trainer")]
            lines.append(f"{place:<28}{gap['mean']:>13.2e}{gap['max']:>13.2e}{gap['relative']:>11.2e}   {off[0]:>11.2e}{off[1]:>13.2e}")
    lines += ["", f"first difference: {first or 'none'}"]
    suspect = report["suspect"]
    lines.append(f"more than rounding: {suspect['side'] + ' at ' + suspect['place'] if suspect else 'nowhere'}")
    lines += ["", f"{'log-probs':<28}{'mean |gap|':>13}{'max |gap|':>13}{'mean gap':>11}{'k3':>11}{'ESS':>10}"]
    for pair, found in report["logprobs"].items():
        mean, largest, signed, k3, ess = found.values()
        lines.append(f"{pair:<28}{mean:>13.2e}{largest:>13.2e}{signed:>11.1e}{k3:>11.2e}{ess:>10.6f}")
    return "\n".join(lines)


def read_prompts(path: Path | None, tokenizer: Any, vocabulary: int) -> tuple[list[Prompt], list[Group]]:
    """What is to be sampled from, and what is there already. ValueError names a line that is neither, or an id beyond the vocabulary."""
    prompts: list[Prompt] = []
    given: list[Group] = []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"--prompts={path}: line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        if not isinstance(row, dict) or not row.keys() & {"prompt", "prompt_token_ids"}:
            raise ValueError(f"{where} has neither prompt nor prompt_token_ids")
        if "prompt_token_ids" in row:
            ids = _token_ids(row, "prompt_token_ids", vocabulary, where)
        elif not isinstance(row["prompt"], str) or not (ids := tokenizer(row["prompt"]).input_ids):
            raise ValueError(f"{where} has a prompt without a token: it must be a text")
        prompt = Prompt(len(prompts) + len(given), ids)
        if "response_token_ids" in row:
            response = _token_ids(row, "response_token_ids", vocabulary, where)
            given.append(Group(prompt, [Completion("", response, [0.0] * len(response))]))
        else:
            prompts.append(prompt)
    if not prompts and not given:
        raise ValueError(f"--prompts={path} has no line")
    return prompts, given


def _lines(path: Path | None) -> list[str]:
    if path is None:
        return [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts={path} cannot be read: {error}") from error


def _token_ids(row: dict[str, Any], key: str, vocabulary: int, where: str) -> list[int]:
    ids = row[key]
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{where}: {key} must be a list of at least one token id")
    wrong = [token for token in ids if type(token) is not int or not 0 <= token < vocabulary]
    if wrong:
        raise ValueError(f"{where}: {key} has {json.dumps(wrong[0])}, which is no token id of the model: 0 to {vocabulary - 1}")
    return ids


def engine_arguments(value: str) -> dict[str, Any]:
    """What --engine says. ValueError where that is no JSON object."""
    try:
        found = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"--engine={value}: must be a JSON object of vLLM engine arguments ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"--engine={value}: must be a JSON object of vLLM engine arguments")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("--dtype", choices=WIDER, default="bfloat16", help="of both sides; the truth is computed in the next wider")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most; each prompt gets two answers")
    parser.add_argument("--prompts", type=Path, help="JSON lines; default: four short ones")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="{}", help="further vLLM engine arguments, a JSON object")
    parser.add_argument("--compiled", action="store_true", help="the engine with graphs, as a run has it on CUDA: log-probs only")
    parser.add_argument("--match", action="store_true", help="the trainer with training.match_sampler")
    parser.add_argument("--fp32-logits", action="store_true", help="both sides with training.fp32_logits")
    parser.add_argument("--json", action="store_true", help="the whole report as one JSON object")
    options = parser.parse_args()
    if not options.temperature > 0:
        raise ValueError(f"--temperature={options.temperature}: must be above 0, for log-probs are those of logits / temperature")
    if options.tokens < 1:
        raise ValueError(f"--tokens={options.tokens}: must be at least 1")
    options.engine = engine_arguments(options.engine)
    source = ModelSource(*model_source(options.model))
    vocabulary = source.read(AutoConfig).get_text_config().vocab_size
    prompts, given = read_prompts(options.prompts, source.tokenizer(), vocabulary)
    longest = max(
        [len(p.token_ids) + options.tokens for p in prompts] + [len(g.prompt.token_ids) + len(g.completions[0].token_ids) for g in given]
    )
    chosen = {key: vars(options)[key] for key in ("dtype", "temperature", "device", "engine", "seed")}
    switches = Switches(matched=options.match, fp32_logits=options.fp32_logits)
    with _quiet():
        doctor = Doctor(source, seq_len=longest + 1, switches=switches, compiled=options.compiled, **chosen)
        episodes = doctor.sample(prompts, options.tokens, ANSWERS) if prompts else []
        for episode in to_episodes(given, mask_truncated=False, old_from_sampler=False):
            episode.gen_logprobs = None  # nobody sampled it here
            episodes.append(episode)
        report = doctor.examine(episodes) | {"model": options.model}
    print(json.dumps(report) if options.json else text(report), flush=True)
    doctor.generator.close()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What libraries print meanwhile goes to stderr, so that stdout is the report alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    launch(main)

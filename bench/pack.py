"""Forward and backward of whole models over rows packed as the trainer packs them, against padding: JSON lines on stdout.

    python -m bench.pack [--shape small] [--sequences 4 8 16] [--prompt 64] [--longest 192] [--device auto]

A group of sequences of one prompt length and of log-normal response lengths, through a model with random weights:

    padded      transformers with sdpa over [sequences, longest], as most trainers do it
    dense       transformers with sdpa over one packed row, for which it makes a mask of all tokens against all
    packed      the project's row: batch.to_batch and attention.py
    shared      the same with the group's prompt in it once (training.shared_prompts)

All four end in the same head over the response tokens, so that what differs is the row. Their loss's gradients are compared first:
exit code 1, and no figures, where the relative error of one is above 1e-5 (fp32; bf16: 5e-2). `of_tokens` is the share of the gain that
the tokens promise: (padded / packed seconds) / (padded / packed tokens). The last lines: exponents of seconds in the tokens computed.
"""

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import attention
from batch import Episode, to_batch
from bench.measure import alone, alternate, arguments, compared, dtype_of, exponent, figure, refuse, relative_error, say, where
from bench.shapes import SHAPES, config_of, lengths_drawn
from head import logprobs_from_hidden
from model import ResponseLogprobs
from parallel.launch import launch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}  # of each gradient's norm


def drawn(sequences: int, prompt: int, longest: int, vocabulary: int) -> list[Episode]:
    """Sequences of random words, all of one prompt."""
    draw = np.random.default_rng(sequences)
    question = draw.integers(1, vocabulary, prompt)
    found = []
    for i, length in enumerate(lengths_drawn(sequences, longest)):
        ids = np.concatenate([question, draw.integers(1, vocabulary, length)])
        found.append(Episode(ids, prompt, np.ones(length, np.float32), np.full(length, draw.normal(), np.float32), sample=i))
    return found


class Case:
    """One group in every form, and the models that take them: the same weights under two kinds of attention."""

    def __init__(self, episodes: list[Episode], plain: nn.Module, ours: ResponseLogprobs, device: torch.device):
        self.episodes, self.plain, self.ours, self.device = episodes, plain, ours, device
        self.batch = to_batch(episodes, device)
        self.advantages = torch.as_tensor(np.concatenate([e.advantages for e in episodes])).to(device)
        lengths = [len(e.token_ids) for e in episodes]
        self.padded_ids = torch.zeros(len(episodes), max(lengths), dtype=torch.int64)
        for line, e in zip(self.padded_ids, episodes, strict=True):
            line[: len(e.token_ids)] = torch.as_tensor(e.token_ids)
        self.mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).to(device)
        self.padded_ids = self.padded_ids.to(device)
        starts = torch.arange(len(episodes)) * max(lengths)
        rows = [s + torch.arange(e.num_prompt_tokens - 1, len(e.token_ids) - 1) for s, e in zip(starts, episodes, strict=True)]
        self.padded_rows = torch.cat(rows).to(device)
        self.once = to_batch(episodes, device, shared_prompts=True)
        self.tokens = {"padded": self.padded_ids.numel(), "dense": sum(lengths), "packed": len(self.batch.token_ids)}
        self.tokens |= {"shared": len(self.once.token_ids)}

    def head(self, model: nn.Module, hidden: Tensor, rows: Tensor) -> Tensor:
        found, _ = logprobs_from_hidden(hidden.flatten(0, 1)[rows], model.get_output_embeddings().weight, self.batch.targets)
        return found

    def padded(self) -> Tensor:
        hidden = self.plain.model(input_ids=self.padded_ids, attention_mask=self.mask, use_cache=False).last_hidden_state
        return self.head(self.plain, hidden, self.padded_rows)

    def dense(self) -> Tensor:
        batch = self.batch
        hidden = self.plain.model(input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False)
        return self.head(self.plain, hidden.last_hidden_state, batch.rows)

    def packed(self) -> Tensor:
        return self.ours(self.batch)[0]

    def shared(self) -> Tensor:
        return self.ours(self.once)[0]

    def run(self, way: str) -> None:
        """The gradients are in the model that the way uses."""
        self.model(way).zero_grad()
        logprobs = {"padded": self.padded, "dense": self.dense, "packed": self.packed, "shared": self.shared}[way]()
        (-(logprobs * self.advantages).sum() / len(self.advantages)).backward()

    def gradients(self, way: str) -> dict[str, Tensor]:
        self.run(way)
        return {name: p.grad.detach().clone() for name, p in self.model(way).named_parameters() if p.grad is not None}

    def model(self, way: str) -> nn.Module:
        return self.ours.lm if way in ("packed", "shared") else self.plain


def disagreements(case: Case, tolerance: float) -> tuple[list[str], dict[str, float]]:
    """Who differs from `padded`, and everyone's largest relative error of a gradient. Also everyone's first, untimed run."""
    expected = case.gradients("padded")
    wrong, errors = [], {}
    for way in ("dense", "packed", "shared"):
        found = case.gradients(way)
        by_name = {name: relative_error(found[name], expected[name]) for name in expected}
        name = max(by_name, key=lambda n: by_name[n] if by_name[n] == by_name[n] else float("inf"))
        errors[way] = by_name[name]
        if not errors[way] <= tolerance:
            wrong.append(f"{way}: the gradient of {name} differs from padded's by {errors[way]:.1e} of its norm")
    return wrong, errors


def models(shape: str, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, ResponseLogprobs]:
    """The same random weights twice."""
    plain, ours = (  # a config each: the model writes its attention there
        AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype, attn_implementation=name).to(device)
        for name in ("sdpa", attention.NAME)
    )
    ours.load_state_dict(plain.state_dict())
    return plain, ResponseLogprobs(ours, 1.0)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    device = alone(options.device).device
    dtype = dtype_of(options.dtype, device)
    plain, ours = models(options.shape, dtype, device)
    vocabulary = SHAPES[options.shape][1]["vocab_size"]
    machine = where(device, dtype)
    lines: list[dict[str, Any]] = []
    for sequences in options.sequences:
        case = Case(drawn(sequences, options.prompt, options.longest, vocabulary), plain, ours, device)
        wrong, errors = disagreements(case, options.tolerance or TOLERANCE[dtype])
        refuse(wrong)
        figures = compared(alternate({way: partial(case.run, way) for way in case.tokens}, options.rounds), "padded")
        for way, found in figures.items():
            promised = case.tokens["padded"] / case.tokens[way]
            share = {"token_ratio": figure(promised), "of_tokens": figure(1 / found["cpu_seconds_ratio"]["median"] / promised)}
            share["of_tokens_wall"] = figure(1 / found["seconds_ratio"]["median"] / promised)
            line = {"shape": options.shape, "sequences": sequences, "prompt": options.prompt, "way": way, "tokens": case.tokens[way]}
            line |= found | share | {"gradient_error": errors.get(way, 0.0)}
            say("pack", f"{options.shape} {sequences} x ({options.prompt} + {options.longest})", **line, **machine)
            lines.append(line)
    for way in ("padded", "dense", "packed", "shared"):
        growing = [line for line in lines if line["way"] == way]
        if len(growing) > 1:
            tokens = [line["tokens"] for line in growing]
            law = {f"{name} ~ tokens^": round(exponent(tokens, [x[name] for x in growing]), 2) for name in ("seconds", "cpu_seconds")}
            say("pack", f"law of {way}", way=way, **law, **machine)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="of the model")
    parser.add_argument("--sequences", type=int, nargs="+", default=[4, 8, 16], help="of a group; one case each")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--longest", type=int, default=192, help="tokens of a response at most")
    parser.add_argument("--tolerance", type=float, help="of the gradients' relative error")
    options = parser.parse_args()
    launch(lambda: run(options))


if __name__ == "__main__":
    main()

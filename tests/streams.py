"""Small streams of examples, their tokenizers, and what the tests read off their episodes."""

import itertools
from pathlib import Path

import numpy as np

from batch import Episode
from examples import ExampleStream, SFTDataConfig
from tests.test_data import make_tokenizer, write

CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORGETFUL = (  # the answers before the last question are cut to their first letter, as some templates drop what was thought
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content[0] if m.role == 'assistant' and loop.index0 < ns.last else m.content }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
PLAIN, CHAT = make_tokenizer(adds_bos=True), make_tokenizer(CHATML)
QUESTION, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
MODES = ("truncate", "drop", "split")


def stream(*cfgs: SFTDataConfig, tokenizer=PLAIN, seed=1, seq_len=1000, overlong="truncate", **options) -> ExampleStream:
    return ExampleStream(list(cfgs), tokenizer, seed=seed, seq_len=seq_len, overlong=overlong, **options)


def dataset(path: Path, rows: list[dict], **cfg) -> SFTDataConfig:
    return SFTDataConfig(path=write(path, rows), **cfg)


def of_row(tmp_path: Path, row: dict, tokenizer=PLAIN, seq_len=1000, overlong="truncate", **cfg) -> list[Episode]:
    return stream(dataset(tmp_path / "row.jsonl", [row], **cfg), tokenizer=tokenizer, seq_len=seq_len, overlong=overlong).take(1)


def shown(episode: Episode, tokenizer=PLAIN) -> str:
    """Its text, what is trained in brackets; the tests' tokenizers have one token a character."""
    trained = np.concatenate([np.zeros(episode.num_prompt_tokens), episode.loss_mask]) > 0
    text = ""
    for on, run in itertools.groupby(zip(trained, episode.token_ids.tolist(), strict=True), key=lambda pair: bool(pair[0])):
        part = "".join(tokenizer.convert_ids_to_tokens([token for _, token in run]))
        text += f"[{part}]" if on else part
    return text


def taught(episodes: list[Episode]) -> list[tuple[list[int], int, list[float]]]:
    """Of each its tokens up to the last one that is trained, the prompt's length and the mask."""
    found = []
    for e in episodes:
        count = int(np.flatnonzero(e.loss_mask).max()) + 1
        found.append((e.token_ids[: e.num_prompt_tokens + count].tolist(), e.num_prompt_tokens, e.loss_mask[:count].tolist()))
    return found


def same(a: list[Episode], b: list[Episode]) -> bool:
    def plain(episodes):
        return [(e.token_ids.tolist(), e.num_prompt_tokens, e.loss_mask.tolist()) for e in episodes]

    return plain(a) == plain(b)

"""Checkpoints of real models' shapes with random weights, and prompts, so that a bench needs no download."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config

SHAPES: dict[str, tuple[type, dict[str, Any]]] = {
    "tiny": (Qwen3Config, {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 192, "vocab_size": 512, "tie_word_embeddings": True,
    }),
    "small": (Qwen3Config, {
        "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "intermediate_size": 1536, "vocab_size": 32000, "tie_word_embeddings": True,
    }),
    "135m": (LlamaConfig, {  # SmolLM2
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
    }),
    "0.6b": (Qwen3Config, {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "1.7b": (Qwen3Config, {
        "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 6144, "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "8b": (Qwen3Config, {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False,
    }),
}  # fmt: skip
PAD = 0


def config_of(shape: str, positions: int = 8192) -> PretrainedConfig:
    kind, sizes = SHAPES[shape]
    return kind(**sizes, max_position_embeddings=positions, pad_token_id=PAD, bos_token_id=None, eos_token_id=None)


def make_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte pairs learned from `texts`, and a word for every other number below `vocabulary`: whatever a model samples can be decoded.

    Its end of sequence is the number `vocabulary`, which no model of that size can sample. So every answer is as long as is allowed,
    for any trainer, without an option of its sampler. Needs 300 words at least.
    """
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_ = pre_tokenizers.ByteLevel.alphabet()
    size = min(vocabulary - 1, 8192)
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<pad>"], initial_alphabet=bytes_, show_progress=False)
    learned.train_from_iterator(texts, trainer)
    state = json.loads(learned.to_str())["model"]
    words = dict(state["vocab"])
    words |= {f"w{i}": i for i in range(len(words), vocabulary)}
    tokenizer = Tokenizer(models.BPE(words, [tuple(pair) for pair in state["merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def write_checkpoint(
    folder: Path, shape: str, texts: Iterable[str] = (), *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> Path:
    """Random numbers as a checkpoint with its tokenizer; no two parts of a tensor are alike, and norms are not 1."""
    config = config_of(shape)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.to("cpu").save_pretrained(folder)
    tokenizer = make_tokenizer(texts, config.vocab_size)
    assert tokenizer.eos_token_id == config.vocab_size, "the end of sequence must be no word of the model's"
    tokenizer.save_pretrained(folder)
    return folder


def write_prompts(path: Path, count: int, *, words: int = 40, seed: int = 0) -> Path:
    """Made-up word problems as a JSONL file with the columns of GSM8K, for when its own file is not at hand."""
    draw = random.Random(seed)
    nouns = "apples boxes cars days eggs friends games hours items jars kites lamps miles notes pages shops tickets weeks".split()
    verbs = "has buys sells gives takes finds needs makes".split()
    lines = []
    for _ in range(count):
        total, parts = 0, list[str]()
        while len(parts) * 6 < draw.randint(words // 2, words):
            number = draw.randint(2, 99)
            total += number
            parts.append(f"Anna {draw.choice(verbs)} {number} {draw.choice(nouns)} and")
        lines.append(json.dumps({"question": " ".join(parts) + " how many are there in all?", "answer": f"#### {total}"}))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def write_sums(path: Path, count: int, largest: int, seed: int = 0) -> Path:
    """Sums of two numbers from 1 to `largest` as a chat model is asked for them, {"question", "answer"}; pairs may repeat."""
    draw = random.Random(seed)
    pairs = [(draw.randint(1, largest), draw.randint(1, largest)) for _ in range(count)]
    rows = [{"question": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)} for a, b in pairs]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def texts_of(path: Path) -> list[str]:
    return [json.loads(line)["question"] for line in path.read_text().splitlines()]


def lengths_drawn(count: int, longest: int, *, seed: int = 0, sigma: float = 0.8) -> list[int]:
    """Response lengths as training sees them: log-normal around a quarter of the longest, capped there; at least 2."""
    draw = random.Random(seed)
    return [max(2, min(longest, round(longest / 4 * draw.lognormvariate(0, sigma)))) for _ in range(count)]

"""Checkpoints small enough for a test that real vLLM and the real trainer load, and problems for them; all deterministic."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

CHARACTERS = "0123456789+=- "
SPECIAL = ("<pad>", "<eos>", "<bos>")
EOS = 1
FAMILIES = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}  # qwen2 has biases on q, k and v
WINDOW = 5  # tokens, fewer than a sequence of any test has
LAYERS = ["sliding_attention", "full_attention"]
# Windows, caps that are felt, and experts, a layer of each kind; and gemma, a family without a plan.
SPECIAL_FAMILIES: dict[str, tuple[type, dict]] = {
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (Gemma2Config, {
        "sliding_window": WINDOW, "layer_types": LAYERS, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 20,
    }),
    "gemma3_text": (Gemma3TextConfig, {"sliding_window": WINDOW, "layer_types": LAYERS, "query_pre_attn_scalar": 20}),
    "qwen3_moe": (Qwen3MoeConfig, {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True, "mlp_only_layers": [0],
    }),
    "gemma": (GemmaConfig, {}),
}  # fmt: skip
HEAD_DIM = 32  # the least that vLLM's attention takes on a CPU


def tiny_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token per character; a character it does not know is the pad token."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def make_checkpoint(
    folder: Path,
    family: str = "qwen3",
    *,
    tied: bool = True,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    characters: str = CHARACTERS,
) -> Path:
    """Write a Hugging Face checkpoint with its tokenizer and return `folder`.

    No two weights are alike: norms are not 1 and biases not 0, so that one that is lost or mixed up is seen. The vocabulary
    is odd (17), so that nothing divides it.
    """
    tokenizer = tiny_tokenizer(characters)
    options = {"head_dim": HEAD_DIM} if family != "qwen2" else {}
    if family == "qwen2" and hidden // heads != HEAD_DIM:
        hidden = heads * HEAD_DIM  # this family has no head_dim of its own
    kind, special = SPECIAL_FAMILIES.get(family) or (FAMILIES[family], {})
    config = kind(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=256, initializer_range=0.1,
        tie_word_embeddings=tied, eos_token_id=EOS, pad_token_id=0, bos_token_id=2, **options, **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_additions(path: Path, count: int, *, first: int = 0, largest: int = 99) -> Path:
    """A JSONL file of `count` problems {"prompt": "7+46=", "answer": "53"}, of which any two with different numbers differ.

    Problem i is a function of i alone; `first` is the number of the first, so two files need not share problems.
    """
    size = largest + 1
    lines = []
    for i in range(first, first + count):
        pair = i * 7919 % (size * size)  # 7919 is prime: no pair twice before all were there
        a, b = divmod(pair, size)
        lines.append(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def share_of_digits(prompt: str, response: str, target: str) -> float:
    """A reward that an untrained model earns in many different amounts: how many of its characters are digits, and how large."""
    return sum(int(c) for c in response if c.isdigit()) / (9 * max(len(response), 1))

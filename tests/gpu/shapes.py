"""Checkpoints of real models' shapes with random weights: python tests/gpu/shapes.py FOLDER TOKENIZER [NAME ...]"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig, Qwen3Config

SHAPES: dict[str, PretrainedConfig] = {
    "qwen3_06b": Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "llama_untied": LlamaConfig(
        vocab_size=49152, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
        head_dim=64, max_position_embeddings=8192, tie_word_embeddings=False,
    ),
}  # fmt: skip


def make(folder: Path, name: str, tokenizer: str) -> Path:
    """Write the checkpoint in bf16. The tokenizer's vocabulary may be smaller than the model's."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    config = SHAPES[name]
    config.eos_token_id, config.bos_token_id, config.pad_token_id = words.eos_token_id, words.bos_token_id, words.pad_token_id
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to("cpu").save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    for name in sys.argv[3:] or SHAPES:
        print("wrote", make(Path(sys.argv[1]) / name, name, sys.argv[2]))

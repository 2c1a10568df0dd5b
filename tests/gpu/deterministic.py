"""A script of the project as it stands, in torch's deterministic mode: tests/gpu/deterministic.py train_sft CONFIG [key=value ...]"""

import sys
from importlib import import_module

import torch

from parallel.launch import launch

if __name__ == "__main__":
    torch.use_deterministic_algorithms(True, warn_only=True)  # vLLM sorts with a kernel that has no other version
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    launch(import_module(sys.argv.pop(1)).main)

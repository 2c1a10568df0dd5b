"""Run by tests/test_doctor.py under torchrun: one engine, examined as it is and with a fault planted on one side after the sync.

    torchrun --nproc-per-node=1 tests/doctor_driver.py MODEL report.json
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from model import ModelSource
from parallel.launch import launch
from rollout.doctor import Doctor, read_prompts, text

FAULT = 1.05  # what one matrix is multiplied by


@contextmanager
def fault(weight: Tensor) -> Iterator[None]:
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(FAULT)
        yield
        weight.copy_(kept)


def main() -> None:
    model, report = sys.argv[1:]
    source = ModelSource(model)
    prompts, _ = read_prompts(None, source.tokenizer(), 17)
    doctor = Doctor(source, dtype="float32", temperature=0.7, seq_len=128, device="cpu", engine={}, seed=0)
    episodes = doctor.sample(prompts, 12, answers=2)
    found: dict = {"healthy": doctor.examine(episodes)}
    found["tokens of prompts"] = sum(len(prompt.token_ids) for prompt in prompts)
    engine = doctor.generator._model()
    with fault(engine.get_submodule("model.layers.1.mlp.down_proj").weight):
        found["engine"] = doctor.examine(episodes)
    with fault(doctor.trainer.local.lm.get_submodule("model.layers.0.self_attn.v_proj").weight.to_local()):
        found["trainer"] = doctor.examine(episodes)
    found["healed"] = doctor.examine(episodes)
    doctor.compiled = True  # what cannot be looked into is not asked for
    found["compiled"] = doctor.examine(episodes)
    doctor.compiled = False
    for episode in episodes:
        episode.gen_logprobs = None
    found["given"] = doctor.examine(episodes[:1])
    Path(report).write_text(json.dumps(found | {"text": text(found["healthy"])}))
    doctor.generator.close()


if __name__ == "__main__":
    launch(main)

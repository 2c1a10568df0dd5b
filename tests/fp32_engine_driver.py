"""Run by tests/test_fp32_logits.py under torchrun: the logits of a real engine and of the trainer, of the same bfloat16 hidden states.

    torchrun --nproc-per-node=1 tests/fp32_engine_driver.py MODEL report.json
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from batch import Prompt
from model import ModelSource
from parallel.launch import launch
from parallel.switches import Switches
from rollout.doctor import Doctor, whole


def gaps(doctor: Doctor) -> dict[str, float]:
    """The largest distance of the engine's logits, and of rounded ones, from the product of the trainer's weights in fp32."""
    lm = doctor.trainer.local.lm
    weight = whole(lm.get_output_embeddings().weight.detach()).bfloat16()
    hidden = torch.randn(9, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    softcap = lm.config.to_dict().get("final_logit_softcapping")

    def capped(logits: torch.Tensor) -> torch.Tensor:
        return logits if softcap is None else (logits / softcap).tanh() * softcap

    exact = capped(F.linear(hidden.float(), weight.float()))
    found = {"engine": doctor.generator.logits(hidden), "rounded": capped(F.linear(hidden, weight).float())}
    return {name: float((logits - exact).abs().max()) for name, logits in found.items()}


def main() -> None:
    model, report = sys.argv[1:]
    source = ModelSource(model)
    doctor = Doctor(
        source, dtype="bfloat16", temperature=1.0, seq_len=64, device="cpu", engine={}, seed=0, switches=Switches(fp32_logits=True)
    )
    found: dict = {"first": gaps(doctor)}
    doctor.sample([Prompt(0, [4, 13, 5, 14])], 4)
    with torch.no_grad():
        for shard in doctor.trainer.shards().values():
            shard.mul_(1.25)
    doctor.sync()
    episodes = doctor.sample([Prompt(0, [4, 13, 5, 14])], 8)
    found["loaded again"] = gaps(doctor)
    found["tokens"] = sum(episode.num_response_tokens for episode in episodes)
    Path(report).write_text(json.dumps(found))
    doctor.generator.close()


if __name__ == "__main__":
    launch(main)

"""What bf16 computation with fp32 master weights costs and saves, on supervised steps of real data."""

import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import attention
from batch import Episode, supervised, to_batch
from data import DatasetConfig, PromptStream, encode_completion
from losses import NLLLoss
from model import Model, ModelSource, ResponseLogprobs
from parallel.placement import Placement
from trainer import Trainer, TrainingConfig

DType = Literal["bfloat16", "float32"]


def rows(source: ModelSource, data: str, count: int, seq_len: int) -> list[Episode]:
    tokenizer = source.tokenizer()
    stream = PromptStream(DatasetConfig(path=data), tokenizer, seed=0, max_prompt_tokens=seq_len - 1, epochs=None, target=str.strip)
    return [supervised(p.token_ids, encode_completion(tokenizer, p.target), seq_len) for p in stream.take(count)]


def trainer_of(place: Placement, source: ModelSource, dtype: DType, learning_rate: float, **options: Any) -> Trainer:
    cfg = TrainingConfig(dtype=dtype, learning_rate=learning_rate, max_grad_norm=0.0, **options)
    policy = Model(source, place.trainer, dtype=dtype, temperature=1.0, max_tokens=cfg.row_tokens, trainable=True)
    return Trainer(policy, cfg, NLLLoss())


def first_step(place: Placement, *, model: str, data: str, dtype: DType, gradient: str) -> dict[str, float]:
    """Loss and gradient norm of one step; the whole gradient goes to the file `gradient`."""
    source = ModelSource(model)
    trainer = trainer_of(place, source, dtype, 1e-6, adam_beta1=0.0)
    stats = trainer.update(rows(source, data, 16, 512), 0)
    # Without a first decay AdamW's first moment is the gradient.
    torch.save({n: whole(t).cpu() for n, t in trainer.state().items() if n.startswith("exp_avg/")}, gradient)
    return {"loss": stats["loss/policy"], "norm": stats["grad/norm"], "tokens": stats["loss/tokens"]}


def moved(place: Placement, *, model: str, data: str, steps: int, learning_rate: float) -> dict[str, float]:
    """Shares of weights that differ after `steps`: fp32 masters, their bf16 copies, and a model trained in bf16 alone."""
    source = ModelSource(model)
    episodes = rows(source, data, 8 * steps, 512)
    batches = [episodes[8 * i : 8 * i + 8] for i in range(steps)]
    trainer = trainer_of(place, source, "bfloat16", learning_rate)
    weights = {n: whole(p) for n, p in trainer.model.shards().items()}
    before = {n: w.detach().clone() for n, w in weights.items()}
    start = time.perf_counter()
    losses = [trainer.update(batch, i)["loss/policy"] for i, batch in enumerate(batches)]
    seconds = time.perf_counter() - start
    after = {n: whole(p).detach() for n, p in trainer.model.shards().items()}
    result = {"fp32": share(before, after), "bf16_of_fp32": share(rounded(before), rounded(after)), "step_s": seconds / steps}
    result |= {"first_loss": losses[0], "loss": sum(losses[-10:]) / 10}

    lm = AutoModelForCausalLM.from_pretrained(source.name, dtype=torch.bfloat16, attn_implementation=attention.NAME).to(place.device)
    plain, names = ResponseLogprobs(lm, 1.0), [n for n, _ in lm.named_parameters()]
    adamw = torch.optim.AdamW(lm.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    losses = []
    for batch in batches:
        loss = -plain(to_batch(batch, place.device))[0].mean()
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        losses.append(float(loss))
    pure = dict(zip(names, (p.detach() for p in lm.parameters()), strict=True))
    return result | {"pure_bf16": share(rounded(before), pure), "pure_first_loss": losses[0], "pure_loss": sum(losses[-10:]) / 10}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rounded(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: w.bfloat16() for n, w in weights.items()}


def share(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return float(sum((a[n] != b[n]).sum() for n in a) / sum(t.numel() for t in a.values()))


def gradient_error(path: Path, reference: Path) -> float:
    """||g - reference|| / ||reference|| over all tensors."""
    got, want = (torch.load(p) for p in (path, reference))
    gap = sum(float((got[n].double() - want[n].double()).square().sum()) for n in want)
    return (gap / sum(float(w.double().square().sum()) for w in want.values())) ** 0.5

"""What each difference between trainer and sampler is worth: the log-prob gap with one operation of the trainer changed at a time.

    python -m bench.mismatch MODEL [--tokens 64] [--prompts FILE] [--dtype bfloat16] [--temperature 1.0] [--engine JSON]

The engine samples once, and every row scores the same tokens with another trainer: a JSON line each, and a table at the end. "to truth" is
the mean distance from the same weights in more bits. For MODEL of a family that training.match_sampler knows; on a CPU the last row has
vLLM's own attention kernel in the trainer, and then nothing else differs.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig

import attention
from attention import Scores, Segments
from batch import Episode, to_batch
from config import model_source
from head import logprobs_from_hidden
from model import Model, ModelSource
from parallel.launch import launch
from parallel.rounding import check_family, norm_sums_unrounded, rotate_in_fp32
from rollout.doctor import Doctor, compare, read_prompts, scored, whole

Kernel = Callable[[Tensor, Tensor, Tensor, Segments, Scores], Tensor]
Change = Callable[[nn.Module], None]
WIDE_HEAD = "logits in fp32"
BLOCK = 128  # tokens of a block of the cache that vLLM's kernel reads


def norm_weights_in_fp32(lm: nn.Module) -> None:
    def norm(self: Any, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * wide).to(x.dtype)

    for module in lm.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(norm, module)


def activations_in_fp32(lm: nn.Module) -> None:
    def mlp(self: Any, x: Tensor) -> Tensor:
        return self.down_proj((F.silu(self.gate_proj(x).float()) * self.up_proj(x)).to(x.dtype))

    for block in lm.model.layers:
        block.mlp.forward = MethodType(mlp, block.mlp)


def nothing(_lm: nn.Module) -> None:
    pass


def engines_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """vLLM's CPU kernel on a cache made for the call; it has no backward pass. [N, H, D] each."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    out, (heads, kv_heads, width) = torch.empty_like(q), (q.shape[1], k.shape[1], q.shape[2])
    isa = _get_attn_isa(q.dtype, BLOCK, width)
    bounds = segments.cu_seqlens.tolist()
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        length = end - start
        blocks = -(-length // BLOCK)
        cache = torch.zeros(blocks, kv_heads, 2 * BLOCK, width, dtype=q.dtype)
        keys, values = cache.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(k[start:end].contiguous(), v[start:end].contiguous(), keys, values, torch.arange(length), isa)
        one: dict[str, Any] = {"query_start_loc": torch.tensor([0, length], dtype=torch.int32), "causal": True}
        one["seq_lens"] = torch.tensor([length], dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=width, dtype=q.dtype, sliding_window_size=-1, isa=isa,
            enable_kv_split=True, **one,
        )  # fmt: skip
        ops.cpu_attention_with_kv_cache(
            query=q[start:end].contiguous(), key_cache=keys, value_cache=values, output=out[start:end], scale=scores.scaling or width**-0.5,
            alibi_slopes=None, sliding_window=-1, block_table=torch.arange(blocks, dtype=torch.int32)[None], softcap=0,
            scheduler_metadata=plan, s_aux=None, **one,
        )  # fmt: skip
    return out


NOT_HERE = {"cuda": (engines_attention,)}


def rows(compute: torch.dtype) -> dict[str, tuple[list[Change], Kernel]]:
    """By what is changed: what is done to the model, and its attention on a CPU."""
    rotation: Change = partial(rotate_in_fp32, compute=compute)
    as_it_is = attention.per_length
    both: list[Change] = [norm_sums_unrounded, rotation]
    return {
        "as it is": ([nothing], as_it_is),
        "rotation in fp32": ([rotation], as_it_is),
        "sum with the residual normed before it is rounded": ([norm_sums_unrounded], as_it_is),
        "attention in fp32 inside": ([nothing], attention.in_fp32),
        "norm's weight multiplied in fp32": ([norm_weights_in_fp32], as_it_is),
        "silu and product in fp32": ([activations_in_fp32], as_it_is),
        WIDE_HEAD: ([nothing], as_it_is),
        "the first two": (both, as_it_is),
        "the first three: match_sampler": (both, attention.in_fp32),
        "the first two and the engine's attention": (both, engines_attention),
    }


def score(doctor: Doctor, source: ModelSource, episodes: list[Episode], name: str) -> np.ndarray:
    """Log-probs of the response tokens by a trainer of its own."""
    changes, kernel = rows(doctor.dtype)[name]
    alike: dict[str, Any] = {"temperature": doctor.temperature, "max_tokens": 1 << 20, "trainable": True}
    model = Model(source, doctor.place.trainer, dtype=str(doctor.dtype).removeprefix("torch."), **alike)
    for change in changes:
        change(model.local.lm)
    here = {("cpu", doctor.dtype): kernel}
    with mock.patch.dict(attention.KERNELS, here), mock.patch.dict(attention.SAMPLERS, here):
        places, logprobs = scored(model, episodes)
    if name != WIDE_HEAD:
        return logprobs
    batch = to_batch(episodes, model.device)
    hidden = places["final_norm"].to(model.device)[batch.rows]
    weight = whole(model.local.lm.get_output_embeddings().weight).to(doctor.dtype)
    values, _ = logprobs_from_hidden(hidden.float(), weight.float(), batch.targets, temperature=doctor.temperature)
    return values.detach().cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=64, help="sampled for each prompt")
    parser.add_argument("--prompts", type=Path, help="as rollout.doctor takes them")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--engine", type=json.loads, default={}, help="further vLLM engine arguments, a JSON object")
    options = parser.parse_args()
    source = ModelSource(*model_source(options.model))
    config = source.read(AutoConfig)
    check_family(config)
    prompts, _ = read_prompts(options.prompts, source.tokenizer(), config.vocab_size)
    seq_len = max(len(p.token_ids) for p in prompts) + options.tokens + 1
    chosen = {key: vars(options)[key] for key in ("dtype", "temperature", "device", "engine")}
    doctor = Doctor(source, seq_len=seq_len, seed=0, **chosen)
    episodes = doctor.sample(prompts, options.tokens)
    sampled = np.concatenate([e.gen_logprobs for e in episodes if e.gen_logprobs is not None])
    truth = scored(doctor.truth, episodes)[1]
    lines = []
    for name, (_, kernel) in rows(doctor.dtype).items():
        if kernel in NOT_HERE.get(doctor.place.device.type, ()):
            continue
        found = score(doctor, source, episodes, name)
        line = {"row": name, "tokens": len(found), **compare(found, sampled), "median": float(np.median(np.abs(found - sampled)))}
        lines.append(line | {"to truth": compare(found, truth)["mismatch/abs_mean"]})
        print(json.dumps(lines[-1]), flush=True)
    columns = {"mean |gap|": "mismatch/abs_mean", "median": "median", "max": "mismatch/abs_max", "k3": "mismatch/k3"}
    columns["to truth"] = "to truth"
    print(f"{'':<52}" + "".join(f"{column:>11}" for column in columns) + f"{'ESS':>10}")
    for line in lines:
        numbers = "".join(f"{line[key]:>11.2e}" for key in columns.values())
        print(f"{line['row']:<52}{numbers}{line['is/ess_token']:>10.6f}", flush=True)
    doctor.generator.close()


if __name__ == "__main__":
    launch(main)

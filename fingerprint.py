"""Is a model what its checkpoint says? Its weights, bit for bit against the files read anew; and what it thinks of its own samples."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor

from batch import Episode
from parallel.weights import local_part

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MOST_APART = 0.25  # nats a token: rounding to bf16 costs about 0.01, weights drawn by chance several


@torch.no_grad()
def check_weights(
    shards: Mapping[str, Tensor], loaded: Mapping[str, torch.dtype], name: str, revision: str | None, fresh: Callable[[], dict[str, Tensor]]
) -> None:
    """Compare this rank's parts of all weights with the checkpoint's, bit for bit. RuntimeError names those that differ.

    loaded: the dtype in which each was loaded, before it became its shard's: both casts are made here too. The files are mapped, and
    of each tensor the part is read. fresh: another load of the whole checkpoint, for names that its files do not have, as where
    transformers renames or joins tensors.
    """
    files = _files(name, revision)
    other: dict[str, Tensor] = {} if set(shards) <= set(files) else fresh()
    by_file: dict[Path | None, list[str]] = {}
    for key in shards:
        by_file.setdefault(files.get(key), []).append(key)
    wrong = []
    for path, keys in by_file.items():
        if path is None:
            wrong += [key for key in keys if key not in other or not _agrees(shards[key], other[key], loaded[key])]
            continue
        with safe_open(path, framework="pt") as file:
            for key in keys:
                stored = file.get_slice(key)
                if list(stored.get_shape()) != list(shards[key].shape) or not _agrees(shards[key], stored, loaded[key]):
                    wrong.append(key)
    if wrong:
        names = ", ".join(sorted(wrong)[:3])
        raise RuntimeError(
            f"{len(wrong)} of {len(shards)} weights are not those of model={name} after loading it ({names}): it would compute with other "
            f"numbers, and nothing of the run would mean anything. Start again if the checkpoint was being written; if it stays so, this "
            f"model is loaded wrongly here: give another one"
        )


def _agrees(shard: Tensor, stored: Any, loaded: torch.dtype) -> bool:
    """stored: a tensor, or a slice of a file, of the whole."""
    local, part = local_part(shard, stored)
    part = part.to(local.device).to(loaded).to(local.dtype)
    return part.shape == local.shape and torch.equal(_bits(part), _bits(local))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def _files(name: str, revision: str | None) -> dict[str, Path]:
    """Where each tensor of the checkpoint is: a folder's files, or those that loading has left in the cache. {} where there are none."""

    def find(file: str) -> Path | None:
        if Path(name).is_dir():
            return path if (path := Path(name) / file).exists() else None
        found = try_to_load_from_cache(name, file, revision=revision)
        return Path(found) if isinstance(found, str) else None

    if (index := find(INDEX)) is not None:
        placed = json.loads(index.read_text())["weight_map"]
        paths = {file: find(file) for file in set(placed.values())}
        return {key: path for key, file in placed.items() if (path := paths[file]) is not None}
    if (single := find(SINGLE)) is None:
        return {}
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def check_perplexity(scored: Mapping[int, np.ndarray], episodes: list[Episode], name: str) -> None:
    """A reference that has not moved must give what the checkpoint itself sampled the probability that the sampler gave it.

    Of the `scored` episodes those count whose policy had taken no step: another program computed the very same weights. RuntimeError
    where the mean log-prob of their tokens differs by more than rounding can make it.
    """
    pairs = [(values, episodes[i].gen_logprobs) for i, values in scored.items() if episodes[i].policy_version == 0]
    own = [(values, sampled) for values, sampled in pairs if sampled is not None]
    if not own:
        return
    here, sampler = (float(np.concatenate(values).mean(dtype=np.float64)) for values in zip(*own, strict=True))
    if not abs(here - sampler) <= MOST_APART:
        raise RuntimeError(
            f"the reference gives what model={name} itself sampled a perplexity of {np.exp(-here):.4g}, and the sampler gave it "
            f"{np.exp(-sampler):.4g}: one of the two does not compute that model. Set training.dtype: float32 to rule out rounding, then "
            f"place ref_model as the trainer is (no services, or the same procs and degrees); what still differs is the generator"
        )

"""A Hugging Face causal LM spread over a sub-mesh: packed batch -> log-probabilities of response tokens."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import attention
from batch import IDLE, Batch, Episode, plan_rows, to_batch
from head import Share, VocabShard, logprobs_from_hidden, loss_from_hidden
from parallel.context import Context, from_all_ranks
from parallel.memory import Remedy, explained
from parallel.placement import Grid, device_of, holds, share
from parallel.plans import parallelize
from parallel.weights import Bucket, blend

Row = list[Episode]
MORE_RANKS = Remedy("Start more ranks, over which parallelism.data_parallel_shard_degree spreads the weights, or take a smaller model")


@dataclass(frozen=True)
class ModelSource:
    """A Hugging Face checkpoint: a hub id with its revision, or a folder."""

    name: str
    revision: str | None = None

    def read(self, auto: Any, **options: Any) -> Any:
        """What `auto.from_pretrained` makes of the checkpoint. ValueError where it is missing or incomplete."""
        try:
            return auto.from_pretrained(self.name, revision=self.revision, **options)
        except OSError as error:
            is_path = self.name.startswith(("/", ".", "~"))
            reason = "there is no such folder" if is_path and not Path(self.name).is_dir() else str(error).strip().partition("\n")[0]
            raise ValueError(
                f"model={self.name} cannot be loaded: {reason.rstrip('.')}. Give a folder with config.json, tokenizer and weights, or "
                f"a model's id on the Hugging Face Hub (without a network: set HF_HOME to a cache that holds it)"
            ) from error

    def read_whole(self, auto: Any, **options: Any) -> Any:
        """`read` of a model, all of whose weights the checkpoint has: transformers fills the others with random numbers and a warning."""
        model, found = self.read(auto, output_loading_info=True, **options)
        if lacking := sorted(found["missing_keys"]):
            raise ValueError(
                f"model={self.name} lacks {len(lacking)} weights of a {type(model).__name__} ({', '.join(lacking[:3])}): they would be "
                f"random numbers. Give a whole checkpoint of this architecture"
            )
        return model

    def tokenizer(self) -> Any:
        tokenizer = self.read(AutoTokenizer)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    @functools.cached_property
    def pad_token_id(self) -> int:
        return self.tokenizer().pad_token_id


def head_width(config: Any) -> int:
    """Of one attention head, from a text model's config."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class ResponseLogprobs(nn.Module):
    """The language model and its head as one forward, so that FSDP gathers the head's weight for it."""

    def __init__(self, lm: nn.Module, temperature: float, grid: Grid | None = None):
        """grid: whose "tp" ranks hold the head whole and compute a part of the vocabulary each, and whose "cp" ranks share a row."""
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.words, self.shard = slice(None), None
        self.context = Context(grid.group("cp"), grid.cp, grid.index("cp")) if grid is not None and grid.cp > 1 else None
        if grid is not None and grid.tp > 1:
            vocabulary = len(lm.get_output_embeddings().weight)
            first, last = (vocabulary * r // grid.tp for r in (grid.index("tp"), grid.index("tp") + 1))
            self.words, self.shard = slice(first, last), VocabShard(grid.group("tp"), first, vocabulary)

    def forward(self, batch: Batch, share: Share | None = None) -> tuple[Tensor, ...]:
        """log-probs and entropy of the response tokens, fp32 [M] each, at the sampling temperature.

        With `share` (see head.loss_from_hidden) the loss comes first, and the other two have no gradient.
        """
        row = None if self.context is None else self.context.row(len(batch.token_ids))
        own = slice(None) if row is None else row.own
        hidden = self.lm.model(
            input_ids=batch.token_ids[None, own],
            position_ids=batch.positions[None, own],
            use_cache=False,
            segments=attention.Segments(batch.cu_seqlens, batch.max_seqlen, row),
        ).last_hidden_state[0]
        rows, targets = batch.rows, batch.targets
        if row is not None:
            here = (rows >= own.start) & (rows < own.stop)
            rows, targets = rows[here] - own.start, targets[here]
        head = self.lm.get_output_embeddings()
        softcap = self.lm.config.get_text_config().to_dict().get("final_logit_softcapping")
        bias = None if head.bias is None else head.bias[self.words]
        weight = head.weight if self.shard is None else head.weight[self.words]
        inputs = (hidden[rows], weight, targets)
        options: dict[str, Any] = {"temperature": self.temperature, "bias": bias, "softcap": softcap, "entropy": True, "shard": self.shard}
        scored = logprobs_from_hidden(*inputs, **options) if share is None else loss_from_hidden(*inputs, share, **options)
        found = tuple(values for values in scored if values is not None)
        if row is None:
            return found
        counts = [int(((batch.rows >= first) & (batch.rows < last)).sum()) for first, last in row.bounds]
        return tuple(from_all_ranks(values, counts, row.context) for values in found)


class Model:
    """A handle every rank holds. Outside `grid` it has no local module and its share of any work is []."""

    def __init__(
        self,
        source: ModelSource,
        grid: Grid,
        *,
        dtype: str,
        temperature: float,
        max_tokens: int,
        trainable: bool,
        recompute: bool = False,
    ):
        """Load the checkpoint and spread it. dtype: of the computation; a trainable model keeps its weights in fp32.

        max_tokens: in one forward pass of one replica. recompute: activations are not kept for the backward pass but computed again.
        Collective over `grid`.
        """
        self.grid, self.max_tokens, self.source = grid, max_tokens, source
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.tp_partial: list[nn.Parameter] = []  # gradients to be summed over the mesh's "tp" axis
        self.refreshes = 0  # how often its weights were taken from the policy
        self._module: ResponseLogprobs | None = None
        if not holds(grid):
            return
        self.device = device_of(grid)
        lm = self.source.read_whole(AutoModelForCausalLM, dtype="auto", attn_implementation=attention.NAME)
        scales = {key: lm.config.to_dict().get(key, 1) for key in ("logits_scaling", "logit_scale")}
        if any(scale not in (1, None) for scale in scales.values()):
            raise ValueError(f"model={source.name} scales its logits ({scales}), which the head does not support")
        if not trainable:
            lm.requires_grad_(False)
        self._module = ResponseLogprobs(lm, temperature, grid)
        weights = torch.float32 if trainable else self.dtype
        with explained("loading the model", MORE_RANKS):
            self.tp_partial = parallelize(self._module, lm, grid, self.device, weights=weights, compute=self.dtype, recompute=recompute)

    @property
    def is_local(self) -> bool:
        return self._module is not None

    @property
    def local(self) -> ResponseLogprobs:
        """This rank's shards. Asking for them outside the mesh is a bug in the caller."""
        assert self._module is not None, f"this rank is not among {self.grid.ranks} and holds no part of the model"
        return self._module

    @property
    def local_bytes(self) -> int:
        """Of this rank's shards; 0 outside the mesh."""
        return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in self.shards().values())

    @property
    def num_parameters(self) -> int:
        """Of the whole model, a tied head counted once; 0 outside the mesh."""
        return sum(p.numel() for p in self.shards().values())

    def shards(self) -> dict[str, Tensor]:
        """Parameters by the checkpoint's names, as this rank holds them; {} outside the mesh. A tied head is there once."""
        return {name.removeprefix("lm."): p for name, p in self.local.named_parameters()} if self.is_local else {}

    def rows(self, episodes: list[Episode]) -> list[Row]:
        """The packed rows this rank's replica runs: as many on every replica, [] outside the mesh.

        A replica that has run out of episodes gets an idle row, since a forward pass is a collective.
        """
        plan = plan_rows([len(e.token_ids) for e in episodes], self.grid.num_replicas, self.max_tokens)
        return [[episodes[i] for i in row] or [IDLE] for rows in share(plan, self.grid) for row in rows]

    @torch.no_grad()
    @explained("scoring", "training.max_tokens_per_batch, training.seq_len or, beside an engine, generator.gpu_memory_utilization")
    def logprobs(self, episodes: list[Episode]) -> list[np.ndarray]:
        """Log-probs of the response tokens, [R] each, of this rank's share of `episodes`. Collective over the mesh."""
        if not self.is_local:
            return []
        mine = share(episodes, self.grid)
        rows = plan_rows([len(e.token_ids) for e in mine], 1, self.max_tokens)[0]
        scored: list[np.ndarray] = [np.zeros(0, np.float32)] * len(mine)
        for row in rows + [[]] * (self._most_rows(episodes) - len(rows)):
            batch = to_batch([mine[i] for i in row] or [IDLE], self.device)
            values = self.local(batch)[0].cpu().numpy()
            ends = np.cumsum([mine[i].num_response_tokens for i in row])
            for i, part in zip(row, np.split(values, ends[:-1]), strict=False):
                scored[i] = part
        return scored

    def _most_rows(self, episodes: list[Episode]) -> int:
        """Forward passes of the replica with the most of them: every replica makes as many."""
        lengths = [len(e.token_ids) for e in episodes]
        count = self.grid.num_replicas
        return max(len(plan_rows(lengths[r::count], 1, self.max_tokens)[0]) for r in range(count))

    def refresh(self, buckets: Iterator[Bucket], *, mix: float) -> None:
        """Move to the policy's weights: w <- (1 - mix) w + mix w_policy. Drains `buckets` on every rank.

        Exponential averaging with a small mix needs more bits than bfloat16 has: give such a reference dtype float32.
        """
        shards = self.shards()
        for bucket in buckets:
            for name, tensor, _ in bucket if shards else []:
                blend(shards[name], tensor, mix)
        self.refreshes += 1

    @torch.no_grad()
    def export(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint in the computation's dtype, tokenizer included. Collective over the mesh; one rank writes.

        The whole model passes through the CPU memory of the mesh's first rank.
        """
        if not self.is_local:
            return
        first = self.grid.is_first
        weights = {}
        for name, shard in self.shards().items():
            tensor = shard.detach().to(self.dtype)
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if first:
                weights[name] = tensor.cpu().clone()  # a gathered tensor is a view of padded storage, which cannot be saved
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            config = self.local.lm.config
            config.dtype = self.dtype
            config.save_pretrained(folder)
            if self.local.lm.generation_config is not None:
                self.local.lm.generation_config.save_pretrained(folder)
            save_torch_state_dict(weights, folder)
            self.source.tokenizer().save_pretrained(folder)

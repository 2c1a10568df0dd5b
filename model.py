"""A Hugging Face causal LM spread over a sub-mesh: packed batch -> log-probabilities of response tokens."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import attention
from batch import IDLE, Batch, Episode, row_length, to_batch
from fingerprint import check_perplexity, check_weights
from head import Share, VocabShard, logprobs_from_hidden, loss_from_hidden
from packing import plan_shared_rows
from parallel import pipeline
from parallel.context import Context, from_all_ranks
from parallel.experts import NAME as EXPERTS
from parallel.launch import advance, enter
from parallel.memory import Parked, Remedy, explained, live_bytes
from parallel.names import checkpoint_of
from parallel.placement import Grid, device_of, holds, share
from parallel.plans import is_alone, keep_cast, parallelize, reshard
from parallel.switches import ALL_OFF, Switches
from parallel.weights import Bucket, blend

Row = list[Episode]
Finish = Callable[[Batch, tuple[Tensor, ...]], Tensor]  # of what a row's forward pass returns: its loss, or any number
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
    """The language model and its head as one forward, so that FSDP gathers the head's weight for it; or one stage of it."""

    def __init__(self, lm: nn.Module, temperature: float, grid: Grid | None = None, switches: Switches = ALL_OFF):
        """grid: whose "tp" ranks have a part of the tokens and of the vocabulary each, whose "cp" ranks share a row, and whose "pp"
        ranks are stages."""
        super().__init__()
        self.lm = lm
        self.temperature, self.fp32_logits, self.compiled = temperature, switches.fp32_logits, switches.compiled
        self.words, self.shard = slice(None), None
        self.context = Context.of(grid, "cp") if grid is not None and grid.cp > 1 else None
        self.sequence = Context.of(grid, "tp") if grid is not None and grid.tp > 1 else None
        self.is_first, self.is_last = (True, True) if grid is None else (grid.index("pp") == 0, grid.index("pp") == grid.pp - 1)
        self.of_row: Callable[[int], tuple[Batch, Share | None, Finish]] | None = None  # what a stage needs besides what it is given
        if grid is not None and grid.tp > 1:
            vocabulary = len(lm.get_output_embeddings().weight)
            first, last = (vocabulary * r // grid.tp for r in (grid.index("tp"), grid.index("tp") + 1))
            self.words, self.shard = slice(first, last), VocabShard(grid.group("tp"), first, vocabulary)

    def forward(self, given: Batch | Tensor, share: Share | None = None, *, row: Tensor | None = None) -> Any:
        """log-probs and entropy of the response tokens, fp32 [M] each, at the sampling temperature.

        With `share` (see head.loss_from_hidden) the loss comes first, and the other two have no gradient.
        row: the number of a row, of which a stage is given the tokens or the hidden state; it returns its own, or the row's loss [1].
        """
        if isinstance(given, Batch):
            return self.scores(self.hidden(given), given, share)
        assert row is not None and self.of_row is not None
        batch, share, finish = self.of_row(int(row))
        hidden = self.hidden(batch, None if self.is_first else given)
        return finish(batch, self.scores(hidden, batch, share)).reshape(1) if self.is_last else hidden

    def hidden(self, batch: Batch, given: Tensor | None = None) -> Tensor:
        """[1, n, H] of the n tokens that are this rank's. given: where another stage has the layers before."""
        row = None if self.context is None else self.context.row(len(batch.token_ids))
        own = slice(None) if row is None else row.own
        tokens = batch.token_ids[None, own]
        if self.sequence is not None:
            tokens = tokens[:, self.sequence.row(tokens.shape[1]).own]
        inputs = {"input_ids": tokens} if given is None else {"inputs_embeds": given}
        segments = attention.Segments(batch.cu_seqlens, batch.max_seqlen, row, batch.keys)
        options = {"position_ids": batch.positions[None, own], "use_cache": False, "segments": segments}
        return self.lm.model(**inputs, **options).last_hidden_state

    def scores(self, hidden: Tensor, batch: Batch, share: Share | None) -> tuple[Tensor, ...]:
        """What `forward` returns, from the last hidden state."""
        places, targets, counts = batch.rows, batch.targets, [len(batch.rows)]
        tokens = len(batch.token_ids)
        order = None
        if batch.keys is not None and (self.context is not None or self.sequence is not None):
            # Ranks have consecutive tokens of the row, and several responses may begin after one of them.
            places, order = places.sort(stable=True)
            targets = targets[order]
        if self.context is not None:
            row = self.context.row(tokens)
            places, counts = row.deal(places)
            first = sum(counts[: self.context.index])
            targets, tokens = targets[first : first + len(places)], row.lengths[self.context.index]
        if self.sequence is None:
            selected = hidden[0, places]
        else:
            mine, of_each = self.sequence.row(tokens).deal(places)
            selected = from_all_ranks(hidden[0, mine], of_each, self.sequence)
        if order is not None and self.context is None:  # the loss may take them chunk by chunk
            back = order.argsort()
            selected, targets = selected[back], targets[back]
        head = self.lm.get_output_embeddings()
        softcap = self.lm.config.get_text_config().to_dict().get("final_logit_softcapping")
        bias = None if head.bias is None else head.bias[self.words]
        weight = head.weight if self.shard is None else head.weight[self.words]
        options: dict[str, Any] = {"temperature": self.temperature, "bias": bias, "softcap": softcap, "entropy": True, "shard": self.shard}
        options |= {"fp32_logits": self.fp32_logits, "compiled_rows": self.compiled}
        inputs = (selected, weight, targets)
        scored = logprobs_from_hidden(*inputs, **options) if share is None else loss_from_hidden(*inputs, share, **options)
        found = tuple(values for values in scored if values is not None)
        if self.context is None:
            return found
        whole = tuple(from_all_ranks(values, counts, self.context) for values in found)
        return whole if order is None else tuple(values[order.argsort()] for values in whole)


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
        switches: Switches = ALL_OFF,
        parked: bool = False,
        shared_prompts: bool = False,
    ):
        """Load the checkpoint, spread it and compare it with its files. dtype: of the computation; a trainable model keeps fp32 weights.

        max_tokens: in one forward pass of one replica. switches: of a trainable model; another takes what does not concern training.
        parked: the weights are in the host's memory while they are not used. shared_prompts: what `to_batch` and the plan of the rows take
        it for. Collective over `grid`. ValueError where the device cannot do what the switches ask for.
        """
        self.grid, self.max_tokens, self.source, self.shared_prompts = grid, max_tokens, source, shared_prompts
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.tp_partial: list[nn.Parameter] = []  # gradients to be summed over the mesh's "tp" axis
        self.refreshes = 0  # how often its weights were taken from the policy
        self.num_parameters = 0  # of the whole model, a tied head counted once; 0 outside the mesh
        self._module: ResponseLogprobs | None = None
        self._parked: Parked | None = None
        self._trainable = trainable
        if not holds(grid):
            return
        self.device = device_of(grid)
        switches = switches if trainable else switches.without_training
        switches.check(self.device, grid.tp)
        lm = self.source.read_whole(AutoModelForCausalLM, dtype="auto", attn_implementation=attention.NAME, experts_implementation=EXPERTS)
        if not trainable:
            lm.requires_grad_(False)
        self.num_parameters = sum(p.numel() for p in lm.parameters())
        self.is_tied = lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
        self._module, self._is_alone = ResponseLogprobs(lm, temperature, grid, switches), is_alone(grid, switches)
        weights = torch.float32 if trainable else self.dtype
        self._loaded = {name: p.dtype for name, p in lm.named_parameters()}
        with explained("loading the model", MORE_RANKS):
            self.tp_partial = parallelize(self._module, lm, grid, self.device, weights=weights, compute=self.dtype, switches=switches)
        self.check_weights()
        if parked:
            self._parked = Parked(self.shards().values())

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
        """Of this rank's shards on its device; 0 outside the mesh, and while they are parked."""
        return live_bytes(self.shards().values(), self.device) if self.is_local else 0

    def shards(self) -> dict[str, Tensor]:
        """This stage's parameters by the checkpoint's names, as this rank holds them; {} outside the mesh. A tied head is there once.

        With several stages it is on the first, as the embedding, and on the last.
        """
        return {name.removeprefix("lm."): p for name, p in self.local.named_parameters()} if self.is_local else {}

    @property
    def tied_between_stages(self) -> nn.Parameter | None:
        """The embedding that is the head too, where this rank's stage is one of the two that hold it."""
        lm = self.local.lm
        if not self.is_tied or self.grid.pp == 1 or not (self.local.is_first or self.local.is_last):
            return None
        return lm.get_input_embeddings().weight

    def check_weights(self) -> None:
        """RuntimeError, naming them, where this rank's shards are not what the checkpoint's files say. Before anything has moved them."""

        def fresh() -> dict[str, Tensor]:
            return self.source.read_whole(AutoModelForCausalLM, dtype="auto").state_dict()

        if self.is_local:
            check_weights(self.shards(), self._loaded, self.source.name, self.source.revision, fresh)

    def resident(self) -> AbstractContextManager[None]:
        """The weights are on the device for the duration, to be read, wherever they are otherwise."""
        return nullcontext() if self._parked is None else self._parked.resident()

    def changing(self) -> AbstractContextManager[None]:
        """As `resident`, to be written."""
        return nullcontext() if self._parked is None else self._parked.changing()

    def rows(self, episodes: list[Episode]) -> list[Row]:
        """The packed rows this rank's replica runs: as many on every replica, [] outside the mesh.

        A replica that has run out of episodes gets an idle row, since a forward pass is a collective; so does one with fewer rows than
        stages.
        """
        return [[episodes[i] for i in row] or [IDLE] for row in self._plan(episodes)]

    def _plan(self, episodes: list[Episode]) -> list[list[int]]:
        """`rows`, as indices."""
        plan = plan_shared_rows(episodes, self.grid.num_replicas, self.max_tokens, shared_prompts=self.shared_prompts)
        found = [row for rows in share(plan, self.grid) for row in rows]
        return found + [[]] * (self.grid.pp - len(found)) if found else []

    def passes(
        self, rows: list[Row], finish: Callable[[int, Batch, tuple[Tensor, ...]], Tensor], *, shares: list[Share | None] | None = None,
        train: bool = False,
    ) -> None:
        """A forward pass of each row, in order; `finish` gets its number and what it returns, on the last stage's ranks.

        shares: of each row, as the forward takes them. train: what `finish` returns is propagated backward. Collective over the replica.
        """
        given = shares or [None] * len(rows)
        grid, module = self.grid, self.local
        multiple = grid.cp * grid.tp if grid.tp > 1 else 1
        made = [row_length(row, shared_prompts=self.shared_prompts) for row in rows]
        lengths = [max(-(-n // multiple) * multiple, grid.cp) for n in made]  # transformers reshapes no row of 0 tokens
        batch_of = functools.partial(to_batch, device=self.device, shared_prompts=self.shared_prompts)
        if grid.pp == 1:
            for i, row in enumerate(rows):
                advance()
                if train and self._is_alone:
                    keep_cast(module, i + 1 < len(rows))
                batch = batch_of(row, length=lengths[i])
                loss = finish(i, batch, module(batch, given[i]))
                if train:
                    loss.backward()
            return
        width = module.lm.config.get_text_config().hidden_size
        for run in pipeline.batches(len(rows), grid.pp):
            advance()
            length = max(lengths[i] for i in run)
            batches = {i: batch_of(rows[i], length=length) for i in run}
            module.of_row = lambda i, batches=batches: (batches[i], given[i], functools.partial(finish, i))
            tokens = torch.stack([batch.token_ids for batch in batches.values()])
            part = self._part(length)
            hidden = torch.empty(1, part, width, dtype=self.dtype, device="meta")
            pipeline.run(module, grid, tokens, hidden, first_row=run.start, train=train)
        module.of_row = None

    def _part(self, tokens: int) -> int:
        """How many of a row's tokens this rank has between its layers."""
        module = self.local
        for context in (module.context, module.sequence):
            tokens = tokens if context is None else context.row(tokens).lengths[context.index]
        return tokens

    @torch.no_grad()
    @explained("scoring", "training.max_tokens_per_batch, training.seq_len or, beside an engine, generator.gpu_memory_utilization")
    def logprobs(self, episodes: list[Episode]) -> dict[int, np.ndarray]:
        """Log-probs of the response tokens, [R] each, of the episodes that this rank's replica runs, by their index.

        {} outside the mesh, and where another stage is the last. Collective over the mesh. The rows are those that one update on all
        of the episodes runs: on the same ranks and in the same dtype a model that has not moved since gives it the very same numbers.
        """
        if not self.is_local:
            return {}
        plan = self._plan(episodes)
        scored: dict[int, np.ndarray] = {}

        def keep(row: int, _batch: Batch, outputs: tuple[Tensor, ...]) -> Tensor:
            ends = np.cumsum([episodes[i].num_response_tokens for i in plan[row]])
            scored.update(zip(plan[row], np.split(outputs[0].cpu().numpy(), ends[:-1]), strict=False))
            return outputs[0].sum()

        with self.resident():
            self.passes(self.rows(episodes), keep)
            reshard(self.local)
        if not self._trainable and not self.refreshes:
            check_perplexity(scored, episodes, self.source.name)
        return dict(sorted(scored.items()))

    def refresh(self, buckets: Iterator[Bucket], *, mix: float) -> None:
        """Move to the policy's weights: w <- (1 - mix) w + mix w_policy. Drains `buckets` on every rank.

        Exponential averaging with a small mix needs more bits than bfloat16 has: give such a reference dtype float32.
        """
        shards = self.shards()

        def take(bucket: Bucket) -> None:
            for name, tensor, _ in bucket:
                if name in shards:
                    blend(shards[name], tensor, mix)

        with self.changing():
            for _ in map(take, buckets):  # it keeps no bucket while the next one is made
                pass
        self.refreshes += 1

    @torch.no_grad()
    def export(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint in the computation's dtype, tokenizer included. Collective over the mesh; one rank writes.

        The whole model passes through the CPU memory of the mesh's first rank.
        """
        if not self.is_local:
            return
        enter("export")
        weights = pipeline.whole_model(self.shards(), self.grid, lambda tensor: tensor.to(self.device, self.dtype))
        if self.grid.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            config = self.local.lm.config
            config.dtype = self.dtype
            config.save_pretrained(folder)
            if self.local.lm.generation_config is not None:
                self.local.lm.generation_config.save_pretrained(folder)
            save_torch_state_dict(checkpoint_of(weights), folder)
            self.source.tokenizer().save_pretrained(folder)

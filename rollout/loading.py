"""New weights into one running engine: copied into its parameters where that is known to be right, and verified in every tensor.

Which part of a checkpoint's tensor a tensor-parallel rank keeps is learned from vLLM's own loader, not from its layers: a tensor is
first loaded by vLLM, and if what the rank then holds is, bit for bit, one part of the original and no other, that part is copied
directly from then on. Whatever vLLM changes on the way, in shape, in type or in order, fits no part and stays with vLLM's loader.
A tensor that is one number throughout (a norm's first weights, a bias of zeros) would fit any part: numbers that differ go before it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from logits import operand, product_in_fp32
from parallel.weights import Bucket, NamedTensor, checksum
from rollout.experts import PARTS, expert_slices


class Cut(NamedTuple):
    """A rank's part of a checkpoint's tensor: `size` of what `dim` has, from `start`. All of it has dim 0, too."""

    dim: int
    start: int
    size: int

    def of(self, whole: Tensor) -> Tensor:
        if self.size == whole.shape[self.dim]:
            return whole
        return whole.narrow(self.dim, self.start, self.size)


Expected = dict[str, tuple[Tensor, int]]  # checksum and elements of a checkpoint's tensor, by its name


class Places:
    """Where a model's parameters have the checkpoint's tensors, and where padding. Finding out costs more than copying most tensors."""

    def __init__(self, model: nn.Module):
        self.model, self.slices, self.padding = model, checkpoint_slices(model), paddings(model)
        self._found = [(m._parameters, kind, p, p.data_ptr(), p.shape) for m in model.modules() for kind, p in m._parameters.items()
                       if p is not None]  # fmt: skip

    def hold(self, model: nn.Module) -> bool:
        """Is it the same model, and each parameter still the same, where it was?"""
        return self.model is model and all(
            owner.get(kind) is parameter and parameter.data_ptr() == address and parameter.shape == shape
            for owner, kind, parameter, address, shape in self._found
        )


class Loader:
    """What one rank of an engine has learned about its parameters, and how it takes new ones."""

    def __init__(self, replica: dist.ProcessGroup, inside: Callable[[], AbstractContextManager[None]]):
        """replica: the engine's ranks. inside: entered around every call into vLLM."""
        self.cuts: dict[str, Cut] = {}  # by the checkpoint's names
        self.before: Callable[[], None] = lambda: None  # called when the weights are about to change
        self._asked: set[str] = set()  # what vLLM's loader was watched with; once is enough, for it reads every tensor's numbers
        self._replica, self._inside = replica, inside
        self._places: Places | None = None

    @torch.no_grad()
    def load(self, model: nn.Module, buckets: Iterator[Bucket]) -> None:
        """Drain `buckets` into the engine's `model` and verify it. Collective over the replica. RuntimeError where a name is
        unknown, a tensor missing or different.
        """
        self.before()
        if self._places is None or not self._places.hold(model):
            self._places = Places(model)
        expected: Expected = {}
        for sent in map(partial(self._take, model), buckets):  # map keeps no bucket while the next one is made
            expected |= sent
        for rows in self._places.padding:
            rows.zero_()
        compare(self._places.slices, expected, self._replica)

    def _take(self, model: nn.Module, bucket: Bucket) -> Expected:
        """Load a bucket; what is expected of its tensors."""
        assert self._places is not None
        parts = self._places.slices
        if unknown := sorted({t.name for t in bucket} - set(parts)):
            raise RuntimeError(f"weight sync: {len(unknown)} names match nothing in the engine: {unknown[:3]}")
        new = {t.name: part for t in bucket if (part := self._part(t, parts[t.name])) is not None}
        if new:
            torch._foreach_copy_([parts[name] for name in new], list(new.values()))
        if others := {t.name: t.tensor for t in bucket if t.name not in new}:
            marks = {name: numbered(whole) for name, whole in others.items() if name not in self._asked and is_one_number(whole)}
            if marks:
                self._by_vllm(model, marks)
            self._by_vllm(model, others)
        return {t.name: (t.checksum, t.tensor.numel()) for t in bucket}

    def _by_vllm(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Have vLLM load them, and learn from it where they go."""
        with self._inside():
            model.load_weights(iter(tensors.items()))
        self._places = Places(model)  # vLLM may have put another parameter in a place
        parts, ranks = self._places.slices, dist.get_world_size(self._replica)
        new = tensors.keys() - self._asked
        self.cuts |= {name: cut for name in new if (cut := find_cut(tensors[name], parts[name], ranks))}
        self._asked |= new

    def _part(self, sent: NamedTensor, place: Tensor) -> Tensor | None:
        """What of it goes to the rank's `place`; None where that is unknown, or no longer fits."""
        if (cut := self.cuts.get(sent.name)) is None:
            return None
        part = cut.of(sent.tensor)
        return part if part.shape == place.shape and part.dtype == place.dtype else None


def find_cut(whole: Tensor, part: Tensor, ranks: int) -> Cut | None:
    """The only one of `ranks` equal parts along one dimension, or the last and smaller one, that `part` equals bit for bit.

    None where it equals none or several, where two dimensions differ, and where all of `whole` is one number, which would fit in any order.

    >>> whole = torch.arange(10).view(5, 2)
    >>> find_cut(whole, whole[3:], ranks=2), find_cut(whole, whole[:, :1], ranks=2), find_cut(whole, whole[1:4], ranks=2)
    (Cut(dim=0, start=3, size=2), Cut(dim=1, start=0, size=1), None)
    """
    if whole.ndim != part.ndim or whole.dtype != part.dtype:
        return None
    differs = [dim for dim in range(whole.ndim) if whole.shape[dim] != part.shape[dim]]
    if len(differs) > 1 or whole.ndim == 0:
        return None
    dim = differs[0] if differs else 0
    size, total = part.shape[dim], whole.shape[dim]
    starts = {rank * size for rank in range(ranks)} | {total - size}
    cuts = [Cut(dim, start, size) for start in sorted(starts) if 0 <= start <= total - size]
    if size == 0:
        return cuts[0]
    if is_one_number(whole):
        return None
    equal = [cut for cut in cuts if torch.equal(cut.of(whole), part)]
    return equal[0] if len(equal) == 1 else None


def is_one_number(tensor: Tensor) -> bool:
    """Is it the same number throughout? A NaN is no number."""
    return tensor.numel() > 1 and torch.equal(tensor, tensor.flatten()[:1].expand(tensor.numel()).view(tensor.shape))


def numbered(tensor: Tensor) -> Tensor:
    """One like it, of numbers that differ from place to place, the same on every rank and in every run."""
    draw = torch.Generator(tensor.device).manual_seed(0)
    return torch.rand(tensor.shape, generator=draw, device=tensor.device).to(tensor.dtype)


def verify(model: nn.Module, expected: Expected, replica: dist.ProcessGroup) -> None:
    """Every tensor of the engine must carry the checksum of the trainer's. Collective over the replica."""
    compare(checkpoint_slices(model), expected, replica)


def compare(slices: Mapping[str, Tensor], expected: Expected, replica: dist.ProcessGroup) -> None:
    """RuntimeError where a rank's `slices` of a checkpoint's tensors are not what is expected. Collective over the replica.

    Checksums are sums of bit patterns, so those of the slices that tensor parallelism makes add up; a tensor that every rank keeps whole
    adds up to that many times the original. The host reads all of them at once, at the end: it waits for the device here and nowhere else.
    """
    if unknown := sorted(set(expected) - set(slices)):
        raise RuntimeError(f"weight sync: {len(unknown)} names match nothing in the engine: {unknown[:3]}")
    if missing := sorted(set(slices) - set(expected)):
        raise RuntimeError(f"weight sync: the trainer sent nothing for {len(missing)} tensors of the engine: {missing[:3]}")
    names = sorted(expected)
    sums = torch.stack([checksum(slices[name]) for name in names])
    sizes = torch.tensor([slices[name].numel() for name in names]).to(sums.device, non_blocking=True)
    found, wanted = torch.stack([sums, sizes]), torch.stack([expected[name][0] for name in names])
    dist.all_reduce(found, group=replica)
    for name, total, size, want in zip(names, *torch.cat([found, wanted[None]]).tolist(), strict=True):
        numel = expected[name][1]
        copies, rest = divmod(size, numel)
        if rest or not copies or total != copies * want:
            raise RuntimeError(f"weight sync: {name} in the engine differs from the trainer's (checksum {total} != {copies} x {want})")


def paddings(model: nn.Module) -> list[Tensor]:
    """The rows with which vLLM pads a vocabulary. Its loader zeroes them: after a deep sleep they are what the memory held."""
    rows = [p[m.shard_indices.num_org_elements :] for m in model.modules() if pads_vocabulary(m) for p in m.parameters(recurse=False)]
    return [r for r in rows if r.numel()]


def pads_vocabulary(module: nn.Module) -> bool:
    """Is it one of vLLM's embeddings or heads?"""
    return isinstance(getattr(module, "org_vocab_size", None), int)


def widen_head(model: nn.Module) -> Callable[[], None]:
    """Have an engine's head make fp32 logits of its weights and hidden states as they are. (vLLM 0.32 has `head_dtype`, 0.25 not.)

    Returns what must be called when the weights change: on a CPU it keeps them in fp32, for a cast takes longer than the product.
    ValueError where the model has no head that we know. Some of vLLM's tied models, as Gemma 2, have none but the embedding.
    """
    modules = dict(model.named_modules())
    head: Any = modules.get("lm_head") or modules.get("model.embed_tokens")
    if head is None or not pads_vocabulary(head):
        raise ValueError(
            f"training.fp32_logits=true: vLLM's {type(model).__name__} has neither lm_head nor model.embed_tokens, whose product could be "
            f"widened; set it to false"
        )
    kept: list[Tensor] = []

    def apply(layer: nn.Module, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        if not kept:
            kept.append(operand(layer.weight))
        logits = product_in_fp32(hidden, kept[0])
        return logits if bias is None else logits + bias

    head.quant_method.apply = apply
    return kept.clear


def checkpoint_slices(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of every checkpoint tensor, as views of the engine's parameters, by the checkpoint's names.

    vLLM keeps q, k and v (gate and up) in one parameter and pads the vocabulary; a tied head appears once, as the embedding.
    """
    packed = model.packed_modules_mapping
    slices: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if leaf in packed:
                parts = parameter.split(module.output_partition_sizes)
                slices |= {f"{parent}.{name}.{kind}": part for name, part in zip(packed[leaf], parts, strict=True)}
            elif kind in PARTS:
                slices |= expert_slices(path, kind, parameter)
            elif pads_vocabulary(module):
                slices[f"{path}.{kind}"] = parameter[: module.shard_indices.num_org_elements]
            else:
                slices[f"{path}.{kind}"] = parameter
    return slices


@contextmanager
def fewer_blocks(pool: Any) -> Iterator[None]:
    """Show vLLM only the blocks of its KV cache that have a prefix in them: to empty the prefix cache it visits all, up to millions."""
    everything, known = pool.blocks, vars(pool.cached_block_hash_to_block).get("_cache")
    if isinstance(known, dict):  # of blocks, or of those with the same tokens by their numbers
        pool.blocks = [block for found in known.values() for block in (found.values() if isinstance(found, dict) else [found])]
    try:
        yield
    finally:
        pool.blocks = everything

"""Hidden states and the LM head's weight to log-probs, entropy and losses of them, without the logits.

Logits of a step would be the largest tensor of a run (4,096 tokens x 152k words = 2.5 GB in fp32, several times over).
Here they exist for a chunk of tokens at a time. Two ways to the gradients:

- `logprobs_from_hidden` returns log-probs for whatever comes after. Its backward computes the logits again, since only
  then the slopes are known; between the passes a few numbers per token are kept.
- `loss_from_hidden` is given the loss, where that is a sum of shares of separate tokens. A chunk's slopes are then known
  as soon as its log-probs are, so the forward makes the gradients too, and the logits are computed once.

Both work on a head whose rows are spread over tensor-parallel ranks (`VocabShard`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from logits import in_one_go, product_in_fp32, row_gradients, row_sums, wide

Share = Callable[[Tensor, Tensor | None, slice], Tensor]


@dataclass(frozen=True)
class VocabShard:
    """This rank has the rows [start, start + len(weight)) of a head of `vocabulary` rows; together the group's ranks have each once.

    Ranks may hold different numbers of rows, or none. All pass the same hidden states, targets and options.
    """

    group: dist.ProcessGroup
    start: int
    vocabulary: int


class HeadLoss(NamedTuple):
    loss: Tensor  # fp64 scalar
    logprobs: Tensor  # [M] fp32, without gradient
    entropy: Tensor | None  # [M] fp32, without gradient


def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    entropy: bool = False,
    chunk_tokens: int | None = None,
    shard: VocabShard | None = None,
    fp32_logits: bool = False,
    compiled_rows: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` [M] and, when asked, the exact entropy [M] of softmax(logits / temperature), both in fp32.

    hidden [M, H], weight [V, H], targets [M] int64, bias [V]; M may be 0. With a softcap (Gemma, 2408.00118) the logits
    are softcap * tanh(logits / softcap). Matrix products run in the dtype of `hidden`, everything after in fp32; fp64
    stays fp64. Gradients reach hidden, weight and bias, from log-probs and entropy alike. fp32_logits: the product is not rounded to
    the dtype of `hidden` either; a block of logits is then in fp32, and its gradient a second one in that dtype. compiled_rows: what is
    done with a block's rows is compiled (logits.py); its gradient is then a second block, and there are no strips.

    Peak memory beside inputs and gradients: a block of logits [chunk_tokens, V] in the dtype of `hidden`, strips of a few
    of its rows in fp32, and, if M > chunk_tokens, the gradient of a narrow weight in fp32 and one chunk's part of it.

    shard: weight and bias are this rank's rows; V is their number. Forward: one all-gather of 3 numbers per token (4 with
    entropy); backward: one all-reduce of the gradient of `hidden`, which is whole on every rank, as that of a rank's own
    rows is. Collective over the group.

    >>> logprobs_from_hidden(torch.tensor([[2.0, 0.0]]), torch.eye(2), torch.tensor([0]), temperature=0.5)[0]
    tensor([-0.0181])
    """
    how = _How.checked(hidden, weight, temperature, softcap, chunk_tokens, shard, fp32_logits, compiled_rows)
    return _Logprobs.apply(hidden, weight, bias, targets, how, entropy)


def loss_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    share: Share,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    entropy: bool = False,
    chunk_tokens: int | None = None,
    shard: VocabShard | None = None,
    fp32_logits: bool = False,
    compiled_rows: bool = False,
) -> HeadLoss:
    """The sum of what `share` returns for each chunk of tokens, and the log-probs (and entropy) it was given.

    share(logprobs [m], entropy [m] or None, rows) is the scalar part that tokens `rows` (a slice of the M) have in the loss,
    differentiable in both tensors; it is called once a chunk, and must not depend on where the chunks end. So a token's part
    may depend on no other token's log-prob. Without a gradient to make (torch.no_grad) it is called all the same.

    Other arguments, memory and collectives as in `logprobs_from_hidden`, but an all-gather for each chunk and the all-reduce
    in the forward. The gradients wait for one backward pass, which scales them; a second one is an error.

    >>> hidden = torch.tensor([[2.0, 0.0], [0.0, 1.0]], requires_grad=True)
    >>> result = loss_from_hidden(hidden, torch.eye(2), torch.tensor([0, 0]), lambda logprobs, entropy, rows: -logprobs.sum())
    >>> result.loss.backward(); hidden.grad
    tensor([[-0.1192,  0.1192],
            [-0.7311,  0.7311]])
    """
    how = _How.checked(hidden, weight, temperature, softcap, chunk_tokens, shard, fp32_logits, compiled_rows)
    return HeadLoss(*_Loss.apply(hidden, weight, bias, targets, how, entropy, share, torch.is_grad_enabled()))


def default_chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Rows of a block of logits, for a rank's number of words: 64 MiB of them in fp32 on a CPU, 512 MiB in bf16 on a GPU.

    A chunk must be long enough to hide what every chunk costs: the weight is read, and its gradient read and written. A CPU
    computes some ten operations in the time of moving a byte and is content with 256 rows, which it therefore gets where 64 MiB
    are fewer; a GPU computes hundreds, adds up the gradient of a bf16 weight in fp32 and wants a thousand or two.
    """
    if device.type == "cpu":
        return min(max(2**24 // max(vocabulary, 1), 256), 4096)
    return min(max(2**28 // max(vocabulary, 1), 1024), 8192)


@dataclass(frozen=True)
class _How:
    """From raw logits to scores (what the softmax sees), and how much of them at a time."""

    temperature: float
    softcap: float | None
    chunk_tokens: int
    strip_tokens: int  # rows of a chunk that are in fp32 at once
    shard: VocabShard | None
    fp32_logits: bool
    compiled_rows: bool

    @classmethod
    def checked(
        cls, hidden: Tensor, weight: Tensor, temperature: float, softcap: float | None, chunk_tokens: int | None,
        shard: VocabShard | None, fp32_logits: bool, compiled_rows: bool,
    ) -> "_How":  # fmt: skip
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be above 0: log-probs are those of logits / temperature")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap={softcap} must be above 0, or None")
        if chunk_tokens is None:  # equal on all ranks of a group, however many rows each has
            words = len(weight) if shard is None else -(-shard.vocabulary // shard.group.size())
            chunk_tokens = default_chunk_tokens(words, hidden.device)
        # On a CPU a strip stays in the cache from the first operation to the last; on a GPU it is long enough to fill it.
        strip = (2**18 if hidden.device.type == "cpu" else 2**25) // max(len(weight), 1)
        return cls(temperature, softcap, chunk_tokens, max(min(strip, chunk_tokens // 8), 1), shard, fp32_logits, compiled_rows)

    def scores(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """[rows, V] in fp32: a fresh tensor, which the caller may overwrite."""
        scores = logits.to(wide(logits), copy=True)
        if bias is not None:
            scores.add_(bias)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        return scores if self.temperature == 1 else scores.div_(self.temperature)

    def own(self, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Where among this rank's rows each target is, and whether it is there at all; elsewhere the place means nothing. [M], [M] bool"""
        places = targets if self.shard is None else targets - self.shard.start
        held = torch.ones_like(targets, dtype=torch.bool) if self.shard is None else (places >= 0) & (places < len(weight))
        return torch.where(held, places, 0), held

    def strips(self, block: Tensor) -> Iterator[slice]:
        return (slice(start, min(start + self.strip_tokens, len(block))) for start in range(0, len(block), self.strip_tokens))


class _Softmax(NamedTuple):
    """Of every token, over the whole vocabulary; [m] each. p = exp(score - largest) / total."""

    logprobs: Tensor
    entropy: Tensor | None
    largest: Tensor
    total: Tensor

    def rows(self, rows: slice) -> "_Softmax":
        return _Softmax(self.logprobs[rows], None if self.entropy is None else self.entropy[rows], self.largest[rows], self.total[rows])


def _chunks(hidden: Tensor, weight: Tensor, how: _How) -> Iterator[tuple[slice, Tensor]]:
    """Every chunk's rows and raw logits, which the caller may overwrite: one block of memory, unless they are wider than `hidden`."""
    chunks = [slice(start, min(start + how.chunk_tokens, len(hidden))) for start in range(0, len(hidden), how.chunk_tokens)]
    if how.fp32_logits and hidden.dtype != wide(hidden):
        yield from ((rows, product_in_fp32(hidden[rows], weight)) for rows in chunks)
        return
    memory = hidden.new_empty(min(how.chunk_tokens, len(hidden)), len(weight))
    for rows in chunks:
        yield rows, torch.mm(hidden[rows], weight.T, out=memory[: rows.stop - rows.start])


def _sums(logits: Tensor, bias: Tensor | None, places: Tensor, held: Tensor, how: _How, entropy: bool) -> Tensor:
    """[3 or 4, m] over this rank's words: largest score, sum of e = exp(score - largest), target's score, sum of e (score - largest)."""
    sums = torch.empty(4 if entropy else 3, len(logits), dtype=wide(logits), device=logits.device)
    lowest = torch.finfo(sums.dtype).min  # of no words at all, the largest; finite, since 0 * inf is no number
    if logits.shape[1] == 0:
        sums.zero_()[0] = lowest
        sums[2] = -torch.inf
        return sums
    if how.compiled_rows:
        return in_one_go(row_sums, logits, bias, places, held, how.temperature, how.softcap, entropy)
    for strip in how.strips(logits):
        scores = how.scores(logits[strip], bias)
        sums[0, strip] = largest = scores.amax(-1).clamp_(min=lowest)
        sums[2, strip] = scores.gather(-1, places[strip, None])[:, 0].masked_fill_(~held[strip], -torch.inf)
        scores.sub_(largest[:, None]).exp_()
        sums[1, strip] = scores.sum(-1)
        if entropy:
            sums[3, strip] = -torch.special.entr(scores, out=scores).sum(-1)
        del scores  # before the next is made, else two are alive
    return sums


def _softmax(sums: Tensor, shard: VocabShard | None) -> _Softmax:
    """From the `_sums` of all ranks, in the same order on every rank, so that they agree to the last bit."""
    parts = sums[None]
    if shard is not None:
        parts = sums.new_empty(shard.group.size(), *sums.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), sums, group=shard.group)
    largest = parts[:, 0].amax(0)
    below = parts[:, 0] - largest
    scale = below.exp()
    total = (scale * parts[:, 1]).sum(0)
    logprobs = parts[:, 2].amax(0) - largest - total.log()  # a target that no rank holds: -inf
    if len(sums) == 3:
        return _Softmax(logprobs, None, largest, total)
    weighted = (scale * (parts[:, 3] + below * parts[:, 1])).sum(0)
    return _Softmax(logprobs, total.log() - weighted / total, largest, total)


class _Gradients:
    """Sums of the gradients of the inputs that want one, in place, chunk by chunk."""

    def __init__(self, needed: tuple[bool, ...], hidden: Tensor, weight: Tensor, bias: Tensor | None, how: _How):
        self._hidden, self._weight, self._bias, self._how = hidden, weight, bias, how
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        # Summed over several chunks in bf16, the weight's gradient would lose its last bits to every addition.
        sum_dtype = wide(weight) if len(hidden) > how.chunk_tokens else weight.dtype
        self.weight = torch.zeros_like(weight, dtype=sum_dtype) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide(bias)) if bias is not None and needed[2] else None

    def add(
        self, rows: slice, logits: Tensor, places: Tensor, held: Tensor, softmax: _Softmax, slopes: Tensor, entropy_slopes: Tensor | None
    ) -> None:
        """Add those of tokens `rows`, of which all else has [m] or [m, V]; consumes `logits`."""
        fused = self._how.compiled_rows and self.bias is None and logits.shape[1] > 0
        if fused:
            options = (self._how.temperature, self._how.softcap, softmax.largest, softmax.total, slopes, softmax.entropy, entropy_slopes)
            logits = in_one_go(row_gradients, logits, self._bias, places, held, *options)
        for strip in () if fused else self._how.strips(logits):
            scores = self._how.scores(logits[strip], self._bias)
            entropy_strip = None if entropy_slopes is None else entropy_slopes[strip]
            gradient = self._of_logits(scores, places[strip], held[strip], softmax.rows(strip), slopes[strip], entropy_strip)
            if self.bias is not None:
                self.bias += gradient.sum(0)
            logits[strip] = gradient
            del scores, gradient  # before the next are made
        logits = logits.to(self._weight.dtype)  # with fp32_logits only the forward product is in fp32
        if self.hidden is not None:
            torch.mm(logits, self._weight, out=self.hidden[rows])
        if self.weight is not None and self.weight.dtype == logits.dtype:
            self.weight.addmm_(logits.T, self._hidden[rows])
        elif self.weight is not None:
            self.weight += logits.T @ self._hidden[rows]

    def _of_logits(
        self, scores: Tensor, places: Tensor, held: Tensor, softmax: _Softmax, slopes: Tensor, entropy_slopes: Tensor | None
    ) -> Tensor:
        """With respect to the raw logits, [rows, V]; consumes `scores`.

        With y = log p: d logprob / d score_j = [j is the target] - p_j, and d entropy / d score_j = -p_j (y_j + entropy).
        """
        temperature, softcap = self._how.temperature, self._how.softcap
        bend = None if softcap is None else (scores * (temperature / softcap)).square_().neg_().add_(1)  # 1 - tanh^2
        slopes = slopes / temperature
        scores.sub_(softmax.largest[:, None])
        if entropy_slopes is None:
            gradient = scores.exp_().mul_((-slopes / softmax.total)[:, None])
        else:
            assert softmax.entropy is not None
            log_p = scores.sub_(softmax.total.log()[:, None])
            bracket = (log_p + softmax.entropy[:, None]).mul_((-entropy_slopes / temperature)[:, None]).sub_(slopes[:, None])
            gradient = log_p.exp_().mul_(bracket)
        if gradient.shape[1]:
            gradient[torch.arange(len(places), device=places.device), places] += torch.where(held, slopes, 0)
        return gradient if bend is None else gradient.mul_(bend)

    def sum_over_ranks(self) -> None:
        """Of every rank's words the hidden states have had only this rank's part."""
        if self.hidden is not None and self._how.shard is not None:
            dist.all_reduce(self.hidden, group=self._how.shard.group)

    def in_dtypes_of_inputs(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        weight = None if self.weight is None else self.weight.to(self._weight.dtype)
        bias = None if self.bias is None or self._bias is None else self.bias.to(self._bias.dtype)
        return self.hidden, weight, bias


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How, want_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        places, held = how.own(targets, weight)
        sums = torch.empty(4 if want_entropy else 3, len(hidden), dtype=wide(hidden), device=hidden.device)
        for rows, logits in _chunks(hidden, weight, how):
            sums[:, rows] = _sums(logits, bias, places[rows], held[rows], how, want_entropy)
            del logits  # before the next block is made, here and below
        softmax = _softmax(sums, how.shard)
        ctx.save_for_backward(hidden, weight, bias, targets, *softmax)
        ctx.how = how
        ctx.set_materialize_grads(False)
        return softmax.logprobs, softmax.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor | None, entropy_slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, *saved = ctx.saved_tensors
        how, softmax = ctx.how, _Softmax(*saved)
        places, held = how.own(targets, weight)
        if slopes is None:
            slopes = torch.zeros_like(softmax.total)
        gradients = _Gradients(ctx.needs_input_grad, hidden, weight, bias, how)
        for rows, logits in _chunks(hidden, weight, how):
            entropy_rows = None if entropy_slopes is None else entropy_slopes[rows]
            gradients.add(rows, logits, places[rows], held[rows], softmax.rows(rows), slopes[rows], entropy_rows)
            del logits
        gradients.sum_over_ranks()
        return *gradients.in_dtypes_of_inputs(), None, None, None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        how: _How,
        want_entropy: bool,
        share: Share,
        learns: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        places, held = how.own(targets, weight)
        logprobs = torch.empty(len(hidden), dtype=wide(hidden), device=hidden.device)
        entropy = torch.empty_like(logprobs) if want_entropy else None
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        learns = learns and any(ctx.needs_input_grad)
        gradients = _Gradients(ctx.needs_input_grad, hidden, weight, bias, how) if learns else None
        for rows, logits in _chunks(hidden, weight, how):
            softmax = _softmax(_sums(logits, bias, places[rows], held[rows], how, want_entropy), how.shard)
            logprobs[rows] = softmax.logprobs
            if entropy is not None and softmax.entropy is not None:
                entropy[rows] = softmax.entropy
            part, slopes, entropy_slopes = _share_and_slopes(share, softmax, rows, learns)
            loss += part
            if gradients is not None:
                gradients.add(rows, logits, places[rows], held[rows], softmax, slopes, entropy_slopes)
            del logits
        if gradients is not None:
            gradients.sum_over_ranks()
        ctx.gradients = gradients
        ctx.mark_non_differentiable(*(t for t in (logprobs, entropy) if t is not None))
        return loss, logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("loss_from_hidden: a second backward pass through one loss; its gradients were given to the first")
        for gradient in (gradients.hidden, gradients.weight, gradients.bias):
            if gradient is not None:
                gradient.mul_(slope)
        return *gradients.in_dtypes_of_inputs(), *[None] * 5


def _share_and_slopes(share: Share, softmax: _Softmax, rows: slice, learns: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """A chunk's part of the loss, and its derivatives with respect to log-probs and, where it depends on it, entropy. [], [m], [m]"""
    logprobs = softmax.logprobs.detach().requires_grad_(learns)
    entropy = None if softmax.entropy is None else softmax.entropy.detach().requires_grad_(learns)
    with torch.set_grad_enabled(learns):
        part = share(logprobs, entropy, rows)
    if part.numel() != 1:
        raise ValueError(f"the share of a chunk must be a scalar, and has shape {list(part.shape)}: sum over its tokens")
    if not learns:
        return part, torch.zeros_like(logprobs), None
    leaves = [logprobs] if entropy is None else [logprobs, entropy]
    slopes, *entropy_slopes = torch.autograd.grad(part, leaves, allow_unused=True)
    slopes = torch.zeros_like(logprobs) if slopes is None else slopes
    return part.detach(), slopes, entropy_slopes[0] if entropy_slopes else None

"""A step's loss, row by row: what the loss file says of each token, times the token's share of the step, corrected for the sampler.

The shares come from the lengths of all the step's sequences at once, so no split into rows or ranks can change a gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from batch import IDLE, Batch, Episode, pad
from head import Share
from losses.contract import forward_arguments, is_whole_batch, token_weights, whole_batch_loss
from losses.correction import Masked, Truncated, Uncorrected
from losses.kl import k3
from model import Model, Row
from parallel.pipeline import from_last_stage

Correction = Callable[[Tensor, Tensor], Tensor]  # pi / pi_sampler [B, T] and mask [B, T] -> weight [B, T] (losses/correction.py)
KNOWN = {"clip_low": "clip/low", "clip_high": "clip/high", "dual_clip": "clip/dual"}  # a loss's metrics, by their names in the log
TOKENWISE = (Truncated, Masked)  # corrections of a token by its own ratio alone
DERIVED = ("ratio", "kl")  # a loss's metrics that are measured here for every loss


class Objective:
    def __init__(
        self, loss: Any, *, correction: Correction | None = None, entropy_coef: float = 0.0, top_entropy: float = 1.0
    ):
        """loss: a PolicyLoss, or any callable that maps [B, T] tensors to a scalar. correction: None, data is the policy's own.

        top_entropy: share of a step's tokens, those with the highest entropy, whose policy loss is kept (2506.01939); the others stay
        in the denominators.
        """
        self.loss, self.entropy_coef, self.top_entropy = loss, entropy_coef, top_entropy
        self.correction = None if isinstance(correction, Uncorrected) or "gen_logprobs" in forward_arguments(loss) else correction
        names = forward_arguments(loss)
        tokenwise = self.correction is None or type(self.correction) in TOKENWISE  # a subclass may look at other tokens
        self.elementwise = not is_whole_batch(loss) and loss.elementwise and tokenwise  # no token's part depends on another token
        self._has_ratio = "old_logprobs" in names

    def of_step(self, episodes: list[Episode], rows: list[Row], model: Model) -> "Step":
        """The loss of one optimizer step. Collective over the model's mesh."""
        lengths = [int(e.loss_mask.sum()) for e in episodes]
        step = Step(self, model.device, sampled=episodes[0].gen_logprobs is not None, whole_rows=model.grid.cp == 1)
        whole = is_whole_batch(self.loss)
        if whole or self.top_entropy < 1:
            logprobs, entropy = _first_pass(episodes, rows, model)
            if self.top_entropy < 1:
                step.kept = _highest(entropy, episodes, self.top_entropy)
            if whole:
                step.value, step.gradients = self._whole_batch(episodes, logprobs, entropy, model.device)
        if whole:
            shares = [1 / max(sum(lengths), 1)] * len(lengths)  # of an entropy bonus: the mean over tokens
        else:
            groups = [e.group for e in episodes]
            shares = token_weights(self.loss.averaging, lengths, groups=groups, max_tokens=self.loss.max_tokens)
        step.shares = {id(e): w for e, w in zip(episodes, shares, strict=True)}
        return step

    def _whole_batch(
        self, episodes: list[Episode], logprobs: list[np.ndarray], entropy: list[np.ndarray], device: torch.device
    ) -> tuple[float, dict[int, np.ndarray]]:
        """A loss that returns a scalar, evaluated once on the whole step's [B, T], and d loss / d logprobs by episode."""
        grid = pad(logprobs, device).requires_grad_()
        mask = pad([e.loss_mask for e in episodes], device)
        value = whole_batch_loss(self.loss, logprobs=grid, entropy=pad(entropy, device), padding_mask=mask, **inputs(episodes, device))
        (gradient,) = torch.autograd.grad(value, grid)
        by_episode = zip(episodes, gradient.cpu().numpy(), strict=True)
        known = value.item() if mask.any() else 0.0  # a mean over no tokens is NaN; its gradient is 0
        return known, {id(e): line[: e.num_response_tokens] for e, line in by_episode}

    def correct(self, frozen: Tensor, given: dict[str, Tensor | None], mask: Tensor, sampler_is_old: bool) -> "Corrected | None":
        """The weights of a row's tokens, or None where nothing was sampled by an engine.

        r is pi / pi_sampler, where pi is the policy before the rollout's first update if the loss has a ratio to that policy of its own,
        else the policy being trained. Where the sampler itself stands for the old policy, the loss has r in it already and gets
        weight / r. A loss that asks for gen_logprobs weighs the sampler's data itself and is left alone.
        """
        gen, old = given["gen_logprobs"], given["old_logprobs"]
        if gen is None:
            return None
        base = old if old is not None and self._has_ratio and not sampler_is_old else frozen
        gap = torch.where(mask != 0, base - gen, 0.0)
        ratio = gap.exp()
        if self.correction is None:
            return Corrected(torch.ones_like(ratio), ratio, ratio, gap)
        weight = self.correction(ratio, mask)
        factor = weight / ratio if self._has_ratio and sampler_is_old else weight
        return Corrected(factor, weight, ratio, gap)


@dataclass
class Corrected:
    """[B, T] each, of one row."""

    factor: Tensor  # what the loss is multiplied by
    weight: Tensor  # what the gradient at the sampled token carries in place of `ratio`
    ratio: Tensor  # pi / pi_sampler
    gap: Tensor  # its logarithm

    def metrics(self, active: bool) -> dict[str, Tensor]:
        """Per token. `active`: a correction is at work."""
        size = self.gap.abs()
        found = {"mismatch/abs_mean": size, "mismatch/k3": torch.expm1(self.gap) - self.gap, "mismatch/mult_prob_err": size.exp()}
        if active:
            masked = self.weight == 0
            found |= {"is/frac_truncated": (~masked & (self.weight != self.ratio)).float(), "is/frac_masked": masked.float()}
        return found


@dataclass
class Step:
    """One step's loss on this rank."""

    objective: Objective
    device: torch.device
    sampled: bool  # its episodes come with the sampler's log-probs
    whole_rows: bool  # this rank's head sees all tokens of a row
    value: float | None = None  # of a whole-batch loss
    gradients: dict[int, np.ndarray] = field(default_factory=dict)  # of a whole-batch loss, by id(episode): d loss / d logprobs [R]
    shares: dict[int, float] = field(default_factory=dict)  # by id(episode): the weight of each of its tokens
    kept: dict[int, np.ndarray] | None = None  # by id(episode): 1 where a token is among those of high entropy, [R]
    sequences: list[tuple[float, int, float, float, bool]] = field(default_factory=list)  # of this rank, see `sequence_metrics`

    def row(self, row: Row, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """This row's part of the step's loss (float64), per-token metrics [B, T] and the mask [B, T], from log-probs and entropy [B, T]."""
        columns = self._columns(row, pad)
        total, output, corrected = self._loss(columns, row[0], logprobs, entropy)
        frozen, old, mask = logprobs.detach(), columns.get("old_logprobs", logprobs.detach()), columns["mask"]
        metrics = {"entropy/mean": entropy, "entropy/nll": -frozen, "kl/old": old - frozen, "ratio/mean": (frozen - old).exp()}
        metrics |= {KNOWN.get(k, f"loss/{k}"): v for k, v in output.items() if k not in DERIVED}
        if "ref_logprobs" in columns and row[0] is not IDLE:
            metrics["kl/ref_k3"] = k3(frozen, columns["ref_logprobs"])
        if corrected is not None:
            metrics |= corrected.metrics(self.objective.correction is not None)
            self.sequences += _sequences(corrected, mask)
        return total, metrics, mask

    def by_chunks(self, row: Row) -> Share | None:
        """This row's part of the step's loss as the head's fast path asks for it, chunk by chunk; None where tokens need each other."""
        if not self.objective.elementwise or not self.whole_rows:
            return None
        columns = self._columns(row, _concatenate)

        def share(logprobs: Tensor, entropy: Tensor | None, rows: slice) -> Tensor:
            assert entropy is not None
            here = {name: column[:, rows] for name, column in columns.items()}
            return self._loss(here, row[0], logprobs[None], entropy[None])[0]

        return share

    def _columns(self, row: Row, join: Callable[[list[np.ndarray], torch.device], Tensor]) -> dict[str, Tensor]:
        """What the row's episodes say of each token, joined to one tensor a column; without those that they do not carry."""
        real = row[0] is not IDLE
        columns = {
            "mask": [e.loss_mask for e in row],
            "share": [e.loss_mask * np.float32(self.shares.get(id(e), 0.0)) for e in row],
            "advantages": [e.advantages for e in row],
        }
        columns |= {name: [vars(e)[name] for e in row] for name in LOGPROBS if real and vars(row[0])[name] is not None}
        if not real:
            # Every replica must report the same names: an idle row evaluates the loss on tokens that do not count.
            columns |= {name: [e.loss_mask for e in row] for name in ("ref_logprobs", *(("gen_logprobs",) if self.sampled else ()))}
        if self.value is not None:
            columns["gradient"] = [self.gradients.get(id(e), ZERO) for e in row]
        if self.kept is not None:
            columns["kept"] = [self.kept.get(id(e), ZERO) for e in row]
        return {name: join(values, self.device) for name, values in columns.items()}

    def _loss(
        self, columns: dict[str, Tensor], first: Episode, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Corrected | None]:
        """The part of the step's loss that these tokens have, the loss's own metrics, and the correction."""
        objective, mask = self.objective, columns["mask"]
        given = {name: columns.get(name) for name in ("advantages", *LOGPROBS)}
        sampler_is_old = first.old_logprobs is not None and first.old_logprobs is first.gen_logprobs
        corrected = objective.correct(logprobs.detach(), given, mask, sampler_is_old)
        factor = torch.ones_like(mask) if corrected is None else corrected.factor
        factor = factor * columns["kept"] if "kept" in columns else factor
        output: dict[str, Tensor] = {}
        if "gradient" in columns:
            total = (logprobs * columns["gradient"] * mask * factor).sum(dtype=torch.float64)
        else:
            elementwise = objective.loss.elementwise
            # Where a token's loss has gradients at other tokens, it is the gradient that arrives at a token that is weighed.
            seen = logprobs if elementwise else logprobs.detach() + factor * (logprobs - logprobs.detach())
            out = objective.loss.evaluate(logprobs=seen, entropy=entropy, padding_mask=mask, **given)
            output = out.metrics
            weighed = out.loss * columns["share"] * factor
            unweighed = out.loss * columns["share"]
            total = (weighed if elementwise else weighed.detach() + unweighed - unweighed.detach()).sum(dtype=torch.float64)
        if objective.entropy_coef:
            total = total - objective.entropy_coef * (entropy * columns["share"]).sum(dtype=torch.float64)
        return total, output, corrected

    def sequence_metrics(self, group: dist.ProcessGroup) -> dict[str, float]:
        """What single sequences say of the gap to the sampler, over all ranks; {} without a sampler. Collective over `group`.

        mismatch/seq_product_*, seq_geometric_*: percentiles over sequences of exp(sum) and exp(mean) of log pi / pi_sampler.
        is/ess_token, ess_seq: (sum w)^2 / (n sum w^2) of the tokens' weights, and of the sequences' products of pi / pi_sampler.
        is/frac_seq_dropped: share of sequences of which every token was masked.
        """
        parts: list[list[tuple[float, int, float, float, bool]]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(parts, self.sequences, group=group)
        table = [line for part in parts for line in part]
        if not table:
            return {}
        sums, counts, weights, squares, dropped = (np.array(column, np.float64) for column in zip(*table, strict=True))
        result: dict[str, float] = {}
        for name, logs in (("product", sums), ("geometric", sums / counts)):
            values = np.percentile(logs, (1, 50, 99), method="nearest")
            result |= {f"mismatch/seq_{name}_p{p}": float(np.exp(min(v, 700))) for p, v in zip((1, 50, 99), values, strict=True)}
        products = np.exp(sums - sums.max())  # the common factor cancels
        result["is/ess_seq"] = float(products.sum() ** 2 / (len(products) * np.square(products).sum()))
        if self.objective.correction is not None:
            result["is/ess_token"] = float(weights.sum() ** 2 / max(counts.sum() * squares.sum(), 1e-300))
            result["is/frac_seq_dropped"] = float(dropped.mean())
        return result


ZERO = np.zeros(1, np.float32)
LOGPROBS = ("gen_logprobs", "ref_logprobs", "old_logprobs")


def inputs(episodes: list[Episode], device: torch.device) -> dict[str, Tensor | None]:
    """The [B, T] tensors of a loss that come with the episodes; None for what they do not carry."""

    def column(name: str) -> Tensor | None:
        values = [vars(e)[name] for e in episodes]
        return None if values[0] is None else pad(values, device)

    return {name: column(name) for name in ("advantages", *LOGPROBS)}


def _concatenate(columns: list[np.ndarray], device: torch.device) -> Tensor:
    """[1, M] float32, the columns one after the other."""
    return torch.as_tensor(np.concatenate(columns)[None].astype(np.float32)).to(device)


def _sequences(corrected: Corrected, mask: Tensor) -> list[tuple[float, int, float, float, bool]]:
    """Of each sequence with a token that counts: sum of log r, tokens, sum of weights and of their squares, all of them 0."""
    weight = corrected.weight * mask
    columns = (corrected.gap.double().sum(1), mask.sum(1), weight.double().sum(1), weight.double().square().sum(1))
    lines = zip(*(c.tolist() for c in columns), strict=True)
    return [(total, int(n), w, w2, w2 == 0) for total, n, w, w2 in lines if n]


def _first_pass(episodes: list[Episode], rows: list[Row], model: Model) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Log-probs and entropies [R] of every episode of the step, on every rank. Costs a forward pass. Collective over the mesh."""
    mine: dict[int, list[np.ndarray]] = {}
    places = {id(e): i for i, e in enumerate(episodes)}

    def keep(i: int, _batch: Batch, outputs: tuple[Tensor, ...]) -> Tensor:
        ends = np.cumsum([e.num_response_tokens for e in rows[i]])[:-1]
        parts = [np.split(t.cpu().numpy(), ends) for t in outputs]
        mine.update({places[id(e)]: pair for e, *pair in zip(rows[i], *parts, strict=True) if id(e) in places})
        return outputs[0].sum()

    with torch.no_grad():
        model.passes(rows, keep)
    mine = from_last_stage(mine, model.grid)
    gathered: list[dict[int, list[np.ndarray]]] = [{} for _ in range(model.grid.num_replicas)]
    dist.all_gather_object(gathered, mine, group=model.grid.group("dp"))
    known = {i: pair for shard in gathered for i, pair in shard.items()}
    return [known[i][0] for i in range(len(episodes))], [known[i][1] for i in range(len(episodes))]


def _highest(entropy: list[np.ndarray], episodes: list[Episode], share: float) -> dict[int, np.ndarray]:
    """1 where a token is among the `share` of the step's tokens with the highest entropy (all that tie with the last one)."""
    counted = np.concatenate([h[e.loss_mask > 0] for h, e in zip(entropy, episodes, strict=True)])
    if not len(counted):
        return {}
    count = max(round(share * len(counted)), 1)
    threshold = np.partition(counted, len(counted) - count)[len(counted) - count]
    return {id(e): (h >= threshold).astype(np.float32) for h, e in zip(entropy, episodes, strict=True)}

"""The laws of a loss, each as a function of the loss alone: what holds whatever it optimises, and what it declares of itself.

A law answers with its finding: "FAIL" only where a declaration, or a law that every loss must satisfy, is broken, with the first
counterexample; "note" for what its author should know; None where the law says nothing about this loss. `losses.check` runs them.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, combinations, product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from losses.contract import Averaging, PolicyLoss, forward_arguments, is_whole_batch, token_weights, whole_batch_loss

Loss = Callable[..., Any]
Tensors = dict[str, Tensor]
LOGPROBS = ("logprobs", "old_logprobs", "gen_logprobs", "ref_logprobs")
STOPS = ("torch.Tensor.detach", "torch.detach", "torch.Tensor.data.__get__")
LENGTHS, GROUPS = [3, 2, 4, 1, 3], [0, 0, 1, 1, 2]


class Finding(NamedTuple):
    status: Literal["pass", "FAIL", "note"]
    detail: str


def example(lengths: list[int], *, own: bool = False, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensors:
    """A step of [B, T] with two last columns of padding and a hole in its longest sequence; 0 where nothing counts.

    own: sampler, old policy and reference agree with the policy.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths) + 2)  # B != T: what mixes them up must not fit
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).to(torch.float64)
    if max(lengths) > 2:
        mask[lengths.index(max(lengths)), 1] = 0

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    logprobs = -0.6 - 2 * torch.rand(shape, generator=generator, dtype=torch.float64)
    tensors = {name: (logprobs + 0.3 * (name != "logprobs") * noise(*shape)).clamp(max=-0.05) for name in LOGPROBS}
    if own:
        tensors = dict.fromkeys(LOGPROBS, tensors["logprobs"])
    tensors |= {"entropy": noise(*shape).abs(), "padding_mask": mask}
    advantages = noise(shape[0], 1)
    tensors = {name: tensor * mask for name, tensor in tensors.items()} | {"advantages": advantages + 0.3 * advantages.sign()}
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def scalar(loss: Loss, tensors: Tensors, weights: list[float]) -> Tensor:
    """The step's loss, or the share of it that these rows have if `weights` are those of the whole step."""
    if is_whole_batch(loss):
        return whole_batch_loss(loss, **tensors)
    losses = loss.evaluate(**tensors).loss  # type: ignore[attr-defined]
    return (losses * losses.new_tensor(weights)[:, None]).sum()


def measure(loss: Loss, tensors: Tensors, weights: list[float] | None = None) -> tuple[Tensor, Tensor]:
    """(value [], its gradient in the log-probs [B, T]). `weights` default to those of a step of these rows."""
    logprobs = tensors["logprobs"].detach().clone().requires_grad_()
    copies = {name: tensor.clone() for name, tensor in tensors.items()}  # a loss that edits them spoils no other law
    value = scalar(loss, {**copies, "logprobs": logprobs}, weights or weights_of(loss, tensors))
    return value.detach(), gradient(value, logprobs)


def weights_of(loss: Loss, tensors: Tensors, groups: list[int] | None = None) -> list[float]:
    if not isinstance(loss, PolicyLoss):
        return []
    lengths = tensors["padding_mask"].sum(1).int().tolist()
    return token_weights(loss.averaging, lengths, groups=groups, max_tokens=loss.max_tokens)


def gradient(value: Tensor, logprobs: Tensor) -> Tensor:
    found = torch.autograd.grad(value, logprobs, allow_unused=True)[0] if value.requires_grad else None
    return torch.zeros_like(logprobs) if found is None else found


def first_difference(found: Tensor, expected: Tensor, rtol: float = 1e-6, atol: float = 1e-7) -> tuple[int, ...] | None:
    """Where two tensors first differ. NaN differs from everything; tolerances allow a loss that computes in float32."""
    places = (~torch.isclose(found.double(), expected.double(), rtol=rtol, atol=atol)).nonzero()
    return tuple(places[0].tolist()) if len(places) else None


def number(tensor: Tensor) -> str:
    return f"{tensor.item():.6g}"


def at(place: tuple[int, ...]) -> str:
    return f"sequence {place[0]}, token {place[1]}"


def compare(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> str | None:
    """In words, how a value and its gradient changed; None if they did not."""
    place = first_difference(after[1], before[1])
    if place is not None:
        return f"{at(place)}: its gradient goes from {number(before[1][place])} to {number(after[1][place])}"
    if first_difference(after[0], before[0]) is not None:
        return f"the value goes from {number(before[0])} to {number(after[0])}"
    return None


# Who is averaged over whom --------------------------------------------------------------------------------------


def split(loss: Loss) -> Finding | None:
    """Every subset of the sequences as a micro-batch: it may have fewer columns, another order, and an idle rank's filler."""
    if is_whole_batch(loss):
        return None
    tensors = example(LENGTHS)
    weights, rows = weights_of(loss, tensors, GROUPS), range(len(LENGTHS))
    value, grad = measure(loss, tensors, weights)
    values: dict[frozenset[int], Tensor] = {}
    subsets = list(chain.from_iterable(combinations(rows, size) for size in rows[1:]))
    for i, part in enumerate(subsets):
        order, width = list(reversed(part)) if i % 2 else list(part), max(LENGTHS[row] for row in part)
        inputs = {name: t[order, :width] if t.shape[1] > 1 else t[order] for name, t in tensors.items()}
        if i % 3 == 0:
            inputs = {name: torch.cat([tensor, torch.zeros_like(tensor[:1])]) for name, tensor in inputs.items()}
        given = [weights[row] for row in order] + [0.0] * (i % 3 == 0)
        values[frozenset(part)], found = measure(loss, inputs, given)
        place = first_difference(found[: len(order)], grad[order, :width])
        if place is not None:
            where = (order[place[0]], place[1])
            return Finding(
                "FAIL",
                f"{at(where)}: gradient {number(grad[where])} in the whole step of {len(rows)} sequences, "
                f"{number(found[place])} in a micro-batch of sequence {', '.join(map(str, part))}, with the same weight",
            )
    for part in subsets:
        total = values[frozenset(part)] + values[frozenset(rows) - frozenset(part)]
        if first_difference(total, value) is not None:
            detail = f"loss {number(value)} in one piece, {number(total)} with sequence {', '.join(map(str, part))} in its own micro-batch"
            return Finding("FAIL", detail)
    return Finding("pass", f"same value and gradient for all {len(subsets)} micro-batches of {len(rows)} sequences")


def averaging(loss: Loss) -> Finding | None:
    """For a scalar loss: the averaging whose weights its on-policy gradient has, -A x weight + what does not depend on A."""
    if not is_whole_batch(loss):
        return None
    start = "evaluated once on the whole step, so no split can matter"
    if "advantages" not in forward_arguments(loss):
        return Finding("note", f"{start}; without advantages its averaging cannot be told")
    steps = [example(lengths, own=True) for lengths in (LENGTHS, [1, 6, 2])]
    shares, offset = [], 0.0
    for tensors in steps:
        idle = measure(loss, {**tensors, "advantages": torch.zeros_like(tensors["advantages"])})[1]
        shares.append((idle - measure(loss, tensors)[1]) / tensors["advantages"])
        offset = offset or (idle[0, 0] / shares[-1][0, 0]).item()
    example_of = f"sequence 0, token 0: -A x {number(shares[0][0, 0])}"
    if math.isfinite(offset) and abs(offset) > 1e-6:
        example_of += f"; with A = 0 it is {offset:+.6g} times that weight, whatever the sampler drew"

    def agrees(name: Any, max_tokens: int | None = None) -> bool:
        counts = [t["padding_mask"].sum(1).int().tolist() for t in steps]
        expected = [torch.tensor(token_weights(name, n, max_tokens=max_tokens))[:, None] for n in counts]
        pairs = zip(shares, expected, steps, strict=True)
        return all(first_difference(s, e * t["padding_mask"]) is None for s, e, t in pairs)

    known = [name for name in ("token", "sequence", "sum") if agrees(name)]
    constant = 1 / (shares[0][0, 0].item() * len(LENGTHS)) if shares[0][0, 0] != 0 else 0.0
    if not known and 0.5 < constant < math.inf and agrees("constant", round(constant)):
        known = [f"constant, max_tokens={round(constant)}"]
    if not known:
        return Finding("note", f"{start}; its on-policy gradient is that of no averaging known here ({example_of})")
    return Finding("note", f'{start}; the mean inside it is averaging "{known[0]}" ({example_of})')


def on_policy(loss: Loss) -> Finding | None:
    """Where sampler, old policy, reference and policy agree, for advantages [B, 1] and [B, T]."""
    if not isinstance(loss, PolicyLoss):
        return None
    tensors = example(LENGTHS, own=True)
    weights = weights_of(loss, tensors, GROUPS)
    has_advantages = "advantages" in forward_arguments(loss)
    whole = tensors["advantages"] if has_advantages else torch.ones_like(tensors["advantages"])
    share, mask = whole.new_tensor(weights)[:, None], tensors["padding_mask"]
    for advantages in (whole, whole + torch.linspace(-1, 1, mask.shape[1], dtype=whole.dtype) * has_advantages):
        grad = measure(loss, {**tensors, "advantages": advantages}, weights)[1]
        place = first_difference(grad, -advantages * share * mask)
        if place is None:
            continue
        A, w = advantages.expand_as(mask)[place], share[place[0], 0]
        expected = f"-A w = -({number(A)} x {number(w)}) = {number(-A * w)}" if has_advantages else f"-w = {number(-w)}"
        detail = f'{at(place)}: gradient {number(grad[place])}; {expected} by averaging "{loss.averaging}"'
        if advantages.shape != whole.shape and loss.centred:
            detail = f"-A times the token's weight where a sequence has one advantage; where each token has its own, {detail}"
            return Finding("note", detail)
        if not loss.centred or not has_advantages:
            return Finding("note", f"{detail}; {'declared: centred = False' if not loss.centred else 'it asks for no advantages'}")
        return Finding("FAIL", detail + _resembles(grad / advantages, loss, tensors))
    if not loss.centred:
        return Finding("note", "centred = False, and yet the gradient is -A times the token's weight: it could declare centred")
    return Finding("pass", f'gradient is {"-A" if has_advantages else "-1"} times the token\'s weight, averaging "{loss.averaging}"')


def _resembles(shares: Tensor, loss: PolicyLoss, tensors: Tensors) -> str:
    """Which declared averaging has weights proportional to the ones found, as an ending of a sentence."""
    mask = tensors["padding_mask"]
    lengths = mask.sum(1).int().tolist()
    name: Averaging
    for name in ("token", "sequence", "prompt"):
        ratios = (shares / shares.new_tensor(token_weights(name, lengths, groups=GROUPS))[:, None])[mask == 1]
        if first_difference(ratios, ratios[:1].expand_as(ratios)) is None and ratios[0] != 0:
            return f'. Its gradient is {number(-ratios[0])} times that of averaging "{name}": does it average, or scale, by itself?'
    return ""


# What every loss must satisfy -----------------------------------------------------------------------------------


def padding(loss: Loss) -> Finding:
    tensors = example(LENGTHS)
    outside = tensors["padding_mask"] == 0
    tensors["advantages"] = tensors["advantages"] * tensors["padding_mask"]  # [B, T], as a run has them
    before = measure(loss, tensors)
    if (leaked := (before[1] != 0) & outside).any():
        place = tuple(leaked.nonzero()[0].tolist())
        return Finding("FAIL", f"{at(place)} is padding and has gradient {number(before[1][place])}")
    for name in sorted(forward_arguments(loss) - {"padding_mask"}):
        for garbage in (math.nan, math.inf, 1e4, -1e4):
            after = measure(loss, {**tensors, name: tensors[name].masked_fill(outside, garbage)})
            if changed := compare(before, after):
                return Finding("FAIL", f"with {garbage} in the padding of {name}, {changed}")
    wide = {name: torch.nn.functional.pad(tensor, (0, 3)) for name, tensor in tensors.items()}
    after = measure(loss, wide)
    if changed := compare(before, (after[0], after[1][:, : outside.shape[1]])):
        return Finding("FAIL", f"with 3 more columns of padding, {changed}: padding is counted somewhere")
    return Finding("pass", "no gradient in it; NaN, infinity, 1e4 or more columns there change nothing")


def finite(loss: Loss) -> Finding:
    """In float32: sequences without tokens, a group without any, log-ratios of +-30, tokens of probability 1 and entropy 0."""
    lengths = torch.tensor([1, 3, 2, 0, 0])  # the last two are a group of their own
    mask = (torch.arange(3) < lengths[:, None]).float()
    tensors = {**dict.fromkeys(LOGPROBS, -mask), "padding_mask": mask, "entropy": mask}
    tensors["advantages"] = torch.tensor([[1.0], [-1], [1], [-1], [1]])
    edge = (torch.arange(5) < 2)[:, None]
    if found := _not_finite(loss, tensors):
        return Finding("FAIL", f"sequences 3 and 4 have no loss tokens: {found}")
    extremes = {**dict.fromkeys(LOGPROBS, (-30.0, 0.0)), "entropy": (1.0, 0.0)}
    names = [name for name in extremes if name in forward_arguments(loss)]
    for A, values in product((1.0, -1.0, 0.0), product(*(extremes[name] for name in names))):
        edges = {name: torch.where(edge, value * mask, tensors[name]) for name, value in zip(names, values, strict=True)}
        if found := _not_finite(loss, {**tensors, **edges, "advantages": torch.full((5, 1), A)}):
            place = ", ".join(f"{name} {value:g}" for name, value in zip(names, values, strict=True))
            return Finding("FAIL", f"{found} where sequences 0 and 1 have {place} at each token, A = {A:g}")
    if found := _not_finite(loss, {name: tensor[3:] for name, tensor in tensors.items()}):
        return Finding("note" if is_whole_batch(loss) else "FAIL", f"no sequence has a loss token: {found}")
    if found := _not_finite(loss, {name: tensor[:1, :1] for name, tensor in tensors.items()}):
        return Finding("note" if is_whole_batch(loss) else "FAIL", f"one sequence of one token: {found}")
    certain = "probability 1, entropy 0" if "entropy" in names else "probability 1"
    return Finding("pass", f"value and gradient at log-ratios of +-30, {certain}, and sequences, groups or steps without tokens")


def _not_finite(loss: Loss, tensors: Tensors) -> str | None:
    value, grad = measure(loss, tensors)
    if not grad.isfinite().all():
        place = tuple((~grad.isfinite()).nonzero()[0].tolist())
        return f"{at(place)} has gradient {number(grad[place])} (value {number(value)})"
    if not value.isfinite():
        return f"the value is {number(value)}"
    if isinstance(loss, PolicyLoss):
        entropy = tensors["entropy"].clone().requires_grad_()
        slopes = gradient(scalar(loss, {**tensors, "entropy": entropy}, weights_of(loss, tensors)), entropy)
        if not slopes.isfinite().all():
            place = tuple((~slopes.isfinite()).nonzero()[0].tolist())
            return f"{at(place)} has gradient {number(slopes[place])} in its entropy (value {number(value)})"
        for name, values in loss.evaluate(**tensors).metrics.items():
            if not values.isfinite().all():
                place = tuple((~values.isfinite()).nonzero()[0].tolist())
                return f"{at(place)} has metric {name} = {number(values[place])}"
    return None


def repeatable(loss: Loss) -> Finding:
    """Two calls with the same tensors: nothing drawn at random, nothing kept from one to the next."""
    tensors = example(LENGTHS)
    if changed := compare(measure(loss, tensors), measure(loss, tensors)):
        return Finding("FAIL", f"called twice with the same tensors, {changed}; no other law can be checked")
    return Finding("pass", "a second call gives the same")


def in_place(loss: Loss) -> Finding:
    """Called as the trainer calls it, but on tensors that are not copies; the log-probs are no leaf, as in training."""
    tensors = example(LENGTHS)
    given = {name: tensors[name].clone() for name in forward_arguments(loss)}
    given["logprobs"] = given["logprobs"].requires_grad_() * 1.0
    versions = {name: tensor._version for name, tensor in given.items()}
    (loss.per_token if isinstance(loss, PolicyLoss) else loss)(**given)
    for name, tensor in given.items():
        if tensor._version != versions[name] or not torch.equal(tensor, tensors[name]):  # an edit of .data leaves the version
            same_shape = tensor.shape == tensors[name].shape
            place = first_difference(tensor.detach(), tensors[name], rtol=0, atol=0) if same_shape else None
            change = f": {at(place)} was {number(tensors[name][place])}, is {number(tensor[place])}" if place else ""
            return Finding("FAIL", f"it edits {name} in place{change}")
    return Finding("pass", "its inputs are left as they are")


# Gradients and precision ----------------------------------------------------------------------------------------


class _StopGradients(TorchFunctionMode):
    """Records what is detached (or computed under no_grad) in a first call, and gives the same values in later ones.

    Finite differences then see what autograd sees, also in losses with a stop-gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.next: int | None = None  # while recording: None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        stops = resolve_name(func) in STOPS or not torch.is_grad_enabled()
        if not stops or not isinstance(out, Tensor):
            return out
        if self.next is None:
            self.kept.append(out.clone())
            return out
        self.next += 1
        return self.kept[self.next - 1] if self.next <= len(self.kept) else out


def gradcheck(loss: Loss) -> Finding:
    """Autograd against finite differences in float64 that hold what is detached; tokens within 1e-5 of a kink are left out."""
    tensors = example(LENGTHS)
    weights, frozen, h = weights_of(loss, tensors), _StopGradients(), 1e-5
    logprobs = tensors["logprobs"].clone().requires_grad_()
    with frozen:
        value = scalar(loss, {**tensors, "logprobs": logprobs}, weights)
    if value.dtype != torch.float64:
        return Finding("note", f"not checked: it computes in {value.dtype}, whatever its inputs are")
    grad = gradient(value, logprobs)

    def moved(place: tuple[int, ...], by: float, held: AbstractContextManager[Any] = frozen) -> Tensor:
        other, frozen.next = tensors["logprobs"].clone(), 0
        other[place] += by
        with held:
            return scalar(loss, {**tensors, "logprobs": other.requires_grad_()}, weights).detach()

    places = [tuple(place) for place in tensors["padding_mask"].nonzero().tolist()]
    for place in places:
        right, left = (moved(place, h) - value.detach()) / h, (value.detach() - moved(place, -h)) / h
        slope = (right + left) / 2
        if abs(right - left) < 1e-3 * (abs(slope) + 1e-3) and not math.isclose(slope, grad[place], rel_tol=1e-5, abs_tol=1e-8):
            written = _has_own_backward(value)
            reason = "its own autograd.Function says otherwise" if written else "something is hidden from autograd, as by .item()"
            detail = f"{at(place)}: autograd says {number(grad[place])}, finite differences {number(slope)}: {reason}"
            return Finding("FAIL" if written else "note", detail)
    plain = [moved(place, h, nullcontext()) - moved(place, h) for place in places]
    held = ", with what it detaches held constant" if any(abs(d) > 1e-4 * h for d in plain) else ""
    return Finding("pass", f"autograd agrees with finite differences at {len(places)} tokens{held}")


def _has_own_backward(value: Tensor) -> bool:
    nodes: list[Any] = [value.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return False


def bf16(loss: Loss) -> Finding:
    """The same rounded inputs as bf16 and as float32 tensors. The trainer's are float32: this is for other callers."""
    tensors = example(LENGTHS, dtype=torch.bfloat16)
    exact = measure(loss, {name: tensor.float() for name, tensor in tensors.items()})
    value, grad = measure(loss, tensors)
    if not (value.isfinite() and grad.isfinite().all()):
        return Finding("FAIL", f"value {number(value)}, with a gradient that is {'' if grad.isfinite().all() else 'not '}finite")
    value_error = ((value - exact[0]).abs() / exact[1].abs().sum().clamp(min=1e-12)).item()
    errors = (grad - exact[1]).abs() / exact[1].abs().max().clamp(min=1e-12)
    if max(value_error, errors.max().item()) <= 0.03:
        return Finding("pass", f"within {max(value_error, errors.max().item()):.1%} of float32")
    place = tuple((errors == errors.max()).nonzero()[0].tolist())
    detail = f"{at(place)}: gradient {number(grad[place])}, in float32 {number(exact[1][place])}; value {number(value)}, {number(exact[0])}"
    return Finding("note", f"{detail}: keep its inputs in float32")

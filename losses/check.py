"""`python -m losses.check FILE.py:ClassName [key=value ...]` runs the laws on a loss file, yours or losses.dapo.DAPOLoss.

It prints a verdict for each law with the first counterexample, and exits 1 if one fails. A loss fails against what its file declares
(averaging, elementwise, centred, whether it needs a reference), against the golden values of the shipped class whose name it bears,
and against what every loss must satisfy; all else is a note. key=value are its constructor's options. The file is only read.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from config import Call, ConfigError, load
from losses import laws
from losses.contract import PolicyLoss, forward_arguments, requires_reference
from losses.laws import LENGTHS, Finding, Loss, Tensors, at, compare, example, first_difference, gradient, measure, number

GOLDEN = Path(__file__).with_name("golden.json")
TORCH = Path(torch.__file__).parent
SIZES = (1, 2, 3, 5, 99)  # tokens in a slice of a step's tokens, the last one all of them


class LossRaised(Exception):
    """The code of a loss raised: in words what, and where outside torch."""


class Verdict(NamedTuple):
    status: str  # "pass" | "FAIL" | "note"
    law: str
    detail: str


@dataclass(kw_only=True)
class CheckConfig:
    loss: Call  # the class or function to check, and its options


def main() -> None:
    sys.dont_write_bytecode = True  # a check leaves nothing beside the user's file
    torch.set_num_threads(1)
    try:
        verdicts = check(resolve(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(str(error))
    print(table(verdicts))
    sys.exit(any(verdict.status == "FAIL" for verdict in verdicts))


def resolve(arguments: list[str]) -> Loss:
    """The loss that the command line names, built. ConfigError when there is none."""
    name, *options = arguments or [""]
    if not name or name.startswith("-") or "=" in name:
        raise ConfigError(f"{__doc__}")
    for option in options:
        if "=" not in option:
            raise ConfigError(f"{option} is not understood: options of {name} are key=value.")
    call = load(CheckConfig, [f"loss={name}", *(f"loss.{option}" for option in options)]).loss
    try:
        return called(call.resolve)
    except LossRaised as error:
        known = isinstance(error.__cause__, ConfigError)
        raise ConfigError(str(error.__cause__) if known else f"{name} cannot be built: it {error}") from error


def check(loss: Loss) -> list[Verdict]:
    """One verdict for each law that says something about this loss."""
    try:
        forward_arguments(loss)
    except (ValueError, TypeError) as error:
        return [Verdict("FAIL", "arguments", str(error))]
    verdicts = []
    for name, law in LAWS.items():
        try:
            finding = called(law, loss)
        except LossRaised as error:
            finding = Finding("FAIL", str(error))
        if finding is not None:
            verdicts.append(Verdict(finding.status, name, finding.detail))
        if name == "repeatable" and verdicts[-1].status == "FAIL":
            break
    return verdicts


def called(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a function that runs the code of a loss returns. LossRaised where that raises, whatever it raises."""
    try:
        return function(*args, **options)
    except Exception as error:
        last = [f for f in traceback.extract_tb(error.__traceback__) if not Path(f.filename).is_relative_to(TORCH)][-1]
        message = (str(error).splitlines() or [""])[0]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        raise LossRaised(f"raised {type(error).__name__}{': ' * bool(message)}{message} ({where})") from error


def table(verdicts: list[Verdict]) -> str:
    width = max(len(verdict.law) for verdict in verdicts)
    return "\n".join(f"{status}  {law:<{width}}  {detail}" for status, law, detail in verdicts)


# What a file declares, or could ---------------------------------------------------------------------------------------


def inputs(loss: Loss) -> Finding:
    """Each input it names (padding_mask aside) is moved a little and a lot."""
    tensors = example(LENGTHS)
    before = measure(loss, tensors)
    unused: list[str] = []
    shown: list[str] = []
    for name in sorted(forward_arguments(loss) - {"logprobs", "padding_mask"}):
        others = [{**tensors, name: tensors[name] + by * example(LENGTHS, seed=1)[name]} for by in (0.2, 1.0, -1.0)]
        if any(compare(before, measure(loss, other)) for other in others):
            continue
        metrics = [loss.evaluate(**given).metrics if isinstance(loss, PolicyLoss) else {} for given in (tensors, others[0])]
        moved = [m for m in metrics[0] if first_difference(metrics[0][m], metrics[1][m]) is not None]
        (shown if moved else unused).append(f"{name} ({', '.join(moved)})" if moved else name)
    if unused:
        return Finding("note", f"it asks for {', '.join(unused)} and neither value nor gradient depends on it")
    return Finding("pass", "it uses what it asks for" + (f"; {', '.join(shown)} for metrics only" if shown else ""))


def elementwise(loss: Loss) -> Finding | None:
    """Whether a token's loss and gradient depend on it alone: the trainer evaluates such a loss on whatever tokens lie together."""
    if not isinstance(loss, PolicyLoss):
        return None
    change = _beside_a_moved_token(loss) or _in_slices(loss)
    if change is not None:
        return Finding("FAIL" if loss.elementwise else "pass", f"elementwise = {loss.elementwise}: {change}")
    if loss.elementwise:
        return Finding("pass", "a token's loss and gradient depend on no other token, nor on the shape of the grid")
    return Finding("note", "no token changes another's loss or gradient, nor does the grid's shape: it could declare elementwise = True")


def _tokens(loss: PolicyLoss, tensors: Tensors, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's loss, and the gradient at each token of the losses' sum, weighted with `factors` to tell them apart."""
    logprobs = tensors["logprobs"].clone().requires_grad_()
    losses = loss.evaluate(**{name: tensor.clone() for name, tensor in tensors.items()} | {"logprobs": logprobs}).loss
    return losses.detach(), gradient((losses * factors).sum(), logprobs)


def _factors(tensors: Tensors) -> Tensor:
    mask = tensors["padding_mask"]
    return 1 + torch.arange(mask.numel(), dtype=mask.dtype).reshape(mask.shape)


def _beside_a_moved_token(loss: PolicyLoss) -> str | None:
    """How the loss or gradient of another token changes when a token's log-prob is moved."""
    tensors = example(LENGTHS)
    factors = _factors(tensors)
    before = _tokens(loss, tensors, factors)
    for place, by in product(tensors["padding_mask"].nonzero().tolist(), (0.2, -0.7)):
        logprobs = tensors["logprobs"].clone()
        logprobs[tuple(place)] += by
        after = _tokens(loss, {**tensors, "logprobs": logprobs}, factors)
        for what, old, new in zip(("loss", "gradient"), before, after, strict=True):
            new[tuple(place)] = old[tuple(place)]
            other = first_difference(new, old)
            if other is not None:
                scale = factors[other] if what == "gradient" else 1
                change = f"the {what} of {at(other)} from {number(old[other] / scale)} to {number(new[other] / scale)}"
                return f"moving the log-prob of {at(tuple(place))} by {by:+g} takes {change}"
    return None


def _in_slices(loss: PolicyLoss) -> str | None:
    """How a token's loss or gradient differs between the grid [B, T] and slices [1, m] of all sequences' tokens in one line.

    The line is of the tokens that count, and of all that were sampled, as the trainer has it.
    """
    for tensors in _steps():
        factors, mask = _factors(tensors), tensors["padding_mask"]
        whole = _tokens(loss, tensors, factors)
        sampled = torch.arange(mask.shape[1]) < torch.tensor(LENGTHS)[:, None]
        for inside, size in product((mask == 1, sampled), SIZES):
            line = {name: tensor.expand_as(mask)[inside][None] for name, tensor in tensors.items()}
            places, weights = inside.nonzero().tolist(), factors[inside][None]
            for start in range(0, len(places), size):
                here = slice(start, start + size)
                part = {name: tensor[:, here] for name, tensor in line.items()}
                count = part["padding_mask"].numel()
                try:
                    found = called(_tokens, loss, part, weights[:, here])
                except LossRaised as error:
                    return f"on {count} of the step's tokens in one line, [1, {count}], it {error}"
                for what, old, new in zip(("loss", "gradient"), whole, found, strict=True):
                    place = first_difference(new, old[inside][None][:, here])
                    if place is None:
                        continue
                    home = tuple(places[start + place[1]])
                    scale = factors[home] if what == "gradient" else 1
                    values = f"{number(old[home] / scale)} on the grid {list(mask.shape)} and {number(new[place] / scale)} on a slice"
                    return f"the {what} of {at(home)} is {values} [1, {count}] of all sequences' tokens in one line"
    return None


def _steps() -> Iterator[Tensors]:
    """With log-ratios near those of a run and three times as wide, and advantages [B, 1] and [B, T]."""
    for seed, wide in product(range(5), (False, True)):
        tensors = example(LENGTHS, seed=seed)
        if wide:
            logprobs, mask = tensors["logprobs"], tensors["padding_mask"]
            for name in laws.LOGPROBS:
                tensors[name] = (logprobs + 3 * (tensors[name] - logprobs)).clamp(max=-0.05) * mask
            tensors["advantages"] = tensors["advantages"] + 0.5 * example(LENGTHS, seed=seed + 10)["logprobs"]
        yield tensors


def reference(loss: Loss) -> Finding:
    """Whether it works without `ref_logprobs` exactly if it says so: a run loads a reference model by that."""
    tensors = example(LENGTHS)
    del tensors["ref_logprobs"]
    needs = requires_reference(loss)
    try:
        value, grad = called(measure, loss, tensors)
    except LossRaised as error:
        if needs:
            return Finding("pass", "declares that it needs a reference, and refuses to work without")
        return Finding("FAIL", f"declares that it needs no reference; without, it {error}")
    if needs:
        return Finding("FAIL", f"declares that it needs a reference; without, it works (value {number(value)})")
    if not (value.isfinite() and grad.isfinite().all()):
        return Finding("FAIL", f"declares that it needs no reference; without, its value is {number(value)}")
    return Finding("pass", "works without a reference, as declared")


def divergence(loss: Loss) -> Finding | None:
    """What the reference does to the loss at A = 0: the exact expected gradient over a vocabulary of four, on-policy."""
    if "ref_logprobs" not in forward_arguments(loss):
        return None
    policy = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64).log_softmax(0)
    other = torch.tensor([0.1, 0.4, -0.3, 0.6], dtype=torch.float64).log_softmax(0)

    def token(logprob: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.ones(1, 1, dtype=torch.float64)
        tensors = dict.fromkeys(laws.LOGPROBS, logprob.reshape(1, 1)) | {"ref_logprobs": ref.reshape(1, 1)}
        return measure(loss, {**tensors, "entropy": ones, "padding_mask": ones, "advantages": 0 * ones}, [1.0])

    slopes = torch.cat([token(ours, theirs)[1][0] for ours, theirs in zip(policy, other, strict=True)])
    p, d = policy.exp(), policy - other
    found = p * (slopes - (p * slopes).sum())
    falls = token(other[0] + 0.5, other[0])[0] - token(other[0], other[0])[0]
    moves = f"where the policy moves away from the reference (log-ratio 0.5), the loss falls by {number(-falls)}; " if falls < -1e-9 else ""
    if not found.isfinite().all():
        return Finding("note", f"not found: with A = 0 one token alone has the gradient {number(slopes[~slopes.isfinite()][0])}")
    if slopes.abs().max() < 1e-9:
        return Finding("pass", "no KL to the reference in the loss")
    if found.abs().max() < 1e-9:
        return Finding("note", f"{moves}its KL term has no gradient in expectation: it is {number(slopes[0])} at every possible token")
    directions = {"KL(policy || reference)": p * (d - (p * d).sum()), "KL(reference || policy), as of k3 in a loss": p - other.exp()}
    for name, direction in directions.items():
        scale = (found @ direction) / (direction @ direction)
        if first_difference(found, scale * direction) is None:
            text = f"{moves}the expected gradient is {number(scale)} times that of {name}"
            return Finding("pass" if scale > 0 and not moves else "note", text + ("" if scale > 0 else ": it drives the policy away"))
    return Finding("note", f"{moves}the expected gradient of its KL term is that of neither direction")


# Golden values --------------------------------------------------------------------------------------------------


def golden(loss: Loss) -> Finding | None:
    """Value and gradient of the shipped class whose name the loss bears, with the options of the golden case.

    A copy of a file declares by its name to be that objective. A class that derives from one does not: what differs is a note.
    """
    data = json.loads(GOLDEN.read_text(encoding="utf-8"))
    cls: Any = type(loss)
    bases = [base.__name__ for base in cls.__mro__]
    name = next((name for name in bases if any(case["class"] == name for case in data["cases"])), None)
    if name is None:
        return None
    heirs = cls.__mro__[: bases.index(name)]
    own = [part for part in ("__init__", "per_token", "averaging") if any(part in vars(heir) for heir in heirs)]
    start = f"it derives from {name}{' and has its own ' * bool(own)}{', '.join(own)}: " if heirs else ""
    cases = [case for case in data["cases"] if case["class"] == name]
    for case in cases:
        options = ", ".join(f"{key}={value}" for key, value in case["options"].items())
        tensors = golden_tensors(data, case["advantages"])
        try:
            other = called(cls, **case["options"])
            found = called(measure, other, tensors)
        except LossRaised as error:
            return Finding("note", f"{start}it cannot be compared with {name}({options}): it {error}")
        wanted = torch.tensor(case["value"], dtype=torch.float64), torch.tensor(case["grad"], dtype=torch.float64)
        if _same(found, wanted):
            continue
        place = first_difference(found[1], wanted[1], atol=1e-8)
        should = "that class has" if heirs else "should be"
        where = f"; {at(place)}: gradient {number(found[1][place])}, {should} {number(wanted[1][place])}" if place else ""
        detail = f"{start}{name}({options}): value {number(found[0])}, {should} {number(wanted[0])}{where}"
        return Finding("note" if heirs else "FAIL", detail + _explained(other, tensors, wanted))
    return Finding("pass", f"value and gradient of {len(cases)} golden case{'s' * (len(cases) > 1)} of {name}")


def golden_tensors(data: dict[str, Any], advantages: str) -> Tensors:
    tensors = {name: torch.tensor(data[name], dtype=torch.float64) for name in (*laws.LOGPROBS, "padding_mask")}
    chosen = torch.tensor(data["advantages"][advantages], dtype=torch.float64)
    return tensors | {"advantages": chosen[:, None], "entropy": tensors["padding_mask"]}


def _same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    return all(first_difference(f, w, atol=1e-8) is None for f, w in zip(found, wanted, strict=True))


def _explained(loss: Loss, tensors: Tensors, wanted: tuple[Tensor, Tensor]) -> str:
    """The known mistake whose undoing gives the golden value, as an ending of a sentence."""
    for right, wrong in (("old_logprobs", "gen_logprobs"), ("old_logprobs", "ref_logprobs"), ("gen_logprobs", "old_logprobs")):
        if _same(measure(loss, {**tensors, wrong: tensors[right]}), wanted):
            return f": it is golden with {right} in the place of {wrong}; is its ratio against the wrong policy?"
    if _same(measure(loss, {**tensors, "advantages": -tensors["advantages"]}), wanted):
        return ": it is golden with the sign of the advantages changed"
    mirrored = 2 * tensors["logprobs"] - tensors["ref_logprobs"]
    if first_difference(measure(loss, {**tensors, "ref_logprobs": mirrored})[0], wanted[0]) is None:
        return ": its value is golden with the sign of logprobs - ref_logprobs changed; is its KL in the other direction?"
    lengths = tensors["padding_mask"].sum(1).int().tolist()
    for name in ("token", "sequence", "sum"):
        if isinstance(loss, PolicyLoss) and _same(measure(loss, tensors, laws.token_weights(name, lengths)), wanted):
            return f': it is golden with averaging "{name}", and declares "{loss.averaging}"'
    return ""


LAWS = {
    "repeatable": laws.repeatable,  # first: what changes from call to call says nothing about the others
    "split": laws.split,
    "averaging": laws.averaging,
    "padding": laws.padding,
    "on-policy": laws.on_policy,
    "gradcheck": laws.gradcheck,
    "finite": laws.finite,
    "bf16": laws.bf16,
    "inputs": inputs,
    "elementwise": elementwise,
    "in place": laws.in_place,
    "golden": golden,
    "reference": reference,
    "kl": divergence,
}


if __name__ == "__main__":
    main()

"""`python -m losses.check FILE.py:ClassName [key=value ...]` runs the laws on a loss file, yours or losses.dapo.DAPOLoss.

It prints a verdict for each law with the first counterexample, and exits 1 if one fails. A loss fails against what its file declares
(averaging, elementwise, centred, whether it needs a reference), against the golden values of the class whose name it bears or derives
from, and against what every loss must satisfy; all else is a note. key=value are its constructor's options. The file is only read.
"""

import json
import sys
import traceback
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
# What the code of a loss raises when it is wrong, and its author can mend.
ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NameError, ArithmeticError, AssertionError, ImportError)


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
    return load(CheckConfig, [f"loss={name}", *(f"loss.{option}" for option in options)]).loss.resolve()


def check(loss: Loss) -> list[Verdict]:
    """One verdict for each law that says something about this loss."""
    try:
        forward_arguments(loss)
    except ValueError as error:
        return [Verdict("FAIL", "arguments", str(error))]
    verdicts = []
    for name, law in LAWS.items():
        try:
            finding = law(loss)
        except ERRORS as error:
            last = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename][-1]
            message = (str(error).splitlines() or [""])[0]
            finding = Finding("FAIL", f"raised {type(error).__name__}: {message} ({Path(last.filename).name}, line {last.lineno})")
        if finding is not None:
            verdicts.append(Verdict(finding.status, name, finding.detail))
        if name == "repeatable" and verdicts[-1].status == "FAIL":
            break
    return verdicts


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
    """Each token's log-prob is moved; the loss of every other, and the gradient of every other, must stay."""
    if not isinstance(loss, PolicyLoss):
        return None
    tensors = example(LENGTHS)
    factors = 1 + torch.arange(tensors["padding_mask"].numel(), dtype=torch.float64).reshape(tensors["padding_mask"].shape)

    def tokens(logprobs: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = logprobs.clone().requires_grad_()
        losses = loss.evaluate(**{**tensors, "logprobs": logprobs}).loss
        return losses.detach(), gradient((losses * factors).sum(), logprobs)

    before = tokens(tensors["logprobs"])
    for place, by in product(tensors["padding_mask"].nonzero().tolist(), (0.2, -0.7)):
        logprobs = tensors["logprobs"].clone()
        logprobs[tuple(place)] += by
        for what, old, new in zip(("loss", "gradient"), before, tokens(logprobs), strict=True):
            new[tuple(place)] = old[tuple(place)]
            other = first_difference(new, old)
            if other is None:
                continue
            scale = factors[other] if what == "gradient" else 1
            change = f"the {what} of {at(other)} from {number(old[other] / scale)} to {number(new[other] / scale)}"
            detail = f"moving the log-prob of {at(tuple(place))} by {by:+g} takes {change}"
            return Finding("FAIL" if loss.elementwise else "pass", f"elementwise = {loss.elementwise}: {detail}")
    if loss.elementwise:
        return Finding("pass", "no token's log-prob changes another token's loss or gradient")
    return Finding("note", "no token's log-prob changes another's loss or gradient: it could declare elementwise = True")


def reference(loss: Loss) -> Finding:
    """Whether it works without `ref_logprobs` exactly if it says so: a run loads a reference model by that."""
    tensors = example(LENGTHS)
    del tensors["ref_logprobs"]
    needs = requires_reference(loss)
    try:
        value, grad = measure(loss, tensors)
    except ERRORS as error:
        if needs:
            return Finding("pass", "declares that it needs a reference, and refuses to work without")
        return Finding("FAIL", f"declares that it needs no reference; without, it raises {type(error).__name__}: {error}")
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
    """Value and gradient of the shipped class whose name the loss bears or derives from, with the options of the golden case."""
    data = json.loads(GOLDEN.read_text(encoding="utf-8"))
    cls: Any = type(loss)
    bases = [base.__name__ for base in cls.__mro__]
    name = next((name for name in bases if any(case["class"] == name for case in data["cases"])), None)
    if name is None:
        return None
    cases = [case for case in data["cases"] if case["class"] == name]
    for case in cases:
        options = ", ".join(f"{key}={value}" for key, value in case["options"].items())
        try:
            other = cls(**case["options"])
        except TypeError as error:
            return Finding("note", f"it cannot be compared with {name}({options}): {error}")
        tensors = golden_tensors(data, case["advantages"])
        weights = laws.weights_of(other, tensors)
        found = measure(other, tensors, weights)
        wanted = torch.tensor(case["value"], dtype=torch.float64), torch.tensor(case["grad"], dtype=torch.float64)
        if _same(found, wanted):
            continue
        place = first_difference(found[1], wanted[1], atol=1e-8)
        where = f"; {at(place)}: gradient {number(found[1][place])}, should be {number(wanted[1][place])}" if place else ""
        detail = f"{name}({options}): value {number(found[0])}, should be {number(wanted[0])}{where}"
        return Finding("FAIL", detail + _explained(other, tensors, wanted))
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

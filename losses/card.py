"""What a run optimises, on one card with every number filled in, and what is known to go wrong with such settings.

Two runs of "GRPO" seldom have the same objective: averaging, clip, KL, baseline and correction all differ. `card` says which one this is,
and `lint` what others have stumbled over. Neither computes anything; both read the loss and its settings.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from losses import advantages
from losses.cispo import CISPOLoss
from losses.contract import PolicyLoss, forward_arguments, is_whole_batch
from losses.correction import Masked, SequenceMasked, Truncated, Uncorrected
from losses.dapo import DAPOLoss
from losses.grpo import DrGRPOLoss, GRPOLoss, SimpleGRPOLoss
from losses.gspo import GSPOLoss, GSPOTokenLoss
from losses.reinforce import ReinforceLoss
from losses.reinforce_plus_plus import ReinforcePlusPlusBaselineLoss, ReinforcePlusPlusLoss


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the objective depends on besides the loss, resolved: no `auto`, no null that stands for a number."""

    home: Literal["loss", "grpo"]  # the section of the configuration that holds the loss's options
    advantage: str  # as the configuration names it: losses.advantages.group_zscore
    rewards: Mapping[str, float] = field(default_factory=dict)  # weights by name
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    correction: object | None  # as the trainer gets it (losses/correction.py)
    old_logprobs: Literal["own", "trainer", "sampler"]  # own: of the update's own pass, so that the ratio is 1
    n_samples: int
    temperature: float
    kl_in_reward: float
    entropy_coef: float
    top_entropy: float
    mask_truncated: bool
    stop: bool  # there are stop strings
    max_new_tokens: int | None  # None: what seq_len leaves after the prompt
    seq_len: int
    updates_per_rollout: int
    max_policy_age: int
    sync_interval: int
    dtype: str  # of computation
    learning_rate: float
    fp32_masters: bool = True

    @property
    def advantage_name(self) -> str:
        """Of a function of losses.advantages; "" for any other."""
        module, _, name = self.advantage.rpartition(".")
        return name if module == advantages.__name__ else ""

    @property
    def stale(self) -> bool:
        """An older version of the policy may have sampled."""
        return self.max_policy_age > 0 or self.sync_interval > 1

    @property
    def response_tokens(self) -> int:
        """No answer is longer."""
        return min(self.max_new_tokens or self.seq_len, self.seq_len)


# The card -------------------------------------------------------------------------------------------------------------


def card(loss: Any, settings: Settings) -> str:
    """The objective of a run, a line for each of its parts, in ASCII."""
    lines = {
        "objective": f"{_name(loss)}, minimised",
        "at a token": _formula(loss),
        "ratio": _ratio(loss, settings),
        "averaging": _averaging(loss),
        "advantage": _advantage(settings),
        "KL in the loss": _kl_in_loss(loss),
        "KL in the reward": _kl_in_reward(settings),
        "correction": _correction(loss, settings),
        "entropy": _entropy(loss, settings),
        "kept tokens": _kept(settings),
        "who counts": _who_counts(settings),
        "temperature": _temperature(settings),
        "weights": f"AdamW, peak learning rate {settings.learning_rate:g}; computed in {settings.dtype}, "
        + ("stored in float32" if settings.fp32_masters else f"stored in {settings.dtype}"),
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def _formula(loss: Any) -> str:
    if not isinstance(loss, PolicyLoss):
        return f"its author's own formula: a scalar of {', '.join(sorted(forward_arguments(loss)))}"
    # A subclass that computes something else without saying so must not go by its parent's formula.
    mro = type(loss).__mro__
    stated, computed = (next(i for i, c in enumerate(mro) if name in vars(c)) for name in ("formula", "per_token"))
    return loss.formula() if stated <= computed else PolicyLoss.formula(loss)


def _ratio(loss: Any, s: Settings) -> str:
    names = forward_arguments(loss)
    if "old_logprobs" in names:
        updates = f"first of {s.updates_per_rollout} updates" if s.updates_per_rollout > 1 else "update"
        return {
            "own": "old_logprobs are the update's own, detached: the ratio is 1, and no bound on it acts",
            "trainer": f"old_logprobs are the policy's before the rollout's {updates}, by the trainer",
            "sampler": "old_logprobs are the sampler's: r holds the policy's age and the gap between engine and trainer",
        }[s.old_logprobs]
    if "gen_logprobs" in names:
        return "against gen_logprobs, the sampler's: it holds the policy's age and the gap between engine and trainer"
    return "none: nothing but the correction below accounts for tokens that another policy sampled"


def _averaging(loss: Any) -> str:
    if not isinstance(loss, PolicyLoss):
        return "the loss's own; evaluated once per step on the whole [B, T], at the cost of one more forward pass"
    return {
        "token": '"token": (1/N) sum_it u, the mean over the N tokens of the step',
        "sequence": '"sequence": (1/B) sum_i (1/n_i) sum_t u, the mean over a sequence\'s n_i tokens, then over B sequences',
        "constant": f'"constant": (1/B) sum_i (1/L) sum_t u, constant L = {loss.max_tokens} (max_tokens)',
        "sum": '"sum": (1/B) sum_i sum_t u, the sum over a sequence\'s tokens, then the mean over B sequences',
        "prompt": '"prompt": (1/P) sum_p (1/N_p) sum_it u, the mean over the N_p tokens of a prompt\'s answers, then over P prompts',
    }[loss.averaging]


def _advantage(s: Settings) -> str:
    eps, n = advantages.STABILISER, s.n_samples
    parts = " + ".join(f"{weight:g} z({name})" for name, weight in s.rewards.items()) or "sum_k weight_k z(k)"
    texts = {
        "group_zscore": f"A = (R - mean) / (std + {eps:g}) over a prompt's {n} samples, std unbiased",
        "group_centred": f"A = R - mean, over a prompt's {n} samples",
        "leave_one_out": f"A = R - mean of the prompt's {n - 1} other samples",
        "batch_zscore": f"A = (R - mean) / (std + {eps:g}) over all samples of the rollout, {n} a prompt, std unbiased",
        "token_whitened": "A_t = (G_t - mean) / std over all tokens of the rollout, G_t = R less the KL from t on",
        "group_centred_token_whitened": f"A = R - mean over a prompt's {n} samples, then (A - mean) / std over all tokens of the rollout",
        "parts_zscore": f"A = {parts}, z(k) = (R_k - mean) / (std + {eps:g}) of a reward over a prompt's {n} samples",
    }
    options = "".join(f", {key}={value}" for key, value in s.advantage_options.items())
    where = f"[{s.advantage.rpartition('.')[2] if s.advantage_name else s.advantage}{options}]"
    return f"{texts.get(s.advantage_name, f'A by a function of its own, {n} samples a prompt')} {where}"


def _kl_in_loss(loss: Any) -> str:
    if "ref_logprobs" not in forward_arguments(loss):
        return "none"
    if (known := _kl(loss)) is None:
        return "by its author: it asks for ref_logprobs"
    name, beta = known
    teaches = {
        "k1": "expected gradient 0",
        "k2": "expected gradient of KL(pi || ref)",
        "k3": "expected gradient of KL(ref || pi), the other direction",
        "k3_ratio": "expected gradient of KL(pi || ref)",
    }
    return f"{beta:g} {name}: {teaches[name]}" if beta else "none (weight 0)"


def _kl_in_reward(s: Settings) -> str:
    if not s.kl_in_reward:
        return "none"
    where = "at each token" if s.advantage_name == "token_whitened" else "summed over the answer"
    return f"R less {s.kl_in_reward:g} k1 {where}, k1 = log pi_old - log pi_ref: gradient of KL(pi || ref)"


def _correction(loss: Any, s: Settings) -> str:
    names = forward_arguments(loss)
    if "gen_logprobs" in names:
        return "none: the loss weighs the sampler's tokens itself"
    if s.correction is None or isinstance(s.correction, Uncorrected):
        return "none"
    inside = f"rho where {_band(s.correction)}, else 0" if isinstance(s.correction, Masked | SequenceMasked) else ""
    weight = f"min(rho, {s.correction.cap:g})" if isinstance(s.correction, Truncated) else inside
    weight = weight or f"{_name(s.correction)}(rho, mask)"
    has_ratio = "old_logprobs" in names
    shared = has_ratio and s.old_logprobs == "sampler"
    over = "pi_old / pi_sampler" if has_ratio and s.old_logprobs == "trainer" else "sg(pi) / pi_sampler"
    return f"u x {'w / rho (u holds a ratio to the sampler)' if shared else 'w'}, w = {weight}, rho = {over}; denominators stay"


def _band(correction: Masked | SequenceMasked) -> str:
    what = "rho"
    if isinstance(correction, SequenceMasked):
        what = f"the {correction.statistic}{'' if correction.statistic == 'product' else ' mean'} over its sequence"
    return f"{what} is in {correction.low:g} .. {correction.high:g}"


def _entropy(loss: Any, s: Settings) -> str:
    where = "averaged as u" if isinstance(loss, PolicyLoss) else "averaged over the step's tokens"
    return f"loss less {s.entropy_coef:g} x the exact entropy of each position, {where}" if s.entropy_coef else "no bonus"


def _kept(s: Settings) -> str:
    if s.top_entropy == 1:
        return "all"
    share = f"{100 * s.top_entropy:g}%"
    return f"u of the {share} of the step's tokens with the highest entropy; the rest count in denominators; costs a forward pass"


def _who_counts(s: Settings) -> str:
    limit = f"max_new_tokens = {s.max_new_tokens}" if s.max_new_tokens else f"seq_len = {s.seq_len}"
    if not s.mask_truncated:
        return f"all sampled tokens of answers with a reward, also where {limit} cut it off"
    stopped = " (one ended by a stop string counts)" if s.stop else ""
    return f"all sampled tokens of answers with a reward; none cut off at {limit}, not in denominators either{stopped}"


def _temperature(s: Settings) -> str:
    if s.temperature == 1:
        return "1"
    t = f"{s.temperature:g}"
    return f"{t}: every log-prob is of softmax(logits / {t}), as sampled; gradients carry 1/{t} = {1 / s.temperature:.3g}"


# The linter -----------------------------------------------------------------------------------------------------------


def lint(loss: Any, settings: Settings) -> list[str]:
    """A line for each known foot-gun in these settings, which names the key to change. "note:" where it may well be what you want."""
    return [message for rule in RULES for message in rule(loss, settings)]


def _advantage_of_another_loss(loss: Any, s: Settings) -> Iterator[str]:
    declared = isinstance(loss, PolicyLoss) and any(c.__module__.startswith("losses.") or "advantage" in vars(c) for c in _classes(loss))
    used = s.advantage_name
    if not declared or "advantages" not in forward_arguments(loss) or used in ("", loss.advantage):
        return
    wanted, raw = loss.advantage, {"group_centred", "leave_one_out"}
    if (used in raw) != (wanted in raw):
        scale = ("the reward's own scale", "a scale of 1") if used in raw else ("a scale of 1", "the reward's own scale")
        yield f"grpo.advantage: {used} has {scale[0]}, and {_name(loss)} is defined with {wanted}, which has {scale[1]}"
    elif {used, wanted} == raw:
        factor = f"{'n / (n - 1)' if used == 'leave_one_out' else '(n - 1) / n'} times its {wanted}"
        yield f"note: grpo.advantage: {_name(loss)} is defined with {wanted}; {used} is {factor}"
    elif used != "parts_zscore" and not (used == "batch_zscore" and s.n_samples == 1):
        yield f"note: grpo.advantage: {_name(loss)} is defined with {wanted}, and the run uses {used}"


def _few_samples(loss: Any, s: Settings) -> Iterator[str]:
    compares = {"group_zscore", "group_centred", "leave_one_out", "parts_zscore", "group_centred_token_whitened"}
    if s.n_samples == 1 and s.advantage_name in compares:
        yield f"grpo.n_samples=1 with {s.advantage_name}: a lone sample's advantage is 0; take 2 or more, or batch_zscore in grpo.advantage"
    if s.n_samples == 2 and s.advantage_name in ("group_zscore", "parts_zscore"):
        yield (
            f"grpo.n_samples=2 with {s.advantage_name}: two different rewards become +-0.707 whatever the gap between them; "
            f"raise it, or set grpo.advantage: losses.advantages.leave_one_out"
        )


def _rewards_unused(loss: Any, s: Settings) -> Iterator[str]:
    if "advantages" not in forward_arguments(loss):
        yield f"loss: {_name(loss)} does not ask for advantages, so no reward can teach it anything"


def _clips(loss: Any, s: Settings) -> Iterator[str]:
    if not isinstance(loss, CLIPPED):
        return
    if isinstance(loss, GSPOLoss | GSPOTokenLoss):
        for key, value in (("clip_low", loss.clip_low), ("clip_high", loss.clip_high)):
            if value > 0.01:
                yield f"{s.home}.{key}={value:g} hardly ever acts: GSPO's ratio is a mean over the sequence, near 1 (paper: 3e-4, 4e-4)"
    elif loss.clip_high >= 1:
        yield f"{s.home}.clip_high={loss.clip_high:g} clips the ratio at {1 + loss.clip_high:g}; it is the distance from 1, as 0.28"
    if isinstance(loss, DAPOLoss) and loss.dual_clip is not None and loss.dual_clip <= 1 + loss.clip_high:
        yield (
            f"{s.home}.dual_clip={loss.dual_clip:g} is within the clip, 1 + clip_high = {1 + loss.clip_high:g}: tokens with A < 0 stop "
            f"learning inside the trust region (1912.09729: 3)"
        )


def _constant(loss: Any, s: Settings) -> Iterator[str]:
    if not isinstance(loss, PolicyLoss) or loss.averaging != "constant" or loss.max_tokens is None:
        return
    if s.max_new_tokens is not None and loss.max_tokens != s.max_new_tokens:
        yield (
            f"{s.home}.max_tokens={loss.max_tokens} and grpo.max_new_tokens={s.max_new_tokens} differ: gradients are "
            f"{s.max_new_tokens / loss.max_tokens:.3g} times those with the generation budget as the constant"
        )
    elif loss.max_tokens > s.seq_len:
        yield f"{s.home}.max_tokens={loss.max_tokens} is more than training.seq_len={s.seq_len}: no answer can be that long"


def _kl_penalties(loss: Any, s: Settings) -> Iterator[str]:
    if (known := _kl(loss)) is not None and known[1] > 0:
        name, beta = known
        key = f"{s.home}.beta={beta:g}"
        if name == "k1":
            yield f"{s.home}.kl=k1 with {key}: in the loss its expected gradient is 0, only noise; use k2, k3_ratio or grpo.kl_in_reward"
        if name == "k3":
            use = f"loss: {{fn: losses.GRPOLoss, beta: {beta:g}, kl: k3_ratio}}"
            yield f"note: {key} with k3 has the expected gradient of KL(ref || pi), as GRPO printed it; for that of KL(pi || ref), {use}"
        if s.kl_in_reward:
            yield f"grpo.kl_in_reward={s.kl_in_reward:g} and {key}: the KL to the reference is penalised twice; set one of them to 0"
        if s.top_entropy < 1:
            yield f"grpo.top_entropy={s.top_entropy:g} with {key}: the KL of the tokens it drops is dropped too; use grpo.kl_in_reward"
    if s.kl_in_reward and s.advantage_name == "group_zscore":
        yield (
            f"grpo.kl_in_reward={s.kl_in_reward:g} with group_zscore: where a prompt's samples earn the same, their KL alone is scaled up "
            f"to a deviation of 1; set grpo.advantage to leave_one_out, batch_zscore or token_whitened"
        )


def _uncorrected(loss: Any, s: Settings) -> Iterator[str]:
    names = forward_arguments(loss)
    if "gen_logprobs" in names or not (s.correction is None or isinstance(s.correction, Uncorrected)):
        return
    several = f"training.updates_per_rollout={s.updates_per_rollout}" if s.updates_per_rollout > 1 else ""
    versions = s.max_policy_age + s.sync_interval - 1
    age = f"data up to {versions} versions old (grpo.max_policy_age, training.sync_interval)" if s.stale else ""
    why, remedy = " and ".join(filter(None, (several, age))), "set grpo.correction: {fn: losses.correction.Truncated, cap: 2}"
    if "old_logprobs" not in names:
        if why:
            yield f"grpo.correction: {why}, but {_name(loss)} has no ratio and nothing corrects; {remedy}"
    elif age and s.old_logprobs != "sampler":
        yield f"grpo.correction: {age}, but the ratio starts at the trainer's policy and nothing corrects; {remedy}"


def _weights(loss: Any, s: Settings) -> Iterator[str]:
    c, weighs_itself = s.correction, "gen_logprobs" in forward_arguments(loss)
    if isinstance(c, Truncated) and c.cap < 1:
        yield f"grpo.correction.cap={c.cap:g} is below 1: it caps the ratio itself, so even on-policy tokens weigh {c.cap:g}; 2 is usual"
    if isinstance(c, SequenceMasked) and c.statistic == "product" and s.response_tokens > LONG:
        spread = math.exp(0.02 * math.sqrt(s.response_tokens))
        key = f"grpo.correction.statistic=product with answers of up to {s.response_tokens} tokens"
        yield f"{key}: a gap of 0.02 a token is a factor {spread:.2g} in the product, so chance drops long answers; use geometric"
    if weighs_itself and c is not None and not (isinstance(c, Truncated) and c.cap == Truncated().cap):
        yield f"grpo.correction={_name(c)} has no effect: {_name(loss)} weighs the sampler's tokens itself"
    bounds = {"ratio_cap": loss.ratio_cap} if isinstance(loss, CISPOLoss) else {}
    if isinstance(loss, DAPOLoss) and loss.dual_clip is not None:
        bounds = {"dual_clip": loss.dual_clip}
    for key, bound in bounds.items():
        if isinstance(c, Truncated) and s.old_logprobs == "sampler" and c.cap < bound:
            yield (
                f"grpo.correction.cap={c.cap:g} truncates before {s.home}.{key}={bound:g} can, and is the bound of the two that counts; "
                f"raise it well above, or lower {key}"
            )
    if isinstance(loss, ReinforceLoss) and loss.ratio_max is None and (s.stale or s.updates_per_rollout > 1):
        yield f"{s.home}.ratio_max=null: nothing bounds the weight of tokens that another policy sampled; 2 is usual"


def _precision(loss: Any, s: Settings) -> Iterator[str]:
    if not s.fp32_masters and s.dtype == "bfloat16" and s.learning_rate < 6e-5:
        key = f"training.learning_rate={s.learning_rate:g}"
        yield f"{key} with weights stored in bfloat16: near 0.02 they are 1.2e-4 apart, and smaller Adam steps are lost; store float32"


def _sampling(loss: Any, s: Settings) -> Iterator[str]:
    if s.temperature != 1:
        t, scale = f"{s.temperature:g}", f"{1 / s.temperature:.3g}"
        yield f"note: grpo.temperature={t}: policy, KL and entropy are of softmax(logits / {t}), and gradients carry 1/{t} = {scale}"
    if s.mask_truncated and s.stop:
        yield "note: grpo.mask_truncated with grpo.stop: an answer ended by a stop string counts here; trainers that look for EOS mask it"
    if is_whole_batch(loss) and "entropy" in forward_arguments(loss):
        yield f"loss: {_name(loss)} sees the entropy, but no gradient passes through it in a whole-batch loss; use training.entropy_coef"


RULES: tuple[Callable[[Any, Settings], Iterator[str]], ...] = (
    _rewards_unused,
    _advantage_of_another_loss,
    _few_samples,
    _clips,
    _constant,
    _kl_penalties,
    _uncorrected,
    _weights,
    _precision,
    _sampling,
)
CLIPPED = (GRPOLoss, DrGRPOLoss, DAPOLoss, GSPOLoss, GSPOTokenLoss, ReinforcePlusPlusLoss, ReinforcePlusPlusBaselineLoss)
LONG = 512  # response tokens from which on a product over them says more of their number than of the policies


def _kl(loss: Any) -> tuple[str, float] | None:
    """(estimator, weight) of the KL in a shipped loss; None where there is none, or where its author alone knows."""
    if isinstance(loss, PolicyLoss) and not next(c for c in type(loss).__mro__ if "per_token" in vars(c)).__module__.startswith("losses."):
        return None
    if isinstance(loss, GRPOLoss):
        return loss.kl, loss.beta
    if isinstance(loss, SimpleGRPOLoss):
        return "k3", loss.beta
    return ("k2", loss.beta) if isinstance(loss, ReinforcePlusPlusBaselineLoss) else None


def _classes(loss: PolicyLoss) -> list[type]:
    """Its class and those it derives from, below PolicyLoss."""
    return [c for c in type(loss).__mro__ if issubclass(c, PolicyLoss) and c is not PolicyLoss]


def _name(thing: Any) -> str:
    return thing.__name__ if inspect.isroutine(thing) else type(thing).__name__

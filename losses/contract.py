"""What a loss is asked and what it answers, so that no trainer code depends on which objective it runs.

Two kinds of loss plug in. A `PolicyLoss` answers per token and declares who is averaged over whom; the trainer weights
every token by its share of the whole step, so no split into micro-batches, packs or ranks can change a gradient. Any
other callable that returns a scalar (a plain `nn.Module`) is a whole-batch loss and must see the whole step's [B, T].

Padding: `padding_mask` is 1 where a token counts and 0 elsewhere. Before a loss is called, every [B, T] tensor it named
is set to 0 where the mask is 0, and so is what it returns. Whatever lies in the padding, its gradient is therefore
exactly zero and no `0 * inf` can turn into a NaN; a loss file needs no care of its own.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor, nn

from batch import LossOutput

Averaging = Literal["token", "sequence", "constant", "sum", "prompt"]

# All a loss can ask for, by the name of its argument. Every tensor is [B, T] over response tokens.
ARGUMENTS = {
    "logprobs": "under the policy being trained, at the sampling temperature",
    "ref_logprobs": "under the reference; a plain Tensor annotation requires one, `Tensor | None` does not",
    "advantages": "[B, 1] or [B, T]",
    "padding_mask": "1 where a token counts",
    "gen_logprobs": "the sampler's own",
    "old_logprobs": "the policy's before the rollout's first update",
    "entropy": "of the policy at each position, exact; differentiable, but not in a loss that returns one scalar",
}


class PolicyLoss(ABC):
    """An objective by its value at each token. Subclasses set `averaging`, write `per_token`; options go to __init__.

    >>> import torch
    >>> class Likelihood(PolicyLoss):
    ...     averaging = "token"
    ...     def per_token(self, logprobs): return -logprobs
    >>> Likelihood()(logprobs=torch.tensor([[-1.0, -3.0]]), padding_mask=torch.tensor([[1.0, 1.0]]))
    tensor(2.)
    """

    averaging: Averaging  # of the class, or set by its __init__
    max_tokens: int | None = None  # the constant L of averaging "constant"
    elementwise: ClassVar[bool] = False  # True: a token's loss depends on nothing of any other token, nor on the shape [B, T]
    centred: bool = True  # True: where policy, sampler and reference agree, d loss / d logprob is -A times the token's weight
    advantage: ClassVar[str] = "group_zscore"  # of losses.advantages: what the objective is defined with, and the run's default

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "per_token" in cls.__dict__ and not any("averaging" in base.__dict__ for base in cls.__mro__):
            raise ValueError(
                f"{cls.__name__} must say who is averaged over whom: averaging, one of {', '.join(get_args(Averaging))}"
            )

    @abstractmethod
    def per_token(self, *args: Any, **kwargs: Any) -> Tensor | LossOutput:
        """The loss to minimise at every token, [B, T], neither masked nor averaged. Arguments name what it needs."""

    def needs(self) -> frozenset[str]:
        """Names of the tensors that `per_token` asks for."""
        return forward_arguments(self)

    @property
    def needs_reference(self) -> bool:
        """Whether this instance cannot work without `ref_logprobs`; by default the signature says."""
        return _signature_requires_reference(self)

    def formula(self) -> str:
        """The loss u at one token with this instance's numbers filled in, in ASCII, for the card that a run prints."""
        return f"u = {type(self).__name__}.per_token({', '.join(sorted(self.needs()))})"

    def evaluate(self, **available: Tensor | None) -> LossOutput:
        """The loss and its metrics at every token, [B, T], 0 in the padding. Tensors it did not name are ignored.

        For the trainer: the step's loss is the sum over its micro-batches of `evaluate(...).loss` times the step's
        `token_weights`. Absent old and sampler log-probs are `logprobs.detach()`.
        """
        output = self.per_token(**_select(self, available))
        if isinstance(output, Tensor):
            output = LossOutput(output)
        padding = _padding(available)
        for name, values in {"loss": output.loss, **output.metrics}.items():
            if values.shape != padding.shape:
                raise ValueError(
                    f"{type(self).__name__}.per_token returned {name} of shape {list(values.shape)} for tokens "
                    f"{list(padding.shape)}: return one value per token and leave the averaging to `averaging`"
                )
        metrics = {name: values.detach().masked_fill(padding, 0) for name, values in output.metrics.items()}
        return LossOutput(output.loss.masked_fill(padding, 0), metrics)

    def __call__(self, *, groups: Sequence[int] | Tensor | None = None, **tensors: Tensor | None) -> Tensor:
        """The scalar of the batch it is given. Absent old and sampler log-probs are `logprobs.detach()`.

        groups: the prompt that each of the B sequences answers, for averaging "prompt"; by default they all answer one.
        """
        unknown = sorted(tensors.keys() - ARGUMENTS.keys())
        if unknown:
            raise ValueError(f"{type(self).__name__} was given `{unknown[0]}`; it can be given {', '.join(ARGUMENTS)}")
        loss = self.evaluate(**tensors).loss
        lengths = (~_padding(tensors)).sum(1).tolist()
        prompts = groups.tolist() if isinstance(groups, Tensor) else groups
        weights = token_weights(self.averaging, lengths, groups=prompts, max_tokens=self.max_tokens)
        return (loss * loss.new_tensor(weights)[:, None]).sum()


def token_weights(
    averaging: Averaging, lengths: list[int], *, groups: Sequence[int] | None = None, max_tokens: int | None = None
) -> list[float]:
    """The weight of each loss token of each sequence in a step, whose loss is the weighted sum over all its tokens.

    `lengths` are the numbers of loss tokens of *all* sequences of the step, whoever holds them. A sequence without any
    (a masked truncated answer, an idle rank's filler) counts in no denominator; if all are empty, all weights are 0.
    `groups`: which prompt each answers (by default all the same one), for "prompt": the mean over prompts of the mean over all
    tokens of a prompt's answers, as DAPO's formula is printed (2503.14476); its code, like "token", takes the step's tokens.

    >>> token_weights("token", [1, 3])
    [0.25, 0.25]
    >>> token_weights("sequence", [1, 4, 0])
    [0.5, 0.125, 0.0]
    >>> token_weights("constant", [1, 4], max_tokens=8)
    [0.0625, 0.0625]
    >>> token_weights("sum", [1, 4])
    [0.5, 0.5]
    >>> token_weights("prompt", [1, 3, 2], groups=[0, 0, 1])
    [0.125, 0.125, 0.25]
    """
    tokens, sequences = sum(lengths), sum(n > 0 for n in lengths)
    if averaging == "token":
        share = [1 / tokens if n else 0.0 for n in lengths]
    elif averaging == "sequence":
        share = [1 / (sequences * n) if n else 0.0 for n in lengths]
    elif averaging == "constant":
        if max_tokens is None or max_tokens < 1:
            raise ValueError(
                f'max_tokens={max_tokens} must be at least 1, the generation budget: averaging "constant" divides by it'
            )
        share = [1 / (sequences * max_tokens) if n else 0.0 for n in lengths]
    elif averaging == "prompt":
        of_prompt: dict[int, int] = {}
        for group, n in zip(groups or [0] * len(lengths), lengths, strict=True):
            of_prompt[group] = of_prompt.get(group, 0) + n
        prompts = sum(n > 0 for n in of_prompt.values())
        pairs = zip(groups or [0] * len(lengths), lengths, strict=True)
        share = [1 / (prompts * of_prompt[group]) if n else 0.0 for group, n in pairs]
    elif averaging == "sum":
        share = [1 / sequences if n else 0.0 for n in lengths]
    else:
        raise ValueError(f'averaging="{averaging}" is not one of {", ".join(get_args(Averaging))}')
    return share


def is_whole_batch(loss: Callable[..., Any]) -> bool:
    """Whether a loss returns one scalar and must therefore see the whole step at once; a `PolicyLoss` need not."""
    if isinstance(loss, type):
        raise ValueError(f"{loss.__name__} is a class; a loss is an instance of it: {loss.__name__}(...)")
    return not isinstance(loss, PolicyLoss)


def forward_arguments(loss: Callable[..., Any]) -> frozenset[str]:
    """Names of the tensors that a loss of either kind asks for."""
    return frozenset(_parameters(loss))


def requires_reference(loss: Callable[..., Any]) -> bool:
    """Whether a loss of either kind cannot work without `ref_logprobs`: named with neither `| None` nor a default."""
    return loss.needs_reference if isinstance(loss, PolicyLoss) else _signature_requires_reference(loss)


def whole_batch_loss(loss: Callable[..., Tensor], **available: Tensor | None) -> Tensor:
    """The scalar of a whole-batch loss, given by keyword those tensors that it names."""
    value = loss(**_select(loss, available))
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(
            f"{_name(loss)} must return a scalar tensor; to return a value per token, derive from losses.PolicyLoss"
        )
    return value.reshape(())


def _function(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Where a loss names its arguments: `nn.Module.__call__` hides the signature of `forward`."""
    if not is_whole_batch(loss):
        return loss.per_token  # type: ignore[attr-defined]
    return loss.forward if isinstance(loss, nn.Module) else loss


def _name(loss: Callable[..., Any]) -> str:
    return loss.__name__ if inspect.isroutine(loss) else type(loss).__name__


def _parameters(loss: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(_function(loss)).parameters.values()
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    for name in named:
        if name not in ARGUMENTS:
            raise ValueError(
                f"{_name(loss)} asks for `{name}`, which no trainer has; a loss can ask for {', '.join(ARGUMENTS)} "
                f"(options belong in its constructor)"
            )
    if "logprobs" not in named:
        raise ValueError(f"{_name(loss)} does not ask for `logprobs`, so nothing could be learned from it")
    return named


def _signature_requires_reference(loss: Callable[..., Any]) -> bool:
    parameter = _parameters(loss).get("ref_logprobs")
    if parameter is None or parameter.default is not parameter.empty:
        return False
    # As text: under `from __future__ import annotations` it is text already, and evaluating it could fail.
    annotation = str(parameter.annotation)
    return "None" not in annotation and "Optional" not in annotation


def _padding(available: Mapping[str, Tensor | None]) -> Tensor:
    """[B, T] bool, True where a token does not count."""
    mask = available.get("padding_mask")
    if mask is None:
        raise ValueError("a loss needs padding_mask [B, T], 1 where a token counts, and it was not given")
    return mask == 0


def _select(loss: Callable[..., Any], available: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The tensors that a loss names, 0 in the padding; see the module's docstring."""
    padding = _padding(available)
    logprobs, advantages = available.get("logprobs"), available.get("advantages")
    if logprobs is None:
        raise ValueError(f"{_name(loss)} needs logprobs, and it was not given")
    # A wrong shape could broadcast to a wrong number in silence.
    if logprobs.dim() != 2 or logprobs.shape != padding.shape:
        raise ValueError(f"logprobs {list(logprobs.shape)} and padding_mask {list(padding.shape)} must both be [B, T]")
    if advantages is not None and advantages.shape not in (padding.shape, (len(padding), 1)):
        raise ValueError(f"advantages {list(advantages.shape)} must be [B, 1] or [B, T] = {list(padding.shape)}")
    own = {"old_logprobs": logprobs.detach(), "gen_logprobs": logprobs.detach()}
    chosen: dict[str, Tensor | None] = {}
    for name, parameter in _parameters(loss).items():
        tensor = available.get(name)
        if tensor is None:
            tensor = own.get(name)
        if tensor is not None:
            whole = tensor.shape == padding.shape and name != "padding_mask"
            chosen[name] = tensor.masked_fill(padding, 0) if whole else tensor
        elif parameter.default is not parameter.empty:
            continue
        elif name == "ref_logprobs" and not _signature_requires_reference(loss):
            chosen[name] = None
        elif name == "ref_logprobs":
            raise ValueError(
                f"{_name(loss)} needs ref_logprobs, and there is no reference: give the run one (services.ref_model) "
                f"or annotate it `Tensor | None` and do without"
            )
        else:
            raise ValueError(f"{_name(loss)} needs {name}, and it was not given")
    return chosen

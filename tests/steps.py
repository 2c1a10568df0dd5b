"""One optimizer step twice: a real trainer in a world of one process, and plain torch in float64, an episode at a time."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from batch import Episode, pad
from config import Call
from losses import GRPOLoss, NLLLoss
from model import Model, ModelSource
from parallel.placement import Placement
from parallel.roles import ParallelismConfig, Plan
from trainer import Trainer, TrainingConfig

TEMPERATURE = 0.7
CustomLoss = Call("tests/data/guide/custom_loss.py:CustomLoss")


@pytest.fixture(scope="module")
def place():
    """A world of this process alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "")  # so that they are as they were, whatever the world sets
            patch.delenv(name)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the tensors are tiny
        plan = Plan.make(None, ParallelismConfig(), colocate=False, wants_reference=False, world_size=1)
        yield Placement.build(plan, "cpu")
        torch.distributed.destroy_process_group()
        torch.set_num_threads(threads)


@pytest.fixture
def trainer_of(place, tiny_qwen3):
    """`trainer_of(loss, max_tokens=..., correction=..., <training keys>)` on the tiny Qwen3."""

    def make(loss, *, max_tokens: int = 10_000, correction=None, top_entropy: float = 1.0, **training) -> Trainer:
        keys: dict[str, Any] = {"dtype": "float32", "max_grad_norm": 0.0, "adam_beta1": 0.0, "shared_prompts": False} | training
        cfg = TrainingConfig(**keys)
        source = ModelSource(str(tiny_qwen3))
        options: dict[str, Any] = {"dtype": cfg.dtype, "max_tokens": max_tokens, "switches": cfg.switches}
        options["shared_prompts"] = cfg.shared_prompts
        model = Model(source, place.trainer, temperature=TEMPERATURE, trainable=True, **options)
        return Trainer(model, cfg, loss, correction=correction, top_entropy=top_entropy)

    return make


@pytest.fixture(scope="module")
def plain(tiny_qwen3):
    """The same checkpoint as transformers runs it, in float64."""
    return AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float64, attn_implementation="eager")


def some_episodes(count: int = 7, seed: int = 0) -> list[Episode]:
    """Lengths of every kind, tokens that do not count, one episode of which none does, and ratios on both sides of every clip."""
    draw = np.random.RandomState(seed)
    episodes = []
    for i in range(count):
        prompt, response = draw.randint(1, 12), draw.randint(1, 15)
        mask = (draw.rand(response) < 0.8) & (i != 2)
        guess = draw.uniform(-4.5, -1.0, (3, response)).astype(np.float32)
        episodes.append(
            Episode(
                token_ids=draw.randint(3, 17, prompt + response),
                num_prompt_tokens=prompt,
                loss_mask=mask.astype(np.float32),
                advantages=draw.randn(response).astype(np.float32),
                gen_logprobs=guess[0],
                ref_logprobs=guess[1],
                old_logprobs=guess[2],
                group=i,
            )
        )
    return episodes


def plain_scores(model, e: Episode):
    """Log-probs and entropy of the response tokens, [R] each, from one sequence alone."""
    logits = model(torch.tensor(e.token_ids)[None]).logits[0, e.num_prompt_tokens - 1 : -1] / TEMPERATURE
    log_p = logits.log_softmax(-1)
    chosen = log_p.gather(-1, torch.tensor(e.token_ids[e.num_prompt_tokens :])[:, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(-1)


def plain_gradient(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def whole(shard: torch.Tensor) -> torch.Tensor:
    assert isinstance(shard, DTensor)
    return shard.full_tensor().detach().clone()


def gradient(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of the only update so far, as AdamW got it: without its first decay, the first moment is the gradient."""
    moments = {name: moment for name, moment in trainer.state().items() if name.startswith("exp_avg/")}
    return {name.removeprefix("exp_avg/"): whole(moment) for name, moment in moments.items()}


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in trainer.model.shards().items()}


def assert_same_gradient(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in got:
        gap, size = (got[name].double() - want[name].double()).norm(), want[name].double().norm()
        assert size > 0, f"{name} has no gradient, so nothing is compared"
        assert gap <= 1e-5 * size, f"{name}: ||dg|| / ||g|| = {gap / size:.1e}"


def column(e: Episode, name: str) -> torch.Tensor:
    return torch.tensor(vars(e)[name], dtype=torch.float64)


def plain_nll(model, episodes):
    total = sum((plain_scores(model, e)[0] * column(e, "loss_mask")).sum() for e in episodes)
    return -total / sum(column(e, "loss_mask").sum() for e in episodes)


def plain_grpo(model, episodes, clip_low=0.2, clip_high=0.28, beta=0.1):
    """Formula by formula, an episode at a time."""
    per_episode = []
    for e in episodes:
        logprobs, mask, a = plain_scores(model, e)[0], column(e, "loss_mask"), column(e, "advantages")
        if not mask.sum():
            continue
        ratio = (logprobs - column(e, "old_logprobs")).exp()
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
        gap = column(e, "ref_logprobs") - logprobs
        terms = -torch.minimum(ratio * a, clipped * a) + beta * (gap.exp() - gap - 1)
        per_episode.append((terms * mask).sum() / mask.sum())
    return sum(per_episode) / len(per_episode)


def plain_custom(model, episodes):
    """The guide's class on the padded [B, T] of the step."""
    device = torch.device("cpu")
    rows = torch.nn.utils.rnn.pad_sequence([plain_scores(model, e)[0] for e in episodes], batch_first=True)
    named = {n: pad([vars(e)[n] for e in episodes], device).double() for n in ("ref_logprobs", "advantages", "loss_mask")}
    return CustomLoss.resolve()(rows, named["ref_logprobs"], named["advantages"], named["loss_mask"])


OBJECTIVES = {
    "likelihood": (NLLLoss, plain_nll),
    "GRPO with clips and KL": (lambda: GRPOLoss(clip_low=0.2, clip_high=0.28, beta=0.1), plain_grpo),
    "the guide's CustomLoss": (CustomLoss.resolve, plain_custom),
}
each_objective = pytest.mark.parametrize(("loss", "reference"), OBJECTIVES.values(), ids=OBJECTIVES)



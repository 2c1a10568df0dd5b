"""How fast a step went, and in how much memory."""

from collections.abc import Mapping
from types import MappingProxyType

from batch import Episode
from model import Model
from parallel.hardware import peak_flops
from parallel.memory import GIB, usage
from parallel.placement import Placement
from rollout.generator import Generator
from trainer import Trainer

# Borders at which is written down who is resident, by the phase that begins there (metrics.Clock.watch).
BORDERS = {"generate": "generate", "logp_ref": "score", "logp_old": "score", "train": "train", "sync": "sync"}


def residents(policy: Model, reference: Model | None, trainer: Trainer, generator: Generator) -> dict[str, float]:
    """GiB of live tensors on this rank's device, by whose they are: 0 for a model that is parked and for what has gone to sleep."""
    found = trainer.residents() | {f"engine_{name}": count for name, count in generator.residents().items()}
    if policy.is_local:
        found |= {"policy": policy.local_bytes}
    if reference is not None and reference.is_local:
        found |= {"reference": reference.local_bytes}
    return {f"{name}_gib": count / GIB for name, count in found.items()}


def speed(
    episodes: list[Episode], times: dict[str, float], place: Placement, policy: Model, generator: Generator | None = None,
    trained: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:  # fmt: skip
    """perf/* and mem/* of a step on this rank, from its episodes, its `times` (metrics.Clock) and what `Trainer.train` returned.

    perf/tok_s_*: tokens per second and rank, sampled ones over the time of generation, those of all episodes over that of training:
    every response with its prompt, whether or not they had to be computed. Of these, perf/tokens_computed were: a prompt is once in a
    row of its responses; what fills a row does not count. perf/tflops_train: 6 FLOP a parameter and token computed, per rank, without
    attention and other passes; perf/mfu: their share of what the GPU can do. perf/bubble: the
    share of the step that ranks spent waiting for each other, on average. At steps that sync: perf/sync_gb, 1e9 bytes of the policy in
    the engine's dtype, and perf/sync_gb_s, these over the time of the sync (a reference that follows has its part in it).
    """
    counts = {"train": sum(len(e.token_ids) for e in episodes) / len(place.plan.trainer.ranks)}
    if generator is not None:
        counts["generate"] = sum(e.num_response_tokens for e in episodes) / len(place.plan.generator.ranks)
    numbers = {f"perf/tok_s_{name}": count / times[f"time/{name}"] for name, count in counts.items() if times[f"time/{name}"] > 0}
    if generator is not None and policy.num_parameters and times["time/sync"] > 0:
        numbers["perf/sync_gb"] = policy.num_parameters * generator.dtype.itemsize / 1e9
        numbers["perf/sync_gb_s"] = numbers["perf/sync_gb"] / times["time/sync"]
    numbers["perf/bubble"] = times["time/wait_mean"] / times["time/step_mean"]
    if policy.num_parameters and "perf/tok_s_train" in numbers:
        share = trained["perf/tokens_computed"] / sum(len(e.token_ids) for e in episodes) if trained else 1.0
        flops = 6 * policy.num_parameters * share * numbers["perf/tok_s_train"]
        numbers["perf/tflops_train"] = flops / 1e12
        if (peak := peak_flops(place.device)) is not None:
            numbers["perf/mfu"] = flops / peak
    return numbers | usage(place.device, generator.live_bytes if generator is not None else 0)

"""How fast a step went, and in how much memory."""

from batch import Group
from model import Model
from parallel.hardware import peak_flops
from parallel.memory import usage
from parallel.placement import Placement
from rollout.generator import Generator


def speed(groups: list[Group], times: dict[str, float], place: Placement, policy: Model, generator: Generator) -> dict[str, float]:
    """perf/* and mem/* of a step on this rank, from its groups and its `times` (metrics.Clock).

    perf/tok_s_*: tokens per second and rank, sampled ones over the time of generation, all that were trained on over that of
    training. perf/tflops_train: 6 FLOP a parameter and token, per rank; perf/mfu: their share of what the GPU can do. perf/bubble: the
    share of the step that ranks spent waiting for each other, on average.
    """
    sampled = sum(len(c.token_ids) for g in groups for c in g.completions)
    trained = sampled + sum(len(g.prompt.token_ids) * len(g.completions) for g in groups)
    counts = {"generate": sampled / len(place.plan.generator.ranks), "train": trained / len(place.plan.trainer.ranks)}
    numbers = {f"perf/tok_s_{name}": count / times[f"time/{name}"] for name, count in counts.items() if times[f"time/{name}"] > 0}
    numbers["perf/bubble"] = times["time/wait_mean"] / times["time/step_mean"]
    if policy.num_parameters and "perf/tok_s_train" in numbers:
        flops = 6 * policy.num_parameters * numbers["perf/tok_s_train"]
        numbers["perf/tflops_train"] = flops / 1e12
        if (peak := peak_flops(place.device)) is not None:
            numbers["perf/mfu"] = flops / peak
    return numbers | usage(place.device, generator.live_bytes)

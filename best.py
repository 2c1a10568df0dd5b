"""The best value of a metric that evaluations have seen: which checkpoint is worth keeping, and when to stop."""

import math
from dataclasses import dataclass
from typing import Literal

Mode = Literal["auto", "min", "max"]


@dataclass(frozen=True)
class Best:
    """Part of a checkpoint, so that a resumed run remembers it."""

    metric: str
    value: float
    step: int  # after which it was seen
    since: int = 0  # evaluations since then


def lower_is_better(metric: str, mode: Mode) -> bool:
    """`auto` knows losses and perplexities; of anything else more is better.

    >>> lower_is_better("eval/loss", "auto"), lower_is_better("eval/accuracy", "auto"), lower_is_better("eval/len", "min")
    (True, False, True)
    """
    return mode == "min" or (mode == "auto" and metric.rpartition("/")[2] in ("loss", "perplexity"))


def of(metric: str | None, best: Best | None) -> Best | None:
    """`best`, where it is of the metric that the run goes by now."""
    return best if best is not None and best.metric == metric else None


def seen(best: Best | None, metric: str, mode: Mode, step: int, numbers: dict[str, float], min_delta: float = 0.0) -> Best | None:
    """`best` after an evaluation: a new one where the metric is better by more than `min_delta`, else one evaluation older.

    Numbers without the metric are no evaluation of it. A value that is not finite is never the best.

    >>> first = seen(None, "eval/loss", "auto", 10, {"eval/loss": 2.0})
    >>> seen(first, "eval/loss", "auto", 20, {"eval/loss": 2.5})
    Best(metric='eval/loss', value=2.0, step=10, since=1)
    """
    if (value := numbers.get(metric)) is None:
        return best
    sign = -1 if lower_is_better(metric, mode) else 1
    if math.isfinite(value) and (best is None or sign * (value - best.value) > min_delta):
        return Best(metric, value, step)
    return best and Best(metric, best.value, best.step, best.since + 1)

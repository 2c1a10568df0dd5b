"""Rollouts sampled and not yet trained on."""

from collections import deque
from typing import Any

import torch.distributed as dist

from batch import Group
from checkpoint import Saved
from data import PromptStream
from metrics import Clock
from parallel.exchange import everyone
from parallel.placement import Placement, share
from rollout.evaluate import score_share
from rollout.generator import Generator
from rollout.rewards import Scorer
from rollout.sampling import Sampling


class Rollouts:
    """A queue of scored rollouts, each of which stays on the ranks that sampled it until `next` gives it to all."""

    def __init__(
        self,
        prompts: PromptStream,
        num_prompts: int,
        n_samples: int,
        generator: Generator,
        scorer: Scorer,
        sampling: Sampling,
        place: Placement,
        clock: Clock,
        saved: Saved,
    ):
        """num_prompts: of one rollout; n_samples: completions of each; saved: where the run goes on."""
        self._prompts, self._generator, self._scorer, self._sampling = prompts, generator, scorer, sampling
        self._place, self._clock, self._num_prompts, self._n_samples = place, clock, num_prompts, n_samples
        self._queue: deque[list[Group]] = deque(share(groups, place.generator) for groups in saved.waiting)
        if len(saved.engine_random) == dist.get_world_size():
            generator.set_random_state(saved.engine_random[dist.get_rank()])

    def sample_until(self, count: int) -> None:
        """Sample and score this rank's share until `count` rollouts wait. No collective: other ranks may be training."""
        while len(self._queue) < count:
            with self._clock.phase("generate"):
                with self._clock.phase("data"):
                    prompts = self._prompts.take(self._num_prompts)
                groups = score_share(self._generator, self._scorer, prompts, self._n_samples, self._sampling, self._clock)
                self._queue.append(groups)

    def next(self) -> list[Group]:
        """The oldest rollout, on every rank; [] once the data has ended. Collective over the world."""
        self.sample_until(1)
        with self._clock.phase("wait"):
            return everyone(self._queue.popleft(), self._place.generator, self._place)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of sampling: the data's position, the rollouts that wait, on every rank, and the engine's random
        numbers. Collective over the world.
        """
        waiting = [everyone(groups, self._place.generator, self._place) for groups in self._queue]
        return {"position": self._prompts.position, "waiting": waiting, "engine_random": self._generator.random_state()}

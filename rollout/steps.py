"""What an engine has sampled, taken as it comes: vLLM's own loop calls `step` until nothing is left, and gives all at the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from batch import Completion, Group, Prompt
from parallel.launch import advance


class Groups:
    """Makes groups of requests' outputs, which come in any order."""

    def __init__(
        self,
        prompts: list[Prompt],
        n_samples: int,
        first: int,
        completion: Callable[[Any], Completion],
        done: Callable[[Group], None],
    ):
        """first: the number of the first request; the samples of a prompt follow each other. done: called with each whole group."""
        self._prompts, self._n_samples, self._first, self._completion, self._done = prompts, n_samples, first, completion, done
        self._samples: list[dict[int, Completion]] = [{} for _ in prompts]
        self._groups: dict[int, Group] = {}

    def take(self, outputs: list[Any]) -> None:
        for output in outputs:
            if not output.finished:
                continue
            index, sample = divmod(int(output.request_id) - self._first, self._n_samples)
            samples = self._samples[index]
            samples[sample] = self._completion(output.outputs[0])
            if len(samples) == self._n_samples:
                self._groups[index] = Group(self._prompts[index], [samples[i] for i in range(self._n_samples)])
                self._done(self._groups[index])

    def all(self) -> list[Group]:
        """In the order of the prompts, once nothing is left to sample."""
        return [self._groups[index] for index in range(len(self._prompts))]


class Steps:
    """An engine's steps from now on: each is progress, and while somebody takes outputs, they are handed on at once."""

    def __init__(self, engine: Any):
        step = engine.step
        self._take: Callable[[list[Any]], None] | None = None

        def seen() -> list[Any]:
            advance()
            outputs = step()
            if self._take is not None:
                self._take(outputs)
            return outputs

        engine.step = seen

    @contextmanager
    def handed_to(self, groups: Groups) -> Iterator[None]:
        self._take = groups.take
        try:
            yield
        finally:
            self._take = None

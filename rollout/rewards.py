r"""Rewards: any callable `(prompt, response, target) -> float`, named in the config by a dotted path or `file.py:Name`.

    rewards: {math: {fn: rollout.rewards.MathReward, weight: 1.0}, format: {fn: my_rewards.py:polite, weight: 0.2}}

A reward receives three strings: `prompt`, what the dataset asked, before the chat template; `response`, the completion
decoded without special tokens, and without what a chat template already put into the prompt (an opening `<think>`);
`target`, the expected answer. One that names a keyword `completion` also gets the `batch.Completion` with its token ids and
stop reason. It returns a finite number, or MISSING where it cannot tell: then the sample is in no baseline, and nothing is
learned from it. A reward that raises, or returns anything else (None too: a forgotten `return`), ends the run: a score
that silently becomes a zero looks like a bad model.

With `grpo.reward_threads` answers are scored in other threads, several at once, while others are still being sampled: for rewards that
wait, for a sandbox or a judge. Such a reward must bear being called by two threads, draw no random numbers (their order would not be the
same twice), and use no signals, as timeouts by `signal.alarm` do, math-verify's among them: Python has them in the main thread only.

Nothing a model wrote is evaluated here: answers are compared as exact fractions or as text.
"""

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from inspect import signature
from numbers import Real
from typing import Any

from batch import Completion, Group
from config import Call
from parallel.launch import advance
from parallel.watch import REWARD_THREAD
from rollout.answers import expected_answer, given_answer, same_answer

MISSING = object()  # what a reward returns for a sample it cannot judge

Reward = Callable[..., Any]
Scores = dict[str, float | None]  # of one answer, unweighted, by the reward's name


class RewardError(RuntimeError):
    """A reward raised, or returned what is not a finite number."""


class Scorer:
    """The run's rewards, resolved once. `weight` (default 1.0) is the scorer's; the other keywords are the reward's."""

    def __init__(self, rewards: dict[str, Call], *, threads: int = 0):
        """threads: that score what `begin` is given, each one answer at a time; 0: `score` does it when it is called."""
        if not rewards:
            raise ValueError(
                "rewards is empty: nothing to train for; add one, such as "
                "rewards: {math: {fn: rollout.rewards.MathReward, weight: 1.0}}"
            )
        self._rewards: dict[str, tuple[Reward, float]] = {}
        for name, call in rewards.items():
            options = dict(call.kwargs)
            weight = options.pop("weight", 1.0)
            if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
                raise ValueError(f"rewards.{name}.weight={weight!r} is not a finite number")
            reward = replace(call, kwargs=options).resolve()
            check_reward(name, call.fn, reward)
            self._rewards[name] = (reward, float(weight))

        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=REWARD_THREAD) if threads else None
        self._begun: dict[int, list[Future[Scores]]] = {}  # by the group's prompt, for each completion

    def begin(self, group: Group) -> None:
        """Score the group in other threads, where there are any; `score` then waits for them."""
        if self._pool is not None:
            samples = range(len(group.completions))
            self._begun[group.prompt.index] = [self._pool.submit(self._score_one, group, sample) for sample in samples]

    def score(self, group: Group) -> Group:
        """The group with its rewards and their unweighted parts filled in."""
        if (begun := self._begun.pop(group.prompt.index, None)) is not None:
            scores = [future.result() for future in begun]
        else:
            scores = [self._score_one(group, sample) for sample in range(len(group.completions))]
        parts = {name: [of_sample[name] for of_sample in scores] for name in self._rewards}
        totals: list[float | None] = []
        for values in zip(*parts.values(), strict=True):
            weighted = [None if v is None else self.weights[name] * v for name, v in zip(parts, values, strict=True)]
            totals.append(None if None in weighted else sum(w for w in weighted if w is not None))
        return replace(group, rewards=totals, reward_parts=parts)

    @property
    def weights(self) -> dict[str, float]:
        return {name: weight for name, (_, weight) in self._rewards.items()}

    def _score_one(self, group: Group, sample: int) -> Scores:
        return {name: self._ask(name, group, sample) for name in self._rewards}

    def _ask(self, name: str, group: Group, sample: int) -> float | None:
        reward, _ = self._rewards[name]
        prompt, completion = group.prompt, group.completions[sample]
        response, more = completion.text, {"completion": completion} if "completion" in signature(reward).parameters else {}
        where = f"rewards.{name}, prompt {prompt.index}, sample {sample} (response {response[:80]!r})"
        advance()
        try:
            value: Any = reward(prompt.text, response, prompt.target, **more)
        except Exception as error:
            raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
        if value is MISSING:
            return None
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(f"{where} returned {value!r}; a reward returns a finite number, or rollout.rewards.MISSING")
        return float(value)


def check_reward(name: str, fn: str, reward: Any) -> None:
    if not callable(reward):
        raise ValueError(f"rewards.{name}.fn={fn} cannot be called: a reward is a function, or a class with __call__")
    more = {"completion": None} if "completion" in signature(reward).parameters else {}
    try:
        signature(reward).bind("prompt", "response", "target", **more)
    except TypeError as error:
        raise ValueError(
            f"rewards.{name}.fn={fn} is called as (prompt, response, target) but takes {signature(reward)}: {error}"
        ) from error


class MathReward:
    r"""`correct` where the response's final answer equals the target, else `wrong`.

    One answer counts, the last that the response marks after its thinking: `\boxed{...}`, `#### ...`, `answer is ...`;
    where none is marked, the last number. There is no credit for a target that merely occurs, and none for a box that
    is never closed. Numbers are compared exactly, as fractions: `12.0`, `12`, `$12` and `24/2` are equal, `0.33` and
    `1/3` are not; a percent sign is a unit; a unit may be left out but not be another one; a comma belongs to a number
    only between groups of three digits. Everything else is compared as text, without case, spaces and LaTeX's dressing.
    """

    def __init__(self, *, correct: float = 1.0, wrong: float = 0.0):
        self.correct, self.wrong = correct, wrong

    def __call__(self, prompt: str, response: str, target: str) -> float:
        expected = expected_answer(target)
        return self.correct if same_answer(given_answer(response, expected), expected) else self.wrong


class ThinkingReward:
    """1.0 for one thought and an answer after it, `<think>...</think> answer`, else 0.0.

    Many chat templates put the opening tag into the prompt, so a response that only closes the thought counts too.
    """

    def __call__(self, prompt: str, response: str, target: str) -> float:
        thought, closing, answer = response.partition("</think>")
        thought = thought.strip().removeprefix("<think>")
        well_formed = closing and "<think>" not in thought and "think>" not in answer
        return 1.0 if well_formed and thought.strip() and answer.strip() else 0.0


class SoftOverlong:
    """What an answer loses for its length, as DAPO's soft overlong punishment (2503.14476): 0 up to max_tokens - cache tokens, then
    falling linearly to -1 at max_tokens, and -1 beyond.

    A reward like any other, added to the rest before the advantage. max_tokens, cache: response tokens (the paper: 20480 and 4096).
    """

    def __init__(self, *, max_tokens: int, cache: int):
        if not 0 < cache <= max_tokens:
            raise ValueError(f"cache={cache} must be above 0 and at most max_tokens={max_tokens}: the tokens over which the reward falls")
        self.max_tokens, self.cache = max_tokens, cache

    def __call__(self, prompt: str, response: str, target: str, *, completion: Completion) -> float:
        over = len(completion.token_ids) - (self.max_tokens - self.cache)
        return -min(max(over / self.cache, 0.0), 1.0)


class DigitsReward:
    """1.0 for the target itself, spaces around it aside; else `partial` times the share of places that agree.

    Places are characters; none agree where the lengths differ. A wrong answer never scores as much as the right one.
    """

    def __init__(self, *, partial: float = 0.0):
        if not 0 <= partial <= 1:
            raise ValueError(f"partial={partial} must lie between 0 and 1")
        self.partial = partial

    def __call__(self, prompt: str, response: str, target: str) -> float:
        response, target = response.strip(), target.strip()
        if not target:
            raise ValueError("the target is empty: set dataset.target to the column with the answer")
        if response == target:
            return 1.0
        if len(response) != len(target):
            return 0.0
        return self.partial * sum(a == b for a, b in zip(response, target, strict=True)) / len(target)

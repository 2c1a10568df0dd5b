"""Which episodes are packed into which row, where episodes with equal prompts share them: a prompt is computed once a row.

A pure function of lengths and of which prompts are equal, so that no rank can disagree about it.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from batch import Episode, of_equal_prompts, plan_rows

# A row's responses each have the prompt's keys and values beside their own: at most so many times as many as the row may have tokens.
KEYS_PER_TOKEN = 4


@dataclass(frozen=True)
class Part:
    """Episodes that share a prompt, or one alone."""

    prompt: int  # its tokens
    members: tuple[tuple[int, int], ...]  # of each episode, response tokens and index; longest first

    @property
    def tokens(self) -> int:
        return self.prompt + sum(response for response, _ in self.members)

    @property
    def keys(self) -> int:
        """That its queries see: as many as tokens where it is one episode, whose prompt and response are one segment."""
        alone = len(self.members) == 1
        return self.tokens if alone else self.tokens + len(self.members) * self.prompt

    @property
    def order(self) -> tuple[int, int]:
        """Longest first."""
        return -self.tokens, self.members[0][1]

    def cut(self, fits: Callable[["Part"], bool]) -> "tuple[Part | None, Part | None]":
        """The part of its members, longest first, with which it `fits`, and the rest."""
        if fits(self):
            return self, None
        taken: tuple[tuple[int, int], ...] = ()
        for member in self.members:
            if fits(Part(self.prompt, (*taken, member))):
                taken = (*taken, member)
        left = tuple(member for member in self.members if member not in taken)
        return Part(self.prompt, taken) if taken else None, Part(self.prompt, left)


def plan_shared_rows(episodes: list[Episode], num_replicas: int, max_tokens: int, *, shared_prompts: bool) -> list[list[list[int]]]:
    """As `plan_rows`, which this is where no two prompts are equal; a row's tokens are counted as they are computed.

    Episodes of one prompt stay together, but where they do not fit a row, and where the replicas' tokens would differ too much: with M
    tokens a replica if every prompt were computed once, no replica gets more than M, the longest prompt and the longest episode together,
    and where that may be less it is.
    """
    lengths = [len(e.token_ids) for e in episodes]
    groups = of_equal_prompts(episodes) if shared_prompts else [[i] for i in range(len(episodes))]
    if len(groups) == len(episodes) or max(lengths) > max_tokens:
        return plan_rows(lengths, num_replicas, max_tokens)
    parts = []
    for indices in groups:
        members = ((episodes[i].num_response_tokens, i) for i in indices)
        parts.append(Part(episodes[indices[0]].num_prompt_tokens, tuple(sorted(members, key=lambda m: (-m[0], m[1])))))
    plans = [_rows(dealt, max_tokens) for dealt in _deal_evenly(parts, num_replicas)]
    longest = max(map(len, plans))
    return [rows + [[] for _ in range(longest - len(rows))] for rows in plans]


def _deal_evenly(parts: list[Part], num_replicas: int) -> list[list[Part]]:
    """The deal with the least limit that was found, to a hundredth of a replica's tokens."""
    if num_replicas == 1:
        return [sorted(parts, key=lambda p: p.order)]
    low = -(-sum(part.tokens for part in parts) // num_replicas)
    high = low + max(part.prompt for part in parts) + max(part.prompt + part.members[0][0] for part in parts)
    step = max(low // 100, 1)
    best = _deal(parts, num_replicas, high)
    assert best is not None, f"{high} tokens a replica always suffice: a replica is the last to be given a part of a group once at most"
    while high - low >= step:
        middle = (low + high) // 2
        found = _deal(parts, num_replicas, middle)
        if found is None:
            low = middle + 1
        else:
            high, best = middle, found
    return best


def _deal(parts: list[Part], num_replicas: int, limit: int) -> list[list[Part]] | None:
    """Longest first to the least loaded replica, as much of a part as `limit` tokens a replica allow; None where it takes nothing."""
    waiting = sorted(parts, key=lambda p: p.order)
    load = [0] * num_replicas
    dealt: list[list[Part]] = [[] for _ in range(num_replicas)]
    while waiting:
        r = load.index(min(load))
        given, left = waiting.pop(0).cut(partial(_within, limit - load[r]))
        if given is None:
            return None
        dealt[r].append(given)
        load[r] += given.tokens
        if left is not None:
            bisect.insort(waiting, left, key=lambda p: p.order)
    return dealt


def _within(tokens: int, part: Part) -> bool:
    return part.tokens <= tokens


def _rows(parts: list[Part], max_tokens: int) -> list[list[int]]:
    """First-fit-decreasing; what fits no row whole fills one, and its rest is packed like any other."""
    waiting = sorted(parts, key=lambda p: p.order)
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # tokens and keys
    whole = (max_tokens, KEYS_PER_TOKEN * max_tokens)

    def fits(part: Part, left: tuple[int, int] = whole) -> bool:
        return part.tokens <= left[0] and part.keys <= left[1]

    while waiting:
        given, left = waiting.pop(0).cut(fits)
        assert given is not None, "an episode fits a row"
        slot = next((s for s, here in enumerate(room) if fits(given, here)), None)
        if slot is None:
            slot = len(rows)
            rows.append([])
            room.append(whole)
        rows[slot] += [index for _, index in given.members]
        room[slot] = (room[slot][0] - given.tokens, room[slot][1] - given.keys)
        if left is not None:
            bisect.insort(waiting, left, key=lambda p: p.order)
    return rows

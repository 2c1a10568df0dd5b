"""The nouns of a step, in the order they appear: Prompt -> Completion -> Group -> Episode -> Batch -> LossOutput.

Everything before `Batch` is plain data on the CPU and, after the exchange, identical on every rank. `Batch` is the first
thing on a device. Packing is decided here, once, from lengths alone, so that no rank can disagree about it.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    index: int  # position in the run's prompt order; with the run's seed it names the prompt's random numbers
    token_ids: list[int]
    text: str = ""  # what the dataset asked, before the chat template; rewards see this
    target: str = ""  # the expected answer, for rewards
    row: dict[str, Any] = field(default_factory=dict)  # the dataset row


@dataclass(frozen=True)
class Completion:
    text: str
    token_ids: list[int]  # as sampled, the end-of-sequence token included
    logprobs: list[float]  # of the sampling policy at the sampling temperature, one per token
    metadata: dict[str, Any] = field(default_factory=dict)
    stop_reason: str = "eos"  # "eos" | "stop_string" | "length" | "abort"
    policy_version: int = 0  # of the policy that sampled it: the number of optimizer steps it had taken


@dataclass
class Group:
    """All completions of one prompt, scored."""

    prompt: Prompt
    completions: list[Completion]
    rewards: list[float | None] = field(default_factory=list)  # one per completion: the weighted sum of the parts; None: missing
    reward_parts: dict[str, list[float | None]] = field(default_factory=dict)  # unweighted, by the reward's name


@dataclass
class Episode:
    """One trainable sequence of L tokens: P prompt tokens, then R response tokens."""

    token_ids: np.ndarray  # [L] int64
    num_prompt_tokens: int  # P >= 1: the first response token needs a token to follow
    loss_mask: np.ndarray  # [R] float32, 1 where a response token counts in the loss
    advantages: np.ndarray  # [R] float32
    gen_logprobs: np.ndarray | None = None  # [R] float32, the sampler's own
    ref_logprobs: np.ndarray | None = None  # [R] float32; None, never zeros, where there is no reference
    old_logprobs: np.ndarray | None = None  # [R] float32; None: the policy's own, detached, in the same pass
    group: int = 0  # which prompt it answers, within the step
    sample: int = 0  # which of the prompt's completions it is
    policy_version: int = 0

    @property
    def num_response_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True)
class Keys:
    """Which K keys the S segments of a row see, where they are not just a segment's own: a response sees its prompt's and its own.

    The last query of a segment sees all of them, each query before it one less.
    """

    cu_seqlens: Tensor  # [S + 1] int32, of a segment's keys in `places`
    max_seqlen: int
    places: Tensor  # [K] int64: the token of the row that has the key
    first: Tensor  # [N] int64: where in `places` a token is for the first time
    again: Tensor  # [K - N] int64: where a token is another time
    shared: Tensor  # [P] int64: the tokens that are there several times, which are those of shared prompts
    of_shared: Tensor  # [K - N] int64: which of `shared` is at `again`


@dataclass
class Batch:
    """B episodes packed into one row of N tokens, and their responses as the [B, T] grid a loss sees (T: longest response).

    A row has S segments: episodes, and where several share a prompt, the prompt and then a segment for each of their responses. Attention
    stays inside [cu_seqlens[i], cu_seqlens[i+1]), but for what `keys` says. `rows[j]` is the position in the row whose next token is
    `targets[j]`, over all response tokens in episode order (M of them); `grid[j]` is that token's place in the flattened [B, T].
    """

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, restart at 0 for each episode
    cu_seqlens: Tensor  # [S + 1] int32
    max_seqlen: int
    rows: Tensor  # [M] int64; ascending where no prompt is shared
    targets: Tensor  # [M] int64
    grid: Tensor  # [M] int64
    shape: tuple[int, int]  # (B, T)
    keys: Keys | None = None  # where a prompt is shared


@dataclass
class LossOutput:
    loss: Tensor  # [B, T] per token, unreduced: who is averaged over whom is decided by the step's token weights
    metrics: dict[str, Tensor] = field(default_factory=dict)  # [B, T] each, detached; reported as means over loss tokens


def plan_rows(lengths: list[int], num_replicas: int, max_tokens: int) -> list[list[list[int]]]:
    """Deal episodes (by index) to replicas and pack each deal into rows of at most `max_tokens`: [replica][row] -> indices.

    Longest first to the least loaded replica, then first-fit-decreasing. Every replica gets the same number of rows, the last
    ones possibly empty: a row is one forward pass, and a forward pass is a collective. A pure function of its arguments.

    >>> plan_rows([3, 5, 2], num_replicas=2, max_tokens=6)
    [[[1]], [[0, 2]]]
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if order and lengths[order[0]] > max_tokens:
        raise ValueError(
            f"training.max_tokens_per_batch={max_tokens} is less than a sequence of {lengths[order[0]]} tokens; "
            f"raise it to at least training.seq_len"
        )
    load = [0] * num_replicas
    plans: list[list[list[int]]] = [[] for _ in range(num_replicas)]
    room: list[list[int]] = [[] for _ in range(num_replicas)]
    for i in order:
        r = load.index(min(load))
        load[r] += lengths[i]
        slot = next((s for s, left in enumerate(room[r]) if left >= lengths[i]), None)
        if slot is None:
            slot = len(plans[r])
            plans[r].append([])
            room[r].append(max_tokens)
        plans[r][slot].append(i)
        room[r][slot] -= lengths[i]
    longest = max(map(len, plans))
    return [rows + [[] for _ in range(longest - len(rows))] for rows in plans]


def packing_efficiency(lengths: list[int], num_replicas: int, max_tokens: int) -> float:
    """Tokens over what the rows of `plan_rows` could hold, empty rows of a replica included. 0 where there are no rows.

    >>> packing_efficiency([3, 5, 2], num_replicas=2, max_tokens=6)
    0.8333333333333334
    """
    rows = sum(map(len, plan_rows(lengths, num_replicas, max_tokens)))
    return sum(lengths) / (rows * max_tokens) if rows else 0.0


# A replica with nothing left to do still runs its forward pass, on one token that follows one token and counts for nothing.
IDLE = Episode(np.zeros(2, np.int64), 1, np.zeros(1, np.float32), np.zeros(1, np.float32))


def of_equal_prompts(episodes: list[Episode]) -> list[list[int]]:
    """The indices of the episodes, those with the same prompt tokens together, in the order of the first of them."""
    found: dict[bytes, list[int]] = {}
    for i, e in enumerate(episodes):
        found.setdefault(np.asarray(e.token_ids[: e.num_prompt_tokens], np.int64).tobytes(), []).append(i)
    return list(found.values())


def row_length(episodes: list[Episode], *, shared_prompts: bool = False) -> int:
    """Tokens of the row that they make."""
    if not shared_prompts:
        return sum(len(e.token_ids) for e in episodes)
    prompts = sum(episodes[first].num_prompt_tokens for first, *_ in of_equal_prompts(episodes))
    return prompts + sum(e.num_response_tokens for e in episodes)


def to_batch(episodes: list[Episode], device: torch.device, length: int | None = None, *, shared_prompts: bool = False) -> Batch:
    """Concatenate episodes into one row. Needs at least one.

    length: tokens of the row, where it may not be as long as it comes; the rest is filled with segments that count for nothing.
    shared_prompts: equal prompts are in the row once.
    """
    groups = of_equal_prompts(episodes) if shared_prompts else [[i] for i in range(len(episodes))]
    row = _Segments()
    rows: list[np.ndarray] = [row.none] * len(episodes)
    for first, *others in groups:
        prompt = episodes[first].num_prompt_tokens
        if not others:
            rows[first] = row.add(episodes[first].token_ids)[prompt - 1 : -1]
            continue
        before = row.add(episodes[first].token_ids[:prompt])
        for i in (first, *others):
            response = row.add(episodes[i].token_ids[prompt:], before)
            rows[i] = np.concatenate([before[-1:], response[:-1]])
    if length is not None:
        longest = max(map(len, row.queries))
        while row.length < length:
            row.add(np.zeros(min(longest, length - row.length), np.int64))
    width = max(e.num_response_tokens for e in episodes)

    def tensor(values: list[np.ndarray], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(np.concatenate(values), dtype=dtype).to(device)

    def ends(parts: list[np.ndarray]) -> Tensor:
        return tensor([np.cumsum([0, *map(len, parts)])], torch.int32)

    keys = None
    if any(others for _, *others in groups):
        places = np.concatenate(row.keys)
        _, once = np.unique(places, return_index=True)
        again = np.delete(np.arange(len(places)), once)
        shared, of_shared = np.unique(places[again], return_inverse=True)
        lists = (tensor([values]) for values in (places, once, again, shared, of_shared))
        keys = Keys(ends(row.keys), max(map(len, row.keys)), *lists)
    return Batch(
        token_ids=tensor(row.tokens),
        positions=tensor(row.positions),
        cu_seqlens=ends(row.queries),
        max_seqlen=max(map(len, row.queries)),
        rows=tensor(rows),
        targets=tensor([e.token_ids[e.num_prompt_tokens :] for e in episodes]),
        grid=tensor([b * width + np.arange(e.num_response_tokens) for b, e in enumerate(episodes)]),
        shape=(len(episodes), width),
        keys=keys,
    )


class _Segments:
    """Of a row that is being made."""

    none = np.zeros(0, np.int64)

    def __init__(self) -> None:
        self.length = 0
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.queries: list[np.ndarray] = []  # a segment's places in the row
        self.keys: list[np.ndarray] = []  # the places of what it sees

    def add(self, tokens: np.ndarray, before: np.ndarray = none) -> np.ndarray:
        """The places of a segment with these tokens, which follow those at the places `before`."""
        here = np.arange(self.length, self.length + len(tokens))
        self.tokens.append(tokens)
        self.positions.append(np.arange(len(before), len(before) + len(tokens)))
        self.queries.append(here)
        self.keys.append(np.concatenate([before, here]))
        self.length += len(tokens)
        return here


def pad(columns: list[np.ndarray], device: torch.device) -> Tensor:
    """One [B, T] float32 grid from a [R] array per episode; 0 where an episode has ended."""
    grid = np.zeros((len(columns), max(map(len, columns))), np.float32)
    for row, values in zip(grid, columns, strict=True):
        row[: len(values)] = values
    return torch.as_tensor(grid).to(device)


def to_episodes(groups: list[Group], *, mask_truncated: bool, old_from_sampler: bool) -> list[Episode]:
    """One episode per completion that has a token; `losses.advantages.credit` gives it its advantages.

    Where its reward is missing, and with mask_truncated where the length limit cut it off, an answer counts in neither numerator nor
    denominator of the loss.
    old_from_sampler: the policy before the update is taken to be the one that sampled, as its log-probs say.
    """
    episodes = []
    for index, group in enumerate(groups):
        missing = [reward is None for reward in group.rewards] or [False] * len(group.completions)
        for sample, completion in enumerate(group.completions):
            length = len(completion.token_ids)
            if not length:
                continue
            counts = not missing[sample] and not (mask_truncated and completion.stop_reason == "length")
            gen = np.array(completion.logprobs, np.float32)
            episodes.append(
                Episode(
                    token_ids=np.array(group.prompt.token_ids + completion.token_ids, np.int64),
                    num_prompt_tokens=len(group.prompt.token_ids),
                    loss_mask=np.full(length, counts, np.float32),
                    advantages=np.zeros(length, np.float32),
                    gen_logprobs=gen,
                    old_logprobs=gen if old_from_sampler else None,
                    group=index,
                    sample=sample,
                    policy_version=completion.policy_version,
                )
            )
    return episodes


def attach(name: str, episodes: list[Episode], values: list[np.ndarray]) -> None:
    """Give every episode its `values` [R] under `name`: "ref_logprobs" or "old_logprobs"."""
    for episode, column in zip(episodes, values, strict=True):
        assert len(column) == episode.num_response_tokens, f"{name}: {len(column)} values for {episode.num_response_tokens} tokens"
        vars(episode)[name] = column


def supervised(prompt: list[int], completion: list[int], seq_len: int) -> Episode:
    """The row as an episode, cut at `seq_len` tokens; every token of the completion that is left is trained on."""
    token_ids = np.array((prompt + completion)[:seq_len], np.int64)
    count = len(token_ids) - len(prompt)
    return Episode(token_ids, len(prompt), np.ones(count, np.float32), np.zeros(count, np.float32))


def from_dictionaries(inputs: dict[str, Tensor], targets: dict[str, Tensor], pad_token_id: int, first_group: int = 0) -> list[Episode]:
    """One micro-batch of `Trainer.train_step` as episodes. ValueError names what does not fit.

    Without `groups` each row answers a prompt of its own, numbered from `first_group`.
    """
    _check_dictionaries(inputs, targets)
    given = {name: tensor.detach().cpu() for name, tensor in (inputs | targets).items()}
    tokens, response, mask = given["tokens"].long(), given["response"].long(), given["padding_mask"].float()
    batch, width = response.shape
    if not torch.equal(tokens[:, -width:][mask.bool()], response[mask.bool()]):
        raise ValueError("train_step: the last T columns of tokens must be the response (left-padded prompt, right-padded response)")
    groups = given["groups"].tolist() if "groups" in given else [first_group + b for b in range(batch)]
    begun = (tokens[:, :-width] != pad_token_id).cumsum(1)
    here = given["attention_mask"][:, :-width].bool() if "attention_mask" in given else begun.bool()
    episodes = []
    for b in range(batch):
        prompt = tokens[b, :-width][here[b]]
        if len(prompt) == 0:
            raise ValueError(f"train_step: row {b} has no prompt token")
        length = max(int(mask[b].nonzero().max()) + 1 if mask[b].any() else 1, 1)

        def column(name: str, row: int = b, length: int = length) -> np.ndarray:
            return given[name][row].expand(width)[:length].float().numpy()

        ids = torch.cat([prompt, response[b, :length]]).numpy()
        episode = Episode(ids, len(prompt), mask[b, :length].numpy(), column("advantages"), group=groups[b])
        for name in LOGPROBS & given.keys():
            attach(name, [episode], [column(name)])
        episodes.append(episode)
    return episodes


LOGPROBS = {"gen_logprobs", "ref_logprobs", "old_logprobs"}
OPTIONAL = LOGPROBS | {"groups"}  # what a target may hold besides what it must


def _check_dictionaries(inputs: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
    needed = {"inputs": {"tokens"}, "targets": {"response", "padding_mask", "advantages"}}
    for what, given, more in (("inputs", inputs, {"attention_mask"}), ("targets", targets, OPTIONAL)):
        for name in sorted(needed[what] ^ given.keys()):
            if name not in more:
                known = ", ".join(sorted(needed[what] | more))
                raise ValueError(f"train_step: {what} {'lack' if name in needed[what] else 'have an unknown'} {name}; their keys: {known}")
    tokens, response = list(inputs["tokens"].shape), list(targets["response"].shape)
    if len(response) != 2 or len(tokens) != 2 or tokens[0] != response[0] or tokens[1] <= response[1]:
        raise ValueError(f"train_step: tokens {tokens} must be [B, P + T] with P >= 1, and response {response} [B, T]")
    allowed = {"attention_mask": [tokens], "advantages": [response, [response[0], 1]], "groups": [[response[0]]]}
    for name, tensor in (inputs | targets).items():
        if list(tensor.shape) not in (shapes := allowed.get(name, [tokens if name == "tokens" else response])):
            raise ValueError(f"train_step: {name} {list(tensor.shape)} must be {' or '.join(map(str, shapes))}")

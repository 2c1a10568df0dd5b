"""Datasets -> examples to train on, in an order that is a pure function of (seed, position): every rank reads alone, and all agree.

As data.PromptStream, with what supervised fine-tuning needs besides: rows of several shapes (formats.py), several datasets at once,
and rows that are longer than a sequence may be.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import islice
from typing import Any, Literal

import numpy as np

from batch import Episode
from conversations import Rendered
from data import JsonFiles, Row, load_rows, permutation
from formats import SFTDataConfig, find_format, render_row

__all__ = ["ExampleStream", "Mixture", "Overlong", "SFTDataConfig"]

log = logging.getLogger(__name__)

Overlong = Literal["truncate", "drop", "split"]
MAX_ROWS = 2**40  # a position is the rows that were taken, and this many times the pieces taken of the next one


class ExampleStream:
    """Examples in run order. A stream made with the `position` of another goes on exactly there, on any number of ranks; `cut` is what
    that one had counted.

    Rows come from the datasets by their weights (`Mixture`); with one dataset the order is data.PromptStream's. Each pass over a
    loaded dataset has its own order, made from the seed, the dataset's place in the list and the pass; streamed rows keep the source's
    order, and going on at position p reads the rows before it again. A dataset that ends starts its next pass at once. `epochs` is the
    number of passes, None for no end: with several datasets the data ends once each was read whole that often.

    overlong: what is done with a sequence of more than `seq_len` tokens. truncate: its first tokens are kept; drop: none is; split: it is
    cut into pieces, each of which begins with the last token of the one before, so that every trained token is trained once, with the
    context that is in its piece.
    """

    def __init__(
        self,
        cfg: SFTDataConfig | list[SFTDataConfig],
        tokenizer: Any,
        *,
        seed: int,
        seq_len: int,
        overlong: Overlong,
        position: int = 0,
        epochs: int | None = None,
        cut: Iterable[tuple[str, int]] = (),
    ):
        cfgs = cfg if isinstance(cfg, list) else [cfg]
        if not cfgs:
            raise ValueError("dataset is an empty list; name at least one dataset")
        self.position = position
        self._seq_len, self._overlong, self._epochs, self._tokenizer = seq_len, overlong, epochs, tokenizer
        self._mixture = Mixture([c.weight for c in cfgs], self.rows)
        placed = zip(cfgs, self._mixture.counts, strict=True)
        self._sources = [Source(c, tokenizer, seed=seed + i, position=taken) for i, (c, taken) in enumerate(placed)]
        self._counts = Counter(dict(cut))
        self._units = self._walk()

    @property
    def rows(self) -> int:
        """Rows taken whole since the start of the run, dropped ones included."""
        return self.position % MAX_ROWS

    @property
    def first_rows(self) -> list[tuple[str, Row]]:
        """Of each dataset its format and its first row."""
        return [(source.format, source.first) for source in self._sources]

    @property
    def epoch(self) -> int:
        """0-based pass that the last row came from; with several datasets, of the one that is least far."""
        return min(source.epoch for source in self._sources)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"position": self.position, "cut": tuple(sorted(self._counts.items()))}

    def take(self, count: int) -> list[Episode]:
        """The examples of the next `count` rows that have any, or pieces of rows; fewer, at last none, only where `epochs` ends the data.

        A row is one example, but for a chat whose template takes several to show every trained turn as the model will see it: these
        stay together. The pieces of a row that was split count one by one.
        """
        episodes: list[Episode] = []
        for unit in islice(self._units, count):
            episodes += unit
        return episodes

    def counts(self) -> dict[str, float]:
        """For the log, since the start of the run: the pass (0-based), the rows taken, and what became of overlong sequences.

        data/truncated and data/split are sequences that were cut, data/dropped those (and rows) of which nothing was left to train on,
        data/untrained the pieces without a trained token, which were left out.
        """
        kinds = ("truncated", "split", "dropped", "untrained")
        return {"data/epoch": self.epoch, "data/rows": self.rows, **{f"data/{kind}": self._counts[kind] for kind in kinds}}

    def steps_in_all(self, count: int) -> int | None:
        """How many times `take(count)` is answered from the run's start to the end of its passes; None where that is not known.

        An upper bound: rows that are dropped make it fewer. Not known of streamed data, nor of rows that may be split.
        """
        sizes = [source.num_rows for source in self._sources]
        if self._epochs is None or self._overlong == "split":
            return None
        rows = 0
        for size, weight in zip(sizes, self._mixture.weights, strict=True):
            if size is None:
                return None
            rows = max(rows, -(-self._epochs * size * self._mixture.total // weight))
        return -(-rows // count)

    def _walk(self) -> Iterator[list[Episode]]:
        """What `take` counts, from `position` on; `position` is behind it by then."""
        skip = self.position // MAX_ROWS
        while self._epochs is None or min(source.passes for source in self._sources) < self._epochs:
            rows, source = self.rows, self._sources[next(self._mixture)]
            place, row = source.take()
            units, counts = self._cut(source, place, row)
            if not skip:
                self._counts += counts
            if not units:
                self.position = rows + 1
            for done, unit in enumerate(units, 1):
                if done > skip:
                    self.position = rows + 1 if done == len(units) else rows + done * MAX_ROWS
                    yield unit
            source.used(place, bool(units), self._seq_len)
            skip = 0

    def _cut(self, source: "Source", place: int, row: Row) -> tuple[list[list[Episode]], Counter[str]]:
        """The row's examples, as `take` counts them, and what was done to fit them."""
        pieces: list[list[Episode]] = []
        counts: Counter[str] = Counter()
        rendered, is_split = source.render(place, row), False
        for sequence in rendered:
            length = len(sequence.token_ids)
            fits = length <= self._seq_len
            if fits or self._overlong == "truncate":
                parts = [(0, self._seq_len)]
            else:
                parts = [] if self._overlong == "drop" else spans(length, self._seq_len)
            found = [episode for part in parts if (episode := to_episode(sequence, *part)) is not None]
            pieces += [[episode] for episode in found]
            if not found:
                counts["dropped"] += 1
                self._tell_first("dropped", source, place, length)
            elif not fits:
                kind = "split" if self._overlong == "split" else "truncated"
                counts[kind] += 1
                counts["untrained"] += len(parts) - len(found)
                is_split = is_split or kind == "split"
                self._tell_first(kind, source, place, length)
        if not rendered:
            counts["dropped"] += 1
            self._tell_first("dropped", source, place, 0)
        return (pieces if is_split or not pieces else [[e for piece in pieces for e in piece]]), counts

    def _tell_first(self, kind: str, source: "Source", place: int, length: int) -> None:
        if not self._counts[kind]:
            log.warning(
                "%s: row %d of %s, which has %d tokens, and maybe others; training.seq_len=%d is the limit, and dataset.train_on says what "
                "is trained; the log counts them as data/%s", kind, place, source.cfg.path, length, self._seq_len, kind,
            )  # fmt: skip


class Source:
    """One dataset of the mixture: its rows from `position` on, pass after pass without end, and how they are read."""

    def __init__(self, cfg: SFTDataConfig, tokenizer: Any, *, seed: int, position: int):
        self.cfg, self._tokenizer, self._seed = cfg, tokenizer, seed
        self._rows = load_rows(cfg)
        self.num_rows = None if cfg.streaming else len(self._rows)
        self._has_columns = not isinstance(self._rows, list | JsonFiles)
        if (first := next(iter(self._rows), None)) is None:
            raise ValueError(f"dataset.path={cfg.path} has no rows")
        self.first: Row = first
        try:
            self.format = find_format(cfg, first)
        except ValueError as error:
            raise ValueError(f"row 0 of dataset.path={cfg.path}: {error}") from error
        self.render(0, first)  # a wrong column or template stops the run before a model is loaded
        self._walk = self._ordered(position)
        self._next: tuple[int, int, int, Row] | None = None
        self._unused = 0  # rows without an example since the last one with any

    def render(self, place: int, row: Row) -> list[Rendered]:
        if self._has_columns:
            row = {column: without_nulls(value) for column, value in row.items()}
        try:
            return render_row(self.cfg, self.format, self._tokenizer, row)
        except ValueError as error:
            raise ValueError(f"row {place} of dataset.path={self.cfg.path}: {error}") from error

    @property
    def passes(self) -> int:
        """Whole passes that lie before the next row."""
        return self._upcoming()[0]

    @property
    def epoch(self) -> int:
        """0-based pass of the last row that was taken, 0 before any."""
        epoch, index, _, _ = self._upcoming()
        return max(epoch - 1, 0) if index == 0 else epoch

    def take(self) -> tuple[int, Row]:
        """The next row, and its place in the source."""
        _, _, place, row = self._upcoming()
        self._next = None
        return place, row

    def used(self, place: int, has_examples: bool, seq_len: int) -> None:
        """Must be told of every row that was taken, before the next one is. ValueError after a whole pass without an example."""
        self._unused = 0 if has_examples else self._unused + 1
        size = self.num_rows or place + 1
        if self._unused >= size and self._upcoming()[1] == 0:
            raise ValueError(
                f"dataset.path={self.cfg.path}: not one of its {size} rows has anything to train on within {seq_len} tokens, with "
                f"train_on={self.cfg.train_on} and format={self.format}; raise training.seq_len, or change these keys"
            )

    def _upcoming(self) -> tuple[int, int, int, Row]:
        """(pass, index in the pass, place in the source, row). One row is read ahead, so that the end of a pass is known at once."""
        if self._next is None:
            self._next = next(self._walk)
        return self._next

    def _ordered(self, position: int) -> Iterator[tuple[int, int, int, Row]]:
        epoch, skip = divmod(position, self.num_rows) if self.num_rows else (0, position)
        while True:
            if self.num_rows is not None:
                size = self.num_rows
                for index, place in enumerate(permutation(self._seed, epoch, size)[skip:].tolist(), skip):
                    yield epoch, index, place, self._rows[place]
            else:
                size = 0
                for size, row in enumerate(self._rows, 1):
                    if size > skip:
                        yield epoch, size - 1, size - 1, row
                if size == 0:
                    raise ValueError(f"dataset.path={self.cfg.path} has no rows any more")
            epoch, skip = epoch + 1, max(skip - size, 0)


def without_nulls(value: Any) -> Any:
    """Without the keys that are null: a file with columns gives every object, an argument of a call say, the keys that others have."""
    if isinstance(value, dict):
        return {key: without_nulls(v) for key, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


class Mixture:
    """Which dataset each row comes from, without end: after n rows no dataset is a whole row away from its share of n.

    A function of the weights and the position alone. By the quota method of Balinski and Young (1975): of those whose count is
    below their share, the one whose next row is due first.

    >>> mixture = Mixture([2, 1, 1], position=0)
    >>> [next(mixture) for _ in range(8)]
    [0, 1, 0, 2, 0, 1, 0, 2]
    """

    def __init__(self, weights: list[float], position: int):
        fractions = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(f.denominator for f in fractions))
        numbers = [int(f * scale) for f in fractions]
        self.weights = [n // math.gcd(*numbers) for n in numbers]
        self.total = sum(self.weights)  # rows after which the pattern repeats
        whole, rest = divmod(position, self.total)
        self.counts = [0] * len(weights)  # rows of each dataset so far
        for _ in range(rest):
            next(self)
        self.counts = [count + whole * weight for count, weight in zip(self.counts, self.weights, strict=True)]

    def __iter__(self) -> "Mixture":
        return self

    def __next__(self) -> int:
        n = sum(self.counts) + 1
        behind = [i for i, (count, weight) in enumerate(zip(self.counts, self.weights, strict=True)) if count * self.total < weight * n]
        chosen = min(behind, key=lambda i: -(-(self.counts[i] + 1) * self.total // self.weights[i]))
        self.counts[chosen] += 1
        return chosen


def spans(length: int, seq_len: int) -> list[tuple[int, int]]:
    """Cuts of a sequence into pieces of at most `seq_len` tokens, each of which begins with the last token of the one before.

    >>> spans(10, seq_len=4)
    [(0, 4), (3, 7), (6, 10)]
    """
    return [(start, min(start + seq_len, length)) for start in range(0, max(length - 1, 1), seq_len - 1)]


def to_episode(sequence: Rendered, start: int, end: int) -> Episode | None:
    """Its tokens from `start` to `end`; None where none of them is trained. The first follows nothing and cannot be."""
    token_ids, trained = sequence.token_ids[start:end], sequence.trained[start:end]
    first = np.flatnonzero(trained[1:])
    if len(first) == 0:
        return None
    num_prompt_tokens = int(first[0]) + 1
    mask = trained[num_prompt_tokens:].astype(np.float32)
    return Episode(np.asarray(token_ids, np.int64), num_prompt_tokens, mask, np.zeros(len(mask), np.float32))

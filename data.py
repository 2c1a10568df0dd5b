"""Datasets -> prompts, in an order that is a pure function of (seed, position): every rank reads alone, and all agree.

GRPO samples answers to `Prompt.token_ids` and scores them against `Prompt.target`; SFT trains on
`encode_completion(tokenizer, prompt.target)` after the same token ids. Both see one encoding of a prompt, with one BOS.
"""

import hashlib
import json
import logging
import re
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batch import Prompt

log = logging.getLogger(__name__)

Row = dict[str, Any]
PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "messages")
TARGET_COLUMNS = ("answer", "target", "solution", "label")
SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")
BOM = b"\xef\xbb\xbf"


@dataclass(kw_only=True)
class DatasetConfig:
    path: str  # a .json, .jsonl, .parquet or .csv file, a folder of them, or a dataset's name on the Hugging Face Hub
    name: str | None = None  # configuration of a hub dataset; null: its only one, else `main` or `default`
    # split of a hub dataset, or the word in the names of a folder's files; a single file has no splits
    split: str = "train"
    # true: read rows in the source's own order, as they are needed; false: load all and shuffle every pass
    streaming: bool = False
    revision: str | None = None  # branch, tag or commit of a hub dataset; null: its main branch
    # column, or template with {column} fields; null: the first of prompt, question, problem, instruction, messages
    prompt: str | None = None
    system: str | None = None  # system message in front of every prompt, in place of the row's own; null: none
    # column with the expected answer; null: the first of answer, target, solution, label, or none
    target: str | None = None
    # the target is the first group of its last match; null: what follows the last ####, or all of the text
    target_regex: str | None = None


class PromptStream:
    """Prompts in run order. `position` is the whole state: a stream made with it goes on exactly there.

    Each pass over loaded rows has its own order, made from (seed, pass). Streamed rows keep the source's order, pass
    after pass; going on at position p reads p rows again. `epochs` is the number of passes, None for no end. `target`
    turns the text of the target column into `Prompt.target` unless dataset.target_regex does: `final_answer` by
    default; SFT passes `str` to keep the text whole.
    """

    def __init__(
        self,
        cfg: DatasetConfig,
        tokenizer: Any,
        *,
        seed: int,
        max_prompt_tokens: int,
        position: int = 0,
        epochs: int | None = None,
        target: Callable[[str], str] | None = None,
    ):
        self.position = position  # dataset rows consumed since the start of the run, dropped ones included
        self.epoch = 0  # 0-based pass that the last row came from; known after the first `take` when streaming
        self.dropped = 0  # prompts that were over the limit, since this stream was made
        self._cfg, self._tokenizer, self._seed, self._epochs = cfg, tokenizer, seed, epochs
        self._max_prompt_tokens = max_prompt_tokens
        self._read_target = target or final_answer
        if cfg.target_regex is not None:
            self._read_target = last_match(cfg.target_regex)
        self._source = load_rows(cfg)
        self.num_rows = None if cfg.streaming else len(self._source)  # rows in a pass; None: streaming, not known
        self._dropped_in_a_row, self._shortest = 0, 0
        if self.num_rows is not None:
            if self.num_rows == 0:
                raise ValueError(f"dataset.path={cfg.path} has no rows")
            self.epoch = max(position - 1, 0) // self.num_rows
            self._prompt(0, 0, self._source[0])  # a wrong column or template stops the run before a model is loaded
        self._rows = self._walk()

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts that fit the limit; fewer, at last none, only where `epochs` ends the data."""
        prompts: list[Prompt] = []
        while len(prompts) < count and (item := next(self._rows, None)) is not None:
            self.epoch, place, row = item
            prompt = self._prompt(self.position, place, row)
            self.position += 1
            if len(prompt.token_ids) <= self._max_prompt_tokens:
                self._dropped_in_a_row = 0
                prompts.append(prompt)
            else:
                self._drop(len(prompt.token_ids), place)
        return prompts

    def counts(self) -> dict[str, float]:
        """For the log: the pass (0-based), the rows taken, and the prompts dropped because they were too long."""
        return {"data/epoch": self.epoch, "data/rows": self.position, "data/dropped": self.dropped}

    def steps_in_all(self, count: int) -> int | None:
        """How many times `take(count)` is answered from the run's start to the end of its passes; None where that is not known.

        An upper bound: prompts that are dropped make it fewer.
        """
        if self._epochs is None or self.num_rows is None:
            return None
        return -(-self._epochs * self.num_rows // count)

    def _walk(self) -> Iterator[tuple[int, int, Row]]:
        """(pass, place in the source, row) from `position` on."""
        epoch, skip = divmod(self.position, self.num_rows) if self.num_rows else (0, self.position)
        while self._epochs is None or epoch < self._epochs:
            size = 0
            if self.num_rows is not None:
                size = self.num_rows
                for place in permutation(self._seed, epoch, size)[skip:].tolist():
                    yield epoch, place, self._source[place]
            else:
                for size, row in enumerate(self._source, 1):
                    if size > skip:
                        yield epoch, size - 1, row
            if size == 0:
                raise ValueError(f"dataset.path={self._cfg.path} has no rows")
            if self._dropped_in_a_row >= size:
                raise ValueError(
                    f"no prompt of dataset.path={self._cfg.path} fits: the limit is {self._max_prompt_tokens} tokens "
                    f"and the shortest of {size} prompts has {self._shortest}; raise training.seq_len"
                )
            if self.dropped:
                log.warning("%d prompts of %s were over %d tokens so far", self.dropped, self._cfg.path, self._max_prompt_tokens)
            epoch, skip = epoch + 1, max(skip - size, 0)

    def _drop(self, num_tokens: int, place: int) -> None:
        self._shortest = min(num_tokens, self._shortest) if self._dropped_in_a_row else num_tokens
        self._dropped_in_a_row += 1
        self.dropped += 1
        if self.dropped == 1:
            log.warning(
                "dropping prompts of more than %d tokens: row %d of %s has %d; training.seq_len sets the limit",
                self._max_prompt_tokens,
                place,
                self._cfg.path,
                num_tokens,
            )

    def _prompt(self, index: int, place: int, row: Row) -> Prompt:
        cfg = self._cfg
        try:
            messages, reply = read_messages(cfg, row)
            column = find_column(row, cfg.target, TARGET_COLUMNS, "dataset.target")
            if column is not None and row[column] is None:
                raise ValueError(f"its {column} is null")
            target = self._read_target(reply if column is None else str(row[column]))
            token_ids = encode_prompt(self._tokenizer, messages)
        except ValueError as error:
            raise ValueError(f"row {place} of dataset.path={cfg.path}: {error}") from error
        return Prompt(index=index, token_ids=token_ids, text=messages[-1]["content"], target=target, row=row)


def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """The order of one pass, [size]. RandomState, because its numbers are promised never to change."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, "<u4")).permutation(size)


# Rows


class JsonFiles:
    """The rows of JSON and JSONL files, read again by each iteration; a bad line is an error with file and number."""

    def __init__(self, paths: list[Path]):
        self.paths = paths

    def __iter__(self) -> Iterator[Row]:
        for path in self.paths:
            with path.open("rb") as file:
                is_array = path.suffix == ".json" and file.read(4096).removeprefix(BOM).lstrip()[:1] == b"["
                file.seek(0)
                yield from read_array(path, file.read()) if is_array else read_lines(path, file)


def read_lines(path: Path, lines: Iterable[bytes]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield check_object(parse(line, f"{path}, line {number}"), f"{path}, line {number}")


def read_array(path: Path, text: bytes) -> Iterator[Row]:
    for number, item in enumerate(parse(text, str(path)), 1):
        yield check_object(item, f"{path}, item {number}")


def parse(text: bytes, where: str) -> Any:
    try:
        value = json.loads(text.decode("utf-8-sig"))
        if b"\\ud" in text or b"\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no character, and no tokenizer reads it
        return value
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{where}: not JSON ({error}): {shorten(text.decode(errors='replace').strip())}") from error


def check_object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f'{where}: expected an object such as {{"question": ...}}, found {shorten(row)}')
    return row


def shorten(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def load_rows(cfg: DatasetConfig) -> Any:
    """Rows as dicts: a sequence, or with dataset.streaming an iterable that every pass reads again."""
    path = Path(cfg.path).expanduser()
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = files_of_split(cfg, sorted(f for f in path.iterdir() if f.suffix in SUFFIXES))
    elif path.suffix in SUFFIXES or cfg.path.startswith(("/", ".", "~")):
        raise ValueError(f"dataset.path={cfg.path}: there is no such file or folder")
    else:
        files = []
    suffixes = {f.suffix for f in files}
    if not files:
        return load_by_name(cfg, str(path) if path.is_dir() else cfg.path)
    if suffixes <= {".json", ".jsonl"}:
        rows = JsonFiles(files)
        return rows if cfg.streaming else list(rows)
    if len(suffixes) > 1 or not suffixes <= set(SUFFIXES):
        raise ValueError(f"dataset.path={cfg.path}: cannot read {sorted(suffixes)} files; use one of {SUFFIXES}")
    return through_datasets(cfg, suffixes.pop()[1:], data_files=[str(f) for f in files], split="train")


def files_of_split(cfg: DatasetConfig, files: list[Path]) -> list[Path]:
    """Those with the split as a word in their names (train.jsonl, train-00000.parquet), or all where none has one."""
    words = {f: set(re.split(r"[^a-z]+", f.stem.lower())) for f in files}
    if not any(w & {"train", "test", "validation", "valid", "dev"} for w in words.values()) and cfg.split == "train":
        return files
    chosen = [f for f in files if cfg.split.lower() in words[f]]
    if files and not chosen:
        raise ValueError(f"dataset.split={cfg.split} is in no file name of {cfg.path}: {[f.name for f in files]}")
    return chosen


def load_by_name(cfg: DatasetConfig, path: str) -> Any:
    """A dataset of the hub, or of a downloaded copy with the hub's layout."""
    name = cfg.name
    if name is None:
        import datasets

        names = through_datasets(cfg, path, load=datasets.get_dataset_config_names, revision=cfg.revision)
        if len(names) > 1:
            name = next((n for n in ("main", "default") if n in names), None)
            if name is None:
                raise ValueError(f"dataset.path={cfg.path}: set dataset.name to one of its configurations {names}")
            log.info("dataset.path=%s has the configurations %s; taking dataset.name=%s", cfg.path, names, name)
    return through_datasets(cfg, path, name=name, split=cfg.split, revision=cfg.revision)


def through_datasets(cfg: DatasetConfig, path: str, load: Callable | None = None, **options: Any) -> Any:
    import datasets  # slow to import, and not needed for JSON

    if load is None:
        load, options = datasets.load_dataset, {**options, "streaming": cfg.streaming}
    try:
        return load(path, **options)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"dataset.path={cfg.path} (name={cfg.name}, split={cfg.split}, revision={cfg.revision}) cannot be loaded: "
            f"{error}. Check these keys; without a network set dataset.path to a local file ({', '.join(SUFFIXES)}) "
            f"or HF_HOME to a cache that holds the dataset"
        ) from error


# Prompts


def read_messages(cfg: DatasetConfig, row: Row) -> tuple[list[dict[str, str]], str]:
    """The chat up to its last user message, and the assistant's reply to that ("" where there is none)."""
    reply = ""
    if cfg.prompt is not None and "{" in cfg.prompt:
        messages = [{"role": "user", "content": fill(cfg.prompt, row)}]
    else:
        column = find_column(row, cfg.prompt, PROMPT_COLUMNS, "dataset.prompt")
        if column is None:
            raise ValueError(
                f"no usual prompt column; set dataset.prompt to one of {sorted(row)} or a template of them"
            )
        value = row[column]
        if value is None:
            raise ValueError(f"its {column} is null")
        messages = value if isinstance(value, list) else [{"role": "user", "content": str(value)}]
        if not all(isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in messages):
            raise ValueError(f"its {column} is a list, but not one of messages with a role and a content that is text")
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
        if last is None:
            raise ValueError(f"its {column} has no user message")
        after = messages[last + 1 : last + 2]
        reply = after[0]["content"] if after and after[0]["role"] == "assistant" else ""
        messages = [{"role": m["role"], "content": m["content"]} for m in messages[: last + 1]]
    if cfg.system is not None:
        messages = [{"role": "system", "content": cfg.system}, *(m for m in messages if m["role"] != "system")]
    return messages, reply


def find_column(row: Row, wanted: str | None, usual: tuple[str, ...], key: str) -> str | None:
    if wanted is None:
        return next((c for c in usual if c in row), None)
    if wanted not in row:
        raise ValueError(f"{key}={wanted} is not a column; there are {sorted(row)}")
    return wanted


def fill(template: str, row: Row) -> str:
    """The template with {column} replaced; nothing but a column's name is allowed between braces."""
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"dataset.prompt={template!r}: {error}; write {{{{ and }}}} for braces") from error
    text = ""
    for literal, field, spec, conversion in pieces:
        text += literal
        if field is None:
            continue
        if field not in row or spec or conversion:
            raise ValueError(
                f"dataset.prompt={template!r}: {{{field}}} is not a column; there are {sorted(row)}; "
                f"write {{{{ and }}}} for braces"
            )
        text += str(row[field])
    return text


def encode_prompt(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids that the model answers to: a chat template's own output, unchanged, for the template decides about BOS.

    Without a template the messages are lines, begun as the tokenizer begins a text: no second BOS, no EOS behind.
    """
    if tokenizer.chat_template is not None:
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return list(tokenizer.apply_chat_template(messages, **options))
    return encode_text(tokenizer, "\n".join(m["content"] for m in messages))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that begins as the tokenizer begins one, with one BOS at most, and has no EOS behind."""
    token_ids = list(tokenizer(text).input_ids)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and token_ids[:2] == [bos, bos]:
        token_ids = token_ids[1:]
    if eos is not None and token_ids[-1:] == [eos] and (token_ids[-2:] == [eos, eos] or not text.endswith(tokenizer.eos_token)):
        token_ids = token_ids[:-1]
    if not token_ids:
        raise ValueError("its prompt is empty: not one token")
    return token_ids


def encode_completion(tokenizer: Any, text: str) -> list[int]:
    """What the model should say after a prompt: no special tokens in front, EOS once at the end."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token: a model trained without one never stops")
    token_ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    return token_ids if token_ids[-1:] == [tokenizer.eos_token_id] else [*token_ids, tokenizer.eos_token_id]


# Targets


def final_answer(text: str) -> str:
    """What follows the last ####, as GSM8K writes answers, without thousands commas; where there is none, the text.

    >>> final_answer("He has 2 * 617 = 1,234. #### 1,234")
    '1234'
    """
    _, mark, tail = text.rpartition("####")
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", tail.strip()) if mark else text.strip()


def last_match(pattern: str) -> Callable[[str], str]:
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"dataset.target_regex={pattern!r} is not a regular expression: {error}") from error
    if regex.groups == 0:
        raise ValueError(f"dataset.target_regex={pattern!r} has no group: put the answer's part in parentheses")

    def read(text: str) -> str:
        matches = list(regex.finditer(text))
        if not matches or matches[-1][1] is None:
            raise ValueError(f"dataset.target_regex={pattern!r} does not match its target {shorten(text)!r}")
        return matches[-1][1]

    return read

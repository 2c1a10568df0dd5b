"""Rows of a dataset -> token ids and which of them are trained, in the four shapes that data for supervised fine-tuning has.

docs/sft.md shows what is trained in each. A chat's tokens are made by conversations.py; a prompt and its completion are encoded as
data.py does it for GRPO, so that a model is asked at its training as it was asked here.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from conversations import Chat, Rendered, render, render_pair, render_text
from data import (
    PROMPT_COLUMNS,
    TARGET_COLUMNS,
    DatasetConfig,
    Row,
    encode_completion,
    encode_prompt,
    find_column,
    last_match,
    read_messages,
)

COMPLETION_COLUMNS = ("completion", *TARGET_COLUMNS, "response")
COLUMNS = {  # format -> the names that its columns have, or get by dataset.columns
    "messages": ("messages", "tools"),
    "alpaca": ("instruction", "input", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool"}
HOW = (
    "messages (a column messages or conversations), alpaca (instruction, output and perhaps input), prompt_completion (one of "
    f"{', '.join(PROMPT_COLUMNS)} and one of {', '.join(COMPLETION_COLUMNS)}), text (text). Set dataset.format to one of them and, where "
    "columns have other names, dataset.columns, as in {messages: chat}, or dataset.prompt and dataset.target"
)


@dataclass(kw_only=True)
class SFTDataConfig(DatasetConfig):
    # of the rows; auto: told by the columns of the first one
    format: Literal["auto", "messages", "alpaca", "prompt_completion", "text"] = "auto"
    # where columns have other names, such as {messages: chat}: messages, tools; instruction, input, output; prompt, completion; or text
    columns: dict[str, str] = field(default_factory=dict)
    # every assistant turn, the last one, or all tokens; a text is always trained whole
    train_on: Literal["assistant", "last", "all"] = "assistant"
    weight: float = 1.0  # rows taken of this dataset, relative to the weights of the others

    def check(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight={self.weight}: must be above 0; leave out a dataset that is not wanted")
        known = [name for names in COLUMNS.values() for name in names]
        for name in self.columns:
            if name not in known:
                raise ValueError(f"columns has {name}, which no format reads; names: {', '.join(known)}")
        formats = {form for form, names in COLUMNS.items() if set(names) & self.columns.keys()} | ({self.format} - {"auto"})
        if len(formats) > 1:
            told = ", ".join(sorted(formats))
            raise ValueError(f"columns={self.columns} and format={self.format} are of several formats ({told}); keep one")
        given = [key for key in ("prompt", "target", "target_regex") if vars(self)[key] is not None]
        if given and not formats <= {"prompt_completion"}:
            raise ValueError(f"{given[0]} is read with format=prompt_completion only, not with {formats.pop()}; remove it or use columns")
        for name, key in (("prompt", "prompt"), ("completion", "target")):
            if name in self.columns and key in given:
                raise ValueError(f"columns.{name} and {key} say the same; keep one")
        if self.format == "text" and self.system is not None:
            raise ValueError("system has no place in format=text; remove it")


def find_format(cfg: SFTDataConfig, row: Row) -> str:
    """What `cfg` says, else what the row's columns say. ValueError where they say nothing, or more than one thing.

    A column `text` counts only where nothing else does: it is often the row's other columns once more.
    """
    if cfg.format != "auto":
        return cfg.format
    if cfg.columns:
        return next(form for form, names in COLUMNS.items() if next(iter(cfg.columns)) in names)
    if (cfg.prompt, cfg.target, cfg.target_regex) != (None, None, None):
        return "prompt_completion"
    columns = row.keys()
    fits = {
        "messages": not columns.isdisjoint(("messages", "conversations")),
        "alpaca": {"instruction", "output"} <= columns,
        "prompt_completion": not columns.isdisjoint(PROMPT_COLUMNS) and not columns.isdisjoint(COMPLETION_COLUMNS),
    }
    found = [form for form, here in fits.items() if here] or ["text"] * ("text" in columns)
    if len(found) != 1:
        told = f"could be of the formats {' and '.join(found)}" if found else "are of no format"
        raise ValueError(f"its columns {sorted(row)} {told}. Formats: {HOW}")
    return found[0]


def render_row(cfg: SFTDataConfig, form: str, tokenizer: Any, row: Row) -> list[Rendered]:
    """The row's token sequences; [] where it has nothing to train on. ValueError where it is not of the format."""
    return READERS[form](cfg, tokenizer, row)


def _messages(cfg: SFTDataConfig, tokenizer: Any, row: Row) -> list[Rendered]:
    name = "conversations" if "conversations" in row and "messages" not in {*cfg.columns, *row} else "messages"
    value = _value(cfg, row, name)
    if not isinstance(value, list):
        raise ValueError(f"its {name} is no list of messages but {value!r:.60}; set dataset.columns or dataset.format")
    messages = [_message(m, name) for m in value]
    tools = _value(cfg, row, "tools") if "tools" in cfg.columns or row.get("tools") is not None else None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise ValueError(f"its tools is text, but not JSON ({error})") from error
    return _chat(cfg, tokenizer, messages, tools)


def _message(message: Any, column: str) -> dict[str, Any]:
    """With role and content. Keys that are null are left out: files with columns fill in what other rows have."""
    if not isinstance(message, dict):
        raise ValueError(f"its {column} is a list, but not one of messages with a role and a content: it has {message!r:.60}")
    message = {key: value for key, value in message.items() if value is not None}
    if "role" not in message and "from" in message:
        if message["from"] not in SHAREGPT:
            raise ValueError(f"its {column} has a message from {message['from']!r}; known are {', '.join(SHAREGPT)}")
        rest = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = rest | {"role": SHAREGPT[message["from"]]} | ({"content": message["value"]} if "value" in message else {})
    if message.get("tool_calls"):
        message = {"content": ""} | message
    if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        raise ValueError(f"its {column} has a message without a role and a content that is text: {message!r:.80}; repair or remove the row")
    return message


def _chat(cfg: SFTDataConfig, tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict] | None = None) -> list[Rendered]:
    if cfg.system is not None and messages:
        messages = [{"role": "system", "content": cfg.system}, *(m for m in messages if m["role"] != "system")]
    answered = any(m["role"] == "assistant" for m in messages)
    if not messages or not (answered or cfg.train_on == "all"):
        return []
    return render(tokenizer, Chat(messages, tools or None), cfg.train_on)


def _alpaca(cfg: SFTDataConfig, tokenizer: Any, row: Row) -> list[Rendered]:
    """A chat of two turns; without a chat template paragraphs, of which the output is the last."""
    instruction, output = _text_of(cfg, row, "instruction"), _text_of(cfg, row, "output")
    is_there = ("input" in cfg.columns or "input" in row) and _value(cfg, row, "input") not in (None, "")
    question = f"{instruction}\n\n{_text_of(cfg, row, 'input')}" if is_there else instruction
    if tokenizer.chat_template is not None:
        return _chat(cfg, tokenizer, [{"role": "user", "content": question}, {"role": "assistant", "content": output}])
    system = [] if cfg.system is None else [cfg.system]
    pair = render_pair(tokenizer, "".join(f"{part}\n\n" for part in (*system, question)), output.strip())
    return [_all_of(pair) if cfg.train_on == "all" else pair]


def _prompt_completion(cfg: SFTDataConfig, tokenizer: Any, row: Row) -> list[Rendered]:
    """What the model answers to in GRPO, then the completion; without a chat template EOS ends it."""
    row = row | {name: _value(cfg, row, name) for name in cfg.columns}
    messages, reply = read_messages(cfg, row)
    column = find_column(row, cfg.target, COMPLETION_COLUMNS, "dataset.target")
    if column is None and not reply:
        raise ValueError(f"no usual completion column; set dataset.target to one of {sorted(row)}")
    value = reply if column is None else row[column]
    if value is None or isinstance(value, list | dict):
        raise ValueError(f"its {column} is {'null' if value is None else 'no text'}; set dataset.target, or dataset.format if it is a chat")
    read = str.strip if cfg.target_regex is None else last_match(cfg.target_regex)
    answer = read(str(value))
    if tokenizer.chat_template is not None:
        chat = Chat([*messages, {"role": "assistant", "content": answer}])
        return render(tokenizer, chat, "all" if cfg.train_on == "all" else "last")
    prompt, completion = encode_prompt(tokenizer, messages), encode_completion(tokenizer, answer)
    trained = np.arange(len(prompt) + len(completion)) >= len(prompt)
    pair = Rendered(np.array(prompt + completion, np.int64), trained)
    return [_all_of(pair) if cfg.train_on == "all" else pair]


def _text(cfg: SFTDataConfig, tokenizer: Any, row: Row) -> list[Rendered]:
    if cfg.system is not None:
        raise ValueError("it is plain text, in which dataset.system has no place; remove the key, or set dataset.format")
    text = _text_of(cfg, row, "text")
    return [render_text(tokenizer, text)] if text.strip() else []


def _all_of(pair: Rendered) -> Rendered:
    return Rendered(pair.token_ids, np.arange(len(pair.trained)) > 0)


def _value(cfg: SFTDataConfig, row: Row, name: str) -> Any:
    column = cfg.columns.get(name, name)
    if column not in row:
        raise ValueError(f"it has no column {column}; set dataset.columns.{name} to one of {sorted(row)}, or dataset.format")
    return row[column]


def _text_of(cfg: SFTDataConfig, row: Row, name: str) -> str:
    value = _value(cfg, row, name)
    if not isinstance(value, str):
        told = "null" if value is None else f"no text but {value!r:.60}"
        raise ValueError(f"its {cfg.columns.get(name, name)} is {told}; repair or remove the row, or set dataset.columns.{name}")
    return value


READERS: dict[str, Callable[[SFTDataConfig, Any, Row], list[Rendered]]] = {
    "messages": _messages, "alpaca": _alpaca, "prompt_completion": _prompt_completion, "text": _text,
}  # fmt: skip

"""Chats to token ids and to the mask of what is trained, exact to the token: the tokens are the chat template's own, tokenized once.

A trained turn begins where the prompt ends that generation would be given, and ends with its end-of-turn token. Neither is found
by looking for words: both come from renders of the template, of the messages before the turn and of those up to it. docs/sft.md
shows the masks.
"""

import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import jinja2
import numpy as np
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from data import encode_completion, encode_text

TrainOn = Literal["assistant", "last", "all"]
MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class Chat:
    """Messages with a role, a content and whatever else the template reads (tool_calls, reasoning_content); None is absent."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None  # JSON schemas of the functions that the assistant may call


@dataclass(frozen=True)
class Rendered:
    token_ids: np.ndarray  # [L] int64
    trained: np.ndarray  # [L] bool; never the first token, which nothing precedes


@dataclass(frozen=True)
class _Turn:
    """An assistant's turn in the template's render of the chat up to it."""

    name: str
    text: str  # the render, the turn at its end
    start: int  # where the prompt ends that is answered, in characters
    spans: list[tuple[int, int]]  # characters to train, before the turn's end-of-turn token


def render(tokenizer: Any, chat: Chat, train_on: TrainOn) -> list[Rendered]:
    """The examples that teach a chat: one where its render only grows from turn to turn, else one for each state of it.

    train_on: "assistant", every turn of the assistant, its end-of-turn token included; "last", the last of them; "all", all tokens
    but the first. Messages after the last trained turn are left off. A template that rewrites earlier turns (Qwen3 drops their
    thoughts) gives a turn an example of its own, with the earlier messages as the model sees them when it answers. A token that
    begins in the prompt counts as the prompt's.
    """
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template: set its chat_template, or give the row as a prompt and a completion")
    if train_on == "all":
        token_ids = _tokenize(tokenizer, _render_text(tokenizer, chat, len(chat.messages)))[0]
        return [_rendered(token_ids, np.ones(len(token_ids), bool))]
    places = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if not places:
        raise ValueError("the chat has no assistant message: there is nothing to train on; drop the row or set train_on: all")
    examples: list[list[_Turn]] = []
    for place in reversed(places[-1:] if train_on == "last" else places):
        turn = _turn(tokenizer, chat, place)
        if examples and examples[-1][0].text.startswith(turn.text):
            examples[-1].append(turn)
        else:
            examples.append([turn])
    return [_mask(tokenizer, turns) for turns in reversed(examples)]


def render_text(tokenizer: Any, text: str) -> Rendered:
    """Plain text, begun as the tokenizer begins one, with one BOS at most and EOS once at the end; all but the first token trained."""
    if not text.strip():
        raise ValueError("its text is empty")
    token_ids = encode_text(tokenizer, text)
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token: a model trained without one never stops")
    if token_ids[-1] != tokenizer.eos_token_id:
        token_ids.append(tokenizer.eos_token_id)
    return _rendered(token_ids, np.ones(len(token_ids), bool))


def render_pair(tokenizer: Any, prompt: str, completion: str) -> Rendered:
    """A prompt as the tokenizer begins a text, and a completion with EOS once at its end, which is trained. No chat template.

    They are tokenized apart, for that is what they are at inference.
    """
    before, after = encode_text(tokenizer, prompt), encode_completion(tokenizer, completion)
    return _rendered(before + after, np.arange(len(before) + len(after)) >= len(before))


def coloured(tokenizer: Any, rendered: Rendered) -> str:
    """The text of the tokens, the trained ones green on a terminal and in ⟦brackets⟧ elsewhere."""
    return marked(tokenizer, rendered, *(("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("⟦", "⟧")))


def marked(tokenizer: Any, rendered: Rendered, opening: str, closing: str) -> str:
    """The text of the tokens with `opening` and `closing` around each run of trained ones; a newline shows as ⏎ and begins a line."""
    edges = [0, *(np.flatnonzero(np.diff(rendered.trained)) + 1).tolist(), len(rendered.token_ids)]
    text, shown = "", 0  # decoded from the start each time: a run decoded alone may lose its leading space
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        whole = tokenizer.decode(rendered.token_ids[:end].tolist(), clean_up_tokenization_spaces=False)
        run = whole[shown:].replace("\n", "⏎\n")
        text, shown = text + (f"{opening}{run}{closing}" if rendered.trained[start] else run), len(whole)
    return text


# Turns


def _turn(tokenizer: Any, chat: Chat, place: int) -> _Turn:
    name = f"message {place} (assistant)"
    if place == 0:
        raise ValueError(f"{name} answers nothing: begin the chat with a user's or a system message, or drop its first")
    prompt = _render_text(tokenizer, chat, place, generate=True)
    text = _render_text(tokenizer, chat, place + 1)
    if not text.startswith(prompt):
        at = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), min(len(prompt), len(text)))
        raise ValueError(
            f"{name}: the chat template asks for it with {_around(prompt, at)} but renders it after {_around(text, at)}, so what is "
            f"trained would not be what is generated; change the row (a system message may go into the first user message), or the "
            f"tokenizer's chat_template"
        )
    spans = [(len(prompt), len(text))]
    template = tokenizer.get_chat_template(None, tools=chat.tools)
    if MARKER.search(template):
        marks = _marks(tokenizer, chat, place + 1, template, text)
        spans = [(start, end) for start, end in marks if max(start, end - 1) >= len(prompt)]
        if not spans:
            raise ValueError(f"{name}: the chat template has {{% generation %}} markers, but none around any of it; mark it there")
    return _Turn(name, text, len(prompt), spans)


def _mask(tokenizer: Any, turns: list[_Turn]) -> Rendered:
    """The first turn's text as tokens; the others' texts are beginnings of it."""
    text = turns[0].text
    token_ids, starts, ends = _tokenize(tokenizer, text)
    special = np.isin(token_ids, list(_reader(tokenizer, len(tokenizer))[1]))
    trained = np.zeros(len(token_ids), bool)
    for turn in turns:
        inside = (starts >= turn.start) & (starts < len(turn.text))
        # a token that takes the white space before it may begin in the turn and be the next one's
        stops = [i for i in np.flatnonzero(inside & special) if text[starts[i] : len(turn.text)].strip()]
        if not stops or text[ends[stops[-1]] : len(turn.text)].strip():
            raise ValueError(
                f"{turn.name} ends in {_around(turn.text, len(turn.text))}, with no special token: a model trained on it never stops; "
                f"let the chat template end an assistant's turn with eos_token"
            )
        stop = stops[-1]
        rest = (min(turn.spans[-1][1], starts[stop]), ends[stop])  # a marker may leave the end-of-turn token out
        for start, end in (*turn.spans, rest):
            trained |= inside & (starts >= start) & (starts < end) & (np.arange(len(starts)) <= stop)
    return _rendered(token_ids, trained)


def _rendered(token_ids: list[int] | np.ndarray, trained: np.ndarray) -> Rendered:
    trained = trained & (np.arange(len(trained)) > 0)
    return Rendered(np.array(token_ids, np.int64), trained)


def _around(text: str, at: int) -> str:
    """The text near a place, as an error shows it."""
    return repr(("..." if at > 30 else "") + text[max(at - 30, 0) : at + 20] + ("..." if len(text) > at + 20 else ""))


# The template


def _messages(chat: Chat, count: int) -> list[dict[str, Any]]:
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in chat.messages[:count]]


def _render_text(tokenizer: Any, chat: Chat, count: int, *, generate: bool = False) -> str:
    """The template's text of the first `count` messages; with `generate`, as the prompt for the next one."""
    messages = _messages(chat, count)
    try:
        return tokenizer.apply_chat_template(messages, tools=chat.tools, tokenize=False, add_generation_prompt=generate)
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(
            f"the chat template refuses the row's messages ({', '.join(str(m['role']) for m in messages)}): {error}. Change the row (a "
            f"system message may go into the first user message), or the tokenizer's chat_template"
        ) from error


def _marks(tokenizer: Any, chat: Chat, count: int, template: str, text: str) -> list[tuple[int, int]]:
    """The characters of `text` inside {% generation %}. Not the tokenizer's own mask of tokens: where a mark ends on white space
    that its offsets leave out, that runs on to the end of the chat."""
    (again,), (marks,) = render_jinja_template(
        conversations=[_messages(chat, count)],
        tools=chat.tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    assert again == text, f"two renders of one chat differ: {again!r} and {text!r}"
    return marks


# Tokens


def _tokenize(tokenizer: Any, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids of a render, which has its own BOS, and the characters that each begins and ends at. [L] each."""
    encoding = _reader(tokenizer, len(tokenizer))[0].encode(text, add_special_tokens=False)
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    assert token_ids == encoding.ids, f"the tokenizer and its copy differ on {text!r}"
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    return np.array(token_ids, np.int64), starts, ends


@lru_cache(maxsize=4)
def _reader(tokenizer: Any, size: int) -> tuple[Tokenizer, frozenset[int]]:
    """A copy of the tokenizer that gives the characters of each token whole, and the ids of its special tokens.

    The copy has no post-processor: that of byte-level tokenizers may take a token's white space out of its offsets.
    size: of the vocabulary, so that a tokenizer that grew is read again.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} cannot say which characters a token stands for, so the mask would be a guess; load the model "
            f"with a tokenizer.json (a fast tokenizer)"
        )
    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.post_processor = None
    copy.no_truncation()
    copy.no_padding()
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return copy, frozenset(special | set(tokenizer.all_special_ids))

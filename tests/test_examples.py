"""Rows of every format to examples, the order of several datasets, resuming anywhere, and what becomes of rows that are too long."""

import itertools
import json
import logging
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from batch import Episode, packing_efficiency, plan_rows, supervised
from config import ConfigError
from config.typed import convert
from data import DatasetConfig, PromptStream, encode_completion
from examples import ExampleStream, Mixture, SFTDataConfig, spans
from losses import NLLLoss
from model import Model, ModelSource
from tests.steps import gradient, place
from tests.test_data import make_tokenizer, write
from trainer import Trainer, TrainingConfig

__all__ = ["place"]  # a fixture

CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORGETFUL = (  # the answers before the last question are cut to their first letter, as some templates drop what was thought
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content[0] if m.role == 'assistant' and loop.index0 < ns.last else m.content }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
PLAIN, CHAT = make_tokenizer(adds_bos=True), make_tokenizer(CHATML)
QUESTION, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
MODES = ("truncate", "drop", "split")


def stream(*cfgs: SFTDataConfig, tokenizer=PLAIN, seed=1, seq_len=1000, overlong="truncate", **options) -> ExampleStream:
    return ExampleStream(list(cfgs), tokenizer, seed=seed, seq_len=seq_len, overlong=overlong, **options)


def dataset(path: Path, rows: list[dict], **cfg) -> SFTDataConfig:
    return SFTDataConfig(path=write(path, rows), **cfg)


def of_row(tmp_path: Path, row: dict, tokenizer=PLAIN, seq_len=1000, overlong="truncate", **cfg) -> list[Episode]:
    return stream(dataset(tmp_path / "row.jsonl", [row], **cfg), tokenizer=tokenizer, seq_len=seq_len, overlong=overlong).take(1)


def shown(episode: Episode, tokenizer=PLAIN) -> str:
    """Its text, what is trained in brackets; the tests' tokenizers have one token a character."""
    trained = np.concatenate([np.zeros(episode.num_prompt_tokens), episode.loss_mask]) > 0
    text = ""
    for on, run in itertools.groupby(zip(trained, episode.token_ids.tolist(), strict=True), key=lambda pair: bool(pair[0])):
        part = "".join(tokenizer.convert_ids_to_tokens([token for _, token in run]))
        text += f"[{part}]" if on else part
    return text


def taught(episodes: list[Episode]) -> list[tuple[list[int], int, list[float]]]:
    """Of each its tokens up to the last one that is trained, the prompt's length and the mask."""
    found = []
    for e in episodes:
        count = int(np.flatnonzero(e.loss_mask).max()) + 1
        found.append((e.token_ids[: e.num_prompt_tokens + count].tolist(), e.num_prompt_tokens, e.loss_mask[:count].tolist()))
    return found


def same(a: list[Episode], b: list[Episode]) -> bool:
    def plain(episodes):
        return [(e.token_ids.tolist(), e.num_prompt_tokens, e.loss_mask.tolist()) for e in episodes]

    return plain(a) == plain(b)


# Formats


@pytest.mark.parametrize("template", [None, CHATML])
@pytest.mark.parametrize("cfg", [{}, {"prompt": "{question} ({n})", "system": "S"}, {"target_regex": r"(\w+) $"}, {"target": "n"}])
def test_a_prompt_and_its_completion_are_the_tokens_and_the_order_that_prompts_and_their_answers_have_in_grpo(tmp_path, template, cfg):
    rows = [{"question": "q" * (1 + i % 9), "answer": f" {'a' * (i % 7)}{i} ", "n": i} for i in range(20)]
    path, tokenizer, seq_len = write(tmp_path / "d.jsonl", rows), make_tokenizer(template, adds_bos=True), 9
    seq_len += (18 if template else 0) + (16 if "system" in cfg else 0)
    prompts = PromptStream(DatasetConfig(path=path, **cfg), tokenizer, seed=3, max_prompt_tokens=seq_len - 1, target=str.strip)
    examples = stream(SFTDataConfig(path=path, **cfg), tokenizer=tokenizer, seed=3, seq_len=seq_len)
    for _ in range(9):
        want = [supervised(p.token_ids, encode_completion(tokenizer, p.target), seq_len) for p in prompts.take(5)]
        assert taught(examples.take(5)) == taught(want)  # a template may write a newline behind
        assert (examples.position, examples.epoch) == (prompts.position, prompts.epoch)
    assert examples.counts().items() >= prompts.counts().items()
    assert cfg or (examples.counts()["data/dropped"] > 0 and examples.counts()["data/truncated"] > 0)


@pytest.mark.parametrize(("row", "tokenizer", "want"), [
    ({"messages": [QUESTION, ANSWER]}, CHAT, "<s>user\n2+2?</s>\n<s>assistant\n[4</s>]\n"),
    ({"messages": [QUESTION, ANSWER], "prompt": "2+2?", "prompt_id": "x"}, CHAT, "<s>user\n2+2?</s>\n<s>assistant\n[4</s>]\n"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, CHAT,
     "<s>user\na</s>\n<s>assistant\n[b</s>]\n"),
    ({"instruction": "Add.", "input": "2 2", "output": "4"}, CHAT, "<s>user\nAdd.\n\n2 2</s>\n<s>assistant\n[4</s>]\n"),
    ({"instruction": "Add.", "input": "", "output": "4", "text": "all"}, CHAT, "<s>user\nAdd.</s>\n<s>assistant\n[4</s>]\n"),
    ({"instruction": "Add.", "input": "2 2", "output": "4\n"}, PLAIN, "<s>Add.\n\n2 2\n\n[4</s>]"),
    ({"instruction": "Add.", "input": None, "output": "4"}, PLAIN, "<s>Add.\n\n[4</s>]"),
    ({"prompt": "2+2?", "completion": "4", "label": True}, PLAIN, "<s>2+2?[4</s>]"),
    ({"question": "2+2?", "answer": 4, "text": "2+2? 4"}, CHAT, "<s>user\n2+2?</s>\n<s>assistant\n[4</s>]\n"),
    ({"text": "2+2=4", "source": "s"}, PLAIN, "<s>[2+2=4</s>]"),
])  # fmt: skip
def test_the_format_is_told_by_the_columns_and_says_what_is_trained(tmp_path, row, tokenizer, want):
    assert [shown(e) for e in of_row(tmp_path, row, tokenizer)] == [want]


@pytest.mark.parametrize("adds_eos", [False, True])
def test_a_text_that_ends_in_eos_has_it_once(tmp_path, adds_eos):
    both = make_tokenizer(adds_bos=True, adds_eos=adds_eos)
    for text in ("ab", "ab</s>", "<s>ab</s>"):
        assert [shown(e, both) for e in of_row(tmp_path, {"text": text}, both)] == ["<s>[ab</s>]"]


@pytest.mark.parametrize(("row", "cfg", "want"), [
    ({"chat": [QUESTION, ANSWER], "text": "t"}, {"columns": {"messages": "chat"}}, "<s>user\n2+2?</s>\n<s>assistant\n[4</s>]\n"),
    ({"q": "a", "more": "b", "a": "c"}, {"columns": {"instruction": "q", "input": "more", "output": "a"}},
     "<s>user\na\n\nb</s>\n<s>assistant\n[c</s>]\n"),
    ({"q": "a", "a": "c", "answer": "no"}, {"columns": {"prompt": "q", "completion": "a"}}, "<s>user\na</s>\n<s>assistant\n[c</s>]\n"),
    ({"messages": [QUESTION, ANSWER], "answer": "5"}, {"format": "prompt_completion"}, "<s>user\n2+2?</s>\n<s>assistant\n[5</s>]\n"),
    ({"messages": [QUESTION, ANSWER]}, {"prompt": "messages"}, "<s>user\n2+2?</s>\n<s>assistant\n[4</s>]\n"),
    ({"messages": [QUESTION, ANSWER]}, {"system": "S"}, "<s>system\nS</s>\n<s>user\n2+2?</s>\n<s>assistant\n[4</s>]\n"),
    ({"body": "ab", "prompt": "x", "answer": "y"}, {"columns": {"text": "body"}}, "a[b</s>]"),
    ({"prompt": "ab", "answer": "c"}, {"train_on": "all", "prompt": "{prompt}"}, "<[s>user\nab</s>\n<s>assistant\nc</s>\n]"),
])  # fmt: skip
def test_keys_choose_the_format_and_columns_of_other_names(tmp_path, row, cfg, want):
    got = [shown(e) for e in of_row(tmp_path, row, CHAT, **cfg)]
    assert [text.replace("<s>[user", "<[s>user") for text in got] == [want]


def test_null_keys_of_messages_are_left_out_and_tools_may_be_json(tmp_path):
    loop = "{% for m in messages %}"
    template = "{{ tools | length if tools else 0 }}" + CHATML.replace(loop, loop + "{% if m.name is defined %}name{% endif %}")
    called = {"type": "function", "function": {"name": "f", "arguments": {}}}
    call = {"role": "assistant", "content": None, "name": None, "tool_calls": [called]}
    row = {"messages": [QUESTION | {"name": None}, call], "tools": json.dumps([{"type": "function", "function": {"name": "f"}}])}
    assert shown(of_row(tmp_path, row, make_tokenizer(template))[0]) == "1<s>user\n2+2?</s>\n<s>assistant\n[</s>]\n"


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("streaming", [False, True])
def test_arguments_that_other_calls_have_are_in_no_call_and_a_null_of_json_stays(tmp_path, kind, streaming):
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls[0].arguments | tojson if m.tool_calls }}")
    calls = [{"role": "assistant", "content": "", "tool_calls": [{"arguments": {key: 1}}]} for key in ("a", "b")]
    calls.append({"role": "assistant", "content": "", "tool_calls": [{"arguments": {"a": 1, "b": None}}]})
    rows, path = [{"messages": [QUESTION, call]} for call in calls], tmp_path / f"d.{kind}"
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        write(path, rows)
    examples = stream(SFTDataConfig(path=str(path), streaming=streaming), tokenizer=make_tokenizer(template), epochs=1).take(3)
    want = ['{"a": 1}', '{"a": 1}' if kind == "parquet" else '{"a": 1, "b": null}', '{"b": 1}']
    assert sorted(shown(e).partition("[")[2].partition("<")[0] for e in examples) == sorted(want)


@pytest.mark.parametrize(("row", "cfg", "saying"), [
    ({"a": "x", "b": "y"}, {}, r"its columns \['a', 'b'\] are of no format. Formats: .*alpaca .*dataset\.format.*dataset\.columns"),
    ({"messages": [], "answer": "y"}, {}, r"could be of the formats messages and prompt_completion\. .*Set dataset\.format"),
    ({"instruction": "a", "output": "b", "answer": "c"}, {}, "could be of the formats alpaca and prompt_completion"),
    ({"prompt": "x"}, {"format": "prompt_completion"}, r"no usual completion column; set dataset\.target to one of \['prompt'\]"),
    ({"prompt": "x", "answer": None}, {}, "its answer is null"),
    ({"prompt": "x", "completion": [ANSWER]}, {}, "its completion is no text; .*dataset.format"),
    ({"prompt": "x", "answer": "y"}, {"columns": {"prompt": "q"}}, r"no column q; set dataset\.columns\.prompt to one of "),
    ({"instruction": "x", "output": None}, {}, "its output is null; repair or remove the row"),
    ({"text": 5}, {}, r"its text is no text but 5; .*dataset\.columns\.text"),
    ({"text": None}, {}, "its text is null"),
    ({"text": "a"}, {"system": "S"}, "dataset.system has no place; remove the key"),
    ({"chat": []}, {"format": "messages"}, r"no column messages; set dataset.columns.messages to one of .'chat'."),
    ({"messages": None}, {}, "its messages is no list of messages but None"),
    ({"messages": ["x"]}, {}, "not one of messages with a role and a content"),
    ({"messages": [{"role": "user", "content": None}]}, {}, "without a role and a content that is text"),
    ({"messages": [{"from": "narrator", "value": "x"}]}, {}, "from 'narrator'; known are human"),
    ({"messages": [QUESTION, ANSWER], "tools": "{"}, {}, "its tools is text, but not JSON"),
])  # fmt: skip
@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_of_no_format_is_an_error_at_once_that_says_what_to_set(tmp_path, row, cfg, saying, streaming):
    with pytest.raises(ValueError, match=rf"row 0 of dataset\.path=.*: .*{saying}"):
        stream(dataset(tmp_path / "d.jsonl", [row], streaming=streaming, **cfg), tokenizer=CHAT)


def test_a_bad_row_further_on_is_named_when_it_comes(tmp_path):
    examples = stream(dataset(tmp_path / "d.jsonl", [{"text": "a"}, {"text": "b"}, {"body": "c"}], streaming=True))
    examples.take(2)
    with pytest.raises(ValueError, match=r"row 2 of dataset\.path=.*d\.jsonl: it has no column text"):
        examples.take(1)


@pytest.mark.parametrize(("keys", "saying"), [
    ({"weight": 0}, r"dataset\.weight=0.0: must be above 0"),
    ({"columns": {"chat": "messages"}}, r"dataset\.columns has chat, which no format reads; names: messages, tools"),
    ({"columns": {"messages": "a", "output": "b"}}, "several formats .alpaca, messages."),
    ({"columns": {"messages": "a"}, "format": "text"}, "several formats .messages, text."),
    ({"format": "alpaca", "prompt": "q"}, r"dataset\.prompt is read with format=prompt_completion only, not with alpaca"),
    ({"columns": {"completion": "a"}, "target": "b"}, r"dataset\.columns\.completion and target say the same"),
    ({"format": "text", "system": "S"}, r"dataset\.system has no place in format=text"),
])  # fmt: skip
def test_keys_that_contradict_each_other_are_an_error_of_the_configuration(keys, saying):
    with pytest.raises(ConfigError, match=saying):
        convert({"path": "x.jsonl"} | keys, SFTDataConfig, "dataset")


@pytest.mark.parametrize(("given", "saying"), [
    ({"path": "x", "wieght": 2}, r"unknown key dataset\.wieght\. Did you mean weight"),
    ([{"path": "x"}, {"path": "y", "train_on": "first"}], r"dataset\[1\]\.train_on should be one of assistant, last, all"),
    ({}, r"missing: dataset\.path"),
])  # fmt: skip
def test_one_dataset_or_a_list_of_them_is_told_what_is_wrong_with_it(given, saying):
    with pytest.raises(ConfigError, match=saying):
        convert(given, SFTDataConfig | list[SFTDataConfig], "dataset")


@pytest.mark.parametrize("row", [
    {"messages": []}, {"messages": [QUESTION]}, {"text": " "}, {"messages": [QUESTION, {"role": "assistant", "content": "x" * 99}]},
])  # fmt: skip
def test_a_row_with_nothing_to_train_on_is_dropped_and_counted_and_a_pass_of_such_rows_is_an_error(tmp_path, row, caplog):
    form, good = next(iter(row)), {"messages": [QUESTION, ANSWER], "text": "good"}
    rows = [row, {form: good[form]}, row]
    options = {"tokenizer": CHAT, "seq_len": 40, "overlong": "drop"}
    examples = stream(dataset(tmp_path / "d.jsonl", rows), epochs=2, **options)
    with caplog.at_level(logging.WARNING):
        assert len(examples.take(9)) == 2
    assert (examples.position, examples.counts()["data/dropped"]) == (6, 4)
    assert [r.getMessage() for r in caplog.records if "dropped: row" in r.getMessage()], "it is told once"
    for streaming, epochs in itertools.product([False, True], [None, 1]):
        barren = stream(dataset(tmp_path / "d.jsonl", [row] * 3, streaming=streaming), epochs=epochs, **options)
        with pytest.raises(ValueError, match="not one of its 3 rows has anything to train on within 40 tokens, with train_on=assistant"):
            barren.take(1)


# Several datasets


@pytest.mark.parametrize("weights", [
    [1], [1, 1], [0.7, 0.2, 0.1], [3, 1, 1, 1, 1], [1e-3, 1, 2.5], [5, 5, 5, 4, 3, 3, 1], [0.31, 0.29, 0.21, 0.19], [7, 0.01, 0.01, 0.01],
])  # fmt: skip
def test_after_any_number_of_rows_no_dataset_is_a_whole_row_away_from_its_share(weights):
    mixture, counts = Mixture(weights, 0), [0] * len(weights)
    shares = [Fraction(str(w)) / sum(Fraction(str(w)) for w in weights) for w in weights]
    for n in range(1, 1000):
        counts[next(mixture)] += 1
        assert all(abs(counts[i] - share * n) < 1 for i, share in enumerate(shares)), n


def test_many_random_weights_keep_that_law_and_the_mixture_goes_on_anywhere():
    draw = np.random.RandomState(0)
    for _ in range(60):
        weights = [float(w) for w in draw.randint(1, draw.choice([3, 10, 100]) + 1, draw.randint(2, 9))]
        straight = Mixture(weights, 0)
        order = [next(straight) for _ in range(400)]
        for i, w in enumerate(weights):
            gaps = np.cumsum([chosen == i for chosen in order]) - np.arange(1, 401) * w / sum(weights)
            assert abs(gaps).max() < 1 + 1e-9, weights
        for position in draw.randint(0, 390, 5).tolist():
            resumed = Mixture(weights, position)
            assert resumed.counts == [order[:position].count(i) for i in range(len(weights))]
            assert [next(resumed) for _ in range(400 - position)] == order[position:]


def lettered(tmp_path: Path, sizes: dict[str, int], weights: dict[str, float], streaming: str = "") -> list[SFTDataConfig]:
    """A dataset of texts a0, a1, ... for each letter."""
    return [
        dataset(tmp_path / f"{c}.jsonl", [{"text": f"{c}{i}"} for i in range(n)], weight=weights[c], streaming=c in streaming)
        for c, n in sizes.items()
    ]


def texts(episodes: list[Episode]) -> list[str]:
    return ["".join(PLAIN.convert_ids_to_tokens(e.token_ids.tolist()[1:-1])) for e in episodes]


@pytest.mark.parametrize("streaming", ["", "a", "ab"])
def test_datasets_come_by_their_weights_and_each_in_the_order_it_has_alone(tmp_path, streaming):
    cfgs = lettered(tmp_path, {"a": 7, "b": 3}, {"a": 3, "b": 2}, streaming)
    mixed = texts(stream(*cfgs).take(50))
    assert Counter(t[0] for t in mixed) == {"a": 30, "b": 20}
    for i, c in enumerate("ab"):
        assert [t for t in mixed if t[0] == c] == texts(stream(cfgs[i], seed=1 + i).take(50))[: 30 if c == "a" else 20]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("streaming", ["", "a", "b", "ab"])
def test_the_data_ends_once_every_dataset_was_read_whole_that_often(tmp_path, streaming, epochs):
    cfgs = lettered(tmp_path, {"a": 7, "b": 3}, {"a": 1, "b": 1}, streaming)
    examples = stream(*cfgs, epochs=epochs)
    epoch_of_step: list[int] = []
    while taken := examples.take(1):
        last, epoch_of_step = taken, [*epoch_of_step, examples.epoch]
    assert texts(last)[0][0] == "a", "the row that ends the last dataset's passes is the last"
    assert examples.position in (14 * epochs, 14 * epochs - 1)
    assert epoch_of_step == sorted(epoch_of_step) and epoch_of_step[-1] == epochs - 1
    assert examples.steps_in_all(4) == (None if streaming else -(-14 * epochs // 4))
    assert stream(*cfgs, epochs=epochs, position=examples.position).take(3) == []


def test_all_rows_may_be_asked_for_at_once_without_knowing_how_many_there_are(tmp_path):
    (cfg,) = lettered(tmp_path, {"a": 7}, {"a": 1})
    assert len(stream(cfg, epochs=2).take(sys.maxsize)) == 14


def test_how_many_steps_there_are_is_known_only_where_rows_are_steps(tmp_path):
    (cfg,) = lettered(tmp_path, {"a": 7}, {"a": 1})
    assert stream(cfg, epochs=3).steps_in_all(4) == 6
    assert stream(cfg).steps_in_all(4) is None and stream(cfg, epochs=3, overlong="split").steps_in_all(4) is None


# Resuming


@pytest.mark.parametrize("overlong", MODES)
@pytest.mark.parametrize("streaming", [(False, False), (True, True), (False, True)], ids=["loaded", "streamed", "both"])
@pytest.mark.parametrize("epochs", [None, 2])
def test_a_stream_resumed_at_any_position_goes_on_exactly(tmp_path, overlong, streaming, epochs):
    chats = [{"messages": [QUESTION, ANSWER] * (i % 4)} for i in range(5)]
    long_texts = [{"text": "x" * (i * 13 % 50) + str(i)} for i in range(7)]
    cfgs = [
        dataset(tmp_path / "chats.jsonl", chats, streaming=streaming[0], weight=2),
        dataset(tmp_path / "texts.jsonl", long_texts, streaming=streaming[1], weight=3),
    ]
    options = {"tokenizer": make_tokenizer(FORGETFUL), "seq_len": {"truncate": 40, "drop": 60, "split": 20}[overlong]}
    options |= {"overlong": overlong, "epochs": epochs}
    straight = stream(*cfgs, **options)
    steps: list[list[Episode]] = []
    states = [(straight.position, straight.epoch, straight.counts())]
    while len(steps) < 40 and (taken := straight.take(1)):
        steps.append(taken)
        states.append((straight.position, straight.epoch, straight.counts()))
    assert len({position for position, _, _ in states}) == len(states) and len(steps) > 12
    assert overlong != "split" or any(position >= 2**40 for position, _, _ in states), "some states are in the middle of a row"
    for begun in range(len(steps)):
        resumed = stream(*cfgs, position=states[begun][0], **options)
        for later in range(begun, min(begun + 6, len(steps))):
            assert same(resumed.take(1), steps[later])
            assert (resumed.position, resumed.epoch) == states[later + 1][:2]
            counts, before, whole = resumed.counts(), states[begun][2], states[later + 1][2]
            assert all(counts[k] == whole[k] - before[k] for k in counts if k not in ("data/epoch", "data/rows")), "counts add up"
    everything = [e for step in steps for e in step]
    in_pieces = stream(*cfgs, **options)
    assert same([e for n in (1, 3, 2, len(steps) - 6) for e in in_pieces.take(n)], everything)


def test_turns_that_a_template_shows_apart_are_one_row_of_a_step_and_trained_once_each(tmp_path):
    chat = [part for i in range(3) for part in (QUESTION, {"role": "assistant", "content": f"abc{i}"})]
    examples = stream(dataset(tmp_path / "d.jsonl", [{"messages": chat}]), tokenizer=make_tokenizer(FORGETFUL))
    got = [shown(e) for e in examples.take(1)]
    assert [text[text.index("[") :] for text in got] == [f"[abc{i}</s>]\n" for i in range(3)] and examples.position == 1


# Overlong rows


def trained_at(episode: Episode) -> list[int]:
    return np.flatnonzero(np.concatenate([np.zeros(episode.num_prompt_tokens), episode.loss_mask])).tolist()


@pytest.mark.parametrize("length", [1, 2, 18, 19, 20, 37, 38, 39, 40, 100])
def test_pieces_of_a_text_train_each_of_its_tokens_once(tmp_path, length):
    row = {"text": "".join(chr(97 + i % 26) for i in range(length))}
    (whole,) = of_row(tmp_path, row)
    pieces = stream(dataset(tmp_path / "d.jsonl", [row]), seq_len=20, overlong="split", epochs=1).take(100)
    assert max(len(p.token_ids) for p in pieces) <= 20 and all(p.num_prompt_tokens == 1 and p.loss_mask.all() for p in pieces)
    assert np.concatenate([p.token_ids[1:] for p in pieces]).tolist() == whole.token_ids[1:].tolist()
    assert all(a.token_ids[-1] == b.token_ids[0] for a, b in itertools.pairwise(pieces)), "a piece's context is its own first token"
    assert spans(len(whole.token_ids), 20)[-1][1] == len(whole.token_ids)


def test_pieces_of_a_chat_without_a_trained_token_are_left_out_and_counted(tmp_path):
    chat = [{"role": "user", "content": "q" * 30}, {"role": "assistant", "content": "abcdefghij"}, {"role": "user", "content": "r" * 30},
            {"role": "assistant", "content": "klmno"}]  # fmt: skip
    cfg = dataset(tmp_path / "d.jsonl", [{"messages": chat}])
    (whole,) = stream(cfg, tokenizer=CHAT).take(1)
    examples = stream(cfg, tokenizer=CHAT, seq_len=16, overlong="split", epochs=1)
    pieces = examples.take(100)
    every = spans(len(whole.token_ids), 16)
    assert all(len(trained_at(p)) > 0 for p in pieces)
    assert sum(len(trained_at(p)) for p in pieces) == len(trained_at(whole)) == 11 + 6
    counts = {"data/epoch": 0, "data/rows": 1, "data/truncated": 0, "data/split": 1, "data/dropped": 0}
    assert examples.counts() == counts | {"data/untrained": len(every) - len(pieces)} and len(every) > len(pieces)


def test_truncating_keeps_the_first_tokens_and_drops_what_then_has_nothing_trained(tmp_path):
    rows = [{"prompt": "p" * p, "completion": "c" * c} for p, c in ((3, 20), (10, 1), (30, 5), (3, 2))]
    cut = stream(dataset(tmp_path / "d.jsonl", rows, streaming=True), seq_len=12, epochs=1)
    assert [shown(e) for e in cut.take(9)] == [f"<s>ppp[{'c' * 8}]", "<s>" + "p" * 10 + "[c]", "<s>ppp[cc</s>]"]
    assert cut.counts().items() >= {"data/truncated": 2, "data/dropped": 1, "data/split": 0, "data/rows": 4}.items()
    left = stream(dataset(tmp_path / "d.jsonl", rows, streaming=True), seq_len=12, epochs=1, overlong="drop")
    assert [shown(e) for e in left.take(9)] == ["<s>ppp[cc</s>]"]
    assert left.counts().items() >= {"data/truncated": 0, "data/dropped": 3}.items()


def test_where_no_row_is_overlong_the_three_ways_are_one(tmp_path):
    chats = [{"messages": [QUESTION, ANSWER] * (1 + i % 3)} for i in range(5)]
    runs = [stream(dataset(tmp_path / "d.jsonl", chats), tokenizer=make_tokenizer(FORGETFUL), overlong=mode) for mode in MODES]
    for _ in range(6):
        first, *others = [run.take(2) for run in runs]
        assert all(same(first, other) for other in others) and len({run.position for run in runs}) == 1


# Packing


def test_the_efficiency_of_packing_is_the_part_of_the_rows_that_holds_tokens():
    assert packing_efficiency([6, 6, 6], 1, 6) == 1 and packing_efficiency([6, 6, 6], 2, 6) == 0.75 and packing_efficiency([], 2, 6) == 0
    draw = np.random.RandomState(0)
    lengths = draw.randint(1, 60, 50).tolist()
    rows = [row for replica in plan_rows(lengths, 3, 64) for row in replica]
    assert packing_efficiency(lengths, 3, 64) == pytest.approx(np.mean([sum(lengths[i] for i in row) / 64 for row in rows]))


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "mistral", "gemma2", "gemma3_text", "qwen3_moe"])
def test_the_loss_and_gradient_of_packed_examples_are_those_of_one_document_at_a_time(family, tmp_path, checkpoint_of, place):
    source = ModelSource(str(checkpoint_of(family)))
    model = Model(source, place.trainer, dtype="float32", temperature=1.0, max_tokens=64, trainable=True)
    cfg = TrainingConfig(dtype="float32", max_grad_norm=0.0, adam_beta1=0.0, learning_rate=0.0, weight_decay=0.0)
    trainer = Trainer(model, cfg, NLLLoss())
    rows = [{"prompt": f"{i}+{i * i}=", "completion": f"{i + i * i}" * (1 + i % 5), "text": "0123456789" * (i % 4 + 1)} for i in range(8)]
    cfgs = [dataset(tmp_path / "pairs.jsonl", rows, format="prompt_completion"), dataset(tmp_path / "texts.jsonl", rows, format="text")]
    episodes = stream(*cfgs, tokenizer=source.tokenizer(), seq_len=24, overlong="split").take(16)
    assert 1 < len(model.rows(episodes)) < 8, "they are packed, and not into one row"
    packed_loss = trainer.update(episodes, 0)["loss/policy"]
    packed, total = gradient(trainer), sum(e.loss_mask.sum() for e in episodes)
    loss, alone = 0.0, {name: torch.zeros_like(g, dtype=torch.float64) for name, g in packed.items()}
    for e in episodes:
        share = float(e.loss_mask.sum() / total)
        loss += share * trainer.update([e], 0)["loss/policy"]
        for name, g in gradient(trainer).items():
            alone[name] += share * g.double()
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    norm = sum(g.square().sum() for g in alone.values()) ** 0.5
    for name, g in alone.items():
        assert 0 < g.norm() and (packed[name] - g).norm() <= 1e-6 * norm, f"{name}: {(packed[name] - g).norm() / norm:.1e} of the norm"

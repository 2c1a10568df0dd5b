"""Rows of every format to examples: what tells the format, what is trained, and what is an error."""

import itertools
import json
import logging

import datasets
import pytest

from batch import supervised
from config import ConfigError
from config.typed import convert
from data import DatasetConfig, PromptStream, encode_completion
from examples import SFTDataConfig
from tests.streams import ANSWER, CHAT, CHATML, PLAIN, QUESTION, dataset, of_row, shown, stream, taught
from tests.test_data import make_tokenizer, write


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

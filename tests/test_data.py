"""The order of prompts, their tokens and targets, and what a bad file or a wrong key says."""

import json
import logging
import math
from pathlib import Path

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from batch import Prompt
from data import DatasetConfig, PromptStream, encode_completion, encode_prompt, final_answer

GSM8K_SHAPED = Path(__file__).parent / "data" / "gsm8k_shaped.jsonl"
PLAIN_TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
SMOL_TEMPLATE = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}<s>assistant "


def make_tokenizer(template: str | None = None, adds_bos: bool = False, adds_eos: bool = False, **special: str | None):
    """One token a character; ids 0, 1 and 2 are <unk>, <s> and </s>."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for code in [10, *range(32, 127)]:
        vocab[chr(code)] = len(vocab)
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    frame = f"{'<s> ' if adds_bos else ''}$A{' </s>' if adds_eos else ''}"
    tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=[("<s>", 1), ("</s>", 2)])
    special = {"bos_token": "<s>", "eos_token": "</s>", **special}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)
    made.chat_template = template
    return made


TOKENIZER = make_tokenizer()


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(path: Path, size: int) -> str:
    return write(path, [{"question": f"q{i}", "answer": i} for i in range(size)])


def stream(path: str, *, seed=1, max_prompt_tokens=1000, position=0, epochs: int | None = None, **cfg) -> PromptStream:
    return PromptStream(
        DatasetConfig(path=path, **cfg),
        TOKENIZER,
        seed=seed,
        max_prompt_tokens=max_prompt_tokens,
        position=position,
        epochs=epochs,
    )


def texts(prompts) -> list[str]:
    return [p.text for p in prompts]


# Order


def test_the_data_starts_again_after_a_pass_in_another_order(tmp_path):
    """Five prompts, two a step, six steps (meta-pytorch/torchforge#519)."""
    prompts = stream(numbered(tmp_path / "five.jsonl", 5))
    steps, epochs = [], []
    for _ in range(6):
        steps.append(prompts.take(2))
        epochs.append(prompts.epoch)
    order = [p for step in steps for p in step]
    assert [len(step) for step in steps] == [2] * 6 and [p.index for p in order] == list(range(12))
    assert sorted(texts(order[:5])) == sorted(texts(order[5:10])) == [f"q{i}" for i in range(5)]
    assert texts(order[:5]) != texts(order[5:10])
    assert epochs == [0, 0, 1, 1, 1, 2] and prompts.num_rows == 5


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("epochs", [None, 3])
def test_a_stream_resumed_at_any_position_goes_on_exactly(tmp_path, streaming, epochs):
    rows = [{"question": "x" * (i % 4 + 1) + f"{i}", "answer": i} for i in range(7)]
    options = {
        "path": write(tmp_path / "d.jsonl", rows),
        "streaming": streaming,
        "max_prompt_tokens": 4,
        "epochs": epochs,
    }
    straight = stream(**options)
    reference: list[Prompt] = []
    state_after = {}
    while len(reference) < 15 and (taken := straight.take(1)):
        reference += taken
        state_after[taken[0].index] = (straight.position, straight.epoch)
    for position in range(reference[-4].index):
        resumed = stream(**options, position=position)
        expected = [p for p in reference if p.index >= position][:4]
        assert resumed.take(4) == expected
        assert (resumed.position, resumed.epoch) == state_after[expected[-1].index]


def test_the_order_depends_on_the_seed_and_not_on_how_much_is_taken_at_once(tmp_path):
    path = numbered(tmp_path / "d.jsonl", 40)
    at_once = stream(path).take(100)
    in_pieces = stream(path)
    assert at_once == [p for n in (1, 7, 30, 2, 60) for p in in_pieces.take(n)]
    assert texts(at_once) != texts(stream(path, seed=2).take(100))
    # Checkpoints of old runs rely on the order never changing.
    assert texts(stream(path, seed=0).take(5)) == ["q32", "q33", "q29", "q38", "q10"]


def test_rows_that_are_streamed_keep_the_order_of_their_source(tmp_path):
    prompts = stream(numbered(tmp_path / "d.jsonl", 3), streaming=True)
    assert texts(prompts.take(7)) == ["q0", "q1", "q2", "q0", "q1", "q2", "q0"]
    assert prompts.num_rows is None and prompts.epoch == 2


@pytest.mark.parametrize("streaming", [False, True])
def test_one_pass_ends_with_fewer_prompts_and_then_none(tmp_path, streaming):
    prompts = stream(numbered(tmp_path / "d.jsonl", 5), epochs=1, streaming=streaming)
    assert [len(prompts.take(2)) for _ in range(5)] == [2, 2, 1, 0, 0]
    assert prompts.position == 5 and prompts.epoch == 0
    assert stream(numbered(tmp_path / "d.jsonl", 5), epochs=1, streaming=streaming, position=5).take(2) == []


def test_the_order_does_not_depend_on_the_kind_of_file(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = numbered(tmp_path / "d.jsonl", 9)
    datasets.Dataset.from_json(path).to_parquet(tmp_path / "d.parquet")
    assert stream(str(tmp_path / "d.parquet")).take(20) == stream(path).take(20)


@pytest.mark.parametrize("streaming", [False, True])
def test_data_without_a_row_is_an_error(tmp_path, streaming):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no rows"):
        stream(str(tmp_path / "empty.jsonl"), streaming=streaming).take(1)


# Prompts over the limit


@pytest.mark.parametrize("streaming", [False, True])
def test_prompts_over_the_limit_are_dropped_with_a_count_and_one_warning(tmp_path, streaming, caplog):
    path = write(tmp_path / "d.jsonl", [{"question": "x" * n} for n in (3, 9, 4, 8)])
    prompts = stream(path, max_prompt_tokens=4, streaming=streaming)
    with caplog.at_level(logging.WARNING):
        taken = prompts.take(6)
    assert {len(p.token_ids) for p in taken} == {3, 4}
    consumed = [p.index for p in taken]
    assert consumed == sorted(consumed) and prompts.position == consumed[-1] + 1
    assert prompts.dropped == prompts.position - 6 >= 4
    told = [record.getMessage() for record in caplog.records]
    assert sum("training.seq_len" in line for line in told) == 1
    counts = [int(line.split()[0]) for line in told if "so far" in line]  # one line a pass
    assert len(counts) == prompts.position // 4 - (prompts.position % 4 == 0) and counts == sorted(counts)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("epochs", [None, 1])
@pytest.mark.parametrize("position", [0, 2])
def test_a_pass_in_which_nothing_fits_is_an_error_and_not_an_endless_loop(tmp_path, streaming, epochs, position):
    path = write(tmp_path / "d.jsonl", [{"question": "x" * n} for n in (9, 7, 8)])
    prompts = stream(path, max_prompt_tokens=4, streaming=streaming, epochs=epochs, position=position)
    if epochs == 1 and position == 2:  # a remainder of a pass proves nothing
        assert prompts.take(1) == []
        return
    with pytest.raises(
        ValueError, match=r"limit is 4 tokens and the shortest of 3 prompts has 7; raise training\.seq_len"
    ):
        prompts.take(1)


# Text and targets


def only(tmp_path: Path, row: dict, **cfg):
    return stream(write(tmp_path / "row.jsonl", [row]), **cfg).take(1)[0]


def test_the_prompt_is_a_column_or_a_template_of_columns(tmp_path):
    row = {"question": "2 + 2?", "hint": 7, "answer": "4"}
    assert only(tmp_path, row).text == "2 + 2?"
    assert only(tmp_path, row, prompt="hint").text == "7"
    assert only(tmp_path, row, prompt="{question} ({hint}) \\boxed{{}}").text == "2 + 2? (7) \\boxed{}"
    assert only(tmp_path, row).row == row
    prompt = only(tmp_path, {"instruction": "third", "problem": "second", "question": "first"}, system="Be brief.")
    assert prompt.text == "first" and prompt.token_ids == TOKENIZER("Be brief.\nfirst").input_ids


@pytest.mark.parametrize(
    "cfg, saying",
    [
        ({"prompt": "qestion"}, r"dataset\.prompt=qestion is not a column; there are \['answer', 'question'\]"),
        ({"prompt": "{qestion}"}, r"\{qestion\} is not a column; there are \['answer', 'question'\]"),
        ({"prompt": "{question} \\boxed{}"}, "for braces"),
        ({"prompt": "{question"}, "for braces"),
        ({"prompt": "{question.__class__}"}, "is not a column"),
        ({"prompt": "{question!r}"}, "is not a column"),
        ({"target": "label"}, r"dataset\.target=label is not a column"),
        ({"target_regex": "("}, "not a regular expression"),
        ({"target_regex": "a"}, "has no group"),
        ({"target_regex": "A: (.*)"}, r"row 0 of dataset\.path=.* does not match"),
    ],
)
def test_a_wrong_key_is_an_error_before_the_first_prompt(tmp_path, cfg, saying):
    with pytest.raises(ValueError, match=saying):
        stream(write(tmp_path / "d.jsonl", [{"question": "2 + 2?", "answer": "4"}]), **cfg)


@pytest.mark.parametrize(
    "row, saying",
    [
        ({"text": "a"}, r"no usual prompt column; set dataset\.prompt to one of \['text'\]"),
        ({"question": None}, "its question is null"),
        ({"question": "a", "answer": None}, "its answer is null"),
        ({"messages": []}, "its messages has no user message"),
        ({"messages": ["a"]}, "its messages is a list, but not one of messages"),
        ({"question": ""}, "not one token"),
    ],
)
def test_a_row_without_a_prompt_or_target_is_named(tmp_path, row, saying):
    path = write(tmp_path / "d.jsonl", [row])
    for streaming in (False, True):
        with pytest.raises(ValueError, match=rf"row 0 of dataset\.path=.*: {saying}"):
            stream(path, streaming=streaming).take(1)


def test_messages_are_a_chat_up_to_the_last_question_and_its_reply_the_target(tmp_path):
    chat = [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    row = {"messages": [{"role": r, "content": c} for r, c in chat]}
    prompt = only(tmp_path, row)
    assert (prompt.text, prompt.target) == ("c", "d") and prompt.token_ids == TOKENIZER("S\na\nb\nc").input_ids
    assert only(tmp_path, row, system="T").token_ids == TOKENIZER("T\na\nb\nc").input_ids
    assert only(tmp_path, {"messages": row["messages"][:2], "label": 3}).target == "3"


@pytest.mark.parametrize(
    "answer, target",
    [
        ("24 + 48 = 72\n#### 72", "72"),
        ("#### 1 no #### 1,234 ", "1234"),
        ("#### 1,234,567.5", "1234567.5"),
        ("#### 1,2", "1,2"),
        (" 1,234 ", "1,234"),
        (5, "5"),
        (0.5, "0.5"),
        (True, "True"),
    ],
)
def test_the_target_is_what_follows_the_last_mark(tmp_path, answer, target):
    assert only(tmp_path, {"question": "q", "answer": answer}).target == target


def test_a_target_may_be_cut_by_a_pattern_or_kept_whole_or_absent(tmp_path):
    row = {"question": "q", "answer": "A: 1 or A: 22 #### 3", "gold": 4}
    assert only(tmp_path, row, target_regex=r"A: (\d+)").target == "22"
    assert only(tmp_path, row, target="gold").target == "4"
    assert only(tmp_path, {"question": "q"}).target == ""
    path = write(tmp_path / "row.jsonl", [row])
    whole = PromptStream(DatasetConfig(path=path), TOKENIZER, seed=0, max_prompt_tokens=9, target=str).take(1)[0]
    assert whole.target == row["answer"]


def test_the_gsm8k_shaped_file_gives_whole_numbers_that_follow_from_its_own_sums():
    prompts = stream(str(GSM8K_SHAPED), epochs=1).take(100)
    assert len(prompts) == 64
    for prompt in prompts:
        last_sum = prompt.row["answer"].rpartition("<<")[2].partition(">>")[0]
        terms, result = last_sum.split("=")
        assert prompt.target == result == final_answer(prompt.row["answer"])
        number, *factors = terms.replace("*", " * ").replace("/", " / ").replace("+", " + ").replace("-", " - ").split()
        value = float(number)
        for operator, factor in zip(factors[::2], map(int, factors[1::2]), strict=True):
            value = {"+": value + factor, "-": value - factor, "*": value * factor, "/": value / factor}[operator]
        assert math.isclose(value, int(result)), prompt.row


# Tokens


QUESTION = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "tokenizer, begins_with_bos",
    [
        (make_tokenizer(), False),
        (make_tokenizer(adds_bos=True), True),
        (make_tokenizer(adds_bos=True, adds_eos=True), True),
        (make_tokenizer("<s>" + PLAIN_TEMPLATE), True),
        (make_tokenizer("<s>" + PLAIN_TEMPLATE, adds_bos=True, adds_eos=True), True),
        (make_tokenizer("{{ bos_token }}" + PLAIN_TEMPLATE, adds_bos=True), True),
        (make_tokenizer(SMOL_TEMPLATE), True),
        (make_tokenizer(SMOL_TEMPLATE, adds_bos=True), True),
        (make_tokenizer(PLAIN_TEMPLATE), False),
        (make_tokenizer(PLAIN_TEMPLATE, adds_bos=True), False),
        (make_tokenizer(PLAIN_TEMPLATE, bos_token=None), False),
        (make_tokenizer(None, bos_token=None, eos_token=None), False),
    ],
)
def test_a_prompt_begins_with_one_bos_at_most_and_has_no_eos_behind(tokenizer, begins_with_bos):
    """NVIDIA-NeMo/RL#747; <s> also opens the turns of SMOL's template, so it may occur again further on."""
    token_ids = encode_prompt(tokenizer, QUESTION)
    assert (token_ids[0] == 1) == begins_with_bos and token_ids[1] != 1 and token_ids[-1] != 2
    if tokenizer.chat_template is None:
        assert token_ids[int(begins_with_bos) :] == tokenizer("S\nhi", add_special_tokens=False).input_ids
    else:
        rendered = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
        assert token_ids == tokenizer(rendered, add_special_tokens=False).input_ids


def test_a_bos_written_in_the_text_itself_is_not_doubled():
    tokenizer = make_tokenizer(adds_bos=True)
    assert encode_prompt(tokenizer, [{"role": "user", "content": "<s>hi"}]) == encode_prompt(tokenizer, QUESTION[1:])


@pytest.mark.parametrize(
    "tokenizer", [make_tokenizer(), make_tokenizer(adds_bos=True), make_tokenizer(adds_bos=True, adds_eos=True)]
)
def test_a_completion_has_no_bos_in_front_and_one_eos_at_the_end(tokenizer):
    digits = tokenizer.convert_tokens_to_ids(list("42"))
    assert encode_completion(tokenizer, "42") == encode_completion(tokenizer, "42</s>") == [*digits, 2]
    assert encode_completion(tokenizer, "") == [2]


def test_a_tokenizer_without_eos_cannot_end_a_completion():
    with pytest.raises(ValueError, match="eos_token"):
        encode_completion(make_tokenizer(eos_token=None), "42")

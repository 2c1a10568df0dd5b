"""Which tokens of a chat are trained, for the templates of the common families, with generation markers and without."""

import os
import random
import re
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, ByT5Tokenizer

from conversations import Chat, Rendered, coloured, marked, render, render_pair, render_text
from data import encode_prompt
from tests.chats import DOCUMENT, FAMILIES, current_document, tokenizer_of

each_family = pytest.mark.parametrize("family", FAMILIES)
with_and_without_markers = pytest.mark.parametrize("markers", [False, True], ids=["plain", "markers"])
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALL: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [ADD]}
RESULT = {"role": "tool", "content": "[3]"}


def said(*contents: str, system: str | None = None) -> list[dict]:
    """User and assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


TALK = said("hi", "yo\n\n[1, 2]]", "and?\n", "  No.\nUnd übrigens: 漢字 🙂 ", "thing", "")


def template_ids(tokenizer, messages, **options) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


def runs(tokenizer, rendered: Rendered) -> list[tuple[int, str]]:
    """Where each run of trained tokens begins, and its text."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], rendered.trained.astype(int), [0]]))).reshape(-1, 2)
    return [(start, tokenizer.decode(rendered.token_ids[start:end])) for start, end in edges.tolist()]


def trained_texts(tokenizer, examples: list[Rendered]) -> list[str]:
    return [text for example in examples for _, text in runs(tokenizer, example)]


def show(tokenizer, examples: list[Rendered]) -> list[str]:
    return [marked(tokenizer, example, "⟦", "⟧").replace("⏎\n", "⏎") for example in examples]


# Laws that hold for every family


@each_family
@with_and_without_markers
@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_the_tokens_are_the_chat_templates_own(family, markers, train_on):
    tokenizer = tokenizer_of(family, markers)
    assert render(tokenizer, Chat(TALK), train_on)[-1].token_ids.tolist() == template_ids(tokenizer, TALK)


@each_family
@with_and_without_markers
def test_every_turn_of_the_assistant_is_trained_with_its_end_and_nothing_else(family, markers):
    tokenizer, kind = tokenizer_of(family, markers), FAMILIES[family]
    says = [kind.says(m["content"]) + kind.end for m in TALK if m["role"] == "assistant"]
    assert trained_texts(tokenizer, render(tokenizer, Chat(TALK), "assistant")) == says
    assert trained_texts(tokenizer, render(tokenizer, Chat(TALK), "last")) == says[-1:]


@each_family
@with_and_without_markers
def test_before_a_trained_turn_stands_the_prompt_that_generation_is_given(family, markers):
    tokenizer = tokenizer_of(family, markers)
    examples = render(tokenizer, Chat(TALK), "assistant")
    begun = [example.token_ids[:start].tolist() for example in examples for start, _ in runs(tokenizer, example)]
    assert begun == [encode_prompt(tokenizer, TALK[:place]) for place in (1, 3, 5)]


def random_talk(rng: random.Random) -> list[dict]:
    letters = ["\n", "\n\n", " ", "  ", "\t", "y", "yo", "hi", ".", ":", "]]", "1", "23", "ü", "漢", "🙂", "e\u0301", "</s>x"]
    return said(*("".join(rng.choices(letters, k=rng.randrange(1, 8))) for _ in range(2 * rng.randrange(1, 4))))


@each_family
def test_whatever_is_said_only_whole_tokens_of_answers_are_trained_and_markers_change_nothing(family):
    plain, marking, kind, rng = tokenizer_of(family), tokenizer_of(family, True), FAMILIES[family], random.Random(family)
    for _ in range(60):
        talk = random_talk(rng)
        examples = render(plain, Chat(talk), "assistant")
        for one, other in zip(examples, render(marking, Chat(talk), "assistant"), strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist() and one.trained.tolist() == other.trained.tolist()
        turns = [(example, *run) for example in examples for run in runs(plain, example)]
        assert len(turns) == len(talk) // 2
        for place, (example, start, text) in zip(range(1, len(talk), 2), turns, strict=True):
            asked = plain.apply_chat_template(talk[:place], tokenize=False, add_generation_prompt=True)
            before = plain.decode(example.token_ids[:start])
            answer = kind.says(talk[place]["content"]) + kind.end
            assert before + text == asked + answer
            if len(before) == len(asked):
                assert example.token_ids[:start].tolist() == template_ids(plain, talk[:place], add_generation_prompt=True)
            else:  # the first token cut off is one that begins in the prompt
                assert len(plain.decode(example.token_ids[: start - 1])) < len(asked) < len(before)


@pytest.mark.parametrize("family", [name for name, kind in FAMILIES.items() if kind.bos])
def test_there_is_one_bos_in_chats_prompts_and_texts(family):
    tokenizer, bos = tokenizer_of(family), tokenizer_of(family).bos_token_id
    chats = [example.token_ids.tolist() for example in render(tokenizer, Chat(TALK), "assistant")]
    for token_ids in [*chats, encode_prompt(tokenizer, TALK[:1])]:
        assert token_ids[0] == bos != token_ids[1]
    if FAMILIES[family].adds_bos:
        for text in ("yo", tokenizer.bos_token + "yo"):
            assert render_text(tokenizer, text).token_ids[:2].tolist().count(bos) == 1
            assert render_pair(tokenizer, text, " yo").token_ids[:2].tolist().count(bos) == 1
            assert render_text(tokenizer, text).token_ids[0] == bos


@each_family
def test_the_end_of_a_turn_is_trained_also_where_it_is_the_padding(family):
    tokenizer = FAMILIES[family].tokenizer()
    for pad in (tokenizer.eos_token, "<|endoftext|>" if "<|endoftext|>" in tokenizer.get_vocab() else tokenizer.unk_token):
        if pad is not None:
            tokenizer.pad_token = pad
        for example in render(tokenizer, Chat(TALK), "assistant"):
            last = np.flatnonzero(example.trained)[-1]
            assert tokenizer.decode(example.token_ids[last : last + 1]) in (FAMILIES[family].end, tokenizer.eos_token)


@each_family
def test_all_trains_everything_but_the_first_token(family):
    (example,) = render(tokenizer_of(family), Chat(TALK), "all")
    assert example.trained.tolist() == [False] + [True] * (len(example.token_ids) - 1)


@each_family
def test_what_follows_the_last_answer_is_left_off(family):
    tokenizer = tokenizer_of(family)
    for train_on in ("assistant", "last"):
        whole, cut = (render(tokenizer, Chat(talk), train_on) for talk in (TALK[:3], TALK[:2]))
        assert [e.token_ids.tolist() for e in whole] == [e.token_ids.tolist() for e in cut]


@pytest.mark.parametrize("family", [name for name, kind in FAMILIES.items() if kind.takes_system])
@with_and_without_markers
def test_a_system_message_is_read_and_not_trained(family, markers):
    tokenizer, kind = tokenizer_of(family, markers), FAMILIES[family]
    (example,) = render(tokenizer, Chat(said("hi", "yo", system="Be brief.")), "assistant")
    assert trained_texts(tokenizer, [example]) == [kind.says("yo") + kind.end]
    assert "Be brief." in tokenizer.decode(example.token_ids)


# Single families and templates


def test_the_mask_of_a_short_chat_to_smollm2_has_its_eos_which_is_also_its_padding():
    tokenizer = tokenizer_of("SmolLM2")
    (example,) = render(tokenizer, Chat(said("hi", "yo", system="S")), "assistant")
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert example.token_ids.tolist() == [1, 9690, 198, 67, 2, 198, 1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198, 31041, 2, 198]
    assert np.flatnonzero(example.trained).tolist() == [16, 17]  # the newline after EOS is not: the model has stopped by then


@pytest.mark.skipif("SMOLLM2" not in os.environ, reason="SMOLLM2 names no folder with the checkpoint's tokenizer")
def test_the_mask_of_smollm2s_own_tokenizer_is_that_of_its_copy():
    theirs = AutoTokenizer.from_pretrained(os.environ["SMOLLM2"])
    chat = Chat(said("hi", "yo", system="S"))
    (mine,), (real,) = render(tokenizer_of("SmolLM2"), chat, "assistant"), render(theirs, chat, "assistant")
    assert real.token_ids.tolist() == mine.token_ids.tolist() and real.trained.tolist() == mine.trained.tolist()
    (example,) = render(theirs, Chat(said("hi", "yo\n\nübrigens 漢", "and?", "")), "assistant")
    assert trained_texts(theirs, [example]) == ["yo\n\nübrigens 漢<|im_end|>", "<|im_end|>"]


@with_and_without_markers
def test_thoughts_are_trained_where_the_model_has_them_and_gone_from_the_turns_after(markers):
    tokenizer = tokenizer_of("Qwen 3", markers)
    first = {"role": "assistant", "content": "yo", "reasoning_content": "A."}
    chat = Chat([*said("hi"), first, *said("so", "<think>\nB.\n</think>\n\nno")])
    assert show(tokenizer, render(tokenizer, chat, "assistant")) == [
        "<|im_start|>user⏎hi<|im_end|>⏎<|im_start|>assistant⏎⟦<think>⏎A.⏎</think>⏎⏎yo<|im_end|>⟧⏎",
        "<|im_start|>user⏎hi<|im_end|>⏎<|im_start|>assistant⏎yo<|im_end|>⏎"
        "<|im_start|>user⏎so<|im_end|>⏎<|im_start|>assistant⏎⟦<think>⏎B.⏎</think>⏎⏎no<|im_end|>⟧⏎",
    ]
    assert len(render(tokenizer, chat, "all")) == len(render(tokenizer, chat, "last")) == 1


@with_and_without_markers
def test_turns_that_share_their_thoughts_share_an_example(markers):
    tokenizer = tokenizer_of("Qwen 3", markers)
    loop = [CALL | {"reasoning_content": "Add."}, RESULT, {"role": "assistant", "content": "3", "reasoning_content": "Done."}]
    (example,) = render(tokenizer, Chat([*said("1+2?"), *loop]), "assistant")
    assert trained_texts(tokenizer, [example]) == [
        '<think>\nAdd.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "<think>\nDone.\n</think>\n\n3<|im_end|>",
    ]
    later = Chat([*said("1+2?"), *loop, *said("thanks", "yo")])
    assert [len(runs(tokenizer, e)) for e in render(tokenizer, later, "assistant")] == [2, 1]


@with_and_without_markers
@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("Llama 3", '{"name": "add", "parameters": {"a": 1}}<|eot_id|>'),
        ("Qwen 2.5", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'),
        ("Mistral with tools", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>'),
    ],
)
def test_calls_of_tools_are_trained_and_their_results_are_not(family, call, markers):
    tokenizer, kind = tokenizer_of(family, markers), FAMILIES[family]
    chat = Chat([*said("1+2?"), CALL, RESULT, *said("", "3")[1:]], TOOLS)
    (example,) = render(tokenizer, chat, "assistant")
    assert trained_texts(tokenizer, [example]) == [call, kind.says("3") + kind.end]
    assert example.token_ids.tolist() == template_ids(tokenizer, chat.messages, tools=TOOLS)
    assert '"properties"' in tokenizer.decode(example.token_ids)


def test_a_template_that_treats_the_last_question_apart_gives_each_answer_what_was_asked():
    tokenizer = tokenizer_of("Mistral with tools")
    first, second = render(tokenizer, Chat(said("hi", "yo", "so", "no"), TOOLS), "assistant")
    assert trained_texts(tokenizer, [first, second]) == [" yo</s>", " no</s>"]
    for example, place in ((first, 1), (second, 3)):
        asked = template_ids(tokenizer, said("hi", "yo", "so")[:place], tools=TOOLS, add_generation_prompt=True)
        assert example.token_ids[: len(asked)].tolist() == asked and not example.trained[: len(asked)].any()


def test_a_token_that_begins_in_the_prompt_is_the_prompts():
    tokenizer = FAMILIES["ChatML"].tokenizer()
    (example,) = render(tokenizer, Chat(said("hi", "\nyo")), "assistant")
    assert trained_texts(tokenizer, [example]) == ["yo<|im_end|>"]  # "\n\n" is one token, whose first half is the header's
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}" + (
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert trained_texts(tokenizer, render(tokenizer, Chat(said("hi", "yoyo")), "assistant")) == ["yo<|im_end|>"]
    tokenizer.chat_template = tokenizer.chat_template.replace(": ", ":\n")
    for trim in (False, True):  # with trim the offsets of ":\n" end before the newline
        made = FAMILIES["ChatML"].tokenizer(trim=trim)
        made.chat_template = tokenizer.chat_template
        assert trained_texts(made, render(made, Chat(said("hi", "yoyo")), "assistant")) == ["yoyo<|im_end|>"]


def test_a_marker_that_covers_part_of_a_turn_trains_that_part_and_the_end():
    tokenizer = FAMILIES["Qwen 3"].tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{{ 'Well (' }}"
        "{% generation %}{{ m.content }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    examples = render(tokenizer, Chat(said("hi", "yo", "so", "no")), "assistant")
    assert trained_texts(tokenizer, examples) == ["yo\n<|im_end|>", "no\n<|im_end|>"]


def test_the_end_of_a_turn_is_trained_wherever_the_markers_are():
    tokenizer = FAMILIES["ChatML"].tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ '\n' }}{% endgeneration %}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert trained_texts(tokenizer, render(tokenizer, Chat(said("hi", "yo")), "assistant")) == ["<|im_end|>"]


def test_a_marker_around_the_header_does_not_train_what_the_model_is_given():
    tokenizer = FAMILIES["ChatML"].tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}"
        "{% endgeneration %}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    examples = render(tokenizer, Chat(said("hi", "yo", "so", "\nno")), "assistant")
    assert trained_texts(tokenizer, examples) == ["yo<|im_end|>", "no<|im_end|>"]  # nor the token that begins in it


def test_a_special_token_that_takes_the_white_space_before_it_is_no_end_of_the_turn_before():
    tokenizer = FAMILIES["ChatML"].tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|im_start|>", lstrip=True, special=True, normalized=False)]})
    (example,) = render(tokenizer, Chat(said("hi", "yo", "so", "no")), "assistant")
    assert trained_texts(tokenizer, [example]) == ["yo<|im_end|>", "no<|im_end|>"]


def test_a_key_of_a_message_that_is_null_is_as_if_it_were_not_there():
    tokenizer = FAMILIES["ChatML"].tokenizer()
    called = "{{ ('call' if m.tool_calls is defined else '') + m.content"
    tokenizer.chat_template = FAMILIES["ChatML"].text(markers=False).replace("{{ m.content", called)
    absent, null = said("hi", "yo"), [message | {"tool_calls": None} for message in said("hi", "yo")]
    assert show(tokenizer, render(tokenizer, Chat(null), "assistant")) == show(tokenizer, render(tokenizer, Chat(absent), "assistant"))


def test_a_tokenizer_that_was_saved_with_a_limit_and_padding_reads_chats_whole():
    tokenizer, limited = FAMILIES["ChatML"].tokenizer(), FAMILIES["ChatML"].tokenizer()
    limited.backend_tokenizer.enable_truncation(4)
    limited.backend_tokenizer.enable_padding(length=500)
    assert show(limited, render(limited, Chat(TALK), "assistant")) == show(tokenizer, render(tokenizer, Chat(TALK), "assistant"))


# What cannot be exact is refused


def refused(family: str, messages: list[dict], *, template: str | None = None, markers: bool = False, train_on="assistant") -> str:
    tokenizer = FAMILIES[family].tokenizer(markers=markers)
    if template is not None:
        tokenizer.chat_template = template
    with pytest.raises(ValueError) as error:
        render(tokenizer, Chat(messages), train_on)
    return str(error.value)


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_a_template_that_refuses_a_chat_is_quoted_with_the_remedy(train_on):
    error = refused("Gemma", said("hi", "yo", system="S"), train_on=train_on)
    assert "System role not supported" in error and "(system, user" in error and "into the first user message" in error
    error = refused("Mistral", said("hi") + said("hi", "yo"), train_on=train_on)
    assert "must alternate" in error and "(user, user" in error


def test_a_message_without_content_is_an_error_of_the_row():
    assert "refuses the row's messages (user, assistant)" in refused("ChatML", said("hi") + [{"role": "assistant", "content": None}])


def test_an_answer_that_is_not_rendered_after_its_prompt_is_refused():
    error = refused("Mistral with tools", said("hi", "yo", system="Be brief."))  # its system message is with the last message only
    assert "'<s>[INST] Be brief." in error and "'<s>[INST] hi[/INST]" in error
    opened = "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}" + (
        "{% if add_generation_prompt %}assistant:<think>{% endif %}"
    )
    assert "assistant:<think>'" in refused("Qwen 3", said("hi", "yo"), template=opened)


def test_a_turn_that_does_not_end_in_a_special_token_is_refused():
    bare = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    error = refused("ChatML", said("hi", "yo"), template=bare)
    assert "message 1 (assistant)" in error and "never stops" in error
    assert "never stops" in refused("ChatML", said("hi", "<|im_end|>yo"), template=bare)


def test_markers_around_no_part_of_a_turn_are_an_error():
    tokenizer = FAMILIES["Mistral with tools"]
    template = tokenizer.text(markers=True).replace("{% generation %}{{ '[TOOL_CALLS]", "{{ '[TOOL_CALLS]").replace(
        "{{ ']' + eos_token }}{% endgeneration %}", "{{ ']' + eos_token }}"
    )
    assert "message 3 (assistant): the chat template has {% generation %} markers, but none" in refused(
        "Mistral with tools", [*said("hi", "yo", "so"), CALL], template=template
    )


def test_a_chat_without_a_turn_to_train_is_an_error():
    assert "no assistant message" in refused("ChatML", said("hi"))
    assert "message 0 (assistant) answers nothing" in refused("ChatML", said("", "yo")[1:])


def test_a_tokenizer_without_a_template_or_without_offsets_is_an_error():
    bare = FAMILIES["ChatML"].tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        render(bare, Chat(TALK), "assistant")
    slow = ByT5Tokenizer(chat_template=tokenizer_of("ChatML").chat_template)
    with pytest.raises(ValueError, match="ByT5Tokenizer cannot say"):
        render(slow, Chat(TALK), "assistant")


# Pairs and texts


def test_a_pair_is_the_prompt_and_the_completion_with_eos_once():
    tokenizer = tokenizer_of("Gemma")
    for completion in (" yo", " yo<eos>"):
        example = render_pair(tokenizer, "1+2=", completion)
        assert runs(tokenizer, example) == [(5, " yo<eos>")]  # <bos>1+2= stand before it


def test_a_text_is_trained_from_its_second_token_to_eos():
    for family, first in (("Gemma", "<bos>"), ("ChatML", "1")):
        tokenizer = tokenizer_of(family)
        for text in ("1 yo", "1 yo" + tokenizer.eos_token):
            example = render_text(tokenizer, text)
            assert runs(tokenizer, example) == [(1, f"{first}1 yo{tokenizer.eos_token}".replace("11", "1").removeprefix(first))]
            assert tokenizer.decode(example.token_ids[:1]) == first
    with pytest.raises(ValueError, match="its text is empty"):
        render_text(tokenizer, " \n")


def test_a_batch_is_shown_with_its_trained_tokens_in_brackets_or_colour():
    tokenizer = tokenizer_of("Mistral")
    (example,) = render(tokenizer, Chat(said("hi", "yo\n漢")), "assistant")
    assert coloured(tokenizer, example) == "<s>[INST] hi [/INST]⟦ yo⏎\n漢</s>⟧"
    shown = marked(tokenizer, example, "\x1b[32m", "\x1b[0m")
    assert re.sub("\x1b\\[\\d+m", "", shown).replace("⏎", "") == tokenizer.decode(example.token_ids)


# The document


def test_the_masks_of_the_document_are_those_of_the_code():
    assert DOCUMENT.read_text() == current_document(), "run python -m tests.chats"

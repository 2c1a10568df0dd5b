"""Chat templates of the common families on small tokenizers of their kinds. `python -m tests.chats` writes the masks of docs/sft.md."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from conversations import MARKER, Chat, Rendered, marked, render, render_text
from formats import SFTDataConfig, render_row

TEMPLATES = Path(__file__).parent / "data" / "templates"
DOCUMENT = Path(__file__).parent.parent / "docs" / "sft.md"
# Pieces that are one token where they stand in a word of the pre-tokenizer; some have white space that a turn's border may cut.
PIECES = ["\n\n", ":\n", ".\n", " y", " yo", "yo", "hi", "ass", "istant", "user", "system", " [", "</", "]]", "▁y", "▁yo", "ing", "th"]
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def model(pieces: list[str], specials: list[str], characters: Iterable[str], given: dict[str, int], **options):
    """BPE whose merges make the pieces, left to right, and its vocabulary; `given` ids stay as they are."""
    known = set(characters)
    pieces = [piece for piece in pieces if set(piece) <= known]
    merges = [(piece[:i], piece[i]) for piece in pieces for i in range(1, len(piece))]
    vocabulary, free = dict(given), (i for i in range(10**6) if i not in given.values())
    for token in [*specials, *sorted(known), *(a + b for a, b in merges)]:
        if token not in vocabulary:
            vocabulary[token] = next(free)
    return models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges)), **options), vocabulary


def byte_level(specials: list[str], given: dict[str, int], bos: str | None, trim: bool = True) -> Tokenizer:
    """As of GPT-2, Llama 3 and Qwen; with `trim` its offsets leave out white space at a token's edges."""
    as_bytes = str.maketrans({" ": "Ġ", "\n": "Ċ"})
    pieces = [piece.translate(as_bytes) for piece in PIECES]
    built, vocabulary = model(pieces, specials, pre_tokenizers.ByteLevel.alphabet(), given)
    tokenizer = Tokenizer(built)
    byte_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), byte_pieces])
    tokenizer.decoder = decoders.ByteLevel()
    steps: list[processors.PostProcessor] = [processors.ByteLevel(trim_offsets=trim)]
    if bos is not None:
        steps.append(processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]))
    tokenizer.post_processor = processors.Sequence(steps)
    return tokenizer


def sentence_piece(specials: list[str], given: dict[str, int], bos: str | None) -> Tokenizer:
    """As of Gemma and Mistral: a space is ▁, other characters fall back to bytes."""
    characters = [*(chr(c) for c in range(33, 127)), "\n", "▁", *(f"<0x{b:02X}>" for b in range(256))]
    built, vocabulary = model(PIECES, [*specials, "<unk>"], characters, given, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(built)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])])
    return tokenizer


@dataclass(frozen=True)
class Family:
    """A template of tests/data/templates and a tokenizer of its kind."""

    template: str
    kind: Callable[..., Tokenizer]
    specials: list[str]  # the first ids
    eos: str
    end: str  # what ends a turn of the assistant
    bos: str | None = None
    pad: str | None = None  # None: eos
    adds_bos: bool = False
    words: list[str] = field(default_factory=list)  # tokens like <think>, whole but not special
    given: dict[str, int] = field(default_factory=dict)
    says: Callable[[str], str] = str  # what the assistant's content becomes
    takes_system: bool = True

    def tokenizer(self, *, markers: bool = False, **kind) -> PreTrainedTokenizerFast:
        made = self.kind(self.specials, self.given, self.bos if self.adds_bos else None, **kind)
        made.add_special_tokens([AddedToken(token, normalized=False) for token in self.specials])
        made.add_tokens([AddedToken(token, normalized=False) for token in self.words])
        options = {"bos_token": self.bos, "eos_token": self.eos, "pad_token": self.pad or self.eos}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **options)
        tokenizer.chat_template = self.text(markers)
        return tokenizer

    def text(self, markers: bool) -> str:
        text = (TEMPLATES / f"{self.template}.jinja").read_text()
        return text if markers else re.sub(r"\{% endgeneration %\}", "", MARKER.sub("", text))


IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SMOL_IDS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "S": 67, "Ċ": 198, "ass": 520, "user": 4093, "hi": 6004}
SMOL_IDS |= {"istant": 9531, "system": 9690, "yo": 31041}
LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MISTRAL = ["<s>", "</s>"]
CALLS = ["<tool_call>", "</tool_call>"]
FAMILIES = {
    "Llama 3": Family("llama3", byte_level, LLAMA, "<|eot_id|>", "<|eot_id|>", bos=LLAMA[0], adds_bos=True, says=str.strip),
    "Qwen 2.5": Family("qwen25", byte_level, IM, "<|im_end|>", "<|im_end|>", pad="<|endoftext|>", words=CALLS),
    "Qwen 3": Family(
        "qwen3", byte_level, IM, "<|im_end|>", "<|im_end|>", pad="<|endoftext|>", words=[*CALLS, "<think>", "</think>"],
        says=lambda content: "<think>\n\n</think>\n\n" + content.lstrip("\n"),
    ),
    "Gemma": Family(
        "gemma", sentence_piece, ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"], "<eos>", "<end_of_turn>",
        bos="<bos>", pad="<pad>", adds_bos=True, says=str.strip, takes_system=False,
    ),
    "Mistral": Family("mistral", sentence_piece, MISTRAL, "</s>", "</s>", bos="<s>", adds_bos=True, says=" {}".format),
    "Mistral with tools": Family(
        "mistral_tools", sentence_piece, [*MISTRAL, "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        "</s>", "</s>", bos="<s>", adds_bos=True, says=" {}".format, takes_system=False,
    ),
    "SmolLM2": Family("smollm2", byte_level, IM, "<|im_end|>", "<|im_end|>", bos="<|im_start|>", given=SMOL_IDS),
    "ChatML": Family("chatml", byte_level, IM, "<|im_end|>", "<|im_end|>"),
    "Phi 3": Family(
        "phi3", sentence_piece, ["<|endoftext|>", "<|end|>", "<|user|>", "<|system|>", "<|assistant|>"],
        "<|endoftext|>", "<|end|>\n<|endoftext|>",
    ),
}  # fmt: skip


@cache
def tokenizer_of(family: str, markers: bool = False) -> PreTrainedTokenizerFast:
    return FAMILIES[family].tokenizer(markers=markers)


# The document

TALK = [
    {"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"},
    {"role": "user", "content": "+4?"}, {"role": "assistant", "content": "7"},
]  # fmt: skip
SYSTEM = [{"role": "system", "content": "Add."}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
LOOP: list[dict[str, Any]] = [
    {"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "", "reasoning_content": "Call.", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3.", "reasoning_content": "Done."},
]  # fmt: skip


def block(family: str, examples: list[Rendered]) -> str:
    shown = [marked(tokenizer_of(family), example, "⟦", "⟧").rstrip("\n") for example in examples]
    return "```text\n" + "\n----\n".join(shown) + "\n```"


def blocks() -> dict[str, str]:
    """What stands between `<!-- mask: NAME -->` and `<!-- end -->` in the document."""
    chat = {name: block(name, render(tokenizer_of(name), Chat(TALK), "assistant")) for name in FAMILIES}
    smol, bare = tokenizer_of("SmolLM2"), FAMILIES["Mistral"].tokenizer()
    bare.chat_template, pair = None, {"prompt": "1+2=", "completion": " 3"}
    question = [{"role": "user", "content": "Add.\n\n1+2"}, {"role": "assistant", "content": "3"}]
    return chat | {
        "messages, assistant": block("SmolLM2", render(smol, Chat(SYSTEM + TALK), "assistant")),
        "messages, last": block("SmolLM2", render(smol, Chat(SYSTEM + TALK), "last")),
        "messages, all": block("SmolLM2", render(smol, Chat(SYSTEM + TALK), "all")),
        "alpaca": block("ChatML", render(tokenizer_of("ChatML"), Chat(question), "assistant")),
        "pair": block("Mistral", render_row(SFTDataConfig(path="pairs.jsonl"), "prompt_completion", bare, pair)),
        "text": block("Mistral", [render_text(tokenizer_of("Mistral"), "1+2= 3")]),
        "tools": block("Qwen 3", render(tokenizer_of("Qwen 3"), Chat(LOOP), "assistant")),
    }


def current_document() -> str:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, mask in blocks().items():
        place = re.compile(rf"(?<=<!-- mask: {re.escape(name)} -->\n).*?(?=<!-- end -->)", re.DOTALL)
        assert len(place.findall(text)) == 1, f"{DOCUMENT.name} has not one place for the mask {name}"
        text = place.sub(f"{mask}\n".replace("\\", r"\\"), text)
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(current_document(), encoding="utf-8")
    print(f"wrote {DOCUMENT}")

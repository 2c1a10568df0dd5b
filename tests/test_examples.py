"""The order of examples from several datasets, resuming anywhere, what becomes of rows that are too long, and packing."""

import itertools
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from batch import Episode, packing_efficiency, plan_rows
from examples import Mixture, SFTDataConfig, spans
from losses import NLLLoss
from model import Model, ModelSource
from tests.steps import gradient, place
from tests.streams import ANSWER, CHAT, FORGETFUL, MODES, PLAIN, QUESTION, dataset, of_row, same, shown, stream
from tests.test_data import make_tokenizer
from trainer import Trainer, TrainingConfig

__all__ = ["place"]  # a fixture


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
    states = [(straight.state, straight.epoch, straight.counts())]
    while len(steps) < 40 and (taken := straight.take(1)):
        steps.append(taken)
        states.append((straight.state, straight.epoch, straight.counts()))
    positions = {state["position"] for state, _, _ in states}
    assert len(positions) == len(states) and len(steps) > 12
    assert overlong != "split" or max(positions) >= 2**40, "some states are in the middle of a row"
    for begun in range(len(steps)):
        resumed = stream(*cfgs, **states[begun][0], **options)
        for later in range(begun, min(begun + 6, len(steps))):
            assert same(resumed.take(1), steps[later])
            assert (resumed.state, resumed.epoch, resumed.counts()) == states[later + 1]
    assert max(states[-1][2][f"data/{kind}"] for kind in ("truncated", "split", "dropped")) > 0
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

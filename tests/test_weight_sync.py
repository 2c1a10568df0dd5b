"""The engine is the policy: after real optimizer steps and a sync, vLLM's log-probs and tensors are the trainer's.

Every fixture starts one world of real processes (tests/sync_driver.py), in which several engines follow one another.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.loading import find_cut
from tests.world import ROOT, run_script

# The vocabulary, 515 with the special tokens, is divided by nothing, and both ranks of TP 2 hold a part of it.
MANY = "".join(chr(0x4E00 + i) for i in range(512))
FP32_ROUNDING = 2e-5  # of a log-prob. Measured: 4e-6 at most
BF16_ROUNDING = {"gap": 0.25, "mean": 0.05}  # of a log-prob, largest and mean. Measured: .10 and .02
VERIFIED = "weight sync: {} in the engine differs from the trainer's"

Checkpoints = Callable[..., Path]
Report = dict[str, list]


def start(
    nproc: int, folder: Path, cases: list[dict], *, colocate: bool = False, parallelism: dict | None = None, ranks: dict | None = None,
    **services: dict,
) -> Report:
    """Run `cases` in a world of their own; what each returned, by rank."""
    spec, report = folder / "spec.json", folder / "report.json"
    colocated = colocate or ranks is not None  # then the services do not count
    content = {"services": services, "parallelism": parallelism or {}, "colocate": colocated, "cases": cases, "ranks": ranks}
    spec.write_text(json.dumps(content, default=str))
    run_script(nproc, ROOT / "tests/sync_driver.py", str(spec), str(report))
    return json.loads(report.read_text())


def agreement(name: str, model: Path, dtype: str) -> dict:
    return {"name": name, "run": "agreement", "model": model, "engine_dtype": dtype}


def ways(model: Path) -> dict:
    return {"name": "ways", "run": "ways", "model": model, "engine_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def one_rank(checkpoint_of: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Report:
    tied, untied = (checkpoint_of("qwen3", tied=tied, characters=MANY) for tied in (True, False))
    cases = [
        agreement("untied bf16", untied, "bfloat16"),
        {"name": "faults", "run": "violations", "model": tied, "engine_dtype": "float32", "rank": 0},
        ways(untied),
        {"name": "packed head", "run": "packed_head", "model": tied},
        {"name": "prefix cache", "run": "prefix_cache", "model": tied},
        {"name": "moved embedding", "run": "moved_embedding", "model": tied},
    ]
    return start(1, tmp_path_factory.mktemp("one_rank"), cases, colocate=True)


@pytest.fixture(scope="module")
def two_replicas(checkpoint_of: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Report:
    tied, untied = (checkpoint_of("qwen3", tied=tied, characters=MANY) for tied in (True, False))
    cases = [
        agreement("untied fp32", untied, "float32"),
        {"name": "unseeded", "run": "sampling", "model": tied, "seeds": [0, 0, 1], "seeded": False},
        {"name": "seeded", "run": "sampling", "model": tied, "seeds": [0], "seeded": True},
    ]
    return start(2, tmp_path_factory.mktemp("two_replicas"), cases, colocate=True)


@pytest.fixture(scope="module")
def tensor_parallel(checkpoint_of: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Report:
    tied, biased = checkpoint_of("qwen3", characters=MANY), checkpoint_of("qwen2", tied=False, characters=MANY)
    cases = [
        agreement("tied fp32", tied, "float32"),
        agreement("untied bf16", biased, "bfloat16"),
        ways(biased),
        {"name": "faults", "run": "violations", "model": tied, "engine_dtype": "float32", "rank": 1},
        {"name": "unseeded", "run": "sampling", "model": tied, "seeds": [0], "seeded": False},
    ]
    return start(2, tmp_path_factory.mktemp("tensor_parallel"), cases, colocate=True, generator={"procs": 2})


@pytest.fixture(scope="module")
def apart(checkpoint_of: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Report:
    llama, biased = checkpoint_of("llama", characters=MANY), checkpoint_of("qwen2", tied=False, characters=MANY)
    cases = [
        agreement("untied fp32", biased, "float32"),
        agreement("tied bf16", llama, "bfloat16"),
        ways(llama),
        {"name": "faults", "run": "violations", "model": llama, "engine_dtype": "bfloat16", "rank": 1},
    ]
    roles = {"trainer": {"procs": 1}, "generator": {"procs": 1}}
    return start(2, tmp_path_factory.mktemp("apart"), cases, colocate=False, **roles)


def engines(results: list[dict]) -> list[dict]:
    """What the ranks with an engine saw."""
    return [r for r in results if "tensors" in r]


def check_agreement(results: list[dict], *, bf16: bool, linears: int = 10) -> None:
    for r in results:
        limits = BF16_ROUNDING if bf16 else {"gap": FP32_ROUNDING}
        for what, limit in limits.items():
            assert r[what] <= limit, f"{what}: {r[what]:.2g}"
        assert r["first"] <= limits["gap"], f"before training: {r['first']:.2g}"
        assert r["stale"] > 1, f"the training moved no log-prob by much ({r['stale']:.2g}): agreement would prove nothing"
        assert r["versions"] == [3]
    for r in engines(results):
        assert r["misnamed"] == [] and r["different"] == []
        assert (r["packed"], r["linears"]) == (0, linears)
    heads = [r["head_error"] for r in results if r["head_error"] is not None]
    assert heads and max(heads) <= (0.05 if bf16 else 1e-5)


@pytest.mark.parametrize(
    ("world", "case"),
    [("one_rank", "untied bf16"), ("two_replicas", "untied fp32"), ("tensor_parallel", "tied fp32"), ("tensor_parallel", "untied bf16"),
     ("apart", "untied fp32"), ("apart", "tied bf16")],
)  # fmt: skip
def test_after_training_and_a_sync_the_engine_gives_every_sampled_token_the_policys_logprob(
    world: str, case: str, request: pytest.FixtureRequest
) -> None:
    check_agreement(request.getfixturevalue(world)[case], bf16=case.endswith("bf16"))


@pytest.mark.parametrize("world", ["one_rank", "two_replicas"])
def test_every_tensor_of_an_engine_on_one_rank_is_the_policys_bit_for_bit(world: str, request: pytest.FixtureRequest) -> None:
    results = next(iter(request.getfixturevalue(world).values()))
    assert [r["whole"] for r in engines(results)] == [r["tensors"] for r in results]


def check_ways(results: list[dict]) -> None:
    loaded = [r for r in results if r]
    assert loaded
    for r in loaded:
        # Once vLLM's loader got all of them, norms of ones and biases of zeros among them, and then none.
        assert r["known"] == r["tensors"] == r["given again"]
        assert r["given"] == r["different"] == r["not the policy's"] == []


@pytest.mark.parametrize("world", ["one_rank", "tensor_parallel", "apart"])
def test_what_is_copied_into_an_engine_is_what_vllms_loader_leaves_in_it(world: str, request: pytest.FixtureRequest) -> None:
    check_ways(request.getfixturevalue(world)["ways"])


@pytest.mark.slow
def test_an_engine_of_which_one_rank_trains_is_the_policy(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    model = checkpoint_of("qwen3", characters=MANY)
    report = start(3, tmp_path, [agreement("tied", model, "float32"), ways(model)], ranks={"trainer": [0, 1], "generator": [1, 2]})
    check_agreement(report["tied"], bf16=False)
    check_ways(report["ways"])


WHOLE = torch.arange(48.0).view(8, 6)


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        (WHOLE, WHOLE[3:7]),  # no rank's part of 2
        (WHOLE, WHOLE[:4, :3]),  # cut twice
        (WHOLE, WHOLE.flip(0)),  # in another order
        (WHOLE, WHOLE.T),  # in another layout
        (WHOLE, WHOLE.bfloat16()),
        (WHOLE, WHOLE[:4] + 1),
        (torch.cat([WHOLE, WHOLE]), WHOLE),  # could be either half
        (torch.ones(8), torch.ones(8)),  # could be in any order
        (torch.full((8,), float("nan")), torch.full((8,), float("nan"))),
    ],
)
def test_a_part_that_may_be_another_is_left_to_vllms_loader(whole: torch.Tensor, part: torch.Tensor) -> None:
    assert find_cut(whole, part, ranks=2) is None


@pytest.mark.parametrize("part", [WHOLE, WHOLE[:4], WHOLE[4:], WHOLE[:, 3:], WHOLE[6:], WHOLE[8:]])
def test_a_part_that_a_rank_keeps_is_found(part: torch.Tensor) -> None:
    """The last two: what is left of a padded vocabulary, and the part of a rank that has padding alone."""
    cut = find_cut(WHOLE, part, ranks=2)
    assert cut is not None and torch.equal(cut.of(WHOLE), part)


@pytest.mark.parametrize("world", ["one_rank", "tensor_parallel", "apart"])
class TestASyncThatWentWrong:
    @pytest.fixture
    def faults(self, world: str, request: pytest.FixtureRequest) -> list[dict]:
        """Of the ranks with an engine."""
        return [r for r in request.getfixturevalue(world)["faults"] if r["version"] != -1]

    def test_one_bit_of_one_ranks_slice_is_noticed_on_every_rank_of_the_replica(self, faults: list[dict]) -> None:
        tensors = {"q": "layers.1.self_attn.q_proj", "down": "layers.0.mlp.down_proj", "norm": "norm", "embedding": "embed_tokens"}
        for r in faults:
            for kind, name in tensors.items():
                assert r[kind].startswith(VERIFIED.format(f"model.{name}.weight"))

    def test_a_bit_that_flips_on_the_way_is_noticed(self, faults: list[dict]) -> None:
        assert all(r["on_the_way"].startswith(VERIFIED.format("model.layers.0.mlp.up_proj.weight")) for r in faults)

    def test_a_name_that_the_engine_does_not_have_is_an_error(self, faults: list[dict]) -> None:
        assert all("layers.1.mlp.gate_up_norm" in r["unknown"] for r in faults)

    def test_a_tensor_that_was_not_sent_is_an_error(self, faults: list[dict]) -> None:
        ending = "the trainer sent nothing for 1 tensors of the engine: ['model.layers.0.mlp.up_proj.weight']"
        assert all(r["missing"].endswith(ending) for r in faults)

    def test_it_leaves_the_policy_version_as_it_was_and_a_good_sync_mends_it(self, faults: list[dict]) -> None:
        assert [(r["clean"], r["mended"], r["version"], r["again"]) for r in faults] == [(None, None, 1, None)] * len(faults)


def test_an_engine_that_keeps_its_own_copy_of_the_head_would_be_noticed(one_rank: Report) -> None:
    """vLLM's CPU build packs weights into copies, of which a sync forgets that of a tied head; no checksum can see it."""
    (r,) = one_rank["packed head"]
    assert r["gap"] > 1000 * FP32_ROUNDING and r["head_error"] > 0.01
    assert r["plain_gap"] <= FP32_ROUNDING and r["plain_head_error"] <= 1e-5


def test_a_sync_empties_the_prefix_cache(one_rank: Report) -> None:
    (r,) = one_rank["prefix cache"]
    first, repeated, without_reset, after_sync, repeated_again = r["cached"]
    assert (first, after_sync) == (0, 0)
    assert repeated == without_reset == repeated_again == 128


def test_after_a_sync_a_cached_prompt_is_answered_as_by_a_new_engine(one_rank: Report) -> None:
    (r,) = one_rank["prefix cache"]
    assert r["new"] == r["fresh"]
    assert r["new"]["ids"] != r["old"]["ids"], "the sync changed nothing"
    assert r["stale"] != r["fresh"], "old prefixes under new weights would not have been seen"


def test_a_tied_models_embedding_and_head_both_follow_the_policy(one_rank: Report) -> None:
    (r,) = one_rank["moved embedding"]
    assert r["embedding"] and r["head"] and r["head_error"] <= 1e-5 and r["gap"] <= FP32_ROUNDING
    assert r["sent"] == r["expected"]


def test_replicas_answer_the_same_prompt_differently(two_replicas: Report) -> None:
    for ours, theirs in zip(*two_replicas["unseeded"], strict=True):
        assert all(a != b for mine, yours in zip(ours, theirs, strict=True) for a in mine for b in yours)


def test_samples_of_a_prompt_differ_and_a_prompt_asked_again_has_new_answers(two_replicas: Report) -> None:
    for runs in two_replicas["unseeded"]:
        for run in runs:
            answers = [tuple(tokens) for group in run for tokens in group]
            assert len(set(answers)) == len(answers)


def test_the_same_seed_repeats_a_run_and_another_does_not(two_replicas: Report) -> None:
    for first, again, other in two_replicas["unseeded"]:
        assert first == again
        assert all(a != b for mine, yours in zip(first, other, strict=True) for a, b in zip(mine, yours, strict=True))


def test_a_seeded_sample_does_not_depend_on_who_samples_or_when(two_replicas: Report) -> None:
    (ours,), (theirs,) = two_replicas["seeded"]
    assert ours == theirs
    assert ours[:2] == ours[2:] and ours[0] != ours[1]


def test_tensor_parallel_ranks_sample_the_same_tokens(tensor_parallel: Report) -> None:
    ours, theirs = tensor_parallel["unseeded"]
    assert ours == theirs


MODELS: dict[str, dict[str, Any]] = {
    "qwen3 tied": {"family": "qwen3"},
    "qwen3 untied": {"family": "qwen3", "tied": False},
    "qwen2 tied": {"family": "qwen2"},
    "llama untied": {"family": "llama", "tied": False},
    "one key-value head": {"family": "qwen3", "kv_heads": 1},
    "vocabulary of 17": {"family": "qwen3", "characters": MANY[:14]},
}
WORLDS: dict[str, tuple[int, dict]] = {
    "2 colocated, TP 1": (2, {"colocate": True}),
    "2 colocated, TP 2": (2, {"colocate": True, "generator": {"procs": 2}}),
    "trainer 2, generator TP 2": (4, {"colocate": False, "trainer": {"procs": 2}, "generator": {"procs": 2}}),
    "trainer TP 2, generator 2 replicas": (
        4, {"colocate": False, "parallelism": {"tensor_parallel_degree": 2}, "trainer": {"procs": 2}, "generator": {"num_replicas": 2}},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_every_kind_of_model_agrees_in_every_layout(world: str, checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    nproc, options = WORLDS[world]
    trainer_tp = options.get("parallelism", {}).get("tensor_parallel_degree", 1)
    fitting = {name: choice for name, choice in MODELS.items() if choice.get("kv_heads", 2) % trainer_tp == 0}
    models = {name: checkpoint_of(**({"characters": MANY} | choice)) for name, choice in fitting.items()}
    cases = [agreement(f"{name} {dtype}", m, dtype) for name, m in models.items() for dtype in ("float32", "bfloat16")]
    report = start(nproc, tmp_path, cases, **options)
    for name, results in report.items():
        check_agreement(results, bf16=name.endswith("bfloat16"))

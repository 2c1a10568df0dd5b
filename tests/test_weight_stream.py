"""What travels is the policy: whoever holds it, in whatever shards, whoever reads it, and however many ranks send at once."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallel.weights import ON_THE_WAY
from tests.stream_driver import digest
from tests.test_weight_sync import MANY, Checkpoints
from tests.world import ROOT, run_script

LAYOUTS: dict[str, tuple[dict, list[int]]] = {  # the trainer's RolePlan, the readers
    "FSDP 2, apart": ({"ranks": [0, 1]}, [2]),
    "FSDP 3, apart": ({"ranks": [0, 1, 2]}, [3]),
    "TP 2, apart": ({"ranks": [0, 1], "tp": 2}, [2, 3]),
    "HSDP 2 x 2, apart": ({"ranks": [0, 1, 2, 3], "replicate": 2}, [4]),
    "FSDP 2 x TP 2, overlapping": ({"ranks": [0, 1, 2, 3], "tp": 2}, [3, 4]),
    "PP 2 x FSDP 2, overlapping": ({"ranks": [0, 1, 2, 3], "pp": 2}, [1, 4]),
    "PP 2, colocated": ({"ranks": [0, 1], "pp": 2}, [0, 1]),
    "FSDP 2, colocated": ({"ranks": [0, 1]}, [0, 1]),
    "FSDP 2, overlapping": ({"ranks": [0, 1]}, [1, 2]),
    "one rank, on the last of two": ({"ranks": [0, 1]}, [1]),
}
QUICK = ("FSDP 2, overlapping", "PP 2 x FSDP 2, overlapping")


def start(folder: Path, cases: list[dict], **roles: dict) -> dict[str, list[dict]]:
    """Run `cases` in a world of their own; what each returned, by rank."""
    spec, report = folder / "spec.json", folder / "report.json"
    spec.write_text(json.dumps(roles | {"cases": cases}, default=str))
    nproc = 1 + max(rank for role in roles.values() for rank in role["ranks"])
    run_script(nproc, ROOT / "tests/stream_driver.py", str(spec), str(report))
    return json.loads(report.read_text())


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in LAYOUTS])
def test_readers_get_the_checkpoint_bit_for_bit_however_many_ranks_send_it(layout: str, checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    trainer, readers = LAYOUTS[layout]
    model = checkpoint_of("qwen3", tied=False, characters=MANY)
    cases = [
        {"name": f"{dtype} {n}", "run": "spread", "model": model, "dtype": dtype, "max_senders": n}
        for dtype, n in (("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 3), ("float32", 2))
    ]
    cases.append(cases[1] | {"name": "bfloat16 to the reference", "to_reference": True})
    report = start(tmp_path, cases, trainer=trainer, generator={"ranks": readers}, reference={"ranks": readers})
    file = load_file(model / "model.safetensors")
    for name, results in report.items():
        expected = {n: digest(t.to(getattr(torch, name.split()[0]))) for n, t in file.items()}
        for rank, r in enumerate(results):
            assert r["digests"] == (expected if rank in readers else {}), f"{name}, rank {rank}"
            assert r["count"] == len(r["digests"]) and r["checksums"] and r["buckets"] > 3
    counts = [len(report[f"bfloat16 {n}"][0]["senders"]) for n in (1, 2, 3)]
    stage = trainer["ranks"][: len(trainer["ranks"]) // trainer.get("pp", 1)]
    assert counts[:2] == ([1, min(2, len(stage))] if set(readers) - set(stage) else [0, 0]) and counts[2] >= counts[1]


HEAD, BODY = {"embed": 9000}, {f"{i}": 700 * i + 1 for i in range(12)}
STAGES: dict[str, tuple[list[list[int]], list[dict[str, int]]]] = {
    "two of one rank": ([[0], [1]], [HEAD | BODY, {"last": 5, "norm": 30_000}]),
    "two of two ranks": ([[0, 1], [2, 3]], [HEAD | BODY, {"last": 5, "norm": 30_000}]),
    "a tied embedding in both": ([[0], [1]], [HEAD | BODY, {"last": 5} | HEAD]),
    "a stage with many buckets, one with none": ([[0], [1]], [BODY | HEAD, HEAD]),
    "three": ([[0], [1], [2]], [HEAD, BODY, {"norm": 7}]),
}
READERS = [[4], [0, 1, 2, 3], [1, 4]]


@pytest.fixture(scope="module")
def by_stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    cases = [
        {"name": f"{name}, to {readers}, {n}", "run": "staged", "stages": stages, "held": held, "readers": readers, "max_senders": n}
        for name, (stages, held) in STAGES.items() for readers in READERS for n in (1, 2)
    ]  # fmt: skip
    return start(tmp_path_factory.mktemp("stages"), cases, trainer={"ranks": [0, 1, 2, 3]}, generator={"ranks": [4]})


@pytest.mark.parametrize("readers", READERS, ids=lambda readers: f"to {readers}")
@pytest.mark.parametrize("stages", STAGES)
def test_every_stage_sends_its_own_and_what_two_stages_hold_is_sent_once(
    stages: str, readers: list[int], by_stages: dict[str, list[dict]]
) -> None:
    for n in (1, 2):
        for rank, r in enumerate(by_stages[f"{stages}, to {readers}, {n}"]):
            assert r["right"] == (rank in readers) and r["checksums"], f"rank {rank}, {n} senders"
            assert r["count"] == len(r["digests"]) and (r["count"] > 0) == (rank in readers)


SIZES, BUCKET = [10_000] * 24, 100_000  # elements of 2 bytes; bytes of a bucket, which holds five
ALLOWED = ON_THE_WAY * BUCKET + 2 * max(SIZES) + 1000  # checksums


@pytest.fixture(scope="module", params=[[1], [0]], ids=["apart", "on the same rank"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    cases = [{"name": f"{n}", "run": "memory", "sizes": SIZES, "bucket_bytes": BUCKET, "keep": n} for n in (0, 1)]
    return start(tmp_path_factory.mktemp("live"), cases, trainer={"ranks": [0]}, generator={"ranks": request.param})


def test_no_more_than_two_buckets_and_the_largest_tensor_are_alive(live: dict[str, list[dict]]) -> None:
    for r in live["0"]:
        assert BUCKET < r["peak"] <= ALLOWED
        assert r["left"] == 0


def test_a_reader_that_keeps_a_bucket_would_have_been_seen(live: dict[str, list[dict]]) -> None:
    assert max(r["peak"] for r in live["1"]) > ALLOWED

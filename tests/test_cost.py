"""What a sync and a rollout cost the host beside their bytes: counted, since seconds say little on a shared machine."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from parallel.memory import gpu_seqs
from rollout.sampled import keep_numbers
from tests.world import ROOT, run_script


@pytest.fixture(scope="module")
def report(checkpoint_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    few, many = checkpoint_of("qwen3"), checkpoint_of("qwen3", layers=6)
    cases = [{"name": name, "run": "sync", "model": str(model)} for name, model in (("few", few), ("many", many))]
    cases.append({"name": "rollout", "run": "rollout", "model": str(few)})
    folder = tmp_path_factory.mktemp("cost")
    (folder / "spec.json").write_text(json.dumps({"cases": cases}))
    run_script(1, ROOT / "tests/cost_driver.py", str(folder / "spec.json"), str(folder / "report.json"))
    return {name: ranks[0] for name, ranks in json.loads((folder / "report.json").read_text()).items()}


def test_the_host_waits_for_the_device_no_more_often_where_there_are_more_tensors(report: dict[str, Any]) -> None:
    few, many = report["few"], report["many"]
    assert (few["tensors"], many["tensors"]) == (24, 68)
    assert few["reads"] == many["reads"] and few["scalars"] == many["scalars"]
    assert few["reads"]["tolist"] == 1  # all checksums, at the end


def test_on_one_rank_collectives_do_not_grow_with_the_tensors(report: dict[str, Any]) -> None:
    assert report["few"]["collectives"] == report["many"]["collectives"] > 0


def test_a_tensor_costs_few_operations(report: dict[str, Any]) -> None:
    """A cast, two checksums and a copy, and the views they take. Through DTensor it was 24."""
    few, many = report["few"], report["many"]
    assert (many["operations"] - few["operations"]) / (many["tensors"] - few["tensors"]) < 15


def test_log_probs_kept_as_numbers_are_those_that_vllm_keeps(report: dict[str, Any]) -> None:
    rollout = report["rollout"]
    assert rollout["ours"] == rollout["theirs"]
    assert rollout["kinds"] == ["dict", "float"]  # of vLLM's own bookkeeping, and of ours


def test_a_sync_forgets_every_prefix(report: dict[str, Any]) -> None:
    rollout = report["rollout"]
    assert rollout["known"] > 0 == rollout["left"] and rollout["blocks"]


class Lists(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any


class Processor:
    def _update_sample_logprobs(self, logprobs_lists: Any, more: Any) -> None:
        """Of a version that we do not know."""


def test_a_version_of_vllm_that_looks_different_keeps_its_own_bookkeeping() -> None:
    own = Processor._update_sample_logprobs
    assert not keep_numbers(SimpleNamespace(LogprobsProcessor=Processor, LogprobsLists=Lists))
    assert Processor._update_sample_logprobs is own


@pytest.mark.parametrize(
    ("rollout", "replicas", "expected"),
    [((64, 8), 1, 512), ((65, 16), 4, 272), ((64, 8), 8, 64), ((10, 2), 4, 64), ((999, 8), 2, 1024), (None, 1, 256)],
)
def test_an_engine_on_a_gpu_has_room_for_what_a_rollout_gives_it(rollout: tuple[int, int] | None, replicas: int, expected: int) -> None:
    assert gpu_seqs(rollout, replicas) == expected

"""What a sync and a rollout cost the host beside their bytes: counted, since seconds say little on a shared machine."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from parallel.memory import gpu_seqs
from parallel.weights import added_up, checksum
from rollout.loading import Places
from rollout.sampled import keep_numbers
from tests.world import ROOT, run_script


@pytest.fixture(scope="module")
def report(checkpoint_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    models = {"few": checkpoint_of("qwen3"), "many": checkpoint_of("qwen3", layers=6)}
    cases = [{"name": name, "run": "cost", "model": str(model), "samples": name == "few"} for name, model in models.items()]
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
    rollout = report["few"]["rollout"]
    assert rollout["ours"] == rollout["theirs"]
    assert rollout["kinds"] == ["dict", "float"]  # of vLLM's own bookkeeping, and of ours


def test_a_sync_forgets_every_prefix(report: dict[str, Any]) -> None:
    rollout = report["few"]["rollout"]
    assert rollout["known"] > 0 == rollout["left"] and rollout["blocks"]


@pytest.mark.parametrize("at_once", [1, 7, 35, 36, 1000])
def test_a_gpus_checksum_is_a_cpus_in_pieces_of_any_size(at_once: int) -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert added_up(tensor.view(torch.int16), at_once) == checksum(tensor) != added_up(tensor.view(torch.int16)[:, :-1], at_once)


class Engine(nn.Module):
    """As much of one of vLLM's models as has parameters."""

    packed_modules_mapping: dict[str, list[str]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)


@torch.no_grad()
def test_places_hold_until_a_parameter_is_another_or_elsewhere() -> None:
    engine = Engine()
    places = Places(engine)
    engine.norm.weight.fill_(2)
    assert places.hold(engine) and not places.hold(Engine())
    engine.norm.weight.data = torch.ones(4)
    assert not places.hold(engine)
    places = Places(engine)
    engine.norm.bias = nn.Parameter(torch.ones(4))
    assert not places.hold(engine) and Places(engine).hold(engine)


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

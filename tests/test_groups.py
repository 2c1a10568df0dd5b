"""What every process group of a run has in common, with real ranks."""

import json
from pathlib import Path

from tests.world import run_script

GROUPS = """
import json, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from parallel.exchange import from_each
from parallel.launch import launch
from parallel.memory import agreed
from parallel.placement import Placement
from parallel.roles import ParallelismConfig, Plan, ServiceConfig, ServicesConfig

def main():
    services, degrees = ServicesConfig(trainer=ServiceConfig(procs=2)), ParallelismConfig(tensor_parallel_degree=2)
    plan = Plan.make(services, degrees, colocate=False, wants_reference=False, world_size=3)
    place = Placement.build(plan, "cpu", timeout=timedelta(minutes=47))
    rank, decision = dist.get_rank(), None
    groups = [dist.group.WORLD, place.objects]
    if rank < 2:
        groups += [place.trainer_group, place.trainer.group("tp"), place.trainer.group("dp"), place.trainer.shards]
        decision = agreed(("stays", "drops its KV cache")[rank], place.trainer_group)
    else:
        groups += [place.replica]
    waits = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() / 60 for group in groups}
    ranks = from_each([sorted(waits), decision], place)
    if place.is_root:
        json.dump(ranks, open(sys.argv[1], "w"))

launch(main)
"""


def test_every_group_has_the_worlds_timeout_and_an_engines_ranks_agree_on_who_makes_room(tmp_path: Path) -> None:
    (tmp_path / "groups.py").write_text(GROUPS)
    run_script(3, tmp_path / "groups.py", str(tmp_path / "report.json"))
    waits, decisions = zip(*json.loads((tmp_path / "report.json").read_text()), strict=True)
    assert waits == ([47.0],) * 3
    assert decisions == ("drops its KV cache", "drops its KV cache", None)

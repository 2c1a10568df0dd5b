"""What every process group of a run has in common, with real ranks."""

from pathlib import Path

from tests.world import run_script

GROUPS = """
from datetime import timedelta
import torch
import torch.distributed as dist
from parallel.memory import agreed
from parallel.placement import Placement
from parallel.roles import ParallelismConfig, Plan, ServiceConfig, ServicesConfig

services = ServicesConfig(trainer=ServiceConfig(procs=2))
plan = Plan.make(services, ParallelismConfig(tensor_parallel_degree=2), colocate=False, wants_reference=False, world_size=3)
place = Placement.build(plan, "cpu", timeout=timedelta(minutes=47))
rank = dist.get_rank()
groups = [dist.group.WORLD, place.objects]
if rank < 2:
    groups += [place.trainer_group, place.trainer.group("tp"), place.trainer.group("dp"), place.trainer.shards]
    print("agreed:", agreed(("stays", "drops its KV cache")[rank], place.trainer_group), flush=True)
else:
    groups += [place.replica]
waits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
print("rank", rank, "waits", {wait.total_seconds() / 60 for wait in waits}, flush=True)
dist.barrier()
"""


def test_every_group_has_the_worlds_timeout_and_an_engines_ranks_agree_on_who_makes_room(tmp_path: Path) -> None:
    (tmp_path / "groups.py").write_text(GROUPS)
    said = run_script(3, tmp_path / "groups.py").stdout
    assert said.count("agreed: drops its KV cache") == 2, said
    assert all(f"rank {rank} waits {{47.0}}" in said for rank in range(3)), said

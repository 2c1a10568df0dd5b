"""A plan's roles as meshes: sub-meshes of the world, made by every rank in the same order. A rank may be in one, several or all of them."""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from parallel import hardware, watch
from parallel.roles import Plan, RolePlan
from parallel.routes import Route, make_routes
from parallel.switches import compute_deterministically


class Grid:
    """A role's ranks as meshes. Every rank of the world makes every grid, in the same order; `holds` says who is in it.

    Replicas ("dp") get different rows; the ranks of a replica compute the same rows together, "pp" dividing the layers into stages, "cp"
    cutting a row's tokens and "tp" a layer's matrices. A stage's weights are sharded over what is not "tp", in `replicate` copies.
    """

    def __init__(self, role: RolePlan, device_type: str):
        ranks = torch.tensor(role.ranks)
        self.ranks, self.device_type = role.ranks, device_type
        self.num_replicas, self.pp, self.cp, self.tp = role.num_replicas, role.pp, role.cp, role.tp
        self.stages: list[list[int]] = ranks.view(role.pp, -1).tolist()  # the ranks of each
        self.work = DeviceMesh(device_type, ranks.view(role.pp, -1, role.cp, role.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
        self.weights = self.work
        if role.cp > 1 or role.replicate > 1:
            names = ("pp", "replicate", "shard", "tp")
            self.weights = DeviceMesh(device_type, ranks.view(role.pp, role.replicate, -1, role.tp), mesh_dim_names=names)
        # The ranks that hold different parts of the weights that "tp" does not cut.
        self.shards: dist.ProcessGroup | None = None
        for column in ranks.view(role.pp, -1, role.tp).transpose(1, 2).flatten(0, 1).tolist():
            group = dist.new_group(column)
            self.shards = group if dist.get_rank() in column else self.shards
        # The ranks of the first and the last stage that hold the same part of a tied embedding.
        self.tied: dist.ProcessGroup | None = None
        for pair in zip(self.stages[0], self.stages[-1], strict=True) if role.pp > 1 else []:
            group = dist.new_group(list(pair))
            self.tied = group if dist.get_rank() in pair else self.tied
        self._replicate = role.replicate

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's, along "pp", "dp", "cp" or "tp"."""
        return self.work.get_group(axis)

    def index(self, axis: str) -> int:
        """This rank's place along "pp", "dp", "cp" or "tp"."""
        return self.work.get_local_rank(axis)

    @property
    def fsdp(self) -> DeviceMesh:
        """What `fully_shard` takes: one axis, or two with copies."""
        if self.weights is self.work:
            return self.work["dp"]
        return self.weights["replicate", "shard"] if self._replicate > 1 else self.weights["shard"]

    @property
    def num_shards(self) -> int:
        """Ranks over which FSDP averages gradients."""
        return self.num_replicas * self.cp

    @property
    def spokesmen(self) -> list[int]:
        """The first rank of each replica's last stage, which has the replica's results."""
        return self.stages[-1][:: self.cp * self.tp]

    def ends(self, stage: int) -> tuple[int, int]:
        """The first rank of a stage, and of the first stage: one pipeline's."""
        return self.stages[stage][0], self.ranks[0]

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == self.ranks[0]


@dataclass(frozen=True)
class Placement:
    """The plan as meshes and groups."""

    plan: Plan
    device: torch.device  # of this rank
    trainer: Grid
    generator: Grid
    reference: Grid | None
    objects: dist.ProcessGroup  # gloo over the world, for Python objects and control
    trainer_group: dist.ProcessGroup  # the trainer's ranks, flat
    replica: dist.ProcessGroup | None  # this rank's engine replica; None outside the generator
    weights: list[Route]  # of each pipeline stage of the trainer to the generator
    reference_group: dist.ProcessGroup | None  # the reference's ranks, flat
    reference_weights: list[Route]  # and to the reference

    @classmethod
    def build(
        cls,
        plan: Plan,
        device: str,
        *,
        deterministic: bool = False,
        timeout: timedelta = timedelta(minutes=60),
        stall_timeout_s: float = 0,
    ) -> "Placement":
        """Start the world. device: auto, cpu or cuda. Collective: every rank makes every mesh and group, in this order.

        deterministic: torch's mode, for the whole process. CUDA starts here, and must find it set. timeout: after which ranks that wait
        for others in a collective, of any group made here, give up. stall_timeout_s: after which the job ends because no rank has made
        progress, 0: never; one whose process is stopped ends it in any case.
        """
        if deterministic:
            compute_deterministically()
        device_type = hardware.device_type(device)
        if "RANK" not in os.environ:  # started as a plain script: a world of one
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
        if device_type == "cuda":
            check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count())
            here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(here)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=here, timeout=timeout)
        else:
            here = torch.device("cpu")
            dist.init_process_group("gloo", timeout=timeout)
        if dist.get_world_size() != plan.world_size:
            raise ValueError(f"the plan is for {plan.world_size} ranks and torchrun started {dist.get_world_size()}")
        watch.start(stall_timeout_s)
        trainer = Grid(plan.trainer, device_type)
        generator = Grid(plan.generator, device_type)
        reference = Grid(plan.reference, "cpu" if plan.reference.on_cpu else device_type) if plan.reference else None
        objects = dist.new_group(backend="gloo")
        trainer_group = dist.new_group(plan.trainer.ranks)
        replica = None
        for row in torch.tensor(plan.generator.ranks).view(-1, plan.generator.tp).tolist():
            group = dist.new_group(row)
            if dist.get_rank() in row:
                replica = group
        weights = make_routes(trainer.stages, plan.generator.ranks)
        reference_group = dist.new_group(plan.reference.ranks) if plan.reference else None
        of_reference = make_routes(trainer.stages, plan.reference.ranks if plan.reference else [])
        groups = (objects, trainer_group, replica, weights, reference_group, of_reference)
        _wait_at_most(timeout)
        return cls(plan, here, trainer, generator, reference, *groups)

    @property
    def root(self) -> int:
        """The one rank that writes logs and marks checkpoints: the first that trains."""
        return self.plan.trainer.ranks[0]

    @property
    def is_root(self) -> bool:
        return dist.get_rank() == self.root


def holds(grid: Grid) -> bool:
    """Is this rank in the grid?"""
    return dist.get_rank() in grid.ranks


def share(items: list, grid: Grid) -> list:
    """This rank's part of the work: every dp-th item, the same for all ranks of one replica, [] outside the grid."""
    return items[grid.index("dp") :: grid.num_replicas] if holds(grid) else []


def speaks_for(grid: Grid) -> bool:
    """One rank per replica reports results; its peers computed the same ones."""
    return dist.get_rank() in grid.spokesmen


def shares_ranks(a: Grid, b: Grid) -> bool:
    return bool(set(a.ranks) & set(b.ranks))


def device_of(grid: Grid) -> torch.device:
    """Where this rank's part of a model on `grid` lives."""
    return torch.device("cuda", torch.cuda.current_device()) if grid.device_type == "cuda" else torch.device(grid.device_type)


def check_gpus(ranks: int, gpus: int) -> None:
    """ValueError where this host has fewer GPUs than ranks: each has one to itself."""
    if ranks > gpus:
        raise ValueError(
            f"this host has {ranks} ranks and {gpus} GPUs, and each rank needs one: start {gpus} here (--nproc {gpus}) with fewer "
            f"services.*.procs or with colocate: true, which lets roles share ranks; or put the reference on the CPU "
            f"(services.ref_model.with_gpus: false), or do without it (grpo.beta: 0, no services.ref_model)"
        )


def _wait_at_most(timeout: timedelta) -> None:
    """In all groups so far. A new group has torch's own limit, 10 minutes (NCCL) or 30 (gloo), whatever the world's is."""
    for group in list(c10d._world.pg_map):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            c10d._set_pg_timeout(timeout, group)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


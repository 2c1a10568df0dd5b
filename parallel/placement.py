"""Which ranks hold the policy, the reference and the engine.

A role is a sub-mesh of the world; a rank may be in one, several or all of them. There is no colocated mode: meshes that share
ranks *are* colocated. `Plan` is the arithmetic (no processes needed: `--plan` prints it), `Placement` the meshes made from it.
"""

import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel.switches import compute_deterministically


@dataclass(kw_only=True)
class ServiceConfig:
    procs: int = 1  # ranks of this role; for the generator: tensor-parallel ranks of one replica
    num_replicas: int = 1  # engine replicas; trainer and ref_model have one
    with_gpus: bool = True  # on the run's device; false for ref_model: on the CPU of the trainer's ranks

    def check(self) -> None:
        for key, value in (("procs", self.procs), ("num_replicas", self.num_replicas)):
            if value < 1:
                raise ValueError(f"{key}={value}: must be at least 1")


@dataclass(kw_only=True)
class ServicesConfig:
    trainer: ServiceConfig = field(default_factory=ServiceConfig)  # the policy being trained
    ref_model: ServiceConfig | None = None  # the frozen reference; absent: none, and beta must be 0
    generator: ServiceConfig = field(default_factory=ServiceConfig)  # vLLM

    def check(self) -> None:
        for name, service in (("trainer", self.trainer), ("ref_model", self.ref_model)):
            if service is not None and service.num_replicas != 1:
                raise ValueError(
                    f"{name}.num_replicas={service.num_replicas}: only the generator has replicas; give {name} more ranks with "
                    f"{name}.procs and spread them with parallelism.data_parallel_shard_degree"
                )
        for name, service in (("trainer", self.trainer), ("generator", self.generator)):
            if not service.with_gpus:
                raise ValueError(
                    f"{name}.with_gpus=false: only ref_model can leave the run's device; for a run without GPUs set device: cpu"
                )


@dataclass(kw_only=True)
class ParallelismConfig:
    data_parallel_replicate_degree: int = 1  # copies of the trainer's sharded weights (HSDP); they get different rows
    data_parallel_shard_degree: int = -1  # FSDP2 ranks of the trainer; -1: all that the other degrees leave
    tensor_parallel_degree: int = 1  # ranks that share each layer of trainer and reference
    context_parallel_degree: int = 1  # ranks that share each row of tokens of trainer and reference
    pipeline_parallel_degree: int = 1  # ranks among which the layers of trainer and reference are divided

    def check(self) -> None:
        for key in vars(self).keys() - {"data_parallel_shard_degree"}:
            if vars(self)[key] < 1:
                raise ValueError(f"{key}={vars(self)[key]}: must be at least 1")
        if self.data_parallel_shard_degree < 1 and self.data_parallel_shard_degree != -1:
            raise ValueError(f"data_parallel_shard_degree={self.data_parallel_shard_degree}: must be at least 1, or -1 for the rest")


    @property
    def ranks_per_replica(self) -> int:
        return self.pipeline_parallel_degree * self.context_parallel_degree * self.tensor_parallel_degree

    def product(self) -> str:
        """The degrees as a message names them; those that are 1 by default only where they are not."""
        named = {
            "pipeline_parallel_degree": self.pipeline_parallel_degree,
            "data_parallel_replicate_degree": self.data_parallel_replicate_degree,
            "context_parallel_degree": self.context_parallel_degree,
        }
        more = "".join(f"{name}={degree} x " for name, degree in named.items() if degree > 1)
        return f"{more}tensor_parallel_degree={self.tensor_parallel_degree} x data_parallel_shard_degree={self.data_parallel_shard_degree}"


@dataclass(frozen=True)
class RolePlan:
    """Ranks of one role, in the order pp, replicate, shard, cp, tp (the last fastest): replicas of `pp x cp x tp` ranks each."""

    ranks: list[int]
    tp: int = 1
    cp: int = 1
    pp: int = 1
    replicate: int = 1
    on_cpu: bool = False

    @property
    def num_replicas(self) -> int:
        return len(self.ranks) // (self.pp * self.cp * self.tp)


@dataclass(frozen=True)
class Plan:
    """Who does what, for a world of `world_size` ranks."""

    world_size: int
    trainer: RolePlan
    generator: RolePlan
    reference: RolePlan | None

    @classmethod
    def make(
        cls,
        services: ServicesConfig | None,
        parallelism: ParallelismConfig,
        *,
        colocate: bool,
        wants_reference: bool,
        world_size: int | None,
    ) -> "Plan":
        """Lay the roles over `world_size` ranks, or over as many as they need when it is None.

        ValueError, with the table of what was asked for, when they do not fit.
        """
        tp, cp, pp = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree, parallelism.pipeline_parallel_degree
        shards = parallelism.data_parallel_shard_degree
        replicate, replica = parallelism.data_parallel_replicate_degree, parallelism.ranks_per_replica
        generator_tp = services.generator.procs if services else 1
        cpu_reference = bool(services and services.ref_model and not services.ref_model.with_gpus)
        if services is None or colocate:
            least = max(generator_tp, replica * replicate * max(shards, 1))
            world = world_size or least
            if world % (replica * replicate):
                alone = replica * replicate == tp
                degrees = f"parallelism.tensor_parallel_degree={tp}" if alone else f"the product of parallelism ({parallelism.product()})"
                raise ValueError(f"all roles share {world} ranks, which {degrees} does not divide; start a multiple")
            if shards not in (-1, world // (replica * replicate)):
                raise ValueError(
                    f"all roles share {world} ranks, but parallelism asks the trainer for {parallelism.product()}; start {least} ranks, or "
                    f"set data_parallel_shard_degree: -1"
                )
            if world % generator_tp:
                raise ValueError(f"services.generator.procs={generator_tp} does not divide the {world} ranks that all roles share")
            everyone = list(range(world))
            reference = RolePlan(everyone, tp, cp, pp, on_cpu=cpu_reference) if wants_reference else None
            return cls(world, RolePlan(everyone, tp, cp, pp, replicate), RolePlan(everyone, generator_tp), reference)

        per_replica = [("pipeline_parallel_degree", pp), ("context_parallel_degree", cp), ("tensor_parallel_degree", tp)]
        asked = [("trainer", services.trainer.procs, tp)]
        if services.ref_model and services.ref_model.with_gpus:
            asked.append(("ref_model", services.ref_model.procs, tp))
        asked.append(("generator", generator_tp * services.generator.num_replicas, generator_tp))
        bounds, first = {}, 0
        for name, count, _ in asked:
            bounds[name] = list(range(first, first + count))
            first += count
        problems = []
        needed = replica * replicate * max(shards, 1)
        if services.trainer.procs % (replica * replicate) or (shards != -1 and services.trainer.procs != needed):
            first += needed - services.trainer.procs  # what follows speaks of the roles as they would then be
            problems.append(
                f"services.trainer.procs={services.trainer.procs}, but parallelism asks for {parallelism.product()} = {needed} ranks; set "
                f"services.trainer.procs: {needed}, or data_parallel_shard_degree: -1"
            )
        if "ref_model" in bounds and len(bounds["ref_model"]) % replica:
            problems.append(
                f"services.ref_model.procs={len(bounds['ref_model'])} is not a multiple of "
                f"{' x '.join(f'{name}={degree}' for name, degree in per_replica if degree > 1)}; "
                f"set services.ref_model.procs: {replica}"
            )
        if world_size is not None and world_size < first:
            fewer = "set ref_model.with_gpus: false or remove ref_model (with beta 0), " if "ref_model" in bounds else ""
            problems.append(
                f"the roles need {first} ranks and there are {world_size}; start more (--nproc {first}), lower services.*.procs, "
                f"{fewer}or set colocate: true to share {world_size} ranks"
            )
        if world_size is not None and world_size > first:
            problems.append(f"{world_size - first} of {world_size} ranks would be idle; start {first}, or raise services.*.procs")
        if problems:
            rows = "\n".join(f"  {name:<10} {_span(bounds[name]):<14} {len(bounds[name])} ranks" for name, _, _ in asked)
            raise ValueError("the services do not fit:\n" + rows + "".join(f"\n  - {p}" for p in problems))
        ref = None
        if services.ref_model:
            ref = RolePlan(bounds["trainer" if cpu_reference else "ref_model"], tp, cp, pp, on_cpu=cpu_reference)
        return cls(first, RolePlan(bounds["trainer"], tp, cp, pp, replicate), RolePlan(bounds["generator"], generator_tp), ref)

    def table(self) -> str:
        """The rank table, as `--plan` and the start of a run print it."""
        lines = [f"{self.world_size} ranks", "  role        ranks          replicas x tensor parallel"]
        for name, role in (("trainer", self.trainer), ("ref_model", self.reference), ("generator", self.generator)):
            if role is None:
                lines.append(f"  {name:<11} none")
                continue
            kind = "engines" if name == "generator" else "FSDP shards"
            note = " (on the CPU)" if role.on_cpu else ""
            copies = f"{role.replicate} x " if role.replicate > 1 else ""
            more = (f" x PP {role.pp}" if role.pp > 1 else "") + (f" x CP {role.cp}" if role.cp > 1 else "")
            count = f"{copies}{role.num_replicas // role.replicate} {kind}{more} x TP {role.tp}"
            lines.append(f"  {name:<11} {_span(role.ranks):<14} {count}{note}")
        return "\n".join(lines)


def _span(ranks: list[int]) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


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
    weights: dist.ProcessGroup | None  # the trainer's first rank and the generator's ranks that do not train
    reference_group: dist.ProcessGroup | None  # the reference's ranks, flat
    reference_weights: dist.ProcessGroup | None  # the trainer's first rank and the reference's ranks that do not train

    @classmethod
    def build(cls, plan: Plan, device: str, *, deterministic: bool = False, timeout: timedelta = timedelta(minutes=60)) -> "Placement":
        """Start the world. device: auto, cpu or cuda. Collective: every rank makes every mesh and group, in this order.

        deterministic: torch's mode, for the whole process. CUDA starts here, and must find it set.
        """
        if deterministic:
            compute_deterministically()
        device_type = _device_type(device)
        if "RANK" not in os.environ:  # started as a plain script: a world of one
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
        if device_type == "cuda":
            here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(here)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=here, timeout=timeout)
        else:
            here = torch.device("cpu")
            dist.init_process_group("gloo", timeout=timeout)
        if dist.get_world_size() != plan.world_size:
            raise ValueError(f"the plan is for {plan.world_size} ranks and torchrun started {dist.get_world_size()}")
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
        root = plan.trainer.ranks[0]
        receivers = [r for r in plan.generator.ranks if r not in plan.trainer.ranks]
        weights = dist.new_group([root, *receivers]) if receivers else None
        reference_group = dist.new_group(plan.reference.ranks) if plan.reference else None
        readers = [r for r in plan.reference.ranks if r not in plan.trainer.ranks] if plan.reference else []
        of_reference = dist.new_group([root, *readers]) if readers else None
        groups = (objects, trainer_group, replica, weights, reference_group, of_reference)
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


def _device_type(device: str) -> str:
    """cuda or cpu. ValueError when a GPU is demanded and none is seen."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device=cuda, but torch sees no GPU: set device: auto or cpu, or check the driver (nvidia-smi) and torch's CUDA build"
        )
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


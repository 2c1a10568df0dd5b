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
    data_parallel_shard_degree: int = -1  # FSDP2 ranks of the trainer; -1: all that the other degrees leave
    tensor_parallel_degree: int = 1  # ranks that share each layer of trainer and reference
    pipeline_parallel_degree: int = 1  # 1; more is not supported yet

    def check(self) -> None:
        if self.pipeline_parallel_degree != 1:
            raise ValueError(
                f"pipeline_parallel_degree={self.pipeline_parallel_degree}: pipeline parallelism is not supported; set it to 1 and use "
                f"tensor_parallel_degree or data_parallel_shard_degree"
            )
        if self.tensor_parallel_degree < 1:
            raise ValueError(f"tensor_parallel_degree={self.tensor_parallel_degree}: must be at least 1")
        if self.data_parallel_shard_degree < 1 and self.data_parallel_shard_degree != -1:
            raise ValueError(f"data_parallel_shard_degree={self.data_parallel_shard_degree}: must be at least 1, or -1 for the rest")


@dataclass(frozen=True)
class RolePlan:
    """Ranks of one role as a grid: `num_replicas` rows (data-parallel) of `tp` ranks each."""

    ranks: list[int]
    tp: int = 1
    on_cpu: bool = False

    @property
    def num_replicas(self) -> int:
        return len(self.ranks) // self.tp


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
        tp, shards = parallelism.tensor_parallel_degree, parallelism.data_parallel_shard_degree
        generator_tp = services.generator.procs if services else 1
        cpu_reference = bool(services and services.ref_model and not services.ref_model.with_gpus)
        if services is None or colocate:
            least = max(generator_tp, tp * max(shards, 1))
            world = world_size or least
            if world % tp:
                raise ValueError(
                    f"all roles share {world} ranks, which parallelism.tensor_parallel_degree={tp} does not divide; start a multiple"
                )
            if shards not in (-1, world // tp):
                raise ValueError(
                    f"all roles share {world} ranks, but parallelism asks the trainer for tensor_parallel_degree={tp} x "
                    f"data_parallel_shard_degree={shards}; start {least} ranks, or set data_parallel_shard_degree: -1"
                )
            if world % generator_tp:
                raise ValueError(f"services.generator.procs={generator_tp} does not divide the {world} ranks that all roles share")
            everyone = list(range(world))
            reference = RolePlan(everyone, tp, cpu_reference) if wants_reference else None
            return cls(world, RolePlan(everyone, tp), RolePlan(everyone, generator_tp), reference)

        asked = [("trainer", services.trainer.procs, tp)]
        if services.ref_model and services.ref_model.with_gpus:
            asked.append(("ref_model", services.ref_model.procs, tp))
        asked.append(("generator", generator_tp * services.generator.num_replicas, generator_tp))
        bounds, first = {}, 0
        for name, count, _ in asked:
            bounds[name] = list(range(first, first + count))
            first += count
        problems = []
        needed = tp * max(shards, 1)
        if services.trainer.procs % tp or (shards != -1 and services.trainer.procs != needed):
            first += needed - services.trainer.procs  # what follows speaks of the roles as they would then be
            problems.append(
                f"services.trainer.procs={services.trainer.procs}, but parallelism asks for tensor_parallel_degree={tp} x "
                f"data_parallel_shard_degree={shards} = {needed} ranks; set services.trainer.procs: {needed}, or "
                f"data_parallel_shard_degree: -1"
            )
        if "ref_model" in bounds and len(bounds["ref_model"]) % tp:
            problems.append(
                f"services.ref_model.procs={len(bounds['ref_model'])} is not a multiple of tensor_parallel_degree={tp}; "
                f"set services.ref_model.procs: {tp}"
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
            ref = RolePlan(bounds["trainer"], tp, True) if cpu_reference else RolePlan(bounds["ref_model"], tp)
        return cls(first, RolePlan(bounds["trainer"], tp), RolePlan(bounds["generator"], generator_tp), ref)

    def table(self) -> str:
        """The rank table, as `--plan` and the start of a run print it."""
        lines = [f"{self.world_size} ranks", "  role        ranks          replicas x tensor parallel"]
        for name, role in (("trainer", self.trainer), ("ref_model", self.reference), ("generator", self.generator)):
            if role is None:
                lines.append(f"  {name:<11} none")
                continue
            kind = "engines" if name == "generator" else "FSDP shards"
            note = " (on the CPU)" if role.on_cpu else ""
            lines.append(f"  {name:<11} {_span(role.ranks):<14} {role.num_replicas} {kind} x TP {role.tp}{note}")
        return "\n".join(lines)


def _span(ranks: list[int]) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


@dataclass(frozen=True)
class Placement:
    """The plan as meshes and groups. Every mesh has axes ("dp", "tp")."""

    plan: Plan
    device: torch.device  # of this rank
    trainer: DeviceMesh
    generator: DeviceMesh
    reference: DeviceMesh | None
    objects: dist.ProcessGroup  # gloo over the world, for Python objects and control
    trainer_group: dist.ProcessGroup  # the trainer's ranks, flat
    replica: dist.ProcessGroup | None  # this rank's engine replica; None outside the generator
    weights: dist.ProcessGroup | None  # the trainer's first rank and the generator's ranks that do not train
    reference_group: dist.ProcessGroup | None  # the reference's ranks, flat
    reference_weights: dist.ProcessGroup | None  # the trainer's first rank and the reference's ranks that do not train

    @classmethod
    def build(cls, plan: Plan, device: str, *, timeout: timedelta = timedelta(minutes=60)) -> "Placement":
        """Start the world. device: auto, cpu or cuda. Collective: every rank makes every mesh and group, in this order."""
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
        trainer = _mesh(plan.trainer, device_type)
        generator = _mesh(plan.generator, device_type)
        reference = _mesh(plan.reference, "cpu" if plan.reference.on_cpu else device_type) if plan.reference else None
        objects = dist.new_group(backend="gloo")
        trainer_group = dist.new_group(plan.trainer.ranks)
        replica = None
        for row in generator.mesh.tolist():
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


def holds(mesh: DeviceMesh) -> bool:
    """Is this rank in the mesh?"""
    return mesh.get_coordinate() is not None


def share(items: list, mesh: DeviceMesh) -> list:
    """This rank's part of the work: every dp-th item, the same for all ranks of one replica, [] outside the mesh."""
    return items[mesh.get_local_rank("dp") :: mesh.size(0)] if holds(mesh) else []


def speaks_for(mesh: DeviceMesh) -> bool:
    """One rank per replica reports results; its tensor-parallel peers computed the same ones."""
    return holds(mesh) and mesh.get_local_rank("tp") == 0


def shares_ranks(a: DeviceMesh, b: DeviceMesh) -> bool:
    return bool(set(a.mesh.flatten().tolist()) & set(b.mesh.flatten().tolist()))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where this rank's part of a model on `mesh` lives."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device(mesh.device_type)


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


def _mesh(role: RolePlan, device_type: str) -> DeviceMesh:
    return DeviceMesh(device_type, torch.tensor(role.ranks).view(-1, role.tp), mesh_dim_names=("dp", "tp"))

"""Which ranks hold the policy, the reference and the engine: the arithmetic, which needs no processes. `--plan` prints it.

There is no colocated mode: roles that share ranks *are* colocated.
"""

import itertools
import math
from dataclasses import dataclass, field, replace

REFERENCE_KEY = "services.ref_model.parallelism"


@dataclass(kw_only=True)
class ServiceConfig:
    procs: int = 1  # ranks of this role; for the generator: tensor-parallel ranks of one replica
    num_replicas: int = 1  # engine replicas; trainer and ref_model have one
    with_gpus: bool = True  # on the run's device; false for ref_model: on the CPU of the trainer's ranks
    parallelism: "ParallelismConfig | None" = None  # ref_model's own degrees; null: the trainer's tensor, context and pipeline degrees

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
        instead = {"trainer": "set the top-level parallelism", "generator": "set generator.procs, the tensor-parallel ranks of an engine"}
        for name, service in (("trainer", self.trainer), ("generator", self.generator)):
            if not service.with_gpus:
                raise ValueError(
                    f"{name}.with_gpus=false: only ref_model can leave the run's device; for a run without GPUs set device: cpu"
                )
            if service.parallelism is not None:
                raise ValueError(f"{name}.parallelism: only ref_model has degrees of its own here; remove it and {instead[name]}")


@dataclass(kw_only=True)
class ParallelismConfig:
    data_parallel_replicate_degree: int = 1  # copies of the trainer's sharded weights (HSDP); they get different rows
    data_parallel_shard_degree: int = -1  # FSDP2 ranks of the trainer; -1: all that the other degrees leave
    tensor_parallel_degree: int = 1  # ranks that share each layer of trainer and reference
    context_parallel_degree: int = 1  # ranks that share each row of tokens of trainer and reference
    pipeline_parallel_degree: int = 1  # ranks among which the layers of trainer and reference are divided
    expert_parallel_degree: int = 1  # 1; tensor_parallel_degree deals experts out

    def check(self) -> None:
        if self.expert_parallel_degree != 1:
            raise ValueError(
                f"expert_parallel_degree={self.expert_parallel_degree}: experts have no degree of their own; set it to 1 and spread them "
                f"with tensor_parallel_degree (each rank has some experts whole) or data_parallel_shard_degree (each has a shard of all)"
            )
        for key in vars(self).keys() - {"data_parallel_shard_degree"}:
            if vars(self)[key] < 1:
                raise ValueError(f"{key}={vars(self)[key]}: must be at least 1")
        if self.data_parallel_shard_degree < 1 and self.data_parallel_shard_degree != -1:
            raise ValueError(f"data_parallel_shard_degree={self.data_parallel_shard_degree}: must be at least 1, or -1 for the rest")

    @property
    def multiple(self) -> int:
        """Of which the number of ranks must be one: the ranks of every copy of a shard."""
        per_replica = self.pipeline_parallel_degree * self.context_parallel_degree * self.tensor_parallel_degree
        return per_replica * self.data_parallel_replicate_degree

    @property
    def least(self) -> int:
        """Ranks that are needed; exactly so many where the shards are numbered."""
        return self.multiple * max(self.data_parallel_shard_degree, 1)

    def fit(self, ranks: int) -> bool:
        return ranks % self.multiple == 0 and self.data_parallel_shard_degree in (-1, ranks // self.multiple)

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
    key: str = "parallelism"  # where the configuration says the degrees

    @classmethod
    def of(cls, ranks: list[int], degrees: ParallelismConfig, key: str = "parallelism", *, on_cpu: bool = False) -> "RolePlan":
        tp, cp, pp = degrees.tensor_parallel_degree, degrees.context_parallel_degree, degrees.pipeline_parallel_degree
        return cls(ranks, tp, cp, pp, degrees.data_parallel_replicate_degree, on_cpu, key)

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
    samples: bool = True  # false: nothing is sampled, so that no rank of the generator holds an engine

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
        reference = services.ref_model if services else None
        on_cpu = reference is not None and not reference.with_gpus
        degrees, key = _of_reference(reference, parallelism)
        asked = [(parallelism, "parallelism", "the trainer")] + ([(degrees, key, "the reference")] if wants_reference else [])
        generator_tp = services.generator.procs if services else 1
        if services is None or colocate:
            everyone = list(range(world_size or math.lcm(generator_tp, *(of_role.least for of_role, _, _ in asked))))
            _check_shared(len(everyone), asked, generator_tp)
            ref = RolePlan.of(everyone, degrees, key, on_cpu=on_cpu) if wants_reference else None
            return cls(len(everyone), RolePlan.of(everyone, parallelism), RolePlan(everyone, generator_tp), ref)
        bounds = _check_separate(services, parallelism, world_size)
        ref = RolePlan.of(bounds["trainer" if on_cpu else "ref_model"], degrees, key, on_cpu=on_cpu) if reference else None
        generator = RolePlan(bounds["generator"], generator_tp)
        return cls(sum(map(len, bounds.values())), RolePlan.of(bounds["trainer"], parallelism), generator, ref)

    def table(self) -> str:
        """The rank table, as `--plan` and the start of a run print it."""
        lines = [f"{self.world_size} ranks", "  role        ranks          replicas x tensor parallel"]
        for name, role in (("trainer", self.trainer), ("ref_model", self.reference), ("generator", self.generator)):
            if not self.samples and role is not self.trainer:
                continue
            if role is None:
                lines.append(f"  {name:<11} none")
                continue
            kind = "engines" if name == "generator" else "FSDP shards"
            note = " (on the CPU)" if role.on_cpu else ""
            copies = f"{role.replicate} x " if role.replicate > 1 else ""
            more = (f" x PP {role.pp}" if role.pp > 1 else "") + (f" x CP {role.cp}" if role.cp > 1 else "")
            count = f"{copies}{role.num_replicas // role.replicate} {kind}{more} x TP {role.tp}"
            lines.append(f"  {name:<11} {span(role.ranks):<14} {count}{note}")
        return "\n".join(lines)


def _check_shared(world: int, asked: list[tuple[ParallelismConfig, str, str]], generator_tp: int) -> None:
    """asked: degrees, their section and who has them. ValueError where `world` ranks, of which every role has all, cannot have them."""
    for degrees, key, who in asked:
        if world % degrees.multiple:
            tp = degrees.tensor_parallel_degree
            named = f"{key}.tensor_parallel_degree={tp}" if degrees.multiple == tp else f"the product of {key} ({degrees.product()})"
            raise ValueError(
                f"all roles share {world} ranks, which {named} does not divide; start a multiple of {degrees.multiple} "
                f"(--nproc {_next(world, degrees.multiple)}), or lower the degrees to a product that divides {world}"
            )
        if not degrees.fit(world):
            raise ValueError(
                f"all roles share {world} ranks, but {key} asks {who} for {degrees.product()}; start {degrees.least} ranks, or "
                f"set {'' if key == 'parallelism' else key + '.'}data_parallel_shard_degree: -1"
            )
    if world % generator_tp:
        raise ValueError(
            f"services.generator.procs={generator_tp} does not divide the {world} ranks that all roles share; start a multiple of "
            f"{generator_tp} (--nproc {_next(world, generator_tp)}), or set services.generator.procs to a divisor of {world}"
        )


def _of_reference(reference: ServiceConfig | None, policy: ParallelismConfig) -> tuple[ParallelismConfig, str]:
    """The reference's degrees and their section. The policy's cut it alike and leave the rest to shards: copies are for gradients."""
    if reference is not None and reference.parallelism is not None:
        return reference.parallelism, REFERENCE_KEY
    return replace(policy, data_parallel_replicate_degree=1, data_parallel_shard_degree=-1), "parallelism"


def _check_separate(services: ServicesConfig, parallelism: ParallelismConfig, world_size: int | None) -> dict[str, list[int]]:
    """The ranks of each service on ranks of its own, one after the other. ValueError with a table where something does not fit."""
    trainer, ref_model, generator = services.trainer, services.ref_model, services.generator
    degrees, key = _of_reference(ref_model, parallelism)
    counts = {"trainer": trainer.procs}
    if ref_model is not None and ref_model.with_gpus:
        counts["ref_model"] = ref_model.procs
    counts["generator"] = generator.procs * generator.num_replicas
    ends = [*itertools.accumulate(counts.values(), initial=0)]
    bounds = {name: list(range(first, end)) for name, (first, end) in zip(counts, itertools.pairwise(ends), strict=True)}
    needed = dict(counts)  # what the roles would have, were their degrees heard
    problems = []
    if not parallelism.fit(trainer.procs):
        needed["trainer"], told = _misfit("services.trainer.procs", trainer.procs, parallelism, "parallelism")
        problems.append(told)
    if "ref_model" in counts and not degrees.fit(counts["ref_model"]):
        needed["ref_model"], told = _misfit("services.ref_model.procs", counts["ref_model"], degrees, key)
        problems.append(told)
    if ref_model is not None and not ref_model.with_gpus and not degrees.fit(needed["trainer"]):
        problems.append(
            f"{REFERENCE_KEY} asks for {degrees.product()}, and the reference is on the CPU of the trainer's {needed['trainer']} ranks; "
            f"set {REFERENCE_KEY}: null for the trainer's degrees, or degrees whose product divides {needed['trainer']}"
        )
    total = sum(needed.values())
    if world_size is not None and world_size < total:
        fewer = "set ref_model.with_gpus: false or remove ref_model (with beta 0), " if "ref_model" in counts else ""
        problems.append(
            f"the roles need {total} ranks and there are {world_size}; start more (--nproc {total}), lower services.*.procs, "
            f"{fewer}or set colocate: true to share {world_size} ranks"
        )
    if world_size is not None and world_size > total:
        problems.append(f"{world_size - total} of {world_size} ranks would be idle; start {total}, or raise services.*.procs")
    if problems:
        rows = "\n".join(f"  {name:<10} {span(ranks):<14} {len(ranks)} ranks" for name, ranks in bounds.items())
        raise ValueError("the services do not fit:\n" + rows + "".join(f"\n  - {p}" for p in problems))
    return bounds


def _misfit(name: str, procs: int, degrees: ParallelismConfig, key: str) -> tuple[int, str]:
    """How many ranks `degrees`, of section `key`, would have, and the message that says so of `name`."""
    if degrees.data_parallel_shard_degree != -1:
        needed, shards = degrees.least, "data_parallel_shard_degree" if key == "parallelism" else f"{key}.data_parallel_shard_degree"
        return needed, f"{name}={procs}, but {key} asks for {degrees.product()} = {needed} ranks; set {name}: {needed}, or {shards}: -1"
    needed, other = _next(procs, degrees.multiple), f"lower these degrees to a product that divides {procs}"
    if name == "services.ref_model.procs" and key == "parallelism":
        other = f"give the reference degrees of its own with {REFERENCE_KEY}"
    why = f"{procs} is not a multiple of {degrees.multiple}, and {key} has {degrees.product()}"
    return needed, f"{name}={why}; set {name}: {needed}, or {other}"


def _next(count: int, multiple: int) -> int:
    """The first multiple that is not less than `count`."""
    return -(-count // multiple) * multiple


def span(ranks: list[int]) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"

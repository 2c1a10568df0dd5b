"""What a plan asks of a model, a step and a host: known before a weight is read or an engine starts."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from parallel.experts import DealExperts
from parallel.plans import PLANS, plan_of
from parallel.plans import Plan as FamilyPlan
from parallel.roles import Plan, RolePlan
from parallel.rounding import check_family
from parallel.switches import Switches


def check_model(config: Any, plan: Plan, seq_len: int) -> None:
    """ValueError where a model with this Hugging Face config cannot be trained, or not spread as the plan says."""
    with torch.device("meta"):
        plan_of(AutoModelForCausalLM.from_config(config))
    _check_positions(config.get_text_config(), seq_len)
    check_degrees(config, plan.trainer)
    if plan.reference is not None:
        check_degrees(config, plan.reference)
    check_engine(config, plan.generator.tp)


def check_switches(switches: Switches, plan: Plan, config: Any | None) -> None:
    """ValueError where what is asked of blocks cannot be done to this model's, or as the plan cuts them. config: None where unknown."""
    if switches.matched and config is not None:
        check_family(config)
    for role in (plan.trainer, plan.reference):
        if role is not None:
            switches.check_cut(role.tp, role.key)
            if switches.matched and role.pp > 1:
                raise ValueError(
                    f"training.match_sampler=true with {role.key}.pipeline_parallel_degree={role.pp}: stages pass on what is rounded "
                    f"already; set training.match_sampler: false, or the degree to 1"
                )


def _check_positions(text: Any, seq_len: int) -> None:
    """Some rotary embeddings turn all tokens of a pass otherwise once one is far from its beginning: numbers would depend on packing."""
    shape = text.to_dict()
    rope = shape.get("rope_parameters") or {}
    for one in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        limits = {"dynamic": shape.get("max_position_embeddings"), "longrope": one.get("original_max_position_embeddings")}
        limit = limits.get(one.get("rope_type", "default"))
        if limit is not None and seq_len > limit:
            raise ValueError(
                f"training.seq_len={seq_len}: the model's rotary embeddings ({one['rope_type']}) change for a whole row of sequences when "
                f"one of them has more than {limit} tokens; set training.seq_len to {limit} at most, or take another model"
            )


def check_degrees(config: Any, role: RolePlan) -> None:
    """ValueError where the model's family, layers or heads do not allow what the role asks."""
    plan, text = PLANS.get(config.model_type, FamilyPlan()), config.get_text_config()
    for kind, degree in (("tensor", role.tp), ("pipeline", role.pp)):
        if degree > 1 and not plan.tp:
            raise ValueError(
                f"{role.key}.{kind}_parallel_degree={degree}: model family {config.model_type!r} has no plan for it; set it to 1, which "
                f"leaves the weights to data_parallel_shard_degree, or add the family to PLANS in parallel/plans.py, a line where it is "
                f"built like another: docs/parallelism.md says how (known: {', '.join(PLANS)})"
            )
    if role.pp > text.num_hidden_layers:
        raise ValueError(
            f"{role.key}.pipeline_parallel_degree={role.pp} exceeds the model's {text.num_hidden_layers} layers: lower it to "
            f"{text.num_hidden_layers} at most, or set it to 1 and spread the weights with data_parallel_shard_degree"
        )
    if role.tp > 1:
        _check_tp(text, plan, role.tp, role.key)
    if role.cp > 1:
        _check_cp(text, role.tp, role.cp, role.key)


def _check_tp(text: Any, plan: FamilyPlan, tp: int, key: str) -> None:
    dealt = {"attention heads": text.num_attention_heads, "key-value heads": text.num_key_value_heads}
    has_experts = any(isinstance(style, DealExperts) for style in plan.tp.values())
    if has_experts:
        dealt["experts"] = text.num_experts
    if not has_experts or text.mlp_only_layers or text.decoder_sparse_step != 1:
        dealt["intermediate columns"] = text.intermediate_size
    for what, count in dealt.items():
        if count % tp:
            raise ValueError(
                f"{key}.tensor_parallel_degree={tp} does not divide the model's {count} {what}; set it to "
                f"{_or(d for d in range(1, count + 1) if not any(c % d for c in dealt.values()))}, and use more ranks with "
                f"data_parallel_shard_degree, which any number of ranks may have, or with pipeline_parallel_degree"
            )


def _check_cp(text: Any, tp: int, cp: int, key: str) -> None:
    """Ranks exchange tokens for heads: each gets its part of the query heads, and of the key-value heads or a copy of one."""
    heads, kv_heads = text.num_attention_heads // tp, text.num_key_value_heads // tp

    def can(cp: int) -> bool:
        return heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)

    if not can(cp):
        beside = f" (of tensor_parallel_degree={tp})" if tp > 1 else ""
        raise ValueError(
            f"{key}.context_parallel_degree={cp} must divide a rank's {heads} attention heads, and divide or be a multiple of its "
            f"{kv_heads} key-value heads{beside}; set it to {_or(filter(can, range(1, heads + 1)))}, or use more ranks with "
            f"data_parallel_shard_degree, which any number of ranks may have"
        )


def check_engine(config: Any, tp: int) -> None:
    """ValueError where vLLM would refuse `tp` ranks an engine. It repeats key-value heads and pads the vocabulary; the rest it divides."""
    shape = config.get_text_config().to_dict()
    heads = config.get_text_config().num_attention_heads
    kv_heads = shape.get("num_key_value_heads") or heads
    widths = [shape[key] for key in ("intermediate_size", "moe_intermediate_size") if shape.get(key)]

    def refusal(tp: int) -> str:
        """Why, or nothing."""
        if heads % tp:
            return f"does not divide the model's {heads} attention heads"
        if kv_heads % tp and tp % kv_heads:
            return f"neither divides the model's {kv_heads} key-value heads nor is a multiple of them"
        return next((f"does not divide the {width} columns of the model's MLP" for width in widths if width % tp), "")

    if why := refusal(tp):
        raise ValueError(
            f"services.generator.procs={tp} {why}, which vLLM asks of an engine's ranks; set it to "
            f"{_or(tp for tp in range(1, heads + 1) if not refusal(tp))}, and use more ranks with services.generator.num_replicas"
        )


def _or(numbers: Iterable[int]) -> str:
    """
    >>> _or([1, 2, 4])
    '1, 2 or 4'
    """
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def idle_ranks(plan: Plan, *, sequences: int, prompts: int | None) -> list[str]:
    """Warnings of ranks that a step leaves without work, which costs time and changes no number.

    sequences: of one update; prompts: of one rollout, None where nothing is sampled.
    """
    found, trainer, engines = [], plan.trainer.num_replicas, plan.generator.num_replicas
    if trainer > sequences:
        found.append(
            f"warning: an update has {sequences} sequences for {trainer} trainer replicas, {trainer - sequences} of which are idle: raise "
            f"training.batch_size, start fewer ranks, or let ranks share sequences (parallelism.tensor_parallel_degree)"
        )
    if prompts is not None and engines > prompts:
        found.append(
            f"warning: a rollout has {prompts} prompts for {engines} engine replicas, {engines - prompts} of which are idle: raise "
            f"training.batch_size, start fewer replicas, or let ranks share a replica (services.generator.procs)"
        )
    return found

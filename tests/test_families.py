"""Every model family gives the numbers of transformers' own model, one sequence at a time, however it is split."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import attention
from batch import to_batch
from model import ResponseLogprobs
from parallel.experts import NAME as EXPERTS
from parallel.fit import check_degrees
from parallel.names import to_checkpoint
from parallel.plans import PLANS, plan_of
from parallel.roles import ParallelismConfig, RolePlan
from rollout.experts import check_tile
from rollout.generator import GeneratorConfig
from tests.family_driver import LENGTHS, PROMPT, TEMPERATURE, episodes, slopes
from tests.test_weight_sync import MANY, agreement, check_agreement, start
from tests.tiny import FAMILIES, SPECIAL_FAMILIES
from tests.world import run_script

KNOWN = [family for family in (*FAMILIES, *SPECIAL_FAMILIES) if family in PLANS]
LAYOUTS: dict[str, dict[str, int]] = {"FSDP 2": {}, "TP 2": {"tp": 2}, "CP 2": {"cp": 2}, "PP 2": {"pp": 2}}
MATCHED = [("qwen3", "TP 2"), ("llama", "CP 2"), ("mistral", "FSDP 2"), ("qwen2", "TP 2")]  # a layout of each family that can be
IN_BF16: dict[str, Any] = {"dtype": torch.bfloat16, "hidden": 96}  # whose root is no number of bf16
Checkpoints = Callable[..., Path]
Expected = tuple[list[Tensor], dict[str, Tensor]]


@pytest.fixture(scope="session")
def expected(checkpoint_of: Checkpoints) -> Callable[[str], Expected]:
    """Log-probs of each episode, and gradients, by transformers' eager attention and experts in fp32."""
    made: dict[str, Expected] = {}

    def of(family: str, lengths: list[int] = LENGTHS, **options: Any) -> Expected:
        if (key := f"{family} {lengths} {options}") not in made:
            how = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if "moe" in family else {})
            model = AutoModelForCausalLM.from_pretrained(checkpoint_of(family, **options), dtype=torch.float32, **how)
            logprobs = []
            for e in episodes(lengths):
                ids = torch.tensor(e.token_ids)
                scores = model(ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE
                logprobs.append(scores.log_softmax(-1).gather(1, ids[1:, None])[PROMPT - 1 :, 0])
            torch.cat([a * b for a, b in zip(logprobs, slopes(lengths), strict=True)]).sum().backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            assert all(g.norm() > 0.01 for g in gradients.values()), "a gradient that is 0 would prove nothing"
            made[key] = [values.detach() for values in logprobs], gradients
        return made[key]

    return of


def check(logprobs: list[Tensor], gradients: dict[str, Tensor], want: Expected) -> None:
    for got, values in zip(logprobs, want[0], strict=True):
        assert (got - values).abs().max() <= 1e-5
    assert gradients.keys() == want[1].keys()
    for name, gradient in gradients.items():
        assert (gradient - want[1][name]).norm() <= 1e-5 * want[1][name].norm(), name


@pytest.mark.parametrize("at_once", [attention.SCORES_AT_ONCE, 200])
@pytest.mark.parametrize("family", KNOWN)
def test_a_packed_row_has_the_logprobs_and_gradients_of_its_sequences_alone(
    family: str, at_once: int, checkpoint_of: Checkpoints, expected: Callable[[str], Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", at_once)  # few: several chunks of queries in each sequence
    options = {"attn_implementation": attention.NAME, "experts_implementation": EXPERTS}
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of(family), dtype=torch.float32, **options)
    values, _ = ResponseLogprobs(model, TEMPERATURE)(to_batch(episodes(LENGTHS), torch.device("cpu")))
    (values * torch.cat(slopes(LENGTHS))).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    check(list(values.detach().split([n - PROMPT for n in LENGTHS])), gradients, expected(family))


def bits(folder: Path) -> dict[str, tuple[torch.Size, bytes]]:
    """Of a checkpoint's tensors, by name."""
    return {name: (t.shape, t.numpy().tobytes()) for name, t in load_file(folder / "model.safetensors").items()}


def run(ranks: int, folder: Path, cases: dict[str, dict]) -> dict[str, dict]:
    """What the ranks together got in each case."""
    spec = {name: {"lengths": LENGTHS} | case for name, case in cases.items()}
    (folder / "spec.json").write_text(json.dumps(spec, default=str))
    run_script(ranks, "tests/family_driver.py", str(folder / "spec.json"), str(folder / "report.pt"))
    return torch.load(folder / "report.pt", weights_only=False)


@pytest.fixture(scope="module")
def split(checkpoint_of: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks got in every layout."""
    cases = {f"{f}, {name}": {"model": checkpoint_of(f), **role} for f in KNOWN for name, role in LAYOUTS.items()}
    cases |= {f"{f}, {name}, matched": {"model": checkpoint_of(f), "matched": True, **LAYOUTS[name]} for f, name in MATCHED}
    cases["gemma, FSDP 2"] = {"model": checkpoint_of("gemma")}
    cases["stored in bf16"] = {"model": checkpoint_of("gemma2", **IN_BF16)}
    folder = tmp_path_factory.mktemp("split")
    for layout in LAYOUTS:
        cases[f"qwen3_moe, {layout}"]["export"] = folder / layout
    return run(2, folder, cases) | {"folder": folder}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", KNOWN)
def test_two_ranks_have_the_logprobs_and_gradients_of_one(
    family: str, layout: str, split: dict[str, Any], expected: Callable[[str], Expected]
) -> None:
    check(split[f"{family}, {layout}"]["logprobs"], split[f"{family}, {layout}"]["gradients"], expected(family))


@pytest.mark.parametrize(("family", "layout"), MATCHED)
def test_rounding_as_the_sampler_does_changes_nothing_in_fp32(
    family: str, layout: str, split: dict[str, Any], expected: Callable[[str], Expected]
) -> None:
    found = split[f"{family}, {layout}, matched"]
    check(found["logprobs"], found["gradients"], expected(family))


def test_a_family_without_a_plan_is_sharded(split: dict[str, Any], expected: Callable[[str], Expected]) -> None:
    assert "gemma" not in PLANS
    check(split["gemma, FSDP 2"]["logprobs"], split["gemma, FSDP 2"]["gradients"], expected("gemma"))


def test_a_checkpoint_in_bf16_computed_in_fp32_has_the_embeddings_factor_in_fp32(
    split: dict[str, Any], expected: Callable[..., Expected]
) -> None:
    check(split["stored in bf16"]["logprobs"], split["stored in bf16"]["gradients"], expected("gemma2", **IN_BF16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exported_model_with_experts_is_the_checkpoint_it_came_from(
    layout: str, split: dict[str, Any], checkpoint_of: Checkpoints
) -> None:
    assert bits(split["folder"] / layout) == bits(checkpoint_of("qwen3_moe"))


@pytest.mark.slow
def test_a_row_may_have_fewer_tokens_than_ranks_and_a_rank_no_response(
    checkpoint_of: Checkpoints, tmp_path: Path, expected: Callable[..., Expected]
) -> None:
    layouts: list[dict[str, int]] = [{"cp": 4}, {"cp": 2, "tp": 2}]
    cases = {f"{f} {role}": {"model": checkpoint_of(f), "lengths": [3], **role} for f in ("qwen3", "qwen3_moe") for role in layouts}
    for name, found in run(4, tmp_path, cases).items():
        check(found["logprobs"], found["gradients"], expected(name.split()[0], lengths=[3]))


@pytest.mark.slow
def test_experts_may_be_dealt_out_over_some_ranks_and_sharded_over_others(
    checkpoint_of: Checkpoints, tmp_path: Path, expected: Callable[..., Expected]
) -> None:
    (found,) = run(6, tmp_path, {"two experts over three shards": {"model": checkpoint_of("qwen3_moe"), "tp": 2}}).values()
    check(found["logprobs"], found["gradients"], expected("qwen3_moe"))


def small(family: str, **options: Any) -> torch.nn.Module:
    """A model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))


def test_a_degree_of_tensor_parallelism_for_a_family_without_a_plan_is_refused_with_the_way_to_add_one() -> None:
    model = small("gemma", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"tensor_parallel_degree=2: model family 'gemma' has no plan.*PLANS in parallel/plans.py.*llama"):
        check_degrees(model.config, RolePlan([0, 1], tp=2))


@pytest.mark.parametrize(("options", "told"), [
    ({"num_attention_heads": 6, "num_key_value_heads": 4}, "degree=4 does not divide the model's 6 attention heads"),
    ({"num_attention_heads": 8, "num_key_value_heads": 2}, "degree=4 does not divide the model's 2 key-value heads"),
    ({"num_attention_heads": 8, "num_key_value_heads": 4, "num_experts": 6}, "degree=4 does not divide the model's 6 experts"),
    ({"num_attention_heads": 8, "num_key_value_heads": 4, "mlp_only_layers": [0], "intermediate_size": 66}, "4 .* 66 intermediate columns"),
])  # fmt: skip
def test_what_a_degree_of_tensor_parallelism_does_not_divide_is_named_with_its_number(options: dict[str, Any], told: str) -> None:
    model = small("qwen3_moe", num_hidden_layers=1, hidden_size=64, **options)
    with pytest.raises(ValueError, match=told):
        check_degrees(model.config, RolePlan([0, 1, 2, 3], tp=4))


def test_a_degree_of_expert_parallelism_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(ValueError, match=r"expert_parallel_degree=2: .*tensor_parallel_degree.*data_parallel_shard_degree"):
        ParallelismConfig(expert_parallel_degree=2).check()


@pytest.mark.parametrize(("family", "told"), [
    ("gemma3", "'gemma3' .Gemma3ForConditionalGeneration. reads more than text"),
    ("mixtral", r"'mixtral' .MixtralForCausalLM. has '.block_sparse_moe.' in a checkpoint and '.mlp.' in memory"),
    ("gpt2", "'gpt2' .GPT2LMHeadModel. has no blocks at 'model.layers'.*PLANS in parallel/plans.py"),
])  # fmt: skip
def test_a_model_that_cannot_be_trained_is_refused_with_the_reason(family: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan_of(small(family))


@pytest.mark.parametrize("family", KNOWN)
def test_weights_leave_the_trainer_as_the_checkpoint_has_them(family: str, checkpoint_of: Checkpoints) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of(family), dtype=torch.float32)
    sent = dict(pair for name, p in model.named_parameters() for pair in to_checkpoint(name, p.detach()))
    stored = load_file(checkpoint_of(family) / "model.safetensors")
    assert sent.keys() == stored.keys()
    for name, tensor in sent.items():
        assert torch.equal(tensor, stored[name]), name


# Linear layers of the engine that vLLM would have packed. Gemma's head is its embedding's own.
LINEARS = {"mistral": 10, "gemma2": 9, "gemma3_text": 10, "qwen3_moe": 9}


def engines(families: list[str], ranks: int, checkpoint_of: Checkpoints, folder: Path) -> None:
    """Train, sync and sample each family with engines of `ranks` ranks, and hold log-probs and tensors against the policy's.

    Experts in fp32 only: rounding to bf16 lets a router change its mind about a token, whose log-prob may then differ by anything.
    """
    models = {family: checkpoint_of(family, characters=MANY) for family in families}
    dtypes = {family: ("float32",) if "moe" in family else ("float32", "bfloat16") for family in families}
    cases = [agreement(f"{f} {dtype}", models[f], dtype) for f in families for dtype in dtypes[f]]
    report = start(ranks, folder, cases, colocate=True, generator={"procs": ranks})
    for name, results in report.items():
        check_agreement(results, bf16=name.endswith("bfloat16"), linears=LINEARS[name.split()[0]])


def test_the_engine_caps_scores_and_routes_to_experts_as_the_policy_does(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    engines(["gemma2", "qwen3_moe"], 1, checkpoint_of, tmp_path)


@pytest.mark.slow
def test_the_engine_has_windows_as_the_policy_does(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    engines(["mistral", "gemma3_text"], 1, checkpoint_of, tmp_path)


@pytest.mark.slow
def test_the_ranks_of_an_engine_share_every_family(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    engines(list(LINEARS), 2, checkpoint_of, tmp_path)


def test_what_would_rearrange_the_engines_experts_is_refused() -> None:
    for key, value in (("moe_backend", "flashinfer_cutlass"), ("enable_expert_parallel", True)):
        with pytest.raises(ValueError, match=f"engine.{key}={value}"):
            GeneratorConfig(engine={key: value}).check()


def test_experts_that_a_cpu_engine_would_pad_are_refused_by_their_size() -> None:
    shape = AutoConfig.for_model("qwen3_moe", moe_intermediate_size=96)
    check_tile(shape, 1)
    with pytest.raises(ValueError, match="procs=2: .*32 x 2 to divide moe_intermediate_size=96"):
        check_tile(shape, 2)

"""The flash kernel for packed rows is SDPA of each segment alone, and a packed row is its sequences one by one."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import attention
from batch import to_batch
from tests.groups import grouped
from tests.test_attention import sequences
from tests.tiny import FAMILIES

CUDA = torch.device("cuda")
LENGTHS = [1, 4096, 17, 2, 1, 1000, 255, 256, 257, 64, 3, 2049, 1]


def segments_of(lengths: list[int]) -> attention.Segments:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return attention.Segments(ends.to(CUDA), max(lengths))


def error(got: torch.Tensor, want: torch.Tensor, least: float = 0.0) -> float:
    """Relative to what is wanted, or to `least` where that is more."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm()) / max(float(want.norm()), least)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (9, 3), (4, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_varlen_attention_is_sdpa_of_each_segment_in_outputs_and_gradients(head_dim, heads, kv_heads, dtype, figures):
    draw = torch.Generator(CUDA).manual_seed(0)
    tokens, segments = sum(LENGTHS), segments_of(LENGTHS)
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
    exact = [torch.randn(tokens, h, head_dim, device=CUDA, generator=draw).to(dtype).float().requires_grad_() for h in sizes.values()]
    upstream = torch.randn(tokens, heads, head_dim, device=CUDA, generator=draw).to(dtype)
    results = {}
    for name, kernel, kind in (("want", attention.per_length, torch.float32), ("flash", attention.flash, dtype),
                               ("sdpa", attention.per_length, dtype)):  # fmt: skip
        inputs = [t.detach().to(kind).requires_grad_() for t in exact]
        q, k, v = inputs
        out = kernel(q, k, v, segments, attention.Scores())
        assert out.shape == (tokens, heads, head_dim)
        results[name] = [out, *torch.autograd.grad(out, inputs, upstream.to(kind))]
    for what, want, got, plain in zip(("out", "dq", "dk", "dv"), *(results[n] for n in ("want", "flash", "sdpa")), strict=True):
        assert got.isfinite().all(), what
        figures[what] = error(got, want)
        figures[f"{what}_sdpa"] = error(plain, want)  # the same precision without the kernel: what rounding alone costs
        assert figures[what] <= max(2 * figures[f"{what}_sdpa"], 1e-3), f"{what}: {figures}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scores", [attention.Scores(window=100), attention.Scores(softcap=5.0), attention.Scores(softcap=5.0, window=100)])
def test_windows_and_caps_on_a_gpu_are_those_of_fp32_in_outputs_and_gradients(scores, dtype, figures):
    """Through packed_attention, which gives the windows alone to the flash kernel."""
    draw = torch.Generator(CUDA).manual_seed(0)
    tokens, segments = sum(LENGTHS), segments_of(LENGTHS)
    exact = [torch.randn(1, h, tokens, 64, device=CUDA, generator=draw).to(dtype).double() for h in (8, 2, 2)]
    upstream = torch.randn(1, tokens, 8, 64, device=CUDA, generator=draw).to(dtype)
    results = []
    for kind in (torch.float64, dtype):
        inputs = [t.to(kind).requires_grad_() for t in exact]
        q, k, v = inputs
        how = {"sliding_window": scores.window, "softcap": scores.softcap}
        out, _ = attention.packed_attention(torch.nn.Module(), q, k, v, None, segments=segments, **how)
        results.append([out, *torch.autograd.grad(out, inputs, upstream.to(kind))])
    for what, want, got in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        figures[what] = error(got, want)
        assert figures[what] <= 1e-2, f"{what}: {figures}"


GROUPS = [(300, [1, 1000, 257, 64, 1000]), (1, [64, 3]), (777, [511]), (64, [64] * 8), (2049, [17, 1]), (1, [1])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 100, 500, 5000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
def test_responses_that_share_a_prompt_are_sdpa_of_each_segment_in_outputs_and_gradients(heads, kv_heads, window, dtype, figures):
    batch = to_batch(grouped(GROUPS), CUDA, shared_prompts=True)
    segments = attention.Segments(batch.cu_seqlens, batch.max_seqlen, None, batch.keys)
    scores = attention.Scores(window=window)
    draw = torch.Generator(CUDA).manual_seed(0)
    exact = [torch.randn(len(batch.token_ids), h, 64, device=CUDA, generator=draw).to(dtype) for h in (heads, kv_heads, kv_heads)]
    upstream = torch.randn(len(batch.token_ids), heads, 64, device=CUDA, generator=draw).to(dtype)
    results = {}
    for name, kernel, kind in (("want", attention.per_length, torch.float32), ("flash", attention.flash, dtype),
                               ("sdpa", attention.per_length, dtype)):  # fmt: skip
        q, k, v = inputs = [t.to(kind).requires_grad_() for t in exact]
        out = kernel(q, k, v, segments, scores)
        results[name] = [out, *torch.autograd.grad(out, inputs, upstream.to(kind))]
    least = 0.1 * float(upstream.double().norm())  # a window of 1 has no gradient of q and k
    for what, want, got, plain in zip(("out", "dq", "dk", "dv"), *(results[n] for n in ("want", "flash", "sdpa")), strict=True):
        assert got.isfinite().all(), what
        figures[what], figures[f"{what}_sdpa"] = error(got, want, least), error(plain, want, least)
        assert figures[what] <= max(2 * figures[f"{what}_sdpa"], 1e-2), f"{what}: {figures}"


@pytest.mark.parametrize("groups", [[(9, [12, 1, 3, 70, 7]), (1, [8, 2]), (40, [6]), (100, [30] * 4)], [(4, [4, 3, 5])]])
@pytest.mark.parametrize("family", [*FAMILIES, "mistral", "gemma2", "gemma3_text"])
def test_a_row_with_shared_prompts_on_cuda_is_the_row_without(family, groups, checkpoint_of, figures):
    """In bf16, against fp32, and against bf16 with the prompts computed for each response. A window may end inside a short prompt."""
    folder, episodes = checkpoint_of(family, kv_heads=2), grouped(groups)

    def measured(dtype: torch.dtype, shared: bool) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention.NAME).to(CUDA)
        batch = to_batch(episodes, CUDA, shared_prompts=shared)
        segments = attention.Segments(batch.cu_seqlens, batch.max_seqlen, None, batch.keys)
        given = {"input_ids": batch.token_ids[None], "position_ids": batch.positions[None], "segments": segments}
        logits = model(**given, use_cache=False).logits[0, batch.rows]
        spread = torch.linspace(-1, 1, logits.numel(), device=CUDA).view_as(logits)
        return [logits, *torch.autograd.grad((logits.float() * spread).sum(), list(model.parameters()))]

    want = measured(torch.float32, False)
    exact, shared, plain = (
        [error(g, w) for g, w in zip(measured(*how), want, strict=True)]
        for how in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False))
    )
    figures |= {"fp32": max(exact), "bf16_shared": max(shared), "bf16_plain": max(plain)}
    assert max(exact) <= 1e-4
    for s, p in zip(shared, plain, strict=True):
        assert s <= 3 * p + 1e-2


def test_the_kernel_is_chosen_by_device_and_dtype():
    assert attention.KERNELS["cuda", torch.bfloat16] is attention.flash
    assert ("cuda", torch.float32) not in attention.KERNELS and ("cpu", torch.bfloat16) not in attention.KERNELS


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_on_cuda_is_its_sequences_one_by_one(family, checkpoint_of, figures):
    """Against transformers' own attention in fp32, a sequence at a time, and against the same model in bf16 without packing."""
    lengths = [1, 64, 3, 200, 1, 17, 2, 64]
    folder = checkpoint_of(family, kv_heads=2, tied=False)
    tokens = [t.to(CUDA) for t in sequences(lengths)]
    spread = torch.linspace(-1, 1, sum(lengths) * 17, device=CUDA).view(-1, 17)

    def measured(dtype: torch.dtype, kind: str) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=kind).to(CUDA)
        if kind == attention.NAME:
            positions = torch.cat([torch.arange(n, device=CUDA) for n in lengths])[None]
            row = torch.cat(tokens)[None]
            logits = model(input_ids=row, position_ids=positions, use_cache=False, segments=segments_of(lengths)).logits[0]
        else:
            logits = torch.cat([model(t[None]).logits[0] for t in tokens])
        return [logits, *torch.autograd.grad((logits.float() * spread).sum(), list(model.parameters()))]

    want = measured(torch.float32, "eager")
    exact, packed, alone = (
        [error(g, w) for g, w in zip(measured(*how), want, strict=True)]
        for how in ((torch.float32, attention.NAME), (torch.bfloat16, attention.NAME), (torch.bfloat16, "eager"))
    )
    figures |= {"fp32": max(exact), "bf16_packed": max(packed), "bf16_alone": max(alone)}
    assert max(exact) <= 1e-4
    for p, a in zip(packed, alone, strict=True):
        assert p <= 3 * a + 1e-2

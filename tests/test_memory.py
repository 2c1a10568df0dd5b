"""What is said when GPU memory runs out, and what is chosen from bytes; on the GPU itself tests/gpu/test_memory.py shows it."""

import logging
from typing import Any

import pytest
import torch

from model import MORE_RANKS
from parallel.memory import GIB, Parked, TrainingBytes, explained, live_bytes, parks, residency, training_bytes
from parallel.switches import ALL_OFF, Switches
from rollout.generator import TOO_LITTLE_MEMORY

CUDA_SAYS = (
    "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.10 GiB is free. "
    "Including non-PyTorch memory, this process has 138.69 GiB memory in use."
)
VLLM_SAYS = (
    "To serve at least one request with the model's max seq len (4096), (0.44 GiB KV cache is needed, which is larger than the "
    "available KV cache memory (0.10 GiB). Try increasing `gpu_memory_utilization`."
)


def test_running_out_of_memory_names_the_phase_the_bytes_and_the_keys():
    with pytest.raises(ValueError, match="while training: 2.32 GiB needed.*Lower training.seq_len") as caught:
        with explained("training", "training.seq_len"):
            raise torch.OutOfMemoryError(CUDA_SAYS)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_an_allocator_that_does_not_say_how_much_is_helped_out():
    with pytest.raises(ValueError, match="while waking the engine: 40.00 GiB needed.*Lower generator.gpu_memory_utilization"):
        with explained("waking the engine", "generator.gpu_memory_utilization", needed=40 * GIB):
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:146")


def test_what_vllm_says_about_its_start_keeps_its_numbers_and_gets_our_keys():
    with pytest.raises(ValueError, match=r"0.44 GiB KV cache is needed.*Raise generator.gpu_memory_utilization.*training.seq_len$"):
        with explained("starting the engine", "x", others=TOO_LITTLE_MEMORY):
            raise ValueError(VLLM_SAYS)


@pytest.mark.parametrize("said", ["No available memory for the cache blocks. Try increasing it.", VLLM_SAYS])
def test_a_share_that_is_too_small_is_called_that_and_not_what_was_needed(said):
    with pytest.raises(ValueError, match="while starting the engine: more than its share of 1.40 GiB needed .*Raise generator") as caught:
        with explained("starting the engine", "x", needed=int(1.4 * GIB), others=TOO_LITTLE_MEMORY):
            raise ValueError(said)
    assert "memory while starting the engine: 1.40 GiB needed" not in str(caught.value)


def test_a_share_that_is_not_free_is_what_was_needed():
    with pytest.raises(ValueError, match="while starting the engine: 41.94 GiB needed .*Lower generator.gpu_memory_utilization, or end"):
        with explained("starting the engine", "x", needed=int(41.94 * GIB), others=TOO_LITTLE_MEMORY):
            raise ValueError("Free memory on device cuda:0 (15.81/139.8 GiB) on startup is less than desired GPU memory utilization")


def test_it_is_explained_once():
    with pytest.raises(ValueError, match="^out of .* memory while scoring"):
        with explained("training", "a"), explained("scoring", "b"):
            raise torch.OutOfMemoryError(CUDA_SAYS)


@pytest.mark.parametrize("error", [RuntimeError("a kernel failed"), ValueError("training.seq_len=0"), KeyError("x")])
def test_other_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as caught:
        with explained("training", "training.seq_len", others=TOO_LITTLE_MEMORY):
            raise error
    assert caught.value is error


def test_the_trainers_bytes_are_near_what_a_qwen3_06b_took():
    """Measured on one H200, twice: 41.3 and 41.8 GiB at the peak, of which 2.2 are the weights, with rows of up to 16,384 tokens."""
    weights = 4 * 596_049_920
    expected = training_bytes(weights, hidden=1024, intermediate=3072, heads=4096, layers=28, tokens=16384, itemsize=2)
    assert expected.kept == 2 * weights
    for measured in (41.3, 41.8):
        assert expected.peak / GIB == pytest.approx(measured - 2.2, rel=0.1)


def test_float32_activations_take_twice_the_bytes_of_bfloat16_and_so_do_gathered_weights():
    weights = 4 * 10**9
    shape: dict[str, Any] = {"hidden": 1024, "intermediate": 3072, "heads": 4096, "layers": 28}
    half, full = (training_bytes(weights, tokens=16384, itemsize=size, **shape) for size in (2, 4))
    activations = training_bytes(weights, tokens=2 * 16384, itemsize=2, **shape).peak - half.peak
    assert half.kept == full.kept == 2 * weights
    assert full.peak - half.peak == activations + weights // 2


def test_activations_that_are_computed_again_take_one_layer_and_the_inputs_of_all():
    def of(layers: int, switches: Switches) -> TrainingBytes:
        sizes: dict[str, Any] = {"hidden": 1024, "intermediate": 3072, "heads": 4096, "tokens": 16384}
        return training_bytes(0, layers=layers, itemsize=2, switches=switches, **sizes)

    kept, again, one = of(28, ALL_OFF), of(28, Switches("full")), of(1, ALL_OFF)
    assert again.peak - one.peak == 2 * 16384 * 28 * 1024 and again.peak < kept.peak / 5
    assert again.peak < of(28, Switches("selective")).peak < kept.peak


def test_what_is_on_the_host_is_not_counted_on_the_gpu():
    weights = 4 * 10**9
    sizes: dict[str, Any] = {"hidden": 1024, "intermediate": 3072, "heads": 4096, "layers": 28, "tokens": 16384, "itemsize": 2}
    choices = (ALL_OFF, Switches(offload="optimizer"), Switches(offload="parameters"))
    none, optimizer, parameters = (training_bytes(weights, **sizes, switches=switches) for switches in choices)
    assert (none.kept, optimizer.kept, parameters.kept) == (2 * weights, 0, 0)
    assert none.peak - optimizer.peak == 2 * weights and optimizer.peak - parameters.peak == weights


@pytest.mark.parametrize(
    ("needed", "choice", "printed"),
    [
        (10, "stays", "so the engine stays while the policy trains"),
        (40, "drops its KV cache", "so the engine drops its KV cache while the policy trains"),
        (70, "sleeps", "so the engine sleeps (level 2 when new weights follow, else level 1) while the policy trains"),
    ],
)
def test_what_the_engine_does_is_printed_with_the_bytes_it_follows_from(needed, choice, printed, monkeypatch, caplog):
    """On a GPU of 80 GiB of which 20 are free beside an engine whose cache has 30."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    with caplog.at_level(logging.INFO):
        assert residency(torch.device("cuda"), TrainingBytes(GIB, needed * GIB), 30 * GIB) == choice
    assert f"expected to take {needed}.0 GiB more, {printed}" in caplog.text


def test_advice_that_is_not_to_lower_a_key_stands_as_it_is():
    with pytest.raises(ValueError, match="while loading the model: 2.32 GiB needed.* Start more ranks, over which"):
        with explained("loading the model", MORE_RANKS):
            raise torch.OutOfMemoryError(CUDA_SAYS)


def test_parked_tensors_have_no_bytes_until_they_are_used_and_then_their_own(monkeypatch):
    """Views of one storage, a transposed one and one in bf16, over several host buffers."""
    monkeypatch.setattr(Parked, "PIECE", 256)
    whole = torch.randn(40, 7)
    tensors = [whole, whole[3:20].t(), torch.randn(9).bfloat16(), torch.empty(0)]
    kept, cpu = [t.clone() for t in tensors], torch.device("cpu")
    size = live_bytes(tensors, cpu)
    assert size == 40 * 7 * 4 + 9 * 2
    parked = Parked(tensors)
    assert live_bytes(tensors, cpu) == 0
    with parked.resident():
        assert all(torch.equal(t, k) for t, k in zip(tensors, kept, strict=True)) and live_bytes(tensors, cpu) == size
        tensors[2].zero_()  # read only: forgotten
    with parked.changing():
        assert torch.equal(tensors[2], kept[2])
        whole.add_(1)
    assert live_bytes(tensors, cpu) == 0
    with parked.resident():
        assert torch.equal(whole, kept[0] + 1) and torch.equal(tensors[1], kept[1] + 1) and torch.equal(tensors[2], kept[2])


@pytest.mark.parametrize(
    ("total", "parked"),
    [
        (101, False),  # 10 of weights, 60 of training, 6 of the engine, 25 of the reference
        (100, True),
        (0, False),  # a CPU
    ],
)
def test_a_reference_is_parked_where_it_does_not_fit_beside_what_else_is_there(total, parked, caplog):
    with caplog.at_level(logging.INFO):
        needed = TrainingBytes(20 * GIB, 60 * GIB)
        sizes = {"policy": 10 * GIB, "reference": 25 * GIB, "engine": 30 * GIB, "engine_weights": 6 * GIB}
        assert parks(total * GIB, needed=needed, **sizes) == parked
    if total:
        assert ("waits in host memory while it is idle" in caplog.text) == parked and "up to 76.0 GiB" in caplog.text


def test_a_reference_is_parked_where_it_would_keep_the_engine_from_waking():
    sizes = {"policy": 10 * GIB, "reference": 25 * GIB, "engine_weights": 6 * GIB}
    needed = TrainingBytes(20 * GIB, 30 * GIB)
    assert parks(100 * GIB, needed=needed, engine=46 * GIB, **sizes) and not parks(100 * GIB, needed=needed, engine=45 * GIB, **sizes)
    assert not parks(65 * GIB, needed=needed, engine=0, **sizes | {"engine_weights": 0})

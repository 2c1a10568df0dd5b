"""Which random numbers a sample gets: a seed of its own or the engine's, and from what the seed follows."""

from collections.abc import Iterator

import pytest
import torch

from rollout.sampling import sample_seed, sampling_seed

CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # a name, no GPU is needed


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_by_default_samples_have_seeds_on_a_cpu_and_not_on_cuda():
    assert sampling_seed("auto", 7, CPU) == 7
    assert sampling_seed("auto", 7, CUDA) is None


@pytest.mark.usefixtures("deterministic")
def test_by_default_samples_have_seeds_wherever_torch_is_deterministic():
    assert sampling_seed("auto", 7, CPU) == sampling_seed("auto", 7, CUDA) == 7
    assert sampling_seed("never", 7, CUDA) is None


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_always_and_never_hold_on_every_device(device):
    assert sampling_seed("always", 7, device) == 7
    assert sampling_seed("never", 7, device) is None


def test_a_run_with_seed_0_has_seeds_too():
    assert sampling_seed("auto", 0, CPU) == sampling_seed("always", 0, CUDA) == 0


def test_every_sample_of_every_prompt_of_every_run_has_a_seed_of_its_own_and_always_the_same():
    names = [(run, prompt, sample) for run in range(3) for prompt in range(40) for sample in range(16)]
    seeds = [sample_seed(*name) for name in names]
    assert len(set(seeds)) == len(names)
    assert seeds == [sample_seed(*name) for name in names]
    assert all(0 <= seed < 2**62 for seed in seeds)  # vLLM takes 64 bits with a sign


def test_a_seed_is_the_same_in_every_process_and_version():
    assert [sample_seed(0, 0, 0), sample_seed(1, 2, 3)] == [2404280986188055813, 569182058389096538]

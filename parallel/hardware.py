"""What this machine has and what its devices can do, so that no other code asks which device it runs on."""

import torch

# Dense bf16 matrix rate in FLOP/s, from NVIDIA's data sheets, by a part of the device's name.
PEAK_BF16 = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "H20": 148e12, "L40S": 362e12, "B200": 2250e12}


def device_type(device: str) -> str:
    """cuda or cpu, for a run with `device` (auto, cpu or cuda). ValueError when a GPU is demanded and none is seen."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device=cuda, but torch sees no GPU: set device: auto or cpu, or check the driver (nvidia-smi) and torch's CUDA build"
        )
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def num_ranks(most: int) -> int:
    """A rank for each GPU of this machine; `most` where it has more than that, or none."""
    return min(torch.cuda.device_count(), most) or most


def computes_reproducibly(device: torch.device) -> bool:
    """Does a computation give the same bits each time? On a CPU it does, on a GPU in torch's deterministic mode only."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of this rank's GPU at best, for the model FLOP utilisation; None for a CPU or a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in sorted(PEAK_BF16.items(), key=lambda kv: -len(kv[0])) if part in name), None)


def is_kept_on_cpu(device: str) -> bool:
    """Is a run with `device` (auto, cpu or cuda) on the CPU on any machine?"""
    return device == "cpu"


def largest_memory(device: str) -> int:
    """Bytes of this machine's first GPU, if a run with `device` (auto, cpu or cuda) would use one; else 0."""
    if device == "cpu" or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(0).total_memory

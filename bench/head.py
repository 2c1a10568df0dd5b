"""Time and memory of the head, forward and backward, against what one would write without it: JSON lines on stdout.

    python -m bench.head [--rounds 3] [--threads 1]

Four ways from hidden states to gradients, in fp32 on a CPU:

    naive       F.linear, log_softmax, gather
    checkpoint  the same by chunks, each under torch.utils.checkpoint
    any_loss    head.logprobs_from_hidden
    one_pass    head.loss_from_hidden

A line per case: medians of seconds, of the wall and of the process's CPU time, in which waiting for other processes is not counted;
MiB: the peak of a process of its own that does nothing else, above what it held before. Ratios are to naive. In a round the four take
turns. The last lines: the exponents a and b of time ~ N^a and memory ~ N^b. Exit code 1, and no figures, when the four disagree.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from head import default_chunk_tokens, logprobs_from_hidden, loss_from_hidden

HIDDEN = 576
GROWING_TOKENS = [(n, 49152) for n in (1024, 2048, 4096, 8192)]
GROWING_VOCABULARY = [(4096, v) for v in (12288, 24576)]
TOLERANCE = 1e-4  # of the largest element of each gradient; fp32 sums of 49152 terms in different orders


class Problem:
    """The same for the same sizes."""

    def __init__(self, tokens: int, vocabulary: int):
        generator = torch.Generator().manual_seed(tokens + vocabulary)
        self.hidden = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
        self.weight = torch.randn(vocabulary, HIDDEN, generator=generator).mul_(0.05).requires_grad_()
        self.targets = torch.randint(vocabulary, (tokens,), generator=generator)
        self.advantages = torch.randn(tokens, generator=generator)
        self.old = torch.randn(tokens, generator=generator).mul_(0.1).sub_(math.log(vocabulary))

    def share(self, logprobs: Tensor, entropy: Tensor | None, rows: slice) -> Tensor:
        """The clipped surrogate, averaged over all tokens."""
        advantages, ratio = self.advantages[rows], (logprobs - self.old[rows]).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / len(self.targets)

    @property
    def all_rows(self) -> slice:
        return slice(0, len(self.targets))


def log_softmax(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.linear(hidden, weight).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def naive(problem: Problem) -> Tensor:
    return problem.share(log_softmax(problem.hidden, problem.weight, problem.targets), None, problem.all_rows)


def checkpointed(problem: Problem) -> Tensor:
    size = default_chunk_tokens(len(problem.weight), problem.weight.device)
    chunks = zip(problem.hidden.split(size), problem.targets.split(size), strict=True)
    logprobs = [checkpoint(log_softmax, hidden, problem.weight, targets, use_reentrant=False) for hidden, targets in chunks]
    return problem.share(torch.cat(logprobs), None, problem.all_rows)


def any_loss(problem: Problem) -> Tensor:
    logprobs, _ = logprobs_from_hidden(problem.hidden, problem.weight, problem.targets)
    return problem.share(logprobs, None, problem.all_rows)


def one_pass(problem: Problem) -> Tensor:
    return loss_from_hidden(problem.hidden, problem.weight, problem.targets, problem.share).loss


PEERS: dict[str, Callable[[Problem], Tensor]] = {
    "naive": naive,
    "checkpoint": checkpointed,
    "any_loss": any_loss,
    "one_pass": one_pass,
}


def solve(problem: Problem, peer: str) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients."""
    loss = PEERS[peer](problem)
    hidden, weight = torch.autograd.grad(loss, (problem.hidden, problem.weight))
    return loss.detach(), hidden, weight


def disagreements(problem: Problem) -> list[str]:
    """Who differs from naive, and by how much. Also everyone's first, untimed run."""
    expected = solve(problem, "naive")
    found = []
    for peer in list(PEERS)[1:]:
        for name, a, b in zip(("loss", "hidden's gradient", "weight's gradient"), solve(problem, peer), expected, strict=True):
            error = float((a - b).abs().max() / b.abs().max())
            if not error <= TOLERANCE:
                found.append(f"{peer}: {name} differs from naive's by {error:.1e} of its largest element")
    return found


def timed(problem: Problem, rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of each, (wall, CPU)."""
    seconds: dict[str, list[tuple[float, float]]] = {peer: [] for peer in PEERS}
    for _ in range(rounds):
        for peer, times in seconds.items():
            wall, cpu = time.perf_counter(), time.process_time()
            solve(problem, peer)
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return {peer: (statistics.median(w for w, _ in times), statistics.median(c for _, c in times)) for peer, times in seconds.items()}


def resident_mib(kind: str) -> float:
    """Of this process: VmRSS now, VmHWM at most. (ru_maxrss begins with what the parent process had.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) / 1024


def own_peak_mib(tokens: int, vocabulary: int, peer: str) -> float:
    """The most memory this process held during one run, above that before it."""
    solve(Problem(8, 16), peer)  # what torch sets up once
    problem = Problem(tokens, vocabulary)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = resident_mib("VmRSS")
    solve(problem, peer)
    return resident_mib("VmHWM") - before


def peak_mib(tokens: int, vocabulary: int, peer: str, threads: int) -> float:
    case = [str(tokens), str(vocabulary), peer]
    command = [sys.executable, "-m", "bench.head", "--threads", str(threads), "--peak", *case]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def exponent(sizes: list[int], values: list[float]) -> float:
    """The slope of log(value) over log(size), by least squares.

    >>> exponent([1, 2, 4], [3.0, 12.0, 48.0])
    2.0
    """
    return statistics.linear_regression([math.log2(s) for s in sizes], [math.log2(v) for v in values]).slope


def measure(tokens: int, vocabulary: int, rounds: int, threads: int) -> list[dict]:
    """One line of each peer. SystemExit where they disagree."""
    problem = Problem(tokens, vocabulary)
    if wrong := disagreements(problem):
        raise SystemExit("\n".join(wrong))
    seconds = timed(problem, rounds)
    peaks = {peer: peak_mib(tokens, vocabulary, peer, threads) for peer in PEERS}
    lines = []
    for peer, (wall, cpu) in seconds.items():
        ratios = {"seconds": wall / seconds["naive"][0], "cpu_seconds": cpu / seconds["naive"][1], "peak": peaks[peer] / peaks["naive"]}
        line = {"case": f"N={tokens} H={HIDDEN} V={vocabulary}", "tokens": tokens, "vocabulary": vocabulary, "peer": peer}
        line |= {"threads": threads, "seconds": round(wall, 3), "cpu_seconds": round(cpu, 3), "peak_mib": round(peaks[peer], 1)}
        lines.append(line | {f"{name}_ratio": round(r, 3) for name, r in ratios.items()})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each case")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--peak", nargs=3, metavar=("TOKENS", "VOCABULARY", "PEER"), help="print one case's peak MiB, and no more")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        tokens, vocabulary, peer = options.peak
        print(own_peak_mib(int(tokens), int(vocabulary), peer))
        return
    lines = []
    for tokens, vocabulary in GROWING_TOKENS + GROWING_VOCABULARY:
        for line in measure(tokens, vocabulary, options.rounds, options.threads):
            print(json.dumps(line), flush=True)
            lines.append(line)
    for peer in PEERS:
        growing = [line for line in lines if line["peer"] == peer and (line["tokens"], line["vocabulary"]) in GROWING_TOKENS]
        sizes = [line["tokens"] for line in growing]
        laws = {f"{name} ~ N^": round(exponent(sizes, [line[name] for line in growing]), 2) for name in ("cpu_seconds", "peak_mib")}
        print(json.dumps({"law": peer} | laws), flush=True)


if __name__ == "__main__":
    main()

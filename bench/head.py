"""Time and memory of the head, forward and backward, against what one would write without it: JSON lines on stdout.

    python -m bench.head [--rounds 3] [--threads 1] [--device auto]

Four ways from hidden states to gradients, in fp32:

    naive       F.linear, log_softmax, gather
    checkpoint  the same by chunks, each under torch.utils.checkpoint
    any_loss    head.logprobs_from_hidden
    one_pass    head.loss_from_hidden

A line a case and way: medians of wall and CPU seconds, ratios to naive of the same round; MiB: the peak of a process of its own that
does nothing else, above what it held before. The last lines: the exponents of seconds and MiB in tokens and in words. Exit code 1, and
no figures, when the four disagree.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bench.measure import Peak, alternate, compared, exponent, positive, refuse, say, where
from head import default_chunk_tokens, logprobs_from_hidden, loss_from_hidden
from parallel.hardware import device_type

HIDDEN = 576
GROWING_TOKENS = [1024, 2048, 4096, 8192]  # at the largest vocabulary
GROWING_VOCABULARY = [12288, 24576, 49152]  # at the third number of tokens
GROW = ("seconds", "cpu_seconds", "peak_mib")
TOLERANCE = 1e-4  # of the largest element of each gradient; fp32 sums of 49152 terms in different orders


class Problem:
    """The same for the same sizes."""

    def __init__(self, tokens: int, vocabulary: int, device: torch.device):
        generator = torch.Generator().manual_seed(tokens + vocabulary)
        self.hidden = torch.randn(tokens, HIDDEN, generator=generator).to(device).requires_grad_()
        self.weight = torch.randn(vocabulary, HIDDEN, generator=generator).mul_(0.05).to(device).requires_grad_()
        self.targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
        self.advantages = torch.randn(tokens, generator=generator).to(device)
        self.old = torch.randn(tokens, generator=generator).mul_(0.1).sub_(math.log(vocabulary)).to(device)

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


def disagreements(problem: Problem, peers: Sequence[str] = tuple(PEERS)) -> list[str]:
    """Who differs from naive, and by how much. Also everyone's first, untimed run."""
    expected = solve(problem, "naive")
    found = []
    for peer in peers[1:]:
        for name, a, b in zip(("loss", "hidden's gradient", "weight's gradient"), solve(problem, peer), expected, strict=True):
            error = float((a - b).abs().max() / b.abs().max())
            if not error <= TOLERANCE:
                found.append(f"{peer}: {name} differs from naive's by {error:.1e} of its largest element")
    return found


def own_peak_mib(tokens: int, vocabulary: int, peer: str, device: torch.device) -> float:
    """The most memory this process held during one run, above that before it."""
    solve(Problem(8, 16, device), peer)  # what torch sets up once
    problem = Problem(tokens, vocabulary, device)
    peak = Peak(device)
    solve(problem, peer)
    return peak.mib()


def peak_mib(tokens: int, vocabulary: int, peer: str, options: argparse.Namespace) -> float:
    shared = ["--threads", str(options.threads), "--device", options.device]
    command = [sys.executable, "-m", "bench.head", *shared, "--peak", str(tokens), str(vocabulary), peer]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def measured(tokens: int, vocabulary: int, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """One line of each peer. SystemExit where they disagree."""
    problem = Problem(tokens, vocabulary, device)
    refuse(disagreements(problem, options.peers))
    times = alternate({peer: partial(solve, problem, peer) for peer in options.peers}, options.rounds)
    peaks = {peer: peak_mib(tokens, vocabulary, peer, options) for peer in options.peers}
    lines: list[dict[str, Any]] = []
    for peer, figures in compared(times, "naive").items():
        line = {"tokens": tokens, "vocabulary": vocabulary, "peer": peer} | figures
        ratio = round(peaks[peer] / peaks["naive"], 3) if peaks["naive"] else None  # a small case fits what the process had
        lines.append(line | {"peak_mib": round(peaks[peer], 1), "peak_ratio": ratio})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=3, help="timed runs of each case")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", default=GROWING_TOKENS, help="of the cases whose tokens grow")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=GROWING_VOCABULARY, help="of the cases whose vocabulary grows")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="which to run, naive first")
    parser.add_argument("--peak", nargs=3, metavar=("TOKENS", "VOCABULARY", "PEER"), help="print one case's peak MiB, and no more")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(device_type(options.device))
    if options.peers[0] != "naive":
        parser.error("--peers begins with naive, to which the others are compared")
    if options.peak:
        tokens, vocabulary, peer = options.peak
        print(own_peak_mib(int(tokens), int(vocabulary), peer, device))
        return
    machine = where(device, torch.float32)
    widest, middle = max(options.vocabulary), sorted(options.tokens)[len(options.tokens) // 2]
    sizes = dict.fromkeys([(n, widest) for n in options.tokens] + [(middle, v) for v in options.vocabulary])
    lines = []
    for tokens, vocabulary in sizes:
        for line in measured(tokens, vocabulary, options, device):
            say("head", f"N={tokens} H={HIDDEN} V={vocabulary}", **line, **machine)
            lines.append(line)
    for peer in options.peers:
        for axis, fixed, at in (("tokens", "vocabulary", widest), ("vocabulary", "tokens", middle)):
            growing = [line for line in lines if line["peer"] == peer and line[fixed] == at]
            if len(growing) > 1:
                seen = [name for name in GROW if all(x[name] for x in growing)]
                law = {f"{name} ~ {axis}^": round(exponent([x[axis] for x in growing], [x[name] for x in growing]), 2) for name in seen}
                say("head", f"law of {peer}", peer=peer, **law, **machine)


if __name__ == "__main__":
    main()

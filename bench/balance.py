"""How evenly sequences are dealt to replicas and packed into rows, and how long that takes to decide: JSON lines on stdout.

    python -m bench.balance [--replicas 8] [--sequences 512 1024 2048 4096] [--row 16384] [--longest 2048]

Simulated lengths, log-normal, of which no tensor is made: a CPU's business wherever training happens. Three deals:

    strided     the i-th sequence to replica i mod n, rows filled in order: what a distributed sampler does
    sorted      the same, longest first
    plan_rows   batch.plan_rows: longest first to the least loaded replica, rows first-fit

A GRPO run with training.shared_prompts deals otherwise, by packing.plan_shared_rows: it keeps the answers to a prompt together and
counts their prompt once a row, so its tokens are other ones and nothing here speaks of it.

`imbalance` is the busiest replica's tokens over the mean, `imbalance_flops` the same with attention's share of a layer counted (the
shape of Qwen3-1.7B); `padding` is the share of the rows, as many on every replica, that is empty. Milliseconds are CPU time. Exit code
1, and no figures, where a deal loses a sequence or fills a row beyond its size. The last lines: the exponents of time in sequences;
that of n log n is 1.1 between 512 and 4,096.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from batch import plan_rows
from bench.measure import alternate, exponent, figure, positive, refuse, say, spread, where
from bench.shapes import SHAPES, lengths_drawn

Deal = list[list[list[int]]]  # [replica][row] -> sequences


def strided(lengths: list[int], replicas: int, row: int) -> Deal:
    return [filled(list(range(r, len(lengths), replicas)), lengths, row) for r in range(replicas)]


def sorted_strided(lengths: list[int], replicas: int, row: int) -> Deal:
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [filled(order[r::replicas], lengths, row) for r in range(replicas)]


def filled(order: list[int], lengths: list[int], row: int) -> list[list[int]]:
    """Rows filled one after the other."""
    rows: list[list[int]] = []
    room = 0
    for i in order:
        if lengths[i] > room or not rows:
            rows.append([])
            room = row
        rows[-1].append(i)
        room -= lengths[i]
    return rows


DEALS: dict[str, Callable[[list[int], int, int], Deal]] = {"strided": strided, "sorted": sorted_strided, "plan_rows": plan_rows}


def wrong(deal: Deal, lengths: list[int], row: int, who: str) -> list[str]:
    dealt = sorted(i for rows in deal for members in rows for i in members)
    found = [] if dealt == list(range(len(lengths))) else [f"{who}: {len(dealt)} sequences dealt of {len(lengths)}, or one twice"]
    fullest = max(sum(lengths[i] for i in members) for rows in deal for members in rows)
    return found + ([f"{who}: a row of {fullest} tokens, and {row} is the most"] if fullest > row else [])


def flops(length: int) -> float:
    """Of one sequence in a layer of the 1.7B shape, in multiples of a token's matrix products."""
    sizes = SHAPES["1.7b"][1]
    width, head = sizes["hidden_size"], sizes["head_dim"]
    products = width * head * 2 * (sizes["num_attention_heads"] + sizes["num_key_value_heads"]) + 3 * width * sizes["intermediate_size"]
    return length * (1 + length * sizes["num_attention_heads"] * head / products)


def quality(deal: Deal, lengths: list[int], row: int) -> dict[str, float]:
    tokens = [sum(lengths[i] for members in rows for i in members) for rows in deal]
    work = [sum(flops(lengths[i]) for members in rows for i in members) for rows in deal]
    rows = max(map(len, deal)) * len(deal)
    imbalances = {name: max(of) / statistics.fmean(of) for name, of in (("imbalance", tokens), ("imbalance_flops", work))}
    return {name: round(value, 4) for name, value in imbalances.items()} | {"rows": rows, "padding": round(1 - sum(tokens) / rows / row, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=5, help="timed runs of each deal")
    parser.add_argument("--replicas", type=positive, default=8)
    parser.add_argument("--sequences", type=positive, nargs="+", default=[512, 1024, 2048, 4096], help="one case each")
    parser.add_argument("--row", type=int, default=16384, help="tokens of a row at most")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of every prompt")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of a response at most")
    options = parser.parse_args()
    machine = where(torch.device("cpu"), torch.float32)
    lines: list[dict[str, Any]] = []
    for count in options.sequences:
        lengths = [options.prompt + n for n in lengths_drawn(count, options.longest, seed=count)]
        deals = {name: deal(lengths, options.replicas, options.row) for name, deal in DEALS.items()}
        refuse([line for name, deal in deals.items() for line in wrong(deal, lengths, options.row, name)])
        ways = {name: partial(deal, lengths, options.replicas, options.row) for name, deal in DEALS.items()}
        times = alternate(ways, options.rounds)
        for name, deal in deals.items():
            milliseconds = [1e3 * s.cpu for s in times[name]]
            line = {"way": name, "sequences": count, "replicas": options.replicas, "cpu_ms": figure(statistics.median(milliseconds))}
            ratio = spread(milliseconds, [1e3 * s.cpu for s in times["strided"]])
            say("balance", f"{count} sequences, {options.replicas} replicas", **line, cpu_ms_ratio=ratio,
                **quality(deal, lengths, options.row), **machine)  # fmt: skip
            lines.append(line)
    for name in DEALS:
        growing = [line for line in lines if line["way"] == name]
        if len(growing) > 1:
            law = exponent([x["sequences"] for x in growing], [x["cpu_ms"] for x in growing])
            say("balance", f"law of {name}", **{"way": name, "cpu_ms ~ sequences^": round(law, 2)}, **machine)


if __name__ == "__main__":
    main()

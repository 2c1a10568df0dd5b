"""Run by tests/test_cost.py under torchrun: what a sync and a rollout ask of the host, on one rank with a real engine.

    torchrun --nproc-per-node=1 tests/cost_driver.py spec.json report.json

The spec: `cases`, a list of {name, run, ...}, as in sync_driver.py.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.launch import launch
from parallel.placement import Placement
from parallel.roles import ParallelismConfig, Plan, ServicesConfig
from tests.cases import answer
from tests.sync_driver import Job

READS = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "equal", "is_nonzero")  # the host waits for the device


class Calls(TorchFunctionMode):
    """Functions and methods of torch that are called inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Operations that reach the device inside, by namespace and name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def cost(place: Placement, *, model: str, samples: bool) -> dict[str, Any]:
    """Of a third sync: the first two learn which parts the engine keeps, and where. samples: and of a rollout."""
    job = Job.start(place, model, engine_dtype="bfloat16")
    job.publish()
    job.publish()
    with Operations() as operations, Calls() as calls:
        job.publish()
    result = {
        "tensors": len(job.policy.shards()),
        "reads": {name: calls.seen[name] for name in READS},  # item and cpu: of the ranks' lists of names, which are on the host
        "scalars": operations.seen["aten._local_scalar_dense.default"],
        "collectives": sum(count for name, count in operations.seen.items() if name.startswith("c10d")),
        "operations": operations.seen.total(),
    }
    result |= {"rollout": rollout(job)} if samples else {}
    job.generator.close()
    return result


def rollout(job: Job) -> dict[str, Any]:
    """The same seeded samples as vLLM keeps their log-probs and as we do, and its KV cache's blocks before and after they are forgotten."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    ours = job.sample()
    pool = job.generator._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    blocks, known = pool.blocks, [b.block_hash is not None for b in pool.blocks]
    job.generator._wake_kv_cache()
    result: dict[str, Any] = {"known": sum(known), "left": sum(b.block_hash is not None for b in blocks), "blocks": pool.blocks is blocks}
    update = LogprobsProcessor._update_sample_logprobs
    LogprobsProcessor._update_sample_logprobs = update.__closure__[0].cell_contents
    kinds: list[str] = []
    generate = job.generator._llm.generate

    def watching(*args: Any, **kwargs: Any) -> list:
        outputs = generate(*args, **kwargs)
        kinds.append(type(outputs[0].outputs[0].logprobs[0]).__name__)
        return outputs

    job.generator._llm.generate = watching
    theirs = job.sample()
    LogprobsProcessor._update_sample_logprobs = update
    job.sample()
    for name, groups in (("ours", ours), ("theirs", theirs)):
        result[name] = [[(c.token_ids, c.logprobs) for c in group.completions] for group in groups]
    return result | {"kinds": kinds}


def main() -> None:
    spec_path, report_path = map(Path, sys.argv[1:])
    plan = Plan.make(ServicesConfig(), ParallelismConfig(), colocate=True, wants_reference=False, world_size=1)
    answer([cost], json.loads(spec_path.read_text())["cases"], Placement.build(plan, "cpu"), report_path)


if __name__ == "__main__":
    launch(main)

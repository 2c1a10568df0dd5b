"""vLLM inside the generator ranks' own processes. The only file that imports vLLM, and the only one that knows its internals.

An engine replica is a world of its own (`sub_world`) with its own random numbers. It samples token ids from token ids, keeps its
log-probs at the sampling temperature, and takes new weights from `stream_weights`, every tensor of which is verified in place.
"""

import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from transformers import AutoConfig

from batch import Completion, Group, Prompt
from estimate import Estimate, Shape
from model import ModelSource
from parallel import memory
from parallel.memory import Remedy, Residency, agreed, allocated, capacity, empty_cache, explained, residency
from parallel.placement import Grid, Placement, holds, share, shares_ranks
from parallel.sub_world import OwnRandomState, sub_world
from parallel.switches import ALL_OFF, Switches
from parallel.weights import Bucket
from rollout.experts import check_engine, check_tile, keep_experts
from rollout.loading import Loader, fewer_blocks, widen_head
from rollout.sampled import keep_numbers, numbers
from rollout.sampling import Sampling, sample_seed
from rollout.steps import Groups, Steps
from rollout.trace import traced

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class GeneratorConfig:
    dtype: str | None = None  # of the engine's weights, bfloat16 or float32; default: training.dtype
    gpu_memory_utilization: float = 0.5  # share of a GPU's memory for the engine's weights and KV cache, at most
    max_num_seqs: int | None = None  # sequences decoded at once; default: what a rollout gives a replica, 64 to 1024; on a CPU 64
    enforce_eager: bool = False  # true: no CUDA graphs (a CPU never has them)
    engine: dict[str, Any] = field(default_factory=dict)  # further vLLM engine arguments, by vLLM's names

    def check(self) -> None:
        if self.dtype not in (None, "bfloat16", "float32"):
            raise ValueError(f"dtype={self.dtype}: must be bfloat16 or float32")
        if not 0 < self.gpu_memory_utilization < 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization}: must be between 0 and 1")
        if self.max_num_seqs is not None and self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={self.max_num_seqs}: must be at least 1")
        check_engine(self.engine)


class Generator:
    """A handle every rank holds. Outside its mesh there is no engine, its share of prompts is [] and its methods do nothing."""

    def __init__(
        self,
        source: ModelSource,
        cfg: GeneratorConfig,
        place: Placement,
        dtype: str,
        seq_len: int,
        row_tokens: int = 16384,
        switches: Switches = ALL_OFF,
        rollout: tuple[int, int] | None = None,
        *,
        seed: int,
        policy_bytes: int | None = None,
    ):
        """Start the engine with weights still to be loaded. Collective over each replica.

        dtype: of the trainer's computation; row_tokens: of its forward pass; switches: its own; policy_bytes: of the
        policy's shards on this rank, None: all that lives on the GPU, a reference included. Where the trainer shares the GPU they
        decide whether the engine must make room. rollout: prompts of one and samples of each, None where that is not known.
        """
        self.grid: Grid = place.generator
        self.seq_len = seq_len
        self.version = -1  # of the policy loaded last; -1: none yet, generate refuses
        self.dtype = getattr(torch, cfg.dtype or dtype)
        self._llm: Any = None
        self._asleep: set[str] = set()  # of weights and KV cache, what has no memory now
        self._residency: Residency = "stays"  # while the policy trains
        self.live_bytes = 0  # of the engine's tensors on the GPU, as torch counts them
        if not holds(self.grid):
            return
        assert place.replica is not None
        self._replica, self._device = place.replica, place.device
        self._rng = OwnRandomState()
        self._loader = Loader(self._replica, self._inside)
        self._tokenizer = source.tokenizer()
        self._sleeps = place.device.type == "cuda" and shares_ranks(self.grid, place.trainer)
        index = self.grid.index("dp")
        before = allocated(place.device)
        shape = Shape.read(source.name, source.revision, download=True)
        assert shape is not None, "the tokenizer was there"
        estimate = Estimate(shape, place.plan, getattr(torch, dtype), self.dtype, row_tokens, switches)
        arguments = self._arguments(source, cfg, place, rollout, estimate) | {"seed": seed + index} | cfg.engine
        threads, set_threads, precision = torch.get_num_threads(), torch.set_num_threads, torch.get_float32_matmul_precision()
        with self._inside():
            _prepare_vllm(place.device.type, unique=f"{os.environ.get('MASTER_PORT', '0')}-{index}")
            from vllm import LLM
            from vllm.engine.arg_utils import EngineArgs

            known = {f.name for f in fields(EngineArgs)}
            if unknown := sorted(set(cfg.engine) - known):
                raise ValueError(f"generator.engine.{unknown[0]}: vLLM has no such engine argument")
            keys = "generator.gpu_memory_utilization, training.seq_len or generator.max_num_seqs"
            engine_bytes = int(capacity(place.device) * cfg.gpu_memory_utilization)
            with explained("starting the engine", keys, needed=engine_bytes, others=TOO_LITTLE_MEMORY), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # vLLM's own, about torch
                self._llm = LLM(**arguments)
        self._steps = Steps(self._llm.llm_engine)
        torch.set_num_threads = set_threads  # vLLM replaces it by a function that only warns
        set_threads(threads)
        torch.set_float32_matmul_precision(precision)
        if switches.fp32_logits:
            self._loader.before = widen_head(self._model())
        self.live_bytes = allocated(place.device) - before
        if self._sleeps:
            needed = estimate.training_of(before if policy_bytes is None else policy_bytes)
            choice = residency(place.device, needed, sum(block.handle[1] for block in _blocks("kv_cache")))
            self._residency = agreed(choice, self._replica)

    def _arguments(
        self, source: ModelSource, cfg: GeneratorConfig, place: Placement, rollout: tuple[int, int] | None, estimate: Estimate
    ) -> dict[str, Any]:
        shape = _shape(source)
        tp = self.grid.tp
        if self.seq_len > shape.max_position_embeddings:
            raise ValueError(f"training.seq_len={self.seq_len} exceeds the model's {shape.max_position_embeddings} positions")
        arguments: dict[str, Any] = {
            "model": source.name,
            "revision": source.revision,
            "tensor_parallel_size": tp,
            "distributed_executor_backend": "external_launcher",
            "dtype": self.dtype,
            "load_format": "dummy",  # the policy's weights follow before the first sample, and each is verified
            "max_model_len": self.seq_len,
            "logprobs_mode": "processed_logprobs",  # after the temperature; the default is before it
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }
        if (cache := estimate.kv_cache(cfg, capacity(place.device), self.seq_len, rollout)) is not None:
            arguments["kv_cache_memory_bytes"] = cache
        if place.device.type == "cuda":
            seqs = cfg.max_num_seqs or memory.gpu_seqs(rollout, self.grid.num_replicas)
            log.info("each engine decodes up to %d sequences at once (generator.max_num_seqs)", seqs)
            if seqs > memory.GRAPH_SEQS and not cfg.enforce_eager:  # vLLM's largest graph by itself
                arguments["compilation_config"] = {"max_cudagraph_capture_size": -(-seqs // 16) * 16}
            return arguments | {
                "gpu_memory_utilization": cfg.gpu_memory_utilization,
                "max_num_seqs": seqs,
                "enforce_eager": cfg.enforce_eager,
                "enable_sleep_mode": self._sleeps,
                "moe_backend": "triton",  # see check_engine
            }
        check_tile(shape, tp)
        return arguments | {
            "max_num_seqs": cfg.max_num_seqs or memory.CPU_SEQS,
            "enforce_eager": True,
            # A token budget below the prompt's length splits the prompt, and a seeded CPU request then fails (vLLM 0.32).
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(2048, self.seq_len),
            "async_scheduling": False,
        }

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Every call into vLLM happens here: in the replica's world, with the engine's own random numbers."""
        # On a CPU vLLM would compile one small function, and need a C++ compiler for that.
        eager = torch._dynamo.config.patch(disable=True) if self.grid.device_type == "cpu" else nullcontext()
        with sub_world(self._replica), self._rng.entered(), eager:
            yield

    def generate(
        self, prompts: list[Prompt], n_samples: int, sampling: Sampling, done: Callable[[Group], None] = lambda _group: None
    ) -> list[Group]:
        """`n_samples` completions for each of this rank's share of `prompts`; the ranks of a replica return the same.

        done: called with each group once it is whole, while others are still being sampled.
        """
        mine = share(prompts, self.grid)
        if not mine:
            return []
        assert self.version >= 0, "generate before the first load"
        from vllm import SamplingParams

        requests, params = [], []
        for prompt in mine:
            room = self.seq_len - len(prompt.token_ids)
            for sample in range(n_samples):
                requests.append({"prompt_token_ids": list(prompt.token_ids)})
                params.append(
                    SamplingParams(
                        temperature=sampling.temperature,
                        max_tokens=min(room, sampling.max_new_tokens or room),
                        stop=list(sampling.stop),
                        detokenize=bool(sampling.stop),  # the text is made below, once; stop strings need it in the engine
                        logprobs=0,  # of the sampled token
                        seed=None if sampling.seed is None else sample_seed(sampling.seed, prompt.index, sample),
                    )
                )
        with self._inside(), explained("sampling", "generator.max_num_seqs, training.seq_len or generator.gpu_memory_utilization"):
            groups = Groups(mine, n_samples, self._llm.request_counter.counter, self._completion, done)
            with self._steps.handed_to(groups):
                self._llm.generate(requests, params, use_tqdm=False)
        return groups.all()

    def _completion(self, output: Any) -> Completion:
        ids = list(output.token_ids)
        if output.finish_reason == "stop":
            reason = "stop_string" if isinstance(output.stop_reason, str) else "eos"
        else:
            reason = "length" if output.finish_reason == "length" else "abort"
        text = output.text if reason == "stop_string" else self._tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(text, ids, numbers(output.logprobs, ids), {}, reason, self.version)

    @torch.no_grad()
    def trace(self, token_ids: list[int]) -> dict[str, Tensor]:
        """What the engine's modules compute of one sequence, as `traced` names it, in a pass over all of it. Not of a compiled one."""
        from vllm import SamplingParams

        with self._inside(), traced(self._model()) as found:
            self._llm.reset_prefix_cache()
            self._llm.generate([{"prompt_token_ids": token_ids}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        return {place: value[: len(token_ids)] for place, value in found.items()}

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V] in fp32, as the engine's head makes them of the last norm's output [n, H], before the temperature."""
        with self._inside():
            return self._model().compute_logits(hidden.to(self._device, self.dtype)).float()

    @contextmanager
    def asleep(self, *, until_load: bool) -> Iterator[None]:
        """Free the engine's GPU memory for the duration, where it shares the GPU with the trainer and not everything fits.

        until_load: new weights follow, so the old ones are dropped; otherwise they wait in host memory.
        """
        if self._residency == "stays":
            yield
            return
        whole = self._residency == "sleeps"
        with self._inside():
            if whole:
                self._llm.sleep(level=2 if until_load else 1)
            else:
                _release("kv_cache")
        self._asleep = {"weights", "kv_cache"} if whole else {"kv_cache"}
        yield
        empty_cache()
        if whole:
            self._wake("weights", self._llm)
        if not until_load:
            self._wake_kv_cache()

    def _wake(self, tag: str, sleeper: Any) -> None:
        """sleeper: who was put to sleep, the engine or, where that knows nothing of it, its worker."""
        needed = sum(block.handle[1] for block in _blocks(tag))
        with self._inside(), explained("waking the engine", "generator.gpu_memory_utilization", needed=needed):
            sleeper.wake_up(tags=[tag])
        self._asleep.discard(tag)

    def _wake_kv_cache(self) -> None:
        """Give the KV cache memory again, empty; whatever the prefix cache knew is gone."""
        if "kv_cache" in self._asleep:
            self._wake("kv_cache", self._llm if self._residency == "sleeps" else self._worker())
        pool = self._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        with self._inside(), fewer_blocks(pool):
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    @torch.no_grad()
    def load(self, buckets: Iterator[Bucket], version: int) -> None:
        """Become policy `version`. Drains `buckets` on every rank; keeps and verifies them where an engine lives."""
        if self._llm is None:
            for _ in buckets:
                pass
            return
        with explained("loading new weights into the engine", "generator.gpu_memory_utilization"):
            self._loader.load(self._model(), buckets)
        empty_cache()
        self._wake_kv_cache()
        self.version = version

    def residents(self) -> dict[str, int]:
        """Bytes of the engine's live tensors on this rank, by what they are; {} where there is no engine."""
        if self._llm is None:
            return {}
        kept = {"weights": self._model().parameters(), "kv_cache": self._worker().model_runner.kv_caches}
        return {name: 0 if name in self._asleep else memory.live_bytes(tensors, self._device) for name, tensors in kept.items()}

    def _worker(self) -> Any:
        return self._llm.llm_engine.model_executor.driver_worker.worker

    def _model(self) -> nn.Module:
        return self._worker().model_runner.get_model()

    def close(self) -> None:
        """End the engine before the world ends."""
        if self._llm is not None:
            with self._inside():
                self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()

    def random_state(self) -> tuple | None:
        """Of the engine's unseeded requests; None where there is no engine."""
        return self._rng.state if self._llm is not None else None

    def set_random_state(self, state: tuple | None) -> None:
        """Go on with the random numbers of an earlier run, where there is an engine."""
        if self._llm is not None:
            self._rng.state = state


def _shape(source: ModelSource) -> Any:
    return AutoConfig.from_pretrained(source.name, revision=source.revision).get_text_config()


# How vLLM says that its memory does not suffice to start, and what to do about it.
_RAISE = "Raise generator.gpu_memory_utilization (on a CPU generator.engine.kv_cache_memory_bytes)"
TOO_LITTLE_MEMORY = {
    "Free memory on device": Remedy("Lower generator.gpu_memory_utilization, or end what else uses the GPU"),
    "No available memory for the cache": Remedy("The weights leave nothing of the engine's share. " + _RAISE, share_too_small=True),
    "To serve at least one request": Remedy(_RAISE + ", or lower training.seq_len", share_too_small=True),
}


def _blocks(tag: str) -> list[Any]:
    """vLLM's sleepable allocations of one kind, "weights" or "kv_cache"; `handle[1]` is a block's bytes."""
    from vllm.device_allocator import cumem

    return [block for block in cumem.CuMemAllocator.get_instance().pointer_to_data.values() if block.tag == tag]


def _release(tag: str) -> None:
    """Give the memory of one kind of allocation back. vLLM 0.25 can only put the whole engine to sleep, so we do as its allocator does."""
    from vllm.device_allocator import cumem

    torch.cuda.synchronize()
    for block in _blocks(tag):
        cumem.unmap_and_release(block.handle)
        block.is_asleep = True


def _prepare_vllm(device_type: str, unique: str) -> None:
    """What vLLM must be told before its first import here, the three places where it must behave as a guest, and one where it is slow."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm.distributed.parallel_state as parallel_state
    import vllm.v1.engine.core as core
    import vllm.v1.engine.logprobs as logprobs

    def leave_the_world(shutdown_ray: bool = False) -> None:
        """vLLM's own destroys the default process group, which is ours."""
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    core.cleanup_dist_env_and_memory = leave_the_world
    keep_numbers(logprobs)
    if device_type == "cuda":
        return
    import vllm.distributed.device_communicators.cpu_communicator as communicator
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as cpu_moe
    import vllm.model_executor.layers.utils as layers

    def keep_weights(layer: nn.Module, remove_weight: bool) -> None:
        """vLLM's own packs each weight into an opaque copy that a reload of tied heads forgets and no checksum can read."""
        layer.cpu_linear = nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = keep_weights
    keep_experts(cpu_moe)
    name_of = communicator._CPUSHMDistributed.make_group_name

    def unique_name(owner: Any) -> str:
        """vLLM's own is the same for two replicas on one host, and for what a killed job left behind."""
        return f"{name_of(owner)}-{unique}"

    communicator._CPUSHMDistributed.make_group_name = staticmethod(unique_name)

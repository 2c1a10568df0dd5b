"""A rank that has stopped, or a job in which nothing moves, ends it with what every rank was doing.

A collective whose partner never comes waits for its time limit, an hour here, and names neither the rank nor the reason. So each process
has a thread that beats in torchrun's store and looks at the next rank's beat and at how far all ranks together have come. Time is counted
in a thread's own turns, not by a clock: a machine that was suspended has not missed any.
"""

import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections import defaultdict
from pathlib import Path

import torch.distributed as dist

from parallel import launch

BEAT_S = 2.0
SILENT_S = 40.0  # without a beat. The thread needs the interpreter, which a library may hold for some seconds
PATIENT = ("starting", "ckpt", "export")  # phases that take as long as loading, compiling and the storage do
REWARD_THREAD = "reward"  # how names of threads begin that score answers (rollout/rewards.py)
ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def start(stall_timeout_s: float) -> None:
    """Watch until `launch.finish`. For every rank of a world that exists; stall_timeout_s: 0 allows any time without progress."""
    rank, ranks = dist.get_rank(), dist.get_world_size()  # read here: an engine has others for a while
    if ranks == 1 and not stall_timeout_s:
        return
    launch.ended.clear()
    launch.watcher = threading.Thread(target=_watch, args=(rank, ranks, stall_timeout_s), daemon=True)
    launch.watcher.start()


def _watch(rank: int, ranks: int, stall_timeout_s: float) -> None:
    neighbour, seen, silent_s = (rank + 1) % ranks, b"", 0.0
    advances, so_far, idle_s = 0, -1, 0.0
    try:
        store = launch.job_store()
        while not launch.ended.wait(BEAT_S):
            store.set(_key("beat", rank), f"{time.monotonic_ns()} {os.getpid()} {launch.phase()} {socket.gethostname()}")
            beat = store.get(_key("beat", neighbour)) if store.check([_key("beat", neighbour)]) else b""
            silent_s = silent_s + BEAT_S if beat and beat == seen else 0.0
            moved = launch.advances() != advances or launch.phase() in PATIENT
            advances, total = launch.advances(), store.add(_key("progress"), int(moved))
            idle_s = idle_s + BEAT_S if total == so_far else 0.0
            seen, so_far = beat, total
            if silent_s >= SILENT_S:
                _end_with(neighbour, beat.decode(), rank, ranks)
            elif stall_timeout_s and idle_s >= stall_timeout_s:
                _end_stalled(store, rank, ranks, stall_timeout_s)
    except dist.DistError:  # the store has gone, with torchrun and the job
        return


def _end_with(silent: int, beat: str, rank: int, ranks: int) -> None:
    """End the job because `silent`, whose last beat this is, has stopped."""
    _, pid, phase, host = beat.split()
    if launch.claim(rank, ranks):
        launch.tell(
            f"rank {silent} has not been heard of for {SILENT_S:.0f} s: its process ({pid} on {host}) is stopped or held by a library, or "
            f"its host has gone. It was in phase {phase}. What Python was doing there follows if it can still say so"
        )
        if _parent(pid) == os.getppid():  # torchrun would give it half a minute
            os.kill(int(pid), signal.SIGABRT)  # faulthandler prints the stacks, unless it is stopped
            time.sleep(2)
            if _parent(pid) == os.getppid():
                os.kill(int(pid), signal.SIGKILL)
    else:
        time.sleep(5)  # for the rank that speaks
    launch.leave(1)


def _end_stalled(store: dist.TCPStore, rank: int, ranks: int, timeout_s: float) -> None:
    """End the job because no rank has moved."""
    store.set(_key("where", rank), _where())
    if launch.claim(rank, ranks):
        time.sleep(3 * BEAT_S)  # the others see the same
        places: dict[str, list[int]] = defaultdict(list)
        for other in range(ranks):
            told = store.check([_key("where", other)])
            places[store.get(_key("where", other)).decode() if told else "does not say"].append(other)
        lines = [f"  rank {', '.join(map(str, those))}: {place}" for place, those in places.items()]
        launch.tell(
            f"nothing has moved on any rank for {timeout_s:g} s (training.stall_timeout_s; raise it where a reward or a step may take that "
            f"long). One of these waits for something else than the others:\n" + "\n".join(lines)
        )
    else:
        time.sleep(5 * BEAT_S)
    launch.leave(1)


def _where() -> str:
    """The phase, and what the main thread is doing, and those that score answers: the innermost line that is not a library's."""
    frames = sys._current_frames()
    lines = []
    for thread in threading.enumerate():
        if thread.ident in frames and (thread is threading.main_thread() or thread.name.startswith(REWARD_THREAD)):
            stack = traceback.extract_stack(frames[thread.ident])
            line = next((f for f in reversed(stack) if not f.filename.startswith((*LIBRARIES, "<"))), stack[-1])
            path = Path(line.filename)
            name = path.relative_to(ROOT) if ROOT in path.parents else path
            lines.append(f"{name}:{line.lineno} in {line.name}: {line.line}")
    return f"in phase {launch.phase()}, " + "; ".join(dict.fromkeys(lines))


def _parent(pid: str) -> int | None:
    """The process that started `pid`, if there is such a process here."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _key(*parts: object) -> str:
    return "/".join(map(str, ("drophammer", os.environ.get("TORCHELASTIC_RESTART_COUNT", 0), *parts)))

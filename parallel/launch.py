"""How a script ends: on every rank, with one message that matters, the phase it was in, and an exit code that says so."""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

ALONE_S = 30.0  # after which a rank that failed before the world existed, and still runs, is taken to be the only one that failed
LOOK = "Look for the first error above; a rank that was killed (signal 9: host memory ran out) is named in torchrun's report below"

watcher: threading.Thread | None = None  # parallel/watch.py's, which goes on until `ended` is set
ended = threading.Event()
_phase = "starting"  # what this process is doing, for its last words alone
_advances = 0


def enter(phase: str) -> None:
    """From now on, an error is one of this phase."""
    global _phase
    _phase = phase
    advance()


def advance() -> None:
    """This rank has come further: called between the parts of what may take long."""
    global _advances
    _advances += 1


def phase() -> str:
    return _phase


def advances() -> int:
    return _advances


def launch(main: Callable[[], None]) -> None:
    """Run `main`; when it raises, print why once for the whole job and leave at once with exit code 1.

    A ValueError that our own code raises is something the user can change: its message is printed. All else has its traceback and the
    phase. The rank that fails first claims the right to speak in the job's store, so the errors of peers that lost their partner stay
    one line long. The process leaves without destructors: a peer may be inside a collective that this rank will never join, and torchrun
    ends the peers when one rank has gone. Where it does so before they know, the first of them says in which phase.

    Not in sys.excepthook: torch.distributed wraps that hook and holds back what it prints.
    """
    rank, ranks = (int(os.environ.get(key, alone)) for key, alone in (("RANK", 0), ("WORLD_SIZE", 1)))  # an engine has others for a while
    faulthandler.enable()  # NCCL's watchdog aborts the process: then the line of the script is all there is to print
    _speak_when_ended(rank, ranks)
    try:
        main()
        finish()
    except KeyboardInterrupt:
        leave(130)
    except BaseException as error:  # noqa: BLE001 - the last frame of the program: everything ends here, loudly
        if isinstance(error, SystemExit) and error.code in (0, None):
            raise
        told = _explained(error, rank)  # before the claim: reading the sources takes a while, and from then on the others leave
        if claim(rank, ranks):
            tell(told)
        else:
            if dist.is_initialized():
                tell(f"rank {rank} stops in phase {_phase} because another rank failed ({type(error).__name__})")
            time.sleep(1)  # for the rank that speaks: torchrun ends it when this one leaves
        leave(1)


def finish() -> None:
    """End the world in order, if it was started."""
    if dist.is_initialized():
        dist.barrier()
        ended.set()
        if watcher is not None:
            watcher.join()  # a thread that is in the store while the interpreter goes would abort it
        dist.destroy_process_group()


def _explained(error: BaseException, rank: int) -> str:
    """What the rank that speaks says about the `error` that ended it."""
    if isinstance(error, ValueError) and _is_told_on_purpose(error):
        return f"error: {error}"
    if isinstance(error, SystemExit):  # it has been told
        return ""
    told = f"rank {rank} failed: in phase {_phase}\n{traceback.format_exc()}"
    return told + (f"rank {rank} lost another rank in phase {_phase}. {LOOK}" if _lost_a_peer(error) else "")


def tell(told: str) -> None:
    """At once and in one piece: the ranks share a pipe, and a line of another rank goes in between two writes."""
    if told:
        sys.stderr.flush()
        os.write(sys.stderr.fileno(), f"{told.rstrip()}\n".encode())


def _lost_a_peer(error: BaseException) -> bool:
    """Does a backend say that a collective could not end? gloo has no exception of its own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _speak_when_ended(rank: int, ranks: int) -> None:
    """Have SIGTERM, with which torchrun ends the ranks that are left, end this one with its phase.

    By a thread that reads the signal's number from a pipe: Python's own handlers wait for the main thread, which may be in a collective.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ours = os.getpid()

    def wait() -> None:
        while os.read(reader, 1) != bytes([signal.SIGTERM]):
            pass
        if claim(rank, ranks):
            tell(f"rank {rank} was told to end (SIGTERM) in phase {_phase}: another rank has gone, or the job is being cancelled. {LOOK}")
        leave(128 + signal.SIGTERM)

    def forget() -> None:
        """In a forked child, which would write into the same pipe."""
        if os.getpid() != ours:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=forget)
    threading.Thread(target=wait, daemon=True).start()


def _is_told_on_purpose(error: BaseException) -> bool:
    """Did a `raise` in one of our own files end the program? Otherwise the message alone would not say where to look."""
    frames = traceback.extract_tb(error.__traceback__)
    own = Path(__file__).resolve().parents[1]
    return bool(frames) and own in Path(frames[-1].filename).parents and (frames[-1].line or "").startswith("raise")


def claim(rank: int, ranks: int) -> bool:
    """Is this the rank that explains the failure: the first of the job that asks?"""
    if ranks == 1:
        return True
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and not dist.is_initialized():
        # No store yet. Before the world exists all ranks fail alike and rank 0 speaks; one that nobody ends is alone with its error.
        if rank != 0:
            time.sleep(ALONE_S)
        return True
    try:
        return job_store().add(f"drophammer/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", 1) == 1
    except dist.DistError:  # the store has gone: whoever hosted it has failed and spoken
        return False


def job_store() -> dist.TCPStore:
    """A connection of its own to the store that the ranks met in: the main thread may be waiting in the world's."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=ALONE_S))


def leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

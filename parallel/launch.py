"""How a script ends: on every rank, with one message that matters and an exit code that says so."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

ALONE_S = 30.0  # after which a rank that failed before the world existed, and still runs, is taken to be the only one that failed


def launch(main: Callable[[], None]) -> None:
    """Run `main`; when it raises, print why once for the whole job and leave at once with exit code 1.

    A ValueError that our own code raises is something the user can change: its message is printed. All else has its traceback. The
    rank that fails first claims the right to speak in the job's store, so the errors of peers that lost their partner stay one line
    long. The process leaves without destructors: a peer may be inside a collective that this rank will never join, and torchrun ends
    the peers when one rank has gone.

    Not in sys.excepthook: torch.distributed wraps that hook and holds back what it prints.
    """
    try:
        main()
        finish()
    except KeyboardInterrupt:
        _leave(130)
    except BaseException as error:  # noqa: BLE001 - the last frame of the program: everything ends here, loudly
        if isinstance(error, SystemExit) and error.code in (0, None):
            raise
        rank = int(os.environ.get("RANK", 0))
        if _claim(rank):
            if isinstance(error, ValueError) and _is_told_on_purpose(error):
                print(f"error: {error}", file=sys.stderr, flush=True)
            elif not isinstance(error, SystemExit):
                print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        else:
            print(f"rank {rank} stops because another rank failed ({type(error).__name__})", file=sys.stderr, flush=True)
            time.sleep(1)  # for the rank that speaks: torchrun ends it when this one leaves
        _leave(1)


def finish() -> None:
    """End the world in order, if it was started."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _is_told_on_purpose(error: BaseException) -> bool:
    """Did a `raise` in one of our own files end the program? Otherwise the message alone would not say where to look."""
    frames = traceback.extract_tb(error.__traceback__)
    own = Path(__file__).resolve().parents[1]
    return bool(frames) and own in Path(frames[-1].filename).parents and (frames[-1].line or "").startswith("raise")


def _claim(rank: int) -> bool:
    """Is this the rank that explains the failure?

    Before the world exists all ranks fail alike, and rank 0 speaks: the others give it time, since torchrun ends all of them when
    one leaves. A rank that nobody has ended by then is alone with its error.
    """
    if not dist.is_initialized():
        if rank != 0:
            time.sleep(ALONE_S)
        return True
    try:
        return c10d._get_default_store().add("drophammer/failed", 1) == 1
    except RuntimeError:  # the store has gone: whoever hosted it has failed and spoken
        return False


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

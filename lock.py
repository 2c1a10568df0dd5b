"""One run at a time in a run's folder."""

import fcntl
import os
import socket
import warnings
from pathlib import Path
from typing import IO

NAME = ".lock"
_held: list[IO[str]] = []  # open to the process's end, with which the kernel lets go of the locks, however it ends


def lock(folder: Path) -> None:
    """Keep other runs out of `folder`, which exists, until this process ends. ValueError where another one is in it.

    By flock, which a network file system may not have: then there is a warning, and no protection.
    """
    file = open(folder / NAME, "a+")  # noqa: SIM115 - see _held
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(
            f"output={folder}: another run ({file.read().strip()}) is writing there; wait for its end, end it, or set another output"
        ) from None
    except OSError as error:
        warnings.warn(f"{folder} cannot be locked ({error.strerror}): see to it that no two runs write there at once", stacklevel=2)
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _held.append(file)

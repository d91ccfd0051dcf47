"""How a process ends when something is wrong."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import NoReturn

from offload.errors import USER_ERROR_EXIT_CODE

_PR_SET_PDEATHSIG = 1
_SECONDS_TO_SPEAK = 2.0  # for rank zero, since the first rank that ends makes the launcher end the others


def refuse(sentence: str) -> NoReturn:
    """Ends the process over something that the user can mend; of many ranks, rank zero speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    else:
        time.sleep(_SECONDS_TO_SPEAK)
    sys.exit(USER_ERROR_EXIT_CODE)


def end_with_parent() -> None:
    """Asks the system to end this process when its launcher is gone, however that ended. Linux only."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(1)

"""launch.py with a fault: rank 1 dies, hangs or raises in its second step. The first argument says which."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from diffusers.models.attention import BasicTransformerBlock

AT_VISIT = 12  # the third block of the second step


def fail() -> None:
    raise ArithmeticError("told to fail")


FAULTS = {"die": lambda: os._exit(7), "hang": lambda: time.sleep(3600), "raise": fail}


def install(fault: str) -> None:
    forward, visits = BasicTransformerBlock.forward, []

    def faulty(self: BasicTransformerBlock, *args: Any, **kwargs: Any) -> Any:
        visits.append(self)
        if len(visits) == AT_VISIT:
            FAULTS[fault]()
        return forward(self, *args, **kwargs)

    BasicTransformerBlock.forward = faulty


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import launch

    if os.environ.get("RANK") == "1":
        install(sys.argv.pop(1))
    else:
        sys.argv.pop(1)
    launch.main()

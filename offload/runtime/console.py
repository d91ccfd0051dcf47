"""What a person sees, and where everything else goes.

Each rank's standard output and error, with whatever libraries print there, go to its own file. Rank zero keeps the
terminal for progress and tables; any rank keeps it for the one line that says it failed.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from rich.console import Console


class RankConsole:
    """The terminal and the log file of one rank.

    Attributes:
        screen: rich's console; silent on every rank but zero.
        log_file: where this rank's output goes.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self.log_file = directory / f"rank{rank}.log"
        terminal_out, terminal_err = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(2), "w")
        self.screen = Console(file=terminal_out, quiet=rank != 0)
        self._complaints = Console(file=terminal_err, soft_wrap=True, highlight=False)
        self._redirect()

    def _redirect(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        log = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        logging.basicConfig(
            stream=sys.stderr, level=logging.INFO, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        warnings = _Warnings(self._complaints)
        if self._rank == 0:
            logging.getLogger("offload").addHandler(warnings)

    def close(self) -> None:
        for console in (self.screen, self._complaints):
            console.file.close()

    def failed(self, error: BaseException) -> None:
        """The one line about this rank's failure; the traceback is in the log."""
        self.complain(f"rank {self._rank} failed: {type(error).__name__}: {error} (see {self.log_file})")

    def complain(self, what: str) -> None:
        """One line on the terminal, from any rank."""
        self._complaints.print(f"error: {what}", markup=False)


class _Warnings(logging.Handler):
    """Shows this package's own warnings on the terminal too. Errors have a line of their own there."""

    def __init__(self, console: Console) -> None:
        super().__init__(level=logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            self._console.print(f"{record.levelname.lower()}: {record.getMessage()}", markup=False)

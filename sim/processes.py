"""Worker processes that begin at once: forked from a server that has loaded what cells need.

Importing this loads nothing of that, so that a command can start the server first and read its input meanwhile. The
command itself is not forked: it may have threads, the server has none. Where Python does not fork of its own accord
(macOS, Windows) each process starts from nothing.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from typing import Any

_FORKS = sys.platform == "linux"
_context: Any = multiprocessing.get_context("forkserver" if _FORKS else "spawn")


def start_server() -> None:
    """Start to load what cells need, and return meanwhile; the server ends with this process."""
    if _FORKS:
        _context.set_forkserver_preload(["sim.warm"])
        with _without_interrupt():
            forkserver.ensure_running()


def start_process(target: Callable[..., None], *args: Any) -> Any:
    """Start a process that calls ``target``; Ctrl-C does not reach it."""
    start_server()
    process = _context.Process(target=target, args=args, daemon=True)
    with _without_interrupt():
        process.start()
    return process


@contextmanager
def _without_interrupt() -> Iterator[None]:
    """Let what is started inherit a mask that blocks Ctrl-C, which is for the one who gives the work.

    Ignoring the signal in the process alone would come too late for one that is still starting. The resource tracker,
    which the first process would start, lets the signal through again when it has started: so it is started before.
    """
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

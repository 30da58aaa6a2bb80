"""Faults in what a person wrote: one message a fault, no traceback, exit code 2."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong in a file, as its author should read it.

    Parameters
    ----------
    message : str
        What is wrong, the value that was found and what is allowed.
    file, line, key : optional
        Where: the path as given, the 1-based line and the dotted key.
    """

    message: str
    file: str | None = None
    line: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        """Format as ``file:line: key: message``, leaving out what is unknown."""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(part for part in (place, self.key, self.message) if part)


class InputError(Exception):
    """The input cannot be used; carries every fault that was found, not only the first."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults: Sequence[Fault] = faults


class ProfileError(InputError):
    """A profile cannot be read, or does not hold what was asked of it."""


def exit_code_of(main: Callable[[], int]) -> int:
    """Run a command's ``main`` and turn its faults into exit codes.

    Returns what ``main`` returns; 2 after an `InputError`, printed to stderr a line a fault; 130
    after Ctrl-C. Anything else is our own bug and keeps its traceback.
    """
    atexit.register(gc.freeze)  # what ends need not be searched for garbage, which takes half a second
    try:
        code = main()
        sys.stdout.flush()  # here, where a reader that went away is caught
        return code
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our stdout went away (`| head`); nothing is wrong with the input. What is still in the buffer
        # would fail again when Python ends, so it goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

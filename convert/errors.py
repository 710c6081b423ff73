"""Errors that a user can fix.

A message is one or two lines that say what is wrong, what was found and what to do. The command line prints the
message alone and ends with `exit_code`: 2 when the request was refused before anything was done, 1 when work that had
started failed or its result is bad.
"""


def printable(text: str) -> str:
    """The text with what no terminal should be sent escaped: names of files may hold anything."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


class HeadfoldError(ValueError):
    """Something went wrong that the user can do something about."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def first_line(error: BaseException) -> str:
    """What the error of another library says, in a line: its first, and the next where that ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


class RefusedError(HeadfoldError):
    """The request or its input cannot be used; nothing was done and nothing was written."""

    exit_code = 2


class CheckpointError(RefusedError):
    """A directory does not hold a sound checkpoint."""


class StoppedError(HeadfoldError):
    """A signal ended the work at a point from which it can go on; the exit code is 128 + the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number

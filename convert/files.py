"""Files below the level of checkpoints: errors in one line, copying inside the kernel, directories under a lock."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headfold.convert.errors import HeadfoldError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux, the only user


@contextmanager
def io_errors(path: Path, action: str, kind: type[HeadfoldError] = HeadfoldError) -> Iterator[None]:
    """Turns the operating system's refusal into one line that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise HeadfoldError(f"{path}: no room left ({error.strerror}); free some space and run it again") from error
        raise kind(f"{path}: cannot {action} it ({error.strerror or error})") from error


def expanded(path: str | Path) -> Path:
    """The path with the home directory for `~` and `~user`, where there is such a user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def read_into(file: Any, view: memoryview) -> None:
    while len(view):
        count = file.readinto(view)
        if not count:
            raise OSError(errno.EIO, "the file ended early; something has changed it")
        view = view[count:]


def write_all(file: Any, view: memoryview) -> None:
    while len(view):
        view = view[file.write(view) :]


def copy_bytes(reader: Any, start: int, writer: Any, output_start: int, size: int) -> None:
    """Copy bytes between two open files: inside the kernel (copy_file_range, sendfile), or else through a buffer."""
    done = 0
    for copy in (_copy_file_range, _sendfile, _copy_buffered):
        try:
            while done < size:
                count = copy(reader, start + done, writer, output_start + done, size - done)
                if not count:
                    raise OSError(errno.EIO, "the source file ended early; something has changed it")
                done += count
            return
        except OSError as error:
            # what a kernel or file system says that cannot copy this way: try the next one
            if copy is _copy_buffered or error.errno not in (
                errno.ENOSYS,
                errno.EXDEV,
                errno.EINVAL,
                errno.EOPNOTSUPP,
                errno.EPERM,
            ):
                raise


def _copy_file_range(reader: Any, start: int, writer: Any, output_start: int, size: int) -> int:
    if not hasattr(os, "copy_file_range"):
        raise OSError(errno.ENOSYS, "no copy_file_range")
    return os.copy_file_range(reader.fileno(), writer.fileno(), size, start, output_start)


def _sendfile(reader: Any, start: int, writer: Any, output_start: int, size: int) -> int:
    if not hasattr(os, "sendfile"):
        raise OSError(errno.ENOSYS, "no sendfile")
    writer.seek(output_start)
    return os.sendfile(writer.fileno(), reader.fileno(), start, size)


def _copy_buffered(reader: Any, start: int, writer: Any, output_start: int, size: int) -> int:
    reader.seek(start)
    data = reader.read(min(size, 1 << 22))
    writer.seek(output_start)
    write_all(writer, memoryview(data))
    return len(data)


def lock_directory(path: Path) -> int | None:
    """A lock that ends with this process, however it ends: a partial directory without one is abandoned."""
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_abandoned(output: Path) -> None:
    """Remove the partial directories that killed runs to the same output have left."""
    pattern = re.compile(re.escape(output.name) + r"\.partial-[0-9a-f]{8}")
    for path in output.parent.iterdir():
        if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            descriptor = lock_directory(path)
            if descriptor is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)


def exchange(first: Path, second: Path) -> bool:
    """Swap the names of two directories in one step. False, and nothing done, where the platform has no such step."""
    library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    renameat2 = getattr(library, "renameat2", None)  # glibc 2.28, musl 1.2.6
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):  # the kernel or this file system cannot
        return False
    raise OSError(error, os.strerror(error), str(second))


def settle_replaced(output: Path) -> None:
    """Finish what a run left that was killed while it put a new directory in the place of an old one by two renames:
    the old one goes back to its name where nothing has taken its place, and is removed where something has."""
    pattern = re.compile(re.escape(output.name) + r"\.replaced-[0-9a-f]{8}")
    for path in sorted(output.parent.iterdir()):
        if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            if os.path.lexists(output):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(output)


def sync_directory(path: Path) -> None:
    if fcntl is None:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

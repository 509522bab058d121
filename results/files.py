"""Write files without loss: completely or not at all, and never over an existing file. Read them guarded.

Files that people can edit, name or exchange may be anything. Every reader of a file opens it here, and gets a
`Content` of bounded size, which parsers take (tests/laws/test_reading.py).

The lock of a study is here too: one process at a time plans and runs in it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import BufferedReader, FileIO
from itertools import accumulate, count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from results.errors import StoreError, StudyBusyError

if TYPE_CHECKING:
    import msgspec

_OPEN = re.compile(r"/dev/std(?P<std>out|err)|/(?:dev|proc/self)/fd/(?P<number>\d+)")
"""Names of open files of this process, to which a shell may have redirected a plain file."""
_TEMPORARY = re.compile(r"\..*\.(?:(?P<where>[0-9a-f]+)-)?(?P<pid>\d{1,9})\.[0-9a-f]{8}\.tmp")
"""The names that `_beside` gives. Names without `where` were given by an older program."""
DAY_S = 86_400
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk, and of a used-up quota."""
MOST_BYTES = 2**28
"""A larger file is not read at once. The largest that bench writes, the record of a rank, has some 10 MB."""
YAML_BYTES = 2**20
"""The same of files that people write by hand."""
LOG_BYTES = 2**26
"""The last bytes of a log of processes that are read: they say how the processes ended."""
LINE_BYTES = 2**22
"""The longest line of a file that is read by lines."""
MOST_LEVELS = 64
"""The deepest nesting of JSON that is parsed; types of bench have fewer than 10 levels."""
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_TEXTS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
T = TypeVar("T")


class DamagedError(ValueError):
    """A parser refuses damaged content. The caller names the place and the way out."""


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of a regular file, or of one line of it, with their place."""

    path: Path | str
    data: bytes
    line: int | None = None

    @property
    def place(self) -> str:
        """The file, and the line, for errors."""
        return str(self.path) if self.line is None else f"line {self.line} of {self.path}"

    @property
    def text(self) -> str:
        """Its text; bytes that are not UTF-8 are replaced."""
        return self.data.decode(errors="replace")

    def parsed(self, decoder: msgspec.json.Decoder[T]) -> T:
        """The JSON value. Raises DamagedError, and no other error."""
        import msgspec  # `bench --help` does without it.

        if _is_deep(self.data):
            raise DamagedError(f"it nests more than {MOST_LEVELS} levels deep")
        try:
            return decoder.decode(self.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedError(str(error)) from error


def _is_deep(data: bytes) -> bool:
    """Whether brackets nest deeper than `MOST_LEVELS`: a parser or a reader of its value may need a level of
    the stack for each."""
    if data.count(b"[") + data.count(b"{") <= MOST_LEVELS:
        return False
    # Brackets in texts count only where they would decide.
    return _deepens(data) and _deepens(_TEXTS.sub(b"", data))


def _deepens(data: bytes) -> bool:
    steps = (1 if bracket in b"[{" else -1 for bracket in data.translate(None, _NOT_BRACKETS))
    return any(level > MOST_LEVELS for level in accumulate(steps))


def opened(path: Path | str) -> FileIO:
    """Open a regular file to read.

    Raises OSError, also for anything else: to open a FIFO may wait for ever, and a device may have no end.
    """
    return FileIO(_opened(path)[0])


def _opened(path: Path | str) -> tuple[int, int]:
    """Open a regular file to read. Return its descriptor and its size; raises OSError as `opened` does."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode):
        return descriptor, found.st_size
    os.close(descriptor)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read(path: Path | str, *, most: int = MOST_BYTES, begin: int = 0) -> Content:
    """Return what a regular file has from a byte on. Raises OSError, also for more than `most` bytes.

    A study may have 100,000 files of a few KiB: the system calls are made here, because a file object makes
    four more.
    """
    descriptor, size = _opened(path)
    try:
        if begin:
            os.lseek(descriptor, begin, os.SEEK_SET)
        parts, found, expected = [], 0, size - begin
        # Files of the kernel have more bytes than their size says.
        while expected <= most and (part := os.read(descriptor, max(expected + 1, 4096))):
            parts.append(part)
            found += len(part)
            expected = max(expected, found)
        if expected > most:
            raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
        return Content(path, b"".join(parts))
    finally:
        os.close(descriptor)


def read_given(path: Path) -> Content:
    """The content of a file that a user names. Raises StoreError if it cannot be read."""
    try:
        return read(path)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error


def read_part(path: Path | str, begin: int, most: int) -> Content:
    """Return at most `most` bytes from a byte on of a file that may have any length. Raises OSError as
    `opened` does."""
    descriptor, _ = _opened(path)
    try:
        return Content(path, os.pread(descriptor, most, begin))
    finally:
        os.close(descriptor)


def read_end(path: Path | str, most: int = LOG_BYTES) -> Content:
    """Return the last bytes of a file that may have any length. Raises OSError as `read` does."""
    return read(path, begin=max(0, Path(path).stat().st_size - most))


def read_lines(path: Path | str) -> Iterator[Content]:
    """Read a file of any length by its lines, the last one also without its end.

    Raises OSError as `read` does, and for a line of more than `LINE_BYTES`.
    """
    with BufferedReader(opened(path)) as file:
        for number in count(1):
            line = file.readline(LINE_BYTES + 1)
            if len(line) > LINE_BYTES:
                raise OSError(errno.EFBIG, f"line {number} has more than {LINE_BYTES >> 20} MiB", str(path))
            if not line:
                return
            yield Content(path, line.removesuffix(b"\n"), number)


def no_follow(name: str, flags: int) -> int:
    """An opener for files that are written within a study. Raises OSError if the name is a link, which in a
    study of somebody else may point to any file of this user, and for a FIFO that nobody reads."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)


def write_once(path: Path, data: bytes) -> None:
    """Write a new file: it appears completely or not at all, and an existing one is never replaced.

    Raises StoreError if `path` exists or cannot be written.
    """
    with _errors(path), _temporary(path, data) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            # An answer of NFS may get lost, and the second try then finds the first one's link (link(2)).
            if not path.samefile(temporary):
                raise
        sync_folder(path.parent)


def replace(path: Path, data: bytes, *, in_study: bool = False) -> None:
    """Write a derived file, over an older one if there is one: a reader sees the complete old or new file.

    A device, a pipe, and what this process has open are written to (`is_stream`). A file `in_study` is always
    replaced, also where a link has its name.
    """
    with _errors(path):
        if not in_study and is_stream(path):
            descriptor = _descriptor(path)
            if descriptor is not None:
                # A plain file that is opened again has a separate offset: its earlier content would be
                # overwritten.
                sys.stdout.flush()
                sys.stderr.flush()
            with path.open("ab") if descriptor is None else os.fdopen(os.dup(descriptor), "wb") as stream:
                stream.write(data)
            return
        with _temporary(path, data) as temporary:
            temporary.replace(path)


def append(path: Path, lines: bytes) -> None:
    """Append whole lines to a file of a study, synced; one process at a time, while others wait.

    A line that a killed writer or a full disk cut off gets its end first. Raises StoreError.
    """
    with _errors(path):
        descriptor = no_follow(str(path), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file", str(path))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            left = b"\n" * torn + lines
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
            sync_folder(path.parent)
        finally:
            os.close(descriptor)


def is_stream(path: Path) -> bool:
    """Whether a name that a user gives is a device, a pipe or an open file of this process, such as /dev/null
    or /dev/stdout: a rename would replace it by a file, for everyone on the machine."""
    if _descriptor(path) is not None:
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def _descriptor(path: Path) -> int | None:
    """The descriptor of this process behind a name such as /dev/stdout."""
    found = _OPEN.fullmatch(str(path.absolute()))
    if found is None:
        return None
    return {"out": 1, "err": 2}[found["std"]] if found["std"] else int(found["number"])


def refresh(folder: Path) -> None:
    """Have this host look at a folder of a shared file system anew, if it may write there.

    NFS may show what was there up to a minute ago; a change by this host makes it ask the server (nfs(5),
    "Directory entry caching").
    """
    probe = folder / f".look.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    with suppress(OSError):
        probe.touch()
        probe.unlink()


def remove_left(paths: Iterable[Path]) -> None:
    """Remove the temporary files whose writers were killed, and leave all other files.

    It cannot see whether a writer on another host is alive, and keeps such files for a day.
    """
    for path in paths:
        named = _TEMPORARY.fullmatch(path.name)
        if named is not None:
            # Another process may be removing the same files, and some folders may not be written.
            with suppress(OSError):
                here = named["where"] == _among_which_processes()
                left = not _runs(int(named["pid"])) if here else time.time() - path.stat().st_mtime > DAY_S
                if left:
                    path.unlink()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@cache
def _among_which_processes() -> str:
    """Return a name for this host's current boot and PID namespace, within which a process id is unique."""
    try:
        boot = read("/proc/sys/kernel/random/boot_id").text
        return f"{boot[:8]}{Path('/proc/self/ns/pid').stat().st_ino:x}"
    except OSError:
        # This is not Linux: each process counts as a host, so files of other processes are foreign.
        return secrets.token_hex(8)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name for the caller to write a new file to, which then takes the place of an older one, synced.

    If the caller raises, `path` stays the old file. OSErrors of both pass. A stream is written to, as by
    `replace`.
    """
    if is_stream(path):
        yield path
        return
    with _beside(path) as temporary:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)


@contextmanager
def _temporary(path: Path, data: bytes) -> Iterator[Path]:
    with _beside(path) as temporary:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A unique name in the folder of `path`; a file that has it at the end is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    owner = f"{_among_which_processes()}-{os.getpid()}"
    temporary = path.with_name(f".{path.name}.{owner}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Write a folder's entries (names of files) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, FileExistsError) and path.exists():
            raise StoreError(f"{path} exists and is never overwritten") from error
        raise StoreError(f"cannot write {path}: {error.strerror}; {_advice(error)}") from error


def _advice(error: OSError) -> str:
    if error.errno in FULL:
        return "free some space and run the same command again: what is written so far is kept"
    if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS) and error.filename2 is not None:
        return "its file system has no hard links, which a study needs: choose another one with --out"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write with --out"
    return "check the folder and run the same command again"


LOCK = ".lock"
"""The file in a study's folder that is locked while a process works on it."""


@contextmanager
def study_lock(root: Path) -> Iterator[int]:
    """Hold the study's lock; yields its descriptor.

    A child that inherits the descriptor keeps the lock alive if this process is killed, so that no
    second process starts while workers still run. Raises StudyBusyError.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = no_follow(str(root / LOCK), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if (root / LOCK).is_symlink():
            raise StoreError(f"{root / LOCK} is a link, which bench did not make: remove it") from error
        raise StoreError(
            f"cannot write in {root}: {error.strerror}; choose a folder that you may write with --out"
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StoreError(f"{root / LOCK} is not a regular file, and bench did not make it: remove it")
        _acquire(descriptor, root)
        yield descriptor
    finally:
        os.close(descriptor)


def is_busy(root: Path) -> bool:
    """Whether a process holds the lock of a study; False without a lock file.

    A shared lock, because two that ask at once do not hold the study.
    """
    with suppress(OSError):
        descriptor = no_follow(str(root / LOCK), os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def _acquire(descriptor: int, root: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
        raise StudyBusyError(
            f"{root} is in use by another bench (process {holder}), or by workers it left behind; "
            f"wait for it or stop it, then run the same command again"
        ) from error
    except OSError as error:
        raise StoreError(
            f"the file system of {root} has no locks ({error.strerror}; Lustre has them when mounted with "
            f"flock): choose another one with --out"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def require_idle(root: Path) -> None:
    """Raise StudyBusyError if a bench works on the study at `root`: its later runs would be lacking."""
    lock = root / LOCK
    if lock.is_file() and os.access(lock, os.W_OK):
        with study_lock(root):
            pass

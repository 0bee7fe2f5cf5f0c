"""Journal: JSON objects that are on disk when ``append`` returns, and survive a crash.

    8c5e1a07 {"kind":"group","number":3}      crc32 of the text, the text, "\\n"

A crash can only tear the end of the file: a torn last entry was never confirmed to anybody, so it
is dropped. Damage before the end is never skipped: what was confirmed would be missing silently.
One process writes at a time. The checksum finds accidents, it is no signature.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

from agent_rl.config import Fsync
from agent_rl.errors import JournalError
from agent_rl.types import JsonObject

logger = logging.getLogger(__name__)


class Journal:
    """The writer of one file; any thread may call.

    Args:
        path: made if it is not there, with its folder. A torn last entry is cut off.
        fsync: "always": an entry survives a power failure; "never": only a crash of the process.

    Raises:
        JournalError: another writer has the file, it is damaged, or it cannot be written.
    """

    def __init__(self, path: str | Path, *, fsync: Fsync = "always") -> None:
        if fsync not in ("always", "never"):
            raise ValueError(f"fsync is {fsync!r}; use 'always' or 'never'")
        self.path = Path(path)
        self._is_synced = fsync == "always"
        self._thread_lock = threading.Lock()
        with _writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_file = _lock(self.path)
            try:
                self._file = _open_for_append(self.path)
                self._cut_torn_end()
            except BaseException:
                self._lock_file.close()
                raise
            self._sync_folder()

    @staticmethod
    def read(path: str | Path) -> Iterator[JsonObject]:
        """The entries, oldest first; none if there is no such file.

        Raises:
            JournalError: an entry before the last one is damaged.
        """
        return (entry for entry, _ in _entries(Path(path)))

    def append(self, entry: JsonObject) -> None:
        """
        Raises:
            JournalError: it is not JSON (NaN included), or cannot be written; nothing is appended.
        """
        line = _line(entry)
        with self._thread_lock, _writing(self.path):
            self._check_open()
            start = os.fstat(self._file).st_size
            try:
                _write(self._file, line)
                self._sync(self._file)
            except OSError:
                os.ftruncate(self._file, start)
                raise

    def rewrite(self, entries: Iterable[JsonObject]) -> None:
        """Replace everything by ``entries``: after a crash either the old or the new file is there.

        Raises:
            JournalError: see ``append``; the old entries stay.
        """
        new = self.path.with_name(self.path.name + ".new")
        with self._thread_lock, _writing(self.path):
            self._check_open()
            file = _open_for_append(new)
            try:
                os.ftruncate(file, 0)
                for entry in entries:
                    _write(file, _line(entry))
                self._sync(file)
                os.replace(new, self.path)
            except BaseException:
                os.close(file)
                new.unlink(missing_ok=True)
                raise
            self._file, old = file, self._file
            os.close(old)
            self._sync_folder()

    def close(self) -> None:
        """May be called twice."""
        with self._thread_lock:
            if not self._lock_file.closed:
                os.close(self._file)
                self._lock_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._lock_file.closed:
            raise JournalError(f"the journal {self.path} is closed")

    def _cut_torn_end(self) -> None:
        end = max((end for _, end in _entries(self.path)), default=0)
        if end < os.fstat(self._file).st_size:
            os.ftruncate(self._file, end)
            self._sync(self._file)

    def _sync(self, file: int) -> None:
        if self._is_synced:
            os.fsync(file)

    def _sync_folder(self) -> None:
        """A new name is on disk only when its folder is."""
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._sync(folder)
        finally:
            os.close(folder)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What the system refuses becomes a JournalError that names the file."""
    try:
        yield
    except JournalError:
        raise
    except OSError as error:
        raise JournalError(f"the journal {path} cannot be written: {error}") from error


def _open_for_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(path: Path) -> IO[str]:
    """Held until the file is closed, so also until the process dies, however it dies."""
    file = open(path.with_name(path.name + ".lock"), "a", encoding="ascii")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise JournalError(
            f"another writer has the journal {path}; end that process, or give this one another "
            "file, experiment_name or trial_name"
        ) from None
    return file


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _line(entry: JsonObject) -> bytes:
    try:
        text = json.dumps(entry, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise JournalError(f"an entry cannot be written as JSON: {error}") from error
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _entries(path: Path) -> Iterator[tuple[JsonObject, int]]:
    """Each entry, and where in the file it ends. Stops in front of a torn end."""
    if not path.exists():
        return
    end = 0
    damaged_at: int | None = None
    with path.open("rb") as file:
        for line in file:
            entry = _parse(line)
            if entry is None:
                damaged_at = end if damaged_at is None else damaged_at
            elif damaged_at is not None:
                raise JournalError(
                    f"the journal {path} is damaged at byte {damaged_at}, before entries that are "
                    "whole; restore the file, or move it away to start without what it holds"
                )
            end += len(line)
            if entry is not None:
                yield entry, end
    if damaged_at is not None:
        logger.warning(
            "the journal %s ends with %d bytes of a torn entry, which are dropped",
            path,
            end - damaged_at,
        )


def _parse(line: bytes) -> JsonObject | None:
    """None where the line is not one that ``_line`` wrote."""
    checksum, text = line[:8], line[9:-1]
    if line[8:9] != b" " or line[-1:] != b"\n" or checksum != b"%08x" % zlib.crc32(text):
        return None
    entry = json.loads(text)
    return entry if isinstance(entry, dict) else None

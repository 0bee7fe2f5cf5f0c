"""SHA256SUMS: what the files of a folder were when they were written.

safetensors notices that a file was cut off, not that a bit of a weight has flipped: such weights
load, and training goes on from them. The list has the format of ``sha256sum``, so that
``sha256sum -c SHA256SUMS`` compares as well. Knows nothing of what the files hold.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from agent_rl.errors import CheckpointError

_LIST = "SHA256SUMS"
ALL_FILES = "**/*"


def write_checksums(folder: Path, pattern: str) -> None:
    """List the files of the folder whose paths are of the glob pattern."""
    lines = [f"{digest}  {name}\n" for name, digest in _digests(folder, pattern).items()]
    (folder / _LIST).write_text("".join(lines), encoding="utf-8")


def has_checksums(folder: Path) -> bool:
    return (folder / _LIST).is_file()


def check_checksums(folder: Path, pattern: str) -> None:
    """
    Raises:
        CheckpointError: a file was cut off, changed, added or removed, or there is no list.
    """
    try:
        listed = dict(_entry(line) for line in (folder / _LIST).read_text("utf-8").splitlines())
        found = _digests(folder, pattern)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{_LIST} cannot be compared with its files: {error}") from error
    for name in sorted(listed.keys() | found.keys()):
        if name not in found:
            raise CheckpointError(f"{name} is missing, which {_LIST} lists")
        if listed.get(name) != found[name]:
            raise CheckpointError(
                f"{name} is damaged or was changed: it is not the file that {_LIST} lists"
            )


def _entry(line: str) -> tuple[str, str]:
    """The name in a line of the list, and its digest."""
    digest, separator, name = line.partition("  ")
    if not separator:
        raise ValueError(f"{line[:80]!r} is no line of it")
    return name, digest


def _digests(folder: Path, pattern: str) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.glob(pattern)):
        if path.is_file() and path.name != _LIST:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests[path.relative_to(folder).as_posix()] = digest
    return digests

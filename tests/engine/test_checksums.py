"""Checksums of a folder: a file that is not what it was is named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_rl.engine.checksums import ALL_FILES, check_checksums, has_checksums, write_checksums
from agent_rl.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "b").write_bytes(b"second")
    (tmp_path / "a").write_bytes(b"first")
    write_checksums(tmp_path, ALL_FILES)
    return tmp_path


def test_the_list_is_that_of_sha256sum(folder: Path) -> None:
    first, second = (hashlib.sha256(text).hexdigest() for text in (b"first", b"second"))
    assert (folder / "SHA256SUMS").read_text() == f"{first}  a\n{second}  part/b\n"
    check_checksums(folder, ALL_FILES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "a").write_bytes(b"fjrst"), "^a is damaged or was changed"),
        (lambda folder: (folder / "part" / "b").write_bytes(b"sec"), "^part/b is damaged"),
        (lambda folder: (folder / "c").write_bytes(b"new"), "^c is damaged or was changed"),
        (lambda folder: (folder / "a").unlink(), "^a is missing, which SHA256SUMS lists"),
        (lambda folder: (folder / "SHA256SUMS").write_bytes(b""), "^a is damaged"),
        (lambda folder: (folder / "SHA256SUMS").write_bytes(b"abc\n"), "'abc' is no line of it"),
        (lambda folder: (folder / "SHA256SUMS").write_bytes(b"\xff"), "cannot be compared"),
        (lambda folder: (folder / "SHA256SUMS").unlink(), "cannot be compared .*No such file"),
    ],
)
def test_what_changed_is_named(
    folder: Path, change: Callable[[Path], object], message: str
) -> None:
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        check_checksums(folder, ALL_FILES)


def test_only_files_of_the_pattern_count(folder: Path) -> None:
    write_checksums(folder, "a*")
    (folder / "part" / "b").write_bytes(b"edited")
    check_checksums(folder, "a*")
    assert has_checksums(folder)
    assert not has_checksums(folder / "part")

"""Version info of a git checkout, and outside of one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import agent_rl
from agent_rl.stats.version import version_info


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=trunk"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_branch_and_changes(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "a")
    expected = {
        "commit_id": git(tmp_path, "rev-parse", "HEAD"),
        "branch": "trunk",
        "is_dirty": False,
        "version": agent_rl.__version__,
    }
    assert version_info(tmp_path) == expected
    (tmp_path / "a").write_text("2")
    assert version_info(tmp_path) == expected | {"is_dirty": True}


def test_outside_git_and_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    unknown = {
        "commit_id": None,
        "branch": None,
        "is_dirty": None,
        "version": agent_rl.__version__,
    }
    assert version_info(tmp_path) == unknown
    monkeypatch.setenv("PATH", "")
    assert version_info(tmp_path) == unknown

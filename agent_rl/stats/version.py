"""Which code produced a run: the git checkout of the working folder, and our version."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TypedDict

import agent_rl


class VersionInfo(TypedDict):
    """None where the folder is in no git checkout, or git is not installed."""

    commit_id: str | None
    branch: str | None
    is_dirty: bool | None
    version: str


def version_info(folder: str | Path = ".") -> VersionInfo:
    commit_id = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain") if commit_id else None
    return {
        "commit_id": commit_id,
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD") if commit_id else None,
        "is_dirty": None if changes is None else changes != "",
        "version": agent_rl.__version__,
    }


def _git(folder: str | Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()

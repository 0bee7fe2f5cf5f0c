"""Warden: runs a command, and never lets it outlive the process that asked for it.

    python warden.py PARENT_PID GRACE_S program argument...

When that parent is gone (SIGKILL included), on SIGTERM, and when the command ends by itself, every
process the command has started is ended too, also those in sessions of their own. The exit code is
the command's. It knows nothing of servers and imports the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_POLL_S = 0.1
# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def watch(parent: int, grace_s: float, command: list[str]) -> int:
    """Returns the command's exit code, 128 + n where signal n ended it, when all have ended.

    ``grace_s``: how long processes may take to end when they are asked to.
    """
    is_asked = False

    def ask(*_: object) -> None:
        nonlocal is_asked
        is_asked = True

    signal.signal(signal.SIGTERM, ask)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
    main = _start(command)
    codes: dict[int, int] = {}
    while main not in codes and not is_asked and os.getppid() == parent:
        time.sleep(_POLL_S)
        codes |= _reap()
    _end_all(main, codes, grace_s)
    return codes[main]


def _start(command: list[str]) -> int:
    """The command's process id. It dies with this process, whatever ends that."""
    warden = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == warden:  # else it died before that
            os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
    os._exit(127)


def _end_all(main: int, codes: dict[int, int], grace_s: float) -> None:
    """Ask every descendant to end, then make it; adds the exit codes of those reaped here."""
    asked: set[int] = set()
    deadline_s = time.monotonic() + grace_s
    while pids := _descendants(os.getpid()) | ({main} - codes.keys()):
        is_patient = time.monotonic() < deadline_s
        for pid in pids - asked if is_patient else pids:
            _signal(pid, signal.SIGTERM if is_patient else signal.SIGKILL)
        asked |= pids
        time.sleep(_POLL_S / 2)
        codes |= _reap()


def _reap() -> dict[int, int]:
    """Exit codes of the children that have ended."""
    codes: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
        if pid == 0:
            return codes
        code = os.waitstatus_to_exitcode(status)
        codes[pid] = code if code >= 0 else 128 - code


def _descendants(root: int) -> set[int]:
    """Children, their children and so on: 1 -> 2 -> 3 and 1 -> 4 gives {2, 3, 4} for 1."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "12 (any name) S 7 ...": state and parent follow the last parenthesis.
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(int(stat.parent.name))
    found: set[int] = set()
    new = children.get(root, [])
    while new:
        found.update(new)
        new = [child for pid in new for child in children.get(pid, [])]
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))

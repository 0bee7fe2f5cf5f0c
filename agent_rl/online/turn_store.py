"""TurnStore: the judged turns as JSON lines, for people to read; redacted before they are written.

Bounded by age and number of rows; what belongs to a session or a user can be deleted. It holds
texts, never token ids: those could be decoded. A user's or session's id that would be redacted is
stored with its hash, by which it is still found. One thread writes, in order, so that a slow disk
never holds up users. Training does not need it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from agent_rl.config import PrivacyConfig
from agent_rl.online.disk_thread import DiskThread
from agent_rl.online.methods import Lesson
from agent_rl.online.passive import SessionTurns, Turn
from agent_rl.online.redact import SEAM, Redactor, redact, redact_object, stored_id
from agent_rl.online.transcript import message_text
from agent_rl.online.verdict import Verdict
from agent_rl.record.jsonl import append_lines, json_line, read_lines
from agent_rl.types import JsonObject

_TIDY_EVERY = 256  # rows
_MAX_STORED_CHARS = 20_000  # of what a judge wrote


class TurnStore:
    """
    Args:
        redactor: in place of the built-in patterns; used when ``config.redact`` is on.
    """

    def __init__(self, path: Path, config: PrivacyConfig, *, redactor: Redactor = redact) -> None:
        self.path = path
        self._config = config
        self._redactor = redactor
        self._num_untidied = 0
        self._disk = DiskThread(
            "turn-store", path, tidy=self._tidy, is_timed=config.keep_days is not None
        )

    def append(self, row: JsonObject) -> None:
        """Write it soon."""
        self._disk.soon(lambda: self._append(row))

    def delete(self, *, session_id: str | None = None, user_id: str | None = None) -> int:
        """Remove all rows of the session, or of the user; how many there were.

        Raises:
            ValueError: not exactly one of both is given.
            OSError: the file cannot be rewritten.
        """
        if (session_id is None) == (user_id is None):
            raise ValueError("delete turns by session_id or by user_id, one of both")
        value = session_id if user_id is None else user_id
        assert value is not None, "one of both is given"
        stored = {value, stored_id(value, self._redactor)}

        def is_kept(row: JsonObject) -> bool:
            ids = [row.get("session_id")] if user_id is None else row.get("user_ids") or []
            return stored.isdisjoint(ids)

        return self._disk.now(lambda: self._keep(is_kept))

    def close(self) -> None:
        """Returns when everything is written."""
        self._disk.close()

    def _append(self, row: JsonObject) -> None:
        ids = {"session_id": row["session_id"], "user_ids": row["user_ids"]}
        if self._config.redact:
            row = redact_object(row, self._redactor)
            ids = redact_object(ids, lambda value: stored_id(value, self._redactor))
        row = {**redact_object(row, lambda text: text.replace(SEAM, " ")), **ids}
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_WRONLY, 0o600))  # for its owner only
        append_lines(self.path, [json_line(row)])
        self._num_untidied += 1
        if self._num_untidied >= _TIDY_EVERY:
            self._tidy()

    def _tidy(self) -> None:
        """Drop what is too old, and the oldest of too many."""
        self._num_untidied = 0
        config = self._config
        if not self.path.exists() or (config.keep_days is None and config.keep_rows is None):
            return
        rows = [row for _, row in read_lines(self.path)]
        oldest_s = config.oldest_s()
        kept = [row for row in rows if _time_s(row) >= oldest_s]
        if config.keep_rows is not None:
            kept = kept[-config.keep_rows :]
        if len(kept) < len(rows):
            self._rewrite(kept)

    def _keep(self, is_wanted: Callable[[JsonObject], bool]) -> int:
        if not self.path.exists():
            return 0
        rows = [row for _, row in read_lines(self.path)]
        kept = [row for row in rows if is_wanted(row)]
        if len(kept) < len(rows):
            self._rewrite(kept)
        return len(rows) - len(kept)

    def _rewrite(self, rows: list[JsonObject]) -> None:
        """The whole file or the old one, whatever happens meanwhile."""
        other = self.path.with_suffix(".tmp")
        file = os.open(other, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(file, "w", encoding="utf-8", errors="replace", newline="\n") as stream:
            stream.writelines(json_line(row) for row in rows)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(other, self.path)


def _time_s(row: JsonObject) -> float:
    """When the turn was settled; a row that does not say is as old as can be."""
    value = row.get("time")
    return value if isinstance(value, int | float) else 0.0


def turn_row(
    turns: SessionTurns, turn: Turn, verdict: Verdict, hint: str | None, lesson: Lesson | None
) -> JsonObject:
    """A settled turn, for people to read."""
    interaction = turn.interaction
    versions = interaction.path.versions
    return {
        "time": time.time(),
        "session_id": turns.session_id,
        "user_ids": sorted(turns.user_ids),
        "turn": turn.number,
        "interaction_id": interaction.interaction_id,
        "versions": [min(versions), max(versions)],
        "prompt": message_text(interaction.messages[-1], between=SEAM),
        "answer": message_text(interaction.output_message_list[0], between=SEAM),
        "next_state": turn.next_state and message_text(turn.next_state, between=SEAM),
        "score": verdict.score,
        "given_reward": interaction.reward,
        "votes": list(verdict.votes),
        "evaluation": verdict.evaluation[-_MAX_STORED_CHARS:],
        "hint": hint,
        "trained": lesson is not None and lesson.is_trained,
        "promoted": lesson is not None and lesson.is_promoted,
    }

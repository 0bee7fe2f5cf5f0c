"""Ids -> text, growing: never half a character, and markers told from look-alikes.

Two tokens F0 9F | 99 82 are one emoji: after the first one nothing is shown. A tag such as
``<tool_call>`` that is one token of the vocabulary is a marker at its place only; the same text
spelled by ordinary tokens is ordinary text. However ids are fed, one by one or all at once, the
text is the same. Knows nothing of what the text means.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from agent_rl.tokens.vocabulary import CONTEXT, Vocabulary

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """The text of the ids fed so far (``text``) and where its markers are."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        markers: Sequence[str],
        hidden: Iterable[int],
        before: Sequence[int] = (),
    ) -> None:
        """Args:
        markers: texts that count only as their own token, where the vocabulary has one.
        hidden: tokens without text (end of turn, padding), besides the special tokens.
        before: the ids in front, whose text is not shown; see ``Vocabulary.text_behind``.
        """
        self.text = ""
        self._vocabulary = vocabulary
        self._markers = _marker_ids(vocabulary, markers)
        self._offsets: dict[str, list[int]] = {text: [] for text in self._markers.values()}
        self._breaks = (vocabulary.special | frozenset(hidden)) | frozenset(self._markers)
        self._bytes = vocabulary.byte_ids
        self._window = list(before[-CONTEXT:])
        self._shown = vocabulary.decode(self._window) if self._window else ""
        self._has_space = vocabulary.is_spaced_after(before)

    def feed(self, token_ids: Sequence[int]) -> None:
        """Append ids. A character whose bytes are not complete yet is held back."""
        run: list[int] = []
        for token_id in token_ids:
            if token_id in self._bytes:
                # A decoder gives up a whole run of bytes for one that is wrong: it must see them
                # in the same steps however they are fed.
                self._push(run)
                self._push([token_id])
                run = []
                continue
            if token_id not in self._breaks:
                run.append(token_id)
                continue
            self._push(run)
            run = []
            self._drop_incomplete()
            marker = self._markers.get(token_id)
            if marker is not None:
                self._offsets[marker].append(len(self.text))
                self.text += marker
        self._push(run)

    def find(self, marker: str, start: int, end: int | None = None) -> int:
        """Offset of the first such marker in ``text[start:end]``, -1 if there is none."""
        offsets = self._offsets.get(marker)
        if offsets is None:
            return self.text.find(marker, start, end)
        index = bisect_left(offsets, start)
        if index == len(offsets) or (end is not None and offsets[index] + len(marker) > end):
            return -1
        return offsets[index]

    def is_at(self, marker: str, offset: int) -> bool:
        return self.find(marker, offset, offset + len(marker)) == offset

    def num_held(self, marker: str, end: int) -> int:
        """How many characters before ``end`` may be the beginning of this marker."""
        return 0 if marker in self._offsets else partial_length(self.text, marker, end)

    def _push(self, run: list[int]) -> None:
        """Decode with the token before: some decoders drop a space at the start of a text."""
        if not run:
            return
        self._window += run
        text = self._vocabulary.decode(self._window)
        if text.endswith(_INCOMPLETE):
            return
        added = text[len(self._shown) :]
        if added and self._has_space:
            added, self._has_space = added.removeprefix(" "), False
        self.text += added
        self._keep_context()

    def _keep_context(self) -> None:
        # A token that ends a character begun before it has no text of its own: keep that one too.
        for size in range(1, min(len(self._window), CONTEXT) + 1):
            shown = self._vocabulary.decode(self._window[-size:])
            if _INCOMPLETE not in shown:
                self._window, self._shown = self._window[-size:], shown
                return
        self._window, self._shown = [], ""

    def _drop_incomplete(self) -> None:
        """A boundary ends the text: bytes that never became a character are not shown."""
        text = self._vocabulary.decode(self._window) if self._window else ""
        self.text += text[len(self._shown) :].rstrip(_INCOMPLETE)
        if text.endswith(_INCOMPLETE):
            self._window, self._shown = [], ""

    def finish(self) -> None:
        """No more ids will come."""
        self._drop_incomplete()
        self._window, self._shown = [], ""


def _marker_ids(vocabulary: Vocabulary, markers: Sequence[str]) -> Mapping[int, str]:
    found = {vocabulary.id_of(marker): marker for marker in markers}
    return {token_id: marker for token_id, marker in found.items() if token_id is not None}


def partial_length(text: str, marker: str, end: int) -> int:
    """Length of the longest proper prefix of ``marker`` that ends ``text[:end]``.

    Example: ``partial_length("a <to", "<tool_call>", 5) == 3``.
    """
    for length in range(min(len(marker) - 1, end), 0, -1):
        if text.startswith(marker[:length], end - length):
            return length
    return 0

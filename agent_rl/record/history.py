"""HistoryIndex: which recorded answer a request replays last, found by hashes of its messages.

    recorded: [u1] -> a1            key after the answer: k(u1 a1)
              [u1 a1 t1] -> a2                            k(u1 a1 t1 a2)
    request:  [u1 a1 t1 a2 t2]      meets k(u1 a1 t1 a2): it goes on from a2

Behind a recorded answer the key goes on from the record's own, however this request replays it. It
also says why a request that comes from a recorded conversation does not extend it, and which
answers a retry replaced. Knows no tokens. The cache guards it against concurrent use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from agent_rl.record.identity import START, Chain, Key, answer_keys, text_of, tool_call_ids
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.types import JsonObject

_TELLING = 16  # characters from which a text is hardly repeated by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the record knows of a request: ``interaction`` is the newest one whose messages and
    answer are ``messages[:num_messages]``; ``key`` is the identity of all its messages;
    ``num_recorded`` is how many interactions there were when it was asked."""

    key: Key
    interaction: InteractionWithTokenLogpReward | None = None
    num_messages: int = 0
    num_recorded: int = 0
    fork_reason: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Reading:
    """A request as far as it is read; the next one of its conversation starts here.

    ``edited`` is the first assistant message, after the last recorded answer, that stands where
    the record has another one.
    """

    chain: Chain
    messages: list[JsonObject] = field(default_factory=list)
    found: InteractionWithTokenLogpReward | None = None
    num_known: int = 0
    edited: int | None = None


class HistoryIndex:
    def __init__(self) -> None:
        self._by_request: dict[Key, list[InteractionWithTokenLogpReward]] = {}
        self._by_answer: dict[Key, InteractionWithTokenLogpReward] = {}
        self._after: dict[str, Key] = {}  # interaction -> key behind its answer, however replayed
        self._telling: dict[Key, int] = {}  # an answer by itself -> fewest messages before it
        self._issued: set[str] = set()  # tool-call ids of recorded answers
        self._gone_on: dict[str, int] = {}  # interaction -> number of the first that replays it
        self._openings: dict[str, Key] = {}  # interaction -> its first message
        self._recent: deque[tuple[Key, str]] = deque(maxlen=8)  # first message, text of answer
        self._readings: deque[_Reading] = deque(maxlen=16)

    def find(self, messages: Sequence[JsonObject]) -> History:
        """Reads the messages behind the longest request that these begin with."""
        reading = self._begin(messages)
        for index in range(len(reading.messages), len(messages)):
            self._read(reading, index, messages[index])
        self._readings.append(reading)
        if reading.edited is not None:
            reason: str | None = (
                f"history edited: messages[{reading.edited}] is not the recorded answer"
            )
        else:
            reason = self._why_cut(messages, reading.num_known)
        return History(
            key=reading.chain.key,
            interaction=reading.found,
            num_messages=reading.num_known,
            num_recorded=len(self._openings),
            fork_reason=reason,
        )

    def _begin(self, messages: Sequence[JsonObject]) -> _Reading:
        """Go on from the newest request that begins these messages; equality runs at C speed."""
        for reading in reversed(self._readings):
            if messages[: len(reading.messages)] == reading.messages:
                self._readings.remove(reading)
                return reading
        return _Reading(chain=Chain(self._issued))

    def _read(self, reading: _Reading, index: int, message: JsonObject) -> None:
        before = reading.chain.key
        key = reading.chain.add(message)
        reading.messages.append(message)
        if message.get("role") == "assistant":
            answered = self._by_answer.get(key)
            if answered is not None:
                reading.found, reading.num_known, reading.edited = answered, index + 1, None
                reading.chain.key = self._after[answered.interaction_id]
            elif reading.edited is None and before in self._by_request:
                reading.edited = index

    def add(self, interaction: InteractionWithTokenLogpReward) -> None:
        """Only the answer is looked at if the interaction was planned."""
        history = interaction.history
        if interaction.key is None:
            read = self.find(interaction.messages)
            interaction.key, interaction.num_recorded = read.key, read.num_recorded
            history = history or read.interaction
        self._by_request.setdefault(interaction.key, []).append(interaction)
        opening = START
        if history is not None:
            self._gone_on.setdefault(history.interaction_id, len(self._openings))
            opening = self._openings.get(history.interaction_id, START)
        elif interaction.num_messages:
            opening = Chain().add(interaction.messages[0])
        self._openings[interaction.interaction_id] = opening
        if interaction.output_message_list:
            self._add_answer(interaction, interaction.key, opening)

    def orphans(self, rewarded: Container[str]) -> frozenset[str]:
        """See ``InteractionCache.orphans``."""
        return frozenset(
            interaction.interaction_id
            for siblings in self._by_request.values()
            for index, interaction in enumerate(siblings)
            if len(siblings) > 1
            and interaction.interaction_id not in self._gone_on
            and interaction.interaction_id not in rewarded
            and any(
                (later > index or self._is_late(interaction, other))
                and _is_same_request(interaction, other)
                for later, other in enumerate(siblings)
            )
        )

    def _is_late(
        self,
        interaction: InteractionWithTokenLogpReward,
        other: InteractionWithTokenLogpReward,
    ) -> bool:
        """Asked before the agent went on from ``other``; afterwards it would be asked anew."""
        number = self._gone_on.get(other.interaction_id)
        return number is not None and number >= interaction.num_recorded

    def _add_answer(
        self, interaction: InteractionWithTokenLogpReward, key: Key, opening: Key
    ) -> None:
        answers = interaction.output_message_list
        for answer in answers:
            self._issued.update(tool_call_ids(answer))
        ends = answer_keys(key, answers)
        self._after[interaction.interaction_id] = ends[-1]
        for end in ends:
            earlier = self._by_answer.get(end)
            if earlier is None or earlier.request_id != interaction.request_id:
                self._by_answer[end] = interaction
        for answer in answers:
            text = text_of(answer)
            if len(text) >= _TELLING:
                self._recent.append((opening, text))
            if len(text) >= _TELLING or tool_call_ids(answer):
                for end in answer_keys(START, [answer]):
                    fewest = self._telling.get(end, interaction.num_messages)
                    self._telling[end] = min(fewest, interaction.num_messages)

    def _why_cut(self, messages: Sequence[JsonObject], num_known: int) -> str | None:
        """Why recorded answers occur where the record does not have them.

        [s u1 a1 u2 a2 u3] recorded; then [s a2 u3]: a2 stands earlier than it did -> compaction.
        The same for [s "so far: <a2>" u3]: a new conversation of that opening quotes an answer.
        """
        for index in range(num_known, len(messages)):
            if messages[index].get("role") != "assistant":
                continue
            before = self._telling.get(Chain(self._issued).add(messages[index]))
            if before is not None and index < before:
                return f"compaction: messages[{index}] was answer number {before} before"
            if before is not None:
                return "history edited: messages before a recorded answer are not as they were"
        if num_known == 0 and len(self._recent):
            opening = Chain().add(messages[0])
            texts = [text for start, text in self._recent if start == opening]
            for index, message in enumerate(messages[1:], start=1):
                sent = text_of(message) if texts else ""
                if any(text in sent for text in texts):
                    return f"compaction: messages[{index}] quotes a recorded answer"
        return None


def _is_same_request(
    one: InteractionWithTokenLogpReward, other: InteractionWithTokenLogpReward
) -> bool:
    """The same messages are given; choices of one request are no retries of each other."""
    return (
        one.request_id != other.request_id
        and one.temperature == other.temperature
        and (one.tools or None) == (other.tools or None)
        and (one.chat_template_kwargs or None) == (other.chat_template_kwargs or None)
    )

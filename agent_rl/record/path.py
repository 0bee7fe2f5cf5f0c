"""TokenPath: the token ids of one interaction, stored as what is new against an earlier one.

    turn 1: prompt 1 5 3        output 20 2      -> shared 0, own = 1 5 3 | 20 2
    turn 2: prompt 1 5 3 20 2 7 output 21 2      -> shared 5 of turn 1, own = 7 | 21 2

Memory is proportional to the new tokens, whatever the turn. Sampled ids, log-probs and versions
are kept as sampled. A path that begins with *all* ids of its base extends it: only then do the
base's sampled tokens count as sampled here too. Nothing here knows messages or rewards.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, TypeAlias

from agent_rl.tokens.vocabulary import CONTEXT, Vocabulary
from agent_rl.types import ModelResponse

if TYPE_CHECKING:
    from agent_rl.tokens.render import Rendering

Ints: TypeAlias = "array[int]"
Floats: TypeAlias = "array[float]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training sequence. One entry for each token; off the mask: 0.0, -1 and temperature 1.

    A sampled token is trained unless a grammar forced it: then its probability was 1 whatever the
    weights, so it says nothing about the policy, and it is context like the tokens of a prompt.
    """

    token_ids: Ints
    loss_mask: Ints
    logprobs: Floats
    versions: Ints
    temperatures: Floats
    """Under which the log-probs are stated: turns of one row may differ."""


class TokenPath:
    """Prompt and output ids: the first ``shared`` ids of ``base``, then ``own``."""

    __slots__ = (
        "_rendering",
        "_whole",
        "base",
        "forced",
        "logprobs",
        "num_prompt",
        "own",
        "shared",
        "temperature",
        "versions",
    )

    def __init__(
        self,
        *,
        base: TokenPath | None,
        shared: int,
        context: Sequence[int],
        response: ModelResponse,
        temperature: float = 1.0,
        whole: tuple[int, ...] | None = None,
        rendering: Rendering | None = None,
    ) -> None:
        self.base = base
        self.temperature = temperature
        self.shared = shared
        self.own: Ints = array("i", context)
        self.num_prompt = shared + len(self.own)
        self.own.extend(response.output_tokens)
        self.logprobs: Floats = array("d", response.output_logprobs)
        self.versions: Ints = array("i", response.output_versions)
        forced = response.output_forced
        self.forced = None if forced is None else bytes(forced)
        self._whole = whole
        self._rendering = rendering

    def __len__(self) -> int:
        return self.shared + len(self.own)

    @property
    def num_output(self) -> int:
        return len(self.logprobs)

    @property
    def output(self) -> Ints:
        return self.own[len(self.own) - self.num_output :]

    @property
    def extended(self) -> TokenPath | None:
        """The base, if this path begins with all of its ids."""
        return self.base if self.base is not None and self.shared == len(self.base) else None

    def ids(self) -> Ints:
        """Prompt and output, gathered along the bases."""
        pieces: list[Ints] = []
        node: TokenPath | None = self
        end = len(self)
        while node is not None:
            if end > node.shared:
                pieces.append(node.own[: end - node.shared])
                end = node.shared
            node = node.base
        ids: Ints = array("i")
        for piece in reversed(pieces):
            ids.extend(piece)
        return ids

    def whole(self) -> tuple[int, ...]:
        """The same as a tuple; at hand until ``forget``, for the next turn's prompt."""
        whole = self._whole  # read once: another thread may forget it
        return tuple(self.ids()) if whole is None else whole

    @property
    def rendering(self) -> Rendering | None:
        """How the prompt was rendered; at hand until ``forget``. None after a bridge."""
        return self._rendering

    def text(self, vocabulary: Vocabulary) -> str:
        """The text of all ids: of the prompt as it was rendered, of the output as decoded."""
        rendering = self._rendering
        if rendering is None:
            return vocabulary.decode(self.whole())
        start = len(self.own) - self.num_output
        before = self.own[max(0, start - CONTEXT) : start]
        return rendering.text + vocabulary.text_behind(before, self.output)

    def forget(self) -> None:
        """Drop what only serves the next turn: it is as long as the history."""
        self._whole = None
        self._rendering = None

    def line(self) -> Iterator[TokenPath]:
        """This path and those it extends, newest first."""
        node: TokenPath | None = self
        while node is not None:
            yield node
            node = node.extended

    def row(self, trained_from: int = 0) -> Row:
        """One training sequence in which sampled tokens from index ``trained_from`` on count."""
        size = len(self)
        loss_mask: Ints = array("i", bytes(4 * size))
        logprobs: Floats = array("f", bytes(4 * size))
        versions: Ints = array("i", [-1]) * size
        temperatures: Floats = array("f", [1.0]) * size
        for node in self.line():
            start, end = node.num_prompt, len(node)
            if start >= trained_from:
                loss_mask[start:end] = array("i", [1]) * (end - start)
                logprobs[start:end] = array("f", node.logprobs)
                versions[start:end] = node.versions
                temperatures[start:end] = array("f", [node.temperature]) * (end - start)
                for index in compress(range(start, end), node.forced or ()):
                    loss_mask[index], logprobs[index], versions[index] = 0, 0.0, -1
                    temperatures[index] = 1.0
        return Row(
            token_ids=self.ids(),
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
            temperatures=temperatures,
        )


def shared_length(ids: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix, by halving: slices compare at C speed."""
    low, high = 0, min(len(ids), len(other))
    if ids[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if ids[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low

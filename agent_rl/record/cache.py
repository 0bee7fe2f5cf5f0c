"""InteractionCache: one session's conversation tree and its rewards.

Append-only: an interaction enters when its call has succeeded, so a call that runs, failed or was
cancelled is nobody's parent and no row. Any thread may call. A look-up costs one pass over the
request's messages, whatever the number of interactions.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent_rl.record.history import History, HistoryIndex
from agent_rl.record.identity import as_messages
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.record.path import TokenPath
from agent_rl.record.plan import PromptPlan, Request, plan_prompt
from agent_rl.record.reward import as_interaction_id, as_reward
from agent_rl.types import ChatTemplateType, JsonObject

if TYPE_CHECKING:
    from agent_rl.tokens.format import ChatFormat

logger = logging.getLogger(__name__)

_NUM_AT_HAND = 16  # conversations that go on side by side without gathering their ids again


class InteractionCache(Mapping[str, InteractionWithTokenLogpReward]):
    """Interactions by id in creation order, which is the order of ``append``."""

    def __init__(self) -> None:
        self._interactions: dict[str, InteractionWithTokenLogpReward] = {}
        self._index = HistoryIndex()
        self._given: dict[str, float] = {}
        self._orphans: frozenset[str] | None = None  # fixed once rewards are discounted
        self._at_hand: dict[TokenPath, None] = {}  # in order; paths that a next turn may extend
        self._lock = threading.RLock()

    def __getitem__(self, interaction_id: str) -> InteractionWithTokenLogpReward:
        return self._interactions[interaction_id]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._interactions))

    def __len__(self) -> int:
        return len(self._interactions)

    def plan(
        self,
        messages: Sequence[Any],
        tools: Sequence[JsonObject] | None,
        fmt: ChatFormat,
        chat_template_type: ChatTemplateType,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> PromptPlan:
        """The prompt for ``messages``, which the record keeps: do not change them afterwards.

        Raises:
            TypeError, ValueError: see ``as_messages``.
            TokenError: the messages cannot be rendered.
        """
        request = Request(
            messages=as_messages(messages),
            tools=tools,
            chat_template_type=chat_template_type,
            chat_template_kwargs=chat_template_kwargs,
        )
        return plan_prompt(request, self.history(request.messages), fmt)

    def history(self, messages: Sequence[JsonObject]) -> History:
        """Which recorded answer these messages go on from. Nothing is recorded by asking."""
        with self._lock:
            return self._index.find(messages)

    def append(self, interaction: InteractionWithTokenLogpReward) -> None:
        """Record a finished call.

        Raises:
            ValueError: it has no id, or the id is taken.
        """
        with self._lock:
            name = interaction.interaction_id
            if not name or name in self._interactions:
                raise ValueError(f"interaction id {name!r} is empty or already recorded")
            self._index.add(interaction)
            self._interactions[name] = interaction
            if interaction.parent is not None:
                interaction.parent.is_leaf = False
            if interaction.is_complete:
                self._put_at_hand(interaction)
            if interaction.reward is not None:
                self._given[name] = as_reward(interaction.reward)

    def _put_at_hand(self, interaction: InteractionWithTokenLogpReward) -> None:
        """Its ids stay gathered for the next turn, those of the turn before do not."""
        if interaction.base is not None and interaction.base.is_complete:
            interaction.base.path.forget()
            self._at_hand.pop(interaction.base.path, None)
        self._at_hand[interaction.path] = None
        if len(self._at_hand) > _NUM_AT_HAND:
            oldest = next(iter(self._at_hand))
            oldest.forget()
            del self._at_hand[oldest]

    @property
    def total_reward(self) -> float:
        """Sum of the rewards that were set; discounting does not change it."""
        return math.fsum(self._given.values())

    def set_reward(self, interaction_id: str, reward: Any) -> None:
        """Replaces an earlier reward of that interaction.

        Raises:
            KeyError: no such interaction.
            TypeError: what names it is no id.
            ValueError: not one finite number.
        """
        interaction_id = as_interaction_id(interaction_id)
        value = as_reward(reward)
        with self._lock:
            if interaction_id not in self._interactions:
                raise KeyError(
                    f"no interaction {interaction_id!r} is recorded; there are "
                    f"{len(self._interactions)}: {', '.join(list(self._interactions)[-3:])}"
                )
            self._interactions[interaction_id].reward = value
            self._given[interaction_id] = value

    def set_last_reward(self, reward: Any) -> str:
        """Set the reward of the interaction recorded last, orphans left out; returns its id.

        Raises:
            RuntimeError: nothing is recorded yet.
            ValueError: not one finite number.
        """
        with self._lock:
            orphans = self.orphans
            names = [name for name in self._interactions if name not in orphans]
            if not names:
                raise RuntimeError("set_last_reward: nothing is recorded yet")
            self.set_reward(names[-1], reward)
            return names[-1]

    @property
    def orphans(self) -> frozenset[str]:
        """Ids of answers that a client retry replaced: never exported.

        An orphan has the same request as a sibling that is later, or that was gone on from after
        the orphan was asked; it was itself never gone on from, and nobody gave it a reward.
        """
        with self._lock:
            if self._orphans is not None:
                return self._orphans
            return self._index.orphans(frozenset(self._given))

    @property
    def complete(self) -> list[InteractionWithTokenLogpReward]:
        """What can be a row, in creation order: recorded with token ids, no orphan."""
        with self._lock:
            orphans = self.orphans
            return [
                interaction
                for name, interaction in self._interactions.items()
                if interaction.is_complete and name not in orphans
            ]

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Carry rewards back to earlier interactions, in reverse creation order.

        [None, None, 1] with 0.9 -> [0.81, 0.9, 1];  [0.5, None, 1] with 0.5 -> [0.75, 0.5, 1].

        Raises:
            RuntimeError: it was done before.
            ValueError: the discount is not in [0, 1].
        """
        if not 0.0 <= turn_discount <= 1.0:
            raise ValueError(f"turn_discount is {turn_discount!r}; it must be in [0, 1]")
        with self._lock:
            if self._orphans is not None:
                raise RuntimeError("the reward discount was applied before; it can be only once")
            rows = self.complete
            self._orphans = self.orphans
            if rows and rows[-1].reward is None:
                logger.warning(
                    "the last interaction %s has no reward; it counts as 0 (make calls that are "
                    "not to be trained, such as a judge's, with store=False)",
                    rows[-1].interaction_id,
                )
            running = 0.0
            for interaction in reversed(rows):
                running = running * turn_discount + (interaction.reward or 0.0)
                interaction.reward = running

"""Export: recorded interactions -> rows to train on.

    tree  c1 -> c2 -> c3        individual: c1, c2, c3, each trains its own output
              \\-> c4            concat: c3 trains c1 c2 c3; c4 trains c4 ("once") or c1 c4 ("each")

Rows are copies: what a workflow writes on them does not reach the record, and a reward that is set
later shows in the next export. Sampled tokens of a complete interaction are in exactly one row
with loss_mask 1, orphans left out, unless shared="each".
"""

from __future__ import annotations

import logging
from typing import Literal, TypeAlias

from agent_rl.errors import ExportError
from agent_rl.record.cache import InteractionCache
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.types import ExportStyle

Shared: TypeAlias = Literal["once", "each"]
Rows: TypeAlias = dict[str, InteractionWithTokenLogpReward]

logger = logging.getLogger(__name__)


def export_interactions(
    cache: InteractionCache,
    style: ExportStyle,
    reward_discount: float | None = None,
    shared: Shared = "once",
) -> Rows:
    """Rows by interaction id in creation order; ``reward_discount`` is applied first.

    Raises:
        ExportError: unknown style or ``shared``; concat over interactions whose prompts were not
            made by chat_template_type="concat".
        RuntimeError: ``reward_discount`` is given and rewards were discounted before.
    """
    if style not in ("individual", "concat"):
        raise ExportError(f"export style {style!r} is unknown; use 'individual' or 'concat'")
    if shared not in ("once", "each"):
        raise ExportError(f"shared is {shared!r}; use 'once' or 'each'")
    complete = cache.complete
    if style == "concat":
        _check_concat(complete)
    if reward_discount is not None:
        cache.apply_reward_discount(reward_discount)
    rows = _individual(complete) if style == "individual" else _concat(complete, shared)
    if unrewarded := [name for name, row in rows.items() if row.reward is None]:
        logger.warning(
            "%d of %d exported rows have no reward, the first is %s",
            len(unrewarded),
            len(rows),
            unrewarded[0],
        )
    return rows


def _individual(complete: list[InteractionWithTokenLogpReward]) -> Rows:
    return {
        interaction.interaction_id: interaction.as_row(interaction.path.num_prompt)
        for interaction in complete
    }


def _concat(complete: list[InteractionWithTokenLogpReward], shared: Shared) -> Rows:
    """One row for each leaf. Under "once" a leaf trains what no earlier leaf has trained."""
    parents = {id(interaction.parent) for interaction in complete}
    trained: set[int] = set()  # ids of the paths that a row trains already
    rows: Rows = {}
    for leaf in complete:
        if id(leaf) in parents:
            continue
        trained_from = 0
        for path in leaf.path.line():
            if shared == "once" and id(path) in trained:
                trained_from = len(path)
                break
            trained.add(id(path))
        rows[leaf.interaction_id] = leaf.as_row(trained_from)
    return rows


def _check_concat(complete: list[InteractionWithTokenLogpReward]) -> None:
    for interaction in complete:
        if interaction.chat_template_type != "concat":
            raise ExportError(
                f"export style 'concat' needs chat_template_type='concat' on all interactions; "
                f"{interaction.interaction_id} has {interaction.chat_template_type!r}: give the "
                "client chat_template_type='concat', or export 'individual'"
            )

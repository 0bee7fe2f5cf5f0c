"""Submissions: what all groups of one call of the collector share, resolved once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Protocol

from agent_rl.config import RolloutConfig
from agent_rl.rollout.agent import AgentSettings
from agent_rl.rollout.group import GroupedRolloutWorkflow
from agent_rl.rollout.lane import AcceptFn, Submission
from agent_rl.rollout.resolve import resolve_accept, resolve_workflow
from agent_rl.types import JsonObject


class MakeSubmission(Protocol):
    def __call__(
        self, data: JsonObject, draw: int | None = None, task_id: str | int | None = None
    ) -> Submission: ...


class Submissions:
    """
    Args:
        settings: of agents, by ``is_eval``.
        min_usable_group_size: of training groups; a smaller ``group_size`` lowers it.
    """

    def __init__(
        self,
        config: RolloutConfig,
        settings: Mapping[bool, AgentSettings],
        min_usable_group_size: int,
    ) -> None:
        self._config = config
        self._settings = settings
        self._min_usable_group_size = min_usable_group_size
        self._numbers = itertools.count()

    def maker(
        self,
        workflow: object,
        workflow_kwargs: Mapping[str, Any] | None,
        should_accept_fn: AcceptFn | str | None,
        group_size: int,
        is_eval: bool,
    ) -> MakeSubmission:
        """
        Raises:
            WorkflowResolutionError: ``workflow`` or ``should_accept_fn`` cannot be used.
        """
        resolved = resolve_workflow(workflow, workflow_kwargs, self._settings[is_eval])
        if group_size != 1:
            config, floor = self._config, min(self._min_usable_group_size, group_size)
            resolved = GroupedRolloutWorkflow(
                resolved,
                group_size,
                min_usable_group_size=1 if is_eval else floor,
                drop_incomplete_group=config.drop_incomplete_group and not is_eval,
                reward_normalization=config.reward_normalization and not is_eval,
                reward_normalization_use_std=config.reward_normalization_use_std,
            )
        should_accept = resolve_accept(should_accept_fn)

        def make(
            data: JsonObject, draw: int | None = None, task_id: str | int | None = None
        ) -> Submission:
            number = next(self._numbers)
            return Submission(
                number=number,
                task_id=str(number if task_id is None else task_id),
                data=data,
                workflow=resolved,
                should_accept=should_accept,
                is_eval=is_eval,
                draw=draw,
            )

        return make

"""What a request demands of the form of its answer: tool calls, how many, and JSON.

A demand becomes a grammar or a stop string on the GenerationConfig, or the request is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_rl.api.fields import Fields
from agent_rl.api.grammar import ToolUse, answer_grammar, stop_after_one_call, tool_grammar
from agent_rl.api.sampling import refuse_unsupported
from agent_rl.api.session import Session
from agent_rl.api.turn import check_schemas
from agent_rl.types import GenerationConfig, JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """``param`` is the parameter that asked for the grammar."""

    tool_use: ToolUse
    is_parallel: bool
    grammar: str | None
    param: str
    stop: tuple[str, ...] = ()

    def applied(
        self, gconfig: GenerationConfig, session: Session, *, top_logprobs: int
    ) -> GenerationConfig:
        """``gconfig`` with the demands. Raises RequestError for what the engine cannot honour."""
        config = replace(
            gconfig,
            top_logprobs=top_logprobs,
            grammar=self.grammar or gconfig.grammar,
            stop=(*gconfig.stop, *self.stop),
        )
        refuse_unsupported(config, session.engine, grammar_param=self.param)
        return config


def read_demands(
    fields: Fields,
    session: Session,
    tools: Sequence[JsonObject] | None,
    answer_format: JsonObject | None,
    *,
    where: str,
) -> Demands:
    """``where`` names the field that holds ``answer_format``."""
    check_schemas(tools)
    fmt = session.format
    is_parallel = fields.boolean("parallel_tool_calls", default=True)
    tool_use, calls = tool_grammar(
        fields.raw("tool_choice"), tools, is_parallel=is_parallel, fmt=fmt
    )
    answer = answer_grammar(answer_format, where=where)
    if answer is not None and calls is not None:
        raise fields.refusal("tool_choice", "and a JSON answer format exclude one another")
    stop: tuple[str, ...] = ()
    if tool_use == "auto" and not is_parallel:
        stop = (stop_after_one_call(fmt.tool_form, session.engine.supported),)
    return Demands(
        tool_use=tool_use,
        is_parallel=is_parallel,
        grammar=answer or calls,
        param=where if answer else "tool_choice",
        stop=stop,
    )

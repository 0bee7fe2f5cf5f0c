"""From the sampling parameters of a request, over the session's defaults, to a GenerationConfig.

What the engine cannot honour is refused here, by comparing the finished config with the defaults:
a field that differs and is not in ``engine.supported`` would otherwise be ignored silently.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any

from agent_rl.api.fields import Fields
from agent_rl.api.session import Session
from agent_rl.engine.base import InferenceEngine
from agent_rl.errors import RequestError
from agent_rl.types import GenerationConfig

logger = logging.getLogger(__name__)

_EVERY_ENGINE = {
    *("max_new_tokens", "max_tokens", "temperature", "greedy", "n_samples", "stop_token_ids"),
}
_OVERRIDDEN = {
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
}
_DEFAULTS = GenerationConfig()
_TOKEN_ID = re.compile("[0-9]{1,10}")
_GUIDED = "guided decoding"
_EXTRA = "; the embedded engine has it after: pip install llguidance"


def read_sampling(
    fields: Fields, session: Session, *, max_new_tokens: int | None
) -> GenerationConfig:
    """Reads the fields that all endpoints share."""
    sent = {
        "temperature": fields.number("temperature", low=0),
        "top_p": fields.number("top_p", low=1e-9, high=1),
        "top_k": _top_k(fields),
        "min_p": fields.number("min_p", low=0, high=1 - 1e-9),
        "frequency_penalty": fields.number("frequency_penalty", low=-2, high=2),
        "presence_penalty": fields.number("presence_penalty", low=-2, high=2),
        "repetition_penalty": fields.number("repetition_penalty", low=1e-9),
        "seed": fields.integer("seed"),
        "stop": _stop(fields),
        "logit_bias": _logit_bias(fields),
    }
    return build_sampling(
        session,
        {name: value for name, value in sent.items() if value is not None},
        max_new_tokens=max_new_tokens,
        stop_token_ids=_stop_token_ids(fields),
    )


def build_sampling(
    session: Session,
    sent: dict[str, Any],
    *,
    max_new_tokens: int | None,
    stop_token_ids: tuple[int, ...] = (),
) -> GenerationConfig:
    """``sent``: fields of GenerationConfig that the request gave, in its own values."""
    base = session.gconfig or _DEFAULTS
    if session.sampling == "override":
        sent = {name: value for name, value in sent.items() if name not in _OVERRIDDEN}
    elif session.gconfig is not None:
        for name in _OVERRIDDEN & sent.keys():
            if sent[name] != getattr(base, name):
                _warn_of_difference(name, sent[name], getattr(base, name))
    limits = [n for n in (base.max_tokens, session.engine_max_tokens) if n is not None]
    ends = (*session.format.stop_token_ids, *base.stop_token_ids, *stop_token_ids)
    changes = {
        **sent,
        "n_samples": 1,
        "max_new_tokens": base.max_new_tokens if max_new_tokens is None else max_new_tokens,
        "max_tokens": min(limits, default=None),
        "greedy": base.greedy and "temperature" not in sent,
        "stop_token_ids": tuple(dict.fromkeys(ends)),
    }
    return replace(base, **changes)


def refuse_unsupported(
    gconfig: GenerationConfig, engine: InferenceEngine, *, grammar_param: str
) -> None:
    """``grammar_param``: the parameter of the request that asked for a grammar."""
    for field in dataclass_fields(gconfig):
        name = field.name
        if name in _EVERY_ENGINE or name in engine.supported:
            continue
        if getattr(gconfig, name) != getattr(_DEFAULTS, name):
            param = grammar_param if name == "grammar" else name
            need, fix = (_GUIDED, _EXTRA) if name == "grammar" else (name, "")
            raise RequestError(
                f"{param} needs {need}, which this engine ({type(engine).__name__}) does not "
                f"support; leave {param} out{fix}",
                param=param,
                code="unsupported_parameter",
            )


def read_logprobs(fields: Fields) -> tuple[bool, int]:
    """(are log-probs wanted, number of alternatives at each token)."""
    is_wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", low=0, high=20)
    if top and not is_wanted:
        raise fields.refusal("top_logprobs", "needs logprobs=true")
    return is_wanted, top or 0


def _top_k(fields: Fields) -> int | None:
    """-1 and 0 both mean "off", as servers differ in which one they use."""
    top_k = fields.integer("top_k", low=-1)
    return None if top_k is None else max(top_k, 0)


def _stop(fields: Fields) -> tuple[str, ...] | None:
    stop = fields.raw("stop")
    if stop is None:
        return None
    stops = [stop] if isinstance(stop, str) else stop
    is_good = isinstance(stops, list) and all(isinstance(s, str) and s for s in stops)
    if not is_good or len(stops) > 4:
        raise fields.refusal("stop", "must be a non-empty string or a list of up to 4 of them")
    return tuple(stops)


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.array("stop_token_ids") or []
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise fields.refusal("stop_token_ids", "must be a list of token ids")
    return tuple(ids)


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    sent = fields.mapping("logit_bias")
    if sent is None:
        return None
    inner = Fields(sent, where="logit_bias")
    bias = {}
    for key in sent:
        if not _TOKEN_ID.fullmatch(key):
            raise fields.refusal("logit_bias", f"has the key {key!r}; keys must be token ids")
        value = inner.number(key, low=-100, high=100)
        if value is not None:
            bias[int(key)] = value
    return bias


@functools.cache
def _warn_of_difference(name: str, sent: float, default: float) -> None:
    """Once for each pair of values: some frameworks send a temperature that nobody asked for."""
    logger.warning(
        "the agent sends %s=%s but gconfig has %s; the agent's value is used "
        '(sampling="override" would use gconfig\'s)',
        name,
        sent,
        default,
    )

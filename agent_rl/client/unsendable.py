"""Bodies that the SDK cannot write as JSON: a bad request that names the place.

The SDK raises UnicodeEncodeError, ValueError or RecursionError from its own depths for half of a
surrogate pair, NaN or endless nesting. An agent that handles bad requests handles these too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from openai import BadRequestError

from agent_rl.api.body import fault_in
from agent_rl.api.failure import failure_of
from agent_rl.client.http import hx


@contextmanager
def refusing_unsendable(options: Any) -> Iterator[None]:
    """``options``: the SDK's ``FinalRequestOptions``."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        fault = fault_in(options.json_data) or fault_in(options.extra_json)
        if fault is None:
            raise
        failure = failure_of(fault)
        request = hx.Request(options.method, f"http://agent-rl.local/{options.url.lstrip('/')}")
        response = hx.Response(failure.status, request=request, json=failure.body)
        body = failure.body["error"]
        # The SDK's class takes the response of the HTTP library that it was built on.
        raise BadRequestError(str(fault), response=cast(Any, response), body=body) from error

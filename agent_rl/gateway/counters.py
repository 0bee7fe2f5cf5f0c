"""Counters of what the gateway served, and their text for Prometheus.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
No label holds anything that a client chose.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent_rl.gateway.sessions import Sessions

_HEAD = """\
# HELP agent_rl_gateway_{name} {help}
# TYPE agent_rl_gateway_{name} {kind}
"""


@dataclass(slots=True, kw_only=True)
class Counters:
    """``seconds`` is the time from a request's head to the last byte of its answer."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ended: Counter[str] = field(default_factory=Counter)
    num_running: int = 0
    num_hung_up: int = 0

    def served(self, endpoint: str, status: int, seconds: float) -> None:
        self.requests[endpoint, status] += 1
        self.seconds[endpoint] += seconds

    def text(self, sessions: Sessions, version: int) -> str:
        live = list(sessions)
        states = Counter("open" if one.end_reason is None else "ended" for one in live)
        calls: Counter[str] = Counter()
        for (endpoint, _), count in self.requests.items():
            calls[endpoint] += count
        requests = {
            f'{{endpoint="{endpoint}",status="{status}"}}': count
            for (endpoint, status), count in sorted(self.requests.items())
        }
        return "".join(
            (
                _family("requests_total", "counter", "Answered requests.", requests),
                _family(
                    "request_seconds",
                    "summary",
                    "Time from a request's head to its last byte.",
                    {
                        **{f'_sum{{endpoint="{e}"}}': s for e, s in sorted(self.seconds.items())},
                        **{f'_count{{endpoint="{e}"}}': c for e, c in sorted(calls.items())},
                    },
                ),
                _family("requests_running", "gauge", "Requests at work.", {"": self.num_running}),
                _family("hung_up_total", "counter", "Clients that left.", {"": self.num_hung_up}),
                _family(
                    "sessions",
                    "gauge",
                    "Sessions that are held.",
                    {f'{{state="{state}"}}': states[state] for state in ("open", "ended")},
                ),
                _family(
                    "sessions_ended_total",
                    "counter",
                    "Sessions that have ended, by reason.",
                    {f'{{reason="{r}"}}': c for r, c in sorted(self.ended.items())},
                ),
                _family("weights_version", "gauge", "Version of the weights.", {"": version}),
            )
        )


def _family(name: str, kind: str, text: str, samples: Mapping[str, float]) -> str:
    head = _HEAD.format(name=name, kind=kind, help=text)
    return head + "".join(
        f"agent_rl_gateway_{name}{labels} {value}\n" for labels, value in samples.items()
    )

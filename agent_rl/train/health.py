"""Whether a step taught anything, in plain words: from its metrics, for people.

``one_line`` is the step in the console, ``describe`` the words above the table of all metrics;
``find_faults`` says why nothing, or nothing sound, can be learnt, and what to do about it, and
``FaultWatch`` when to say so. They read the keys that ``metrics.py`` and ``rollout/`` write.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Stats = Mapping[str, float]

_MISMATCH_LIMIT = 0.3
"""Nats; a temperature that was forgotten, or weights of another model, show as more."""
_TRUNCATED_LIMIT = 0.5
_CLIPPED_LIMIT = 0.5
_LEARNING = ("rollout", "train_step", "update_weights")
_PHASES = (*_LEARNING, "eval", "save", "recover")
_UPDATE = "ppo_actor/update"
_STREAK = 3
"""Steps in a row that make a fault of what a small batch may show by chance."""
ZERO_ADVANTAGES = "zero advantages"


def one_line(stats: Stats, *, version: int) -> str:
    """``reward 0.5, held out 0.62; 1 of 8 groups teach nothing; 40.0 s, 30 tokens/s; version 3``

    ``version`` is that of the weights after the step; tokens/s are trained tokens, without the time
    of evaluation and saving. What was not measured is left out.
    """
    seconds, learning_s = _seconds(stats, _PHASES), _seconds(stats, _LEARNING)
    tokens = stats.get("ppo_actor/n_valid_tokens")
    parts = [
        ", ".join(filter(None, _rewards(stats))),
        _idle_groups(stats),
        ", ".join(
            filter(
                None,
                (
                    f"{seconds:.1f} s" if seconds else "",
                    f"{tokens / learning_s:,.0f} tokens/s" if learning_s and tokens else "",
                ),
            )
        ),
        f"version {version}",
    ]
    return "; ".join(part for part in parts if part)


def describe(stats: Stats) -> str:
    """``reward 0.50, held out 0.62; 1 of 8 groups teach nothing; entropy 1.20; ...``

    What was not measured is left out.
    """
    parts = [
        _reward(stats),
        _groups(stats),
        _say(stats, "entropy {:.3g}", f"{_UPDATE}/entropy/avg"),
        _say(stats, "{:.1%} of ratios clipped", f"{_UPDATE}/clip_ratio/avg"),
        _mismatch(stats),
        _staleness(stats),
        _tokens(stats),
        _time(stats),
    ]
    return "; ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """``kind`` stays the same from step to step; ``streak`` steps in a row make it worth saying."""

    kind: str
    text: str
    streak: int = 1


class FaultWatch:
    """Says each fault once: when it has lasted, and again only after a step without it.

    ``known`` are kinds that the user was told of before the first step.
    """

    def __init__(self, known: Collection[str] = ()) -> None:
        self._known = known
        self._lasted: dict[str, int] = {}

    def look(self, stats: Stats) -> list[str]:
        """What to say after this step."""
        faults = [fault for fault in find_faults(stats) if fault.kind not in self._known]
        self._lasted = {fault.kind: self._lasted.get(fault.kind, 0) + 1 for fault in faults}
        return [fault.text for fault in faults if self._lasted[fault.kind] == fault.streak]


def find_faults(stats: Stats) -> list[Fault]:
    """Reasons why this step taught nothing or little; empty where all is well."""
    if stats.get("ppo_actor/n_valid_tokens") == 0:
        text = (
            "no token of this batch is trained: every loss_mask is 0, no reward is known, or "
            "actor.truncated_rows=mask left all rows out"
        )
        return [Fault(kind="no tokens", text=text)]
    faults = []

    def add(kind: str, text: str, *, streak: int = 1) -> None:
        faults.append(Fault(kind=kind, text=text, streak=streak))

    if stats.get(f"{_UPDATE}/advantage_max", 1.0) == 0.0:
        add(
            ZERO_ADVANTAGES,
            f"all advantages of the last {_STREAK} batches are 0, so nothing is learnt: the "
            "rewards within each group are equal; take harder or easier data, or raise "
            "rollout.group_size",
            streak=_STREAK,
        )
    if stats.get(f"{_UPDATE}/update_successful", 1.0) < 1.0:
        add(
            "not finite",
            "a gradient was not finite and its step was skipped; if it happens again, lower "
            "actor.optimizer.lr or actor.reward_clip, or use actor.dtype=float32",
        )
    error = stats.get(f"{_UPDATE}/behave_logp_error/avg", 0.0)
    if error > _MISMATCH_LIMIT:
        add(
            "mismatch",
            f"log-probs of trainer and engine differ by {error:.2f} nats on average: check that "
            "both have the same weights and temperature, or lower rollout.max_head_offpolicyness",
        )
    if stats.get(f"{_UPDATE}/clip_ratio/avg", 0.0) > _CLIPPED_LIMIT:
        add(
            "clipped",
            "more than half of the tokens are clipped and teach nothing: lower "
            "actor.optimizer.lr or actor.ppo_n_minibatches, or raise actor.eps_clip",
        )
    if stats.get("ppo_actor/no_eos_ratios/avg", 0.0) > _TRUNCATED_LIMIT:
        add(
            "truncated",
            f"in the last {_STREAK} batches more than half of the rows do not end with an end "
            "token: raise gconfig.max_new_tokens, or see actor.truncated_rows",
            streak=_STREAK,
        )
    return faults


def _say(stats: Stats, text: str, *keys: str) -> str:
    values = [stats[key] for key in keys if key in stats]
    return text.format(*values) if len(values) == len(keys) else ""


def _rewards(stats: Stats) -> list[str]:
    return [
        _say(stats, "reward {:.3g}", "ppo_actor/task_reward/avg"),
        _say(stats, "held out {:.3g}", "eval-rollout/reward"),
    ]


def _reward(stats: Stats) -> str:
    spread = _say(stats, "std in a group {:.2g}", "ppo_actor/group_reward_std/avg")
    return ", ".join(filter(None, (*_rewards(stats), spread)))


def _groups(stats: Stats) -> str:
    if "ppo_actor/zero_advantage_groups/avg" not in stats or "ppo_actor/n_groups" not in stats:
        return ""
    return _idle_groups(stats) or f"all {stats['ppo_actor/n_groups']:.0f} groups teach"


def _idle_groups(stats: Stats) -> str:
    total = round(stats.get("ppo_actor/n_groups", 0.0))
    idle = round(stats.get("ppo_actor/zero_advantage_groups/avg", 0.0) * total)
    return f"{idle} of {total} groups teach nothing" if idle else ""


def _mismatch(stats: Stats) -> str:
    return _say(
        stats,
        "trainer and engine differ by {:.2g} nats (max {:.2g}, KL {:.2g})",
        *(f"{_UPDATE}/{key}" for key in ("behave_logp_error/avg", "behave_logp_error/max")),
        f"{_UPDATE}/behave_kl/avg",
    )


def _staleness(stats: Stats) -> str:
    home = "ppo_actor/version_stats/staleness_share_"
    shares = {
        key.removeprefix(home).removesuffix("/avg").replace("_or_more", "+"): value
        for key, value in stats.items()
        if key.startswith(home) and key.endswith("/avg") and value > 0.0
    }
    if not shares or set(shares) == {"0"}:
        return ""
    return "token age " + ", ".join(f"{age}: {share:.0%}" for age, share in shares.items())


def _tokens(stats: Stats) -> str:
    return _say(
        stats,
        "{:,.0f} tokens trained, {:,.0f} computed ({:.0%} saved), {:.0f} trained/s",
        "ppo_actor/n_valid_tokens",
        *(f"{_UPDATE}/{key}" for key in ("n_computed_tokens", "tree_saving")),
        f"{_UPDATE}/trained_tokens_per_s",
    )


def _time(stats: Stats) -> str:
    total = _seconds(stats, _PHASES)
    if total <= 0.0:
        return ""
    spent = {name: stats.get(f"timeperf/{name}", 0.0) for name in _PHASES}
    shares = [f"{name} {spent[name] / total:.0%}" for name in _largest(spent)]
    return f"{total:.1f} s: " + ", ".join(shares)


def _seconds(stats: Stats, phases: Sequence[str]) -> float:
    return math.fsum(stats.get(f"timeperf/{name}", 0.0) for name in phases)


def _largest(spent: Mapping[str, float]) -> Sequence[str]:
    used = [name for name, seconds in spent.items() if seconds > 0.0]
    return sorted(used, key=lambda name: -spent[name])

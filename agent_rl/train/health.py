"""Whether a step taught anything, in plain words: from its metrics, for people.

``describe`` is the line under each step in the console; ``find_faults`` says why nothing, or
nothing sound, can be learnt, and what to do about it. Both read the keys that ``metrics.py`` and
``rollout/`` write and know nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Stats = Mapping[str, float]

_MISMATCH_LIMIT = 0.3
"""Nats; a temperature that was forgotten, or weights of another model, show as more."""
_TRUNCATED_LIMIT = 0.5
_CLIPPED_LIMIT = 0.5
_PHASES = ("rollout", "train_step", "update_weights", "eval", "save", "recover")
_UPDATE = "ppo_actor/update"


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


def find_faults(stats: Stats) -> list[str]:
    """Reasons why this step taught nothing or little; empty where all is well."""
    if stats.get("ppo_actor/n_valid_tokens") == 0:
        return [
            "no token of this batch is trained: every loss_mask is 0, no reward is known, or "
            "actor.truncated_rows=mask left all rows out"
        ]
    faults = []
    if stats.get(f"{_UPDATE}/advantage_max", 1.0) == 0.0:
        faults.append(
            "all advantages of this batch are 0, so nothing is learnt: the rewards within each "
            "group are equal; take harder or easier data, or raise rollout.group_size"
        )
    if stats.get(f"{_UPDATE}/update_successful", 1.0) < 1.0:
        faults.append(
            "a gradient was not finite and its step was skipped; if it happens again, lower "
            "actor.optimizer.lr or actor.reward_clip, or use actor.dtype=float32"
        )
    error = stats.get(f"{_UPDATE}/behave_logp_error/avg", 0.0)
    if error > _MISMATCH_LIMIT:
        faults.append(
            f"log-probs of trainer and engine differ by {error:.2f} nats on average: check that "
            "both have the same weights and temperature, or lower rollout.max_head_offpolicyness"
        )
    if stats.get(f"{_UPDATE}/clip_ratio/avg", 0.0) > _CLIPPED_LIMIT:
        faults.append(
            "more than half of the tokens are clipped and teach nothing: lower "
            "actor.optimizer.lr or actor.ppo_n_minibatches, or raise actor.eps_clip"
        )
    if stats.get("ppo_actor/no_eos_ratios/avg", 0.0) > _TRUNCATED_LIMIT:
        faults.append(
            "more than half of the rows do not end with an end token: raise "
            "gconfig.max_new_tokens, or see actor.truncated_rows"
        )
    return faults


def _say(stats: Stats, text: str, *keys: str) -> str:
    values = [stats[key] for key in keys if key in stats]
    return text.format(*values) if len(values) == len(keys) else ""


def _reward(stats: Stats) -> str:
    return ", ".join(
        filter(
            None,
            (
                _say(stats, "reward {:.3g}", "ppo_actor/task_reward/avg"),
                _say(stats, "held out {:.3g}", "eval-rollout/reward"),
                _say(stats, "std in a group {:.2g}", "ppo_actor/group_reward_std/avg"),
            ),
        )
    )


def _groups(stats: Stats) -> str:
    if not {"ppo_actor/n_groups", "ppo_actor/zero_advantage_groups/avg"} <= stats.keys():
        return ""
    total = round(stats["ppo_actor/n_groups"])
    idle = round(stats["ppo_actor/zero_advantage_groups/avg"] * total)
    return f"{idle} of {total} groups teach nothing" if idle else f"all {total} groups teach"


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
    spent = {name: stats.get(f"timeperf/{name}", 0.0) for name in _PHASES}
    total = math.fsum(spent.values())
    if total <= 0.0:
        return ""
    shares = [f"{name} {spent[name] / total:.0%}" for name in _largest(spent)]
    return f"{total:.1f} s: " + ", ".join(shares)


def _largest(spent: Mapping[str, float]) -> Sequence[str]:
    used = [name for name, seconds in spent.items() if seconds > 0.0]
    return sorted(used, key=lambda name: -spent[name])

"""Where a conversation tree forks, and what the fork says."""

from __future__ import annotations

import pytest
from fix_format import (
    T2,
    Refusing,
    Talk,
    answer_of,
    assistant,
    fix_format,
    rendered,
    tool,
    user,
)

from agent_rl.record.export import export_interactions

SUMMARY = "they said hi and the answer was a"
THOUGHT = assistant("b", reasoning_content="a")


def test_summary_starts_a_branch_named_compaction() -> None:
    """case B75: t1, t2, the summary call s, then t3, t4 on the summary; every token once."""
    talk = Talk()
    opening = [{"role": "system", "content": "a"}, user("hi")]
    t2 = [*opening, assistant("a"), user("yo")]
    talk.say("t1", opening, [20, 2])
    talk.say("t2", t2, [21, 2])
    talk.say("s", [*t2, assistant("b"), user("sum")], [22, 2], assistant(SUMMARY))
    t3 = [opening[0], user(f"so far: {SUMMARY}")]
    compacted = talk.say("t3", t3, [20, 2])
    talk.say("t4", [*t3, assistant("a"), user("yo")], [24, 2])
    assert compacted.parent is None
    assert compacted.fork_reason == "compaction: messages[1] quotes a recorded answer"
    rows = export_interactions(talk.cache, "concat")
    assert {name: sum(row.to_row().loss_mask) for name, row in rows.items()} == {"s": 6, "t4": 4}
    talk.cache.set_last_reward(1.0)
    rows = export_interactions(talk.cache, "individual", reward_discount=1.0)
    assert [row.reward for row in rows.values()] == [1.0] * 5


def test_window_over_the_history_is_compaction() -> None:
    """Old messages are cut off in front of an answer that is kept."""
    talk = Talk()
    messages = [user("hi")]
    for turn in range(3):
        talk.say(f"c{turn}", messages, [20, 2], assistant(f"the long answer {turn}"))
        messages = [*messages, assistant(f"the long answer {turn}"), user(f"q{turn}")]
    cut = talk.say("c3", messages[4:], [20, 2])
    assert cut.parent is None and cut.history is None
    assert cut.fork_reason == "compaction: messages[1] was answer number 5 before"


def test_edited_answer_forks_with_a_reason() -> None:
    talk = Talk()
    c1 = talk.say("c1", [user("hi")], [20, 2])
    c2 = talk.say("c2", [user("hi"), assistant("b"), user("yo")], [24, 2])
    assert c2.parent is None
    assert c2.fork_reason == "history edited: messages[1] is not the recorded answer"
    follow = [user("hi"), assistant("a"), user("yo")]
    c3 = talk.say("c3", follow, [20, 2])
    c4 = talk.say("c4", [*follow, assistant("b"), user("yo")], [24, 2])
    assert c3.parent is c1 and c4.parent is c1
    assert c4.fork_reason == "history edited: messages[3] is not the recorded answer"


def test_other_tools_start_a_branch() -> None:
    talk = Talk()
    talk.say("c1", [user("hi")], [20, 2], tools=[tool("a")])
    history = [user("hi"), assistant("a"), user("yo")]
    same = talk.say("c2", history, [24, 2], tools=[tool("a")])
    other = talk.say("c3", history, [24, 2], tools=[tool("b")])
    assert same.parent is talk.cache["c1"]
    assert other.parent is None and other.fork_reason == "tools changed"
    assert other.tokens[:-2] == rendered(history, [tool("b")])


def test_no_bridge_renders_and_says_why() -> None:
    talk = Talk(fmt=Refusing(fix_format(T2)))
    talk.say("c1", [user("hi")], [8, 20, 9, 21, 2], THOUGHT)
    c2 = talk.say("c2", [user("hi"), THOUGHT, user("yo")], [24, 2])
    assert c2.tokens[9:12] == (21, 2, 3)
    assert c2.parent is None
    assert c2.fork_reason == "no bridge: the template is not stable"
    rows = export_interactions(talk.cache, "concat")
    assert [sum(row.to_row().loss_mask) for row in rows.values()] == [5, 2]


@pytest.mark.parametrize("style", ["hf", "concat"])
def test_rendered_text_that_goes_on_reuses_the_sampled_ids(style: str) -> None:
    """hf mode, or no bridge: the text begins with the parent's, so 20, 21 stay as sampled."""
    talk = Talk(style, Refusing(fix_format()))
    c1 = talk.say("c1", [user("hi")], [20, 21, 2])
    c2 = talk.say("c2", [user("hi"), assistant("ab"), user("yo")], [24, 2])
    assert c2.tokens[9:13] == (20, 21, 2, 3)
    assert c2.parent is c1 and c2.fork_reason is None
    assert not any("ab" in text for text in talk.fmt.tokenizer.encoded)


def test_fork_attaches_to_the_nearest_forebear_with_the_same_tokens() -> None:
    talk = Talk("hf", fix_format(T2))
    c1 = talk.say("c1", [user("hi")], [20, 2])
    second = [user("hi"), assistant("a"), user("yo")]
    talk.say("c2", second, [8, 20, 9, 21, 2], THOUGHT)
    c3 = talk.say("c3", [*second, THOUGHT, user("hi")], [24, 2])
    assert c3.parent is c1 and c3.history is talk.cache["c2"]
    assert c3.fork_reason == "tokens differ: at index 21 of the 26 tokens of c2"
    assert c3.tokens == (*fix_format(T2).render([*second, THOUGHT, user("hi")]), 24, 2)


def test_running_call_is_nobodys_parent() -> None:
    talk = Talk()
    plan = talk.plan([user("hi")])
    other = talk.say("c2", [user("hi"), assistant("a"), user("yo")], [24, 2])
    assert other.parent is None and other.fork_reason is None
    talk.cache.append(
        plan.interaction(
            interaction_id="c1",
            model_response=answer_of(plan, [20, 2]),
            output_message_list=[assistant("a")],
        )
    )
    assert talk.cache["c1"].is_leaf

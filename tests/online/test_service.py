"""The whole path over TCP: real clients, the gateway, judges, and batches for a trainer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
import torch

from agent_rl.config import GatewayConfig, JudgeConfig, OnlineConfig, PrivacyConfig, load_config
from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import CheckpointError, CollectorError, ConfigError
from agent_rl.gateway.server import Gateway
from agent_rl.online.patience import TimedHints
from agent_rl.online.service import OnlineService
from agent_rl.online.verdict import JudgedTurn, Verdict
from agent_rl.record.jsonl import read_lines
from agent_rl.train.trainer import PPOTrainer
from agent_rl.types import ModelRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Serve = Callable[..., OnlineService]


class Words:
    """An engine that answers users with "answer N" and judges by a word of the next message."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.num_answers = 0
        self.judged: list[str] = []
        self.engine = ScriptedEngine([self.reply], tokenizer=tokenizer, repeat=True)

    def reply(self, request: ModelRequest) -> str:
        text = self.tokenizer.decode(request.input_ids)
        if "You judge one answer" not in text:
            self.num_answers += 1
            return f"answer {self.num_answers}"
        answer = text.split("<answer>\n")[1].split("\n</answer>")[0]
        said = text.split("<next>\n")[1].split("\n</next>")[0]
        self.judged.append(f"{answer} <- {said}")
        return r"\boxed{1}" if "thanks" in said else r"\boxed{-1}"


@pytest.fixture
def words(tokenizer: PreTrainedTokenizerBase) -> Words:
    return Words(tokenizer)


@pytest.fixture
def serve(words: Words) -> Iterator[Serve]:
    """A running service over that engine."""
    with ExitStack() as running:

        def start(config: OnlineConfig | None = None, **options: object) -> OnlineService:
            service = OnlineService(words.engine, words.tokenizer, config, **options)
            return running.enter_context(service)

        yield start


def client_of(service: OnlineService, session_id: str, **headers: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=service.base_url,
        api_key=service.api_key,
        max_retries=0,
        default_headers={"X-Session-Id": session_id, **headers},
    )


def say(client: openai.OpenAI, messages: list, text: str, **options: object) -> str:
    """A whole turn, added to the messages; returns the id of the completion."""
    messages.append({"role": "user", "content": text})
    completion = client.chat.completions.create(model="any", messages=messages, **options)
    messages.append(completion.choices[0].message.model_dump(exclude_none=True))
    return completion.id


def test_a_conversation_over_tcp_as_the_time_line_has_it(serve: Serve, words: Words) -> None:
    """Request 2 judges turn 1, request 3 turn 2; the last turn, done, is context only (B181)."""
    service = serve()
    messages: list = []
    with client_of(service, "ann") as client:
        say(client, messages, "hello")
        assert words.judged == []
        say(client, messages, "thanks, and then?")
        (first,) = service.drain(1)
        assert words.judged == ["answer 1 <- thanks, and then?"] * 3
        say(client, messages, "wrong", extra_headers={"X-Session-Done": "true"})
        second, last = sorted(service.drain(2), key=lambda row: bool(row["rewards"].isnan()))
    assert words.judged[3:] == ["answer 2 <- wrong"] * 3
    assert [float(row["rewards"]) for row in (first, second)] == [1.0, -1.0]
    assert last["rewards"].isnan().all()
    assert not last["loss_mask"].any()
    served = [r for r in words.engine.requests if len(r.input_ids) < 80]
    for row, request in zip((first, second, last), served, strict=True):
        size = len(request.input_ids)
        assert row["input_ids"][0, :size].tolist() == list(request.input_ids)
    assert first["logprobs"][0, -4:].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert service.learner.num_sessions == 0


def test_streams_and_side_turns(serve: Serve, words: Words) -> None:
    """A streamed turn is recorded before its last event; a side turn is served and ignored."""
    service = serve()
    with client_of(service, "ann") as client:
        messages = [{"role": "user", "content": "hello"}]
        stream = client.chat.completions.create(model="any", messages=messages, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        messages.append({"role": "assistant", "content": text})
        title = [{"role": "system", "content": "thanks: a title"}, messages[0]]
        say(client, title, "go", extra_headers={"X-Turn-Type": "side"})
        say(client, messages, "thanks")
        (row,) = service.drain(1)
    assert words.judged == ["answer 1 <- thanks"] * 3
    assert float(row["rewards"]) == 1.0
    assert service.learner.num_turns == 2


def test_a_request_without_a_session_is_served_and_not_learnt_from(
    serve: Serve, words: Words
) -> None:
    """Case B176: two clients of one key without a session share nothing."""
    service = serve()
    client = openai.OpenAI(base_url=service.base_url, api_key=service.api_key, max_retries=0)
    with client:
        messages: list = []
        for text in ("hello", "thanks", "thanks again"):
            say(client, messages, text)
    assert words.judged == []
    assert (service.learner.num_turns, service.learner.num_waiting) == (0, 0)


def test_two_users_at_once_with_the_same_session_name(serve: Serve, words: Words) -> None:
    keys = {"ann": "key-of-ann", "bob": "key-of-bob"}
    service = serve(gateway=GatewayConfig(user_keys=keys))
    talks: dict[str, list] = {"ann": [], "bob": []}
    clients = {
        user: openai.OpenAI(
            base_url=service.base_url, api_key=key, default_headers={"X-Session-Id": "main"}
        )
        for user, key in keys.items()
    }
    for text in ("hello", "thanks", "wrong"):
        for user, client in clients.items():
            say(client, talks[user], text)
    rows = service.drain(4)
    assert sorted(float(row["rewards"]) for row in rows) == [-1.0, -1.0, 1.0, 1.0]
    assert sorted(set(words.judged)) == [
        "answer 1 <- thanks", "answer 2 <- thanks", "answer 3 <- wrong", "answer 4 <- wrong"
    ]  # fmt: skip
    for client in clients.values():
        client.close()


def test_a_judge_behind_an_address(
    words: Words, serve: Serve, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Any OpenAI-compatible endpoint; this one is another gateway."""
    judge = Words(tokenizer)
    with Gateway(judge.engine, tokenizer).run_in_thread() as endpoint:
        at = JudgeConfig(base_url=endpoint.base_url, api_key=endpoint.api_key, votes=2)
        service = serve(OnlineConfig(judge=at))
        with client_of(service, "ann") as client:
            messages: list = []
            say(client, messages, "hello")
            say(client, messages, "thanks")
            (row,) = service.drain(1)
        assert float(row["rewards"]) == 1.0
        assert (words.judged, judge.judged) == ([], ["answer 1 <- thanks"] * 2)
        assert service.judge_model.usage.votes == 2
        service.close()


@pytest.mark.parametrize("mode", ["live", "gate"])
def test_requests_while_weights_are_updated(serve: Serve, words: Words, mode: str) -> None:
    """Case B134: live, they wait and none fails; gated, they get 503 and when to come back."""
    service = serve(OnlineConfig(update_mode=mode))
    body = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Authorization": f"Bearer {service.api_key}", "X-Session-Id": "ann"}

    def post() -> httpx.Response:
        return httpx.post(f"{service.base_url}/chat/completions", json=body, headers=headers)

    with service.updating():
        service._call(words.engine.pause())
        if mode == "gate":
            answer = post()
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "weight_update"
        else:
            waiting: list[httpx.Response] = []
            thread = threading.Thread(target=lambda: waiting.append(post()))
            thread.start()
            while not words.engine.requests:
                threading.Event().wait(0.001)
        service._call(words.engine.update_weights(WeightUpdate(version=1)))
        service._call(words.engine.resume())
    if mode == "live":
        thread.join()
        assert waiting[0].status_code == 200
    assert post().status_code == 200
    assert service.version == 1


def test_what_is_stored_is_redacted_and_can_be_deleted(
    serve: Serve, words: Words, tmp_path: Path
) -> None:
    service = serve(run_dir=tmp_path)
    for name in ("ann", "bob"):
        with client_of(service, name) as client:
            messages: list = []
            say(client, messages, f"I am {name}@example.org")
            say(client, messages, "thanks, my key is sk-0123456789abcdefghij")
    service.drain(2)
    assert service.forget(session_id="ann") == 2  # the stored turn and the session's record
    service.close()
    path = tmp_path / "turns.jsonl"
    row, last = [row for _, row in read_lines(path)]
    assert (row["session_id"], row["prompt"]) == ("bob", "I am [email]")
    assert (last["session_id"], last["turn"], last["score"]) == ("bob", 2, None), "still open"
    assert row["next_state"] == "thanks, my key is [secret]"
    assert (row["score"], row["votes"], row["trained"]) == (1.0, [1, 1, 1], True)
    assert "example.org" not in path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o077 == 0


def test_a_journal_would_store_what_is_to_be_redacted(words: Words, tmp_path: Path) -> None:
    journal = GatewayConfig(journal=str(tmp_path / "journal"))
    with pytest.raises(ConfigError, match="word for word"):
        OnlineService(words.engine, words.tokenizer, gateway=journal)
    allowed = OnlineConfig(privacy=PrivacyConfig(redact=False))
    OnlineService(words.engine, words.tokenizer, allowed, journal)


def test_closing_lets_the_trainer_go(serve: Serve) -> None:
    service = serve()
    failures: list[BaseException] = []

    def drain() -> None:
        try:
            service.drain(1)
        except CollectorError as error:
            failures.append(error)

    trainer = threading.Thread(target=drain)
    trainer.start()
    service.close()
    trainer.join()
    assert "closed" in str(failures[0])
    service.close()


def test_a_judge_that_hangs_holds_up_nobody(serve: Serve) -> None:
    """A rule of the user's own knows no time limit: it gets the one of a vote."""

    class Hanging:
        async def judge(self, turn: JudgedTurn) -> Verdict:
            await asyncio.Event().wait()
            raise AssertionError("never")

        async def hint(self, turn: JudgedTurn) -> str | None:
            await asyncio.Event().wait()
            raise AssertionError("never")

    service = serve(OnlineConfig(judge=JudgeConfig(timeout_s=0.05)), judge=Hanging())
    with client_of(service, "ann") as client:
        messages: list = []
        for text in ("hello", "thanks"):
            say(client, messages, text)
        (row,) = service.drain(1)
    assert float(row["rewards"]) == 0.0
    hints = TimedHints(Hanging(), 0.01)
    turn = JudgedTurn(messages=[], answer={}, next_state={})
    with pytest.raises(TimeoutError):
        asyncio.run(hints.hint(turn))


def test_an_address_in_use_is_an_error_and_leaves_no_thread(serve: Serve, words: Words) -> None:
    taken = int(serve().base_url.split(":")[2].partition("/")[0])
    before = threading.active_count()
    other = OnlineService(words.engine, words.tokenizer, gateway=GatewayConfig(port=taken))
    with pytest.raises(ConfigError, match="cannot listen"):
        other.start()
    assert threading.active_count() == before


class Echo:
    """Every other turn is good."""

    def __init__(self) -> None:
        self.count = 0

    async def judge(self, turn: JudgedTurn) -> Verdict:
        self.count += 1
        return Verdict(score=1.0 if self.count % 2 else -1.0)


@pytest.fixture
def online_config(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., object]:
    def make(*overrides: str) -> object:
        settings = [
            f"tokenizer_path={tiny_model_dir}",
            f"fileroot={tmp_path}",
            "stats_logger.console=false",
            "rollout.agent.mode=online",
            "rollout.consumer_batch_size=2",
            "total_train_steps=2",
            "actor.reward_norm={mean_level: running, std_level: null}",
            "actor.optimizer.lr=0.01",
            "engine.max_seq_len=256",
        ]
        return load_config(None, [*settings, *overrides])

    return make


def test_training_from_conversations_while_they_go_on(online_config: Callable) -> None:
    """Two steps of the trainer, no failed request, and versions that are exact for each token."""
    config = online_config("online.judge.votes=1")
    with PPOTrainer(config) as trainer:
        service = trainer.source
        trainer.source.learner._judge = Echo()
        before = [parameter.clone() for parameter in trainer.engine.model.parameters()]
        done = threading.Event()
        failures: list[BaseException] = []

        def use() -> None:
            try:
                while not done.is_set():
                    with client_of(service, "ann") as client:
                        messages: list = []
                        for _ in range(3):
                            say(client, messages[-2:], "hello", max_tokens=4)
                            say(client, messages, "hello", max_tokens=4)
            except BaseException as error:  # the thread's edge; the test raises it
                failures.append(error)

        user = threading.Thread(target=use)
        user.start()
        steps = []
        trainer.train(on_step=lambda report: steps.append(report.stats))
        done.set()
        user.join()
        assert failures == []
        assert service.version == 2
        assert all("online/score" in stats for stats in steps)
        after = trainer.engine.model.parameters()
        assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert (trainer.run_dir / "turns.jsonl").exists()


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("actor.reward_norm={mean_level: group}", "mean_level=running"),
        ("online.method=combine", "distillation.weight"),
    ],
)
def test_settings_that_could_teach_nothing_are_refused(
    online_config: Callable, override: str, complaint: str
) -> None:
    """Case B94: a group of one with a group's baseline has no signal."""
    with pytest.raises(ConfigError, match=complaint):
        PPOTrainer(online_config(override))


def test_a_state_that_cannot_be_written_does_not_end_the_serving(
    online_config: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk took the model away from all users; where nobody is served it ends the run."""

    def fail(replica: object) -> None:
        raise CheckpointError("no space left")

    with PPOTrainer(online_config("recover.mode=auto", "recover.freq_steps=1")) as trainer:
        monkeypatch.setattr(trainer._recovery, "save", fail)
        trainer._num_steps = 1  # of 2
        trainer._keep_step()
        assert "serving goes on, and the state is written when it is due again: no space" in (
            caplog.text
        )
        trainer._num_steps = 2
        with pytest.raises(CheckpointError, match="no space left"):
            trainer._keep_step()

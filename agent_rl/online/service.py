"""OnlineService: a gateway in a thread of its own, and the learner that listens to it.

It serves from ``start`` to ``close`` without a break; the trainer outside takes batches with
``drain`` and wraps weight updates in ``updating``. This file only puts the parts together.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import GatewayConfig, OnlineConfig
from agent_rl.engine.base import InferenceEngine
from agent_rl.errors import ConfigError
from agent_rl.gateway.server import Gateway
from agent_rl.loop_thread import LoopThread
from agent_rl.online.hints import HintJudge, HintSource
from agent_rl.online.judge import TurnJudge
from agent_rl.online.judge_model import JudgeModel
from agent_rl.online.learner import OnlineLearner
from agent_rl.online.patience import TimedHints, TimedJudge
from agent_rl.online.redact import Redactor, redact
from agent_rl.online.sample_journal import SampleJournal
from agent_rl.online.teacher import Teacher
from agent_rl.online.turn_store import TurnStore
from agent_rl.online.verdict import Judge
from agent_rl.types import GenerationConfig, TensorDict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class OnlineService:
    """Serves ``engine`` to users and makes training batches of what they do.

        with OnlineService(engine, tokenizer, config.online, config.gateway) as service:
            print(service.base_url, service.api_key)
            batch = service.drain(8)

    Args:
        run_dir: judged turns go to ``turns.jsonl`` in it; None: nowhere.
        model: a name for the weights whose versions the engine counts. With it, samples wait in
            ``samples.journal`` as well, where the next process finds what its version has not
            learnt; None: a killed process loses what waits.
        judge, hints: in place of the model that ``online.judge`` names; ``timeout_s`` of it bounds
            each call.
        redactor: in place of the built-in patterns.
        top_k: the teacher's most likely tokens to distil; 0: only the sampled one.

    Raises:
        ConfigError: a prompt template or the address cannot be used, the engine cannot score, or
            the gateway's journal would store what is to be redacted.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        config: OnlineConfig | None = None,
        gateway: GatewayConfig | None = None,
        *,
        run_dir: Path | None = None,
        model: str | None = None,
        judge: Judge | None = None,
        hints: HintSource | None = None,
        redactor: Redactor = redact,
        top_k: int = 0,
    ) -> None:
        self.config = config = config or OnlineConfig()
        _check_privacy(config, gateway)
        self._engine = engine
        self.judge_model = _judge_model(engine, tokenizer, config)
        needs_score, needs_hint = config.method != "opd", config.method != "binary"
        store, journal = None, None
        if run_dir is not None and config.record_turns:
            store = TurnStore(run_dir / "turns.jsonl", config.privacy, redactor=redactor)
            if model is not None:
                journal = SampleJournal(
                    run_dir / "samples.journal",
                    config.privacy,
                    tokenizer,
                    model=model,
                    max_trained=config.queue_size,
                    redactor=redactor,
                )
        if judge is not None:
            judge = TimedJudge(judge, config.judge.timeout_s)
        teacher = None
        if needs_hint:
            hints = (
                HintJudge(self.judge_model, min_chars=config.min_hint_chars)
                if hints is None
                else TimedHints(hints, config.judge.timeout_s)
            )
            teacher = Teacher(engine, top_k=top_k, max_concurrent=config.teacher_max_concurrent)
        self.learner = OnlineLearner(
            config,
            judge=(judge or TurnJudge(self.judge_model)) if needs_score else None,
            hints=hints if needs_hint else None,
            teacher=teacher,
            store=store,
            journal=journal,
        )
        self.gateway = Gateway(engine, tokenizer, gateway, listener=self.learner)
        self._thread: LoopThread | None = None

    @property
    def base_url(self) -> str:
        """Where an OpenAI client finds the model."""
        return self.gateway.base_url

    @property
    def api_key(self) -> str:
        """For users; sessions are named by X-Session-Id."""
        return self.gateway.api_key

    @property
    def version(self) -> int:
        """Of the weights that are served."""
        return self._engine.get_version()

    def start(self) -> None:
        """
        Raises:
            ConfigError: the address cannot be bound.
            JournalError: the samples on disk are damaged or of another model.
        """
        self._thread = LoopThread("service")
        try:
            self.learner.restore(self.version)
            self._call(self.gateway.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop serving, then judging; a ``drain`` that waits raises. May be called twice."""
        if self._thread is not None:
            self._call(self.gateway.close())
            self._call(self.learner.close())
            self._call(self.judge_model.close())
            self._end_thread()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def drain(self, batch_size: int) -> list[TensorDict]:
        """See ``OnlineLearner.drain``."""
        return self.learner.drain(batch_size, version=self.version)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around a weight update, after which the engine serves what was drained before.

        With ``update_mode`` gate, new requests get 503 inside. A version that did not rise has
        learnt nothing.
        """
        before = self.version
        with self.learner.updating():
            yield
        if self.version > before:
            self.learner.note_trained(self.version)

    def note_saved(self, version: int) -> None:
        """See ``OnlineLearner.note_saved``."""
        self.learner.note_saved(version)

    def forget(self, *, session_id: str | None = None, user_id: str | None = None) -> int:
        """Delete all that is held of a session, or of a user: record, samples and stored turns.

        Returns how many there were. Raises ValueError unless exactly one of both is given.
        """
        count = self._call(self.learner.forget(session_id=session_id, user_id=user_id))
        return count + self._call(self.gateway.forget(session_id=session_id, user_id=user_id))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._thread is not None, "the service was not started"
        return self._thread.call(coroutine)

    def _end_thread(self) -> None:
        assert self._thread is not None, "the service was started"
        self._thread.close()
        self._thread = None


def _check_privacy(config: OnlineConfig, gateway: GatewayConfig | None) -> None:
    if gateway is not None and gateway.journal is not None and config.privacy.redact:
        raise ConfigError(
            "gateway.journal keeps conversations word for word, token ids too; set it to null, "
            "or online.privacy.redact=false to allow it"
        )


def _judge_model(
    engine: InferenceEngine, tokenizer: PreTrainedTokenizerBase, config: OnlineConfig
) -> JudgeModel:
    """Of the endpoint that the config names, else the policy itself."""
    if config.judge.base_url is not None:
        return JudgeModel(None, config.judge)
    sampling = GenerationConfig(temperature=config.judge.temperature)
    return JudgeModel(ArealOpenAI(engine, tokenizer, gconfig=sampling), config.judge)

"""DecodeThread: queue, pause, weight versions and failures around the forward passes.

Public methods may be called from any thread. Invariant: everything that was submitted is answered,
fails with EngineError, or was withdrawn; and no forward pass runs while the thread is held.
Started by the first request, it sleeps when there is nothing to compute.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from agent_rl.engine.decoder import Decoder
from agent_rl.engine.scoring import ScoreJob
from agent_rl.engine.sequence import Sequence
from agent_rl.errors import EngineError


class DecodeThread:
    def __init__(self, decoder: Decoder) -> None:
        self.version = 0
        self._decoder = decoder
        self._waiting: deque[Sequence] = deque()
        self._jobs: deque[ScoreJob] = deque()
        self._aborted_rids: set[str] = set()
        self._on_idle: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._num_holds = 0
        self._is_paused = False
        self._is_computing = False
        self._is_stale = False
        self._is_closed = False

    def submit(self, sequence: Sequence) -> None:
        """Raises EngineError when the thread is closed or broke down."""
        with self._changed:
            self._start()
            self._waiting.append(sequence)

    def score(self, job: ScoreJob) -> None:
        """Compute it between two decode steps, one job at a time. Raises as ``submit``."""
        with self._changed:
            self._start()
            self._jobs.append(job)

    def _start(self) -> None:
        if not self.is_healthy:
            raise self._error()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
            self._thread.start()
            _LIVE.add(self)
            _THREADS.add(self._thread)
        self._changed.notify_all()

    def withdraw(self, sequence: Sequence) -> None:
        """Nobody waits for it any more; its slot is free at the next boundary."""
        with self._changed:
            sequence.is_withdrawn = True
            self._changed.notify_all()

    def abort(self, rid: str) -> None:
        with self._changed:
            self._aborted_rids.add(rid)
            self._changed.notify_all()

    def pause(self) -> None:
        """Start no forward pass; one may still run, see ``when_idle``."""
        with self._changed:
            self._is_paused = True

    def resume(self) -> None:
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No forward pass runs inside the block."""
        with self._changed:
            self._num_holds += 1
            self._changed.wait_for(lambda: not self._is_computing)
        try:
            yield
        finally:
            with self._changed:
                self._num_holds -= 1
                self._changed.notify_all()

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call it once no forward pass is running, here or from the decode thread."""
        with self._changed:
            if self._is_computing:
                self._on_idle.append(callback)
                return
        callback()

    def set_version(self, version: int) -> None:
        """Later forward passes carry it, and all running sequences start over from their ids."""
        with self._changed:
            self.version = version
            self._is_stale = True

    @property
    def is_healthy(self) -> bool:
        return not self._is_closed and self._failure is None

    def stop(self) -> None:
        """Ask the thread to fail what is left and end after the forward pass that is running."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while (version := self._begin()) is not None:
                    self._compute(version)
        except BaseException as error:
            # The edge of the thread: whatever broke, nobody may wait for it forever.
            self._failure = error
        finally:
            self._fail_all()

    def _begin(self) -> int | None:
        """Wait for something to compute; the version it belongs to, or None when closed."""
        with self._changed:
            self._become_idle()
            while not self._is_closed:
                self._start_over_if_stale()
                self._let_go()
                is_held = self._is_paused or self._num_holds > 0
                if not is_held and (self._waiting or self._decoder.running or self._jobs):
                    self._is_computing = True
                    return self.version
                self._changed.wait()
            return None

    def _compute(self, version: int) -> None:
        if self._jobs:
            self._run_job(self._jobs.popleft())
        with self._changed:
            first = list(self._waiting)[: self._decoder.num_free]
        admitted = self._decoder.admit(first)
        with self._changed:
            for sequence in admitted:
                self._waiting.remove(sequence)
        self._decoder.step(version)

    def _run_job(self, job: ScoreJob) -> None:
        if not job.result.set_running_or_notify_cancel():
            return
        try:
            job.result.set_result(self._decoder.score(job))
        except RuntimeError as error:  # torch's, out of memory too: this job's own failure
            job.result.set_exception(EngineError(f"scoring failed: {error}"))
        except BaseException as error:  # it breaks the thread, and this caller must not wait on
            job.result.set_exception(error)
            raise

    def _start_over_if_stale(self) -> None:
        if self._is_stale:
            self._waiting.extendleft(reversed(self._decoder.drop()))
            self._is_stale = False

    def _let_go(self) -> None:
        """Answer the aborted, forget the withdrawn."""
        everyone = (*self._waiting, *self._decoder.running)
        aborted = [s for s in everyone if s.request.rid in self._aborted_rids]
        withdrawn = [s for s in everyone if s.is_withdrawn]
        self._aborted_rids.clear()
        for sequence in aborted:
            sequence.answer("abort")
        leaving = [*aborted, *(s for s in withdrawn if s not in aborted)]
        if leaving:
            self._waiting = deque(s for s in self._waiting if s not in leaving)
            self._decoder.remove([s for s in self._decoder.running if s in leaving])

    def _fail_all(self) -> None:
        with self._changed:
            for sequence in (*self._waiting, *self._decoder.running):
                sequence.mailbox.put(self._error())
            for job in self._jobs:
                if job.result.set_running_or_notify_cancel():
                    job.result.set_exception(self._error())
            self._waiting.clear()
            self._jobs.clear()
            self._decoder.drop()
            self._become_idle()

    def _become_idle(self) -> None:
        self._is_computing = False
        self._changed.notify_all()
        for callback in self._on_idle:
            callback()
        self._on_idle.clear()

    def _error(self) -> EngineError:
        if self._failure is None:
            return EngineError("the engine is closed")
        name = type(self._failure).__name__
        error = EngineError(f"the engine broke down: {name}: {self._failure}")
        error.__cause__ = self._failure
        return error


_LIVE: weakref.WeakSet[DecodeThread] = weakref.WeakSet()
_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread inside torch must not outlive the interpreter: wait for its last forward pass, and,
    where nobody else has the model any more, until it has freed that."""
    for live in list(_LIVE):
        live.stop()
    for thread in list(_THREADS):
        thread.join()

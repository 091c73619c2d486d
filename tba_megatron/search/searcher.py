"""A searcher: generate and score all the time, take new weights between two engine steps, never wait for the trainer.

It waits only when it has no prompts, which is how the trainer throttles it, or while the shards have no room for more.
A trainer that is gone ends nothing: what is in the engine goes on, and what was generated waits for the next trainer.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from tba_megatron.config import Config
from tba_megatron.heap import FreedMemory
from tba_megatron.search.engine import ReceiveState, SearchEngine
from tba_megatron.search.evaluate import evaluate
from tba_megatron.search.link import LinkState, TrainerLink
from tba_megatron.search.reference import ReferenceScorer, WrittenGroups
from tba_megatron.search.rollout_maker import RolloutMaker, Visit
from tba_megatron.search.source import sampling_of, takes_every
from tba_megatron.tasks.base import Task
from tba_megatron.transport.control_client import ControlChannel
from tba_megatron.transport.messages import (
    Applied,
    Beat,
    Evaluate,
    Evaluated,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Offer,
    Probed,
    ReceiveFailed,
    Refused,
    Stop,
    ToSearcher,
    Unknown,
    Welcome,
)
from tba_megatron.transport.rendezvous import Rendezvous
from tba_megatron.transport.rollout_sender import RolloutSender
from tba_megatron.transport.rollouts import RolloutOutbox
from tba_megatron.types import PolicyVersion, SamplingSettings, StopReason, Tokenizer

_log = logging.getLogger(__name__)

IDLE_POLL_S = 0.02
RECEIVING_POLL_S = 0.002  # weights that have come are to be used at once
TRAINER_GONE = 75  # exit code (EX_TEMPFAIL): come back when there is a trainer again
_HAND_OVER_S = 5.0  # for acknowledgements, before goodbye is said to a trainer that ends


class Searcher:
    """One incarnation. ``name`` is unique for ever.

    ``rendezvous`` is the trainer to join first, ``find`` finds later ones, ``dial`` and ``connect`` open channels.
    ``reference`` scores what is written before it is sent; None where the trainer does.
    """

    def __init__(
        self,
        *,
        config: Config,
        engine: SearchEngine,
        task: Task,
        tokenizer: Tokenizer,
        name: str,
        host: str,
        rendezvous: Rendezvous,
        find: Callable[[], Rendezvous | None],
        dial: Callable[[Rendezvous], ControlChannel],
        connect: Callable[[Sequence[str], str, str], RolloutOutbox] = RolloutSender,
        reference: ReferenceScorer | None = None,
    ) -> None:
        self._config, self._engine, self._task, self._tokenizer = config, engine, task, tokenizer
        self._name, self._host, self._connect = name, host, connect
        self._rendezvous, self._find, self._dial = rendezvous, find, dial
        self._maker = RolloutMaker(config.objective, task, tokenizer, name, config.search.source)
        # A few wait outside the engine: who asks when one has finished generates a step or two without it.
        self._most_prompts = config.search.prompts_in_engine + max(1, config.search.prompts_in_engine // 4)
        self._outbox: RolloutOutbox | None = None  # once a trainer was joined
        self._queue: deque[Visit] = deque()  # leased, not yet in the engine
        self._visits: dict[str, Visit] = {}  # in the engine, by request id
        self._written = WrittenGroups(self._maker, reference)
        self._evaluations: deque[PolicyVersion] = deque()
        self._evaluating = False
        self._requests = 0
        self._received_prompts = 0
        self._busy_s = self._waiting_s = self._paused_before_s = 0.0
        self._beat_s = self._sampled_s = time.monotonic()
        self._asked_prompts = 0  # received and wanted, when it last asked
        self._newest = engine.version  # of the trainer, as far as is known
        self._receiving: Offer | None = None
        self._round = -1  # of the newest offer
        self._staged = False
        self._draining = False
        self._hand_over_until_s: float | None = None  # the trainer ends, and the run does not
        self._stopping: str | None = None
        self._freed = FreedMemory()

    @property
    def generated(self) -> int:
        return self._maker.generated

    def run(self) -> int:
        """Search until the run has ended, a signal arrives, or there is no trainer for too long; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._link = TrainerLink(
            self._config.transport, self._rendezvous, find=self._find, dial=self._dial, hello=self._hello
        )
        while self._stopping is None:
            idle_from_s = time.monotonic()
            for message in self._link.poll(self._patience_s()):
                self._handle(message)
            if not self._link.tend():
                return self._give_up()
            if self._outbox is None:
                continue
            self._take_weights()
            self._evaluate_if_asked(self._outbox)
            if self._outbox.room and not self._draining:
                self._fill_engine()
            self._beat()
            self._freed.tend()
            if self._under_way:
                self._generate(self._outbox)
            else:
                self._waiting_s += time.monotonic() - idle_from_s
            self._outbox.flush()
            self._hand_over(self._outbox)
        return self._leave()

    def _patience_s(self) -> float:
        """How long to wait for a message: not at all while there is something to generate."""
        if self._under_way:
            return 0.0
        return RECEIVING_POLL_S if self._receiving is not None else IDLE_POLL_S

    @property
    def _under_way(self) -> int:
        """Prompts that were begun and are not sent yet."""
        return self._engine.n_unfinished + self._written.n_waiting

    @property
    def _paused_s(self) -> float:
        """Seconds that new weights took from generating."""
        return self._engine.paused_s + self._engine.recompute_s - self._paused_before_s

    @property
    def _idle_s(self) -> float:
        return self._waiting_s + self._paused_s

    def _on_signal(self, number: int, frame: object) -> None:
        self._stopping = signal.Signals(number).name

    # ---- joining and leaving

    def _hello(self) -> Hello:
        return Hello(
            token="",
            searcher=self._name,
            host=self._host,
            workers=self._engine.workers,
            version=str(self._engine.version),
            source=self._config.search.source,
            takes_every=takes_every(self._config),
            prompts=self._task.n_train,
            generated=self.generated,
        )

    def _welcome(self, message: Welcome) -> None:
        """Joined. What another trainer had asked for is of no interest to this one; what was generated is."""
        self._newest = PolicyVersion.parse(message.newest)
        if self._outbox is None:
            self._outbox = self._connect(message.shards, self._link.token, self._name)
        else:
            self._outbox.reconnect(message.shards, self._link.token)
        self._queue.clear()  # they are leased anew
        self._evaluations.clear()
        self._evaluating = False
        self._received_prompts = self._asked_prompts = 0
        self._receiving, self._round, self._staged, self._draining = None, -1, False, False
        self._count_seconds_anew()
        self._hand_over_until_s = None

    def _count_seconds_anew(self) -> None:
        self._busy_s = self._waiting_s = 0.0
        self._paused_before_s = self._engine.paused_s + self._engine.recompute_s

    def _hand_over(self, outbox: RolloutOutbox) -> None:
        """To a trainer that ends: say goodbye once it has all that was generated, and wait for the next one."""
        until_s = self._hand_over_until_s
        if until_s is not None and (not outbox.unacknowledged or time.monotonic() > until_s):
            self._hand_over_until_s = None
            self._say_goodbye()
            self._link.wait_for_next()

    def _give_up(self) -> int:
        _log.warning("no trainer for %g s; leaving", self._config.transport.patience_s)
        if self._outbox is not None:
            self._outbox.close(linger_s=0.0)
        self._say_goodbye()  # one that is only slow hears it
        self._link.close(linger_s=0.0)
        self._engine.close()
        self._written.close()
        return TRAINER_GONE

    def _leave(self) -> int:
        self._engine.abort_all()
        if self._outbox is not None:
            self._outbox.close()
        self._say_goodbye()
        self._link.close()
        self._engine.close()
        self._written.close()
        _log.info("searcher %s leaves (%s) after %d rollouts", self._name, self._stopping, self.generated)
        return 0

    def _say_goodbye(self) -> None:
        if self._link.state is LinkState.ASKING:
            self._count_seconds_anew()  # those so far were another trainer's
        self._link.send(
            Goodbye(generated=self.generated, busy_s=self._busy_s, idle_s=self._idle_s, paused_s=self._paused_s)
        )

    # ---- messages

    def _handle(self, message: ToSearcher) -> None:
        match message:
            case Welcome():
                self._welcome(message)
            case Lease():
                self._received_prompts += message.count
                for position in range(message.start, message.start + message.count):
                    prompt = self._task.train_prompt(position)
                    self._queue.append(Visit(lease=message.lease, position=position, prompt=prompt))
            case Offer():
                if message.round > self._round:  # one that comes after a newer one is called off already
                    self._receiving, self._round, self._staged = message, message.round, False
                    self._engine.begin_receive(message, self._config.weights.timeout_s)
            case Evaluate():
                version = PolicyVersion.parse(message.version)
                begun = self._evaluating and version == self._engine.version
                if not begun and version not in self._evaluations:  # asked again, though the question had come
                    self._evaluations.append(version)
            case Stop():
                if message.final:
                    self._stopping = message.reason
                else:
                    self._queue.clear()
                    self._hand_over_until_s = time.monotonic() + _HAND_OVER_S
            case Beat():
                self._newest = PolicyVersion.parse(message.newest)
            case Refused() | Unknown():
                pass  # the link has dealt with them

    def _beat(self) -> None:
        now_s = time.monotonic()
        wanted = max(0, self._most_prompts - self._under_way - len(self._queue))
        due = now_s - self._beat_s >= self._config.transport.heartbeat_s
        self._tell_sample(now_s)
        asked = self._received_prompts + wanted
        if not due and asked <= self._asked_prompts:
            return
        self._beat_s, self._asked_prompts = now_s, asked
        self._link.send(
            Heartbeat(
                generated=self.generated,
                busy_s=self._busy_s,
                idle_s=self._idle_s,
                paused_s=self._paused_s,
                version=str(self._engine.version),
                wanted_prompts=wanted,
                received_prompts=self._received_prompts,
                evaluates=self._evaluating or bool(self._evaluations),
            )
        )

    def _tell_sample(self, now_s: float) -> None:
        # On a clock of its own: a busy searcher asks for prompts more often than heartbeats are due.
        if now_s - self._sampled_s < self._config.transport.heartbeat_s:
            return
        self._sampled_s = now_s
        sample = self._maker.take_sample()
        if sample is not None:
            self._link.send(sample)

    # ---- weights

    def _watch_receive(self) -> None:
        """How the receive stands; a failure is told at once."""
        offer = self._receiving
        if offer is None or self._staged:
            return
        status = self._engine.poll_receive()
        self._staged = status.state is ReceiveState.STAGED
        # A newer offer may come before the engine is empty: it goes on draining, or it would never be.
        self._draining |= self._staged and self._config.search.in_flight == "drain"
        if status.state is ReceiveState.FAILED:
            _log.warning("version %s did not arrive: %s", offer.version, status.reason)
            self._link.send(ReceiveFailed(version=offer.version, round=offer.round, reason=status.reason))
        if status.state in (ReceiveState.FAILED, ReceiveState.NONE):
            self._receiving, self._draining = None, False

    def _take_weights(self) -> None:
        """Apply a version that has arrived whole."""
        self._watch_receive()
        if self._receiving is not None and self._staged and not (self._draining and self._engine.n_unfinished):
            self._apply(self._receiving)
            self._receiving, self._staged, self._draining = None, False, False

    def _apply(self, offer: Offer) -> None:
        paused_s = self._engine.paused_s
        self._engine.apply()
        self._link.send(Applied(version=offer.version, pause_s=self._engine.paused_s - paused_s))
        if offer.probe:
            started_s, recompute_s = time.monotonic(), self._engine.recompute_s
            (logprobs,) = self._engine.score([np.array(offer.probe, np.int32)])
            self._worked(started_s, recompute_s)  # its steps serve everything in flight
            self._link.send(Probed(version=offer.version, logprobs_nats=tuple(logprobs.tolist())))

    # ---- evaluation

    def _evaluate_if_asked(self, outbox: RolloutOutbox) -> None:
        if not self._evaluations or self._evaluations[0] != self._engine.version:
            return
        version = self._evaluations.popleft()
        self._engine.abort_all()
        self._queue.extendleft(reversed(self._visits.values()))
        self._visits.clear()
        config = self._config.evaluation
        self._evaluating = True
        done = evaluate(
            self._engine,
            self._task,
            config,
            SamplingSettings(
                n=config.samples_per_problem,
                temperature=config.temperature,
                top_p=1.0,
                max_new_tokens=self._config.search.max_new_tokens,
                eos_ids=self._tokenizer.eos_ids,
            ),
            in_engine=self._config.search.prompts_in_engine,
            go_on=lambda: self._go_on(outbox),
        )
        self._evaluating = False
        if done is None:
            self._engine.abort_all()  # what is left of it in the engine is nobody's visit
            return
        self._link.send(
            Evaluated(version=str(version), accuracy=done.accuracy, problems=done.problems, seconds=done.seconds)
        )

    def _go_on(self, outbox: RolloutOutbox) -> bool:
        """Between two steps of an evaluation: hear and be heard."""
        for message in self._link.poll(0.0):
            self._handle(message)
        self._link.tend()
        self._watch_receive()
        self._written.send(outbox, self._newest)
        outbox.flush()
        self._beat()
        return self._stopping is None and self._evaluating and self._hand_over_until_s is None

    # ---- generation

    def _fill_engine(self) -> None:
        in_engine = self._config.search.prompts_in_engine
        while self._queue and self._engine.n_unfinished < in_engine and self._under_way < self._most_prompts:
            visit = self._queue.popleft()
            self._requests += 1
            request_id = f"{self._requests}"
            self._visits[request_id] = visit
            sampling = sampling_of(self._config, self._tokenizer.eos_ids, self._engine.version.step)
            self._engine.submit(request_id, visit.prompt.token_ids, sampling)

    def _generate(self, outbox: RolloutOutbox) -> None:
        started_s, recompute_s = time.monotonic(), self._engine.recompute_s
        for request_id, completions in self._engine.step() if self._engine.n_unfinished else ():
            visit = self._visits.pop(request_id)
            finished = [c for c in completions if c.stop_reason is not StopReason.ABORT]
            if finished:
                self._written.add(visit, finished)
            else:
                self._queue.append(visit)  # its lease is open until a group arrives
        self._written.send(outbox, self._newest)
        self._worked(started_s, recompute_s)

    def _worked(self, since_s: float, recompute_s: float) -> None:
        """The time since then was generating and scoring, but for what was computed again."""
        self._busy_s += time.monotonic() - since_s - (self._engine.recompute_s - recompute_s)

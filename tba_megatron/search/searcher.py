"""A searcher: generate and score all the time, take new weights between two engine steps, never wait for the trainer.

It waits only when it has no prompts, which is how the trainer throttles it, or while the shards have no room for more.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tba_megatron.config import Config
from tba_megatron.errors import TransportError
from tba_megatron.search.engine import ReceiveState, SearchEngine
from tba_megatron.search.evaluate import evaluate
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
    SampleRollout,
    Stop,
    ToSearcher,
    Welcome,
)
from tba_megatron.transport.rollout_sender import RolloutSender
from tba_megatron.transport.rollouts import RolloutOutbox
from tba_megatron.types import (
    Completion,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    RolloutId,
    SamplingSettings,
    StopReason,
    Tokenizer,
)

_log = logging.getLogger(__name__)

IDLE_POLL_S = 0.02
RECEIVING_POLL_S = 0.002  # weights that have come are to be used at once
TRAINER_GONE = 75  # exit code (EX_TEMPFAIL): come back when there is a trainer again


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """A prompt that was leased: ``position`` in the task's stream."""

    lease: int
    position: int
    prompt: Prompt


class Searcher:
    """One incarnation. ``name`` is unique for ever; ``source`` says in each rollout where it came from."""

    def __init__(
        self,
        *,
        config: Config,
        engine: SearchEngine,
        task: Task,
        tokenizer: Tokenizer,
        control: ControlChannel,
        token: str,
        name: str,
        host: str,
        source: str = "searcher",
        connect: Callable[[Sequence[str], str, str], RolloutOutbox] = RolloutSender,
    ) -> None:
        self._config, self._engine, self._task, self._tokenizer = config, engine, task, tokenizer
        self._control, self._token, self._name, self._host = control, token, name, host
        self._source, self._connect = source, connect
        self._sampling = SamplingSettings(
            n=config.search.completions_per_prompt,
            temperature=config.search.temperature,
            top_p=config.search.top_p,
            max_new_tokens=config.search.max_new_tokens,
            eos_ids=tokenizer.eos_ids,
        )
        # A few wait outside the engine: who asks when one has finished generates a step or two without it.
        self._most_prompts = config.search.prompts_in_engine + max(1, config.search.prompts_in_engine // 4)
        self._queue: deque[Visit] = deque()  # leased, not yet in the engine
        self._visits: dict[str, Visit] = {}  # in the engine, by request id
        self._evaluations: deque[PolicyVersion] = deque()
        self._next_sequence = 0
        self._requests = 0
        self.generated = 0
        self._received_prompts = 0
        self._busy_s = self._waiting_s = 0.0
        self._heard_s = self._beat_s = self._sampled_s = time.monotonic()
        self._asked_prompts = 0  # received and wanted, when it last asked
        self._receiving: Offer | None = None
        self._staged = False
        self._draining = False
        self._sample: SampleRollout | None = None
        self._stopping: str | None = None

    def run(self) -> int:
        """Search until the trainer says stop, a signal arrives, or the trainer is gone; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        sender = self._join()
        while self._stopping is None:
            idle_from_s = time.monotonic()
            for message in self._control.poll(self._patience_s()):
                self._handle(message)
            # Its mail has been read: a searcher that was suspended does not take its own silence for the trainer's.
            silent = idle_from_s - self._heard_s > self._config.transport.lease_s
            self._take_weights()
            self._evaluate_if_asked(sender)
            if sender.room and not self._draining:
                self._fill_engine()
            self._beat()
            if self._engine.n_unfinished:
                self._generate(sender)
            else:
                self._waiting_s += time.monotonic() - idle_from_s
            sender.flush()
            if silent:
                _log.warning("the trainer was silent for %g s; leaving", self._config.transport.lease_s)
                sender.close(linger_s=0.0)
                self._say_goodbye()  # one that is only slow hears it
                self._control.close(linger_s=0.0)
                return TRAINER_GONE
        return self._leave(sender)

    def _patience_s(self) -> float:
        """How long to wait for a message: not at all while there is something to generate."""
        if self._engine.n_unfinished:
            return 0.0
        return RECEIVING_POLL_S if self._receiving is not None else IDLE_POLL_S

    @property
    def _paused_s(self) -> float:
        """Seconds that new weights took from generating."""
        return self._engine.paused_s + self._engine.recompute_s

    @property
    def _idle_s(self) -> float:
        return self._waiting_s + self._paused_s

    def _on_signal(self, number: int, frame: object) -> None:
        self._stopping = signal.Signals(number).name

    # ---- joining and leaving

    def _join(self) -> RolloutOutbox:
        self._control.send(
            Hello(
                token=self._token,
                searcher=self._name,
                host=self._host,
                workers=self._engine.workers,
                version=str(self._engine.version),
            )
        )
        deadline_s = time.monotonic() + self._config.transport.lease_s
        outbox: RolloutOutbox | None = None
        while outbox is None and time.monotonic() < deadline_s and self._stopping is None:
            for message in self._control.poll(0.2):
                self._handle(message)  # an offer may come in one breath with the welcome
                if isinstance(message, Welcome):
                    outbox = self._connect(message.shards, self._token, self._name)
                elif isinstance(message, Refused):
                    raise TransportError(f"the trainer refused this searcher: {message.reason}")
        if outbox is not None:
            return outbox
        if self._stopping is not None:
            return self._connect((), self._token, self._name)
        raise TransportError(f"no trainer answered within {self._config.transport.lease_s} s; is it still running?")

    def _leave(self, sender: RolloutOutbox) -> int:
        self._engine.abort_all()
        sender.close()
        self._say_goodbye()
        self._control.close()
        self._engine.close()
        _log.info("searcher %s leaves (%s) after %d rollouts", self._name, self._stopping, self.generated)
        return 0

    def _say_goodbye(self) -> None:
        self._control.send(
            Goodbye(generated=self.generated, busy_s=self._busy_s, idle_s=self._idle_s, paused_s=self._paused_s)
        )

    # ---- messages

    def _handle(self, message: ToSearcher) -> None:
        self._heard_s = time.monotonic()
        match message:
            case Lease():
                self._received_prompts += message.count
                for position in range(message.start, message.start + message.count):
                    prompt = self._task.train_prompt(position)
                    self._queue.append(Visit(lease=message.lease, position=position, prompt=prompt))
            case Offer():
                self._receiving, self._staged = message, False
                self._engine.begin_receive(message, self._config.weights.timeout_s)
            case Evaluate():
                self._evaluations.append(PolicyVersion.parse(message.version))
            case Stop():
                self._stopping = message.reason
            case Beat() | Welcome() | Refused():
                pass

    def _beat(self) -> None:
        now_s = time.monotonic()
        wanted = max(0, self._most_prompts - self._engine.n_unfinished - len(self._queue))
        due = now_s - self._beat_s >= self._config.transport.heartbeat_s
        self._tell_sample(now_s)
        asked = self._received_prompts + wanted
        if not due and asked <= self._asked_prompts:
            return
        self._beat_s, self._asked_prompts = now_s, asked
        self._control.send(
            Heartbeat(
                generated=self.generated,
                busy_s=self._busy_s,
                idle_s=self._idle_s,
                paused_s=self._paused_s,
                version=str(self._engine.version),
                wanted_prompts=wanted,
                received_prompts=self._received_prompts,
            )
        )

    def _tell_sample(self, now_s: float) -> None:
        # On a clock of its own: a busy searcher asks for prompts more often than heartbeats are due.
        if self._sample is not None and now_s - self._sampled_s >= self._config.transport.heartbeat_s:
            self._control.send(self._sample)
            self._sample, self._sampled_s = None, now_s

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
            self._control.send(ReceiveFailed(version=offer.version, round=offer.round, reason=status.reason))
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
        self._control.send(Applied(version=offer.version, pause_s=self._engine.paused_s - paused_s))
        if offer.probe:
            started_s, recompute_s = time.monotonic(), self._engine.recompute_s
            (logprobs,) = self._engine.score([np.array(offer.probe, np.int32)])
            self._worked(started_s, recompute_s)  # its steps serve everything in flight
            self._control.send(Probed(version=offer.version, logprobs_nats=tuple(logprobs.tolist())))

    # ---- evaluation

    def _evaluate_if_asked(self, sender: RolloutOutbox) -> None:
        if not self._evaluations or self._evaluations[0] != self._engine.version:
            return
        version = self._evaluations.popleft()
        self._engine.abort_all()
        self._queue.extendleft(reversed(self._visits.values()))
        self._visits.clear()
        config = self._config.evaluation
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
            go_on=lambda: self._go_on(sender),
        )
        if done is None:
            return
        self._control.send(
            Evaluated(version=str(version), accuracy=done.accuracy, problems=done.problems, seconds=done.seconds)
        )

    def _go_on(self, sender: RolloutOutbox) -> bool:
        """Between two steps of an evaluation: hear and be heard."""
        for message in self._control.poll(0.0):
            self._handle(message)
        self._watch_receive()
        sender.flush()
        self._beat()
        return self._stopping is None

    # ---- generation

    def _fill_engine(self) -> None:
        while self._queue and self._engine.n_unfinished < self._config.search.prompts_in_engine:
            visit = self._queue.popleft()
            self._requests += 1
            request_id = f"{self._requests}"
            self._visits[request_id] = visit
            self._engine.submit(request_id, visit.prompt.token_ids, self._sampling)

    def _generate(self, sender: RolloutOutbox) -> None:
        started_s, recompute_s = time.monotonic(), self._engine.recompute_s
        for request_id, completions in self._engine.step():
            visit = self._visits.pop(request_id)
            finished = [c for c in completions if c.stop_reason is not StopReason.ABORT]
            if finished:
                sender.send(self._score(visit, finished))
            else:
                self._queue.append(visit)  # its lease is open until a group arrives
        self._worked(started_s, recompute_s)

    def _worked(self, since_s: float, recompute_s: float) -> None:
        """The time since then was generating and scoring, but for what was computed again."""
        self._busy_s += time.monotonic() - since_s - (self._engine.recompute_s - recompute_s)

    def _score(self, visit: Visit, completions: Sequence[Completion]) -> RolloutGroup:
        """Completions become rollouts; they count as generated before they are sent."""
        scores = self._task.score(visit.prompt, completions)
        objective = self._config.objective
        rollouts = []
        for completion, score in zip(completions, scores, strict=True):
            truncated = completion.stop_reason is StopReason.LENGTH
            penalty = objective.truncated_penalty if truncated and objective.truncated == "penalise" else 0.0
            rollouts.append(
                Rollout(
                    rollout_id=RolloutId(self._name, self._next_sequence),
                    token_ids=completion.token_ids,
                    reward=score - penalty,
                    stop_reason=completion.stop_reason,
                    spans=completion.spans,
                    source=self._source,
                    behaviour_logprobs=completion.behaviour_logprobs,
                )
            )
            self._next_sequence += 1
        self.generated += len(rollouts)
        self._keep_sample(visit.prompt, rollouts[0])
        return RolloutGroup(
            prompt_id=visit.prompt.prompt_id,
            prompt_token_ids=visit.prompt.token_ids,
            rollouts=tuple(rollouts),
            lease=visit.lease,
        )

    def _keep_sample(self, prompt: Prompt, rollout: Rollout) -> None:
        """One rollout a heartbeat, as text."""
        if self._sample is None and math.isfinite(rollout.reward):
            self._sample = SampleRollout(
                prompt=self._tokenizer.decode(prompt.token_ids),
                completion=self._tokenizer.decode(rollout.token_ids),
                reward=rollout.reward,
                version=str(rollout.version),
            )


def new_name(host: str) -> str:
    """A name for this start of a searcher: host, process and a random part."""
    return f"{host}-{os.getpid()}-{os.urandom(4).hex()}"

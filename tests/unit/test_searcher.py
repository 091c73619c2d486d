"""A searcher's life, first with an in-process trainer that follows a script, then in a process of its own."""

import dataclasses
import gc
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tba_megatron.config import Config
from tba_megatron.config_search import FakeEngineConfig
from tba_megatron.config_sections import CopyTask
from tba_megatron.errors import TransportError
from tba_megatron.models.tokenizer import HfTokenizer
from tba_megatron.rollout_batch import decode
from tba_megatron.search.fake_engine import FakeEngine, FakeReference
from tba_megatron.search.rollout_maker import new_name
from tba_megatron.search.searcher import TRAINER_GONE, Searcher
from tba_megatron.tasks.registry import make_task
from tba_megatron.transport.control import ControlServer
from tba_megatron.transport.control_client import ControlClient
from tba_megatron.transport.fleet import FleetSettings
from tba_megatron.transport.memory import MemoryControl, MemoryRollouts
from tba_megatron.transport.messages import (
    Beat,
    Evaluate,
    Evaluated,
    FromSearcher,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Refused,
    SampleRollout,
    Stop,
    ToSearcher,
    Unknown,
    Welcome,
)
from tba_megatron.transport.registry import PromptLeases
from tba_megatron.transport.rendezvous import Rendezvous, read_rendezvous, write_rendezvous
from tba_megatron.transport.rollout_sender import RolloutSender
from tba_megatron.transport.rollouts import RolloutInbox, RolloutReceiver
from tba_megatron.transport.sockets import Listen
from tba_megatron.types import LogPosition, PolicyVersion, RolloutGroup, RolloutId, StopReason

MODEL = Path(__file__).parents[2] / "configs" / "tiny_qwen2"
TOKENIZER = HfTokenizer(MODEL)
TASK = make_task(CopyTask(length=2), TOKENIZER, 0, 16)
TOKEN = "of-this-run"
V0 = PolicyVersion(0, 0)
RENDEZVOUS = Rendezvous(address="there", host="here", token=TOKEN, attempt=0, weights="unused")
LOOPBACK = Listen(sockets="tcp", host="127.0.0.1", folder=Path("unused"))
S = 3  # completions for each prompt


@pytest.fixture
def weights(tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def handlers():
    """A searcher that runs in this process takes its signal handlers away again."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def config_of(**overrides) -> Config:
    sections = {
        "run": {"folder": "unused"},
        "model": {"path": str(MODEL), "max_length": 16},
        "task": {"kind": "copy", "length": 2},
        "trainer": {"optimizer": {"learning_rate": 1e-3}, "prompts_per_step": 4},
        "objective": {"loss": {"kind": "tb_vargrad", "beta": 0.1}},
        "transport": {"heartbeat_s": 0.01, "lease_s": 10.0},
        "search": {
            "engine": {"kind": "fake"},
            "completions_per_prompt": S,
            "max_new_tokens": 6,
            "prompts_in_engine": 4,
        },
        "evaluation": {"problems": 5, "samples_per_problem": 2},
    }
    for section, values in overrides.items():
        sections[section] = sections[section] | values
    return Config.model_validate(sections)


def right_answer(prompt: np.ndarray) -> np.ndarray:
    return prompt[:-1]


def fake_engine(weights: Path, kind: type[FakeEngine] = FakeEngine, **config) -> FakeEngine:
    return kind(weights, FakeEngineConfig(**config), version=V0, seed=0, answer=right_answer)


def searcher_of(
    config: Config, engine: FakeEngine, control, connect=RolloutSender, task=TASK, name="me", reference=None
) -> Searcher:
    return Searcher(
        config=config,
        engine=engine,
        task=task,
        tokenizer=TOKENIZER,
        name=name,
        host="here",
        rendezvous=RENDEZVOUS,
        find=lambda: RENDEZVOUS,
        dial=lambda found: control,
        connect=connect,
        reference=reference,
    )


# ---- with a scripted trainer in this process


class Script(MemoryControl):
    """A trainer that answers each message by a function of it."""

    def __init__(self, answer: Callable[[FromSearcher], Iterable[ToSearcher]]) -> None:
        super().__init__()
        self._answer = answer

    def send(self, message: FromSearcher) -> None:
        super().send(message)
        for answer in self._answer(message):
            self.tell(answer)

    def heard_of(self, kind: type) -> list:
        return [message for message in self.heard if isinstance(message, kind)]


def until(generated: int, *, prompts: int, then: Iterable[ToSearcher] = ()):
    """Lease ``prompts`` in two leases, add ``then``, and stop once ``generated`` rollouts are reported."""

    def answer(message: FromSearcher) -> Iterable[ToSearcher]:
        match message:
            case Hello():
                half = prompts // 2
                yield Welcome(shards=("memory",), newest="0.0")
                yield Lease(lease=0, start=0, count=half)
                yield Lease(lease=1, start=half, count=prompts - half)
                yield from then
            case Heartbeat():
                yield Stop(reason="enough") if message.generated >= generated else Beat(newest="0.0")

    return Script(answer)


@dataclasses.dataclass
class Ran:
    code: int
    searcher: Searcher
    groups: list[RolloutGroup]


def groups_of(inbox: RolloutInbox) -> list[RolloutGroup]:
    return [group for arrival in inbox.drain() for group in arrival.batch.groups()]


def run_here(config: Config, engine: FakeEngine, control: Script, *, task=TASK, reference=None) -> Ran:
    rollouts = MemoryRollouts()
    searcher = searcher_of(config, engine, control, lambda shards, token, name: rollouts, task, reference=reference)
    code = searcher.run()
    return Ran(code, searcher, groups_of(rollouts))


def assert_whole(ran: Ran, prompts: int) -> None:
    """Every prompt that was leased was visited once, and every rollout has an id of its own."""
    assert sorted(g.prompt_id for g in ran.groups) == sorted(TASK.train_prompt(i).prompt_id for i in range(prompts))
    ids = [r.rollout_id for g in ran.groups for r in g.rollouts]
    assert ids == [RolloutId("me", i) for i in range(len(ids))]
    assert ran.searcher.generated == len(ids)


def test_leased_prompts_become_scored_groups(weights, handlers):
    control = until(9 * S, prompts=9)
    ran = run_here(config_of(), fake_engine(weights), control)
    assert ran.code == 0
    assert_whole(ran, 9)
    assert [g.lease for g in ran.groups] == [0] * 4 + [1] * 5
    for group in ran.groups:
        for rollout in group.rollouts:
            right = TOKENIZER.decode(rollout.token_ids) == TOKENIZER.decode(group.prompt_token_ids)[:-1]
            assert rollout.reward == float(right)
            assert (rollout.version, rollout.source) == (V0, "searcher")
    assert {r.reward for g in ran.groups for r in g.rollouts} == {0.0, 1.0}


def test_what_was_generated_is_counted_before_it_is_sent(weights, handlers):
    counts = []

    class Watched(MemoryRollouts):
        def send(self, group: RolloutGroup) -> None:
            counts.append((searcher.generated, group.rollouts[-1].rollout_id.sequence + 1))

    control = until(6 * S, prompts=6)
    searcher = searcher_of(config_of(), fake_engine(weights), control, lambda shards, token, name: Watched())
    searcher.run()
    assert counts == [(S * i, S * i) for i in range(1, 7)]


def test_the_last_word_is_a_goodbye_with_the_final_count(weights, handlers):
    control = until(4 * S, prompts=8)
    ran = run_here(config_of(), fake_engine(weights, tokens_per_step=1), control)
    assert control.heard[0] == Hello(
        token=TOKEN, searcher="me", host="here", workers=1, version="0.0", prompts=TASK.n_train
    )
    last = control.heard[-1]
    assert isinstance(last, Goodbye)
    assert last.generated == ran.searcher.generated == sum(len(g.rollouts) for g in ran.groups)
    assert last.busy_s > 0


def test_a_searcher_never_wants_more_than_its_engine_holds_and_a_few_that_wait(weights, handlers):
    control = until(9 * S, prompts=9)
    run_here(config_of(), fake_engine(weights, tokens_per_step=1), control)
    beats = control.heard_of(Heartbeat)
    assert all(0 <= beat.wanted_prompts <= 4 + 1 for beat in beats)
    assert beats[-1].received_prompts == 9


def test_one_rollout_in_a_while_is_told_as_text(weights, handlers):
    control = until(9 * S, prompts=9)
    run_here(config_of(transport={"heartbeat_s": 1e-9}), fake_engine(weights, tokens_per_step=1), control)
    samples = control.heard_of(SampleRollout)
    assert samples
    assert all(len(sample.prompt) == 3 and sample.prompt.endswith("=") for sample in samples)


class Aborting(FakeEngine):
    """Gives up the first sample of every group, and the whole of the first two groups."""

    groups = 0

    def step(self):
        finished = []
        for request_id, completions in super().step():
            self.groups += 1
            n = len(completions) if self.groups <= 2 else 1
            aborted = tuple(dataclasses.replace(c, stop_reason=StopReason.ABORT) for c in completions[:n])
            finished.append((request_id, aborted + completions[n:]))
        return finished


def test_aborted_completions_never_become_rollouts_and_their_prompt_is_visited_again(weights, handlers):
    engine = fake_engine(weights, Aborting)
    ran = run_here(config_of(), engine, until(5 * (S - 1), prompts=5))
    assert engine.groups == 7
    assert_whole(ran, 5)
    assert {len(g.rollouts) for g in ran.groups} == {S - 1}
    assert all(r.stop_reason is not StopReason.ABORT for g in ran.groups for r in g.rollouts)


@pytest.mark.parametrize(("truncated", "reward"), [("keep", 0.0), ("drop", 0.0), ("penalise", -0.75)])
def test_a_truncated_completion_is_penalised_where_asked(weights, handlers, truncated, reward):
    config = config_of(
        objective={"truncated": truncated, "truncated_penalty": 0.75},
        search={"max_new_tokens": 1},
    )
    ran = run_here(config, fake_engine(weights), until(2 * S, prompts=2))
    rollouts = [r for g in ran.groups for r in g.rollouts]
    assert {r.stop_reason for r in rollouts} == {StopReason.LENGTH}
    assert {r.reward for r in rollouts} == {reward}


def test_a_reward_that_is_no_number_is_counted_and_sent_for_the_shard_to_refuse(weights, handlers):
    class Broken:
        def __getattr__(self, name):
            return getattr(TASK, name)

        def score(self, prompt, completions):
            return [math.nan] * len(completions)

    control = until(2 * S, prompts=2)
    ran = run_here(config_of(), fake_engine(weights), control, task=Broken())
    assert all(math.isnan(r.reward) for g in ran.groups for r in g.rollouts)
    assert ran.searcher.generated == 2 * S
    assert control.heard_of(SampleRollout) == []


class SlowReference(FakeReference):
    """Answers in every second step alone, and notes how much waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.waiting, self.closed = 0, [], False

    def step(self):
        self.steps += 1
        self.waiting.append(self.n_unfinished)
        return super().step() if self.steps % 2 == 0 else []

    def close(self) -> None:
        self.closed = True


def test_what_the_reference_says_of_each_completion_goes_with_it(weights, handlers):
    reference = SlowReference()
    ran = run_here(config_of(), fake_engine(weights), until(9 * S, prompts=9), reference=reference)
    assert ran.code == 0 and reference.closed
    assert_whole(ran, 9)
    sent = [(g.prompt_token_ids, r) for g in ran.groups for r in g.rollouts]
    assert {r.stop_reason for _, r in sent} == {StopReason.EOS}
    for prompt, rollout in sent:
        assert rollout.reference_logprob == reference.logprob(prompt, rollout.token_ids)  # the EOS is one of them
        assert rollout.reference_version == 0
    assert len({r.reference_logprob for _, r in sent}) > 9


def test_without_a_reference_a_rollout_has_none(weights, handlers):
    ran = run_here(config_of(), fake_engine(weights), until(2 * S, prompts=2))
    assert {(r.reference_logprob, r.reference_version) for g in ran.groups for r in g.rollouts} == {(None, None)}


def test_a_truncated_completion_has_its_references_logprob_and_an_empty_one_that_of_no_token(weights, handlers):
    class Empty(FakeEngine):
        def _complete(self, prompt, sampling, sample):
            made = super()._complete(prompt, sampling, sample)
            return dataclasses.replace(made, token_ids=made.token_ids[:0]) if sample == 0 else made

    config, engine = config_of(search={"max_new_tokens": 1}), fake_engine(weights, Empty)
    ran = run_here(config, engine, until(2 * S, prompts=2), reference=SlowReference())
    assert {r.stop_reason for g in ran.groups for r in g.rollouts} == {StopReason.LENGTH}
    for group in ran.groups:
        empty, *others = [r.reference_logprob for r in group.rollouts]
        assert empty == 0.0 and all(value is not None and value < 0.0 for value in others)


def test_groups_that_wait_for_the_reference_hold_back_prompts_and_no_word(weights, handlers):
    reference = SlowReference()
    control = until(40 * S, prompts=40)
    config = config_of(transport={"heartbeat_s": 1e-9})
    ran = run_here(config, fake_engine(weights, tokens_per_step=1000), control, reference=reference)
    assert_whole(ran, 40)
    assert max(reference.waiting) == 4 + 1  # what the engine may hold and a few
    beats = control.heard_of(Heartbeat)
    assert len(beats) >= reference.steps
    assert beats[-1].busy_s > 0


def test_groups_that_wait_for_the_reference_leave_while_an_evaluation_runs(weights, handlers):
    class Watched(MemoryRollouts):
        def send(self, group: RolloutGroup) -> None:
            during.append(searcher._evaluating)
            super().send(group)

    control = until(8 * S, prompts=8)
    answer, asked, during = control._answer, [], []

    def and_evaluate(message: FromSearcher) -> Iterable[ToSearcher]:
        if isinstance(message, Heartbeat) and reference.n_unfinished == 3 and not asked:
            asked.append(True)
            yield Evaluate(version="0.0")
        yield from answer(message)

    control._answer = and_evaluate
    reference = SlowReference()
    config = config_of(transport={"heartbeat_s": 1e-9}, evaluation={"problems": 15})
    engine = fake_engine(weights, tokens_per_step=8)
    searcher = searcher_of(config, engine, control, lambda shards, token, name: Watched(), reference=reference)
    assert searcher.run() == 0
    assert len(control.heard_of(Evaluated)) == 1
    assert sum(during) >= 2 and searcher.generated == 8 * S


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_an_evaluation_gives_the_accuracy_and_every_prompt_is_still_visited(weights, handlers, fraction):
    control = until(9 * S, prompts=9, then=[])
    answer = control._answer
    asked = []

    def and_evaluate(message: FromSearcher) -> Iterable[ToSearcher]:
        if isinstance(message, Heartbeat) and message.generated >= S and not asked:
            asked.append(True)
            yield Evaluate(version="0.0")
        yield from answer(message)

    control._answer = and_evaluate
    engine = fake_engine(weights, correct_fraction=fraction, tokens_per_step=1)
    ran = run_here(config_of(transport={"heartbeat_s": 1e-9}), engine, control)
    (evaluated,) = control.heard_of(Evaluated)
    assert (evaluated.version, evaluated.accuracy, evaluated.problems) == ("0.0", fraction, 5)
    assert_whole(ran, 9)


def test_a_trainer_that_starts_again_during_an_evaluation_costs_the_evaluation_alone(weights, handlers):
    """What is left of it in the engine is none of the prompts that the next trainer leases."""
    hellos = []

    def answer(message: FromSearcher) -> Iterable[ToSearcher]:
        if isinstance(message, Hello):
            hellos.append(message)
            yield Welcome(shards=("ipc:///tmp/none",), newest="0.0")
            yield Evaluate(version="0.0") if len(hellos) == 1 else Lease(lease=1 << 32, start=0, count=2)
        if isinstance(message, Heartbeat):
            if message.evaluates and len(hellos) == 1:
                yield Unknown()  # the next one knows nobody
            if message.generated >= 2 * S:
                yield Stop(reason="enough")

    control = Script(answer)
    config = config_of(transport={"heartbeat_s": 1e-9}, evaluation={"problems": 15, "samples_per_problem": 2})
    ran = run_here(config, fake_engine(weights, tokens_per_step=1), control)
    assert len(hellos) == 2 and control.heard_of(Evaluated) == []
    assert (ran.code, ran.searcher.generated) == (0, 2 * S)


def test_a_question_that_is_asked_again_is_answered_once(weights, handlers):
    control = until(2 * S, prompts=2, then=[Evaluate(version="0.0"), Evaluate(version="0.0")])
    run_here(config_of(), fake_engine(weights), control)
    assert len(control.heard_of(Evaluated)) == 1


def test_an_evaluation_of_a_version_that_has_not_arrived_waits(weights, handlers):
    control = until(2 * S, prompts=2, then=[Evaluate(version="0.1")])
    ran = run_here(config_of(), fake_engine(weights), control)
    assert control.heard_of(Evaluated) == []
    assert_whole(ran, 2)


class Crowded(MemoryRollouts):
    """Has room again only after some turns without anything new in the engine."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns, self.in_engine, self.engine = turns, [], None
        self.room_asked = 0

    @property
    def room(self) -> bool:
        self.room_asked += 1
        self.in_engine.append(self.engine.n_unfinished)
        return self.room_asked > self.turns


def test_a_searcher_without_room_takes_no_prompt_and_is_idle_and_goes_on_later(weights, handlers):
    control = until(4 * S, prompts=4)
    engine, rollouts = fake_engine(weights), Crowded(turns=3)
    rollouts.engine = engine
    config = config_of(transport={"heartbeat_s": 1e-9})
    searcher = searcher_of(config, engine, control, lambda shards, token, name: rollouts)
    assert searcher.run() == 0
    assert rollouts.in_engine[:4] == [0] * 4
    crowded = control.heard_of(Heartbeat)[:3]
    assert all(beat.busy_s == 0 for beat in crowded)
    assert crowded[0].idle_s < crowded[1].idle_s < crowded[2].idle_s
    assert_whole(Ran(0, searcher, groups_of(rollouts)), 4)


def test_what_was_generated_leaves_while_an_evaluation_runs(weights, handlers):
    class Watched(MemoryRollouts):
        flushes = 0

        def flush(self) -> None:
            self.flushes += 1
            super().flush()

    class Slow(FakeEngine):
        def step(self):
            flushes.append(rollouts.flushes)
            return super().step()

    flushes: list[int] = []
    rollouts = Watched()
    control = until(2 * S, prompts=2, then=[Evaluate(version="0.0")])
    config = config_of(evaluation={"problems": 12})
    searcher = searcher_of(config, fake_engine(weights, Slow), control, lambda shards, token, name: rollouts)
    searcher.run()
    assert len(control.heard_of(Evaluated)) == 1
    assert len(flushes) > 3
    assert flushes == list(range(len(flushes)))


def test_the_goodbye_follows_the_acknowledgements(weights, handlers):
    said = []

    class Watched(MemoryRollouts):
        def close(self, linger_s: float = 0.0) -> int:
            said.append(control.heard_of(Goodbye))
            return super().close(linger_s)

    control = until(2 * S, prompts=2)
    searcher_of(config_of(), fake_engine(weights), control, lambda shards, token, name: Watched()).run()
    assert said == [[]]
    assert isinstance(control.heard[-1], Goodbye)


def test_a_refusal_says_why(weights, handlers):
    control = Script(lambda message: [Refused(reason="the token is not this run's")])
    with pytest.raises(TransportError, match="refused this searcher: the token is not this run's"):
        run_here(config_of(), fake_engine(weights), control)


def test_a_trainer_that_never_answers_is_left_after_the_patience(weights, handlers, caplog):
    control = Script(lambda message: [])
    config = config_of(transport={"lease_s": 0.05, "patience_s": 0.2})
    assert run_here(config, fake_engine(weights), control).code == TRAINER_GONE == 75
    assert "no trainer at there answered within 0.05 s" in caplog.text
    assert len(control.heard_of(Hello)) > 1  # the first may have been lost


def test_a_trainer_that_falls_silent_is_waited_for_and_then_left(weights, handlers, caplog):
    control = Script(lambda message: [Welcome(shards=(), newest="0.0")] if isinstance(message, Hello) else [])
    ran = run_here(config_of(transport={"lease_s": 0.05, "patience_s": 0.2}), fake_engine(weights), control)
    assert ran.code == TRAINER_GONE
    assert "the trainer was silent for 0.05 s; waiting up to 0.2 s" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_welcome_is_a_clean_end(weights, handlers, number):
    def kill(message: FromSearcher) -> Iterable[ToSearcher]:
        if isinstance(message, Hello):
            os.kill(os.getpid(), number)
        return []

    control = Script(kill)
    ran = run_here(config_of(), fake_engine(weights), control)
    assert (ran.code, ran.groups) == (0, [])
    assert isinstance(control.heard[-1], Goodbye)


# ---- in a process of its own, over sockets


class MemoryLog:
    """What was acknowledged."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def append(self, sender: str, sequence: int, payload: memoryview, checksum: int) -> LogPosition:
        assert sequence == len(self.payloads)
        self.payloads.append(bytes(payload))
        return LogPosition(0, len(self.payloads))

    def sync(self) -> None:
        pass


class Trainer:
    """The control server and a shard's inbox, as the trainer's rank 0 has them."""

    def __init__(
        self,
        lease_s: float,
        max_ahead_groups: int,
        delivered: Mapping[str, int] | None = None,
        log: MemoryLog | None = None,
        attempt: int = 0,
    ) -> None:
        self.receiver = RolloutReceiver(LOOPBACK, TOKEN, delivered=delivered, log=log)
        self.control = ControlServer(
            LOOPBACK,
            TOKEN,
            FleetSettings(
                lease_s=lease_s,
                silent_s=lease_s / 2,
                max_ahead_groups=max_ahead_groups,
                shards=(self.receiver.address,),
            ),
            newest=V0,
            leases=PromptLeases(attempt=attempt),
        )
        self.arrived: list[RolloutGroup] = []
        self._closed = False

    def receive(self) -> None:
        new = groups_of(self.receiver)
        self.arrived += new
        for group in new:
            self.control.note(arrived={group.lease: 1}, fresh_prompts=0)

    def receive_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "it never became true"
            self.receive()
            time.sleep(0.002)

    @property
    def rollouts(self) -> int:
        return sum(len(group.rollouts) for group in self.arrived)

    @property
    def said(self) -> int:
        return sum(self.control.generated()[0].values())

    @property
    def joined_and_lost(self) -> tuple[int, int]:
        totals = self.control.totals()
        return totals["joined"], totals["lost"]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.control.close()
            self.receiver.close()


@contextmanager
def trainer(lease_s: float = 20.0, max_ahead_groups: int = 16, **more):
    made = Trainer(lease_s, max_ahead_groups, **more)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def child(function: Callable[[], int]):
    """``function`` in a forked process, ended by id; yields the pid."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = function()
            gc.collect()  # what a searcher leaves open must not hold up the end of its process
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def exit_code(pid: int, limit_s: float = 20.0) -> int:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    raise AssertionError(f"process {pid} did not end")


def search(address: str, weights: Path, **overrides) -> Callable[[], int]:
    def run() -> int:
        engine = fake_engine(weights)
        name = new_name("here")  # each is another incarnation
        return searcher_of(config_of(**overrides), engine, ControlClient(address, TOKEN), name=name).run()

    return run


def test_all_that_was_generated_arrives_before_a_clean_stop(weights):
    with trainer() as t, child(search(t.control.address, weights)) as pid:
        t.receive_until(lambda: len(t.arrived) >= 40)
        t.control.stop_searchers("enough", final=True)
        assert exit_code(pid) == 0
        t.receive_until(lambda: t.rollouts == t.said)
        assert t.control.members() == []
        assert t.joined_and_lost == (1, 0)
        assert t.receiver.refused == 0
        assert len({r.rollout_id for g in t.arrived for r in g.rollouts}) == t.rollouts


def test_a_signal_ends_a_searcher_as_a_stop_does(weights):
    with trainer() as t, child(search(t.control.address, weights)) as pid:
        t.receive_until(lambda: len(t.arrived) >= 8)
        os.kill(pid, signal.SIGTERM)
        assert exit_code(pid) == 0
        t.receive_until(lambda: t.rollouts == t.said and not t.control.members())
        assert t.joined_and_lost == (1, 0)


def test_a_killed_searcher_is_lost_and_another_visits_its_prompts(weights):
    with trainer(lease_s=0.5, max_ahead_groups=4) as t:
        with child(search(t.control.address, weights)) as pid:
            t.receive_until(lambda: len(t.arrived) >= 4)
            os.kill(pid, signal.SIGKILL)
        first = {g.prompt_id for g in t.arrived}
        t.receive_until(lambda: t.joined_and_lost[1] == 1)
        with child(search(t.control.address, weights)) as pid:
            t.receive_until(lambda: len(t.arrived) >= len(first) + 12)
            position, unfinished = t.control.unfinished_prompts()
            open_positions = {p for start, count in unfinished for p in range(start, start + count)}
            visited = {g.prompt_id for g in t.arrived}
            for p in set(range(position)) - open_positions:
                assert TASK.train_prompt(p).prompt_id in visited


def test_a_dead_trainer_is_left_even_with_rollouts_that_nobody_takes(weights):
    with (
        trainer() as t,
        child(search(t.control.address, weights, transport={"lease_s": 0.5, "patience_s": 1.0})) as pid,
    ):
        t.receive_until(lambda: len(t.arrived) >= 4)
        t.close()
        assert exit_code(pid) == TRAINER_GONE


def test_a_searcher_without_a_trainer_ends(weights):
    with trainer() as t:
        address = t.control.address
    with child(search(address, weights, transport={"lease_s": 0.2, "patience_s": 0.5})) as pid:
        assert exit_code(pid) == TRAINER_GONE


def test_a_searcher_joins_the_next_trainer_and_hands_over_what_the_last_one_never_acknowledged(weights, tmp_path):
    def run() -> int:
        config = config_of(transport={"patience_s": 60.0, "lease_s": 1.0, "heartbeat_s": 0.05, "resend_s": 0.2})
        searcher = Searcher(
            config=config,
            engine=fake_engine(weights),
            task=TASK,
            tokenizer=TOKENIZER,
            name="me",
            host="here",
            rendezvous=at_place(),
            find=lambda: read_rendezvous(tmp_path),
            dial=lambda found: ControlClient(found.address, found.token, "me"),
            connect=partial(RolloutSender, resend_s=0.2),
        )
        return searcher.run()

    def at_place() -> Rendezvous:
        found = read_rendezvous(tmp_path)
        assert found is not None
        return found

    def announce(t: Trainer, attempt: int) -> None:
        write_rendezvous(
            tmp_path,
            Rendezvous(address=t.control.address, host="here", token=TOKEN, attempt=attempt, weights="unused"),
        )

    log = MemoryLog()
    with trainer(max_ahead_groups=8, log=log) as first:
        announce(first, 0)
        with child(run) as pid:
            first.receive_until(lambda: len(first.arrived) >= 40)
            first.close()  # without a word
            kept = [
                rollout for payload in log.payloads for group in decode(payload).groups() for rollout in group.rollouts
            ]
            with trainer(max_ahead_groups=8, delivered={"me": len(log.payloads)}, attempt=1) as second:
                announce(second, 1)
                second.receive_until(lambda: len(second.arrived) >= 40)
                second.control.stop_searchers("enough", final=True)
                assert exit_code(pid) == 0
                second.receive_until(lambda: len(kept) + second.rollouts == second.said)
                ids = [r.rollout_id for r in (*kept, *(r for g in second.arrived for r in g.rollouts))]
                assert sorted(ids) == [RolloutId("me", i) for i in range(len(ids))]
                assert second.joined_and_lost == (1, 0)


def test_a_trainer_that_ends_without_the_run_is_told_goodbye_and_the_next_one_hello(weights, handlers):
    """``Stop(final=False)``: what was generated is handed over, then the searcher waits."""
    heard: list[str] = []

    def answer(message: FromSearcher) -> Iterable[ToSearcher]:
        match message:
            case Hello():
                heard.append("hello")
                yield Welcome(shards=("memory",), newest="0.0")
                yield Lease(lease=len(heard), start=0, count=2)
            case Goodbye():
                heard.append("goodbye")
                yield Beat(newest="0.0")  # of no interest any more
                yield Unknown()  # as the next trainer at this address would say
            case Heartbeat():
                at_first = heard == ["hello"]
                yield Stop(reason="over", final=not at_first) if message.generated >= 2 * S else Beat(newest="0.0")

    control = Script(answer)
    ran = run_here(config_of(), fake_engine(weights), control)
    assert (ran.code, heard) == (0, ["hello", "goodbye", "hello", "goodbye"])
    first, second = (hello.generated for hello in control.heard_of(Hello))
    assert first == 0 and second >= 2 * S


def test_what_one_trainer_gave_and_cost_is_not_told_to_the_next(weights, handlers):
    """Which has heard the hello and not answered yet: it would count that as its own."""

    def answer(message: FromSearcher) -> Iterable[ToSearcher]:
        hellos = len(control.heard_of(Hello))
        match message:
            case Hello() if hellos == 1:
                yield Welcome(shards=("memory",), newest="0.0")
                yield Lease(lease=0, start=0, count=6)
            case Hello() if hellos == 3:  # said again without an answer, heartbeats later
                os.kill(os.getpid(), signal.SIGTERM)
            case Heartbeat() if message.received_prompts == 6:
                yield Unknown()

    control = Script(answer)
    config = config_of(transport={"heartbeat_s": 0.01, "lease_s": 0.1})
    ran = run_here(config, fake_engine(weights, tokens_per_step=1), control)
    second = [isinstance(message, Hello) for message in control.heard].index(True, 1)
    *before, goodbye = list(control.heard)[second:]
    assert {type(message) for message in before} == {Hello}
    assert isinstance(goodbye, Goodbye)
    assert (goodbye.generated, goodbye.busy_s, goodbye.idle_s) == (ran.searcher.generated, 0.0, 0.0)

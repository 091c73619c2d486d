"""The rules of delivery, with a network that loses, repeats and reorders whatever it likes."""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_megatron.transport.delivery import AHEAD_PARTS, MOST_BACK_OFF, SILENT_S, Answer, Inbound, Outbound, Verdict

RESEND_S = 10.0


def post(outbound: Outbound, n_bytes: int = 1, now_s: float = 0.0):
    return outbound.sent(bytes(n_bytes), 0, 1, now_s)


def numbers(messages) -> list[int]:
    return [message.sequence for message in messages]


@dataclasses.dataclass(frozen=True)
class Letter:
    """A message under way. ``n_bytes``: of its payload; None: it only asks."""

    sequence: int
    n_bytes: int | None
    oldest: int


class Network:
    """Senders, a receiver, and what is under way between them; ``log`` is what the receiver has made safe.

    ``begun`` is where the log of this receiver began, and ``gone`` what was dropped from earlier ones after its sender
    may have been told that it is safe.
    """

    def __init__(self, n_senders: int, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.outbound = {f"s{i}": Outbound(resend_s=RESEND_S) for i in range(n_senders)}
        self.inbound = Inbound(window_bytes)
        self.messages: list[tuple[str, Letter]] = []
        self.answers: list[tuple[str, Answer]] = []
        self.log: dict[str, list[int]] = {name: [] for name in self.outbound}
        self.begun: dict[str, int] = dict.fromkeys(self.outbound, 0)
        self.told: dict[str, int] = dict.fromkeys(self.outbound, 0)
        self.gone: dict[str, set[int]] = {name: set() for name in self.outbound}
        self.waiting: list[tuple[str, int]] = []  # (sender, bytes)
        self.now_s = 0.0

    def post(self, name: str, message) -> None:
        letter = Letter(message.sequence, len(message.payload), self.outbound[name].oldest)
        self.messages.append((name, letter))

    def send(self, name: str, n_bytes: int) -> None:
        if self.outbound[name].may_send:
            self.post(name, post(self.outbound[name], n_bytes, self.now_s))

    def arrive(self, name: str, letter: Letter) -> None:
        verdict = self.inbound.judge(name, letter.sequence, self.now_s, letter.oldest)
        if letter.n_bytes is not None and verdict is Verdict.ACCEPT:
            self.log[name].append(letter.sequence)
            self.waiting.append((name, letter.n_bytes))
            self.inbound.accepted(name, letter.n_bytes)
        self.answer(name)

    def answer(self, name: str) -> None:
        answer = self.inbound.answer(name, self.now_s)
        self.told[name] = max(self.told[name], answer.acknowledged)
        self.answers.append((name, answer))

    def take(self) -> None:
        for name, n_bytes in self.waiting:
            self.inbound.taken(name, n_bytes)
        self.waiting = []
        for name in list(self.inbound.short(self.now_s)):
            self.answer(name)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for name, outbound in self.outbound.items():
            for message in outbound.due(self.now_s):
                self.post(name, message)
            if outbound.asks(self.now_s):
                self.messages.append((name, Letter(outbound.next_sequence, None, outbound.oldest)))

    def restart(self, keep: float = 1.0) -> None:
        """A new receiver that has the first part of each log, without the last record that is not whole."""
        for name, log in self.log.items():
            kept = round(keep * len(log))
            assert all(n < self.told[name] or n >= self.outbound[name].oldest for n in log[kept:])
            self.gone[name] |= {n for n in log[kept:] if n < self.told[name]}
            del log[kept:]
        self.begun = {name: log[-1] + 1 if log else 0 for name, log in self.log.items()}
        self.inbound = Inbound(self.window_bytes, {name: n for name, n in self.begun.items() if n})
        self.waiting = []

    def reconnect(self, name: str) -> None:
        """The sender dials anew: what is under way between the two is lost."""
        self.messages = [(n, letter) for n, letter in self.messages if n != name]
        self.answers = [(n, answer) for n, answer in self.answers if n != name]
        self.outbound[name].reconnected()

    def behave(self) -> None:
        """Deliver all in order, without loss."""
        while self.messages or self.answers:
            messages, self.messages = self.messages, []
            for name, message in messages:
                self.arrive(name, message)
            self.take()
            answers, self.answers = self.answers, []
            for name, answer in answers:
                self.outbound[name].heard(answer, self.now_s)

    def settle(self) -> None:
        """All is well from here on, until nothing is left to do."""
        for _ in range(2 * MOST_BACK_OFF):
            self.behave()
            self.pass_time(RESEND_S)
            if all(o.n_unacknowledged == 0 and o.may_send for o in self.outbound.values()):
                break


OPERATIONS = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 1), st.integers(1, 30)),
    st.tuples(st.sampled_from(["message", "repeat message", "lose message"]), st.integers(0, 50), st.just(0)),
    st.tuples(st.sampled_from(["answer", "repeat answer", "lose answer"]), st.integers(0, 50), st.just(0)),
    st.tuples(st.just("take"), st.just(0), st.just(0)),
    st.tuples(st.just("time"), st.sampled_from([1, 11, 100]), st.just(0)),
)
RESTART = st.tuples(st.just("restart"), st.just(0), st.just(0))
RECONNECT = st.tuples(st.just("reconnect"), st.integers(0, 1), st.just(0))
LOSS = st.tuples(st.just("restart without"), st.sampled_from([0, 30, 70, 100]), st.just(0))


def apply(network: Network, operation: str, number: int, n_bytes: int) -> None:
    queue = network.messages if "message" in operation else network.answers
    act: dict[str, Callable[[], None]] = {
        "send": lambda: network.send(f"s{number}", n_bytes),
        "take": network.take,
        "time": lambda: network.pass_time(number),
        "restart": network.restart,
        "restart without": lambda: network.restart(number / 100),
        "reconnect": lambda: network.reconnect(f"s{number}"),
    }
    if operation in act:
        act[operation]()
    elif queue:
        index = number % len(queue)
        name, what = queue[index] if "repeat" in operation else queue.pop(index)
        if operation in ("message", "repeat message"):
            network.arrive(name, what)
        elif operation in ("answer", "repeat answer"):
            network.outbound[name].heard(what, network.now_s)


@settings(max_examples=300)
@given(operations=st.lists(OPERATIONS | RESTART | RECONNECT, max_size=80))
def test_whatever_the_network_did_all_is_delivered_once_in_order_when_it_behaves(operations):
    network = Network(2, window_bytes=64)
    for operation in operations:
        apply(network, *operation)
    network.settle()
    assert network.inbound.forgotten == 0
    for name, outbound in network.outbound.items():
        assert network.log[name] == list(range(outbound.next_sequence))
        assert outbound.n_unacknowledged == outbound.unacknowledged_rollouts == 0
        assert outbound.may_send, "it has no credit, though all was taken in"


@settings(max_examples=500)
@given(operations=st.lists(OPERATIONS | LOSS | RECONNECT, max_size=80))
def test_a_log_that_was_lost_costs_only_what_was_acknowledged_and_nothing_comes_twice(operations):
    network = Network(2, window_bytes=64)
    for operation in operations:
        apply(network, *operation)
    network.settle()
    for name in network.outbound:  # who says nothing more does not tell what is missing
        network.send(name, 1)
    network.settle()
    missing = 0
    for name, outbound in network.outbound.items():
        log = network.log[name]
        assert log == sorted(set(log)), "one came twice, or too early"
        lost = set(range(outbound.next_sequence)) - set(log)
        assert lost <= network.gone[name], "one is nowhere, though its sender was never told that it is safe"
        assert outbound.n_unacknowledged == outbound.unacknowledged_rollouts == 0
        assert outbound.may_send
        missing += len({n for n in lost if n >= network.begun[name]})
    assert network.inbound.forgotten == missing


@settings(max_examples=300)
@given(operations=st.lists(OPERATIONS, max_size=80), window_bytes=st.integers(1, 100))
def test_no_more_waits_than_the_window_and_a_message_a_sender(operations, window_bytes):
    network = Network(2, window_bytes)
    for operation in operations:
        if operation[0] == "time":
            operation = ("time", 11, 0)  # a sender that is forgotten and comes back may exceed it by its old credit
            network.inbound.judge("s0", -1, network.now_s)
            network.inbound.judge("s1", -1, network.now_s)
        apply(network, *operation)
        assert sum(n_bytes for _, n_bytes in network.waiting) < window_bytes + 2 * 30


def test_a_message_is_accepted_in_its_turn_only():
    inbound = Inbound(100, {"s": 3})
    assert [inbound.judge("s", n, 0.0) for n in (2, 4, 3)] == [Verdict.DUPLICATE, Verdict.GAP, Verdict.ACCEPT]
    assert inbound.judge("s", 3, 0.0) is Verdict.ACCEPT  # it is not safe yet
    inbound.accepted("s", 10)
    assert [inbound.judge("s", n, 0.0) for n in (3, 4)] == [Verdict.DUPLICATE, Verdict.ACCEPT]
    assert inbound.judge("other", 0, 0.0) is Verdict.ACCEPT


def test_a_receiver_goes_on_from_what_the_sender_still_has():
    inbound = Inbound(100, {"s": 3})
    assert inbound.judge("s", 7, 0.0, oldest=5) is Verdict.GAP
    assert (inbound.forgotten, inbound.answer("s", 0.0).acknowledged) == (2, 5)
    assert inbound.judge("s", 4, 0.0, oldest=2) is Verdict.DUPLICATE  # an old copy that comes late
    assert inbound.judge("s", 5, 0.0, oldest=5) is Verdict.ACCEPT
    assert inbound.judge("other", 9, 0.0, oldest=9) is Verdict.ACCEPT
    assert inbound.forgotten == 2 + 9


def test_a_receiver_that_lost_nothing_skips_nothing():
    inbound = Inbound(100, {"s": 7})
    assert [inbound.judge("s", 7, 0.0, oldest=n) for n in (0, 6, 7)] == [Verdict.ACCEPT] * 3
    assert inbound.forgotten == 0


def test_credit_is_what_was_taken_in_and_a_share_of_the_window():
    inbound = Inbound(80)
    inbound.judge("a", 0, 0.0)
    assert inbound.answer("a", 0.0) == Answer(0, 80 // AHEAD_PARTS)
    for n in range(8):
        inbound.judge("a", n, 0.0)
        inbound.accepted("a", 10)
    assert inbound.answer("a", 0.0) == Answer(8, 0)
    inbound.judge("b", 0, 0.0)
    assert inbound.answer("b", 0.0) == Answer(0, 1)  # one message, though the window is full
    assert list(inbound.short(0.0)) == []
    inbound.taken("a", 50)
    assert list(inbound.short(0.0)) == ["a", "b"]
    assert inbound.answer("b", 0.0) == Answer(0, 10)
    assert inbound.answer("a", 0.0) == Answer(8, 10)  # it holds 30 of its 40


def test_a_sender_gets_its_share_and_no_more_though_others_use_little():
    inbound = Inbound(80)
    inbound.judge("little", 0, 0.0)
    inbound.answer("little", 0.0)
    for n in range(4):
        inbound.judge("a", n, 0.0)
        inbound.accepted("a", 10)
    assert inbound.answer("a", 0.0) == Answer(4, 0)


def test_what_waits_is_counted_however_long_its_sender_is_silent():
    inbound = Inbound(80)
    for n in range(7):
        inbound.judge("gone", n, 0.0)
        inbound.accepted("gone", 10)
    inbound.answer("gone", 0.0)  # it holds all
    inbound.judge("a", 0, 2 * SILENT_S)
    assert inbound.answer("a", 2 * SILENT_S) == Answer(0, 1)


def test_a_sender_that_is_silent_leaves_its_credit_to_others():
    inbound = Inbound(80)
    inbound.judge("gone", 0, 0.0)
    inbound.answer("gone", 0.0)
    for n in range(7):
        inbound.judge("a", n, SILENT_S - 1)
        inbound.accepted("a", 10)
    assert inbound.answer("a", SILENT_S - 1) == Answer(7, 0)  # its share is 40
    assert inbound.answer("a", SILENT_S + 1) == Answer(7, 10)


def test_a_sender_may_begin_a_message_below_its_limit_and_the_first_without_one():
    outbound = Outbound(resend_s=RESEND_S)
    assert outbound.may_send
    post(outbound, 10)
    assert not outbound.may_send
    outbound.heard(Answer(1, 5), 0.0)
    assert outbound.may_send
    post(outbound, 10)
    assert not outbound.may_send
    outbound.heard(Answer(1, 11), 0.0)
    assert outbound.may_send


def test_without_an_answer_the_oldest_goes_out_again_ever_more_seldom():
    outbound = Outbound(resend_s=RESEND_S)
    outbound.heard(Answer(0, 100), 0.0)
    post(outbound, now_s=5.0), post(outbound, now_s=6.0)
    times = []
    for now_s in range(500):
        for message in outbound.due(now_s):
            times.append(now_s)
            assert message.sequence == 0
    assert times == [15, 35, 75, 155, 235, 315, 395, 475]  # 10, 20, 40, then every 80


def test_after_a_silence_all_that_may_be_lost_goes_out_again_with_the_first_progress():
    outbound = Outbound(resend_s=RESEND_S)
    outbound.heard(Answer(0, 100), 0.0)
    for _ in range(4):
        post(outbound)
    assert numbers(outbound.due(10.0)) == [0]
    post(outbound, now_s=11.0)  # not among those that were silently lost
    assert outbound.due(11.0) == []
    outbound.heard(Answer(1, 100), 12.0)
    assert numbers(outbound.due(12.0)) == [1, 2, 3]
    assert outbound.due(12.0) == []
    outbound.heard(Answer(2, 100), 12.0)
    assert outbound.due(12.0) == []
    outbound.heard(Answer(4, 100), 13.0)
    assert outbound.due(13.0) == []
    assert numbers(outbound.due(23.0)) == [4]  # the back-off began anew


def test_after_a_reconnection_the_oldest_goes_out_at_once_and_credit_begins_anew():
    outbound = Outbound(resend_s=RESEND_S)
    outbound.heard(Answer(0, 100), 0.0)
    for _ in range(3):
        post(outbound, 10)
    outbound.heard(Answer(1, 90), 1.0)
    assert outbound.may_send
    outbound.reconnected()
    assert not outbound.may_send  # 20 bytes are under way, and nobody has said that there is room for them
    assert numbers(outbound.due(1.0)) == [1]
    assert outbound.due(1.0) == []
    outbound.heard(Answer(2, 10), 2.0)
    assert numbers(outbound.due(2.0)) == [2]
    assert not outbound.may_send
    outbound.heard(Answer(3, 1), 3.0)
    assert outbound.may_send
    assert outbound.oldest == outbound.next_sequence == 3


def test_after_a_reconnection_nothing_is_left_of_what_was_due():
    outbound = Outbound(resend_s=RESEND_S)
    outbound.heard(Answer(0, 100), 0.0)
    for _ in range(4):
        post(outbound)
    assert numbers(outbound.due(10.0)) == [0]
    outbound.heard(Answer(1, 100), 11.0)  # the others are due now
    outbound.reconnected()
    assert numbers(outbound.due(11.0)) == [1]


def test_after_a_reconnection_with_nothing_under_way_the_first_message_needs_no_answer():
    outbound = Outbound(resend_s=RESEND_S)
    post(outbound, 10)
    outbound.heard(Answer(1, 0), 0.0)
    assert not outbound.may_send
    outbound.reconnected()
    assert outbound.may_send
    assert outbound.due(0.0) == []


def test_only_progress_puts_the_next_repetition_off():
    outbound = Outbound(resend_s=RESEND_S)
    outbound.heard(Answer(0, 10), 0.0)
    post(outbound)
    outbound.heard(Answer(0, 10), 9.0)
    assert numbers(outbound.due(10.0)) == [0]


def test_a_sender_without_credit_asks_for_news():
    outbound = Outbound(resend_s=RESEND_S)
    post(outbound, 5)
    assert not outbound.asks(100.0)  # the message itself will be sent again
    outbound.heard(Answer(1, 0), 0.0)
    assert [now_s for now_s in range(100) if outbound.asks(now_s)] == [10, 30, 70]
    outbound.heard(Answer(1, 1), 100.0)
    assert not outbound.asks(1000.0)
    assert outbound.due(1000.0) == []


@pytest.mark.parametrize("answer", [Answer(0, 1000), Answer(1, 10), Answer(4, 1000), Answer(-1, 1000)])
def test_an_answer_that_is_old_or_of_another_changes_nothing(answer):
    outbound = Outbound(resend_s=RESEND_S)
    outbound.heard(Answer(0, 100), 0.0)
    for _ in range(3):
        post(outbound, 10)
    outbound.heard(Answer(1, 20), 0.0)
    before = dataclasses.asdict(outbound)
    outbound.heard(answer, 5.0)
    assert dataclasses.asdict(outbound) == before

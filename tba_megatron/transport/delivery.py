"""The rules by which messages reach a shard once and in order, and no more of them than it has room for.

No sockets and no clocks: what arrives and what time it is come as arguments. A sender numbers its messages to one
receiver 0, 1, 2, ...; the receiver accepts only the number it expects next, and answers with that number and with
credit. The sender keeps a message until an answer says that it is safe, and sends it again when no answer comes.

Each message says which is the oldest that its sender still has. A receiver that expects an older one is another than
the one that said it was safe, and has lost it (its log was damaged, or there was none): it goes on from the oldest.

Credit is counted in bytes from a sender's first message on: it may begin a message while it has sent less than its
limit. The limits of all senders, less what the trainer has taken in, sum to at most the window; so a shard that takes
nothing in holds at most the window, and for each sender the one message that began below its limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

MOST_BACK_OFF = 8  # times resend_s
SILENT_S = 60.0  # a sender that was not heard for so long and has nothing waiting keeps no part of the window
AHEAD_PARTS = 8  # of the window: unused credit of one sender at most, so that a quiet one does not hold the window


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """All messages below ``acknowledged`` are safe; ``room_bytes`` may be sent beyond them.

    The credit is counted from the acknowledged message, so a receiver that begins anew need not know how many bytes it
    has ever received.
    """

    acknowledged: int
    room_bytes: int


class Verdict(StrEnum):
    ACCEPT = "accept"
    DUPLICATE = "duplicate"  # was accepted before
    GAP = "gap"  # an earlier one is missing


@dataclass(kw_only=True, slots=True)
class _Sender:
    """What a receiver knows of a sender; bytes are counted from the first message that this receiver accepted."""

    next_sequence: int = 0
    accepted_bytes: int = 0
    taken_bytes: int = 0
    limit_bytes: int = 0
    told_bytes: int = 0  # the limit of the last answer
    heard_s: float = float("-inf")

    @property
    def held_bytes(self) -> int:
        """Of the window: what waits, and what may still come."""
        return self.limit_bytes - self.taken_bytes


class Inbound:
    """The receiver's side, for all senders. ``delivered`` is the next expected sequence of senders known before."""

    def __init__(self, window_bytes: int, delivered: Mapping[str, int] | None = None) -> None:
        self._window_bytes = window_bytes
        self._ahead_bytes = max(1, window_bytes // AHEAD_PARTS)
        self._senders = {name: _Sender(next_sequence=n) for name, n in (delivered or {}).items()}
        self.forgotten = 0  # messages that no sender has any more and that are not among ``delivered``

    def judge(self, sender: str, sequence: int, now_s: float, oldest: int = 0) -> Verdict:
        """What to do with a message that came whole; ``accepted`` has to follow once an accepted one is safe.

        ``oldest``, at most ``sequence``: the first message that the sender still had when it sent this one.
        """
        known = self._senders.setdefault(sender, _Sender())
        known.heard_s = now_s
        if oldest > known.next_sequence:
            self.forgotten += oldest - known.next_sequence
            known.next_sequence = oldest
        if sequence == known.next_sequence:
            return Verdict.ACCEPT
        return Verdict.DUPLICATE if sequence < known.next_sequence else Verdict.GAP

    def accepted(self, sender: str, n_bytes: int) -> None:
        known = self._senders[sender]
        known.next_sequence += 1
        known.accepted_bytes += n_bytes

    def taken(self, sender: str, n_bytes: int) -> None:
        """The trainer has taken in a message: its bytes may come again."""
        self._senders[sender].taken_bytes += n_bytes

    def answer(self, sender: str, now_s: float) -> Answer:
        """How the sender stands; call it for what will be sent."""
        known = self._senders[sender]
        self._grant(known, *self._shared(now_s))
        known.told_bytes = known.limit_bytes
        return Answer(known.next_sequence, max(0, known.limit_bytes - known.accepted_bytes))

    def short(self, now_s: float) -> Iterator[str]:
        """The senders that have little credit and would get more with an answer."""
        n_living, held_bytes = self._shared(now_s)
        for name, known in self._senders.items():
            if self._lives(known, now_s) and 2 * (known.told_bytes - known.accepted_bytes) < self._ahead_bytes:
                held_bytes += self._grant(known, n_living, held_bytes)
                if known.limit_bytes > known.told_bytes:
                    yield name

    @staticmethod
    def _lives(known: _Sender, now_s: float) -> bool:
        return known.accepted_bytes > known.taken_bytes or now_s - known.heard_s < SILENT_S

    def _shared(self, now_s: float) -> tuple[int, int]:
        """(senders that live, what they hold of the window)."""
        held = [known.held_bytes for known in self._senders.values() if self._lives(known, now_s)]
        return len(held), sum(held)

    def _grant(self, known: _Sender, n_living: int, held_bytes: int) -> int:
        """Raise its limit as far as its share and the window allow; once all is taken in, always by one message.

        ``known`` is one of the ``n_living``. By how much.
        """
        before_bytes = known.limit_bytes
        share_bytes = self._window_bytes // max(1, n_living)
        free_bytes = self._window_bytes - (held_bytes - known.held_bytes)
        known.limit_bytes = max(
            known.limit_bytes,
            known.taken_bytes + 1,
            min(known.taken_bytes + min(share_bytes, free_bytes), known.accepted_bytes + self._ahead_bytes),
        )
        return known.limit_bytes - before_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What a sender keeps until it is acknowledged."""

    sequence: int
    payload: bytes
    checksum: int
    n_rollouts: int


@dataclass(kw_only=True, slots=True)
class Outbound:
    """The sender's side, to one receiver.

    After a time without progress only the oldest message goes out again: while the receiver is away, copies of the
    others would only pile up. The rest follows as soon as an answer shows progress.
    """

    resend_s: float
    _unacknowledged: deque[Message] = field(default_factory=deque)
    _next_sequence: int = 0
    _sent_bytes: int = 0  # each message once, however often it was sent
    _acknowledged_bytes: int = 0
    _limit_bytes: int = 1  # the first message needs no answer
    _quiet_from_s: float = 0.0  # no progress since then
    _back_off: int = 1
    _suspect_below: int = 0  # messages below it were sent before the last time-out, so they may be lost
    _repeat: bool = False

    @property
    def room_bytes(self) -> int:
        """What may still be sent; a message may be larger, and is the last one then."""
        return self._limit_bytes - self._sent_bytes

    @property
    def may_send(self) -> bool:
        return self.room_bytes > 0

    @property
    def next_sequence(self) -> int:
        return self._next_sequence

    @property
    def oldest(self) -> int:
        """The first message that is kept, or the next one."""
        return self._next_sequence - len(self._unacknowledged)

    @property
    def n_unacknowledged(self) -> int:
        """Messages."""
        return len(self._unacknowledged)

    @property
    def unacknowledged_rollouts(self) -> int:
        return sum(message.n_rollouts for message in self._unacknowledged)

    def sent(self, payload: bytes, checksum: int, n_rollouts: int, now_s: float) -> Message:
        """The next message; it counts as sent."""
        message = Message(sequence=self._next_sequence, payload=payload, checksum=checksum, n_rollouts=n_rollouts)
        if not self._unacknowledged:
            self._quiet_from_s, self._back_off = now_s, 1
        self._unacknowledged.append(message)
        self._next_sequence += 1
        self._sent_bytes += len(payload)
        return message

    def heard(self, answer: Answer, now_s: float) -> None:
        """Take an answer. One that is older than what is known, or that nobody can mean, changes nothing."""
        oldest = self.oldest
        if not oldest <= answer.acknowledged <= self._next_sequence:
            return
        for _ in range(answer.acknowledged - oldest):
            self._acknowledged_bytes += len(self._unacknowledged.popleft().payload)
        if answer.acknowledged > oldest:
            self._quiet_from_s, self._back_off = now_s, 1
            self._repeat = answer.acknowledged < self._suspect_below
        self._limit_bytes = max(self._limit_bytes, self._acknowledged_bytes + answer.room_bytes)

    def reconnected(self) -> None:
        """Another receiver is at the other end: the oldest message goes out at once, and credit begins anew.

        No answer of the receiver before may be heard any more.
        """
        self._limit_bytes = self._acknowledged_bytes + 1
        self._quiet_from_s, self._back_off = float("-inf"), 1
        self._suspect_below, self._repeat = 0, False

    def due(self, now_s: float) -> list[Message]:
        """What has to be sent again; it counts as sent."""
        if self._repeat:
            self._repeat = False
            again = [message for message in self._unacknowledged if message.sequence < self._suspect_below]
            self._suspect_below = 0
            return again
        if not self._unacknowledged or not self._timed_out(now_s):
            return []
        self._suspect_below = self._next_sequence
        return [self._unacknowledged[0]]

    def asks(self, now_s: float) -> bool:
        """Whether to ask for an answer: all is acknowledged, nothing more may be sent, and the news may be lost."""
        return not self._unacknowledged and not self.may_send and self._timed_out(now_s)

    def _timed_out(self, now_s: float) -> bool:
        if now_s - self._quiet_from_s < self.resend_s * self._back_off:
            return False
        self._quiet_from_s, self._back_off = now_s, min(2 * self._back_off, MOST_BACK_OFF)
        return True

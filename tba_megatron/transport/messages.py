"""What searchers and the trainer say to each other: one frozen struct a message, msgspec on the wire, no pickle.

Versions travel as text (``PolicyVersion.parse``). The trainer answers every ``Heartbeat`` with a ``Beat``, so both
sides notice silence. A message travels with a number of its sender's, so that none is taken twice.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tba_megatron.untrusted import decoded

# Whatever a peer may say has a bound, so that a wrong word costs neither memory nor the sense of a metric.
VersionText = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,7}\.[0-9]{1,12}$")]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=300, pattern=r"^[ -~]+$")]
Text = Annotated[str, msgspec.Meta(max_length=1 << 20)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    pass


# ---- searcher to trainer


class Hello(_Message, frozen=True):
    """First word of a searcher. ``searcher`` is its incarnation: new for each start of the process.

    It is said again to a trainer that does not know the searcher: another attempt of the run.
    """

    token: Text
    searcher: Name
    host: Name
    workers: Annotated[int, msgspec.Meta(ge=1, le=4096)]  # engine workers that join a broadcast group
    version: VersionText  # the weights it runs
    source: Name = "searcher"
    takes_every: Amount = 1  # 1: each version; n: those that are n steps newer than its last; 0: none, ever
    prompts: Number = 0  # of the task, in one epoch
    generated: Number = 0  # rollouts so far


class Heartbeat(_Message, frozen=True):
    """Sent every ``transport.heartbeat_s`` and whenever prompts are wanted."""

    generated: Number  # rollouts finished and scored so far, counted before they are sent
    busy_s: Seconds
    idle_s: Seconds
    version: VersionText
    wanted_prompts: Amount  # beside those it holds
    received_prompts: Number  # by leases of this trainer so far, so that one under way is not asked for twice
    paused_s: Seconds = 0.0  # of ``idle_s``: applying weights, and computing again what they made stale
    evaluates: bool = False  # it was asked for an evaluation and has not answered


class Applied(_Message, frozen=True):
    """The engine now generates with ``version``. ``pause_s``: how long generation stood still for it."""

    version: VersionText
    pause_s: Seconds


class Probed(_Message, frozen=True):
    """``logprobs_nats[i]``: of token i + 1 of the offer's probe given those before it, at temperature 1."""

    version: VersionText
    logprobs_nats: Annotated[tuple[float, ...], msgspec.Meta(max_length=1 << 16)]


class ReceiveFailed(_Message, frozen=True):
    version: VersionText
    round: Number  # of the offer
    reason: Text


class Evaluated(_Message, frozen=True):
    version: VersionText
    accuracy: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    problems: Number
    seconds: Seconds


class SampleRollout(_Message, frozen=True):
    """A rollout as text, for the table in TensorBoard."""

    prompt: Text
    completion: Text
    reward: float
    version: VersionText


class Goodbye(_Message, frozen=True):
    generated: Number
    busy_s: Seconds
    idle_s: Seconds
    paused_s: Seconds = 0.0


FromSearcher = Hello | Heartbeat | Applied | Probed | ReceiveFailed | Evaluated | SampleRollout | Goodbye


# ---- trainer to searcher


class Welcome(_Message, frozen=True):
    """``shards[i]`` is the address of the shard that owns the prompts whose hash is i modulo their number."""

    shards: tuple[str, ...]
    newest: VersionText


class Refused(_Message, frozen=True):
    """The searcher may not join."""

    reason: str


class Unknown(_Message, frozen=True):
    """This trainer never heard the searcher say hello; it has started since."""


class Beat(_Message, frozen=True):
    newest: VersionText


class Lease(_Message, frozen=True):
    """Visit the prompts at positions ``start`` to ``start + count`` of the task's endless stream."""

    lease: int
    start: int
    count: int


class Offer(_Message, frozen=True):
    """A version is ready. With ``folder``: read it there. Else join the broadcast group, post, receive its buckets.

    ``round`` is this attempt to deliver it, and ``epoch`` the group: both are numbers that no other has in this run of
    the trainer. ``probe``: tokens to score once the version is applied; the answer is ``Probed``.
    """

    version: VersionText
    manifest: bytes
    round: int
    probe: tuple[int, ...] = ()
    folder: str = ""
    epoch: int = -1
    host: str = ""  # of the store where members meet
    port: int = 0
    rank: int = 0  # of this searcher's first worker in the group
    world_size: int = 0
    backend: str = ""


class Evaluate(_Message, frozen=True):
    """Drop what is in the engine and evaluate once the engine runs ``version``; no leases until then."""

    version: VersionText


class Stop(_Message, frozen=True):
    """The trainer ends. ``final``: the run does, too; else another trainer will go on with it."""

    reason: str
    final: bool = True


ToSearcher = Welcome | Refused | Unknown | Beat | Lease | Offer | Evaluate | Stop


class _FromSearcher(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    number: Number
    message: FromSearcher


class _ToSearcher(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    number: Number
    message: ToSearcher


_encoder = msgspec.msgpack.Encoder()
_from_searcher = msgspec.msgpack.Decoder(_FromSearcher)
_to_searcher = msgspec.msgpack.Decoder(_ToSearcher)


def encode(message: FromSearcher | ToSearcher, number: int = 0) -> bytes:
    return _encoder.encode((number, message))


def decode_from_searcher(data: bytes) -> tuple[int, FromSearcher]:
    """(number, message); msgspec.DecodeError for anything that is not one of the messages."""
    envelope = decoded(_from_searcher, data)
    return envelope.number, envelope.message


def decode_to_searcher(data: bytes) -> tuple[int, ToSearcher]:
    """(number, message); msgspec.DecodeError for anything that is not one of the messages."""
    envelope = decoded(_to_searcher, data)
    return envelope.number, envelope.message


_WINDOW = 1024


class Seen:
    """The numbers of one peer's messages that have come: each is fresh once, whatever their order.

    One that is further behind the newest than the window is never fresh: it may have come before.
    """

    def __init__(self) -> None:
        self._newest = -1
        self._bits = 0  # bit i: newest - i has come

    def is_fresh(self, number: int) -> bool:
        """Whether it comes for the first time; it counts as seen from here on."""
        ahead = number - self._newest
        if ahead > 0:
            self._bits = ((self._bits << ahead) | 1) & ((1 << _WINDOW) - 1) if ahead < _WINDOW else 1
            self._newest = number
            return True
        if -ahead >= _WINDOW or self._bits >> -ahead & 1:
            return False
        self._bits |= 1 << -ahead
        return True

"""What searchers and the trainer say to each other: one frozen struct a message, msgspec on the wire, no pickle.

Versions travel as text (``PolicyVersion.parse``). The trainer answers every ``Heartbeat`` with a ``Beat``, so both
sides notice silence.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

VersionText = Annotated[str, msgspec.Meta(pattern=r"^[0-9]+\.[0-9]+$")]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    pass


# ---- searcher to trainer


class Hello(_Message, frozen=True):
    """First word of a searcher. ``searcher`` is its incarnation: new for each start of the process."""

    token: str
    searcher: str
    host: str
    workers: int  # engine workers that join a broadcast group
    version: VersionText  # the weights it starts from


class Heartbeat(_Message, frozen=True):
    """Sent every ``transport.heartbeat_s`` and whenever prompts are wanted."""

    generated: int  # rollouts finished and scored so far, counted before they are sent
    busy_s: float
    idle_s: float
    version: VersionText
    wanted_prompts: int  # beside those it holds
    received_prompts: int  # by leases so far, so that one under way is not asked for twice
    paused_s: float = 0.0  # of ``idle_s``: applying weights, and computing again what they made stale


class Applied(_Message, frozen=True):
    """The engine now generates with ``version``. ``pause_s``: how long generation stood still for it."""

    version: VersionText
    pause_s: float


class Probed(_Message, frozen=True):
    """``logprobs_nats[i]``: of token i + 1 of the offer's probe given those before it, at temperature 1."""

    version: VersionText
    logprobs_nats: tuple[float, ...]


class ReceiveFailed(_Message, frozen=True):
    version: VersionText
    round: int  # of the offer
    reason: str


class Evaluated(_Message, frozen=True):
    version: VersionText
    accuracy: float
    problems: int
    seconds: float


class SampleRollout(_Message, frozen=True):
    """A rollout as text, for the table in TensorBoard."""

    prompt: str
    completion: str
    reward: float
    version: VersionText


class Goodbye(_Message, frozen=True):
    generated: int
    busy_s: float
    idle_s: float
    paused_s: float = 0.0


FromSearcher = Hello | Heartbeat | Applied | Probed | ReceiveFailed | Evaluated | SampleRollout | Goodbye


# ---- trainer to searcher


class Welcome(_Message, frozen=True):
    """``shards[i]`` is the address of the shard that owns the prompts whose hash is i modulo their number."""

    shards: tuple[str, ...]


class Refused(_Message, frozen=True):
    reason: str


class Beat(_Message, frozen=True):
    pass


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
    reason: str


ToSearcher = Welcome | Refused | Beat | Lease | Offer | Evaluate | Stop

_encoder = msgspec.msgpack.Encoder()
_from_searcher = msgspec.msgpack.Decoder(FromSearcher)
_to_searcher = msgspec.msgpack.Decoder(ToSearcher)


def encode(message: FromSearcher | ToSearcher) -> bytes:
    return _encoder.encode(message)


def decode_from_searcher(data: bytes) -> FromSearcher:
    """msgspec.DecodeError for anything that is not one of the messages."""
    return _from_searcher.decode(data)


def decode_to_searcher(data: bytes) -> ToSearcher:
    """msgspec.DecodeError for anything that is not one of the messages."""
    return _to_searcher.decode(data)

"""Rollouts on the wire: a msgspec header and raw array frames, from searchers to the shard that owns the prompt.

A message is [token, header, prompt tokens, completion tokens, behaviour log-probs]; the arrays of a group are laid
end to end. ZeroMQ's own threads receive while the trainer computes, so nobody has to be polling. Leases bound how
much can be under way, so the receiving side needs no limit of its own.
"""

from __future__ import annotations

import hmac
import logging
import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Protocol

import msgspec
import numpy as np
import zmq

from tba_megatron.errors import TransportError
from tba_megatron.types import PolicySpan, PolicyVersion, Rollout, RolloutGroup, RolloutId, StopReason

_log = logging.getLogger(__name__)


class _Header(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    prompt_id: str
    lease: int
    searcher: str
    source: str
    sequences: Annotated[list[int], msgspec.Meta(min_length=1)]
    lengths: list[Annotated[int, msgspec.Meta(ge=0)]]
    rewards: list[float]
    stop_reasons: list[str]
    spans: list[list[tuple[str, int, int]]]
    has_logprobs: bool


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def owner_of(prompt_id: str, n_shards: int) -> int:
    """The shard of a prompt: a hash that is the same in every process and every run."""
    return zlib.crc32(prompt_id.encode()) % n_shards


def encode_group(group: RolloutGroup) -> list[bytes]:
    """The frames of a group. Its rollouts come from one searcher, and all or none have behaviour log-probs."""
    rollouts = group.rollouts
    with_logprobs = all(r.behaviour_logprobs is not None for r in rollouts)
    header = _Header(
        prompt_id=group.prompt_id,
        lease=group.lease,
        searcher=rollouts[0].rollout_id.searcher,
        source=rollouts[0].source,
        sequences=[r.rollout_id.sequence for r in rollouts],
        lengths=[len(r.token_ids) for r in rollouts],
        rewards=[r.reward for r in rollouts],
        stop_reasons=[r.stop_reason.value for r in rollouts],
        spans=[[(str(s.version), s.start, s.end) for s in r.spans] for r in rollouts],
        has_logprobs=with_logprobs,
    )
    logprobs = [r.behaviour_logprobs for r in rollouts if r.behaviour_logprobs is not None]
    return [
        _encoder.encode(header),
        group.prompt_token_ids.astype("<i4").tobytes(),
        b"".join(r.token_ids.astype("<i4").tobytes() for r in rollouts),
        b"".join(x.astype("<f4").tobytes() for x in logprobs) if with_logprobs else b"",
    ]


def decode_group(frames: Sequence[bytes]) -> RolloutGroup:
    """The group of ``encode_group``; ValueError (msgspec.DecodeError is one) when the frames are not one."""
    if len(frames) != 4:
        raise ValueError(f"a group has 4 frames, not {len(frames)}")
    header = _decoder.decode(frames[0])
    tokens = np.frombuffer(frames[2], "<i4").astype(np.int32)
    if sum(header.lengths) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens for lengths that sum to {sum(header.lengths)}")
    logprobs = np.frombuffer(frames[3], "<f4").astype(np.float32) if header.has_logprobs else None
    if logprobs is not None and len(logprobs) != len(tokens):
        raise ValueError(f"{len(logprobs)} behaviour log-probs for {len(tokens)} tokens")
    ends = list(accumulate(header.lengths))
    rollouts = []
    rows = zip(
        header.sequences,
        header.lengths,
        ends,
        header.rewards,
        header.stop_reasons,
        header.spans,
        strict=True,
    )
    for sequence, length, end, reward, stop_reason, spans in rows:
        rollouts.append(
            Rollout(
                rollout_id=RolloutId(header.searcher, sequence),
                token_ids=tokens[end - length : end],
                reward=reward,
                stop_reason=StopReason(stop_reason),
                spans=tuple(
                    PolicySpan(version=PolicyVersion.parse(version), start=start, end=stop)
                    for version, start, stop in spans
                ),
                source=header.source,
                behaviour_logprobs=None if logprobs is None else logprobs[end - length : end],
            )
        )
    return RolloutGroup(
        prompt_id=header.prompt_id,
        prompt_token_ids=np.frombuffer(frames[1], "<i4").astype(np.int32),
        rollouts=tuple(rollouts),
        lease=header.lease,
    )


class RolloutInbox(Protocol):
    """Where a shard's groups arrive. ``refused`` counts messages that were no group of this run."""

    @property
    def refused(self) -> int: ...

    def drain(self) -> Iterator[RolloutGroup]:
        """What has arrived, without waiting."""
        ...

    def close(self) -> None: ...


class RolloutOutbox(Protocol):
    """A searcher's way to the shards."""

    def send(self, group: RolloutGroup) -> None: ...

    def close(self, linger_s: float = ...) -> None:
        """Wait up to ``linger_s`` for what has not left yet."""
        ...


class RolloutReceiver:
    """A shard's inbox: binds a free port of ``host``; ``drain`` returns what has arrived, without waiting."""

    def __init__(self, host: str, token: str) -> None:
        self._token = token.encode()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        try:
            port = self._socket.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"transport.host: cannot listen on {host}: {error}") from None
        self.address = f"tcp://{host}:{port}"
        self.refused = 0  # messages without the run's token, or that are no group

    def drain(self) -> Iterator[RolloutGroup]:
        while True:
            try:
                token, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not hmac.compare_digest(token, self._token):
                self.refused += 1
                _log.warning("refused a rollout message without the token of this run")
                continue
            try:
                yield decode_group(frames)
            except ValueError as error:
                self.refused += 1
                _log.warning("refused a rollout message: %s", error)

    def close(self) -> None:
        self._context.destroy(linger=0)


class RolloutSender:
    """A searcher's way to all shards. ``send`` never loses a message while the process and the peer live."""

    def __init__(self, addresses: Sequence[str], token: str) -> None:
        self._token = token.encode()
        self._context = zmq.Context()
        self._sockets = []
        for address in addresses:
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 5000)  # zmq's default would wait for a dead trainer for ever
            socket.connect(address)
            self._sockets.append(socket)

    def send(self, group: RolloutGroup) -> None:
        shard = owner_of(group.prompt_id, len(self._sockets))
        self._sockets[shard].send_multipart([self._token, *encode_group(group)], copy=False)

    def close(self, linger_s: float = 5.0) -> None:
        """Wait up to ``linger_s`` for what has not left yet."""
        self._context.destroy(linger=round(linger_s * 1000))

"""A searcher's end of the wire: groups become messages, which are kept until the shard has acknowledged them."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import xxhash
import zmq

from tba_megatron.errors import shown
from tba_megatron.rollout_batch import RolloutBatch, encode
from tba_megatron.transport.delivery import Answer, Message, Outbound
from tba_megatron.transport.rollouts import Head, owner_of
from tba_megatron.types import RolloutGroup

_log = logging.getLogger(__name__)

_CLOSE_POLL_S = 0.05

_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)


class _Lane:
    """The way to one shard. ``pending`` has each group with the bytes it will take."""

    def __init__(self, socket: zmq.Socket[bytes], resend_s: float) -> None:
        self.socket = socket
        self.outbound = Outbound(resend_s=resend_s)
        self.pending: deque[tuple[RolloutGroup, int]] = deque()
        self.pending_bytes = 0


class RolloutSender:
    """A searcher's way to all shards. ``sender`` names this incarnation and is never used again.

    A message holds ``batch_bytes`` and a group at most, and is sent again when ``resend_s`` pass without an answer.
    Nothing is lost while the process lives and the shard, or one that has its log, can be reached.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        token: str,
        sender: str,
        *,
        resend_s: float = 10.0,
        batch_bytes: int = 8 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token, self._sender, self._batch_bytes, self._clock = token.encode(), sender, batch_bytes, clock
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._lanes: list[_Lane] = []
        self._lane_of: dict[Any, _Lane] = {}
        for address in addresses:
            socket = self._context.socket(zmq.DEALER)
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 500)  # zmq's default would wait for a dead trainer for ever
            socket.connect(address)
            self._poller.register(socket, zmq.POLLIN)
            lane = _Lane(socket, resend_s)
            self._lanes.append(lane)
            self._lane_of[socket] = lane

    @property
    def room(self) -> bool:
        return all(lane.pending_bytes <= self._batch_bytes for lane in self._lanes)

    @property
    def unacknowledged(self) -> int:
        """Rollouts that no shard has said to have."""
        return sum(
            lane.outbound.unacknowledged_rollouts + sum(len(group.rollouts) for group, _ in lane.pending)
            for lane in self._lanes
        )

    def send(self, group: RolloutGroup) -> None:
        """Sent by the next ``flush``, or at once when it fills a message."""
        lane = self._lanes[owner_of(group.prompt_id, len(self._lanes))]
        n_bytes = _size_bytes(group)
        lane.pending.append((group, n_bytes))
        lane.pending_bytes += n_bytes
        if lane.pending_bytes >= self._batch_bytes:
            self._hear()
            self._send_pending(lane)

    def flush(self) -> None:
        self._hear()
        now_s = self._clock()
        for lane in self._lanes:
            for message in lane.outbound.due(now_s):
                self._post(lane, message)
            self._send_pending(lane)
            if lane.pending and lane.outbound.asks(now_s):
                lane.socket.send_multipart([self._token, self._head(lane.outbound.next_sequence, 0)])

    def close(self, linger_s: float = 5.0) -> int:
        if self._context.closed:
            return 0
        deadline_s = self._clock() + linger_s
        self.flush()
        while self.unacknowledged and (left_s := deadline_s - self._clock()) > 0:
            self._poller.poll(math.ceil(min(left_s, _CLOSE_POLL_S) * 1000))
            self.flush()
        lost = self.unacknowledged
        if lost:
            _log.warning("%d rollouts were not acknowledged within %g s and may be lost", lost, linger_s)
        self._context.destroy(linger=0)
        return lost

    def _hear(self) -> None:
        for socket, _ in self._poller.poll(0):
            outbound, now_s = self._lane_of[socket].outbound, self._clock()
            while socket.poll(0):
                try:
                    outbound.heard(_answers.decode(socket.recv()), now_s)
                except ValueError as error:
                    _log.warning("an answer to rollouts that is none: %s", shown(str(error)))

    def _send_pending(self, lane: _Lane) -> None:
        outbound = lane.outbound
        while lane.pending and outbound.may_send:
            most_bytes = min(self._batch_bytes, outbound.room_bytes)
            if most_bytes < min(self._batch_bytes, lane.pending_bytes) and outbound.n_unacknowledged:
                return  # an answer is on its way: a larger message is less work for both ends
            groups, n_bytes = [], 0
            while lane.pending and n_bytes < most_bytes:  # not less, or a full list would leave a small rest
                group, group_bytes = lane.pending.popleft()
                groups.append(group)
                n_bytes += group_bytes
            lane.pending_bytes -= n_bytes
            batch = RolloutBatch.of_groups(groups)
            payload = encode(batch)
            checksum = xxhash.xxh3_64_intdigest(payload)
            self._post(lane, lane.outbound.sent(payload, checksum, batch.n_rollouts, self._clock()))

    def _post(self, lane: _Lane, message: Message) -> None:
        head = self._head(message.sequence, message.checksum)
        lane.socket.send_multipart([self._token, head, message.payload], copy=False)

    def _head(self, sequence: int, checksum: int) -> bytes:
        return _encoder.encode(Head(self._sender, sequence, checksum))


def _size_bytes(group: RolloutGroup) -> int:
    """About what a group takes in a message; 100 bytes a rollout are its columns."""
    numbers = len(group.prompt_token_ids)
    for rollout in group.rollouts:
        numbers += len(rollout.token_ids)
        if rollout.behaviour_logprobs is not None:
            numbers += len(rollout.behaviour_logprobs)
    return 4 * numbers + 100 * (len(group.rollouts) + 1)

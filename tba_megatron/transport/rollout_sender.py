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

from tba_megatron.errors import TransportError, shown
from tba_megatron.rollout_batch import RolloutBatch, encode
from tba_megatron.transport.delivery import Answer, Message, Outbound
from tba_megatron.transport.rollouts import Head, owner_of
from tba_megatron.transport.sockets import MOST_BYTES, Dealer
from tba_megatron.types import RolloutGroup
from tba_megatron.untrusted import decoded

_log = logging.getLogger(__name__)

_CLOSE_POLL_S = 0.05
_BESIDE_PAYLOAD_BYTES = 1024  # of a message: token and head

_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)


class _Lane:
    """The way to one shard. ``pending`` has each group with the bytes it will take."""

    def __init__(self, dealer: Dealer, resend_s: float) -> None:
        self.dealer = dealer
        self.outbound = Outbound(resend_s=resend_s)
        self.pending: deque[tuple[RolloutGroup, int]] = deque()
        self.pending_bytes = 0


class RolloutSender:
    """A searcher's way to all shards. ``sender`` names this incarnation and is never used again.

    A message holds ``batch_bytes`` and a group at most, and is sent again when ``resend_s`` pass without an answer.
    Nothing is lost while the process lives and the shard, or one that has its log, can be reached. TransportError for
    a message that shards would not take, which is of more than ``most_bytes``.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        secret: str,
        sender: str,
        *,
        resend_s: float = 10.0,
        batch_bytes: int = 8 << 20,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token, self._incarnation, self._clock = secret.encode(), sender, clock
        self._resend_s, self._batch_bytes, self._most_bytes = resend_s, batch_bytes, most_bytes
        self._numberings = 0
        self._context = zmq.Context()
        try:
            self._lanes = [_Lane(dealer, resend_s) for dealer in self._dial(addresses, secret)]
        except TransportError:
            self._context.destroy(linger=0)
            raise
        self._listen()

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

    def reconnect(self, addresses: Sequence[str], secret: str) -> int:
        dealers = self._dial(addresses, secret)
        for lane in self._lanes:
            lane.dealer.close(0.0)
        self._token = secret.encode()
        given_up = 0
        if len(dealers) == len(self._lanes):
            for lane, dealer in zip(self._lanes, dealers, strict=True):
                lane.dealer = dealer
                lane.outbound.reconnected()
        else:
            given_up = self._deal_anew(dealers)
        self._listen()
        return given_up

    def flush(self) -> None:
        self._hear()
        now_s = self._clock()
        for lane in self._lanes:
            for message in lane.outbound.due(now_s):
                self._post(lane, message)
            self._send_pending(lane)
            if lane.pending and lane.outbound.asks(now_s):
                lane.dealer.socket.send_multipart([self._token, self._head(lane, lane.outbound.next_sequence, 0)])

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

    def _dial(self, addresses: Sequence[str], secret: str) -> list[Dealer]:
        dealers: list[Dealer] = []
        try:
            for address in addresses:
                dealers.append(Dealer(address, secret, context=self._context))
        except TransportError:
            for dealer in dealers:
                dealer.close(0.0)
            raise
        return dealers

    def _listen(self) -> None:
        self._poller = zmq.Poller()
        self._lane_of: dict[Any, _Lane] = {lane.dealer.socket: lane for lane in self._lanes}
        for socket in self._lane_of:
            self._poller.register(socket, zmq.POLLIN)

    def _deal_anew(self, dealers: Sequence[Dealer]) -> int:
        """Other shards: a numbering of its own, under a name of its own, since a log may come back that has the old."""
        given_up = sum(lane.outbound.unacknowledged_rollouts for lane in self._lanes)
        pending = [pair for lane in self._lanes for pair in lane.pending]
        if given_up:
            _log.warning(
                "the trainer had %d shards and has %d: %d rollouts that were sent and not acknowledged are given up",
                len(self._lanes),
                len(dealers),
                given_up,
            )
        self._numberings += 1
        self._lanes = [_Lane(dealer, self._resend_s) for dealer in dealers]
        for group, n_bytes in pending:
            lane = self._lanes[owner_of(group.prompt_id, len(self._lanes))]
            lane.pending.append((group, n_bytes))
            lane.pending_bytes += n_bytes
        return given_up

    def _hear(self) -> None:
        for socket, _ in self._poller.poll(0):
            outbound, now_s = self._lane_of[socket].outbound, self._clock()
            while socket.poll(0):
                try:
                    outbound.heard(decoded(_answers, socket.recv()), now_s)
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
            if len(payload) + _BESIDE_PAYLOAD_BYTES > self._most_bytes:
                raise TransportError(
                    f"{batch.n_rollouts} rollouts of {batch.n_groups} prompts take {len(payload)} bytes, and a shard "
                    f"takes {self._most_bytes} in a message; lower search.completions_per_prompt or "
                    f"search.max_new_tokens"
                )
            checksum = xxhash.xxh3_64_intdigest(payload)
            self._post(lane, lane.outbound.sent(payload, checksum, batch.n_rollouts, self._clock()))

    def _post(self, lane: _Lane, message: Message) -> None:
        head = self._head(lane, message.sequence, message.checksum)
        lane.dealer.socket.send_multipart([self._token, head, message.payload], copy=False)

    def _head(self, lane: _Lane, sequence: int, checksum: int) -> bytes:
        name = f"{self._incarnation}+{self._numberings}" if self._numberings else self._incarnation
        return _encoder.encode(Head(name, sequence, checksum, lane.outbound.oldest))


def _size_bytes(group: RolloutGroup) -> int:
    """About what a group takes in a message; 100 bytes a rollout are its columns."""
    numbers = len(group.prompt_token_ids)
    for rollout in group.rollouts:
        numbers += len(rollout.token_ids)
        if rollout.behaviour_logprobs is not None:
            numbers += len(rollout.behaviour_logprobs)
    return 4 * numbers + 100 * (len(group.rollouts) + 1)

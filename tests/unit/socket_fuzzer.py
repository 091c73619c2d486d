"""An attacker of a listening socket: some of it knows the secret, some of it does not even speak the protocol."""

from __future__ import annotations

import random
import socket as socketlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from enum import StrEnum

import zmq

from tba_megatron.transport import sockets
from tba_megatron.transport.sockets import Dealer

RAW_EVERY = 40  # messages between two connections without ZeroMQ
STRANGER_EVERY = 400  # between two peers without keys, and between two frames that end their connection
HELD_OPEN = 20  # of those without ZeroMQ
REMEMBERED = 100  # messages that may be sent again
SENT_AHEAD = 1000  # messages that wait to leave
OTHER_SECRET = "0123456789abcdef" * 4

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"


class Attack(StrEnum):
    VALID = "a valid message"
    REPLAYED = "one that was sent before"
    NOISE = "random frames"
    MUTATED = "a valid one that was changed somewhere"
    WRONG_SECRET = "one of another run"
    TOO_LARGE = "a frame that may just be, and one more"
    CUT_OFF = "a frame that is too large, on a connection of its own"
    RAW = "a connection without ZeroMQ"
    STRANGER = "a peer without keys"


def attack(
    address: str,
    secret: str,
    valid: Callable[[], list[bytes]],
    *,
    seed: int,
    messages: int,
    most_bytes: int,
) -> Iterator[tuple[Attack, list[bytes]]]:
    """Yields what it did after each of its acts, and the frames of what it sent as a message.

    ``valid`` makes the next valid message. All messages but ``CUT_OFF`` are on one connection: they arrive in order.
    """
    rng = random.Random(seed)
    remembered: deque[list[bytes]] = deque(maxlen=REMEMBERED)
    held: deque[socketlib.socket] = deque()
    with ExitStack() as stack:
        dealer = Dealer(address, secret)
        stack.callback(dealer.close, 60.0)
        dealer.socket.setsockopt(zmq.SNDHWM, SENT_AHEAD)
        for turn in range(messages):
            kind, frames = _message(rng, secret, valid, remembered, most_bytes)
            dealer.socket.send_multipart(frames)
            yield kind, frames
            if turn % RAW_EVERY == 0:
                held.append(_connect(address))
                with suppress(ConnectionError):  # it may be cut off in the midst of it
                    held[-1].sendall(_raw(rng))
                if len(held) > HELD_OPEN or rng.random() < 0.5:
                    held.popleft().close()
                yield Attack.RAW, []
            if turn % STRANGER_EVERY == 0:
                _be_thrown_out(address, secret, bytes(most_bytes + 1000))
                yield Attack.CUT_OFF, []
                if address.startswith("tcp:"):
                    _be_thrown_out(address, None, frames[0])
                    yield Attack.STRANGER, []
        for connection in held:
            connection.close()


def _message(
    rng: random.Random,
    secret: str,
    valid: Callable[[], list[bytes]],
    remembered: deque[list[bytes]],
    most_bytes: int,
) -> tuple[Attack, list[bytes]]:
    kinds = [Attack.VALID, Attack.REPLAYED, Attack.NOISE, Attack.MUTATED, Attack.WRONG_SECRET, Attack.TOO_LARGE]
    (kind,) = rng.choices(kinds, [10, 10, 40, 30, 10, 0.2])
    if kind is Attack.NOISE:
        return kind, [rng.randbytes(rng.choice((0, 1, 5, 64, 300))) for _ in range(rng.choice((1, 1, 2, 3, 3, 4, 9)))]
    if kind is Attack.TOO_LARGE:
        return kind, [secret.encode(), bytes(most_bytes), b""]
    if kind is Attack.REPLAYED and remembered:
        return kind, rng.choice(remembered)
    frames = valid()
    if kind is Attack.MUTATED:
        return kind, _mutated(rng, frames)
    if kind is Attack.WRONG_SECRET:
        return kind, [frame.replace(secret.encode(), OTHER_SECRET.encode()) for frame in frames]
    remembered.append(frames)
    return Attack.VALID, frames


def _mutated(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """One change: a bit, a cut, some more bytes; a frame that is missing, doubled or in another place."""
    frames = list(frames)
    i = rng.randrange(len(frames))
    frame = frames[i]
    match rng.randrange(7):
        case 0 if frame:
            at = rng.randrange(len(frame))
            frames[i] = frame[:at] + bytes([frame[at] ^ (1 << rng.randrange(8))]) + frame[at + 1 :]
        case 1:
            frames[i] = frame[: rng.randrange(len(frame) + 1)]
        case 2:
            frames[i] = frame + rng.randbytes(rng.randrange(1, 20))
        case 3 if len(frames) > 1:
            del frames[i]
        case 4:
            frames.insert(i, frame)
        case 5:
            rng.shuffle(frames)
        case _:
            at = rng.randrange(len(frame) + 1)
            frames[i] = frame[:at] + rng.randbytes(8) + frame[at + 8 :]
    return frames


def _be_thrown_out(address: str, secret: str | None, frame: bytes) -> None:
    """Send ``frame`` until the other end has closed the connection."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if secret is not None and address.startswith("tcp:"):
            socket.curve_publickey, socket.curve_secretkey = sockets._curve_keys(secret, "client")
            socket.curve_serverkey, _ = sockets._curve_keys(secret, "server")
        with socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            socket.connect(address)
            with suppress(zmq.Again):  # it is thrown out already
                socket.send(frame, zmq.NOBLOCK)
            assert monitor.poll(60_000), "it was not thrown out"
            socket.disable_monitor()


def _raw(rng: random.Random) -> bytes:
    mechanism = rng.choice((b"NULL", b"PLAIN", b"CURVE")).ljust(20, b"\0")
    greeting = _GREETING + mechanism + bytes(32)
    noise = rng.randbytes(rng.randrange(2000))
    return rng.choice(
        (b"", noise, bytes(500), b"GET / HTTP/1.1\r\n\r\n", greeting[: rng.randrange(64)], greeting + noise)
    )


def _connect(address: str) -> socketlib.socket:
    if address.startswith("ipc:"):
        connection = socketlib.socket(socketlib.AF_UNIX)
        connection.connect(address.removeprefix("ipc://"))
        return connection
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socketlib.create_connection((host, int(port)))

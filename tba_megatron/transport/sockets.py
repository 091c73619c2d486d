"""Sockets that nobody but holders of the run's secret can use: ROUTERs that listen, DEALERs that dial.

``ipc``: socket files in a folder that its owner alone can enter. ``tcp``: CURVE always; the keys of both sides come
from the secret, and a server lets only the client key in. What is protected and what is not is in docs/security.md.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tba_megatron.config_search import TransportConfig
from tba_megatron.errors import KeyFileError, TransportError, shown

_log = logging.getLogger(__name__)

MOST_BYTES = 64 << 20  # of a message, where nobody says otherwise

_SECRET = re.compile(r"[0-9a-f]{64}")
_DOMAIN = "tba"  # of ZAP
_WAITING_MESSAGES = (
    4096  # of one peer in a queue: more wait in its own memory, and answers it does not read are dropped
)
_FRAME_EXTRA_BYTES = 64  # what CURVE adds to a frame
_LONGEST_TEMPORARY = 50  # characters of a folder in which a socket's path stays below the 107 that the system takes
_LISTEN_TRIES = 10  # another process of the run may remove an empty folder just when this one wants to listen in it
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_MONITOR_STOPPED
)


# ---- the secret


def new_secret() -> str:
    """64 hexadecimal digits."""
    return secrets.token_hex(32)


def read_secret(key_file: Path) -> str:
    """The secret in ``key_file``. KeyFileError unless that is this user's alone and holds 64 hexadecimal digits."""
    try:
        handle = os.open(key_file, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not hold it up
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise KeyFileError(f"transport.rendezvous.key_file: {key_file} is not a file")
            if found.st_uid != os.geteuid():
                raise KeyFileError(f"transport.rendezvous.key_file: {key_file} is not a file of this user")
            if found.st_mode & 0o077:
                raise KeyFileError(
                    f"transport.rendezvous.key_file: others than its owner have access to {key_file} "
                    f"(mode {stat.S_IMODE(found.st_mode):03o}); chmod 600 it"
                )
            text = file.read(1024).decode("ascii", "replace").strip().lower()
    except OSError as error:
        raise KeyFileError(
            f"transport.rendezvous.key_file: cannot read {key_file} ({error.strerror}); it holds the secret of trainer "
            f"and searchers, 64 hexadecimal digits"
        ) from None
    if not _SECRET.fullmatch(text):
        raise KeyFileError(f"transport.rendezvous.key_file: {key_file} does not hold 64 hexadecimal digits")
    return text


def _digest(secret: str, purpose: bytes, n_bytes: int) -> bytes:
    return blake2b(secret.encode(), digest_size=n_bytes, person=purpose).digest()


def _curve_keys(secret: str, side: Literal["server", "client"]) -> tuple[bytes, bytes]:
    """(public key, secret key) of all servers or all clients of a run, as ZeroMQ writes them."""
    key = z85.encode(_digest(secret, b"tba " + side.encode(), 32))
    return zmq.curve_public(key), key


# ---- where to listen


@dataclass(frozen=True, kw_only=True, slots=True)
class Listen:
    """Where a server may listen. ``folder``: of the ipc sockets of this attempt."""

    sockets: Literal["ipc", "tcp"]
    host: str
    folder: Path


def listen_at(transport: TransportConfig, run_folder: Path, secret: str) -> Listen:
    folder = sockets_folder(run_folder) / _digest(secret, b"tba folder", 6).hex()
    return Listen(sockets=transport.sockets, host=transport.host, folder=folder)


def sockets_folder(run_folder: Path) -> Path:
    """Of all ipc sockets of a run on this host; outside the run folder, since the path of a socket has to be short."""
    temporary = tempfile.gettempdir()
    if len(temporary.encode()) > _LONGEST_TEMPORARY:
        temporary = "/tmp"
    run = blake2b(os.fsencode(run_folder.resolve()), digest_size=6).hexdigest()
    return Path(temporary) / f"tba-{os.geteuid()}-{run}"


def remove_sockets(run_folder: Path) -> None:
    """What a killed trainer left. Nothing there is fine, and what belongs to another user stays."""
    shutil.rmtree(sockets_folder(run_folder), ignore_errors=True)


def _own_folder(folder: Path) -> None:
    """Create it, or see that it is this user's alone."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise TransportError(
            f"transport.sockets: {folder} is not a folder that this user alone can enter; remove it, or see who made it"
        )


# ---- the server's side


def worth_a_line(n: int) -> bool:
    """Whether to tell of the ``n``-th time: ever more seldom, since a flood must not fill the disk with lines."""
    return n <= 8 or n & (n - 1) == 0


class _Watch:
    """Counts the peers of a listening socket in a thread of its own, which sleeps until something happens.

    libzmq tells of most failed handshakes, but a peer that does not speak ZMTP at all only ends. So whoever was
    accepted and ended without having been let in counts too.
    """

    def __init__(self, socket: zmq.Socket[bytes], name: str) -> None:
        self._socket = socket
        self._accepted = self._succeeded = self._failed = self._ended = 0
        monitor = socket.get_monitor_socket(_EVENTS)
        self._thread = threading.Thread(target=self._run, args=(monitor,), name=f"watch-{name}", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        return max(self._failed, min(self._accepted - self._succeeded, self._ended))

    @property
    def disconnects(self) -> int:
        return max(0, self._ended - self.refused)

    def _run(self, monitor: zmq.Socket[bytes]) -> None:
        with monitor:
            while (event := recv_monitor_message(monitor)["event"]) != zmq.EVENT_MONITOR_STOPPED:
                self._accepted += event == zmq.EVENT_ACCEPTED
                self._succeeded += event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                self._ended += event == zmq.EVENT_DISCONNECTED
                self._failed += event in (
                    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
                    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                )

    def close(self) -> None:
        self._socket.disable_monitor()
        self._thread.join()


class _ClientKey:
    """What pyzmq asks whether a client may come in."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


class Router:
    """A ROUTER that listens as ``name``. ``socket`` is for one thread; so are ``receive`` and ``refuse``.

    A frame of more than ``most_bytes`` ends its connection, before it takes any memory; messages of more in all are
    refused one by one. A peer that dials again under its identity takes the place of its old connection.
    TransportError when it cannot listen.
    """

    def __init__(self, listen: Listen, name: str, secret: str, *, port: int = 0, most_bytes: int) -> None:
        self._name, self._most_bytes = name, most_bytes
        self._refused_messages = 0
        self._path: Path | None = None
        self._gate: ThreadAuthenticator | None = None
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        self.socket.set_hwm(_WAITING_MESSAGES)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, most_bytes + _FRAME_EXTRA_BYTES)
        self._watch = _Watch(self.socket, name)
        try:
            if listen.sockets == "tcp":
                self._guard(secret)
                self._bind(listen.host, port)
            else:
                self._path = listen.folder / name
                self._bind_file(self._path)
        except TransportError:
            self.close(0.0)
            raise
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def refused(self) -> int:
        """Peers that were not let in, and messages that were refused; any thread may read it."""
        return self._watch.refused + self._refused_messages

    @property
    def disconnects(self) -> int:
        """Peers that were in and are gone: by themselves, lost, or cut off for a frame that is too large.

        libzmq does not tell which.
        """
        return self._watch.disconnects

    def receive(self, most_frames: int) -> list[zmq.Frame] | None:
        """The next message, after the identity of its peer; None when none waits, empty when it was refused."""
        try:
            frames = [self.socket.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None
        n_frames, n_bytes, more = 0, 0, frames[0].more
        while more:  # a message is there as a whole
            frame = self.socket.recv(copy=False)
            n_frames, n_bytes, more = n_frames + 1, n_bytes + len(frame), frame.more
            if n_frames <= most_frames and n_bytes <= self._most_bytes:
                frames.append(frame)
        if n_frames > most_frames or n_bytes > self._most_bytes:
            self.refuse(f"{n_frames} frames with {n_bytes} bytes")
            return []
        return frames

    def refuse(self, reason: str) -> None:
        """Count a message, and say so, though not each time."""
        self._refused_messages += 1
        if worth_a_line(self._refused_messages):
            _log.warning("%s refused a message: %s (%d so far)", self._name, shown(reason), self._refused_messages)

    def close(self, linger_s: float = 0.5) -> None:
        """Wait up to ``linger_s`` for what has not left yet; the socket's file goes, and its folders once empty."""
        if self.context.closed:
            return
        self._watch.close()
        if self._gate is not None:
            self._gate.stop()
        self.context.destroy(linger=round(linger_s * 1000))
        if self._path is not None:
            for remove in (self._path.unlink, self._path.parent.rmdir, self._path.parent.parent.rmdir):
                with suppress(OSError):  # gone, or used by others
                    remove()

    def _guard(self, secret: str) -> None:
        self._gate = ThreadAuthenticator(self.context)
        self._gate.start()
        client, _ = _curve_keys(secret, "client")
        self._gate.configure_curve_callback(_DOMAIN, _ClientKey(client))
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = _curve_keys(secret, "server")
        self.socket.zap_domain = _DOMAIN.encode()
        _keep_alive(self.socket)

    def _bind(self, host: str, port: int) -> None:
        try:
            self.socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            if not port:
                raise TransportError(f"transport.host: cannot listen on {host}: {error}") from None
            raise TransportError(
                f"transport.control_port: cannot listen on {host}:{port} ({error}); choose another port, or 0 for a "
                f"free one"
            ) from None

    def _bind_file(self, path: Path) -> None:
        for tries_left in reversed(range(_LISTEN_TRIES)):
            try:
                for folder in (path.parent.parent, path.parent):
                    _own_folder(folder)
                self.socket.bind(f"ipc://{path}")
                return
            except (OSError, zmq.ZMQError) as error:
                if error.errno != errno.ENOENT or not tries_left:
                    raise TransportError(f"transport.sockets: cannot listen on {path}: {error}") from None


# ---- the client's side


class Dealer:
    """A DEALER that dials ``address``, again and again while nobody is there. For one thread.

    ``identity`` keeps its name over a lost connection. With a ``context``, that stays the caller's to end.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        *,
        identity: str = "",
        most_bytes: int = MOST_BYTES,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        if not address.startswith(("ipc://", "tcp://")):
            raise TransportError(f"{shown(address)} is not the address of an ipc or tcp socket")
        self._context, self._own = context or zmq.Context(), context is None
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.set_hwm(0)  # a searcher must not stand still because its trainer is away
        self.socket.setsockopt(zmq.LINGER, 500)  # zmq's default would wait for a dead trainer for ever
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self.socket.setsockopt(zmq.MAXMSGSIZE, most_bytes + _FRAME_EXTRA_BYTES)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        if address.startswith("tcp://"):
            self.socket.curve_publickey, self.socket.curve_secretkey = _curve_keys(secret, "client")
            self.socket.curve_serverkey, _ = _curve_keys(secret, "server")
            _keep_alive(self.socket)
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.close(0.0)
            raise TransportError(f"cannot dial {shown(address)}: {error}") from None

    def close(self, linger_s: float = 0.5) -> None:
        """Wait up to ``linger_s`` for what has not left yet; with a context of others, they wait when they end it."""
        self.socket.close(linger=round(linger_s * 1000))
        if self._own:
            self._context.destroy(linger=round(linger_s * 1000))


def _keep_alive(socket: zmq.Socket[bytes]) -> None:
    """A host that is gone without a word is noticed after two minutes; a process that stands still is not gone."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 6)

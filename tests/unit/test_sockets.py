"""Who may listen and dial where, and what does not get in."""

import logging
import os
import socket as socketlib
import stat
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq

from tba_megatron.config_search import TransportConfig
from tba_megatron.errors import TransportError
from tba_megatron.transport import sockets
from tba_megatron.transport.sockets import (
    Dealer,
    Listen,
    Router,
    listen_at,
    new_secret,
    read_secret,
    remove_sockets,
    sockets_folder,
)

SECRET = "5a" * 32
OTHER = "a5" * 32
KINDS = ["ipc", "tcp"]


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sockets.tempfile, "gettempdir", lambda: "/tmp")  # pytest's own are too long for sockets
    yield tmp_path
    remove_sockets(tmp_path)


def listen_on(kind: str, run_folder: Path, secret: str = SECRET) -> Listen:
    return listen_at(TransportConfig(sockets=kind), run_folder, secret)


@contextmanager
def router_on(kind: str, run_folder: Path, name: str = "control", most_bytes: int = 10_000, **options):
    router = Router(listen_on(kind, run_folder), name, SECRET, most_bytes=most_bytes, **options)
    try:
        yield router
    finally:
        router.close(0.0)


@contextmanager
def dealer_to(address: str, secret: str = SECRET, **options):
    dealer = Dealer(address, secret, **options)
    try:
        yield dealer
    finally:
        dealer.close(0.0)


@contextmanager
def connection_to(address: str):
    """Without ZeroMQ."""
    family = socketlib.AF_UNIX if address.startswith("ipc://") else socketlib.AF_INET
    with socketlib.socket(family) as connection:
        host, _, port = address[6:].rpartition(":")
        connection.connect(address[6:] if family == socketlib.AF_UNIX else (host, int(port)))
        yield connection


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.001)


def received(router: Router, most_frames: int = 3) -> list[bytes]:
    """The frames of the next message, its peer first."""
    assert router.socket.poll(60_000), "no message"
    return [frame.bytes for frame in router.receive(most_frames) or []]


def assert_goes_through(router: Router, word: bytes = b"word") -> None:
    with dealer_to(router.address) as dealer:
        dealer.socket.send_multipart([word, b"second"])
        peer, *frames = received(router)
        assert frames == [word, b"second"]
        router.socket.send_multipart([peer, b"answer"])
        assert dealer.socket.poll(60_000)
        assert dealer.socket.recv() == b"answer"


# ---- the secret


def test_a_secret_is_64_digits_and_never_the_same():
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    assert all(len(secret) == 64 and int(secret, 16) >= 0 for secret in made)


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("text", [SECRET, f"{SECRET}\n", f"  {SECRET.upper()}\r\n"])
def test_a_key_file_holds_the_secret(tmp_path, text):
    assert read_secret(key_file(tmp_path, text)) == SECRET


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o622, 0o610])
def test_a_key_file_that_others_have_access_to_is_refused(tmp_path, mode):
    with pytest.raises(TransportError, match=rf"others than its owner have access to .*key \(mode {mode:o}\)"):
        read_secret(key_file(tmp_path, SECRET, mode))


@pytest.mark.parametrize("text", ["", SECRET[:-1], SECRET + "0", SECRET[:-1] + "g", f"{SECRET}\n{SECRET}", "é" * 32])
def test_a_key_file_without_64_digits_is_refused(tmp_path, text):
    with pytest.raises(TransportError, match="key does not hold 64 hexadecimal digits") as caught:
        read_secret(key_file(tmp_path, text))
    assert SECRET[:8] not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_file_that_is_none_is_refused(tmp_path, monkeypatch):
    with pytest.raises(TransportError, match=r"cannot read .*missing \(No such file or directory\)"):
        read_secret(tmp_path / "missing")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TransportError, match=r"cannot read .*folder \(Is a directory\)"):
        read_secret(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TransportError, match="pipe is not a file"):  # and nobody waits for its other end
        read_secret(tmp_path / "pipe")
    path = key_file(tmp_path, SECRET)
    monkeypatch.setattr(sockets.os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(TransportError, match="key is not a file of this user"):
        read_secret(path)


# ---- where to listen


def test_a_run_has_one_folder_of_sockets_and_each_attempt_one_in_it(run_folder, monkeypatch):
    monkeypatch.chdir(run_folder)
    (run_folder / "other").mkdir()
    assert sockets_folder(run_folder) == sockets_folder(Path(".")) == sockets_folder(Path("other/.."))
    assert sockets_folder(run_folder) != sockets_folder(run_folder / "other")
    first, second = listen_on("ipc", run_folder), listen_on("ipc", run_folder, OTHER)
    assert first == listen_on("ipc", run_folder)
    assert first.folder != second.folder
    assert first.folder.parent == second.folder.parent == sockets_folder(run_folder)
    assert SECRET[:12] not in first.folder.name


@pytest.mark.parametrize("length", [1, 50, 51, 200])
def test_the_path_of_a_socket_is_short_however_long_that_of_temporary_files_is(monkeypatch, tmp_path, length):
    monkeypatch.setattr(sockets.tempfile, "gettempdir", lambda: "/" + "t" * (length - 1))
    monkeypatch.setattr(sockets.os, "geteuid", lambda: 2**32 - 2)
    assert len(str(listen_on("ipc", tmp_path).folder / "shard-99999")) <= 107


def test_the_folder_of_sockets_is_its_owners_alone(run_folder):
    before = os.umask(0)
    try:
        with router_on("ipc", run_folder) as router:
            folder = Path(router.address.removeprefix("ipc://")).parent
            for each in (folder, folder.parent):
                assert stat.S_IMODE(each.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def as_file(path: Path) -> None:
    path.touch(mode=0o600)


def as_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700, exist_ok=True)
    path.symlink_to(path.parent / "elsewhere")


def as_open_folder(path: Path) -> None:
    path.mkdir()
    path.chmod(0o710)


@pytest.mark.parametrize("make", [as_file, as_link, as_open_folder])
@pytest.mark.parametrize("level", [0, 1])
def test_a_folder_that_others_may_have_made_is_refused(tmp_path, make, level):
    run, attempt = tmp_path / "run", tmp_path / "run" / "attempt"
    if level:
        run.mkdir(mode=0o700)
    make([run, attempt][level])
    with pytest.raises(TransportError, match="is not a folder that this user alone can enter"):
        Router(Listen(sockets="ipc", host="", folder=attempt), "control", SECRET, most_bytes=100)


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setattr(sockets.os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(TransportError, match="is not a folder that this user alone can enter"):
        Router(Listen(sockets="ipc", host="", folder=tmp_path / "run" / "a"), "control", SECRET, most_bytes=100)


def test_sockets_go_with_their_servers_and_the_folder_with_the_last(run_folder):
    folder = sockets_folder(run_folder)
    with router_on("ipc", run_folder) as control:
        with router_on("ipc", run_folder, "shard-0") as shard:
            assert sorted(path.name for path in folder.rglob("*")) == [folder_name(control), "control", "shard-0"]
            assert_goes_through(shard)
        assert_goes_through(control)
    assert not folder.exists()


def folder_name(router: Router) -> str:
    return Path(router.address.removeprefix("ipc://")).parent.name


def test_what_a_killed_server_left_is_removed_and_does_not_disturb_the_next(run_folder):
    folder = listen_on("ipc", run_folder).folder
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    with socketlib.socket(socketlib.AF_UNIX) as left:
        left.bind(str(folder / "control"))
    with router_on("ipc", run_folder) as router:
        assert_goes_through(router)
    folder.mkdir(parents=True)
    (folder / "control").touch()
    remove_sockets(run_folder)
    assert not folder.parent.exists()
    remove_sockets(run_folder)


def test_removing_sockets_follows_no_link(run_folder, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    sockets_folder(run_folder).symlink_to(tmp_path / "precious")
    try:
        remove_sockets(run_folder)
        assert (tmp_path / "precious" / "file").exists()
    finally:
        sockets_folder(run_folder).unlink()


def test_a_port_that_is_taken_and_a_host_that_is_not_here_are_named(run_folder):
    with router_on("tcp", run_folder) as router:
        port = int(router.address.rpartition(":")[2])
        with (
            pytest.raises(
                TransportError, match=rf"^transport\.control_port: cannot listen on 127\.0\.0\.1:{port} \(Add"
            ),
            router_on("tcp", run_folder, port=port),
        ):
            pass
    elsewhere = Listen(sockets="tcp", host="203.0.113.1", folder=run_folder)
    with pytest.raises(TransportError, match=r"^transport\.host: cannot listen on 203\.0\.113\.1"):
        Router(elsewhere, "control", SECRET, most_bytes=100)


@pytest.mark.parametrize(
    "address", ["", "inproc://here", "127.0.0.1:80", "tcp://nowhere", "ipc://" + "a" * 200, "tcp://:"]
)
def test_an_address_that_is_none_is_one_line(address):
    with pytest.raises(TransportError) as caught:
        Dealer(address, SECRET)
    assert "\n" not in str(caught.value)


# ---- who gets in


@pytest.mark.parametrize("kind", KINDS)
def test_messages_go_both_ways_and_nobody_is_refused(run_folder, kind):
    with router_on(kind, run_folder) as router:
        for _ in range(3):
            assert_goes_through(router)
        until(lambda: router.disconnects == 3)
        assert router.refused == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_dials_again_keeps_its_identity(run_folder, kind):
    with router_on(kind, run_folder) as router, dealer_to(router.address, identity="me") as first:
        first.socket.send(b"1")
        assert received(router) == [b"me", b"1"]
        with dealer_to(router.address, identity="me") as second:
            second.socket.send(b"2")
            assert received(router) == [b"me", b"2"]
            router.socket.send_multipart([b"me", b"answer"])
            assert second.socket.poll(60_000)
        assert not first.socket.poll(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_may_dial_before_anybody_listens(run_folder, kind):
    with router_on(kind, run_folder) as router:
        address, port = router.address, int(router.address.rpartition(":")[2]) if kind == "tcp" else 0
    with dealer_to(address) as dealer:
        dealer.socket.send(b"early")
        with router_on(kind, run_folder, port=port) as router:
            assert received(router)[1:] == [b"early"]


def strangers() -> dict[str, Callable[[zmq.Socket, str], None]]:
    def with_keys(socket: zmq.Socket, client: str, server: str) -> None:
        socket.curve_publickey, socket.curve_secretkey = sockets._curve_keys(client, "client")
        socket.curve_serverkey, _ = sockets._curve_keys(server, "server")

    def with_server_keys(socket: zmq.Socket, _: str) -> None:
        socket.curve_publickey, socket.curve_secretkey = sockets._curve_keys(SECRET, "server")
        socket.curve_serverkey, _ = sockets._curve_keys(SECRET, "server")

    def with_a_password(socket: zmq.Socket, _: str) -> None:
        socket.plain_username, socket.plain_password = b"tba", SECRET.encode()

    return {
        "no keys": lambda socket, _: None,
        "a password": with_a_password,
        "keys of another run": lambda socket, _: with_keys(socket, OTHER, OTHER),
        "another client's key": lambda socket, _: with_keys(socket, OTHER, SECRET),
        "the server's key as its own": with_server_keys,
        "another server's key": lambda socket, _: with_keys(socket, SECRET, OTHER),
    }


@pytest.mark.parametrize("who", strangers())
def test_over_tcp_a_stranger_does_not_get_in_and_is_counted_once(run_folder, who):
    with router_on("tcp", run_folder) as router:
        for _ in range(3):
            before = router.refused
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RECONNECT_IVL, -1)
                strangers()[who](socket, router.address)
                socket.connect(router.address)
                socket.send(SECRET.encode())
                until(lambda n=before: router.refused > n)
        assert_goes_through(router)
        assert router.receive(9) is None
        assert router.refused == 3


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
RAW = {
    "nothing": b"",
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4,
    "zeros": bytes(1000),
    "half a greeting": GREETING[:7],
    "a greeting": GREETING + b"NULL".ljust(20, b"\0") + bytes(32),
    "a greeting and noise": GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + bytes(range(256)),
    "a frame of 2^63 bytes": GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x06" + b"\x7f" + b"\xff" * 7,
}


@pytest.mark.parametrize("what", RAW)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_peer_is_counted_and_blocks_nobody(run_folder, kind, what):
    with router_on(kind, run_folder) as router:
        with connection_to(router.address) as connection:
            connection.sendall(RAW[what])
            assert_goes_through(router)
        until(lambda: router.refused + router.disconnects == 2)
        # A message of size 2^63 ends the connection as any message does that is too large: libzmq says no more.
        assert router.refused == 1
        assert router.receive(9) in (None, [])


def test_nothing_that_is_sent_over_tcp_can_be_read_on_the_way(run_folder):
    word = b"a very secret word"
    seen: list[bytes] = []
    with router_on("tcp", run_folder) as router, socketlib.create_server(("127.0.0.1", 0)) as listener:

        def forward(source, target) -> None:
            while data := source.recv(1 << 16):
                seen.append(data)
                target.sendall(data)

        def relay() -> None:
            here, _ = listener.accept()
            with here, socketlib.create_connection(("127.0.0.1", int(router.address.rpartition(":")[2]))) as there:
                back = threading.Thread(target=forward, args=(there, here))
                back.start()
                forward(here, there)
                there.shutdown(socketlib.SHUT_RDWR)
                back.join()

        thread = threading.Thread(target=relay)
        thread.start()
        with dealer_to(f"tcp://127.0.0.1:{listener.getsockname()[1]}", identity="who it is") as dealer:
            dealer.socket.send_multipart([SECRET.encode(), word])
            peer, *_ = received(router)
            router.socket.send_multipart([peer, word])
            assert dealer.socket.poll(60_000)
        thread.join()
    wire = b"".join(seen)
    assert len(wire) > 400
    for hidden in (word, SECRET.encode(), bytes.fromhex(SECRET), b"who it is"):
        assert hidden not in wire


# ---- limits


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_of_too_many_frames_or_bytes_is_refused_and_the_next_one_is_not(run_folder, kind):
    with router_on(kind, run_folder, most_bytes=1000) as router, dealer_to(router.address) as dealer:
        for frames in ([b""] * 4, [b"x"] * 5000, [bytes(600), bytes(401)], [bytes(1000), b"", b"x"]):
            dealer.socket.send_multipart(frames)
            assert received(router) == []
        for frames in ([b""] * 3, [bytes(600), bytes(400)], [bytes(1000)]):
            dealer.socket.send_multipart(frames)
            assert received(router)[1:] == frames
        assert router.refused == 4
        assert router.receive(3) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_that_is_too_large_ends_its_connection_and_no_other(run_folder, kind):
    with router_on(kind, run_folder, most_bytes=1000) as router, dealer_to(router.address) as honest:
        honest.socket.send(b"before")
        assert received(router)[1:] == [b"before"]
        with dealer_to(router.address) as greedy:
            greedy.socket.setsockopt(zmq.RECONNECT_IVL, -1)
            greedy.socket.send(bytes(5000))
            until(lambda: router.disconnects == 1)
        honest.socket.send(b"after")
        assert received(router)[1:] == [b"after"]
        assert router.disconnects == 1
        assert router.refused == 0


def test_a_peer_that_floods_fills_its_own_queue_and_no_more(run_folder):
    with router_on("ipc", run_folder) as router, zmq.Context() as context, context.socket(zmq.DEALER) as flood:
        flood.setsockopt(zmq.LINGER, 0)
        flood.setsockopt(zmq.SNDHWM, 100)
        flood.connect(router.address)
        sent, idle = 0, 0
        while idle < 50:  # half a second in which not one more was taken
            try:
                flood.send(bytes(1000), zmq.NOBLOCK)
                sent, idle = sent + 1, 0
            except zmq.Again:
                idle += 1
                time.sleep(0.01)
        assert sent < 10_000
        router.socket.poll(60_000)
        with dealer_to(router.address) as honest:
            honest.socket.send(b"word")
            got = 0
            while (received(router))[1:] != [b"word"]:  # in turn with the other's
                got += 1
            assert got < sent


def test_a_peer_that_reads_nothing_blocks_nobody(run_folder):
    with router_on("ipc", run_folder) as router, dealer_to(router.address) as deaf:
        deaf.socket.setsockopt(zmq.RCVHWM, 10)
        deaf.socket.send(b"word")
        peer, _ = received(router)
        for _ in range(20_000):
            router.socket.send_multipart([peer, bytes(1000)], zmq.NOBLOCK)
        assert_goes_through(router)


def test_a_flood_of_refused_messages_does_not_fill_the_disk(run_folder, caplog):
    with router_on("ipc", run_folder) as router, caplog.at_level(logging.WARNING):
        for i in range(5000):
            router.refuse(f"reason {i}\n")
    assert router.refused == 5000
    assert len(caplog.records) == 8 + 9  # 16, 32, ... 4096
    assert caplog.messages[-1] == "control refused a message: reason 4095\\n (4096 so far)"


# ---- what is left


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_servers_and_clients_leave_no_thread_and_no_descriptor(run_folder, kind):
    def once() -> None:
        with router_on(kind, run_folder) as router:
            assert_goes_through(router)
            with connection_to(router.address) as connection:
                connection.sendall(b"noise")

    process = psutil.Process()
    for _ in range(3):
        once()
    descriptors, threads = process.num_fds(), threading.active_count()
    for _ in range(50):
        once()
    until(lambda: threading.active_count() <= threads)
    until(lambda: process.num_fds() <= descriptors)
    assert not sockets_folder(run_folder).exists()


def test_a_server_that_cannot_listen_leaves_no_thread_and_no_descriptor(run_folder):
    elsewhere = Listen(sockets="tcp", host="203.0.113.1", folder=run_folder)

    def once() -> None:
        with pytest.raises(TransportError):
            Router(elsewhere, "control", SECRET, most_bytes=100)
        with pytest.raises(TransportError):
            Dealer("tcp://nowhere", SECRET)

    process = psutil.Process()
    once()
    descriptors, threads = process.num_fds(), threading.active_count()
    for _ in range(20):
        once()
    until(lambda: threading.active_count() <= threads)
    until(lambda: process.num_fds() <= descriptors)


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_server_uses_no_time(run_folder, kind):
    with router_on(kind, run_folder) as router:
        assert_goes_through(router)
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.2

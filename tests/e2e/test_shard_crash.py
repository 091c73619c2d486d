"""The process that owns a shard is killed at any moment, again and again: what it acknowledged is there, once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import shard_child
from shard_child import REPEATED

LIMIT_S = 60.0  # only against a hang
NAMES = ("s0", "s1")
MOST_DELAY_S = 0.3


class Owner:
    """A forked child that owns the shard; a pipe has what it says. It is ended by who made it."""

    def __init__(self, folder: Path, port: int, save_after: int = -1) -> None:
        self._out, out = os.pipe()
        self._stop = folder / "stop"
        self._text = b""
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                shard_child.own(folder, port, out, save_after, self._stop.exists)
                code = 0
            except BaseException:
                shard_child.tell(out, traceback.format_exc())
            finally:
                os._exit(code)  # whatever happens: a fork that returned would run the rest of the tests
        os.close(out)
        os.set_blocking(self._out, False)

    def hears(self) -> dict:
        """The next line; it fails with what the child failed with."""
        deadline_s = time.monotonic() + LIMIT_S
        while b"\n" not in self._text:
            assert time.monotonic() < deadline_s, "the owner of the shard says nothing"
            try:
                self._text += os.read(self._out, 1 << 16)
            except BlockingIOError:
                time.sleep(0.0005)
        line, _, self._text = self._text.partition(b"\n")
        told = json.loads(line)
        assert isinstance(told, dict), told
        return told

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert os.waitpid(self.pid, 0)[1] == signal.SIGKILL, "it was dead before"
        os.close(self._out)

    def end(self) -> dict:
        self._stop.touch()
        told = self.hears()
        assert os.waitpid(self.pid, 0)[1] == 0
        os.close(self._out)
        self._stop.unlink()
        return told


@contextmanager
def senders(port: int) -> Iterator[dict[str, Connection]]:
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        links = {}
        for name in NAMES:
            links[name], theirs = context.Pipe()
            address = f"tcp://127.0.0.1:{port}"
            process = context.Process(target=shard_child.send, args=(address, name, theirs), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            stack.callback(links[name].close)
        yield links


def ask(links: dict[str, Connection], what: str) -> dict[str, tuple[int, int]]:
    """(made, acknowledged) rollouts of each sender."""
    for link in links.values():
        link.send(what)
    told = {}
    for name, link in links.items():
        assert link.poll(2 * LIMIT_S), f"{name} says nothing"
        told[name] = link.recv()
    return told


@contextmanager
def kept_port() -> Iterator[int]:
    """A port that nobody else is given, though nobody listens on it between two owners."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]


def check(was_there: dict, asked: dict[str, tuple[int, int]]) -> None:
    """What a new owner found, against what the senders knew when the one before it was dead."""
    for name, (made, acknowledged) in asked.items():
        received = was_there.get(name, {}).get("received", 0)
        assert acknowledged <= received <= made, (name, acknowledged, received, made)


@pytest.mark.parametrize("n_kills", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_whenever_its_owner_is_killed_a_shard_comes_back_with_all_that_was_acknowledged(n_kills, tmp_path):
    rng = np.random.default_rng(n_kills)
    asked: dict[str, tuple[int, int]] = dict.fromkeys(NAMES, (0, 0))
    with kept_port() as port, senders(port) as links:
        for life in range(n_kills):
            if life % 5 == 4:  # killed while it finds out what is there, or hardly begins
                early = Owner(tmp_path, port)
                time.sleep(rng.uniform(0, 0.1))
                early.kill()
                asked = ask(links, "state")
            owner = Owner(tmp_path, port, save_after=int(rng.integers(1, 40)) if life % 3 == 1 else -1)
            check(owner.hears(), asked)
            owner.hears()
            time.sleep(rng.uniform(0, MOST_DELAY_S))
            owner.kill()
            asked = ask(links, "state")
        assert len(list(tmp_path.glob("step-*"))) >= n_kills // 8

        owner = Owner(tmp_path, port)
        check(owner.hears(), asked)
        owner.hears()
        made = ask(links, "end")
        assert all(n == acknowledged > 0 for n, acknowledged in made.values()), made
        at_last = owner.end()
    assert {name: told["received"] for name, told in at_last.items()} == {name: n for name, (n, _) in made.items()}
    again = Owner(tmp_path, port)
    assert again.hears() == at_last
    assert again.end() == at_last
    print(f"{n_kills} kills, {sum(n for n, _ in made.values())} rollouts, a duplicate of each {REPEATED}")

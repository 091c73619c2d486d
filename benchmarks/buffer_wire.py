"""Rollouts over ZeroMQ without a buffer: bare frames of which nothing is kept, and pickles kept in a list.

Both begin with the same arrays, two sender processes and one receiver, a group a message. The clock starts with the
first message after a warm-up, when every process is up and connected, and stops with the last: encoding and decoding
are part of it. ``python -m benchmarks.buffer_wire SETTINGS`` is such a process; it obeys a line on stdin.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq

from benchmarks.peers.rollouts import GROUP, TOKENS, MadeRollouts, make_rollouts

ROOT = Path(__file__).parents[1]
PATIENCE_S = 60.0  # for the next message, or for a process to come up or end
IN_FLIGHT = 2  # requests for groups that are under way at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is sent in one measurement. A sender that has fewer different groups than it sends begins again."""

    rollouts: int = 100_000
    warm_up: int = 4096  # rollouts
    distinct: int = 65_536  # rollouts over all senders: more bytes than caches hold
    tokens: int = TOKENS
    senders: int = 2
    groups_a_request: int = 64
    seed: int = 0

    def groups_of_sender(self, rollouts: int) -> int:
        """Groups that each sender has of about ``rollouts`` in all; at least one."""
        return max(1, rollouts // (GROUP * self.senders))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """One measurement in one direction; CPU seconds of all processes, their threads included."""

    rollouts: int
    wall_s: float
    cpu_s: float

    @property
    def rollouts_s(self) -> float:
        return self.rollouts / self.wall_s

    def as_dict(self) -> dict[str, float]:
        return {
            "rollouts_s": round(self.rollouts_s),
            "groups_s": round(self.rollouts_s / GROUP),
            "rollouts_a_cpu_s": round(self.rollouts / self.cpu_s) if self.cpu_s else 0,
            "rollouts": self.rollouts,
            "wall_s": round(self.wall_s, 4),
            "cpu_s": round(self.cpu_s, 4),
        }


class _Header(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    prompt_id: str
    searcher: str
    sequences: list[int]
    lengths: list[int]
    rewards: list[float]
    stop_reasons: list[str]
    spans: list[list[tuple[str, int, int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A group as a sender has it: plain lists, and an array for each rollout's tokens and log-probs."""

    facts: dict[str, Any]  # the fields of a header
    prompt: Any
    tokens: list[Any]
    logprobs: list[Any]


def groups_of(made: MadeRollouts, sender: int) -> list[Group]:
    n_tokens = made.tokens.shape[2]
    return [
        Group(
            facts={
                "prompt_id": f"arithmetic/train/{sender * made.n_groups + g}",
                "searcher": f"searcher-{sender}",
                "sequences": list(range(g * GROUP, (g + 1) * GROUP)),
                "lengths": [n_tokens] * GROUP,
                "rewards": made.rewards[g].tolist(),
                "stop_reasons": ["eos"] * GROUP,
                "spans": [[("0.3", 0, n_tokens)] for _ in range(GROUP)],
            },
            prompt=made.prompts[g],
            tokens=list(made.tokens[g]),
            logprobs=list(made.logprobs[g]),
        )
        for g in range(made.n_groups)
    ]


class Codec(Protocol):
    """How a group becomes a message, and what the receiver makes of it."""

    def encode(self, group: Group) -> list[bytes]: ...

    def decode(self, frames: list[bytes]) -> Any: ...


class BareFrames:
    """A msgspec header, and frames of prompt, tokens and log-probs; all that is decoded is the header."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_Header)

    def encode(self, group: Group) -> list[bytes]:
        header = self._encoder.encode(_Header(**group.facts))
        return [header, group.prompt.tobytes(), b"".join(group.tokens), b"".join(group.logprobs)]

    def decode(self, frames: list[bytes]) -> _Header:
        return self._decoder.decode(frames[0])


class Pickled:
    """One pickle of the facts of a group and the list of its arrays."""

    def encode(self, group: Group) -> list[bytes]:
        whole = (group.facts, group.prompt, group.tokens, group.logprobs)
        return [pickle.dumps(whole, pickle.HIGHEST_PROTOCOL)]

    def decode(self, frames: list[bytes]) -> Any:
        return pickle.loads(frames[0])


CODECS: dict[str, Callable[[], Codec]] = {"bare": BareFrames, "pickle": Pickled}


def bare_frames(sizes: Sizes) -> dict[str, Rate]:
    """Bare msgspec frames with nothing stored: ``in``."""
    return {"in": _receive("bare", sizes, lambda header: None)}


def plain_pickle(sizes: Sizes) -> dict[str, Rate]:
    """Pickles that are kept in a list, then handed out as pickled lists of random groups: ``in`` and ``out``."""
    held: list[Any] = []
    return {"in": _receive("pickle", sizes, held.append), "out": _hand_out(held, sizes)}


def _receive(codec: str, sizes: Sizes, keep: Callable[[Any], None]) -> Rate:
    """What ``sizes.senders`` processes send, decoded here and given to ``keep``, without the warm-up."""
    groups = sizes.groups_of_sender(sizes.rollouts)
    warm_up = sizes.groups_of_sender(sizes.warm_up)
    decode = CODECS[codec]().decode
    with bound_socket(zmq.PULL) as (socket, address):
        common = asdict(sizes) | {"role": "send", "codec": codec, "address": address}
        settings = [common | {"sender": s, "groups": groups, "warm_up": warm_up} for s in range(sizes.senders)]
        with spawned(["benchmarks.buffer_wire", json.dumps(each)] for each in settings) as processes:
            for _ in range(warm_up * sizes.senders):
                decode(socket.recv_multipart())
            for process in processes:
                tell(process, "go")
            cpu_s, receive = time.process_time(), socket.recv_multipart
            frames = receive()
            started = time.perf_counter()
            keep(decode(frames))
            for _ in range(groups * sizes.senders - 1):
                keep(decode(receive()))
            wall_s = time.perf_counter() - started
            cpu_s = time.process_time() - cpu_s + sum(answer(process)["cpu_s"] for process in processes)
    return Rate(rollouts=groups * sizes.senders * GROUP, wall_s=wall_s, cpu_s=cpu_s)


def _hand_out(held: Sequence[Any], sizes: Sizes) -> Rate:
    """Random groups of ``held``, some a request, pickled here and unpickled by the process that asked for them."""
    a_request = min(sizes.groups_a_request, len(held))
    requests = max(IN_FLIGHT, sizes.rollouts // (GROUP * a_request))
    random = np.random.default_rng(sizes.seed)
    with bound_socket(zmq.ROUTER) as (socket, address):
        settings = {"role": "ask", "address": address, "requests": requests, "groups": a_request}
        with spawned([["benchmarks.buffer_wire", json.dumps(settings)]]) as (process,):

            def serve(n: int) -> None:
                for _ in range(n):
                    peer, _ = socket.recv_multipart()
                    drawn = [held[i] for i in random.choice(len(held), a_request, replace=False).tolist()]
                    socket.send_multipart([peer, pickle.dumps(drawn, pickle.HIGHEST_PROTOCOL)], copy=False)

            serve(IN_FLIGHT)
            tell(process, "go")
            cpu_s = time.process_time()
            serve(requests)
            cpu_s = time.process_time() - cpu_s
            theirs = answer(process)
    return Rate(rollouts=requests * a_request * GROUP, wall_s=theirs["wall_s"], cpu_s=cpu_s + theirs["cpu_s"])


@contextmanager
def bound_socket(kind: int) -> Iterator[tuple[zmq.Socket, str]]:
    """A socket on a free port of this machine, and its address; zmq.Again when no message comes for too long."""
    context = zmq.Context()
    try:
        socket = context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, round(PATIENCE_S * 1000))
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield socket, f"tcp://127.0.0.1:{port}"
    finally:
        context.destroy(linger=0)


@contextmanager
def spawned(commands: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen]]:
    """Processes ``python -m COMMAND``, with pipes to their stdin and stdout; none of them is left running.

    RuntimeError where the body waited in vain for a message of theirs.
    """
    processes = []
    try:
        for command in commands:
            whole = [sys.executable, "-W", "ignore", "-m", *command]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(whole, cwd=ROOT, **pipes))
        yield processes
    except zmq.Again:
        codes = [process.poll() for process in processes]
        raise RuntimeError(f"no message came within {PATIENCE_S} s; exit codes of the processes: {codes}") from None
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def tell(process: subprocess.Popen, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def answer(process: subprocess.Popen) -> Any:
    """The JSON that a process prints at its end; RuntimeError when it failed or does not end."""
    try:
        out, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"a process of the benchmark did not end within {PATIENCE_S} s") from None
    if process.returncode:
        raise RuntimeError(f"a process of the benchmark ended with {process.returncode}")
    return json.loads(out)


def _send(settings: dict[str, Any]) -> dict[str, float]:
    """Sends the warm-up, then, when told to, the groups. A receiver that is gone ends it."""
    sender, n_groups, warm_up = settings["sender"], settings["groups"], settings["warm_up"]
    distinct = min(n_groups, max(1, settings["distinct"] // (GROUP * settings["senders"])))
    made = make_rollouts(distinct, seed=settings["seed"], sender=sender, n_tokens=settings["tokens"])
    groups, encode = groups_of(made, sender), CODECS[settings["codec"]]().encode
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, round(PATIENCE_S * 1000))
    socket.setsockopt(zmq.SNDTIMEO, round(PATIENCE_S * 1000))
    socket.connect(settings["address"])
    for i in range(warm_up):
        socket.send_multipart(encode(groups[i % distinct]))
    _wait_for_go()
    cpu_s = time.process_time()
    for i in range(n_groups):
        socket.send_multipart(encode(groups[i % distinct]))
    socket.close()
    context.term()  # once everything has left
    return {"cpu_s": time.process_time() - cpu_s}


def _ask(settings: dict[str, Any]) -> dict[str, float]:
    """Asks for groups, with some requests under way at any time; the wall seconds from the first to the last answer."""
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, round(PATIENCE_S * 1000))
        socket.connect(settings["address"])
        for _ in range(IN_FLIGHT):
            socket.send(b"")
        for _ in range(IN_FLIGHT):
            pickle.loads(socket.recv())
        _wait_for_go()
        cpu_s, started = time.process_time(), time.perf_counter()
        for _ in range(IN_FLIGHT):
            socket.send(b"")
        for i in range(settings["requests"]):
            groups = pickle.loads(socket.recv())
            if i + IN_FLIGHT < settings["requests"]:
                socket.send(b"")
            if len(groups) != settings["groups"]:
                raise RuntimeError(f"{len(groups)} groups came, not {settings['groups']}")
        return {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - started}
    finally:
        context.destroy(linger=0)


def _wait_for_go() -> None:
    """Ends the process where the one that started it is gone."""
    if sys.stdin.readline().strip() != "go":
        sys.exit("the benchmark that started this process is gone")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps({"send": _send, "ask": _ask}[given["role"]](given)))

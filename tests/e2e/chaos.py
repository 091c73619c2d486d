"""A run whose roles are started, stopped, frozen and killed one by one, and what has to be true when it has ended.

Roles are children of the test. A variable in their environment marks them and all that they start, so that whatever
is left can be found, under any name.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
from chaos_role import VARIABLE, Chaos
from launching import (
    FAKE,
    QUICKSTART,
    ROOT,
    environment,
    last_metrics,
    ledger_gap,
    rollouts_of,
    shared_memory,
    steps,
    tba,
)
from relay import Faults, Relay

from tba_megatron.transport.sockets import new_secret, sockets_folder

MARK = "TBA_TEST_RUN"
LOOK_S = 1.0
LIMIT_S = 240.0  # a bound on a hang, never a measure: pytest itself gives up after 900 s
ROLE = str(Path(__file__).with_name("chaos_role.py"))

# Small steps, and what is silent is noticed soon.
FAST = (
    "sft.steps=0",
    "trainer.prompts_per_step=4",
    "trainer.rollouts_per_prompt=4",
    "search.completions_per_prompt=4",
    "search.prompts_in_engine=8",
    "evaluation.problems=16",
    "transport.heartbeat_s=0.2",
    "transport.lease_s=3",
    "transport.resend_s=0.5",
    "weights.timeout_s=5",
)
FAST_FAKE = (*FAST, FAKE)


@dataclass(kw_only=True, eq=False)
class Role:
    """One process that a test started. ``log`` has its stdout and stderr."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    started_s: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(LIMIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)


class ChaosRun:
    """A run folder and its roles; ``close`` ends by its id what is left of them."""

    def __init__(self, folder: Path, *settings: str, n_steps: int, hold_step: int | None = None) -> None:
        self.folder, self.settings, self.n_steps = folder, (*settings, f"trainer.steps={n_steps}"), n_steps
        self.roles: list[Role] = []
        self._next_look_s = 0.0
        self._before = shared_memory()
        self._listening: set[tuple[int, int]] = set()  # (port, inode) of sockets seen while the run lived
        self._side = Path(tempfile.mkdtemp(prefix="chaos-", dir=folder.parent))
        self._hold = self._side / "hold"
        self._hold_step = hold_step
        if hold_step is not None:
            self._hold.touch()
        self.shim = self._side / "tba-python"
        self.shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -W ignore "{ROLE}" "$@"\n')
        self.shim.chmod(0o700)

    # ---- roles

    def start(self, command: str, *overrides: str, name: str = "", die: str = "", after: int = 1) -> Role:
        """``tba COMMAND`` of this run. ``die``: see ``chaos_role``; ``mark`` tells what it was doing then."""
        name = name or f"{command}-{len(self.roles)}"
        chaos = Chaos(
            die=die,
            after=after,
            engine="fake" if FAKE in self.settings else "vllm",
            mark=str(self.mark_of(name)),
            hold="" if self._hold_step is None else str(self._hold),
            hold_step=self._hold_step or 0,
            shim=str(self.shim),
        )
        log, program = self._side / f"{name}.log", (sys.executable, "-W", "ignore", ROLE)
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*program, command, QUICKSTART, f"run.folder={self.folder}", *self.settings, *overrides],
                cwd=ROOT,
                env={
                    **environment(),
                    "PYTHONPATH": str(ROOT),  # a script's own folder takes the place of the working directory
                    VARIABLE: msgspec.json.encode(chaos).decode(),
                    MARK: str(self.folder),
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        role = Role(name=name, process=process, log=log)
        self.roles.append(role)
        return role

    def launch(self, *overrides: str) -> Role:
        return self.start("launch", *overrides, name="launch")

    def train(self, *overrides: str) -> Role:
        return self.start("train", *overrides)

    def search(self, *overrides: str, die: str = "", after: int = 1) -> Role:
        return self.start("search", *overrides, die=die, after=after)

    def mark_of(self, name: str) -> Path:
        return self._side / f"{name}.mark"

    def evidence(self, role: Role) -> dict[str, Any]:
        """What a role that was to die wrote down before."""
        return json.loads(self.mark_of(role.name).read_text())

    def release(self) -> None:
        """The trainer crawls no more."""
        self._hold.unlink(missing_ok=True)

    def kill_pid(self, pid: int) -> None:
        """SIGKILL for a role that a launcher of this run started."""
        assert pid in self.processes(), f"{pid} is none of this run"
        os.kill(pid, signal.SIGKILL)

    # ---- watching

    @property
    def step(self) -> int:
        return int(self.metric("step"))

    def metric(self, name: str) -> float:
        """Of the newest step of this attempt; 0 before its first."""
        record, attempts = last_metrics(self.folder), self.folder / "attempts.json"
        if not record or record["time_s"] < attempts.stat().st_mtime:
            return 0.0
        return record.get(name, 0.0)

    def until(self, condition: Callable[[], object], what: str, *alive: Role) -> None:
        """Wait for ``condition``; AssertionError with all logs when one of ``alive`` ends before."""
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            for role in alive:
                if not role.alive and not condition():
                    raise AssertionError(
                        f"{role.name} ended with {role.process.returncode} before {what}\n{self.told()}"
                    )
            assert time.monotonic() < deadline_s, f"{what}: it never came\n{self.told()}"
            self._watch_sockets()
            time.sleep(0.05)

    def until_gone(self, pid: int) -> None:
        """Until a process of this run has ended, and is known to have where it is a role of the test's own."""
        roles = [role for role in self.roles if role.pid == pid]
        self.until(
            lambda: pid not in self.processes() and not any(role.alive for role in roles), f"the end of process {pid}"
        )

    def until_step(self, step: int, *alive: Role) -> None:
        self.until(lambda: self.step >= step, f"step {step}", *alive)

    def until_searchers(self, n: int, *alive: Role) -> None:
        """Until the trainer counts ``n`` living searchers."""
        self.until(lambda: self.metric("fleet/searchers_live") == n, f"{n} searchers", *alive)

    def until_attempt(self, attempt: int, *alive: Role) -> None:
        """Until attempt ``attempt`` of the trainer has made a step."""
        self.until(lambda: self.attempt >= attempt and self.step > 0, f"a step of attempt {attempt}", *alive)

    @property
    def attempt(self) -> int:
        """The newest that has begun; -1 before the first."""
        path = self.folder / "attempts.json"
        return len(json.loads(path.read_text())) - 1 if path.exists() else -1

    def has_joined(self, searcher: Role, times: int = 1) -> bool:
        """Whether trainers have said so often that this incarnation joined them."""
        return len(re.findall(rf"searcher \S+-{searcher.pid}-\S+ joined", self.trainer_text())) >= times

    def until_joined(self, searcher: Role, *alive: Role, times: int = 1) -> None:
        self.until(lambda: self.has_joined(searcher, times), f"{searcher.name} joined {times} times", searcher, *alive)

    def trainer_text(self) -> str:
        """What all attempts of the trainer have logged."""
        mine = [role.text for role in self.roles if role.name.startswith("train")]
        return "\n".join([*mine, *(p.read_text(errors="replace") for p in self.folder.glob("logs/train-0.log"))])

    def told(self) -> str:
        """The end of each log, for a failure's message."""
        logs = [*(role.log for role in self.roles), *sorted(self.folder.glob("logs/*.log"))]
        ends = [f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:]) for log in logs]
        return "\n".join(ends)

    def processes(self, command: str = "") -> list[int]:
        """Ids of living processes of this run, whoever started them; with ``command`` the roles that run it."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.folder}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if not command or (ROLE in words and command in words[words.index(ROLE) :][:4]):
                found.append(int(entry.name))
        return found

    def _watch_sockets(self) -> None:
        """Remember, now and then, what the run listens on: at its end nobody may."""
        if time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + LOOK_S
        inodes = set()
        for pid in self.processes():
            with suppress(OSError):
                for handle in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(OSError):
                        if (match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(handle))) is not None:
                            inodes.add(int(match[1]))
        self._listening |= {(port, inode) for port, inode in _listening() if inode in inodes}

    # ---- the end

    def finish(self, *searchers: Role, trainer: Role) -> dict[str, Any]:
        """The run goes to its end; all of it is checked. ``searchers`` leave with 0; the result."""
        self.release()
        self.until(lambda: not trainer.alive, "the end of the trainer")
        assert trainer.process.returncode == 0, f"{trainer.name}: {trainer.process.returncode}\n{self.told()}"
        for searcher in searchers:
            self.until(lambda searcher=searcher: not searcher.alive, f"the end of {searcher.name}")
            assert searcher.process.returncode == 0, f"{searcher.name}: {searcher.process.returncode}\n{self.told()}"
        return self.check()

    def check(self, n_steps: int | None = None) -> dict[str, Any]:
        """The laws of a run that ended well; its result. ``n_steps``: those it made, where its data ended before."""
        result = json.loads((self.folder / "result.json").read_text())
        n_steps = self.n_steps if n_steps is None else n_steps
        shown = f"{result}\n{self.told()}"
        assert (result["complete"], result["steps"]) == (True, n_steps), shown
        assert (ledger_gap(result), result["rollouts_in_flight"]) == (0, 0), shown
        assert result["accuracy_before"] is not None and result["accuracy_after"] is not None, shown
        assert steps(self.folder) == list(range(1, n_steps + 1))
        assert tensorboard_steps(self.folder) == list(range(1, n_steps + 1))
        assert (self.folder / "hf" / "config.json").exists()
        self.check_nothing_left()
        return result

    def check_nothing_left(self) -> None:
        left = {pid: _command_of(pid) for pid in self.processes()}
        assert not left, left
        assert shared_memory() <= self._before
        assert not sockets_folder(self.folder).exists(), list(sockets_folder(self.folder).rglob("*"))
        assert self._listening & _listening() == set()
        assert not (self.folder / "rendezvous.json").exists()
        assert list(self.folder.glob(".store-*")) == list(self.folder.glob("weights/.start-*")) == []

    def close(self) -> None:
        for role in reversed(self.roles):
            if role.alive:
                with suppress(ProcessLookupError):
                    os.killpg(role.pid, signal.SIGKILL)
                role.process.wait(LIMIT_S)
        deadline_s = time.monotonic() + 30.0
        while (left := self.processes()) and time.monotonic() < deadline_s:
            for pid in left:  # marked as this run's: what a role had started itself
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


@contextmanager
def chaos_run(folder: Path, *settings: str, n_steps: int, hold_step: int | None = None) -> Iterator[ChaosRun]:
    """``hold_step``: from there on the trainer crawls until ``release`` or ``finish``."""
    run = ChaosRun(folder, *settings, n_steps=n_steps, hold_step=hold_step)
    try:
        yield run
    finally:
        run.close()


def tcp(folder: Path) -> tuple[str, ...]:
    """Overrides for a trainer that is found by its address; its key and its port are in ``folder``."""
    key, port = folder / "key", folder / "port"
    with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(new_secret())
    port.write_text(str(_free_port()))
    return (
        "transport.sockets=tcp",
        f"transport.rendezvous={{kind: address, key_file: {key}}}",
        f"transport.control_port={port.read_text()}",
    )


def _free_port() -> int:
    """Nobody uses it, and nobody is given it who asks for any: it lies below what the system deals out."""
    for port in random.sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


@contextmanager
def relayed(run: ChaosRun, seed: int, faults: Faults | None = None) -> Iterator[Relay]:
    """A relay to the trainer of a run with ``tcp`` settings."""
    folder = run.folder.parent
    secret, port = (folder / "key").read_text(), int((folder / "port").read_text())
    relay = Relay(port, secret, seed=seed, faults=faults or Faults())
    try:
        yield relay
    finally:
        relay.close()


def start_model(base: Path) -> tuple[str, ...]:
    """Overrides that begin from weights on disk, made once in ``base``: a warm start of one step."""
    folder = base / "start-model"
    if not (folder / "sft" / "config.json").exists():
        done = tba("sft", folder, "sft.steps=1", "sft.held_out=0")
        assert done.returncode == 0, done.stdout + done.stderr
    return ("model.init=pretrained", f"model.path={folder / 'sft'}")


def tensorboard_steps(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars("optim/loss")]


def rollouts_by(run: ChaosRun, searcher: Role) -> Sequence[dict[str, str]]:
    """The stored rollouts that this incarnation wrote."""
    return [row for row in rollouts_of(run.folder) if f"-{searcher.pid}-" in row["searcher"]]


def _listening() -> set[tuple[int, int]]:
    """(port, inode) of every TCP socket on this machine that listens."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                found.add((int(words[1].rpartition(":")[2], 16), int(words[9])))
    return found


def _command_of(pid: int) -> str:
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return "ended meanwhile"

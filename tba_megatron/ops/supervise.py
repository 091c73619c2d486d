"""Processes of a run on one machine: start them, forward signals, restart searchers, leave none behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO

from tba_megatron.errors import RoleFailedError

TERM_S = 60.0  # how long a role may take to save and leave before it is killed
LEAVE_S = 30.0  # how long a role may take to leave when others have failed: a trainer waits 20 s for goodbyes
RESTARTS = 3  # of one searcher


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """One process. Its stderr goes to ``log``; its stdout too, unless it is ``visible``.

    A ``vital`` role's failure ends all others; another is started again, ``RESTARTS`` times.
    """

    name: str
    argv: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    vital: bool = True
    visible: bool = False


class Supervisor:
    """Runs groups of roles, one group after another. The children belong to it alone and die with it."""

    def __init__(self, environment: Mapping[str, str], stream: TextIO) -> None:
        self._environment, self._stream = dict(environment), stream
        self._children: dict[subprocess.Popen, Role] = {}
        self._restarts: dict[str, int] = {}
        self.signal = 0  # the first SIGTERM or SIGINT that arrived

    def __enter__(self) -> Supervisor:
        self._before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_all()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, roles: Sequence[Role]) -> None:
        """Until all vital roles have ended well, or a signal arrived; RoleFailedError when one failed."""
        for role in roles:
            self._start(role)
        forwarded = False
        deadline_s = float("inf")
        while any(role.vital for role in self._children.values()):
            for child, role in list(self._children.items()):
                code = child.poll()
                if code is not None:
                    self._forget(child)
                    self._ended(role, code)
            if self.signal and not forwarded:
                # Vital roles save and dismiss the others; those that are not vital would only stop earlier.
                self._signal(lambda role: role.vital)
                forwarded, deadline_s = True, time.monotonic() + TERM_S
            if time.monotonic() > deadline_s:
                raise RoleFailedError(f"roles did not leave within {TERM_S:g} s after a signal: {self._names()}")
            time.sleep(0.02)
        self._wait_for_others()

    def _start(self, role: Role) -> None:
        role.log.parent.mkdir(parents=True, exist_ok=True)
        with role.log.open("ab") as log:
            child = subprocess.Popen(
                role.argv,
                stdin=subprocess.DEVNULL,
                stdout=None if role.visible else log,
                stderr=log,
                env={**self._environment, **role.environment},
                start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which forwards it
                preexec_fn=partial(_die_with_parent, os.getpid()),
            )
        self._children[child] = role

    def _ended(self, role: Role, code: int) -> None:
        # After a signal a role ends well, says 128 + the signal once it has saved, or was ended before it could handle
        # it (while it imports) and has nothing to save.
        stopped = {-signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT}
        if code == 0 or (self.signal and (not role.vital or code in stopped)):
            return
        if role.vital:
            error = RoleFailedError(f"{role.name} ended with {_describe(code)}; {_last_words(role.log)}")
            error.exit_code = 2 if code == 2 else 1  # 2: the configuration cannot be used, whoever noticed it
            raise error
        restarts = self._restarts[role.name] = self._restarts.get(role.name, 0) + 1
        if restarts > RESTARTS:
            raise RoleFailedError(
                f"{role.name} failed {restarts} times, last with {_describe(code)}; {_last_words(role.log)}"
            )
        print(f"{role.name} ended with {_describe(code)}; started again", file=self._stream, flush=True)
        self._start(role)

    def _wait_for_others(self) -> None:
        """Roles that are not vital were told to leave by those that are."""
        deadline_s = time.monotonic() + LEAVE_S
        while self._children and time.monotonic() < deadline_s:
            for child in list(self._children):
                if child.poll() is not None:
                    self._forget(child)
            time.sleep(0.02)
        self._end_all()

    def _end_all(self) -> None:
        """Ask every child that is left to go, then make it."""
        self._signal(lambda role: True)
        deadline_s = time.monotonic() + LEAVE_S
        for child in list(self._children):
            try:
                child.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            self._forget(child)

    def _forget(self, child: subprocess.Popen) -> None:
        """A role has ended; what it started itself goes too."""
        del self._children[child]
        # Each role leads a process group of its own. What a killed role had started would live on, and hold its output.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)

    def _signal(self, wanted: Callable[[Role], bool]) -> None:
        for child, role in self._children.items():
            if wanted(role) and child.poll() is None:
                child.send_signal(signal.SIGTERM)

    def _on_signal(self, number: int, frame: object) -> None:
        self.signal = self.signal or number

    def _names(self) -> str:
        return ", ".join(role.name for role in self._children.values())


def tba(command: str, config: Path, *overrides: str) -> tuple[str, ...]:
    """The argument list of a role of this installation."""
    return (sys.executable, "-m", "tba_megatron.cli.main", command, str(config), *overrides)


def _die_with_parent(parent: int) -> None:
    # A launcher that is killed takes its children along: PR_SET_PDEATHSIG (1) of prctl(2).
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    tail = "\n  ".join(lines[-5:])
    return f"the end of {log}:\n  {tail}" if tail else f"{log} is empty"

"""Processes of roles: start them, see them end, and end what they started themselves.

Each leads a process group of its own, and gets SIGTERM when the launcher dies in whatever way. What a role leaves
behind becomes the launcher's child, so that it can be collected: as process 1 of a container would perhaps not do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import psutil

from tba_megatron.errors import RoleFailedError
from tba_megatron.ops.roles import Role

GROUP_S = 5.0  # how long what a role had started may take to leave once the role has ended
TRACKER_S = 2.0  # how long a resource tracker may take to remove the shared memory of those that were killed

_TRACKER = "multiprocessing.resource_tracker"  # in the command line of Python's
_LAST_BYTES = 1 << 14  # of a log, in which last words are looked for

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37  # linux/prctl.h


@dataclass(eq=False, kw_only=True, slots=True)
class Child:
    """A process of ``role``."""

    role: Role
    process: subprocess.Popen[bytes]
    started_s: float
    log_bytes: int  # what the log held before

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)  # nothing when it has ended

    def kill(self) -> None:
        self.process.kill()

    def last_words(self) -> str:
        """The end of what it wrote into its log."""
        log, written = self.role.log, b""
        with suppress(FileNotFoundError), log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self.log_bytes, end - _LAST_BYTES))
            written = file.read()
        lines = written.decode(errors="replace").strip().splitlines()
        tail = "\n  ".join(lines[-5:])
        return f"the end of {log}:\n  {tail}" if tail else f"{log} says nothing about it"


class Children:
    """All of them. To be left as a context, with none living."""

    def __init__(self, environment: Mapping[str, str], inherited: Sequence[int] = ()) -> None:
        self._environment, self._inherited = dict(environment), tuple(inherited)
        self.living: list[Child] = []
        self._groups: dict[int, float] = {}  # process groups whose leader has ended, and when it did

    def __enter__(self) -> Children:
        self._adopted = _adopts()
        self._others = _children()
        _adopt(True)
        return self

    def __exit__(self, *exception: object) -> None:
        _adopt(self._adopted)

    @property
    def any_left(self) -> bool:
        """Roles, or what they had started."""
        return bool(self.living or self._groups)

    def start(self, role: Role) -> Child:
        """RoleFailedError when that is impossible."""
        try:
            role.log.parent.mkdir(parents=True, exist_ok=True)
            with role.log.open("ab") as log:
                log_bytes = log.tell()
                process = self._popen(role, log.fileno())
        except OSError as error:
            raise RoleFailedError(f"{role.name} cannot be started ({error}); its log is {role.log}") from None
        child = Child(role=role, process=process, started_s=time.monotonic(), log_bytes=log_bytes)
        self.living.append(child)
        return child

    def _popen(self, role: Role, log: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            role.argv,
            stdin=subprocess.DEVNULL,
            stdout=None if role.visible else log,
            stderr=log,
            env={**self._environment, **role.environment},
            pass_fds=self._inherited,
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which forwards it
            preexec_fn=partial(_die_with_parent, os.getpid()),
        )

    def poll(self) -> dict[Child, int]:
        """Those that have ended since the last call, with their exit codes; minus the signal that killed one.

        Killed ones come first: others may have failed because of them.
        """
        ended = {child: code for child in self.living if (code := child.process.poll()) is not None}
        self.living = [child for child in self.living if child not in ended]
        for child in ended:
            self._end_group(child.process.pid)
        self._collect_adopted()
        self._groups = {group: since_s for group, since_s in self._groups.items() if _lives_on(group, since_s)}
        if not self.living:
            # Whoever left the group of its role could have been at work for another: it goes when none lives.
            for pid in _children() - self._others:
                with suppress(ProcessLookupError):
                    self._end_group(os.getpgid(pid))
        return dict(sorted(ended.items(), key=lambda item: item[1] >= 0))

    def _end_group(self, group: int) -> None:
        if group not in self._groups and group != os.getpgrp():
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)
                self._groups[group] = time.monotonic()

    def _collect_adopted(self) -> None:
        """What roles had started and left behind, as far as it has ended: nobody else would ask for its exit code."""
        roles = {child.process.pid for child in self.living}
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in roles:
                    return  # its turn comes
                os.waitpid(ended.si_pid, 0)


def _lives_on(group: int, since_s: float) -> bool:
    """Whether something is left of a process group whose leader has ended; ends it by force when it is time."""
    try:
        os.killpg(group, 0)
        over_s = time.monotonic() - since_s - GROUP_S
        if over_s > TRACKER_S:
            os.killpg(group, signal.SIGKILL)
        elif over_s > 0:
            _kill_users_of_memory(group)
    except ProcessLookupError:
        return False
    return True


def _kill_users_of_memory(group: int) -> None:
    """SIGKILL for a process group, but not for Python's resource trackers.

    They ignore SIGTERM, and remove the shared memory of their users once the last of these has ended.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and _TRACKER not in " ".join(process.cmdline()):
                process.kill()


def _children() -> set[int]:
    """Process ids of this process's children, those of others' making too."""
    return {child.pid for child in psutil.Process().children()}


def _adopts() -> bool:
    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value))
    return bool(value.value)


def _adopt(wanted: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))


def _die_with_parent(parent: int) -> None:
    # A launcher that is killed takes its children along.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)

"""The roles of a run on one machine: watch them, start failed ones again by policy, forward signals, leave none behind.

Trainer ranks are a team: they work on together, or are ended and started anew together. Others live and fail alone.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TextIO

from tba_megatron.config_search import LaunchConfig
from tba_megatron.errors import RoleFailedError
from tba_megatron.ops.children import Child, Children
from tba_megatron.ops.restarts import Restarts
from tba_megatron.ops.roles import Role

TERM_S = 60.0  # how long trainer ranks may take to save and leave before they are killed
LEAVE_S = 30.0  # how long a role may take to leave when others have failed: a trainer waits 20 s for goodbyes
TEAM_S = 10.0  # the same for ranks that lack another one: they cannot save, and may hang in a collective
SAY_LEFT_S = 10.0  # a searcher that left is mentioned after this long: at a run's end all leave before the trainer
POLL_S = 0.02

BAD_CONFIGURATION = 2  # exit code: the configuration cannot be used, whoever noticed it
NO_SEARCHER = 69  # exit code of a trainer: no searcher came
_FINAL = (BAD_CONFIGURATION, NO_SEARCHER)  # a trainer that is started again would end in the same way
# After a signal a rank ends well, says 128 + the signal once it has saved, or was ended before it could handle it,
# while it imports, and has nothing to save.
_STOPPED = (0, -signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT)
_TEAM = "the trainer"

Team = Callable[[], Sequence[Role]]


class Supervisor:
    """Runs one team after another, each with its searchers. The children belong to it alone and die with it.

    ``apart_s``: how long after the first rank of a team that ended well the last one may end. ``inherited`` are file
    descriptors that each of the children holds too.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        stream: TextIO,
        policy: LaunchConfig,
        *,
        apart_s: float,
        inherited: Sequence[int] = (),
    ) -> None:
        self._stream, self._policy, self._apart_s = stream, policy, apart_s
        self._children = Children(environment, inherited)
        self._team_restarts = Restarts(policy.trainer_restarts, policy.window_s)
        self._restarts = Restarts(policy.searcher_restarts, policy.window_s)
        self._arrived: list[int] = []  # signals that nobody has looked at yet
        self.signal = 0  # the SIGTERM or SIGINT that stopped the team
        self._stop_by_s = float("inf")
        self._forget_team()

    def __enter__(self) -> Supervisor:
        self._children.__enter__()
        self._before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_all(LEAVE_S)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._children.__exit__(*exception)

    def run(self, team: Team, searchers: Sequence[Role] = ()) -> None:
        """Until all ranks of the team have ended well, or a signal arrived; then searchers that are left are ended.

        ``team`` gives the ranks of each start. RoleFailedError when a role failed once too often, or did not end.
        """
        self._forget_team()
        self._make_team, self._next_ranks = team, (0.0, team())
        self._waiting = [(0.0, role) for role in searchers]
        while True:
            self._heed_signals()
            self._start_due()
            if not self._ranks and self._next_ranks is None:
                break
            for child, code in self._children.poll().items():
                self._ended(child, code)
            self._look_at_the_clock()
            time.sleep(POLL_S)
        self._waiting.clear()
        self._end_all(LEAVE_S)

    def _forget_team(self) -> None:
        self._make_team: Team = tuple
        self._next_ranks: tuple[float, Sequence[Role]] | None = None  # to be started at that time
        self._team: list[Child] = []  # all ranks of this start
        self._ranks: list[Child] = []  # those that live
        self._all_by_s = float("inf")  # when the last of them must have ended, once one has ended well
        self._failed: dict[Child, int] = {}  # exit codes of a team that is being ended because a rank failed
        self._team_pause_s = 0.0  # before such a team is started anew
        self._end_team_by_s = float("inf")
        self._waiting: list[tuple[float, Role]] = []  # searchers to be started at that time
        self._left: dict[Role, float] = {}  # searchers that ended well, and when to say so

    # ---- starting

    def _start_due(self) -> None:
        now_s = time.monotonic()
        if self._next_ranks is not None and self._next_ranks[0] <= now_s:
            self._ranks = []
            for role in self._next_ranks[1]:
                self._ranks.append(self._children.start(role))
            self._team, self._next_ranks, self._all_by_s = list(self._ranks), None, float("inf")
        due = [role for at_s, role in self._waiting if at_s <= now_s]
        self._waiting = [(at_s, role) for at_s, role in self._waiting if at_s > now_s]
        for role in due:
            self._children.start(role)

    # ---- ends

    def _ended(self, child: Child, code: int) -> None:
        if child not in self._team:
            self._searcher_ended(child, code)
            return
        self._ranks.remove(child)
        if self._failed:
            self._failed[child] = code
        elif code and not (self.signal and code in _STOPPED):
            self._rank_failed(child, code)
        else:
            self._all_by_s = min(self._all_by_s, time.monotonic() + self._apart_s)
        if self._failed and not self._ranks:
            self._replace_team()

    def _rank_failed(self, child: Child, code: int) -> None:
        """End the others, to start all anew."""
        now_s, pause_s = time.monotonic(), None
        if not self.signal and code not in _FINAL:
            pause_s = self._team_restarts.failed(_TEAM, now_s, now_s - child.started_s)
        self._failed = {child: code}
        if pause_s is None:
            self._team_is_lost()
        for rank in self._ranks:
            rank.terminate()
        self._end_team_by_s, self._team_pause_s = now_s + TEAM_S, pause_s
        again = _again(self._team_restarts, _TEAM, pause_s)
        self._say(f"{_ended_with(child, code)}; all trainer ranks are {again}; see {child.role.log}")

    def _replace_team(self) -> None:
        if any(code in _FINAL for code in self._failed.values()):
            self._team_is_lost()
        self._failed, self._end_team_by_s = {}, float("inf")
        if self.signal:
            return
        now_s = time.monotonic()
        self._next_ranks = (now_s + self._team_pause_s, self._make_team())
        # Whoever left may have done so on the word of the trainer that failed.
        for role in self._left:
            self._say(f"{role.name} has left, and is started again with the trainer")
            self._waiting.append((now_s, role))
        self._left.clear()

    def _team_is_lost(self) -> NoReturn:
        """The run ends with the most telling of the failed ranks."""
        ended = {**self._failed, **self._end_all(LEAVE_S)}
        child, code = next(iter(ended.items()))
        for final in reversed(_FINAL):
            # One rank's end is many another's failure; of those that say the same the first rank's log tells most.
            child, code = next(((c, final) for c in self._team if ended.get(c) == final), (child, code))
        n = self._team_restarts.failures(_TEAM)
        often = n > 1 and code not in _FINAL
        words = _too_often(_TEAM, n, self._policy.window_s, f"{child.role.name}'s ", code) if often else ""
        error = RoleFailedError(f"{words or _ended_with(child, code)}; {child.last_words()}")
        error.exit_code = code if code in _FINAL else 1
        raise error

    def _team_does_not_end(self) -> NoReturn:
        """Not a failure to start anew after: a rank that has ended well has done all that there was to do."""
        late, first = self._ranks, next(child for child in self._team if child not in self._ranks)
        self._end_all(LEAVE_S)
        names = ", ".join(child.role.name for child in late)
        raise RoleFailedError(
            f"{names} did not end within {self._apart_s:g} s after {first.role.name}, which ended with exit code 0; "
            f"{late[0].last_words()}"
        )

    def _searcher_ended(self, child: Child, code: int) -> None:
        role, now_s = child.role, time.monotonic()
        if self.signal:
            return
        if code == 0:
            self._left[role] = now_s + SAY_LEFT_S
            return
        pause_s = None
        if code != BAD_CONFIGURATION:
            pause_s = self._restarts.failed(role.name, now_s, now_s - child.started_s)
        if pause_s is not None:
            self._say(f"{_ended_with(child, code)}; {_again(self._restarts, role.name, pause_s)}; see {role.log}")
            self._waiting.append((now_s + pause_s, role))
            return
        self._end_all(TERM_S)  # the trainer saves
        words = _ended_with(child, code)
        if code != BAD_CONFIGURATION:
            n = self._restarts.failures(role.name)
            words = _too_often(role.name, n, self._policy.window_s, "", code)
        error = RoleFailedError(f"{words}; {child.last_words()}")
        error.exit_code = BAD_CONFIGURATION if code == BAD_CONFIGURATION else 1
        raise error

    # ---- time and signals

    def _look_at_the_clock(self) -> None:
        now_s = time.monotonic()
        if now_s > self._end_team_by_s:
            for rank in self._ranks:
                rank.kill()
        if now_s > self._stop_by_s:
            names = self._names()
            self._end_all(TEAM_S)
            raise RoleFailedError(f"roles did not leave within {TERM_S:g} s after a signal: {names}")
        # After a signal, and once a rank has failed, the ranks that are left have less time.
        if now_s > self._all_by_s and self._ranks and not self._failed and not self.signal:
            self._team_does_not_end()
        for role, say_at_s in self._left.items():
            if now_s > say_at_s:
                self._say(f"{role.name} has left (exit code 0) and is not started again")
                self._left[role] = float("inf")

    def _heed_signals(self) -> None:
        while self._arrived:
            number, now_s = self._arrived.pop(0), time.monotonic()
            if self.signal:
                self._say_again(number, self._stop_by_s)
                continue
            self.signal, self._stop_by_s = number, now_s + TERM_S
            self._next_ranks = None
            self._waiting.clear()
            self._left.clear()
            # Ranks save and dismiss the searchers, which would only stop earlier.
            for rank in self._ranks:
                rank.terminate()

    def _on_signal(self, number: int, frame: object) -> None:
        self._arrived.append(number)

    def _end_all(self, limit_s: float) -> dict[Child, int]:
        """Ask every child that is left to go, then make it; their exit codes."""
        ended: dict[Child, int] = {}
        for child in self._children.living:
            child.terminate()
        deadline_s = time.monotonic() + limit_s
        while True:
            ended.update(self._children.poll())
            if not self._children.any_left:
                return ended
            if time.monotonic() > deadline_s:
                for child in self._children.living:
                    child.kill()
            while self._arrived:
                self._say_again(self._arrived.pop(0), deadline_s)
            time.sleep(POLL_S)

    # ---- words

    def _say_again(self, number: int, deadline_s: float) -> None:
        left_s = max(0.0, deadline_s - time.monotonic())
        name = signal.Signals(number).name
        self._say(f"{name}: already stopping; {self._names()} may take another {left_s:.0f} s to leave")

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def _names(self) -> str:
        return ", ".join(child.role.name for child in self._children.living) or "what roles had started"


def _ended_with(child: Child, code: int) -> str:
    return f"{child.role.name} ended with {_describe(code)}"


def _too_often(name: str, n: int, window_s: float, whose: str, code: int) -> str:
    return f"{name} failed {n} times within {window_s:g} s, last with {whose}{_describe(code)}"


def _again(restarts: Restarts, name: str, pause_s: float) -> str:
    after = f" after {pause_s:g} s" if pause_s else ""
    return f"started again{after} ({restarts.failures(name)} of {restarts.most} times within {restarts.window_s:g} s)"


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

"""Twenty random schedules of everything that can happen to a run. Each says what it did, and when.

Odd seeds run under ``tba launch``, which starts again what fails; even ones by hand, with a relay between the roles
that delays, repeats and reorders what they say.
"""

import os
import random
import signal
import time
from collections.abc import Callable

import pytest
from chaos import FAST_FAKE, ChaosRun, Role, chaos_run, relayed, start_model, tcp
from relay import Faults

pytestmark = pytest.mark.slow

N_SEEDS = 20
N_STEPS = 250
ACTIONS = 4
LAUNCHED = ("launch.searcher_restarts=100", "launch.trainer_restarts=100", "search.searchers=2")
FROZEN_S = (0.5, 5.0)  # shorter and longer than the lease


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return start_model(tmp_path_factory.getbasetemp())


class Schedule:
    """Does what a seed says to a run, and keeps a record of it."""

    def __init__(self, run: ChaosRun, seed: int, port: int) -> None:
        self._run, self._random = run, random.Random(seed)
        self._port = (f"transport.control_port={port}",) if port else ()
        self._launched = not port
        self._began_s = time.monotonic()
        self.record: list[str] = []
        self.main: Role | None = None  # the trainer, or the launcher
        self.mine: list[Role] = []  # searchers that no launcher watches

    def begin(self) -> None:
        self.main = self._run.launch() if self._launched else self._run.train()
        if not self._launched:
            self.mine = [self._search() for _ in range(2)]
        self._until_at_work("the beginning")

    def act(self) -> None:
        # Some steps more, or at any moment of them: what is hit is a matter of chance.
        wait_s = self._random.uniform(0.0, 1.0)
        self._step_on(self._random.randrange(1, 8))
        time.sleep(wait_s)
        actions: list[Callable[[], str]] = [
            self._kill_searcher,
            self._kill_searcher,
            self._freeze,
            self._join_late,
            self._kill_all,
            self._kill_trainer,
            self._dismiss_searcher,
        ]
        if not self._launched:
            actions.append(self._stop_trainer)
        action = self._random.choice(actions)
        step = self._run.step
        said = action()
        self._say(f"step {step}: {said}")
        self._until_at_work(said)

    def end(self) -> None:
        assert self.main is not None
        left = [role for role in self.mine if role.alive]
        result = self._run.finish(*left, trainer=self.main)
        counted = ("attempt", "rollouts_generated", "rollouts_trained", "rollouts_lost", "weight_transfers_failed")
        self._say(f"end: {', '.join(f'{name} {result[name]}' for name in counted)}")

    def _say(self, text: str) -> None:
        self.record.append(f"{time.monotonic() - self._began_s:6.1f} s  {text}")

    # ---- what is there

    def _search(self) -> Role:
        return self._run.search(*self._port)

    def _searchers(self) -> list[int]:
        return sorted(self._run.processes("search"))

    def _restore(self) -> None:
        """By hand: two searchers and a trainer, whatever there was. A launcher sees to that itself, but for what left
        well or was not its own."""
        assert self.main is not None
        if not self._launched and not self.main.alive:
            self.main = self._run.train()
        if not self._launched or not self._searchers():
            while len(self._searchers()) < 2:
                self.mine.append(self._search())

    def _until_at_work(self, what: str) -> None:
        """Until the trainer counts some living searchers and has made steps with them."""
        assert self.main is not None
        self._restore()
        self._run.until(lambda: self._run.metric("fleet/searchers_live") > 0, f"searchers after: {what}", self.main)
        self._step_on(2)

    def _step_on(self, n: int) -> None:
        assert self.main is not None
        attempt, goal = self._run.attempt, self._run.step + n
        # A trainer that was started again counts from its checkpoint.
        self._run.until(lambda: self._run.step >= goal or self._run.attempt > attempt, f"step {goal}", self.main)

    # ---- what is done to it

    def _kill(self, pid: int) -> None:
        self._run.kill_pid(pid)
        self._run.until_gone(pid)

    def _kill_searcher(self) -> str:
        pid = self._random.choice(self._searchers())
        self._kill(pid)
        return f"searcher {pid} killed"

    def _kill_all(self) -> str:
        pids = self._searchers()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            self._run.until_gone(pid)
        return f"all {len(pids)} searchers killed"

    def _freeze(self) -> str:
        pid, frozen_s = self._random.choice(self._searchers()), self._random.uniform(*FROZEN_S)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(frozen_s)
        os.kill(pid, signal.SIGCONT)
        return f"searcher {pid} frozen for {frozen_s:.1f} s"

    def _join_late(self) -> str:
        self.mine.append(self._search())
        self._run.until_joined(self.mine[-1])
        return f"searcher {self.mine[-1].pid} came"

    def _dismiss_searcher(self) -> str:
        pid = self._random.choice(self._searchers())
        os.kill(pid, signal.SIGTERM)
        self._run.until_gone(pid)
        return f"searcher {pid} dismissed"

    def _kill_trainer(self) -> str:
        (pid,) = self._run.processes("train")
        attempt = self._run.attempt
        self._kill(pid)
        self._next_trainer(attempt)
        return f"trainer {pid} killed, attempt {attempt + 1} begun"

    def _stop_trainer(self) -> str:
        assert self.main is not None
        attempt = self._run.attempt
        self.main.send_signal(signal.SIGTERM)
        assert self.main.wait() == 0, self._run.told()
        self._next_trainer(attempt)
        return f"trainer stopped, attempt {attempt + 1} begun"

    def _next_trainer(self, before: int) -> None:
        self._restore()
        assert self.main is not None
        self._run.until_attempt(before + 1, self.main)


@pytest.mark.parametrize("seed", range(N_SEEDS))
def test_whatever_happens_the_run_ends_whole(tmp_path, start, capsys, seed):
    settings = (*FAST_FAKE, *start, "trainer.save_every_steps=25", f"run.seed={seed}")
    if seed % 2:
        with chaos_run(tmp_path / "run", *settings, *LAUNCHED, n_steps=N_STEPS, hold_step=20) as run:
            go_through(run, seed, 0, tmp_path, capsys)
    else:
        with (
            chaos_run(tmp_path / "run", *settings, *tcp(tmp_path), n_steps=N_STEPS, hold_step=20) as run,
            relayed(run, seed, Faults(late=0.1, repeated=0.05)) as relay,
        ):
            go_through(run, seed, relay.port, tmp_path, capsys)


def go_through(run, seed, port, tmp_path, capsys):
    schedule = Schedule(run, seed, port)
    try:
        schedule.begin()
        for _ in range(ACTIONS):
            schedule.act()
        schedule.end()
    except AssertionError as error:
        raise AssertionError("\n".join([f"seed {seed}", *schedule.record, str(error)])) from error
    finally:
        text = "\n".join([f"seed {seed}, {'by hand' if port else 'launched'}", *schedule.record])
        (tmp_path / "schedule.txt").write_text(text + "\n")
        with capsys.disabled():
            print(f"\n{text}", flush=True)

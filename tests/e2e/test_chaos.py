"""Searchers and trainers that die, freeze and return at chosen moments of a run, in processes of their own.

Each case ends as every run has to: all steps made, the ledger exact, nothing left (``ChaosRun.check``).
"""

import signal

import pytest
from chaos import FAST, FAST_FAKE, chaos_run, relayed, rollouts_by, start_model, tcp
from launching import last_metrics, rollouts_of

pytestmark = pytest.mark.slow

# Several buckets, so that a version can be in part with a searcher. The smallest model's largest tensor needs one.
BUCKETS = "weights.bucket_bytes=65536"
VLLM = "search.engine={kind: vllm, kv_cache_bytes: 67108864, max_sequences: 64}"
TIMES = {"generate": 5, "receive": 2, "send": 3}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return start_model(tmp_path_factory.getbasetemp())


def assert_hit(evidence, die):
    """The kill came in the middle of what it was to hit."""
    assert evidence["die"] == die
    match die:
        case "generate":
            assert evidence["open_prompts"] > 0
        case "receive":
            assert 0 < evidence["buckets"] < evidence["of"]
        case "send":
            assert evidence["payload_bytes"] > 0


@pytest.mark.parametrize("die", ["generate", "receive", "send"])
@pytest.mark.parametrize("engine", ["fake", "vllm"])
def test_a_searcher_that_is_killed_costs_only_its_own_work(tmp_path, start, engine, die):
    # One token a step: there is always something half written.
    settings = (*FAST_FAKE, "search.engine.tokens_per_step=1") if engine == "fake" else (*FAST, VLLM)
    with chaos_run(tmp_path / "run", *settings, *start, BUCKETS, n_steps=300, hold_step=40) as run:
        trainer, survivor = run.train(), run.search()
        victim = run.search(die=die, after=TIMES[die])
        run.until(lambda: not victim.alive, "the victim's death", trainer, survivor)
        assert victim.process.returncode == -signal.SIGKILL, run.told()
        assert_hit(run.evidence(victim), die)
        died_at = run.step
        run.until(lambda: run.metric("fleet/lost_total") >= 1, "the loss is noticed", trainer, survivor)
        replacement = run.search()
        run.until_joined(replacement, trainer, survivor)
        run.until_searchers(2, trainer, survivor, replacement)
        run.until_step(died_at + 5, trainer)
        run.finish(survivor, replacement, trainer=trainer)
        for searcher in (survivor, replacement):
            assert rollouts_by(run, searcher)


def test_a_searcher_that_was_frozen_for_longer_than_its_lease_comes_back(tmp_path, start):
    with chaos_run(tmp_path / "run", *FAST_FAKE, *start, n_steps=300, hold_step=40) as run:
        trainer, other, frozen = run.train(), run.search(), run.search()
        run.until_searchers(2, trainer, other, frozen)
        frozen.send_signal(signal.SIGSTOP)
        run.until(lambda: run.metric("fleet/lost_total") >= 1, "its loss", trainer, other)
        run.until_searchers(1, trainer, other)
        frozen.send_signal(signal.SIGCONT)
        run.until_searchers(2, trainer, other, frozen)
        assert run.metric("fleet/returned_total") >= 1
        # Alone, it has to write all that is trained on.
        other.send_signal(signal.SIGTERM)
        run.until(lambda: not other.alive, "the goodbye", trainer, frozen)
        generated = run.metric("ledger/generated")
        run.until(lambda: run.metric("ledger/generated") >= generated + 40, "its rollouts", trainer, frozen)
        result = run.finish(other, frozen, trainer=trainer)
        assert result["rollouts_lost"] == 0
        assert rollouts_by(run, frozen)


def test_a_late_joiner_gets_the_newest_weights_before_it_generates(tmp_path, start):
    with chaos_run(tmp_path / "run", *FAST_FAKE, *start, n_steps=300, hold_step=150) as run:
        trainer, first = run.train(), run.search()
        run.until_step(150, trainer, first)
        at_start = run.step
        late = run.search()
        run.until_joined(late, trainer, first)
        run.until_searchers(2, trainer, first, late)
        generated_at = run.step
        run.until_step(generated_at + 15, trainer, first, late)
        run.finish(first, late, trainer=trainer)
        versions = [int(row["version"].partition(".")[2]) for row in rollouts_by(run, late)]
        # Newest: not older than the last version that was due when it was started.
        assert versions and min(versions) >= at_start - at_start % 3 - 3


def test_when_all_searchers_are_killed_the_trainer_waits_for_the_next(tmp_path, start):
    with chaos_run(tmp_path / "run", *FAST_FAKE, *start, n_steps=200, hold_step=40) as run:
        trainer = run.train()
        victims = [run.search() for _ in range(3)]
        run.until_searchers(3, trainer, *victims)
        for victim in victims:
            victim.kill()
        run.until(lambda: all(_lost(run, victim) for victim in victims), "all are lost", trainer)
        last = run.search()
        run.until_joined(last, trainer)
        joined_at = run.step
        run.until_step(joined_at + 10, trainer, last)
        run.finish(last, trainer=trainer)


def _lost(run, searcher):
    """Whether the trainer has said that it is lost."""
    return any(f"-{searcher.pid}-" in line and "lost" in line for line in run.trainer_text().splitlines())


# After the checkpoint of step 45 the first trainer crawls, so that it dies well before the next.
SAVES, CRAWL_FROM = "trainer.save_every_steps=45", 46


def until_beyond_its_checkpoint(run, *alive):
    """Until rollouts have been stored of a version that a trainer which resumes will not know."""

    def beyond():
        saved = [int(path.name.removeprefix("step-")) for path in run.folder.glob("checkpoints/step-*")]
        if not saved:
            return False
        return max(int(row["version"].partition(".")[2]) for row in rollouts_of(run.folder)) > max(saved)

    run.until(beyond, "rollouts beyond the checkpoint", *alive)


def until_the_abandoned_are_held(run, *alive):
    """Until the next attempt has begun and holds rollouts of steps that it never made.

    Later they may be gone: the prompts are visited again, and an equal completion of a newer policy takes their place.
    """
    run.until(lambda: any(row["age"] == "-" for row in rollouts_of(run.folder)), "rollouts off the branch", *alive)


def assert_both_attempts_are_held(run):
    assert {row["version"].partition(".")[0] for row in rollouts_of(run.folder)} == {"0", "1"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_living_searchers_find_the_trainer_that_follows_another(tmp_path, start, number):
    with chaos_run(tmp_path / "run", *FAST_FAKE, *start, SAVES, n_steps=300, hold_step=CRAWL_FROM) as run:
        first = run.train()
        searchers = [run.search(), run.search()]
        run.until_searchers(2, first, *searchers)
        until_beyond_its_checkpoint(run, first, *searchers)
        first.send_signal(number)
        run.until(lambda: not first.alive, "the end of the first trainer", *searchers)
        # Asked to stop, it saves and ends well.
        assert first.process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0), run.told()
        second = run.train()
        if number == signal.SIGKILL:
            until_the_abandoned_are_held(run, second, *searchers)
        for searcher in searchers:
            run.until_joined(searcher, second, times=2)  # under its name, so it is the same incarnation
        run.until_searchers(2, second, *searchers)
        joined_at = run.step
        run.until_step(joined_at + 5, second, *searchers)
        result = run.finish(*searchers, trainer=second)
        assert result["attempt"] == 1
        assert result["rollouts_lost"] == 0  # what was not acknowledged came to the second trainer
        assert_both_attempts_are_held(run)
        if number == signal.SIGTERM:  # saved where it stopped, so nothing is off the branch
            assert not [row for row in rollouts_of(run.folder) if row["age"] == "-"]


def test_a_launcher_restarts_its_trainer_under_the_same_searchers(tmp_path, start):
    settings = (SAVES, "launch.trainer_restarts=2", "search.searchers=2")
    with chaos_run(tmp_path / "run", *FAST_FAKE, *start, *settings, n_steps=300, hold_step=CRAWL_FROM) as run:
        launcher = run.launch()
        run.until_searchers(2, launcher)
        until_beyond_its_checkpoint(run, launcher)
        searchers = set(run.processes("search"))
        assert len(searchers) == 2
        (trainer,) = run.processes("train")
        run.kill_pid(trainer)
        run.until(lambda: set(run.processes("train")) - {trainer}, "the next trainer", launcher)
        until_the_abandoned_are_held(run, launcher)
        run.until_attempt(1, launcher)
        run.until_searchers(2, launcher)
        assert set(run.processes("search")) == searchers
        result = run.finish(trainer=launcher)
        assert (result["attempt"], result["rollouts_lost"]) == (1, 0)
        assert_both_attempts_are_held(run)


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_delayed_repeated_or_reordered_on_the_way_changes_nothing(tmp_path, start, seed):
    with (
        chaos_run(tmp_path / "run", *FAST_FAKE, *start, *tcp(tmp_path), n_steps=300, hold_step=40) as run,
        relayed(run, seed) as relay,
    ):
        trainer = run.train()
        searchers = [run.search(f"transport.control_port={relay.port}") for _ in range(2)]
        run.until_searchers(2, trainer, *searchers)
        run.until_step(60, trainer, *searchers)
        run.until(lambda: run.metric("fleet/repeated_total") >= 10, "repeated words", trainer, *searchers)
        run.until(lambda: run.metric("buffer/sent_again_total") >= 10, "repeated rollouts", trainer, *searchers)
        assert min(relay.counts[what] for what in ("late", "repeated", "overtaken")) >= 10, relay.counts
        result = run.finish(*searchers, trainer=trainer)
        assert result["rollouts_lost"] == 0
        assert last_metrics(run.folder)["fleet/refused_total"] == 0
        assert last_metrics(run.folder)["buffer/refused_total"] == 0
        assert last_metrics(run.folder)["buffer/corrupt_total"] == 0

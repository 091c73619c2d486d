"""Every run ends by itself, and well: few steps, few prompts, data that ends, several at once."""

import json
import math

import pytest
from chaos import FAST_FAKE, chaos_run, start_model
from launching import FAKE, ledger_gap, records, rollouts_of, steps, summary_of

pytestmark = pytest.mark.slow

QUIET = ("sft.steps=0", "evaluation.problems=16", "transport.heartbeat_s=0.2", "transport.lease_s=3")
# 2 * 10 * 2 problems, of which some are held out by a hash.
SMALL_TASK = "task={kind: arithmetic, max_left: 9, max_right: 1}"
VLLM = "search.engine={kind: vllm, kv_cache_bytes: 67108864, max_sequences: 64}"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return start_model(tmp_path_factory.getbasetemp())


def end(run, *, n_steps=None):
    """A launch of ``run`` comes to its end by itself; its summary."""
    launcher = run.launch()
    run.until(lambda: not launcher.alive, "the end")
    assert launcher.process.returncode == 0, run.told()
    run.check(n_steps)
    summary = summary_of(run.folder)
    assert ledger_gap(summary) == 0
    return summary


@pytest.mark.parametrize("engine", [FAKE, VLLM], ids=["fake", "vllm"])
def test_a_run_of_one_step_ends(tmp_path, start, engine):
    settings = [setting for setting in FAST_FAKE if setting != FAKE]
    with chaos_run(tmp_path / "run", *settings, engine, *start, n_steps=1) as run:
        end(run)


def test_a_run_of_no_step_measures_and_ends(tmp_path, start):
    with chaos_run(tmp_path / "run", *FAST_FAKE, *start, n_steps=0) as run:
        launcher = run.launch()
        run.until(lambda: not launcher.alive, "the end")
        assert launcher.process.returncode == 0, run.told()
        assert steps(run.folder) == []
        run.check_nothing_left()


def test_three_prompts_last_for_a_hundred_steps(tmp_path, start):
    # 2 * 2 * 1 problems, one of which is held out: fewer than a step takes.
    few = ("task={kind: arithmetic, max_left: 1, max_right: 1, held_out_fraction: 0.5}", "buffer.max_reuse=0")
    with chaos_run(tmp_path / "run", *FAST_FAKE, *start, *few, n_steps=100) as run:
        end(run)
        prompts = {row["prompt_id"] for row in rollouts_of(run.folder)}
        assert 1 <= len(prompts) <= 4 < 100


def assert_visited(run, epochs):
    """Every prompt of the task was visited at least ``epochs`` times; how many there are."""
    copies: dict[str, int] = {}
    for row in rollouts_of(run.folder):
        copies[row["prompt_id"]] = copies.get(row["prompt_id"], 0) + int(row["copies"])
    n_prompts = n_train_prompts(run)
    assert len(copies) == n_prompts
    per_visit = 4  # search.completions_per_prompt
    assert min(copies.values()) >= epochs * per_visit, copies
    return n_prompts


def n_train_prompts(run):
    from tba_megatron.config_load import load_config
    from tba_megatron.models.tokenizer import HfTokenizer
    from tba_megatron.tasks.registry import make_task

    config = load_config(run.folder / "config.yaml", [])
    task = make_task(config.task, HfTokenizer(config.model.path), config.run.seed, config.model.max_length)
    return len({task.train_prompt(position).prompt_id for position in range(2000)})


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_ends_well_when_its_data_has_ended(tmp_path, start, epochs):
    settings = (SMALL_TASK, f"search.epochs={epochs}", "buffer.max_reuse=1", "search.searchers=2")
    with chaos_run(tmp_path / "run", *FAST_FAKE, *start, *settings, n_steps=100_000) as run:
        launcher = run.launch()
        run.until(lambda: not launcher.alive, "the end of the data")
        assert launcher.process.returncode == 0, run.told()
        made = json.loads((run.folder / "result.json").read_text())["steps"]
        assert 1 <= made < 100_000
        run.check(made)
        assert summary_of(run.folder)["data_ended"]
        assert_visited(run, epochs)
        again = run.start("launch", name="again")
        assert again.wait() == 0
        assert "is complete" in again.text


def test_two_runs_on_one_host_do_not_meet(tmp_path, start):
    with (
        chaos_run(tmp_path / "a", *FAST_FAKE, *start, n_steps=60) as one,
        chaos_run(tmp_path / "b", *FAST_FAKE, *start, n_steps=60) as other,
    ):
        launchers = [run.launch() for run in (one, other)]
        for run, launcher in zip((one, other), launchers, strict=True):
            run.until(lambda launcher=launcher: not launcher.alive, "the end")
            assert launcher.process.returncode == 0, run.told()
        senders = []
        for run in (one, other):
            run.check()
            assert last(run, "fleet/joined_total") == 1
            assert last(run, "fleet/refused_total") == last(run, "buffer/refused_total") == 0
            senders.append({row["searcher"] for row in rollouts_of(run.folder)})
        assert senders[0].isdisjoint(senders[1])


def last(run, metric):
    return list(records(run.folder, metric).values())[-1]


@pytest.mark.parametrize("turn", range(10))
def test_four_searchers_that_start_at_once_all_join_and_leave(tmp_path, start, turn):
    with chaos_run(tmp_path / "run", *FAST_FAKE, *start, f"run.seed={turn}", n_steps=60, hold_step=30) as run:
        trainer = run.train()
        searchers = [run.search() for _ in range(4)]
        run.until_searchers(4, trainer, *searchers)
        run.finish(*searchers, trainer=trainer)
        assert last(run, "fleet/joined_total") == 4


def test_four_engines_that_start_at_once_all_join_and_leave(tmp_path, start):
    settings = [setting for setting in FAST_FAKE if setting != FAKE]
    with chaos_run(tmp_path / "run", *settings, VLLM, *start, n_steps=60, hold_step=30) as run:
        trainer = run.train()
        searchers = [run.search() for _ in range(4)]
        run.until_searchers(4, trainer, *searchers)
        run.finish(*searchers, trainer=trainer)
        assert last(run, "fleet/joined_total") == 4


@pytest.mark.parametrize("visits", [1.0, 1.5], ids=["at the end of the first epoch", "in the second epoch"])
def test_a_run_that_resumes_visits_every_prompt_of_both_epochs(tmp_path, start, visits):
    # In lock-step with its data, so that a step is known to end where an epoch does.
    settings = (SMALL_TASK, "search.epochs=2", "buffer.max_reuse=1", "search.max_age_steps=1")
    with chaos_run(tmp_path / "run", *FAST_FAKE, *start, *settings, n_steps=100_000) as run:
        n_prompts = n_train_prompts_of(start, tmp_path)
        first_steps = math.ceil(visits * n_prompts / 4)
        launcher = run.start("launch", f"trainer.steps={first_steps}", name="first")
        assert launcher.wait() == 0, run.told()
        assert json.loads((run.folder / "result.json").read_text())["steps"] == first_steps
        (saved,) = (path.name for path in (run.folder / "checkpoints").iterdir())
        assert saved == f"step-{first_steps:08d}"
        launcher = run.launch()
        run.until(lambda: not launcher.alive, "the end of the data")
        assert launcher.process.returncode == 0, run.told()
        made = json.loads((run.folder / "result.json").read_text())["steps"]
        run.check(made)
        assert summary_of(run.folder)["data_ended"]
        assert_visited(run, 2)

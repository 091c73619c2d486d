"""Every run ends by itself, and well: few steps, few prompts, data that ends, several at once."""

import json

import pytest
from chaos import FAST_FAKE, chaos_run, start_model
from launching import FAKE, QUICKSTART, ROOT, ledger_gap, records, rollouts_of, steps, summary_of

from tba_megatron.config_load import load_config
from tba_megatron.models.tokenizer import HfTokenizer
from tba_megatron.tasks.registry import make_task
from tba_megatron.trainer.checkpoint_folder import checkpoints
from tba_megatron.trainer.run_state import read_run_state

pytestmark = pytest.mark.slow

# 2 * 10 * 2 problems; a hash holds 8 of them out.
SMALL_TASK = ("task={kind: arithmetic, max_left: 9, max_right: 1}", "evaluation.problems=8")
# 2 * 2 * 2 problems, three of which are left to train on: fewer than a step takes.
THREE_PROMPTS = (
    "task={kind: arithmetic, max_left: 1, max_right: 1, held_out_fraction: 0.5}",
    "evaluation.problems=5",
    "buffer.max_reuse=0",
)
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
    with chaos_run(tmp_path / "run", *FAST_FAKE, *start, *THREE_PROMPTS, n_steps=100) as run:
        end(run)
        prompts = {row["prompt_id"] for row in rollouts_of(run.folder)}
        assert len(prompts) == len(train_prompts(run)) == 3


def assert_visited(run, epochs):
    """Every prompt of the task was visited at least ``epochs`` times: no position of them is open."""
    prompts = train_prompts(run)
    _, checkpoint = checkpoints(run.folder / "checkpoints")[-1]
    state = read_run_state(checkpoint)
    assert (state.next_position, state.unfinished_prompts) == (epochs * len(prompts), [])
    per_visit = 4  # search.completions_per_prompt
    assert sum(state.generated.values()) >= epochs * len(prompts) * per_visit
    assert {row["prompt_id"] for row in rollouts_of(run.folder)} == prompts


def train_prompts(run):
    """The ids of all prompts that are trained on."""
    config = load_config(ROOT / QUICKSTART, [f"run.folder={run.folder}", *run.settings])
    task = make_task(config.task, HfTokenizer(config.model.path), config.run.seed, config.model.max_length)
    return {task.train_prompt(position).prompt_id for position in range(1000)}


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_ends_well_when_its_data_has_ended(tmp_path, start, epochs):
    settings = (*SMALL_TASK, f"search.epochs={epochs}", "buffer.max_reuse=1", "search.searchers=2")
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


def test_a_run_that_no_searcher_comes_to_is_saved_and_goes_on_when_one_does(tmp_path, start):
    with chaos_run(tmp_path / "run", *FAST_FAKE, *start, n_steps=20) as run:
        alone = ("search.searchers=0", "search.absent_warning_s=1", "search.absent_limit_s=3")
        first = run.start("launch", *alone, name="first")
        assert first.wait() == 69, run.told()
        assert "no searcher for 3 s (search.absent_limit_s); saving step 0" in first.text
        end(run)


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


@pytest.mark.parametrize("epochs", [1.0, 1.5], ids=["at the end of the first epoch", "in the second epoch"])
def test_a_run_that_resumes_visits_every_prompt_of_both_epochs(tmp_path, start, epochs):
    # In lock-step, a step begins where the prompts of the last one ended.
    settings = (*SMALL_TASK, "search.epochs=2", "weights.mode=sync", "weights.publish_every_steps=1")
    with chaos_run(tmp_path / "run", *FAST_FAKE, *start, *settings, n_steps=100_000) as run:
        n_prompts = len(train_prompts(run))
        n_steps, rest = divmod(round(epochs * n_prompts), 4)  # trainer.prompts_per_step
        assert rest == 0
        first = run.start("launch", f"trainer.steps={n_steps}", name="first")
        assert first.wait() == 0, run.told()
        assert json.loads((run.folder / "result.json").read_text())["steps"] == n_steps
        ((step, checkpoint),) = checkpoints(run.folder / "checkpoints")
        state = read_run_state(checkpoint)
        assert (step, state.next_position, state.unfinished_prompts) == (n_steps, 4 * n_steps, [])
        second = run.launch()
        run.until(lambda: not second.alive, "the end of the data")
        assert second.process.returncode == 0, run.told()
        run.check(json.loads((run.folder / "result.json").read_text())["steps"])
        assert summary_of(run.folder)["data_ended"]
        assert_visited(run, 2)

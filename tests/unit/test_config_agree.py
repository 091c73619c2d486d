"""A searcher that would search for another run than the one it finds is refused."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tba_megatron.config_agree import refuse_other_problems
from tba_megatron.config_load import load_config, store_config
from tba_megatron.errors import RunFolderError

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def config(folder: Path, *overrides: str):
    return load_config(QUICKSTART, [f"run.folder={folder}", *overrides])


@pytest.fixture
def run_folder(tmp_path):
    store_config(config(tmp_path / "run"), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "override",
    [
        "task.held_out_fraction=0.02",
        "run.seed=7",
        "evaluation.problems=3",
        "objective.truncated=drop",
        "search.completions_per_prompt=4",
    ],
)
def test_other_problems_rewards_or_measures_are_refused_with_their_key(override, run_folder):
    key, _, value = override.partition("=")
    with pytest.raises(RunFolderError) as caught:
        refuse_other_problems(config(run_folder, override))
    assert f"{key} is " in str(caught.value) and f"and {value} here" in str(caught.value)
    assert str(run_folder / "config.yaml") in str(caught.value)


def test_how_a_searcher_samples_and_where_it_lives_is_its_own(run_folder):
    own = ["search.temperature=0.7", "search.source=hot", "search.sources={hot: {temperature: 1.2}}"]
    refuse_other_problems(config(run_folder, *own, "search.prompts_in_engine=4", "transport.lease_s=30"))


def test_a_searcher_that_scores_under_the_start_model_needs_the_runs_own(tmp_path):
    for placement, refused in (("device", False), ("searcher", True)):
        folder, placed = tmp_path / placement, f"objective.reference.placement={placement}"
        store_config(config(folder, placed), folder)
        with pytest.raises(RunFolderError, match=r"model\.path is ") if refused else nullcontext():
            refuse_other_problems(config(folder, placed, "model.path=configs"))
    with pytest.raises(RunFolderError, match=r"objective\.reference\.placement is searcher there and device here"):
        refuse_other_problems(config(tmp_path / "searcher"))


def test_a_folder_without_the_runs_configuration_is_one_line(tmp_path):
    with pytest.raises(RunFolderError, match=r"config\.yaml cannot be read"):
        refuse_other_problems(config(tmp_path))

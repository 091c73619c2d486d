from pathlib import Path

import pytest

from tba_megatron.config_load import dump_config, load_config
from tba_megatron.models.tokenizer import HfTokenizer
from tba_megatron.tasks.registry import make_task

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_configurations_are_shipped():
    assert {"quickstart.yaml", "quickstart_tp2_pp2.yaml"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_configuration_loads_and_survives_a_dump(path, tmp_path):
    config = load_config(path)
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_task_of_a_shipped_configuration_fits_its_model(path):
    config = load_config(path)
    if not config.model.path.is_dir():
        pytest.skip(f"{config.model.path} is not shipped")
    task = make_task(config.task, HfTokenizer(config.model.path), config.run.seed, config.model.max_length)
    assert task.dropped_prompts == 0
    longest = max(len(task.train_prompt(index).token_ids) for index in range(task.n_train))
    assert longest + config.search.max_new_tokens <= config.model.max_length
    assert len(task.held_out_prompts(config.evaluation.problems)) == config.evaluation.problems


def test_the_parallel_quickstart_is_the_quickstart_on_four_ranks():
    one, four = (load_config(f"configs/{name}.yaml") for name in ("quickstart", "quickstart_tp2_pp2"))
    assert (one.trainer.world_size, four.trainer.world_size) == (1, 4)
    changed = four.model_dump()
    for section, key in [
        ("run", "folder"),
        ("trainer", "steps"),
        ("trainer", "tensor_parallel"),
        ("trainer", "pipeline_parallel"),
        ("trainer", "megatron_extra"),
    ]:
        changed[section][key] = one.model_dump()[section][key]
    assert changed == one.model_dump()

import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tba_megatron.config_load import load_config, store_config
from tba_megatron.errors import RunFolderError
from tba_megatron.ops import launch as launch_module
from tba_megatron.ops.launch import launch
from tba_megatron.ops.roles import searchers, trainer_ranks
from tba_megatron.ops.summary import is_complete, print_summary, summarise
from tba_megatron.trainer.result import RunResult, read_result, write_result
from tba_megatron.transport.sockets import sockets_folder

ROOT = Path(__file__).parents[2]

RESULT = RunResult(
    complete=True,
    stopped_by_signal=0,
    attempt=1,
    steps=430,
    skipped_steps=2,
    accuracy_before=0.25,
    accuracy_after=0.6,
    weight_versions=400,
    weight_transfers_failed=1,
    trainer_wait_fraction=0.125,
    searcher_idle_fraction=0.5,
    age_steps_p50=1,
    age_steps_max=2,
    startup_s=3.0,
    searchers_joined=5,
    searchers_lost=2,
    rollouts_generated=1000,
    rollouts_in_flight=1,
    rollouts_held_untrained=20,
    rollouts_trained=700,
    rollouts_discarded=270,
    rollouts_discarded_duplicate=200,
    rollouts_discarded_evicted_untrained=50,
    rollouts_discarded_invalid=20,
    rollouts_lost=9,
)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    return load_config("configs/quickstart.yaml", [f"run.folder={tmp_path}", "trainer.steps=430"])


def finish(config, result=RESULT):
    """A run folder as a complete run leaves it."""
    write_result(config.run.folder, result)
    summary = summarise(result, config, 12.0)
    (config.run.folder / "summary.json").write_bytes(msgspec.json.encode(summary))
    (config.run.folder / "hf").mkdir(exist_ok=True)


def table(summary):
    stream = io.StringIO()
    print_summary(summary, stream)
    return dict(re.findall(r"│ +(.+?) +│ (.+?) +│", stream.getvalue()))


def test_a_result_survives_the_run_folder(tmp_path):
    assert read_result(tmp_path) is None
    write_result(tmp_path, RESULT)
    assert read_result(tmp_path) == RESULT


def test_the_summary_is_the_result_with_what_the_launcher_knows(config):
    summary = summarise(RESULT, config, 12.34)
    assert {name: summary[name] for name in msgspec.structs.asdict(RESULT)} == msgspec.structs.asdict(RESULT)
    assert (summary["wall_s"], summary["seed"]) == (12.3, 0)
    assert isinstance(summary["cpu_s"], float)
    assert summary["model"] == str(config.run.folder / "hf")


def test_processor_time_counts_the_roles(config):
    before = summarise(RESULT, config, 1.0)["cpu_s"]
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert summarise(RESULT, config, 1.0)["cpu_s"] >= before + 0.2


def test_the_table_shows_the_summary(config):
    shown = table(summarise(RESULT, config, 12.34))
    assert shown["accuracy before"] == "25.0 %"
    assert shown["accuracy after"] == "60.0 %"
    assert shown["steps (skipped)"] == "430 (2)"
    assert shown["age in steps, median / max"] == "1 / 2"
    assert shown["trainer waited"] == "12.5 %"
    assert shown["searchers joined / lost"] == "5 / 2"


def test_the_ledger_rows_add_up(config):
    shown = table(summarise(RESULT, config, 12.34))
    total, *parts = re.match(r"(\d+) \(duplicate (\d+), evicted (\d+), invalid (\d+)\)", shown["discarded"]).groups()
    assert int(total) == sum(map(int, parts))
    in_flight, lost = map(int, shown["in flight / lost"].split(" / "))
    counted = int(shown["trained"]) + int(shown["held untrained"]) + int(total) + in_flight + lost
    assert int(shown["rollouts generated"]) == counted


def test_what_was_not_measured_says_so(config):
    result = msgspec.structs.replace(RESULT, accuracy_before=None)
    assert table(summarise(result, config, 1.0))["accuracy before"] == "not measured"


def test_a_run_is_complete_when_its_steps_evaluation_export_and_summary_are_there(config):
    assert not is_complete(config)
    finish(config)
    assert is_complete(config)
    more = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": 431})})
    assert not is_complete(more)
    (config.run.folder / "summary.json").unlink()
    assert not is_complete(config)


ENDED = msgspec.structs.replace(RESULT, steps=37, skipped_steps=0, data_ended=True)


def test_a_run_whose_data_ended_says_so(config):
    assert table(summarise(ENDED, config, 1.0))["steps (skipped)"] == "37 of 430 (0), the data has ended"


def test_a_run_whose_data_ended_is_complete_until_there_is_more_data(config):
    finish(config, ENDED)
    assert is_complete(config)
    more = config.model_copy(update={"search": config.search.model_copy(update={"epochs": 7})})
    assert not is_complete(more)
    finish(config, msgspec.structs.replace(ENDED, data_ended=False))
    assert not is_complete(config)


def test_a_run_whose_data_ended_is_not_told_to_raise_its_steps(config):
    finish(config, ENDED)
    store_config(config, config.run.folder)
    stream = io.StringIO()
    assert launch(config, stream) == 0
    assert "is complete; its data has ended" in stream.getvalue()
    assert "raise trainer.steps" not in stream.getvalue()
    assert "37 of 430 (0), the data has ended" in stream.getvalue()


def test_a_summary_without_the_newer_values_is_shown(config):
    finish(config)
    path = config.run.folder / "summary.json"
    summary = msgspec.json.decode(path.read_bytes())
    for name in ("trainer_steps", "epochs", "searchers_joined", "searchers_lost", "data_ended"):
        del summary[name]
    path.write_bytes(msgspec.json.encode(summary))
    stream = io.StringIO()
    assert launch(config, stream) == 0
    assert "0 / 0" in stream.getvalue()


@pytest.mark.parametrize("missing", [{"complete": False}, {"accuracy_after": None}])
def test_a_run_that_ended_early_is_not_complete(config, missing):
    finish(config, msgspec.structs.replace(RESULT, **missing))
    assert not is_complete(config)


def test_launching_a_complete_run_shows_its_summary_and_leaves_nothing_new(config):
    finish(config)
    store_config(config, config.run.folder)
    files = {path: path.read_bytes() for path in config.run.folder.iterdir() if path.is_file()}
    stream = io.StringIO()
    assert launch(config, stream) == 0
    assert "is complete; raise trainer.steps to go on" in stream.getvalue()
    assert "60.0 %" in stream.getvalue()
    assert {p: p.read_bytes() for p in config.run.folder.iterdir() if p.is_file() and p.name != ".lock"} == files


SOURCES = "search.sources={hot: {searchers: 2, temperature: 1.5}, spare: {searchers: 0}}"


def test_searchers_of_each_source_are_roles_with_a_log_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config("configs/quickstart.yaml", [f"run.folder={tmp_path}", "search.searchers=1", SOURCES])
    roles = searchers(config, tmp_path / "config.yaml")
    assert [role.name for role in roles] == ["search-0", "search-hot-0", "search-hot-1"]
    assert [role.log.name for role in roles] == ["search-0.log", "search-hot-0.log", "search-hot-1.log"]
    assert [role.argv[-3:] for role in roles] == [
        ("search", str(tmp_path / "config.yaml"), f"search.source={source}") for source in ("searcher", "hot", "hot")
    ]
    # What a role reads: the stored configuration with its override.
    store_config(config, tmp_path)
    assert load_config(roles[1].argv[-2], [roles[1].argv[-1]]).search.this_source.temperature == 1.5


def test_a_run_with_sources_counts_all_searchers_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    run = ["configs/quickstart.yaml", [f"run.folder={tmp_path}", "search.searchers=3"]]
    assert launch_module._data(load_config(*run)) == "3 searcher(s)"
    run[1].append(SOURCES)
    assert launch_module._data(load_config(*run)) == "5 searcher(s): 3 searcher, 2 hot"


def test_each_start_of_trainer_ranks_meets_in_a_file_of_its_own(config):
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"data_parallel": 2})})
    first, second = (trainer_ranks(config, "train", Path("config.yaml")) for _ in range(2))
    assert [[role.environment["RANK"] for role in roles] for roles in (first, second)] == [["0", "1"]] * 2
    stores = [{role.environment["TBA_STORE_FILE"] for role in roles} for roles in (first, second)]
    assert [len(files) for files in stores] == [1, 1]
    assert stores[0] != stores[1]
    assert [role.visible for role in first] == [True, False]


def test_new_ranks_find_nothing_of_a_trainer_that_was_killed(config):
    left = [config.run.folder / name for name in ("rendezvous.json", ".store-1")]
    for path in left:
        path.write_text("left")
    held = config.run.folder / "weights" / ".start-a"
    held.mkdir(parents=True)
    sockets = sockets_folder(config.run.folder)
    sockets.mkdir(mode=0o700)
    (sockets / "control").write_text("left")
    launch_module._new_ranks(config, "train", Path("config.yaml"))
    assert not sockets.exists()
    assert not any(path.exists() for path in left)
    assert held.exists()  # a searcher that lives on may be loading it


def test_a_run_folder_holds_one_launch_at_a_time(config):
    code = (
        "import fcntl, sys\n"
        "lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(config.run.folder / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match="is in use by another tba launch"):
            launch(config, io.StringIO())
        assert not (config.run.folder / "config.yaml").exists()  # the other launch's roles would read it
    finally:
        other.kill()
        other.communicate()


def test_the_seeds_benchmark_reports_gains_and_the_ledgers_gap(config):
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "quickstart_seeds.py"))
    row, gains = benchmark["row"], benchmark["gains"]
    summary = summarise(RESULT, config, 12.0)
    rows = [row(0, 0, summary), row(1, 0, {**summary, "accuracy_after": 0.35}), row(2, 1, {})]
    assert [r["gain"] for r in rows] == [pytest.approx(0.35), pytest.approx(0.1), None]
    assert [r["ledger_gap"] for r in rows] == [0, 0, None]
    assert gains(rows) == {"median_gain": pytest.approx(0.225), "min_gain": pytest.approx(0.1)}
    assert gains(rows[2:]) == {"median_gain": None, "min_gain": None}


@pytest.mark.parametrize("content", [b"", b'{"complete": tr', b"[1]"])
def test_a_damaged_result_is_one_line(content, tmp_path):
    (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(RunFolderError, match=r"result\.json cannot be read .*; remove it and start again"):
        read_result(tmp_path)

"""``tba rollouts`` over run folders that are written here: what is stored is found, chosen, shown and exported."""

import io
import json
import re
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.cells import cell_len
from rollout_factory import RolloutFactory
from xxhash import xxh3_64_intdigest

from tba_megatron.buffer.rows import version_of
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.stored_shard import REPLAY, StoredShard, generations
from tba_megatron.cli import main as cli
from tba_megatron.cli import rollouts as command
from tba_megatron.config_load import load_config, store_config
from tba_megatron.errors import CheckpointError, ConfigError, RunFolderError
from tba_megatron.models.tokenizer import HfTokenizer
from tba_megatron.ops import rollouts_export, rollouts_view
from tba_megatron.ops.rollouts_export import export
from tba_megatron.ops.rollouts_view import RolloutQuery, open_rollouts, records, select, totals
from tba_megatron.rollout_batch import RolloutBatch, encode
from tba_megatron.trainer.run_state import ATTEMPTS, RunState
from tba_megatron.transport.rollouts import owner_of
from tba_megatron.types import FOREIGN_ATTEMPT, PolicySpan, PolicyVersion, RolloutGroup, StopReason

ROOT = Path(__file__).parents[2]
TOKENIZER = HfTokenizer(ROOT / "configs" / "tiny_qwen2")
EOS = 1


class Run:
    """A run folder whose shards take in what a test gives them."""

    def __init__(self, folder: Path, n_shards: int = 1, *overrides: str, segments: bool = True) -> None:
        self.folder, self.n_shards = folder, n_shards
        config = load_config(
            ROOT / "configs" / "quickstart.yaml",
            ["model.init=pretrained", "sft.steps=0", f"model.path={ROOT / 'configs' / 'tiny_qwen2'}", *overrides],
        )
        store_config(config, folder)
        self.attempts(0)
        self.made = RolloutFactory("searcher-a")
        self.sequences = dict.fromkeys(range(n_shards), 0)
        self.shards = [
            StoredShard(
                ReplayShard(1000, 100),
                replay=folder / REPLAY if segments else None,
                segment_bytes=1 << 12,
                index=i,
                n_shards=n_shards,
            )
            for i in range(n_shards)
        ]
        for shard in self.shards:
            shard.restore({}, [])

    def attempts(self, *base_steps: int) -> None:
        (self.folder / ATTEMPTS).write_text(json.dumps(base_steps))

    def rollout(self, text: str, *, attempt: int = 0, step: int = 0, stop: str = "eos", **fields):
        tokens = [*TOKENIZER.encode(text).tolist(), *([EOS] if stop == "eos" else [])]
        return self.made.rollout(tokens, attempt=attempt, step=step, stop_reason=StopReason(stop), **fields)

    def send(self, prompt: str, *rollouts) -> None:
        group = RolloutGroup(
            prompt_id=f"sum:{prompt}", prompt_token_ids=TOKENIZER.encode(prompt), rollouts=tuple(rollouts)
        )
        owner = owner_of(group.prompt_id, self.n_shards)
        shard, sequence = self.shards[owner], self.sequences[owner]
        payload = encode(RolloutBatch.of_groups([group]))
        end = shard.log and shard.log.append("searcher-a", sequence, payload, xxh3_64_intdigest(payload))
        shard.take(RolloutBatch.of_groups([group]), "searcher-a", sequence, end)
        self.sequences[owner] += 1

    def train(self, *texts: str) -> None:
        """One optimizer step on the rollouts with these completions."""
        for stored in self.shards:
            shard, rows = stored.shard, stored.shard.rows.living()
            tokens = shard.payload.token_rows(rows)
            shard.mark_trained(rows[[TOKENIZER.decode(ids) in texts for ids in tokens]])

    def save(self, step: int, *base_steps: int) -> Path:
        path = self.folder / "checkpoints" / f"step-{step:08d}"
        path.mkdir(parents=True)
        for i, shard in enumerate(self.shards):
            np.savez(path / f"shard-{i}.npz", **shard.state_columns())  # pyright: ignore[reportArgumentType]
        state = RunState(
            step=step,
            base_steps=base_steps or (0,),
            data_parallel=self.n_shards,
            next_position=0,
            unfinished_prompts=[],
            generated={},
        )
        (path / "run.json").write_bytes(msgspec.json.encode(state))
        return path

    def close(self) -> None:
        for shard in self.shards:
            shard.close()


@contextmanager
def run_folder(tmp_path, n_shards: int = 1, *overrides: str, segments: bool = True):
    with closing(Run(tmp_path / "run", n_shards, *overrides, segments=segments)) as run:
        yield run


@pytest.fixture
def run(tmp_path):
    """Rollouts of steps 0, 2 and 4, two of them trained on; the checkpoint at step 4 has all but the last."""
    with run_folder(tmp_path) as run:
        run.send("1+1=", run.rollout("2", reward=1.0), run.rollout("3", reward=0.25), run.rollout("11", reward=0.0))
        run.send(
            "2+2=", run.rollout("4", step=2, reward=1.0, source="other"), run.rollout("444", step=2, stop="length")
        )
        run.train("2", "4")
        run.train("2")
        run.save(4)
        run.send("9-9=", run.rollout("0", step=4, reward=0.5))
        yield run


def found(folder: Path, **query) -> list[str]:
    """Completions in the order of the answer."""
    stored = open_rollouts(folder)
    return [one.completion for some in records(stored, select(stored, RolloutQuery(**query))) for one in some]


def held(run: Run) -> set[tuple[str, str, int]]:
    """(prompt id, completion, uses) of what the shards of the trainer hold."""
    everything = set()
    for stored in run.shards:
        shard = stored.shard
        rows = shard.rows.living()
        texts = [TOKENIZER.decode(ids) for ids in shard.payload.token_rows(rows)]
        everything |= set(
            zip(shard.prompts.ids(shard.rows.prompt[rows]), texts, shard.rows.uses[rows].tolist(), strict=True)
        )
    return everything


def seen(folder: Path) -> set[tuple[str, str, int]]:
    stored = open_rollouts(folder)
    rows = select(stored, RolloutQuery())
    return {(one.prompt_id, one.completion, one.uses) for some in records(stored, rows) for one in some}


def tba(capsys, *argv) -> tuple[int, str, str]:
    code = cli.main(["rollouts", *map(str, argv)])
    output = capsys.readouterr()
    return code, output.out, output.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# ---- what is read


def test_a_checkpoint_and_what_the_log_has_beyond_it_are_shown_while_the_log_is_open(run):
    assert len(held(run)) == 6
    assert seen(run.folder) == held(run)


def test_reading_changes_nothing_in_the_run_folder(run):
    def contents():
        return {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}

    before = contents()
    seen(run.folder)
    assert contents() == before
    run.send("8+1=", run.rollout("9", step=5))  # the log goes on
    assert seen(run.folder) == held(run)


def test_without_a_checkpoint_everything_comes_from_the_log_and_nothing_has_been_used(tmp_path):
    with run_folder(tmp_path) as run:
        run.send("1+1=", run.rollout("2", step=3), run.rollout("3", step=3))
        run.train("2")
        assert seen(run.folder) == {("sum:1+1=", "2", 0), ("sum:1+1=", "3", 0)}


def test_a_run_without_logs_shows_its_checkpoint(tmp_path):
    with run_folder(tmp_path, 1, "buffer.segments={kind: none}", segments=False) as run:
        run.send("1+1=", run.rollout("2"), run.rollout("3"))
        run.train("3")
        run.save(1)
        assert seen(run.folder) == held(run) == {("sum:1+1=", "2", 0), ("sum:1+1=", "3", 1)}


@pytest.mark.parametrize("saved", [True, False])
def test_the_rollouts_of_two_shards_are_shown_as_one(tmp_path, saved):
    with run_folder(tmp_path, 2) as run:
        for n in range(8):
            run.send(f"{n}+1=", run.rollout(str(n + 1), step=n))
        if saved:
            run.train("3", "5", "6")
            run.save(8)
        for n in range(8):
            run.send(f"{n}-1=", run.rollout(str(n), step=8 + n))
        assert all(len(shard.shard) for shard in run.shards)
        assert seen(run.folder) == held(run)
        assert len(held(run)) == 16


@pytest.mark.parametrize("saved", [True, False])
def test_a_generation_that_one_of_its_shards_has_begun_is_no_second_copy(tmp_path, saved):
    with run_folder(tmp_path) as run:
        run.send("1+1=", run.rollout("2"), run.rollout("3"))
        run.send("2+2=", run.rollout("4"))
        run.train("2")
        parts = {0: rollouts_view.read_shard(run.save(1), 0)} if saved else {}
        before, replay = seen(run.folder), run.folder / REPLAY
        begun = StoredShard(ReplayShard(1000, 100), replay=replay, index=0, n_shards=2)
        begun.restore(parts, generations(replay))
        begun.close()
        assert len(generations(replay)) == 2 and len(begun.shard) == 3
        assert seen(run.folder) == before
        stored = open_rollouts(run.folder)
        assert stored.shard.rows.copies[stored.shard.rows.living()].tolist() == [1, 1, 1]


def test_a_torn_tail_costs_its_record_alone_and_is_told(run, caplog):
    before = seen(run.folder)
    run.send("8+1=", run.rollout("9", step=5))
    run.close()
    segment = max((run.folder / REPLAY).rglob("*.seg"))
    segment.write_bytes(segment.read_bytes()[:-3])
    assert seen(run.folder) == before
    (record,) = caplog.records
    assert str(segment) in record.getMessage()


@pytest.mark.parametrize("removed", [True, False])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(run, monkeypatch, removed):
    real = rollouts_view.read_shard

    def replaced(checkpoint, index):
        monkeypatch.setattr(rollouts_view, "read_shard", real)
        run.train("3")
        newer = run.save(6)
        assert newer > checkpoint
        if removed:
            (checkpoint / "shard-0.npz").unlink()
        return real(checkpoint, index)

    monkeypatch.setattr(rollouts_view, "read_shard", replaced)
    assert seen(run.folder) == held(run)
    assert ("sum:1+1=", "3", 1) in held(run)


# ---- age


def ages(folder: Path) -> dict[str, int | None]:
    stored = open_rollouts(folder)
    return {one.completion: one.age for some in records(stored, select(stored, RolloutQuery())) for one in some}


def test_age_counts_from_the_newest_policy_to_the_newest_step_that_is_known(run):
    assert ages(run.folder) == {"2": 4, "3": 4, "11": 4, "4": 2, "444": 2, "0": 0}
    run.send("8+1=", run.rollout("9", step=7))
    assert ages(run.folder) == {"2": 7, "3": 7, "11": 7, "4": 5, "444": 5, "0": 3, "9": 0}


def test_what_an_abandoned_branch_wrote_has_no_age_and_passes_no_filter_on_age(run, capsys):
    run.send("8+1=", run.rollout("9", step=6))
    run.attempts(0, 4)  # resumed from step 4, where attempt 0 had gone on to 6
    run.send("8+2=", run.rollout("10", attempt=1, step=5))
    assert ages(run.folder) == {"2": 5, "3": 5, "11": 5, "4": 3, "444": 3, "0": 1, "9": None, "10": 0}
    assert "9" in found(run.folder)
    assert "9" not in found(run.folder, min_age=0)
    assert "9" not in found(run.folder, max_age=99)
    assert found(run.folder, sort="age")[-1] == found(run.folder, sort="-age")[-1] == "9"
    _, out, _ = tba(capsys, run.folder, "text=9")
    assert out.splitlines()[1].split("\t")[:2] == ["0.6", "-"]


def test_what_another_policy_wrote_has_no_age_and_is_shown_and_ordered_by_its_era(run, capsys, tmp_path):
    run.send("8+1=", run.rollout("9", attempt=FOREIGN_ATTEMPT, step=3, source="teacher"), run.rollout("8", step=3))
    assert found(run.folder)[:3] == ["0", "9", "8"] and found(run.folder, sort="oldest")[-3:] == ["8", "9", "0"]
    assert ages(run.folder)["9"] is None and ages(run.folder)["2"] == 4
    assert found(run.folder, source="teacher") == ["9"]
    assert "9" not in found(run.folder, max_age=99)
    _, out, _ = tba(capsys, run.folder, "source=teacher")
    assert out.splitlines()[1].split("\t")[:2] == ["0.3 foreign", "-"]
    tba(capsys, run.folder, f"export={tmp_path / 'out.jsonl'}", "source=teacher")
    (exported,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (exported["version"], exported["foreign"]) == ("0.3", True)


def test_the_attempts_of_the_checkpoint_count_where_the_file_is_missing(tmp_path):
    with run_folder(tmp_path) as run:
        run.send("1+1=", run.rollout("2", step=3), run.rollout("3", step=9), run.rollout("4", attempt=1, step=5))
        run.save(6, 0, 4)
        (run.folder / ATTEMPTS).unlink()
        assert ages(run.folder) == {"2": 3, "3": None, "4": 1}


# ---- which, and in what order


@pytest.mark.parametrize(
    ("query", "completions"),
    [
        ({}, ["0", "444", "4", "11", "3", "2"]),
        ({"prompt": "1+1"}, ["11", "3", "2"]),
        ({"prompt": "sum:2"}, ["444", "4"]),
        ({"prompt": "nothing"}, []),
        ({"text": "4"}, ["444", "4"]),
        ({"min_reward": 0.25, "max_reward": 0.5}, ["0", "3"]),
        ({"min_age": 1, "max_age": 2}, ["444", "4"]),
        ({"max_age": 0}, ["0"]),
        ({"min_uses": 1}, ["4", "2"]),
        ({"max_uses": 0}, ["0", "444", "11", "3"]),
        ({"min_uses": 2}, ["2"]),
        ({"source": "other"}, ["4"]),
        ({"source": "unheard of"}, []),
        ({"searcher": "searcher-a"}, ["0", "444", "4", "11", "3", "2"]),
        ({"searcher": "searcher"}, []),
        ({"stop": "length"}, ["444"]),
        ({"stop": "eos", "prompt": "=", "text": "1", "max_reward": 0.5, "min_age": 4}, ["11"]),
        ({"sort": "oldest"}, ["2", "3", "11", "4", "444", "0"]),
        ({"sort": "reward"}, ["444", "11", "3", "0", "4", "2"]),
        ({"sort": "-reward"}, ["4", "2", "0", "3", "444", "11"]),
        ({"sort": "age"}, ["0", "444", "4", "11", "3", "2"]),
        ({"sort": "-age"}, ["11", "3", "2", "444", "4", "0"]),
        ({"sort": "uses"}, ["0", "444", "11", "3", "4", "2"]),
        ({"sort": "-uses"}, ["2", "4", "0", "444", "11", "3"]),
        ({"sort": "length"}, ["0", "4", "3", "2", "444", "11"]),
        ({"sort": "-length"}, ["444", "11", "0", "4", "3", "2"]),
    ],
    ids=str,
)
def test_filters_and_orders(run, query, completions):
    assert found(run.folder, **query) == completions


@pytest.mark.parametrize("cost", [1, 1 << 8, 1 << 11])
def test_the_size_of_a_chunk_changes_no_answer(run, monkeypatch, cost):
    stored = open_rollouts(run.folder)
    whole = list(records(stored, select(stored, RolloutQuery(text="4"))))
    monkeypatch.setattr(rollouts_view, "_CHUNK_COST", cost)
    rows = select(stored, RolloutQuery(text="4"))
    assert len(whole) == 1 and [one for some in records(stored, rows) for one in some] == whole[0]
    assert len(rollouts_view.chunks(stored, rows)) == (1 if cost == 1 << 11 else 2)


def test_text_is_decoded_only_for_what_passes_the_other_filters(run, monkeypatch):
    stored = open_rollouts(run.folder)
    decoded, decode = [], HfTokenizer.decode
    monkeypatch.setattr(HfTokenizer, "decode", lambda self, ids: decoded.append(decode(self, ids)) or decoded[-1])
    select(stored, RolloutQuery(min_reward=0.5))
    assert decoded == []
    select(stored, RolloutQuery(text="x", min_reward=0.5))
    assert sorted(decoded) == ["0", "2", "4"]


def test_totals_are_those_of_what_matches(run):
    stored = open_rollouts(run.folder)
    one = totals(stored, select(stored, RolloutQuery(prompt="sum:2")))
    assert (one.n_rollouts, one.n_held, one.n_prompts, one.mean_reward, one.never_used_fraction) == (2, 6, 1, 0.5, 0.5)
    assert one.bytes == 4 * (4 + 2 + 3)  # the prompt once, "4" with its end, "444" without
    every = totals(stored, select(stored, RolloutQuery()))
    assert (every.age_p50, every.age_max, every.bytes) == (2, 4, stored.shard.bytes)
    none = totals(stored, select(stored, RolloutQuery(text="nothing")))
    assert (none.n_rollouts, none.n_prompts, none.bytes, none.age_max) == (0, 0, 0, None)


# ---- what is printed


def test_a_pipe_gets_names_a_line_a_rollout_and_the_totals(run, capsys):
    code, out, err = tba(capsys, run.folder, "stop=eos", "sort=-uses", "limit=2")
    names, *lines, last = out.splitlines()
    assert (code, err, len(lines)) == (0, "", 2)
    first = dict(zip(names.split("\t"), lines[0].split("\t"), strict=True))
    assert first == {
        "version": "0.0",
        "age": "4",
        "reward": "1",
        "uses": "2",
        "copies": "1",
        "stop": "eos",
        "tokens": "2",
        "source": "test",
        "searcher": "searcher-a",
        "sequence": "0",
        "prompt_id": "sum:1+1=",
        "prompt": "1+1=",
        "completion": "2",
    }
    assert last == (
        "# 5 of 6 rollouts match, 3 prompts, 92 bytes, mean reward 0.55, never used 60.0 % (as of step 4), "
        "age p50 4 max 4"
    )


def test_twenty_are_shown_unless_another_limit_is_given(tmp_path, capsys):
    with run_folder(tmp_path) as run:
        run.send("1+1=", *(run.rollout(str(n)) for n in range(30)))
        for settings, shown in (((), 20), (("limit=3",), 3), (("limit=0",), 30)):
            _, out, _ = tba(capsys, run.folder, *settings)
            assert len(out.splitlines()) == 1 + shown + 1
            assert "30 of 30 rollouts match" in out


def test_a_text_stays_on_its_line_and_in_its_field_and_can_be_got_back(tmp_path, capsys):
    text = "1\n2 3\n"
    with run_folder(tmp_path) as run:
        run.send("1+1=\n", run.rollout(text))
        _, out, _ = tba(capsys, run.folder)
        assert out.splitlines()[1].split("\t")[-2:] == ["1+1=\\n", "1\\n2 3\\n"]
    nasty = "\x1b[31mred\t\\n\r\u2028\u9f8d"
    assert command._escaped(nasty) == "\\x1b[31mred\\t\\\\n\\r\\u2028\u9f8d"


@pytest.mark.parametrize("width", [64, 80, 200])
def test_a_table_fits_the_width_of_its_terminal(tmp_path, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    with run_folder(tmp_path) as run:
        run.send("1+1=" * 30, run.rollout("12\n" * 40, step=3), run.rollout("7", reward=-0.125))
        stored = open_rollouts(run.folder)
        rows = select(stored, RolloutQuery())
        terminal = Terminal()
        command._show(stored, rows, rows, terminal)
    names, first, second, last = re.sub(r"\x1b\[\d*m", "", terminal.getvalue()).splitlines()
    assert names.split() == ["version", "age", "reward", "uses", "stop", "tokens", "prompt", "completion"]
    assert max(cell_len(line.rstrip()) for line in (names, first, second)) <= width
    assert first.split()[:6] == ["0.3", "0", "0", "0", "eos", "121"]
    assert second.split()[:6] == ["0.0", "3", "-0.125", "0", "eos", "2"]
    assert "12⏎12" in first.split()[-1] and first.rstrip().endswith("…") and second.rstrip().endswith("7")
    assert last.startswith("2 of 2 rollouts match, 1 prompts") and last.endswith("age p50 0 max 3")


def test_a_table_names_the_sources_where_there_are_several(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    run.send("8+1=", run.rollout("9", attempt=FOREIGN_ATTEMPT, step=5, source="teacher"))

    def table(**query) -> list[list[str]]:
        stored, terminal = open_rollouts(run.folder), Terminal()
        rows = select(stored, RolloutQuery(**query))
        command._show(stored, rows, rows, terminal)
        return [line.split() for line in re.sub(r"\x1b\[\d*m", "", terminal.getvalue()).splitlines()]

    assert table(source="test")[0] == ["version", "age", "reward", "uses", "stop", "tokens", "prompt", "completion"]
    names, first, second, *_ = table()
    assert names == ["version", "source", "age", "reward", "uses", "stop", "tokens", "prompt", "completion"]
    assert first == ["0.5", "foreign", "teacher", "-", "0", "0", "eos", "2", "8+1=", "9"]
    assert second == ["0.4", "test", "0", "0.5", "0", "eos", "2", "9-9=", "0"]


def test_a_terminal_obeys_nothing_in_a_text():
    assert command._one_line("a\x1b[2Jb\nc\x07", 80) == "a\\x1b[2Jb⏎c\\x07"
    assert command._one_line("abcdef", 3) == "abc"


def test_a_short_text_and_a_wide_one_are_cut_by_cells():
    assert command._shortened("12345", 5) == "12345"
    assert command._shortened("123456", 5) == "1234…"
    assert cell_len(command._shortened("\u9f8d" * 9, 6)) <= 6


def test_a_reader_that_stops_early_is_no_error(run):
    process = subprocess.Popen(
        [sys.executable, "-m", "tba_megatron.cli.main", "rollouts", str(run.folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 0)
    process.stderr.close()


def test_the_command_imports_no_torch(run):
    code = (
        "import sys; from tba_megatron.cli.main import main; main(sys.argv[1:])\n"
        "print([m for m in ('torch', 'transformers', 'megatron', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "rollouts", str(run.folder)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


# ---- exports


@pytest.fixture
def rich_run(tmp_path):
    """What each optional column has, and what it has not."""
    with run_folder(tmp_path) as run:
        spans = (
            PolicySpan(version=PolicyVersion(0, 1), start=0, end=1),
            PolicySpan(version=PolicyVersion(0, 2), start=1, end=3),
        )
        run.send(
            "1+1=",
            run.rollout("1\n", spans=spans, reward=0.5, behaviour_logprobs=np.array([-1.0, -0.5, -0.25], np.float32)),
            run.rollout("3", step=9, reference=-2.5),
        )
        run.save(4)
        run.attempts(0, 4)
        yield run


def expected() -> list[dict]:
    eos, (one, line, three) = [EOS], (TOKENIZER.encode(c).tolist() for c in ("1", "\n", "3"))
    both = {
        "prompt_id": "sum:1+1=",
        "prompt": "1+1=",
        "prompt_token_ids": TOKENIZER.encode("1+1=").tolist(),
        "stop_reason": "eos",
        "uses": 0,
        "copies": 1,
        "source": "test",
        "searcher": "searcher-a",
        "foreign": False,
    }
    return [
        {
            **both,
            "completion": "1\n",
            "token_ids": one + line + eos,
            "reward": 0.5,
            "version": "0.2",
            "age": 2,
            "sequence": 0,
            "has_behaviour_logprobs": True,
            "behaviour_logprobs": [-1.0, -0.5, -0.25],
            "reference_logprob": None,
            "reference_version": None,
        },
        {
            **both,
            "completion": "3",
            "token_ids": three + eos,
            "reward": 0.0,
            "version": "0.9",
            "age": None,
            "sequence": 1,
            "has_behaviour_logprobs": False,
            "behaviour_logprobs": None,
            "reference_logprob": -2.5,
            "reference_version": 0,
        },
    ]


def test_jsonl_has_every_column_and_null_where_there_is_nothing(rich_run, tmp_path, capsys):
    file = tmp_path / "out.jsonl"
    code, out, err = tba(capsys, rich_run.folder, f"export={file}", "sort=oldest", "limit=1")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"2 rollouts are in {file}"
    assert "NaN" not in file.read_text()
    assert [json.loads(line) for line in file.read_text().splitlines()] == expected()


def test_parquet_has_the_same_columns_and_types(rich_run, tmp_path, capsys, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow, of requirements/kernels.lock, is not installed")
    monkeypatch.setattr(rollouts_view, "_CHUNK_COST", 1)  # a row group for each rollout
    file = tmp_path / "out.parquet"
    assert tba(capsys, rich_run.folder, f"export={file}", "sort=oldest")[0] == 0
    table = parquet.read_table(file)
    assert table.to_pylist() == [{name: one[name] for name in table.column_names} for one in expected()]
    assert set(table.column_names) == set(expected()[0])
    assert str(table.schema.field("token_ids").type).startswith("list<")
    assert str(table.schema.field("age").type) == "int64"


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_an_export_of_nothing_is_a_file_of_nothing(run, tmp_path, capsys, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow, of requirements/kernels.lock, is not installed")
    file = tmp_path / f"out.{ending}"
    assert tba(capsys, run.folder, f"export={file}", "text=nothing")[0] == 0
    if ending == "jsonl":
        assert file.read_bytes() == b""
    else:
        from pyarrow import parquet

        assert (parquet.read_table(file).num_rows, parquet.read_table(file).num_columns) == (0, 19)


def test_what_passes_the_filters_is_exported_in_its_order_and_replaces_the_file(run, tmp_path, capsys):
    file = tmp_path / "out.jsonl"
    file.write_text("what was there")
    with file.open() as before:
        tba(capsys, run.folder, f"export={file}", "stop=eos", "sort=-uses")
        assert before.read() == "what was there"  # who reads it meanwhile is not disturbed
    assert [json.loads(line)["completion"] for line in file.read_text().splitlines()] == ["2", "4", "0", "11", "3"]


def test_a_failed_export_leaves_what_was_there_and_nothing_else(run, tmp_path):
    file = tmp_path / "out" / "rollouts.jsonl"
    file.parent.mkdir()
    file.write_text("what was there")
    stored = open_rollouts(run.folder)

    def broken():
        yield from records(stored, select(stored, RolloutQuery()))
        assert len(list(file.parent.iterdir())) == 2
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"rollouts\.jsonl: No space left on device; name a file"):
        export(file, broken())
    assert [path.read_text() for path in file.parent.iterdir()] == ["what was there"]


def test_without_pyarrow_one_line_says_how_to_get_it(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, out, err = tba(capsys, run.folder, f"export={tmp_path / 'out.parquet'}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pip install 'tba-megatron[parquet]'" in err
    assert tba(capsys, run.folder, f"export={tmp_path / 'out.jsonl'}")[0] == 0


def test_every_column_of_a_record_is_in_the_parquet_schema(run, tmp_path):
    """A column that a schema lacks would be left out without a word."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow, of requirements/kernels.lock, is not installed")
    rollouts_export.export(tmp_path / "out.parquet", iter([]))
    names = parquet.read_schema(tmp_path / "out.parquet").names
    assert names == list(rollouts_view.RolloutRecord.__struct_fields__)


# ---- errors


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("min_rewards=1", "min_rewards=1: unknown key; did you mean min_reward"),
        ("zzz=1", "zzz=1: unknown key; the keys are prompt, text, min_reward"),
        ("reward", "reward: not of the form key=value; the keys are prompt"),
        ("min_reward=high", "min_reward=high: should be a valid number"),
        ("min_reward=nan", "min_reward=nan: should be a finite number"),
        ("max_uses=1.5", "max_uses=1.5: should be a valid integer"),
        ("limit=-1", "limit=-1: should be greater than or equal to 0"),
        ("sort=rewards", "sort=rewards: unknown; did you mean reward"),
        ("sort=", "sort=: unknown; choose one of newest, oldest, reward"),
        ("stop=abort", "stop=abort: unknown; choose one of eos, length"),
        ("export=out.csv", "export=out.csv: unknown ending; name a file that ends with .jsonl or .parquet"),
        ("export=no/such/out.jsonl", "export=no/such/out.jsonl: there is no folder no/such; name a file"),
    ],
)
def test_a_setting_that_cannot_be_used_is_one_line_and_exit_code_2(run, capsys, setting, problem):
    code, out, err = tba(capsys, run.folder, setting)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(problem)


def test_all_settings_that_cannot_be_used_are_told_at_once(run, capsys):
    code, _, err = tba(capsys, run.folder, "min_reward=x", "txt=1", "sort=up", "text=2")
    assert (code, [line.partition(":")[0] for line in err.splitlines()]) == (2, ["txt=1", "min_reward=x", "sort=up"])


def test_a_range_that_nothing_lies_in_is_told(run, capsys):
    code, _, err = tba(capsys, run.folder, "min_age=5", "max_age=3")
    assert (code, err) == (2, "min_age=5 is above max_age=3, so no rollout can pass\n")


def test_a_value_is_taken_as_it_is_written_and_the_last_one_of_a_key_counts():
    wanted = command.read_settings(["text=a=b", "prompt=[12", "text= 07", "limit=7"])
    assert (wanted.text, wanted.prompt, wanted.limit) == (" 07", "[12", 7)


def test_what_is_no_run_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "file.yaml").write_text("run: {}")
    for path, what in (("nothing", "does not exist"), ("file.yaml", "is a file"), ("", "has no config.yaml")):
        code, out, err = tba(capsys, tmp_path / path)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{tmp_path / path} {what}; give a run folder" in err


def test_a_run_that_holds_no_rollouts_is_one_line(tmp_path):
    with (
        run_folder(tmp_path) as run,
        pytest.raises(RunFolderError, match="holds no rollouts in replay and checkpoints"),
    ):
        open_rollouts(run.folder)


def test_a_damaged_checkpoint_is_one_line_that_names_the_file(run, capsys):
    shard = next((run.folder / "checkpoints").rglob("shard-0.npz"))
    shard.write_bytes(b"no archive")
    code, _, err = tba(capsys, run.folder)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"{shard} cannot be read") and f"remove {shard.parent} to read an earlier one" in err


def test_damaged_attempts_are_one_line(run):
    (run.folder / ATTEMPTS).write_text("[0, ")
    with pytest.raises(CheckpointError, match=r"attempts\.json cannot be read"):
        open_rollouts(run.folder)


def test_a_model_that_is_not_there_is_one_line(tmp_path):
    with run_folder(tmp_path) as run:
        run.send("1+1=", run.rollout("2"))
        config = run.folder / "config.yaml"
        config.write_text(config.read_text().replace(str(ROOT), str(tmp_path / "elsewhere")))
        with pytest.raises(RunFolderError, match="whose tokenizer wrote the rollouts"):
            open_rollouts(run.folder)


def test_a_folder_that_was_moved_is_read_where_it_is(run, tmp_path):
    everything = held(run)
    run.close()
    moved = run.folder.rename(tmp_path / "moved")
    assert seen(moved) == everything
    stored = open_rollouts(moved)
    assert {str(version_of(c)) for c in stored.shard.rows.version[stored.shard.rows.living()]} == {"0.0", "0.2", "0.4"}

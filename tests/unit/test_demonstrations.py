"""Demonstrations: every epoch holds each once, what is held out is never trained on, bad lines are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tba_megatron.config_sections import ArithmeticTask, FileDemonstrations
from tba_megatron.errors import TaskError
from tba_megatron.models.tokenizer import HfTokenizer
from tba_megatron.tasks.demonstrations import FromFile, FromTask
from tba_megatron.tasks.registry import make_task

TINY = HfTokenizer(Path(__file__).parents[2] / "configs" / "tiny_qwen2")
ROWS = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(40)]


def write(path: Path, rows=ROWS) -> FileDemonstrations:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return FileDemonstrations(path=path, held_out_fraction=0.2)


def stream(config: FileDemonstrations, *, batch_size=4, seed=0, max_length=32) -> FromFile:
    return FromFile(config, TINY, batch_size=batch_size, seed=seed, max_length=max_length)


def texts(demonstrations) -> list[tuple[str, str]]:
    assert all(completion[-1] == TINY.eos_ids[0] for _, completion in demonstrations)
    return [(TINY.decode(prompt), TINY.decode(completion)) for prompt, completion in demonstrations]


def n_train(made: FromFile) -> int:
    return len(ROWS) - made.dropped - len(all_held_out(made))


def all_held_out(made: FromFile) -> list[tuple[str, str]]:
    n = 0
    while True:
        try:
            found = made.held_out(n + 1)
        except TaskError:
            return texts(made.held_out(n))
        n = len(found)


def test_an_epoch_of_a_file_holds_each_demonstration_once_and_none_that_is_held_out(tmp_path):
    made = stream(write(tmp_path / "d.jsonl"), batch_size=1)
    held_out, n = all_held_out(made), n_train(made)
    assert 0 < len(held_out) < 20
    epochs = [texts([d for step in range(first, first + n) for d in made.batch(step)]) for first in (1, n + 1)]
    everything = {(row["prompt"], row["completion"]) for row in ROWS}
    for epoch in epochs:
        assert len(set(epoch)) == n
        assert set(epoch) == everything - set(held_out)
    assert epochs[0] != epochs[1]


def test_a_batch_depends_on_seed_and_step_alone(tmp_path):
    config = write(tmp_path / "d.jsonl")
    first, again, other = stream(config), stream(config), stream(config, seed=1)
    late = texts(first.batch(9))
    assert texts(again.batch(9)) == late  # without having drawn the batches before
    assert texts(other.batch(9)) != late


def test_what_is_held_out_depends_on_the_prompt_alone(tmp_path):
    everything = set(all_held_out(stream(write(tmp_path / "d.jsonl"))))
    half = set(all_held_out(stream(write(tmp_path / "half.jsonl", ROWS[::2]))))
    other_seed = set(all_held_out(stream(write(tmp_path / "d.jsonl"), seed=3)))
    assert half == {row for row in everything if row in {(r["prompt"], r["completion"]) for r in ROWS[::2]}}
    assert everything == other_seed


def test_what_is_too_long_is_left_out_and_counted(tmp_path):
    made = stream(write(tmp_path / "d.jsonl"), max_length=6)  # "9+1=" and "10" and EOS are 7
    assert made.dropped == 31
    assert {prompt for step in range(1, 20) for prompt, _ in texts(made.batch(step))} <= {f"{i}+1=" for i in range(9)}


def test_characters_that_the_tokenizer_cannot_write_are_named(tmp_path):
    rows = [*ROWS[:3], {"prompt": "é1+1=", "completion": "2"}, {"prompt": "2 +\n2=", "completion": "\U0001f600"}]
    assert stream(write(tmp_path / "d.jsonl", rows)).lost == ("é", "\U0001f600")
    assert stream(write(tmp_path / "d.jsonl")).lost == ()


def test_lines_end_at_line_feeds_alone_and_empty_ones_are_passed_over(tmp_path):
    rows = ['{"prompt": "1+1=", "completion": "2"}', "", '{"prompt": "2+1=", "completion": "3", "note": "\u2028"}']
    made = stream(write(tmp_path / "d.jsonl", rows), batch_size=2)
    assert len(made.batch(1)) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ":2: not JSON ("),
        ("[1]", ":2: needs the texts 'prompt' and 'completion'"),
        ('{"prompt": "1+1="}', ":2: needs the texts 'prompt' and 'completion'"),
        ('{"prompt": "1+1=", "completion": 2}', ":2: needs the texts 'prompt' and 'completion'"),
        ('{"prompt": "", "completion": "2"}', ":2: the prompt has no tokens; give it at least one"),
        ('{"prompt": "\\ud800", "completion": "2"}', ":2: holds half of a surrogate pair"),
        ("[" * 100_000, ":2: not JSON (maximum recursion depth"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(line, words, tmp_path):
    config = write(tmp_path / "d.jsonl", [ROWS[0], line])
    with pytest.raises(TaskError) as caught:
        stream(config)
    assert str(caught.value).startswith(f"{config.path}{words}") and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_holds_nothing_is_one_line(tmp_path):
    with pytest.raises(TaskError, match=r"sft\.data\.path: .*none\.jsonl cannot be read"):
        stream(FileDemonstrations(path=tmp_path / "none.jsonl"))
    with pytest.raises(TaskError, match="has nothing to train on: 0 demonstrations held out, 1 longer than"):
        stream(write(tmp_path / "d.jsonl", ROWS[:1]), max_length=2)


def test_more_held_out_demonstrations_than_there_are_is_one_line(tmp_path):
    with pytest.raises(TaskError, match=r"held-out demonstrations, not the 40 asked for; lower sft\.held_out"):
        stream(write(tmp_path / "d.jsonl")).held_out(40)
    task = make_task(ArithmeticTask(max_left=9), TINY, 0, 32)
    with pytest.raises(TaskError, match=r"held-out problems, not the 900 asked for; lower sft\.held_out"):
        FromTask(task, batch_size=4, seed=0).held_out(900)


def test_a_task_shows_right_answers_to_held_out_problems_and_never_trains_on_them():
    task = make_task(ArithmeticTask(max_left=9, wrong_fraction=1.0), TINY, 0, 32)
    made = FromTask(task, batch_size=32, seed=0)
    held_out = texts(made.held_out(20))
    assert all(eval(prompt.removesuffix("=")) == int(answer) for prompt, answer in held_out)
    trained = {prompt for step in range(1, 20) for prompt, _ in texts(made.batch(step))}
    assert not trained & {prompt for prompt, _ in held_out}


def test_a_task_without_demonstrations_is_one_line():
    class Silent:
        name = "silent"

    with pytest.raises(TaskError, match=r"task silent has no demonstrations; give a file by sft\.data"):
        FromTask(Silent(), batch_size=1, seed=0)

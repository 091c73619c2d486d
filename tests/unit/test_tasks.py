from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tba_megatron.config_sections import ArithmeticTask, CopyTask
from tba_megatron.errors import TaskError
from tba_megatron.models.tokenizer import HfTokenizer
from tba_megatron.tasks.base import Demonstrations
from tba_megatron.tasks.registry import make_task
from tba_megatron.types import Completion, StopReason

TINY = HfTokenizer(Path(__file__).parents[2] / "configs" / "tiny_qwen2")
ARITHMETIC = ArithmeticTask(max_left=99, max_right=9)


def task(config=ARITHMETIC, seed=0, max_length=32):
    return make_task(config, TINY, seed, max_length)


def epoch(made, number=0):
    return [made.train_prompt(number * made.n_train + i) for i in range(made.n_train)]


def completion(text, eos=True):
    ids = np.append(TINY.encode(text), TINY.eos_ids[0]) if eos else TINY.encode(text)
    reason = StopReason.EOS if eos else StopReason.LENGTH
    return Completion(token_ids=ids.astype(np.int32), stop_reason=reason, spans=())


@pytest.mark.parametrize("config", [ARITHMETIC, CopyTask(length=3)], ids=lambda config: config.kind)
def test_train_and_held_out_share_no_problem_and_together_are_all(config):
    made = task(config)
    n_all = {"arithmetic": 2000, "copy": 1000}[config.kind]
    train = {prompt.prompt_id for prompt in epoch(made)}
    held_out = {prompt.prompt_id for prompt in made.held_out_prompts(n_all - made.n_train)}
    assert len(train) == made.n_train
    assert not train & held_out
    assert len(train | held_out) == n_all
    assert 0.15 < len(held_out) / n_all < 0.25


def test_the_split_does_not_depend_on_the_seed_or_on_the_other_problems():
    small, other_seed, large = (
        {prompt.prompt_id for prompt in epoch(made)}
        for made in (task(), task(seed=5), task(ArithmeticTask(max_left=199, max_right=9)))
    )
    assert small == other_seed < large


def test_the_held_out_problems_are_the_same_for_every_seed_and_fewer_are_a_part_of_more():
    def asked(n, seed=0):
        return [prompt.prompt_id for prompt in task(seed=seed).held_out_prompts(n)]

    assert asked(20) == asked(20, seed=5) == asked(50)[:20]


@pytest.mark.parametrize("config", [ARITHMETIC, CopyTask(length=3)], ids=lambda config: config.kind)
def test_each_epoch_holds_every_training_prompt_once_in_another_order(config):
    made = task(config)
    first, second = ([p.prompt_id for p in epoch(made, number)] for number in (0, 1))
    assert first != second and sorted(first) == sorted(second)
    assert max(Counter(first).values()) == 1


def test_the_stream_is_a_function_of_seed_and_index_alone():
    indices = [5, 1700, 3, 5, 100_000, 1699]
    one, two, other = task(), task(), task(seed=1)
    forwards = [one.train_prompt(i).prompt_id for i in indices]
    backwards = [two.train_prompt(i).prompt_id for i in reversed(indices)]
    assert forwards == backwards[::-1] and forwards[0] == forwards[3]
    assert forwards != [other.train_prompt(i).prompt_id for i in indices]


def test_the_payload_answers_the_question():
    for prompt in epoch(task()):
        text = TINY.decode(prompt.token_ids)
        assert prompt.prompt_id == f"arithmetic:{text}"
        assert str(eval(text.removesuffix("="))) == prompt.payload["answer"]


def test_negative_answers_are_among_them():
    assert any(prompt.payload["answer"].startswith("-") for prompt in epoch(task()))


def test_only_the_exact_answer_with_eos_is_rewarded_each_completion_for_itself():
    made = task()
    prompt = next(p for p in epoch(made) if p.payload["answer"] == "-4")
    group = [
        completion("-4"),
        completion("-4", eos=False),
        completion("4"),
        completion("-40"),
        completion(" -4"),
        completion(""),
        completion("", eos=False),
        completion("-4"),
    ]
    assert made.score(prompt, group) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert made.score(prompt, []) == []


def test_demonstrations_come_from_training_problems_and_the_asked_share_is_wrong():
    made = task()
    assert isinstance(made, Demonstrations)
    answers = {tuple(p.token_ids): p.payload["answer"] for p in epoch(made)}
    rng = np.random.default_rng(0)
    slips = Counter()
    for _ in range(4000):
        prompt_ids, completion_ids = made.demonstration(rng)
        assert completion_ids[-1] == TINY.eos_ids[0] and completion_ids.dtype == np.int32
        slips[int(TINY.decode(completion_ids)) - int(answers[tuple(prompt_ids)])] += 1
    assert set(slips) == {0, -10, -3, -2, -1, 1, 2, 3, 10}
    assert 0.57 < slips[0] / 4000 < 0.63


def test_the_same_rng_gives_the_same_demonstrations():
    def drawn(seed):
        rng = np.random.default_rng(seed)
        return [[ids.tolist() for ids in task().demonstration(rng)] for _ in range(5)]

    assert drawn(3) == drawn(3) != drawn(4)


def test_copies_are_rewarded_and_demonstrated_right():
    made = task(CopyTask(length=3))
    prompt = made.train_prompt(0)
    assert made.score(prompt, [completion(prompt.payload["answer"]), completion("1")]) == [1.0, 0.0]
    prompt_ids, completion_ids = made.demonstration(np.random.default_rng(0))
    assert TINY.decode(prompt_ids) == TINY.decode(completion_ids) + "="


def test_prompts_that_leave_no_room_for_an_answer_are_dropped_and_counted():
    made = task(max_length=5)  # "12+7=" is 5 tokens long
    assert made.dropped_prompts == 90 * 10 * 2
    assert all(len(prompt.token_ids) == 4 for prompt in epoch(made))


def test_a_task_without_training_problems_is_refused():
    with pytest.raises(TaskError, match="nothing to train on: 2000 problems, 0 held out, 2000 too long"):
        task(max_length=3)


def test_too_many_held_out_problems_are_refused_with_the_number_there_is():
    n_held_out = 2000 - task().n_train
    with pytest.raises(TaskError, match=f"lower evaluation.problems to at most {n_held_out}"):
        task().held_out_prompts(n_held_out + 1)


def test_a_task_that_is_too_large_is_refused():
    with pytest.raises(TaskError, match="more than 1000000"):
        task(ArithmeticTask(max_left=10**6, max_right=9))


def test_a_tokenizer_that_cannot_write_the_problems_is_refused():
    class NoMinus:
        vocab_size, eos_ids = TINY.vocab_size, TINY.eos_ids

        def encode(self, text):
            return TINY.encode(text.replace("-", ""))

        def decode(self, token_ids):
            return TINY.decode(token_ids)

    with pytest.raises(TaskError, match="cannot write \\['-'\\]"):
        make_task(ARITHMETIC, NoMinus(), 0, 32)

"""vLLM behind the Engine protocol: ids in, completions out, the model's own probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from engine_child import MAX_LENGTH, VOCAB, hf_logprobs, score

from tba_megatron.errors import EngineError
from tba_megatron.types import Completion, SamplingSettings, StopReason

TOLERANCE = 1e-3  # nats, float32


def settings(**changes) -> SamplingSettings:
    return SamplingSettings(
        **({"n": 4, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8, "eos_ids": (1,)} | changes)
    )


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCAB, length).astype(np.int32)


# ---- called in the child


def generate(engine, prompts, sampling: SamplingSettings) -> list[tuple[Completion, ...]]:
    for index, prompt_ids in enumerate(prompts):
        engine.submit(str(index), prompt_ids, sampling)
    assert engine.n_unfinished == len(prompts)
    finished = {}
    while engine.n_unfinished:
        finished.update(engine.step())
    return [finished[str(index)] for index in range(len(prompts))]


def abort_in_the_middle(engine, prompts, sampling: SamplingSettings) -> int:
    for index, prompt_ids in enumerate(prompts):
        engine.submit(str(index), prompt_ids, sampling)
    for _ in range(3):
        assert not engine.step()
    engine.abort_all()
    assert not engine.step()
    return engine.n_unfinished


def check_mode(engine, mode: str) -> None:
    from tba_megatron.search.vllm_engine import check_logprobs_mode

    check_logprobs_mode(mode)


def submit_only(engine, prompt_ids, sampling: SamplingSettings) -> None:
    before = engine.n_unfinished
    try:
        engine.submit("refused", prompt_ids, sampling)
    finally:
        assert engine.n_unfinished == before


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_scores_are_those_of_hugging_face(engines, first_models, name):
    sequences = [prompt(length, seed) for seed, length in enumerate((2, 3, 17, 200))]
    for sequence, logprobs in zip(sequences, engines.call(name, score, sequences), strict=True):
        np.testing.assert_allclose(logprobs, hf_logprobs(first_models[name], sequence), atol=TOLERANCE)


def test_behaviour_logprobs_are_those_of_the_sampled_distribution(engines, first_models):
    asked = prompt(10)
    (completions,) = engines.call("tied", generate, [asked], settings(temperature=0.7))
    for completion in completions:
        sequence = np.concatenate([asked, completion.token_ids])
        expected = hf_logprobs(first_models["tied"], sequence, temperature=0.7)[len(asked) - 1 :]
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=TOLERANCE)


def test_log_probs_of_another_distribution_are_refused(engines):
    with pytest.raises(EngineError, match="logprobs_mode raw_logprobs, not processed_logprobs"):
        engines.call("tied", check_mode, "raw_logprobs")
    engines.call("tied", check_mode, "processed_logprobs")


def test_behaviour_logprobs_are_absent_where_nobody_asked(engines):
    (completions,) = engines.call("untied", generate, [prompt(10)], settings())
    assert all(completion.behaviour_logprobs is None for completion in completions)


def test_each_of_several_eos_ids_ends_a_completion_and_belongs_to_it(engines):
    eos_ids = (1, 7, 11)
    sampled = engines.call("untied", generate, [prompt(5, s) for s in range(8)], settings(n=8, eos_ids=eos_ids))
    ends = set()
    for completion in (c for group in sampled for c in group):
        inside, last = completion.token_ids[:-1], completion.token_ids[-1]
        assert not np.isin(inside, eos_ids).any()
        assert (completion.stop_reason is StopReason.EOS) == (last in eos_ids)
        assert completion.stop_reason is StopReason.EOS or len(completion.token_ids) == 8
        ends.add(int(last))
    assert set(eos_ids) <= ends


def test_an_eos_of_the_model_that_the_task_does_not_name_is_an_ordinary_token(engines):
    (completions,) = engines.call("untied", generate, [prompt(4)], settings(n=16, eos_ids=(), max_new_tokens=20))
    assert all(c.stop_reason is StopReason.LENGTH and len(c.token_ids) == 20 for c in completions)
    assert any((c.token_ids == 1).any() for c in completions)


def test_a_padded_id_is_never_sampled(engines):
    hot = settings(n=32, temperature=2.0, eos_ids=(), max_new_tokens=32)
    sampled = engines.call("tied", generate, [prompt(3, s) for s in range(4)], hot)
    tokens = np.concatenate([c.token_ids for group in sampled for c in group])
    assert set(tokens.tolist()) == set(range(VOCAB))


def test_a_completion_ends_where_the_model_does(engines):
    asked = prompt(MAX_LENGTH - 3)
    (completions,) = engines.call("untied", generate, [asked], settings(eos_ids=(), max_new_tokens=50))
    assert [(c.stop_reason, len(c.token_ids)) for c in completions] == [(StopReason.LENGTH, 3)] * 4


def test_one_span_covers_a_completion_of_one_policy(engines):
    for completion in engines.call("untied", generate, [prompt(6)], settings(n=8))[0]:
        (span,) = completion.spans
        assert (span.start, span.end) == (0, len(completion.token_ids))


def tokens_of(sampled) -> list[list[int]]:
    return [completion.token_ids.tolist() for group in sampled for completion in group]


def test_a_seed_gives_the_same_samples_whatever_shares_the_batch(engines):
    seeded = settings(seed=5, n=6, eos_ids=())
    alone = engines.call("untied", generate, [prompt(6)], seeded)
    together = engines.call("untied", generate, [prompt(6), prompt(9, 1)], seeded)
    assert tokens_of(alone) == tokens_of(together[:1])
    assert len({tuple(tokens) for tokens in tokens_of(alone)}) > 1


def test_without_a_seed_the_same_prompt_is_answered_differently(engines):
    unseeded = settings(n=4, eos_ids=(), max_new_tokens=16)
    first = engines.call("untied", generate, [prompt(6)], unseeded)
    assert tokens_of(first) != tokens_of(engines.call("untied", generate, [prompt(6)], unseeded))


def test_more_completions_than_the_engine_holds_at_a_time_all_arrive(engines):
    sampled = engines.call("untied", generate, [prompt(4, s) for s in range(24)], settings(n=8))
    assert [len(group) for group in sampled] == [8] * 24


def test_aborted_requests_leave_nothing_behind(engines):
    long = settings(n=8, eos_ids=(), max_new_tokens=64)
    assert engines.call("untied", abort_in_the_middle, [prompt(5, s) for s in range(12)], long) == 0
    assert len(engines.call("untied", generate, [prompt(5)], settings(n=3))[0]) == 3


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (ids(), "has 0 tokens; it must have 1 to 319"),
        (prompt(MAX_LENGTH), "has 320 tokens; it must have 1 to 319"),
        (ids(3, VOCAB), r"outside 0\.\.17"),
        (ids(3, -1), r"outside 0\.\.17"),
    ],
    ids=["empty", "too long", "above the vocabulary", "negative"],
)
def test_a_prompt_that_cannot_be_answered_is_refused_in_one_line(engines, bad, reason):
    with pytest.raises(EngineError, match=reason) as caught:
        engines.call("untied", submit_only, bad, settings())
    assert "\n" not in str(caught.value)
    assert len(engines.call("untied", generate, [prompt(5)], settings(n=2))[0]) == 2

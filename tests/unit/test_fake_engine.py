"""The engine without a model: deterministic, and bound by the same laws as a real one."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tba_megatron.config_search import FakeEngineConfig
from tba_megatron.errors import EngineError
from tba_megatron.search.engine import ReceiveState
from tba_megatron.search.fake_engine import FakeEngine
from tba_megatron.types import PolicySpan, PolicyVersion, SamplingSettings, StopReason

V0 = PolicyVersion(0, 0)
EOS = 9


@pytest.fixture
def model(tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    return tmp_path


def engine(model, *, seed: int = 0, version: PolicyVersion = V0, **config) -> FakeEngine:
    return FakeEngine(model, FakeEngineConfig(**config), version=version, seed=seed, answer=lambda prompt: prompt[:2])


def sampling(n: int = 1, max_new_tokens: int = 8) -> SamplingSettings:
    return SamplingSettings(n=n, temperature=1.0, top_p=1.0, max_new_tokens=max_new_tokens, eos_ids=(EOS, 7))


def prompt(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def answers(made: FakeEngine, n: int = 64) -> list[list[int]]:
    made.submit("r", prompt(3, 4, 5), sampling(n))
    ((_, completions),) = made.step()
    return [c.token_ids.tolist() for c in completions]


def test_the_same_seed_version_and_prompt_give_the_same_answers(model):
    assert answers(engine(model)) == answers(engine(model))
    assert answers(engine(model)) != answers(engine(model, seed=1))
    assert answers(engine(model)) != answers(engine(model, version=PolicyVersion(0, 1)))


@pytest.mark.parametrize(("fraction", "least", "most"), [(0.0, 0, 0), (1.0, 200, 200), (0.5, 70, 130)])
def test_about_the_asked_share_is_right_and_ends_with_eos(model, fraction, least, most):
    got = answers(engine(model, correct_fraction=fraction), n=200)
    assert least <= sum(ids == [3, 4, EOS] for ids in got) <= most
    assert all(ids in ([3, 4, EOS], [3, 4, 3, EOS]) for ids in got)


@pytest.mark.parametrize(
    ("max_new_tokens", "ids", "reason"),
    [(1, [3], StopReason.LENGTH), (2, [3, 4], StopReason.LENGTH), (3, [3, 4, EOS], StopReason.EOS)],
)
def test_a_completion_is_cut_at_the_asked_length(model, max_new_tokens, ids, reason):
    made = engine(model, correct_fraction=1.0)
    made.submit("r", prompt(3, 4), sampling(max_new_tokens=max_new_tokens))
    ((request_id, (completion,)),) = made.step()
    assert (request_id, completion.token_ids.tolist(), completion.stop_reason) == ("r", ids, reason)
    assert completion.token_ids.dtype == np.int32
    assert completion.spans == (PolicySpan(version=V0, start=0, end=len(ids)),)


def test_a_step_finishes_as_much_as_it_may_write_and_at_least_one_request(model):
    made = engine(model, correct_fraction=1.0, tokens_per_step=6)
    for i in range(5):
        made.submit(f"{i}", prompt(3, 4), sampling(n=1))
    assert made.n_unfinished == 5
    assert [[name for name, _ in made.step()] for _ in range(4)] == [["0", "1"], ["2", "3"], ["4"], []]
    made.submit("large", prompt(3, 4), sampling(n=50))
    ((_, completions),) = made.step()
    assert len(completions) == 50
    assert made.n_unfinished == 0


def test_what_was_aborted_never_comes(model):
    made = engine(model)
    made.submit("r", prompt(3), sampling())
    made.abort_all()
    assert (made.n_unfinished, made.step()) == (0, [])


def test_an_empty_prompt_is_refused_by_name(model):
    with pytest.raises(EngineError, match="request r is empty"):
        engine(model).submit("r", prompt(), sampling())


def test_without_an_offer_nothing_is_received(model):
    made = engine(model)
    assert (made.workers, made.version, made.poll_receive().state) == (1, V0, ReceiveState.NONE)
    made.close()


def receive(made: FakeEngine, version: PolicyVersion) -> None:
    """Apply ``version`` as if it lay in staging."""
    made._receiver.take = lambda: None  # type: ignore[assignment]
    made._receiving = version
    made.apply()


def test_a_score_is_a_function_of_the_version_and_the_ids_and_leaves_requests_alone(model):
    made = engine(model, correct_fraction=1.0)
    made.submit("r", prompt(3, 4), sampling())
    texts = [prompt(3, 4, 5), prompt(3, 4, 5), prompt(4, 4, 5), prompt(3)]
    first, again, other, none = made.score(texts)
    assert first.dtype == np.float32 and first.shape == (2,) and none.shape == (0,)
    assert (first < 0).all() and np.isfinite(first).all()
    assert (first == again).all() and (first != other).all()
    assert (first[:1] == made.score([prompt(3, 4)])[0]).all()
    receive(made, PolicyVersion(0, 1))
    assert (made.score(texts)[0] != first).all()
    assert [name for name, _ in made.step()] == ["r"]


def test_a_draining_engine_takes_new_weights_only_when_it_is_empty(model):
    made = FakeEngine(model, FakeEngineConfig(), version=V0, seed=0, in_flight="drain")
    made.submit("r", prompt(3), sampling())
    with pytest.raises(EngineError, match=r"0\.1 cannot be applied while requests are in"):
        receive(made, PolicyVersion(0, 1))
    assert made.version == V0
    made.step()
    receive(made, PolicyVersion(0, 1))
    assert made.version == PolicyVersion(0, 1)


def test_time_in_apply_is_told_and_nothing_is_computed_again(model):
    made = engine(model)
    assert (made.paused_s, made.recompute_s) == (0.0, 0.0)
    receive(made, PolicyVersion(0, 1))
    assert made.paused_s > 0.0 and made.recompute_s == 0.0

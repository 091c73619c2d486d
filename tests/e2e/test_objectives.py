"""Log-probs that an engine sends and an objective reads, of who wrote a completion and of the reference."""

import math

import pytest
from chaos import start_model
from launching import ledger_gap, records, summary_of, tba

pytestmark = pytest.mark.slow

COMMON = ("sft.steps=0", "trainer.steps=4", "evaluation.problems=16", "objective.guards={}")
BEHAVIOUR = "search.behaviour_logprobs=true"
LOCK_STEP = ("weights.mode=sync", "weights.publish_every_steps=1", "search.in_flight=recompute", "buffer.max_reuse=1")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return start_model(tmp_path_factory.mktemp("start"))


@pytest.mark.parametrize(
    "loss",
    [
        "{kind: grpo, beta: 0.01}",
        "{kind: dr_grpo}",
        "{kind: ppo_clip}",
        "{kind: proximal_rloo, beta: 0.01}",
        "{kind: kimi_k15, tau: 0.1}",
        "{kind: kimi_k2, tau: 0.1}",
        "{kind: oapl, tau: 0.1}",
        "{kind: rloo}",
        "{kind: online_dpo}",
    ],
)
def test_on_fresh_data_the_engine_and_the_trainer_agree_on_every_ratio(loss, start, tmp_path):
    resets = ["objective.reference.reset_every_steps=2"] if "kimi_k15" in loss else []
    done = tba("launch", tmp_path / "run", *COMMON, BEHAVIOUR, *LOCK_STEP, *resets, *start, f"objective.loss={loss}")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = summary_of(tmp_path / "run")
    assert (summary["complete"], summary["steps"], ledger_gap(summary)) == (True, 4, 0)
    assert list(records(tmp_path / "run", "age/max").values()) == [0, 0, 0, 0]
    drifts, shares = (list(records(tmp_path / "run", f"policy/{name}").values()) for name in ("abs_drift", "ess_frac"))
    assert len(drifts) == 4 and max(drifts) < 1e-4  # nats of a completion
    assert shares == pytest.approx([1.0] * 4, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_searcher_and_a_trainer_that_hold_the_reference_say_the_same_of_it(temperature, start, tmp_path):
    """At the first step the policy is the reference, and the samples of two runs need not be the same."""
    first = {}
    for placement in ("device", "searcher"):
        folder, settings = tmp_path / placement, [f"objective.reference.placement={placement}"]
        settings += [f"{section}.temperature={temperature}" for section in ("objective", "search")]
        settings += ["objective.truncated=penalise", "trainer.optimizer.learning_rate=0.01"]  # something to learn
        done = tba("launch", folder, *COMMON, *LOCK_STEP, *start, *settings)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = summary_of(folder)
        assert (summary["complete"], summary["steps"], ledger_gap(summary)) == (True, 4, 0)
        assert summary["rollouts_discarded_invalid"] == 0
        divergence = list(records(folder, "policy/kl_ref").values())
        assert len(divergence) == 4 and all(map(math.isfinite, divergence))
        assert max(map(abs, divergence[1:])) > 1e-3  # it is not the policy that is scored
        first[placement] = divergence[0]
    assert abs(first["device"]) < 1e-6 and abs(first["searcher"]) < 1e-4  # nats of a completion

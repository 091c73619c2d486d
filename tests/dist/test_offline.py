"""The warm start and training on a recording: stopped and resumed they are the run that was never stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from ranks import run_ranks

from tba_megatron.config import Config
from tba_megatron.config_objective import Grpo, ObjectiveConfig, TbLearnedZ
from tba_megatron.errors import CheckpointError
from tba_megatron.metrics import JsonlWriter, MetricLog
from tba_megatron.models.tokenizer import HfTokenizer
from tba_megatron.rollout_batch import RolloutBatch
from tba_megatron.tasks.registry import make_demonstrations
from tba_megatron.trainer.recording import Recorder
from tba_megatron.trainer.replay import train_on_recording
from tba_megatron.trainer.sft import first_step, warm_start

MODEL = Path(__file__).parents[2] / "configs" / "tiny_qwen2"
SLOW = pytest.mark.slow
LAYOUTS = [{}, {"dp": 2}, pytest.param({"tp": 2, "pp": 2}, marks=SLOW)]
STEPS, STOP = 20, 10
OPTIMIZER = {"learning_rate": 1e-3, "schedule": {"kind": "cosine", "warmup_steps": 4, "decay_steps": 16}}


def config(folder: Path, sizes: dict[str, int], **sections) -> Config:
    trainer = {
        "tensor_parallel": sizes.get("tp", 1),
        "pipeline_parallel": sizes.get("pp", 1),
        "data_parallel": sizes.get("dp", 1),
        "megatron_extra": {"num_layers_in_first_pipeline_stage": 2} if sizes.get("pp", 1) > 1 else {},
        "steps": STEPS,
        "prompts_per_step": 4,
        "rollouts_per_prompt": 6,
        "optimizer": OPTIMIZER,
        "microbatch_tokens": 64,
    }
    tree = {
        "run": {"folder": folder},
        "model": {"path": MODEL, "init": "random", "max_length": 32},
        "task": {"kind": "arithmetic", "max_left": 99},
        "sft": {"steps": STEPS, "batch_size": 8, "held_out": 16, "held_out_every_steps": 5, "optimizer": OPTIMIZER},
        "trainer": trainer,
        "objective": {"loss": {"kind": "tb_vargrad", "beta": 0.1}},
        "search": {"max_new_tokens": 6},
        "metrics": {"tensorboard": False},
    }
    return Config.model_validate({key: {**value, **sections.get(key, {})} for key, value in tree.items()})


class Interrupted:
    """A stream that is told to stop while step ``at`` is made."""

    def __init__(self, stream, at: int) -> None:
        self._stream, self._at = stream, at

    def batch(self, step: int):
        if step == self._at:
            os.kill(os.getpid(), signal.SIGTERM)
        return self._stream.batch(step)

    def held_out(self, n: int):
        return self._stream.held_out(n)


def logged(folder: Path, *names: str) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each metric, in order."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: [(row["step"], row[name]) for row in rows if name in row] for name in names}


def exported(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def assert_equal_exports(found: Path, expected: Path) -> None:
    mine, theirs = exported(found), exported(expected)
    assert mine.keys() == theirs.keys() and mine
    for name in theirs:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0.0, atol=0.0)


# ---- the warm start


def sft(groups, made: Config, stop_at: int) -> int:
    stream = make_demonstrations(made, HfTokenizer(MODEL))
    log = MetricLog([JsonlWriter(made.run.folder / "metrics.jsonl", first_step(made))]) if groups.rank == 0 else None
    return warm_start(made, Interrupted(stream, stop_at), groups, log)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_a_warm_start_that_is_stopped_and_resumed_is_the_unbroken_one(sizes, tmp_path):
    whole, parts = config(tmp_path / "whole", sizes), config(tmp_path / "parts", sizes)
    for made in (whole, parts):
        made.run.folder.mkdir()
    assert set(run_ranks(sft, whole, 0, **sizes)) == {0}
    assert set(run_ranks(sft, parts, STOP, **sizes)) == {signal.SIGTERM}
    assert not parts.start_model.exists()
    assert [path.name for path in (parts.run.folder / "sft-checkpoints").iterdir()] == [f"step-{STOP:08d}"]
    assert set(run_ranks(sft, parts, 0, **sizes)) == {0}
    names = ("sft/nll", "sft/learning_rate", "sft/grad_norm", "sft/held_out_nll")
    found, expected = logged(parts.run.folder, *names), logged(whole.run.folder, *names)
    assert found == expected
    assert [step for step, _ in expected["sft/nll"]] == list(range(1, STEPS + 1))
    assert [step for step, _ in expected["sft/held_out_nll"]] == [0, 5, 10, 15, 20]
    assert expected["sft/held_out_nll"][-1][1] < expected["sft/held_out_nll"][0][1]
    assert_equal_exports(parts.start_model, whole.start_model)


def test_the_held_out_loss_is_that_of_every_layout_and_of_hugging_face(tmp_path):
    values = []
    for i, sizes in enumerate(({}, {"dp": 2}, {"tp": 2})):
        made = config(tmp_path / str(i), sizes, sft={"steps": 1, "optimizer": {"learning_rate": 1e-9}})
        made.run.folder.mkdir()
        run_ranks(sft, made, 0, **sizes)
        values.append(logged(made.run.folder, "sft/held_out_nll")["sft/held_out_nll"][0][1])
    model = tiny.load_hf_model(made.start_model)
    nll, n_tokens = 0.0, 0
    for prompt, completion in make_demonstrations(made, HfTokenizer(MODEL)).held_out(16):
        tokens = torch.tensor(np.concatenate([prompt, completion])).long()
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        nll -= float(logprobs.gather(1, tokens[len(prompt) :, None]).sum())
        n_tokens += len(completion)
    assert values == pytest.approx([nll / n_tokens] * 3, rel=1e-5)


# ---- a recording


def record(folder: Path, steps: int = STEPS) -> Path:
    recorder = Recorder(folder, 0, 1, 1)
    for step in range(1, steps + 1):
        recorder.write(step, RolloutBatch.of_train_groups(tiny.train_groups(4, seed=step, vocab=18)))
    recorder.close()
    return folder


def start_from(folder: Path) -> Path:
    """The tiny model with seeded random weights, as a folder that can be loaded."""
    made = config(folder, {}, sft={"steps": 1, "optimizer": {"learning_rate": 1e-9}})
    folder.mkdir()
    run_ranks(sft, made, 0)
    return made.start_model


def replay_config(folder: Path, model: Path, recording: Path, sizes: dict[str, int], objective=None, **trainer) -> Config:
    return config(
        folder,
        sizes,
        objective=objective or {},
        model={"path": model, "init": "pretrained"},
        sft={"steps": 0, "held_out": 0},
        trainer={"data": {"kind": "recording", "folder": recording}, **trainer},
    )


def replay(groups, made: Config) -> int:
    return train_on_recording(made, made.trainer.data, groups)


NAMES = ("optim/loss", "optim/lr", "optim/grad_norm", "policy/kl_ref", "reward/train_mean")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return start_from(tmp_path_factory.mktemp("start") / "model")


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return record(tmp_path_factory.mktemp("recording"))


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_the_same_recording_gives_the_same_losses_stopped_or_not(sizes, model, recording, tmp_path):
    runs = [tmp_path / name for name in ("first", "second", "parts")]
    for folder in runs[:2]:
        assert set(run_ranks(replay, replay_config(folder, model, recording, sizes), **sizes)) == {0}
    assert set(run_ranks(replay, replay_config(runs[2], model, recording, sizes, steps=STOP), **sizes)) == {0}
    assert set(run_ranks(replay, replay_config(runs[2], model, recording, sizes), **sizes)) == {0}
    first, second, parts = (logged(folder, *NAMES) for folder in runs)
    assert first == second == parts
    assert [step for step, _ in first["optim/loss"]] == list(range(1, STEPS + 1))
    assert len({value for _, value in first["optim/loss"]}) == STEPS
    for folder in runs[1:]:
        assert_equal_exports(folder / "hf", runs[0] / "hf")


LEARNED = {"objective": ObjectiveConfig(loss=TbLearnedZ(beta=0.1, log_z_learning_rate=0.2))}


@pytest.mark.parametrize("sizes", LAYOUTS[:2], ids=str)
def test_a_learned_log_z_is_trained_on_a_recording_stopped_or_not(sizes, model, recording, tmp_path):
    runs = [tmp_path / name for name in ("whole", "parts")]
    for folder, steps in ((runs[0], STEPS), (runs[1], STOP), (runs[1], STEPS)):
        made = replay_config(folder, model, recording, sizes, steps=steps).model_copy(update=LEARNED)
        assert set(run_ranks(replay, made, **sizes)) == {0}
    names = (*NAMES, "policy/log_z", "policy/log_z_std", "policy/log_z_error")
    whole, parts = (logged(folder, *names) for folder in runs)
    assert whole == parts
    assert len({value for _, value in whole["policy/log_z"]}) == STEPS
    spreads = [value for _, value in whole["policy/log_z_std"]]
    assert spreads[0] < 1e-4 < spreads[-1]
    assert_equal_exports(runs[1] / "hf", runs[0] / "hf")


def test_a_recording_trains_the_same_at_other_parallel_sizes(model, recording, tmp_path):
    found = []
    for i, sizes in enumerate(({}, {"dp": 2}, {"tp": 2})):
        made = replay_config(tmp_path / str(i), model, recording, sizes, steps=5)
        run_ranks(replay, made, **sizes)
        found.append([value for values in logged(made.run.folder, *NAMES).values() for _, value in values])
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"steps": 21}, "trainer.steps: 21 is more than the 20 whole steps of"),
        ({"rollouts_per_prompt": 8}, "prompt p0 has 6 rollouts; set trainer.rollouts_per_prompt (now 8) to that"),
        ({"prompts_per_step": 2}, "has 4 prompts; set trainer.prompts_per_step (now 2) to that"),
    ],
)
def test_a_recording_that_does_not_fit_is_one_line_on_every_rank(trainer, words, model, recording, tmp_path):
    made = replay_config(tmp_path / "run", model, recording, {"pp": 2}, **trainer)

    def body(groups):
        with pytest.raises(CheckpointError) as caught:
            replay(groups, made)
        return str(caught.value)

    for message in run_ranks(body, pp=2):
        assert words in message and "\n" not in message


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"vocab": 500}, "; was it recorded with another model?"),
        ({"prompt_length": 40}, "40 tokens, 4"),
        ({"prompt_length": 0}, "has 0 tokens"),
    ],
)
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}], ids=str)
def test_a_recording_that_this_model_cannot_train_on_is_one_line(sizes, group, words, model, tmp_path):
    groups = tiny.train_groups(4, seed=1, vocab=group.get("vocab", 18))
    if "prompt_length" in group:
        prompt = np.full(group["prompt_length"], 3, np.int32)
        groups = [dataclasses.replace(g, prompt_token_ids=prompt) for g in groups]
    recorder = Recorder(tmp_path / "recording", 0, 1, 1)
    recorder.write(1, RolloutBatch.of_train_groups(groups))
    recorder.close()
    made = replay_config(tmp_path / "run", model, tmp_path / "recording", sizes, steps=1)

    def body(groups):
        with pytest.raises(CheckpointError) as caught:
            replay(groups, made)
        return str(caught.value)

    for message in run_ranks(body, **sizes):
        assert message.startswith("step 1 of the recording: prompt p") and words in message and "\n" not in message


def test_an_objective_of_ratios_refuses_a_recording_without_behaviour_logprobs(model, tmp_path):
    blind = [
        dataclasses.replace(
            g, rollouts=tuple(dataclasses.replace(r, behaviour_logprobs=None) for r in g.rollouts)
        )
        for g in tiny.train_groups(4, seed=1)
    ]
    for name, groups in (("blind", blind), ("whole", tiny.train_groups(4, seed=1))):
        recorder = Recorder(tmp_path / name, 0, 1, 1)
        recorder.write(1, RolloutBatch.of_train_groups(groups))
        recorder.close()
    grpo = {"objective": ObjectiveConfig(loss=Grpo(beta=0.1))}

    def body(groups, name):
        made = replay_config(tmp_path / f"run-{name}", model, tmp_path / name, {}, steps=1).model_copy(update=grpo)
        return replay(groups, made)

    with pytest.raises(AssertionError, match="has a completion without the log-probs of who wrote it"):
        run_ranks(body, "blind")
    assert run_ranks(body, "whole") == [0]

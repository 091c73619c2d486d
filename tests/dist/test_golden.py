"""Twenty steps on fixed rollouts give the losses they have always given.

After an intended change of the numbers: ``python tests/dist/test_golden.py`` writes the file again; look at its diff.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import tiny
from ranks import run_ranks

from tba_megatron.config_sections import LinearSchedule

GOLDEN = Path(__file__).parents[1] / "golden" / "twenty_steps.json"
REGENERATE = "python tests/dist/test_golden.py"
STEPS = 20
TOLERANCE = 1e-4


def twenty_steps() -> dict[str, list[float]]:
    """Losses, KL to the reference and gradient norms of a tied Qwen2 on five groups a step, with warm-up and decay."""
    schedule = LinearSchedule(warmup_steps=3, decay_steps=STEPS, final_fraction=0.1)
    trainer = tiny.trainer_config(optimizer=tiny.OPTIMIZER.model_copy(update={"schedule": schedule}))
    batches = [tiny.train_groups(5, seed=step % 4) for step in range(STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.save_model(Path(folder) / "policy", seed=1)
        reference = tiny.save_model(Path(folder) / "reference", seed=2)
        (trained,) = run_ranks(tiny.train_on_rank, trainer, policy, reference, batches)
    return {
        "loss": trained.losses,
        "kl": [statistics["kl"] for statistics in trained.statistics],
        "grad_norm": trained.norms,
    }


def test_twenty_steps_give_the_golden_losses():
    golden, found = json.loads(GOLDEN.read_text()), twenty_steps()
    assert len(golden["loss"]) == STEPS
    for name, values in found.items():
        assert values == pytest.approx(golden[name], rel=TOLERANCE, abs=TOLERANCE), name


def test_the_golden_run_learns():
    loss = json.loads(GOLDEN.read_text())["loss"]
    assert sum(loss[-4:]) < 0.5 * sum(loss[:4])


if __name__ == "__main__":
    curves = {name: [round(value, 7) for value in values] for name, values in twenty_steps().items()}
    GOLDEN.write_text(json.dumps({"regenerate": REGENERATE} | curves, indent=1) + "\n")

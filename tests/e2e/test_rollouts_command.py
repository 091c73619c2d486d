"""``tba rollouts`` on what a launch with the fake engine left, and while the trainer is at work."""

import json
import subprocess
import sys

import pytest
from launching import FAKE, ROOT, environment, eventually, last_step, outcome, started, summary_of, tba

pytestmark = pytest.mark.slow

SETTINGS = (FAKE, "sft.steps=3", "trainer.save_every_steps=2", "evaluation.problems=8")


def rollouts(folder, *settings) -> list[str]:
    """Lines of the answer."""
    done = subprocess.run(
        [sys.executable, "-m", "tba_megatron.cli.main", "rollouts", str(folder), *settings],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("segments", ["files", "none"])
def test_what_a_run_has_stored_is_what_its_summary_counts(tmp_path, segments):
    run = tmp_path / "run"
    done = tba("launch", run, *SETTINGS, f"buffer.segments={{kind: {segments}}}", "trainer.steps=5")
    assert done.returncode == 0, done.stdout + done.stderr
    names, *lines, totals = rollouts(run, "max_uses=0", "limit=0")
    assert len(lines) == summary_of(run)["rollouts_held_untrained"] > 0
    assert totals.startswith(f"# {len(lines)} of ") and "never used 100.0 % (as of step 5)" in totals
    column = names.split("\t").index("uses")
    assert {line.split("\t")[column] for line in lines} == {"0"}
    file = tmp_path / "all.jsonl"
    rollouts(run, f"export={file}")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == int(totals.split()[3])
    assert {record["prompt"] for record in records} <= {record["prompt_id"].split(":")[1] for record in records}
    assert {0 <= record["age"] <= 5 and record["source"] == "searcher" for record in records} == {True}
    assert any(record["uses"] and record["reference_logprob"] < 0 for record in records)


def test_a_run_is_listed_while_its_trainer_works(tmp_path):
    with started(tmp_path, *SETTINGS, "trainer.steps=100000") as process:
        eventually(lambda: last_step(tmp_path) >= 3, process)
        for _ in range(3):
            before = last_step(tmp_path)
            *_, totals = rollouts(tmp_path, "limit=1")
            assert int(totals.split()[3]) > 0
            eventually(lambda: last_step(tmp_path) > before, process)  # noqa: B023 (called at once)
        process.terminate()
        code, output = outcome(process)
    assert code == 128 + 15, output
    assert rollouts(tmp_path, "limit=1")[-1].startswith("# ")

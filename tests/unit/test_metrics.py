import errno
import io
import json
import math
import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest
from tensorboard.util.tensor_util import make_ndarray

from tba_megatron.config_sections import MetricsConfig
from tba_megatron.errors import RunFolderError
from tba_megatron.metrics import (
    Histogram,
    JsonlWriter,
    MetricLog,
    TensorBoardWriter,
    console_writer,
    markdown_table,
    open_metric_log,
)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Clock:
    """Ten seconds later at each look."""

    def __init__(self):
        self.now_s = 1_700_000_000.0

    def __call__(self):
        self.now_s += 10
        return self.now_s


def test_every_line_of_the_file_is_valid_json_and_what_is_not_finite_is_null(tmp_path):
    log = MetricLog([JsonlWriter(tmp_path / "m.jsonl", 0, lambda: 5.0)])
    log.log(1, {"optim/loss": math.nan, "optim/lr": math.inf, "reward/mean": 0.5})
    log.table("rollouts/sample", 1, ["prompt", "reward"], [["1|2\n", 0.5]])
    log.close()
    assert records(tmp_path / "m.jsonl") == [
        {
            "kind": "scalars",
            "step": 1,
            "time_s": 5.0,
            "optim/loss": None,
            "optim/lr": None,
            "reward/mean": 0.5,
        },
        {
            "kind": "table",
            "step": 1,
            "time_s": 5.0,
            "tag": "rollouts/sample",
            "headers": ["prompt", "reward"],
            "rows": [["1|2\n", "0.5"]],
        },
    ]


def test_a_line_is_in_the_file_as_soon_as_it_is_logged(tmp_path):
    log = MetricLog([JsonlWriter(tmp_path / "m.jsonl", 0)])
    log.log(1, {"a/b": 1.0})
    assert len(records(tmp_path / "m.jsonl")) == 1
    log.close()


def test_a_full_disk_under_the_log_is_one_line(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl", 0)
    writer._file = open("/dev/full", "a", buffering=1)  # noqa: SIM115 (never written to)
    log = MetricLog([writer])
    with pytest.raises(RunFolderError, match=r"^/dev/full cannot be written \(No space left on device\); make room$"):
        log.log(1, {"a/b": 1.0})


def test_a_resumed_attempt_cuts_off_what_the_former_one_wrote_from_its_first_step_on(tmp_path):
    path = tmp_path / "m.jsonl"
    first = MetricLog([JsonlWriter(path, 0)])
    for step in range(16):
        first.log(step, {"a/b": step})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 16, "a')  # a crash in mid-line
    second = MetricLog([JsonlWriter(path, 11)])
    for step in range(11, 20):
        second.log(step, {"a/b": -step})
    second.close()
    assert [(r["step"], r["a/b"]) for r in records(path)] == [
        *((s, s) for s in range(11)),
        *((s, -s) for s in range(11, 20)),
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


def test_steps_may_not_run_backwards():
    log = MetricLog([])
    log.log(5, {})
    log.log(5, {})
    with pytest.raises(ValueError, match="step 4 come after those of step 5"):
        log.log(4, {})


def test_markdown_shows_every_cell_as_it_is():
    markdown = pytest.importorskip("markdown")
    hard = ["a|b", "x\ny", "<eos> & <b>", "2*3*4 _i_ `c`", "[l](u)", "\\n \\| back", ""]
    html = markdown.markdown(markdown_table(["text", "reward"], [[text, 1.0] for text in hard]), extensions=["tables"])
    cells = re.findall(r"<td>(.*?)</td>", html)
    shown = [c.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") for c in cells]
    assert shown[::2] == [text.replace("\n", "\\n") for text in hard]
    assert shown[1::2] == ["1.0"] * len(hard)


def test_off_a_terminal_one_plain_line_is_written_every_so_many_steps():
    stream = io.StringIO()
    console = console_writer(stream, total_steps=7, log_every_steps=3, now=Clock())
    for step in range(1, 8):
        console.scalars(step, {"reward/train_mean": 0.25, "optim/loss": 1234.5678, "other/metric": 1.0})
        console.table("t", step, ["a"], [["b"]])
    console.close()
    lines = [re.sub(r"^\[\d\d:\d\d:\d\d\] ", "", line) for line in stream.getvalue().splitlines()]
    assert lines == [
        "step 1/7 reward 0.25 loss 1.23e+03",
        "step 3/7 reward 0.25 loss 1.23e+03 eta 40s",
        "step 6/7 reward 0.25 loss 1.23e+03 eta 10s",
        "step 7/7 reward 0.25 loss 1.23e+03",
    ]


def on_a_terminal(**environment):
    """What the console writes to a pseudo-terminal over three steps."""
    code = (
        "import sys; from tba_megatron.metrics import console_writer\n"
        "c = console_writer(sys.stdout, total_steps=3, log_every_steps=100)\n"
        "[c.scalars(i, {'reward/train_mean': i / 4}) for i in (1, 2, 3)]; c.close()"
    )
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=theirs,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 4096):
            output += chunk
    except OSError:  # Linux reports the end of a pseudo-terminal as an error
        pass
    os.close(ours)
    assert child.wait(timeout=60) == 0
    return output.decode()


def test_on_a_terminal_one_line_is_redrawn_at_every_step_without_colour():
    output = on_a_terminal(NO_COLOR="1")
    for step in (1, 2, 3):
        assert f"step {step}/3 reward {step / 4:.3g}" in output
    assert "\x1b[2K" in output  # erases the line it draws again
    assert not re.search(r"\x1b\[[0-9;]*m", output)


def test_metrics_and_console_import_neither_torch_nor_tensorboard():
    code = "import sys, tba_megatron.metrics; print([m for m in ('torch', 'tensorboard') if m in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert answer.stdout == "[]\n"


def test_tensorboard_holds_one_point_a_step_after_a_resume_and_the_tables_and_charts(tmp_path):
    # The accumulator behind TensorBoard's server: to it scalars are tensors too.
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    def attempt(first_step, steps):
        log = open_metric_log(
            MetricsConfig(log_every_steps=1000),
            tmp_path,
            first_step=first_step,
            total_steps=20,
            stream=io.StringIO(),
        )
        for step in steps:
            log.log(step, {"optim/loss": math.nan if step == 3 else float(step)})
        log.table("rollouts/sample", steps[-1], ["prompt"], [["1|2"]])
        log.close()

    attempt(0, range(16))
    attempt(11, range(11, 21))

    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    losses = events.Tensors("optim/loss")
    assert [event.step for event in losses] == list(range(21))
    values = [event.tensor_proto.float_val[0] for event in losses]
    assert math.isnan(values[3]) and values[4:] == [float(step) for step in range(4, 21)]
    texts = events.Tensors("rollouts/sample/text_summary")
    assert [event.step for event in texts] == [20]
    assert texts[0].tensor_proto.string_val[0].decode() == "| prompt |\n| --- |\n| 1\\|2 |"
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    assert [r["step"] for r in records(tmp_path / "metrics.jsonl") if r["kind"] == "scalars"] == list(range(21))


def test_a_histogram_is_written_every_so_many_steps_with_its_counts_where_they_were_counted(tmp_path):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    config = MetricsConfig(histograms_every_steps=4, log_every_steps=1000)
    log = open_metric_log(config, tmp_path, first_step=0, total_steps=20, stream=io.StringIO())
    edges, counts = (-1000.0, -0.1, 0.1, 5.0, 7.0, 1000.0), (0, 3, 0, 2, 0)
    for step in range(1, 10):
        log.log(step, {})
        log.histograms(step, {"a/x": Histogram(edges=edges, counts=counts)})
    log.histograms(12, {"a/empty": Histogram(edges=edges, counts=(0,) * 5)})
    log.close()
    kept = [row for row in records(tmp_path / "metrics.jsonl") if row["kind"] == "histogram" and row["tag"] == "a/x"]
    assert [(row["step"], row["edges"], row["counts"]) for row in kept] == [
        (step, list(edges), list(counts)) for step in (4, 8)
    ]
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    drawn = events.Tensors("a/x")
    assert [event.step for event in drawn] == [4, 8] and "a/empty" not in events.Tags()["tensors"]
    bins = make_ndarray(drawn[0].tensor_proto)
    assert bins == pytest.approx(np.array([[-0.1, 0.1, 3], [0.1, 5.0, 0], [5.0, 7.0, 2]]))


def test_without_steps_there_are_no_histograms(tmp_path):
    log = MetricLog([JsonlWriter(tmp_path / "m.jsonl", 0)], histograms_every_steps=0)
    log.histograms(1, {"a/x": Histogram(edges=(0.0, 1.0), counts=(1,))})
    log.close()
    assert records(tmp_path / "m.jsonl") == []


def test_tensorboard_can_be_left_out(tmp_path):
    open_metric_log(
        MetricsConfig(tensorboard=False), tmp_path, first_step=0, total_steps=1, stream=io.StringIO()
    ).close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_ends_tensorboards_log_and_not_the_run(tmp_path, caplog):
    writer = TensorBoardWriter(tmp_path, 0)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer._writer.add_scalar = full
    for step in (1, 2):
        writer.scalars(step, {"a": 1.0})
    writer.table("t", 2, ["x"], [])
    writer.close()
    assert [record.getMessage() for record in caplog.records] == [
        "TensorBoard's log ends here: No space left on device"
    ]

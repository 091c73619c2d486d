"""What stands beside the buffer in its benchmark: whole groups are carried, and no process is left over."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks import buffer, buffer_peers, buffer_wire
from benchmarks.buffer_peers import BARE, PICKLE, TRANSFERQUEUE, Skipped, best, environment, interleaved, ratios
from benchmarks.buffer_wire import (
    BareFrames,
    Pickled,
    Rate,
    Sizes,
    answer,
    bare_frames,
    groups_of,
    plain_pickle,
    spawned,
)
from benchmarks.peers.rollouts import GROUP, make_rollouts

TINY = Sizes(rollouts=20 * GROUP, warm_up=2 * GROUP, distinct=8 * GROUP, tokens=5, groups_a_request=3)


def rate(rollouts_s: int) -> Rate:
    return Rate(rollouts=rollouts_s, wall_s=1.0, cpu_s=2.0)


def test_rollouts_are_a_function_of_seed_and_sender_and_all_differ():
    one, again, other = (make_rollouts(4, seed=1, sender=sender, n_tokens=6) for sender in (0, 0, 1))
    assert np.array_equal(one.tokens, again.tokens) and np.array_equal(one.logprobs, again.logprobs)
    completions = np.concatenate([one.tokens.reshape(-1, 6), other.tokens.reshape(-1, 6)])
    assert len(np.unique(completions, axis=0)) == one.n_rollouts + other.n_rollouts == 2 * 4 * GROUP
    assert one.tokens.dtype == np.int32 and one.logprobs.dtype == np.float32 and one.logprobs.max() <= 0


def test_a_bare_message_holds_the_facts_and_arrays_of_its_group():
    made = make_rollouts(3, seed=0, sender=1, n_tokens=5)
    codec = BareFrames()
    for g, group in enumerate(groups_of(made, sender=1)):
        frames = codec.encode(group)
        header = codec.decode(frames)
        assert {name: getattr(header, name) for name in group.facts} == group.facts
        assert (
            header.sequences == list(range(g * GROUP, (g + 1) * GROUP)) and header.rewards == made.rewards[g].tolist()
        )
        arrays = (made.prompts[g], made.tokens[g], made.logprobs[g])
        assert [bytes(frame) for frame in frames[1:]] == [array.tobytes() for array in arrays]


def test_a_pickled_message_is_its_group():
    (group,) = groups_of(make_rollouts(1, seed=0, sender=0, n_tokens=5), sender=0)
    facts, prompt, tokens, logprobs = Pickled().decode(Pickled().encode(group))
    assert facts == group.facts and np.array_equal(prompt, group.prompt)
    assert np.array_equal(tokens, group.tokens) and np.array_equal(logprobs, group.logprobs)


def test_every_rollout_arrives_is_handed_out_and_no_process_is_left():
    before = psutil.Process().children(recursive=True)
    bare, pickled = bare_frames(TINY), plain_pickle(TINY)
    assert list(bare) == ["in"] and list(pickled) == ["in", "out"]
    assert bare["in"].rollouts == pickled["in"].rollouts == TINY.rollouts
    assert pickled["out"].rollouts == TINY.rollouts // (3 * GROUP) * 3 * GROUP
    assert all(found.cpu_s > 0 and found.wall_s > 0 for found in (*bare.values(), *pickled.values()))
    assert psutil.Process().children(recursive=True) == before


def test_a_pickle_that_is_kept_is_the_group_that_was_sent():
    held = []
    buffer_wire._receive("pickle", TINY, held.append)
    sent = [group for s in (0, 1) for group in groups_of(make_rollouts(4, seed=0, sender=s, n_tokens=5), s)]
    tokens = {facts["prompt_id"]: tokens for facts, _, tokens, _ in held}
    assert len(held) == 20 and len(tokens) == len(sent) == 8
    assert all(np.array_equal(tokens[group.facts["prompt_id"]], group.tokens) for group in sent)


def test_a_sender_whose_owner_is_gone_ends():
    settings = {"role": "send", "codec": "bare", "address": "tcp://127.0.0.1:1", "sender": 0, "groups": 1, "warm_up": 0}
    command = ["benchmarks.buffer_wire", json.dumps(settings | {"distinct": 8, "senders": 1, "seed": 0, "tokens": 2})]
    with spawned([command]) as (process,), pytest.raises(RuntimeError, match="ended with 1"):
        answer(process)  # closes the pipe that the word to begin would come from


def test_a_message_that_never_comes_is_an_error_that_names_the_exit_codes(monkeypatch):
    monkeypatch.setattr(buffer_wire, "PATIENCE_S", 0.2)
    before = psutil.Process().children(recursive=True)
    with (
        pytest.raises(RuntimeError, match=r"within 0.2 s; exit codes of the processes: \[None\]"),
        buffer_wire.bound_socket(buffer_wire.zmq.PULL) as (socket, _),
        spawned([["timeit", "-n", "1", "-r", "1", "import time; time.sleep(3600)"]]),
    ):
        socket.recv()
    assert psutil.Process().children(recursive=True) == before


def test_parts_run_in_turn_and_the_median_of_each_direction_counts():
    order = []
    rates = {"a": iter([9, 1, 2]), "b": iter([10, 300, 20])}

    def part(name):
        def run():
            order.append(name)
            return {"in": rate(next(rates[name]))}

        return run

    report = interleaved({name: part(name) for name in rates}, 3)
    assert order == ["a", "b"] * 3
    assert [report[name]["in"]["rollouts_s"] for name in rates] == [2, 20]
    assert report["a"]["in"]["all"] == [9, 1, 2] and report["a"]["in"]["rollouts_a_cpu_s"] == 1


def test_what_cannot_be_had_is_tried_once_and_says_why(capsys):
    tries = []

    def absent():
        tries.append(1)
        raise Skipped("no such package")

    report = interleaved({"absent": absent, "there": lambda: {"in": rate(8)}}, 3)
    assert len(tries) == 1 and report["absent"] == {"skipped": "no such package"}
    assert len(report["there"]["in"]["all"]) == 3 and "skipped: no such package" in capsys.readouterr().err
    assert best(report["absent"], "in") is None and ratios(report, "there") == {"in": {}}


def test_ratios_are_against_the_best_batch_of_each_other_part():
    peer = {
        "in, 64 a put": rate(10).as_dict(),
        "in, 512 a put": rate(40).as_dict(),
        "out, 64 a fetch": rate(5).as_dict(),
    }
    report = {
        "ours": {"in": rate(100).as_dict(), "out": rate(50).as_dict()},
        "peer": peer,
        "in only": {"in": rate(200).as_dict()},
    }
    assert best(peer, "in") == 40
    assert ratios(report, "ours", "rollouts_a_cpu_s")["out"] == {"peer": 12.5}  # a rate of 2.5 is shown as 2
    assert ratios(report, "ours") == {"in": {"peer": 2.5, "in only": 0.5}, "out": {"peer": 10.0}}


def test_an_environment_that_cannot_be_made_is_skipped_in_the_report(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert buffer_peers.main(["--only", TRANSFERQUEUE, "--cache", str(tmp_path / "file"), "--repeats", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "no environment in" in report["parts"][TRANSFERQUEUE]["skipped"] and report["ratios"] == {}


def test_an_environment_counts_as_made_once_everything_is_in_it(tmp_path, monkeypatch):
    commands = []

    def install(command, *, fails):
        commands.append(command)
        if command[1:3] == ["-m", "venv"]:
            Path(command[-1]).mkdir(exist_ok=True)
        elif fails:
            raise Skipped("no index answers")

    monkeypatch.setattr(buffer_peers, "_install", partial(install, fails=True))
    with pytest.raises(Skipped, match="no index answers"):
        environment(tmp_path)
    first = len(commands)
    monkeypatch.setattr(buffer_peers, "_install", partial(install, fails=False))
    python = environment(tmp_path)
    assert "--clear" in commands[first] and len(commands) == first + 2  # from the start, not onto half a package
    assert environment(tmp_path) == python and len(commands) == first + 2
    assert tmp_path in python.parents and any("transferqueue" in word for word in commands[-1])


def test_a_command_of_the_install_that_fails_says_its_last_line():
    with pytest.raises(Skipped, match=r": no index answers$"):
        buffer_peers._install([sys.executable, "-c", "raise SystemExit('a\\nno index answers')"])


def test_what_a_peer_that_hangs_has_started_is_ended(tmp_path, monkeypatch):
    script, noted = tmp_path / "python", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\nsleep 100 &\necho $! > {noted}\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(buffer_peers, "POLL_S", 0.2)
    monkeypatch.setattr(buffer_peers, "RUN_S", 1.0)
    with pytest.raises(RuntimeError, match=r"did not end within"):
        buffer_peers._run(script, {})
    pid = int(noted.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_the_command_prints_what_was_measured_and_its_ratios(capsys):
    assert buffer_peers.main(["--only", BARE, PICKLE, "--rollouts", "256", "--tokens", "4", "--repeats", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["parts"]) == [BARE, PICKLE]
    pickled, bare = (report["parts"][name]["in"]["rollouts_s"] for name in (PICKLE, BARE))
    assert report["ratios"][PICKLE]["in"][BARE] == round(pickled / bare, 4)
    assert report["ratios_by_cpu_s"][PICKLE]["in"][BARE] > 0


def test_the_whole_command_prints_the_figures_of_its_claims(capsys, tmp_path):
    sizes = ["--held", "512", "1024", "--rollouts", "1024", "--repeats", "1", "--steps", "0", "--disk", str(tmp_path)]
    buffer.main(["--no-peers", *sizes])
    report = json.loads(capsys.readouterr().out)
    assert report["claims"].keys() == buffer.LIMITS.keys() - {
        "out_of_transferqueue",
        "step_under_intake",
        "memory_of_raw_bytes",
    }
    for held in ("512 held", "1024 held"):
        assert report["parts"][held].keys() == {"out", "in, segments off", "in, segments on"}
        assert all(rate["rollouts"] == 1024 for name, rate in report["parts"][held].items() if name != "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "figure", "holds"),
    [
        ("in_of_bare_frames", 0.6, True),
        ("in_of_bare_frames", 0.59, False),
        ("step_under_intake", 1.05, True),
        ("step_under_intake", 1.06, False),
    ],
)
def test_a_claim_holds_up_to_its_limit(name, figure, holds):
    assert buffer._holds(name, figure) is holds

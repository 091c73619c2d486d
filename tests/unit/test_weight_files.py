"""Versions as files: whole or not at all, verified as what comes over the wire."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tba_megatron.errors import WeightTransferError
from tba_megatron.models.hf_folder import list_tensors
from tba_megatron.models.hf_writer import begin_folder
from tba_megatron.search.engine import ReceiveState
from tba_megatron.search.receiver import Receiver
from tba_megatron.transport.manifest import (
    Layout,
    Manifest,
    allocate,
    build_buckets,
    encode_manifest,
    layout_of,
    merge_manifests,
    unpack,
)
from tba_megatron.transport.messages import Offer
from tba_megatron.transport.weight_files import (
    finish_version,
    hold_newest,
    newest,
    partial_of,
    read_version,
    remove_old,
    remove_partials,
    stage_file,
    version_folder,
    write_marker,
    write_stage,
)
from tba_megatron.types import PolicyVersion

V1, V2, V3 = (PolicyVersion(0, step) for step in (1, 2, 3))
CPU = torch.device("cpu")


def tensors(stage: int, shift: float = 0.0) -> list[tuple[str, Tensor]]:
    numbers = torch.arange(60.0) + 100 * stage + shift
    return [
        (f"{stage}.a", numbers.reshape(6, 10)),
        (f"{stage}.half", numbers[:7].bfloat16()),
        (f"{stage}.scalar", numbers[3].clone()),
        (f"{stage}.b", numbers[:40].reshape(4, 10)),
    ]


@pytest.fixture
def weights(tmp_path) -> Path:
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "config.json").write_text("{}")
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


def write(weights: Path, version: PolicyVersion, n_stages: int = 2, shift: float = 0.0) -> tuple[Manifest, Path]:
    partial, folder = partial_of(weights, version), version_folder(weights, version)
    begin_folder(partial, weights.parent / "template", "float32")
    parts = []
    for stage in range(n_stages):
        part, buckets = build_buckets(version, tensors(stage, shift), 200, owner=stage)
        write_stage(partial, stage_file(stage, n_stages), layout_of(part), buckets)
        parts.append(part)
    manifest = merge_manifests(parts)
    assert not folder.exists()
    finish_version(partial, folder, manifest, n_stages)
    assert not partial.exists()
    return manifest, folder


def staging_of(manifest: Manifest) -> list[Tensor]:
    return allocate(layout_of(manifest), CPU)


@pytest.mark.parametrize("n_stages", [1, 3])
def test_what_stages_write_is_read_and_is_a_folder_that_others_load(weights, n_stages):
    manifest, folder = write(weights, V1, n_stages)
    staging = staging_of(manifest)
    read_version(manifest, folder, staging)
    expected = [pair for stage in range(n_stages) for pair in tensors(stage)]
    for (name, got), (wanted, tensor) in zip(unpack(manifest.entries, staging), expected, strict=True):
        assert name == wanted and got.dtype == tensor.dtype and torch.equal(got, tensor)
    assert {name: stored.shape for name, stored in list_tensors(folder).items()} == {
        name: tuple(tensor.shape) for name, tensor in expected
    }


def test_a_receiver_that_is_offered_a_folder_reads_it(weights):
    manifest, folder = write(weights, V1)
    expected = {entry.name: (entry.shape, entry.dtype) for entry in manifest.entries}
    receiver = Receiver(CPU, expected)
    data = encode_manifest(manifest)
    receiver.begin(Offer(version="0.1", manifest=data, round=0, folder=str(folder)), 0, 1.0)
    receiver.close()
    assert receiver.poll().state is ReceiveState.STAGED, receiver.poll().reason
    assert torch.equal(dict(receiver.take()[1])["1.b"], dict(tensors(1))["1.b"])
    receiver.begin(Offer(version="0.1", manifest=data, round=1, folder=str(folder.with_name("0.9"))), 0, 1.0)
    receiver.close()
    status = receiver.poll()
    assert status.state is ReceiveState.FAILED and "version 0.1: " in status.reason and "0.9" in status.reason


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (flip, r"from \S+/0\.1/model-00002-of-00002\.safetensors has another checksum than its manifest"),
        (cut_off, r"model-00002-of-00002\.safetensors is not a whole safetensors file"),
        (Path.unlink, r"model-00002-of-00002\.safetensors does not exist"),
        (lambda path: path.write_bytes(b""), r"model-00002-of-00002\.safetensors is empty"),
    ],
    ids=["flipped", "cut off", "gone", "empty"],
)
def test_a_damaged_file_is_one_line_that_names_it(weights, damage, complaint):
    manifest, folder = write(weights, V1)
    damage(folder / stage_file(1, 2))
    with pytest.raises(WeightTransferError, match=rf"^version 0\.1: [^\n]*{complaint}[^\n]*$"):
        read_version(manifest, folder, staging_of(manifest))


def test_the_files_of_another_version_are_refused(weights):
    manifest, _ = write(weights, V1)
    _, other = write(weights, V2, shift=1.0)
    with pytest.raises(WeightTransferError, match=r"has another checksum than its manifest"):
        read_version(manifest, other, staging_of(manifest))


def test_a_file_that_is_replaced_while_it_is_read_is_named(weights, monkeypatch):
    manifest, folder = write(weights, V1)
    before = list_tensors(folder)
    (folder / stage_file(1, 2)).write_bytes((folder / stage_file(0, 2)).read_bytes())
    monkeypatch.setattr("tba_megatron.transport.weight_files.list_tensors", lambda _: before)
    with pytest.raises(WeightTransferError, match=r"model-00002-of-00002\.safetensors was replaced while it was read"):
        read_version(manifest, folder, staging_of(manifest))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda named: named[:-1], r"\S+/0\.1 lacks 0\.b"),
        (lambda named: [*named[:-1], ("0.b", named[-1][1].T)], r"0\.b in \S+ is F32 \[10, 4\], not float32 \[4, 10\]"),
        (lambda named: [*named[:-1], ("0.b", named[-1][1].int())], r"0\.b in \S+ is I32 \[4, 10\], not float32"),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_a_tensor_that_is_not_the_manifests_is_named(weights, change, complaint):
    manifest, buckets = build_buckets(V1, tensors(0), 200, owner=0)
    other, buckets = build_buckets(V1, change(tensors(0)), 200, owner=0)
    folder = version_folder(weights, V1)
    begin_folder(folder, weights.parent / "template", "float32")
    write_stage(folder, stage_file(0, 1), layout_of(other), buckets)
    with pytest.raises(WeightTransferError, match=rf"^version 0\.1: {complaint}"):
        read_version(manifest, folder, staging_of(manifest))


def test_the_marker_names_the_version_to_start_from_and_is_replaced_whole(weights):
    assert newest(weights) is None and newest(weights / "none") is None
    for version in (V1, V2):
        write_marker(weights, version)
        assert newest(weights) == (version, version_folder(weights, version))
    assert sorted(os.listdir(weights)) == ["newest.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 7}', '{"version": "seven"}', "{"])
def test_a_damaged_marker_is_one_line(weights, text):
    (weights / "newest.json").write_text(text)
    with pytest.raises(WeightTransferError, match=r"newest\.json names no version; remove it"):
        newest(weights)


@pytest.mark.parametrize(("keep", "left"), [(0, "1"), (1, "13"), (2, "123"), (9, "123")])
def test_the_newest_versions_stay_and_the_marked_one_always(weights, keep, left):
    for version in (V1, V2, V3):
        write(weights, version)
    write_marker(weights, V1)
    (weights / "notes").mkdir()
    (weights / ".0.4.partial").mkdir()
    remove_old(weights, keep)
    assert sorted(os.listdir(weights)) == [*(f"0.{step}" for step in left), "newest.json", "notes"]


def test_what_a_killed_writer_left_is_removed_and_nothing_else(weights):
    write(weights, V1)
    for name in (".0.2.partial", ".other.partial"):
        (weights / name).mkdir()
    remove_partials(weights)
    assert sorted(os.listdir(weights)) == [".other.partial", "0.1"]


def test_a_writer_that_is_killed_leaves_no_version_and_the_next_attempt_succeeds(weights):
    pid = os.fork()
    if pid == 0:
        begin_folder(partial_of(weights, V1), weights.parent / "template", "float32")
        part, buckets = build_buckets(V1, tensors(0), 200, owner=0)
        write_stage(partial_of(weights, V1), stage_file(0, 2), layout_of(part), buckets)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert os.listdir(weights) == [".0.1.partial"]
    manifest, folder = write(weights, V1)
    read_version(manifest, folder, staging_of(manifest))
    assert os.listdir(weights) == ["0.1"]


def test_a_disk_that_is_full_is_one_line_and_gives_its_space_back(weights):
    layout, buckets = _large()
    partial = partial_of(weights, V1)
    begin_folder(partial, weights.parent / "template", "float32")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(WeightTransferError, match=r"model\.safetensors cannot be written: [^\n]+$"):
            write_stage(partial, stage_file(0, 1), layout, buckets)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(partial) == ["config.json"]


def test_a_disk_whose_fullness_shows_at_the_end_gets_its_space_back(weights, monkeypatch):
    def half(path: Path, tensors: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("tba_megatron.transport.weight_files.write_weights", half)
    with pytest.raises(WeightTransferError, match=r"model\.safetensors cannot be written: \S+ \S+ No space left on"):
        write_stage(weights, stage_file(0, 1), *_large())
    assert os.listdir(weights) == []


def _large() -> tuple[Layout, list[Tensor]]:
    manifest, buckets = build_buckets(V1, [("a", torch.zeros(1 << 18))], 1 << 20, owner=0)
    return layout_of(manifest), buckets


def test_a_stage_whose_file_is_not_there_is_named(weights):
    partial = partial_of(weights, V1)
    begin_folder(partial, weights.parent / "template", "float32")
    part, buckets = build_buckets(V1, tensors(0), 200, owner=0)
    write_stage(partial, stage_file(0, 2), layout_of(part), buckets)
    with pytest.raises(WeightTransferError, match=r"0\.1 cannot be finished: \S+model-00002-of-00002\.safetensors was"):
        finish_version(partial, version_folder(weights, V1), part, 2)
    assert json.loads((partial / "config.json").read_text())["dtype"] == "float32"


def test_a_version_that_is_held_can_be_read_after_the_trainer_has_removed_it(weights, tmp_path):
    manifest, _ = write(weights, V1)
    write_marker(weights, V1)
    held = tmp_path / "held"
    held.mkdir()
    assert hold_newest(weights, held) == V1
    for version in (V2, V3):
        write(weights, version)
        write_marker(weights, version)
    remove_old(weights, keep=1)
    assert not version_folder(weights, V1).exists()
    staging = allocate(layout_of(manifest), CPU)
    read_version(manifest, held, staging)


def test_a_version_that_disappears_while_it_is_held_is_given_up_for_the_marked_one(weights, tmp_path, monkeypatch):
    write(weights, V1)
    write_marker(weights, V1)
    held, link = tmp_path / "held", os.link
    held.mkdir()

    def vanishes(source, target):
        if Path(source).parent == version_folder(weights, V1):
            write(weights, V2)
            write_marker(weights, V2)
            remove_old(weights, keep=1)
        link(source, target)

    monkeypatch.setattr(os, "link", vanishes)
    assert hold_newest(weights, held) == V2
    assert {path.name for path in held.iterdir()} == {path.name for path in version_folder(weights, V2).iterdir()}


def test_where_no_version_is_marked_there_is_one_line(weights, tmp_path):
    with pytest.raises(WeightTransferError, match="names no version to start from"):
        hold_newest(weights, tmp_path)

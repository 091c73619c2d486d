"""An exported folder is a Hugging Face model that computes what the trainer computes."""

from __future__ import annotations

import json
import resource

import pytest
import tiny
import torch
from ranks import run_ranks
from safetensors.torch import load_file

import tba_megatron.trainer.export_hf as export_hf_module
from tba_megatron.errors import CheckpointError
from tba_megatron.trainer.export_hf import export_hf

BATCHES = [tiny.train_groups(4, seed=seed) for seed in range(2)]
PROBE = tiny.train_groups(3, seed=9)


def train_and_export(groups, trainer, folder, target):
    """Two steps, an export, and the log-probs of the trained policy."""
    rank = tiny.Rank(groups, trainer, folder)
    rank.train(BATCHES)
    export_hf(
        rank.policy.chunks, rank.architecture, rank.shape, groups, folder=target, template=folder, dtype=trainer.dtype
    )
    return rank.logprobs(PROBE), tiny.whole([rank.weights()]) if groups.info.world_size == 1 else rank.weights()


def hf_logprobs(model) -> dict[int, float]:
    sums = {}
    for group in PROBE:
        for rollout in group.rollouts:
            prompt, completion = group.prompt_token_ids.tolist(), rollout.token_ids.tolist()
            tokens = torch.tensor([prompt + completion])
            with torch.no_grad():
                logprobs = model(tokens).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            chosen = logprobs[torch.arange(len(completion)), torch.tensor(completion)]
            sums[rollout.rollout_id.sequence] = float(chosen.double().sum())
    return sums


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize(("kind", "tied"), [("qwen2", True), ("qwen2", False), ("llama", False)])
def test_an_exported_policy_loads_in_transformers_and_gives_the_same_logprobs(kind, tied, sizes, tmp_path):
    from transformers import AutoModelForCausalLM

    start = tiny.save_model(tmp_path / "start", kind, tied=tied)
    (start / "tokenizer.json").write_text('{"a": "companion"}')
    ranks = run_ranks(train_and_export, tiny.trainer_config(**sizes), start, tmp_path / "end", **sizes)
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "end", dtype=torch.float32, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"]
    assert (tmp_path / "end" / "tokenizer.json").read_text() == '{"a": "companion"}'
    expected = {sequence: value for logprobs, _ in ranks for sequence, value in logprobs.items()}
    assert hf_logprobs(model.eval()) == pytest.approx(expected, abs=1e-5)
    exported = dict(model.named_parameters())
    for name, weight in tiny.whole([weights for _, weights in ranks]).items():
        assert torch.equal(exported[name], weight), name


def test_a_bfloat16_export_says_so_and_is_the_rounded_policy(tmp_path):
    start = tiny.save_model(tmp_path / "start")
    trainer = tiny.trainer_config(dtype="bfloat16")
    run_ranks(train_and_export, trainer, start, tmp_path / "end")
    assert json.loads((tmp_path / "end" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "end" / "model.safetensors").values()} == {torch.bfloat16}


def test_an_export_replaces_the_folder_whole_and_leaves_no_part_behind(tmp_path):
    start = tiny.save_model(tmp_path / "start")
    end = tmp_path / "end"
    end.mkdir()
    (end / "junk").write_text("old")
    (tmp_path / ".end.partial").mkdir()
    run_ranks(train_and_export, tiny.trainer_config(), start, end)
    assert not (end / "junk").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["end", "start"]


def export(groups, start, target, sizes, break_it=lambda groups: None, file_bytes=8_000):
    """Untrained weights out of ``start``; what the export raised, if anything, and the files that this rank wrote."""
    rank = tiny.Rank(groups, tiny.trainer_config(**sizes), start)
    written, write = [], export_hf_module.write_weights

    def watched(path, tensors):
        written.append(path.name)
        write(path, tensors)

    export_hf_module.write_weights = watched
    break_it(groups)
    try:
        export_hf(
            rank.policy.chunks,
            rank.architecture,
            rank.shape,
            groups,
            folder=target,
            template=start,
            dtype="float32",
            file_bytes=file_bytes,
        )
    except CheckpointError as error:
        return str(error), written
    return None, written


@pytest.mark.parametrize(
    "sizes", [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2}], ids=str
)
def test_every_stage_leader_writes_its_own_files_and_transformers_reads_them(sizes, tmp_path):
    start, end = tiny.save_model(tmp_path / "start", tied=False, layers=4), tmp_path / "end"
    written = [names for _, names in run_ranks(export, start, end, sizes, **sizes)]
    assert all(names for names in written[:: sizes.get("tp", 1)][: sizes.get("pp", 1)])
    in_order = [name for names in written for name in names]
    n_files = len(in_order)
    assert in_order == [f"model-{i:05d}-of-{n_files:05d}.safetensors" for i in range(1, n_files + 1)]
    stages = [name for name in written if name]
    assert len(stages) == sizes.get("pp", 1)  # tensor peers and other replicas write nothing
    index = json.loads((end / "model.safetensors.index.json").read_text())
    held = {name: set(load_file(end / name)) for name in in_order}
    assert {tensor: name for name, tensors in held.items() for tensor in tensors} == index["weight_map"]
    expected = load_file(start / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert sorted(path.name for path in end.glob("*.safetensors")) == in_order
    tiny.assert_same_weights(tiny.load_hf_model(end).state_dict(), tiny.load_hf_model(start).state_dict(), 0)


def test_one_bucket_on_one_stage_is_one_plain_file(tmp_path):
    start, end = tiny.save_model(tmp_path / "start"), tmp_path / "end"
    run_ranks(export, start, end, {"tp": 2}, lambda groups: None, 1 << 20, tp=2)
    assert {path.name for path in end.glob("model*")} == {"model.safetensors"}


def test_the_configuration_keeps_everything_but_the_dtype(tmp_path):
    start, end = tiny.save_model(tmp_path / "start"), tmp_path / "end"
    config = json.loads((start / "config.json").read_text()) | {"of_others": {"é": [1, None]}, "torch_dtype": "float16"}
    (start / "config.json").write_text(json.dumps(config))
    run_ranks(export, start, end, {})
    del config["torch_dtype"]
    assert json.loads((end / "config.json").read_text()) == config | {"dtype": "float32"}


def allow_small_files_only() -> None:
    """What a full disk does, for this process alone: writing fails with an OSError."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    ("sizes", "full"), [({}, 0), ({"tp": 2}, 0), ({"pp": 2}, 1), ({"pp": 2}, 0), ({"dp": 2}, 0)], ids=str
)
def test_a_disk_that_is_full_for_one_rank_is_the_same_error_on_all_and_the_old_folder_stays(sizes, full, tmp_path):
    start, end = tiny.save_model(tmp_path / "start", layers=4), tmp_path / "end"
    end.mkdir()
    (end / "model.safetensors").write_text("old")

    def break_it(groups):
        if groups.rank == full:
            allow_small_files_only()

    messages = {message for message, _ in run_ranks(export, start, end, sizes, break_it, **sizes)}
    (message,) = messages
    assert message.startswith(f"cannot write {end}: ") and "\n" not in message
    assert "File too large" in message
    assert not sizes or message.endswith(f"(rank {full})")
    assert [(path.name, path.read_text()) for path in end.iterdir()] == [("model.safetensors", "old")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["end", "start"]


@pytest.mark.parametrize("in_the_way", ["of the folder", "of its parent"])
def test_a_file_in_the_way_is_an_error_on_every_rank(in_the_way, tmp_path):
    start, end = tiny.save_model(tmp_path / "start"), tmp_path / "exports" / "end"
    if in_the_way == "of the folder":
        end.parent.mkdir()
    path = end if in_the_way == "of the folder" else end.parent
    path.write_text("a file")
    for message, written in run_ranks(export, start, end, {"pp": 2}, pp=2):
        assert message.startswith(f"cannot write {end}: ") and "(rank 0)" in message
        assert not written
    assert path.read_text() == "a file"

"""An exported folder is a Hugging Face model that computes what the trainer computes."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from ranks import run_ranks

from tba_megatron.errors import ModelError
from tba_megatron.models.registry import read_model
from tba_megatron.trainer.weights_io import export_hf, load_hf

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
    from safetensors.torch import load_file

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


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "weights missing: ['model.norm.weight']"),
        (lambda t: t.update(stray=torch.ones(1)), "unexpected: ['stray']"),
        (lambda t: t.update({"model.norm.weight": torch.ones(5)}), "model.norm.weight give decoder.final_layernorm"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_weights_that_do_not_fit_are_refused_in_one_line(spoil, words, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny.save_model(tmp_path / "start")
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")

    def body(groups):
        from tba_megatron.trainer.model import build_chunks

        architecture, shape = read_model(folder)
        chunks = build_chunks(shape, tiny.trainer_config(), groups)
        with pytest.raises(ModelError) as caught:
            load_hf(chunks, architecture, shape, folder, groups)
        return str(caught.value)

    (message,) = run_ranks(body)
    assert words in message and "\n" not in message

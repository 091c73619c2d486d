"""Rotary frequencies are transformers' own, and angles by position are Megatron's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny
import torch
from ranks import run_ranks

from tba_megatron.models.registry import ARCHITECTURES
from tba_megatron.models.rotary import PackedRotary, Rotary, inverse_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 2.5}
CASES = [
    ("llama", {}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    ("llama", {"rope_theta": 5e5}),
    ("llama", {"rope_theta": 1e3, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    ("llama", {"rope_scaling": None, "rope_theta": 5e5}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5}),
    ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 512}, "rope_theta": 5e5}),
    ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64, "rope_theta": 5e5}}),
    ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "original_max_position_embeddings": 33}),
    ("llama", {"head_dim": 64, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192}}),
    ("qwen2", {"rope_parameters": {**LINEAR, "rope_theta": 1e6}}),
    ("qwen3", {"rope_theta": 1e6}),
    ("gpt_neox", {}),
    ("gpt_neox", {"rotary_pct": 1.0, "rotary_emb_base": 5e3}),
    ("gpt_neox", {"rope_parameters": {**LINEAR, "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ("gpt_neox", {"rope_scaling": LINEAR, "rotary_pct": 0.5}),
]


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_frequencies_are_those_of_transformers(kind, changes):
    """From the very dict that a folder has, old or new, on both sides."""
    import transformers

    raw = tiny.hf_config(kind, tied=True).to_dict()
    raw = {k: v for k, v in raw.items() if k not in ("rope_parameters", "layer_types")}
    raw |= {"num_hidden_layers": 1, **changes}
    name = {"gpt_neox": "GPTNeoX", "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    config = getattr(transformers, f"{name}Config").from_dict(dict(raw))
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = next(buffer for buffer_name, buffer in model.named_buffers() if buffer_name.endswith("inv_freq"))
    rotary = ARCHITECTURES[f"{name}ForCausalLM"].read(raw).rotary
    assert rotary is not None
    assert torch.equal(inverse_frequencies(rotary), expected)


def test_scaling_changes_what_it_should():
    plain = inverse_frequencies(Rotary(size=16, theta=1e4))
    rotary = (
        ARCHITECTURES["LlamaForCausalLM"]
        .read(
            {
                **tiny.hf_config("llama", tied=True, head_dim=16).to_dict(),
                "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 128, "rope_theta": 1e4},
            }
        )
        .rotary
    )
    assert rotary is not None
    ratio = inverse_frequencies(rotary) / plain
    assert ratio[0] == 1 and ratio[-1] == 1 / 8 and ((ratio > 1 / 8) & (ratio < 1)).any()


def angles_by_megatron(groups, rotary: Rotary, lengths: list[int], query: torch.Tensor) -> torch.Tensor:
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    embedding = RotaryEmbedding(
        kv_channels=query.shape[-1],
        rotary_percent=rotary.size / query.shape[-1],
        rotary_base=rotary.theta,  # type: ignore[arg-type]
        use_cpu_initialization=True,
    )
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False)
    return apply_rotary_pos_emb(query, embedding(max(lengths), packed_seq=True), config, cu_seqlens=cu_seqlens)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [16, 4])
@pytest.mark.parametrize("lengths", [[1], [7, 7, 1, 12], [3] * 20])
def test_angles_by_position_are_those_of_megatrons_loop_over_sequences(size, lengths):
    rotary = Rotary(size=size, theta=1e4)
    query = torch.randn(sum(lengths), 3, 16, generator=torch.Generator().manual_seed(0))

    def body(groups):
        from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

        module = PackedRotary(rotary, groups.device)
        positions = torch.cat([torch.arange(n) for n in lengths])
        row = SimpleNamespace(positions=positions)
        angles = module(module.get_rotary_seq_len(None, None, None, None, row), packed_seq=False)
        config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False)
        ours = apply_rotary_pos_emb(query[:, None], angles, config)  # type: ignore[arg-type]
        return ours[:, 0], angles_by_megatron(groups, rotary, lengths, query)

    ((ours, theirs),) = run_ranks(body)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, query) or lengths == [1]


def test_frequencies_stay_float32_when_the_model_becomes_bfloat16():
    module = PackedRotary(Rotary(size=16, theta=1e4), torch.device("cpu"))
    positions = torch.arange(300)
    before = module(positions)
    assert torch.equal(module.bfloat16()(positions), before) and before.dtype == torch.float32
    assert not module.state_dict()

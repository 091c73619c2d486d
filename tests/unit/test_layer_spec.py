"""The layers of the two specs take the same row of packed tokens."""

from __future__ import annotations

import tiny
import torch
from ranks import run_ranks

from tba_megatron.models.registry import read_model


def engine_call(groups):
    """What Transformer Engine's attention would be called with, by a class that stands for it."""
    from tba_megatron.models.layer_spec import ROW_FORMAT, EnginePacking, PackedRow

    class Engine:
        def forward(self, query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params):
            assert attention_mask is None and attention_bias is None and attn_mask_type == "causal"
            self.seen = packed_seq_params
            assert query.dim() == key.dim() == value.dim() == 3
            return query.flatten(1)

    class Packed(EnginePacking, Engine):
        pass

    attention, cu_seqlens = Packed(), torch.tensor([0, 2, 5], dtype=torch.int32)
    row = PackedRow(qkv_format=ROW_FORMAT, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    query, key = torch.randn(5, 1, 4, 8), torch.randn(5, 1, 2, 8)
    output = attention.forward(query, key, key, None, attn_mask_type="causal", packed_seq_params=row)
    assert attention.seen.cu_seqlens_q is cu_seqlens and row.qkv_format == ROW_FORMAT
    return attention.seen.qkv_format, torch.equal(output, query.reshape(5, 1, 32))


def test_the_engines_attention_gets_sequences_end_to_end_and_gives_a_row():
    assert run_ranks(engine_call) == [("thd", True)]


def parts_found(groups, folder):
    from tba_megatron.models.layer_spec import apex_accumulates_gradients, transformer_engine_found
    from tba_megatron.trainer.model import build_chunks, named_parameters

    architecture, shape = read_model(folder)
    (gpt,) = build_chunks(shape, tiny.trainer_config(), groups)
    rules = {rule.megatron for rule in architecture.rules(shape, 1)}
    fused = transformer_engine_found(), apex_accumulates_gradients(), gpt.config.gradient_accumulation_fusion
    return fused, rules == set(named_parameters([gpt])), type(gpt.decoder.layers[0]).__name__


def test_without_fused_parts_the_layers_are_plain_torch_and_every_parameter_has_a_rule(tmp_path):
    for kind, sequential in (("gpt_neox", False), ("gpt_neox", True), ("qwen3", True), ("gpt2", True)):
        changes = {"use_parallel_residual": not sequential} if kind == "gpt_neox" else {}
        folder = tiny.save_model(tmp_path / f"{kind}{sequential}", kind, tied=False, **changes)
        ((fused, named, layer),) = run_ranks(parts_found, folder)
        assert fused == (False, False, False) and named
        assert layer == ("TransformerLayer" if sequential else "ParallelResidualLayer")


def runs(groups, lengths):
    from tba_megatron.models.layer_spec import runs_of_equal_length

    return runs_of_equal_length(lengths)


def test_neighbours_of_equal_length_are_one_run():
    assert run_ranks(runs, [3, 3, 0, 3, 2]) == [((3, 2), (3, 1), (2, 1))]
    assert run_ranks(runs, []) == [()]

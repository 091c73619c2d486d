"""Every way of splitting the model or the batch gives what Hugging Face, or one rank, gives."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from ranks import run_ranks

from tba_megatron.errors import ConfigError
from tba_megatron.models.registry import read_model
from tba_megatron.trainer.megatron_config import transformer_config

BATCHES = [tiny.train_groups(4, seed=seed) for seed in range(3)]
KINDS = {
    "qwen2_tied": ("qwen2", True),
    "qwen2_untied": ("qwen2", False),
    "llama_untied": ("llama", False),
    "qwen3_tied": ("qwen3", True),
    "gpt_neox_untied": ("gpt_neox", False),
    "gpt2_tied": ("gpt2", True),
}
LAYOUTS = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "dp2": {"dp": 2},
    "tp2_pp2_sequence_parallel": {"tp": 2, "pp": 2, "sequence_parallel": True},
}
# Each kind meets the layouts that treat it differently from the others: a tied embedding crosses the pipeline.
CASES = [
    *[("qwen2_tied", layout) for layout in LAYOUTS if layout != "tp2_pp2_sequence_parallel"],
    ("qwen2_untied", "tp2_pp2"),
    ("llama_untied", "tp2"),
    ("llama_untied", "pp2"),
    # Norms of heads, parallel residuals, biases and learned positions, each under everything at once.
    *[(kind, "tp2_pp2_sequence_parallel") for kind in ("qwen3_tied", "gpt_neox_untied", "gpt2_tied")],
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(policy, reference) folders by kind."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: (
            tiny.save_model(root / name, kind, tied=tied, seed=1),
            tiny.save_model(root / f"{name}_reference", kind, tied=tied, seed=2),
        )
        for name, (kind, tied) in KINDS.items()
    }


@pytest.fixture(scope="module")
def one_rank(folders):
    @functools.cache
    def train(kind: str) -> tiny.Trained:
        return run_ranks(tiny.train_on_rank, tiny.trainer_config(), *folders[kind], BATCHES)[0]

    return train


def hf_logprobs(folder, groups):
    """The completion's log-prob sum of each rollout, by Hugging Face, one sequence at a time."""
    model, sums = tiny.load_hf_model(folder), {}
    for group in groups:
        for rollout in group.rollouts:
            tokens = torch.tensor([*group.prompt_token_ids.tolist(), *rollout.token_ids.tolist()])
            first = len(group.prompt_token_ids)
            with torch.no_grad():
                logprobs = model(tokens[None]).logits[0].log_softmax(-1)
            chosen = logprobs[first - 1 : -1].gather(1, tokens[first:, None])
            sums[rollout.rollout_id.sequence] = float(chosen.double().sum())
    return sums


def split_run(folders, kind, layout, **fields):
    sizes = {k: v for k, v in layout.items() if k in ("tp", "pp", "dp")}
    trainer = tiny.trainer_config(**layout, **fields)
    return run_ranks(tiny.train_on_rank, trainer, *folders[kind], BATCHES, **sizes)


def joined_logprobs(ranks):
    found = {}
    for rank in ranks:
        found.update(rank.logprobs)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_response_logprobs_are_those_of_hugging_face(kind, folders, one_rank):
    expected = hf_logprobs(folders[kind][0], BATCHES[0])
    assert one_rank(kind).logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_split_run_is_the_run_of_one_rank(kind, layout, folders, one_rank):
    expected, ranks = one_rank(kind), split_run(folders, kind, LAYOUTS[layout])
    assert joined_logprobs(ranks) == pytest.approx(expected.logprobs, abs=1e-5)
    assert ranks[0].losses == pytest.approx(expected.losses, rel=1e-5)
    for mine, theirs in zip(ranks[0].statistics, expected.statistics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for rank in ranks:
        assert rank.norms == pytest.approx(expected.norms, rel=1e-5)
        assert rank.rates == expected.rates
        assert not any(rank.skipped)
    for step in (0, 2):
        found = tiny.whole([rank.weights[step] for rank in ranks])
        tiny.assert_same_weights(found, expected.weights[step], 1e-5)


def test_training_moves_every_parameter(folders, one_rank):
    before = dict(tiny.load_hf_model(folders["qwen2_tied"][0]).named_parameters())
    for name, after in one_rank("qwen2_tied").weights[-1].items():
        assert (after != before[name]).any(), name


def recomputing(groups, trainer, folder, reference_folder):
    """What training gives, and how often attention and MLP of the first layer ran in one step of each microbatch."""
    rank = tiny.Rank(groups, trainer, folder, reference_folder)
    n_microbatches = len(rank.packs(BATCHES[0]))
    layer: Any = rank.policy.chunks[0].decoder.layers[0]
    calls = {"attention": 0, "mlp": 0}

    def count(name):
        return lambda *_: calls.update({name: calls[name] + 1})

    hooks = [
        layer.self_attention.core_attention.register_forward_hook(count("attention")),
        layer.mlp.register_forward_hook(count("mlp")),
    ]
    first = rank.step(BATCHES[0])
    for hook in hooks:
        hook.remove()
    return first.grad_norm, rank.train(BATCHES[1:]), {name: n / n_microbatches for name, n in calls.items()}


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sequence_parallel": True}], ids=["one_rank", "tp2_sp"])
@pytest.mark.parametrize("kind", ["qwen2_tied", "gpt_neox_untied"])
def test_recomputing_activations_changes_nothing_but_how_often_they_are_computed(kind, layout, folders):
    sizes = {"tp": layout.get("tp", 1)}
    found = {}
    for recompute in ("none", "selective", "full"):
        trainer = tiny.trainer_config(**layout, recompute=recompute, microbatch_tokens=100)
        found[recompute] = run_ranks(recomputing, trainer, *folders[kind], **sizes)[0]
    assert {name: calls for name, (_, _, calls) in found.items()} == {
        "none": {"attention": 1, "mlp": 1},
        "selective": {"attention": 2, "mlp": 1},
        "full": {"attention": 2, "mlp": 2},
    }
    norm, expected, _ = found["none"]
    for first_norm, trained, _ in found.values():
        assert first_norm == pytest.approx(norm, rel=1e-6)
        assert trained.losses == pytest.approx(expected.losses, rel=1e-6)
        assert trained.norms == pytest.approx(expected.norms, rel=1e-6)
        tiny.assert_same_weights(trained.weights[-1], expected.weights[-1], 1e-6)


def train_in_bfloat16(groups, trainer, folder, reference_folder):
    rank = tiny.Rank(groups, trainer, folder, reference_folder)
    parameters: list[Any] = [p for chunk in rank.policy.chunks for p in chunk.parameters()]
    masters = [p for group in rank.policy.optimizer.param_groups for p in group["params"]]
    dtypes = [{p.dtype for p in parameters}, {p.main_grad.dtype for p in parameters}, {p.dtype for p in masters}]
    return dtypes, rank.train(BATCHES)


@pytest.mark.parametrize(("kind", "layout"), [("qwen2_tied", {}), ("gpt2_tied", {"tp": 2, "pp": 2})])
def test_bfloat16_keeps_masters_and_gradients_in_float32(kind, layout, folders, one_rank):
    expected = one_rank(kind)
    trainer = tiny.trainer_config(**layout, dtype="bfloat16")
    ranks = run_ranks(train_in_bfloat16, trainer, *folders[kind], **layout)
    for dtypes, trained in ranks:
        assert dtypes == [{torch.bfloat16}, {torch.float32}, {torch.float32}]
        assert trained.norms == pytest.approx(expected.norms, rel=0.05)
        assert not any(trained.skipped)
    assert ranks[0][1].losses == pytest.approx(expected.losses, rel=0.05)
    found = tiny.whole([trained.weights[-1] for _, trained in ranks])
    tiny.assert_same_weights(found, expected.weights[-1], 0.02)


def test_megatrons_recomputation_of_an_mlp_with_biases_is_refused(folders):
    trainer = tiny.trainer_config(recompute="selective", megatron_extra={"recompute_modules": ["core_attn", "mlp"]})
    transformer_config(read_model(folders["qwen2_tied"][0])[1], trainer)
    with pytest.raises(ConfigError) as caught:
        transformer_config(read_model(folders["gpt2_tied"][0])[1], trainer)
    assert "trainer.megatron_extra.recompute_modules: mlp is not supported with the biases of GPT2LMHeadModel" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("microbatch_tokens", [1, 10_000])
def test_how_groups_fall_into_microbatches_changes_nothing(microbatch_tokens, folders, one_rank):
    expected = one_rank("qwen2_tied")
    (found,) = split_run(folders, "qwen2_tied", {}, microbatch_tokens=microbatch_tokens)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-6)
    tiny.assert_same_weights(found.weights[-1], expected.weights[-1], 1e-6)


def test_replicas_may_have_different_numbers_of_microbatches(folders, one_rank):
    expected = one_rank("qwen2_tied")
    lopsided = [[batch[0], batch[1], batch[2], batch[3]] for batch in BATCHES]
    trainer = tiny.trainer_config(dp=2)

    def body(groups):
        mine = trainer.model_copy(update={"microbatch_tokens": 1 if groups.dp_rank else 10_000})
        rank = tiny.Rank(groups, mine, *folders["qwen2_tied"])
        return len(rank.packs(lopsided[0])), rank.train(lopsided)

    (n0, found), (n1, _) = run_ranks(body, dp=2)
    assert (n0, n1) == (1, 6)
    tiny.assert_same_weights(found.weights[-1], expected.weights[-1], 1e-5)


def uneven_stages(groups, trainer, folder, reference_folder):
    rank = tiny.Rank(groups, trainer, folder, reference_folder)
    return len(rank.policy.chunks[0].decoder.layers), rank.train(BATCHES)


def test_three_layers_on_two_uneven_stages(tmp_path):
    folders = [tiny.save_model(tmp_path / str(seed), layers=3, seed=seed) for seed in (1, 2)]
    (expected,) = run_ranks(tiny.train_on_rank, tiny.trainer_config(), *folders, BATCHES)
    trainer = tiny.trainer_config(pp=2, megatron_extra={"num_layers_in_first_pipeline_stage": 2})
    ranks = run_ranks(uneven_stages, trainer, *folders, pp=2)
    assert [layers for layers, _ in ranks] == [2, 1]
    assert ranks[0][1].losses == pytest.approx(expected.losses, rel=1e-5)
    found = tiny.whole([trained.weights[-1] for _, trained in ranks])
    tiny.assert_same_weights(found, expected.weights[-1], 1e-5)


def sent_in_a_step(groups, trainer, folders):
    """(elements when sent, elements after the step) of each activation that this rank sent without waiting."""
    from megatron.core.pipeline_parallel import p2p_communication

    sent, plain = [], p2p_communication._p2p_ops

    def watched(**arguments):
        tensor = arguments["tensor_send_next"]
        if tensor is not None:
            sent.append((tensor, tensor.numel()))
        return plain(**arguments)

    p2p_communication._p2p_ops = watched
    tiny.Rank(groups, trainer, *folders).step(BATCHES[0])
    return [(elements, tensor.numel()) for tensor, elements in sent]


def test_interleaved_stages_keep_what_they_are_still_sending(tmp_path):
    folders = [tiny.save_model(tmp_path / str(seed), layers=4, seed=seed) for seed in (1, 2)]
    sizes = {"pp": 2, "vpp": 2}
    for sent in run_ranks(sent_in_a_step, tiny.trainer_config(microbatch_tokens=30, **sizes), folders, **sizes):
        assert len(sent) > 4 and all(before == after > 1 for before, after in sent)


def probabilities_of_all_tokens(groups, folder):
    """Sum over the vocabulary of the probability at each response position, by the head of the trainer."""
    from tba_megatron.trainer.head import HeadSettings, forward_responses
    from tba_megatron.trainer.model import to_device

    rank = tiny.Rank(groups, tiny.trainer_config(tp=groups.tp_size), folder)
    (pack,) = rank.packs(BATCHES[0][:1])
    batch = to_device(pack.microbatch, groups.device)
    head = HeadSettings(temperature=0.7, vocab_size=tiny.VOCAB)
    chunk = rank.policy.chunks[0]
    with torch.no_grad():
        total = torch.zeros(len(batch.rows))
        for token in range(tiny.VOCAB):
            of_token = replace(batch, labels=torch.full_like(batch.labels, token))
            total += forward_responses(chunk, of_token, head, groups).exp()
    return chunk.shared_embedding_or_output_weight().shape[0], total


@pytest.mark.parametrize("kind", ["qwen2_tied", "qwen2_untied"])
def test_padded_tokens_get_no_probability(kind, folders):
    for rows, total in run_ranks(probabilities_of_all_tokens, folders[kind][0], tp=2):
        assert rows == 64  # of 19 real ones, so that the second rank holds padding only
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen2_tied", "qwen2_untied"])
def test_padded_rows_stay_zero(kind, folders):
    ranks = split_run(folders, kind, {"tp": 2})
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in ranks[0].local:
            rows = torch.cat([rank.local[name] for rank in ranks])
            assert rows.shape[0] == 128
            assert not rows[tiny.VOCAB :].any()
            assert rows[: tiny.VOCAB].any(dim=1).all()


def test_a_wrong_world_size_is_one_line_with_both_numbers():
    def body(groups):
        from tba_megatron.trainer.parallel import open_process_groups

        with pytest.raises(ConfigError) as caught:
            open_process_groups(tensor_parallel=2, pipeline_parallel=2, data_parallel=1, seed=0, timeout_s=5.0)
        return str(caught.value)

    (message,) = run_ranks(body)
    assert "\n" not in message
    assert "has 1 ranks (torchrun)" in message and "2 x 2 x 1 = 4" in message


COMPUTATION = (
    "softmax_scale",
    "rotary_interleaved",
    "glu_linear_offset",
    "no_rope_freq",
    "multi_latent_attention",
    "calculate_per_token_loss",
    "window_size",
    "fp16",
    "init_method",
)


@pytest.mark.parametrize(
    ("sizes", "extra", "words"),
    [
        ({"tp": 4}, {}, "trainer.tensor_parallel: 4 does not divide num_key_value_heads = 2"),
        ({"pp": 3}, {}, "trainer.pipeline_parallel: 3 does not divide num_hidden_layers = 2"),
        (
            {},
            {"no_such_field": 1},
            "megatron_extra.no_such_field: may not be set; allowed are num_layers_in_",
        ),
        ({}, {"hidden_size": 64}, "trainer.megatron_extra.hidden_size: may not be set"),
        ({}, {"num_moe_experts": 4}, "trainer.megatron_extra.num_moe_experts: mixture of experts is not supported"),
        # The model is that of config.json, and its export does not know of these.
        *(({}, {name: True}, f"trainer.megatron_extra.{name}: may not be set") for name in COMPUTATION),
        ({"pp": 2}, {"num_layers_in_first_pipeline_stage": 0}, "_stage: 0 is not a whole number of at least 1"),
        (
            {"pp": 2},
            {"num_layers_in_first_pipeline_stage": 2},
            "Megatron refuses {num_layers_in_first_pip",
        ),
        (
            {"pp": 2},
            {"num_layers_in_last_pipeline_stage": 7},
            "Megatron refuses {num_layers_in_last_pip",
        ),
        (
            {"pp": 2},
            {"pipeline_model_parallel_layout": "garbage"},
            "Megatron refuses {pipeline_model_",
        ),
        ({}, {"recompute_modules": ["core_attn"]}, "has no effect with trainer.recompute none; set selective"),
        ({}, {"recompute_num_layers": True}, "recompute_num_layers: True is not a whole number of at least 1"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_one_line(sizes, extra, words, folders):
    _, shape = read_model(folders["qwen2_tied"][0])
    with pytest.raises(ConfigError) as caught:
        transformer_config(shape, tiny.trainer_config(**sizes, megatron_extra=extra))
    assert len(caught.value.problems) == 1
    assert words in str(caught.value) and "\n" not in str(caught.value)

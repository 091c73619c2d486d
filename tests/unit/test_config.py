from pathlib import Path

import pytest
import yaml

from tba_megatron.config import Config
from tba_megatron.config_load import dump_config, load_config, store_config
from tba_megatron.errors import ConfigError, RunFolderError

MINIMAL = """\
run:
  folder: runs/x
model:
  path: some/model
task:
  kind: copy
trainer:
  optimizer:
    learning_rate: 1e-5
objective:
  loss:
    kind: tb_vargrad
    beta: 0.1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(MINIMAL)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def problems_of(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    return [line.replace(str(path), "F") for line in problems(path, *overrides)]


def test_a_number_in_scientific_notation_is_a_float_in_file_and_override(file):
    assert load_config(file).trainer.optimizer.learning_rate == 1e-5
    changed = load_config(file, ["trainer.optimizer.learning_rate=3e-4", "trainer.megatron_extra={a: 1e-2}"])
    assert changed.trainer.optimizer.learning_rate == 3e-4
    assert changed.trainer.megatron_extra == {"a": 1e-2}


def test_the_last_override_wins(file):
    assert load_config(file, ["trainer.steps=3", "trainer.steps=4"]).trainer.steps == 4


def test_a_section_written_in_part_keeps_its_other_defaults(file):
    config = load_config(
        file,
        ["sft.optimizer.weight_decay=0.5", "search.engine.threads=2", "buffer.sampler.recent_age_steps=9"],
    )
    assert config.sft.optimizer.learning_rate == 1e-3 and config.sft.optimizer.weight_decay == 0.5
    assert config.search.engine.kind == "vllm" and config.search.engine.threads == 2
    assert config.buffer.sampler.kind == "reward_recency" and config.buffer.sampler.recent_probability == 0.95


def test_a_mapping_as_override_replaces_the_whole_section(file):
    loss = load_config(file, ["objective.loss={kind: tba_prime, beta: 2}"]).objective.loss
    assert (loss.kind, loss.beta) == ("tba_prime", 2.0)


def test_every_problem_is_reported_at_once_with_file_line_key_and_value(tmp_path):
    text = MINIMAL.replace("kind: copy", "kind: cpy").replace("beta: 0.1", "beta: -1\n    alpha: 2")
    assert problems_of(tmp_path, text + "sft:\n  steps: many\n") == [
        "F:6: task.kind = cpy: unknown; did you mean copy",
        "F:16: sft.steps = many: should be a valid integer, unable to parse string as an integer",
        "F:13: objective.loss.beta = -1: should be greater than or equal to 0.000000001",
        "F:14: objective.loss.alpha = 2: unknown key; the keys here are beta, beta_schedule, kind",
    ]


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("trainer.setps=1", "did you mean trainer.steps"),
        ("trainer.learnig_rate=1", "did you mean trainer.optimizer.learning_rate"),
        ("trainer.learning_rate=1", "it exists as trainer.optimizer.learning_rate"),
        ("trainer.max_new_tokens=1", "it exists as search.max_new_tokens"),
        ("trianer.steps=1", "did you mean trainer"),
    ],
)
def test_an_unknown_key_names_the_key_that_was_meant(file, override, meant):
    (line,) = problems(file, override)
    assert line.startswith(f"override '{override}': ") and line.endswith("unknown key; " + meant)


def test_changing_the_kind_reports_the_keys_of_the_former_kind(tmp_path):
    text = MINIMAL.replace("kind: copy", "kind: arithmetic\n  max_left: 9")
    assert problems_of(tmp_path, text, "task.kind=copy") == [
        "F:7: task.max_left = 9: unknown key; it belongs to kind arithmetic, but task.kind is copy"
    ]


def test_a_missing_key_is_reported_at_the_section_that_lacks_it(tmp_path):
    text = "run:\n  seed: 1\nmodel: {path: m}\ntask: {kind: copy}\nobjective: {loss: {beta: 1}}\n"
    assert problems_of(tmp_path, text) == [
        "F:1: run.folder: missing",
        "F: trainer: missing",
        "F:5: objective.loss.kind: missing; choose one of tb_vargrad, tba_prime, tb_learned_z, kimi_k15, kimi_k2, "
        "oapl, rloo, proximal_rloo, ppo_clip, grpo, dr_grpo, online_dpo",
    ]


def test_a_key_written_twice_is_refused(tmp_path):
    assert problems_of(tmp_path, MINIMAL + "run:\n  folder: y\n") == ["F:14: run: written twice, first at F:1"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("run:\n\tfolder: x\n", "F:2: a tab; YAML is indented with spaces"),
        ("run: [1\n", "F:2: expected ',' or ']', but got '<stream end>'"),
        ("- 1\n", "F: not a mapping; a configuration is made of 'section:' blocks"),
    ],
)
def test_what_is_not_a_yaml_mapping_is_one_clear_problem(tmp_path, text, problem):
    assert problems_of(tmp_path, text) == [problem]


def test_an_empty_file_names_the_sections(tmp_path):
    (line,) = problems_of(tmp_path, "# nothing\n")
    assert line.startswith("F: empty; a configuration has the sections run, model, ")


def test_a_missing_file_is_one_clear_problem(tmp_path):
    assert problems(tmp_path / "no.yaml") == [f"{tmp_path / 'no.yaml'}: No such file or directory"]


def test_an_alias_that_holds_itself_is_refused(tmp_path):
    assert "F:14: extra.b: an alias that holds itself" in problems_of(tmp_path, MINIMAL + "extra: &x {b: *x}\n")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("trainer.steps", "not of the form section.key=value"),
        ("trainer..steps=1", "not of the form section.key=value"),
        ("run.folder.x=1", "run.folder is a value, not a section"),
        ("trainer.steps=[1", "the value is not YAML: expected ',' or ']', but got '<stream end>'"),
        ("trainer.steps=yes", "trainer.steps = true: should be a number"),
        ("run.folder=", "run.folder = nothing: is not a valid path"),
        ("model=3", "model = 3: should be a section with the keys path, init, max_length"),
    ],
)
def test_a_bad_override_is_quoted(file, override, problem):
    assert problems(file, override) == [f"override {override!r}: {problem}"]


def test_a_rule_across_sections_is_placed_at_its_key_or_at_the_override_that_broke_it(tmp_path):
    text = MINIMAL + "search:\n  max_age_steps: 1.0\n  max_new_tokens: 2000\n"
    (line,) = problems_of(tmp_path, text)
    assert line.startswith("F:16: search.max_new_tokens: 2000 leaves no room")
    (line,) = problems_of(tmp_path, text, "search.max_new_tokens=1", "model.max_length=1")
    assert line.startswith("override 'search.max_new_tokens=1': search.max_new_tokens: 1 leaves no room")
    (line,) = problems_of(tmp_path, text, "model.max_length=1500")
    assert line.startswith("override 'model.max_length=1500': search.max_new_tokens: 2000 leaves no room")


def test_the_dumped_tree_loads_back_equal(file, tmp_path):
    config = load_config(file, ["trainer.optimizer.adam_eps=1e-15", "trainer.megatron_extra={x: [1, 2.5, no]}"])
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config


def test_the_dumped_tree_holds_every_key(file):
    tree = yaml.safe_load(dump_config(load_config(file)))
    assert list(tree) == list(Config.model_fields)


def test_a_run_folder_keeps_its_configuration_and_refuses_another(file, tmp_path):
    folder = tmp_path / "runs" / "x"
    store_config(load_config(file), folder)
    store_config(load_config(file), folder)
    other = load_config(file, ["objective.loss.beta=0.5", "objective.loss.kind=tba_prime", "run.seed=3"])
    with pytest.raises(RunFolderError) as caught:
        store_config(other, folder)
    assert str(caught.value) == (
        f"run folder {folder} holds another configuration: run.seed is 0 there and 3 here, "
        f"objective.loss.beta is 0.1 there and 0.5 here, objective.loss.kind is tb_vargrad there and tba_prime here; "
        f"choose another run.folder or remove this one"
    )
    assert load_config(folder / "config.yaml") == load_config(file)


def test_what_leaves_the_learning_problem_alone_may_change_between_attempts(file, tmp_path):
    store_config(load_config(file), tmp_path / "r")
    longer = load_config(
        file,
        [
            *("trainer.steps=999", "metrics.tensorboard=false", "transport.host=node7", "search.engine.threads=4"),
            *("launch.searcher_restarts=9", "search.sources={hot: {temperature: 1.5}}", "search.epochs=3"),
            *("search.source=hot", "search.absent_limit_s=90", "transport.rendezvous.kind=folder"),
        ],
    )
    store_config(longer, tmp_path / "r")
    assert load_config(tmp_path / "r" / "config.yaml") == longer
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["config.yaml"]


TEMPERATURE_LINE = "search.temperature_schedule={kind: linear, target: 0.5, target_step: 9, stop_step: 9}"


@pytest.mark.parametrize(
    "key", ["search.temperature=0.5", TEMPERATURE_LINE, "search.top_p=0.5", "search.completions_per_prompt=4"]
)
def test_how_the_main_searchers_sample_stays(key, file, tmp_path):
    store_config(load_config(file), tmp_path / "r")
    with pytest.raises(RunFolderError, match="holds another configuration"):
        store_config(load_config(file, [key]), tmp_path / "r")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["transport.control_port=80"], "transport.control_port: 80 has no effect with transport.sockets ipc"),
        (["transport.rendezvous={kind: address, key_file: k}"], "searchers dial transport.host"),
        (["transport.heartbeat_s=30"], "is more than a third of transport.lease_s"),
        (
            ["transport.patience_s=59"],
            "transport.patience_s: 59 is below transport.lease_s (60), so that a searcher would give up as soon as it "
            "misses its trainer; raise it to at least 60",
        ),
        (["search.source=hot"], "search.source: hot is none of search.sources (which is empty)"),
        (["search.sources={searcher: {}}"], "searcher is the name of those that search.searchers counts"),
        (["weights.mode=sync", "search.sources={old: {policy: {kind: lagging, steps: 5}}}"], "which old of"),
        (["search.absent_warning_s=9", "search.absent_limit_s=5"], "comes after search.absent_limit_s"),
        (["search.sources={Hot!: {}}"], "search.sources"),
    ],
)
def test_settings_of_searchers_that_cannot_work_are_refused(overrides, message, file):
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["weights.timeout_s", "trainer.distributed_timeout_s", "buffer.segments.fsync_every_s"])
def test_no_wait_is_longer_than_torch_and_threads_can_count(key, file):
    (problem,) = problems(file, f"{key}=1e10")
    assert problem.endswith(f"{key} = 10000000000.0: should be less than or equal to 604800")
    load_config(file, [f"{key}=604800"])


@pytest.mark.parametrize("key", ["lease_s", "patience_s", "resend_s"])
def test_waits_that_only_a_clock_is_compared_with_have_no_bound(key, file):
    load_config(file, ["transport.patience_s=1e300", f"transport.{key}=1e300"])


GRPO, BEHAVIOUR = "objective.loss={kind: grpo}", "search.behaviour_logprobs=true"
BY_SEARCHERS = "objective.reference.placement=searcher"
DPO, RLOO = "objective.loss={kind: online_dpo}", "objective.loss={kind: rloo}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [GRPO],
            "objective.loss: grpo reads the log-probs of the policy that wrote a completion; set search.behaviour",
        ),
        (
            [RLOO, "objective.guards.lost_negative_ratio=0.5"],
            "objective.guards.lost_negative_ratio: it reads the log-pr",
        ),
        ([GRPO, BEHAVIOUR, "search.temperature=0.7"], "sampled as objective.temperature (1) says"),
        ([GRPO, BEHAVIOUR, "search.top_p=0.9"], "top_p to 1"),
        ([GRPO, BEHAVIOUR, "search.sources={hot: {temperature: 1.5}}"], "and those of search.sources"),
        ([GRPO, BEHAVIOUR, "search.engine={kind: fake}"], "which the fake engine has not; choose vllm"),
        ([DPO, "objective.guards.negative_weight=0.5"], "online_dpo compares completions and has no advantages"),
        (
            [
                "objective.loss={kind: proximal_rloo}",
                BEHAVIOUR,
                "objective.guards={by_token: true, lost_negative_ratio: 0.5}",
            ],
            "proximal_rloo has one ratio for a whole completion",
        ),
        (
            [RLOO, "objective.reference.reset_every_steps=5"],
            "reset_every_steps: 5 has no effect, because objective.loss",
        ),
        ([RLOO, "objective.reference.placement=host"], "placement: host has no effect, because objective.loss (rloo)"),
        (["objective.loss={kind: kimi_k15, tau: 0.1}"], "objective.reference.reset_every_steps: kimi_k15 is held to"),
        (["objective.guards.by_token=true"], "it has no effect without lost_negative_ratio"),
        (["objective.loss={kind: ppo_clip, dual_clip: 1}", BEHAVIOUR], "objective.loss.dual_clip: at 1 or less"),
        ([RLOO, BY_SEARCHERS], "searcher has no effect, because objective.loss (rloo) reads no reference; leave it"),
        (
            [BY_SEARCHERS, "objective.reference.reset_every_steps=50"],
            "objective.reference.placement: searcher holds the start model and cannot follow",
        ),
        (
            ["objective.loss={kind: grpo, beta: 0.1}", BEHAVIOUR, BY_SEARCHERS],
            "objective.reference.placement: searcher gives one log-prob a completion, and objective.loss (grpo with",
        ),
        (
            [BY_SEARCHERS, "trainer.data={kind: recording, folder: r}"],
            "because a recording (trainer.data) has no log-probs of the reference; choose device",
        ),
    ],
)
def test_objectives_that_cannot_work_are_refused(overrides, message, file):
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    (problem,) = caught.value.problems
    assert message in problem


def test_a_schedule_whose_phases_do_not_fit_is_one_line(file):
    schedule = "trainer.optimizer.schedule={kind: wsd, warmup_steps: 60, decay_steps: 100, anneal_steps: 50}"
    with pytest.raises(ConfigError) as caught:
        load_config(file, [schedule])
    (problem,) = caught.value.problems
    assert "more than decay_steps (100); raise decay_steps to at least 110" in problem


def test_objectives_with_what_they_read_are_accepted(file):
    load_config(file, [GRPO, BEHAVIOUR])
    load_config(file, [GRPO, "trainer.data={kind: recording, folder: r}", "search.engine={kind: fake}"])
    load_config(file, [GRPO, BEHAVIOUR, "search.temperature=0.7", "objective.temperature=0.7"])
    load_config(file, ["objective.loss={kind: kimi_k15, tau: 0.1}", "objective.reference.reset_every_steps=50"])
    load_config(file, [RLOO, "search.top_p=0.9", "objective.guards.negative_weight=0.3"])
    load_config(file, [BY_SEARCHERS, "objective.temperature=0.7"])
    load_config(file, [BY_SEARCHERS, "objective.loss={kind: rloo, beta: 0.1}"])


def test_a_run_may_go_on_with_other_parallel_sizes(file, tmp_path):
    sizes = ["tensor_parallel=2", "pipeline_parallel=2", "data_parallel=2", "sequence_parallel=true", "recompute=full"]
    uneven = "megatron_extra={num_layers_in_first_pipeline_stage: 2}"
    for overrides in ([], sizes, [uneven], []):
        config = load_config(file, [f"trainer.{override}" for override in overrides])
        store_config(config, tmp_path / "r")
        assert load_config(tmp_path / "r" / "config.yaml") == config
    other = load_config(file, ["trainer.megatron_extra={attention_softmax_in_fp32: true}"])
    with pytest.raises(RunFolderError, match=r"trainer\.megatron_extra\.attention_softmax_in_fp32 is "):
        store_config(other, tmp_path / "r")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["trainer.microbatch_tokens=100"],
            "trainer.microbatch_tokens: 100 cannot hold one sequence of model.max_length",
        ),
        (["trainer.virtual_pipeline=2"], "trainer.virtual_pipeline: 2 needs at least two pipeline stages"),
        (["sft.batch_size=1", "sft.steps=1", "trainer.data_parallel=2"], "sft.batch_size: 1 leaves some of the"),
    ],
)
def test_sizes_that_contradict_each_other_are_one_line(overrides, words, file):
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    (problem,) = caught.value.problems
    assert words in problem and problem.startswith(f"override '{overrides[0]}': ")


def test_a_run_folder_that_cannot_be_used_is_one_clear_line(file, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written: File exists"):
        store_config(load_config(file), tmp_path / "taken")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text("trainer: 3\n")
    with pytest.raises(RunFolderError, match="cannot be read"):
        store_config(load_config(file), tmp_path / "r")


def test_a_budget_of_bytes_that_cannot_hold_a_step_is_one_line():
    with pytest.raises(ConfigError, match=r"buffer\.capacity_bytes: 1000 cannot hold \d+ prompts of \d+ completions"):
        load_config(Path(__file__).parents[2] / "configs" / "quickstart.yaml", ["buffer.capacity_bytes=1000"])

"""The run's configuration: one YAML file, `key=value` arguments, and errors that name the place and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.config import known_keys, load_config
from dataflow.errors import ConfigError
from dataflow.pipeline import Pipeline
from stages.advantage import AdvantageConfig
from stages.algorithms.catalog import ESTIMATORS
from stages.recipes import RLConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built-in prompt files are made in a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def prompt_file(folder: Path, count: int) -> Path:
    path = folder / f"prompts{count}.jsonl"
    rows = [{"prompt": f"{row}+1=", "ground_truth": row + 1} for row in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(folder: Path, text: str = "{}", *overrides: str) -> Any:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    config, _ = load_config(path, overrides, default=path)
    return config


def build(folder: Path, *overrides: str, prompts: int = 10) -> Pipeline:
    path = folder / "run.yaml"
    path.write_text("{}", encoding="utf-8")
    config, recipe = load_config(path, [f"data.train={prompt_file(folder, prompts)}", *overrides], default=path)
    pipeline = recipe.build(config)
    pipeline.check()
    return pipeline


# Reading


def test_an_argument_replaces_the_files_value_and_the_rest_keeps_its_default(tmp_path: Path) -> None:
    config = load(tmp_path, "rollout: {n: 2, max_tokens: 9}", "rollout.n=5", "estimator=grpo")
    assert (config.rollout.n, config.rollout.max_tokens, config.estimator) == (5, 9, "grpo")
    assert config.rollout.temperature == 1.0


def test_arguments_are_yaml(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "{}",
        "limits.max_rows=null",
        "run.save_model=false",
        "update.lr=1.0e-5",
        "data.train=[a.jsonl, b.jsonl]",
        'stages=[{use: "count.py:count", workers: 2}]',
    )
    assert (config.limits.max_rows, config.run.save_model, config.update.lr) == (None, False, 1e-5)
    assert config.data.train == ["a.jsonl", "b.jsonl"]
    (spec,) = config.own_stages()
    assert (spec.use, spec.settings["workers"], spec.where) == ("count.py:count", 2, "stages[0]")


def test_without_a_file_the_default_is_read(tmp_path: Path) -> None:
    default = tmp_path / "default.yaml"
    default.write_text("rollout: {n: 3}")
    config, _ = load_config(None, [], default)
    assert isinstance(config, RLConfig)
    assert config.rollout.n == 3


def test_a_configuration_cannot_be_changed(tmp_path: Path) -> None:
    config = load(tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        config.rollout.n = 3


def test_every_key_has_a_meaning_in_one_line() -> None:
    keys = known_keys(RLConfig)
    assert {"rollout.n", "data.train", "limits.max_rows", "estimator"} <= set(keys)
    assert [key for key, meaning in keys.items() if not meaning.strip() or "\n" in meaning] == []


# Faults


def test_C01_a_misspelt_key_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "estimater: rloo\nrollout-n: 8", "rollout.temprature=0.7")
    message = str(caught.value)
    assert str(tmp_path / "run.yaml") in message
    assert "unknown key 'estimater'; did you mean 'estimator'?" in message
    assert "unknown key 'rollout-n'; did you mean 'rollout.n'?" in message
    assert "unknown key 'rollout.temprature'; did you mean 'rollout.temperature'?" in message


def test_C01_a_key_in_the_wrong_section_is_refused_with_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'advantage\.estimater'|unknown key 'advantage'"):
        load(tmp_path, "advantage: {estimater: rloo}")
    with pytest.raises(ConfigError, match=r"unknown key 'rollout\.grad_clip'; did you mean 'update\.grad_clip'"):
        load(tmp_path, "rollout: {grad_clip: 1.0}")


def test_an_unknown_key_that_is_near_no_other_is_refused_with_those_of_its_section(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'queue\.zzzzzz'; known keys here: queue\.storage_units, "):
        load(tmp_path, "queue: {zzzzzz: 1}")


def test_C01_an_unknown_estimator_is_refused_with_all_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "estimator: remaxx")
    assert "estimator: unknown name 'remaxx'; did you mean 'remax'? the estimators are: remax, grpo" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("update.loss=pg", r"update\W+loss: unknown name 'pg'; .*the losses are: ppo_clip, policy_gradient"),
        ("update.aggregation=mean", r"update\W+aggregation: unknown name 'mean'; .*token-mean"),
        ("rollout.n=zero", r"rollout\.n: .*integer.*, got 'zero'"),
        ("rollout.n=0", r"rollout\.n: .*greater than or equal to 1, got 0"),
        ("data.overlong=trim", r"data\.overlong: .*'drop', 'cut_left', 'cut_right' or 'error'.*, got 'trim'"),
        ("rollout.top_p=1.5", r"rollout\.top_p: .*less than or equal to 1"),
    ],
)
def test_a_wrong_value_is_refused_under_its_key_with_what_came(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, "{}", override)


@pytest.mark.parametrize("temperature", ["0", "0.0", "-0.1"])
def test_O11_a_temperature_of_zero_or_less_is_refused_for_sampled_rows(tmp_path: Path, temperature: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.temperature: .*greater than or equal to 0.01"):
        load(tmp_path, "{}", f"rollout.temperature={temperature}")


def test_O11_greedy_rows_beside_rows_sampled_at_temperature_one_are_accepted(tmp_path: Path) -> None:
    pipeline = build(tmp_path, "estimator=remax", "rollout.temperature=1.0")
    assert pipeline.specs[0].options["greedy_baseline"] is True
    assert pipeline.specs[1].options["temperature"] == 1.0


def test_remax_without_greedy_rows_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'remax' compares with a greedy session.*remove that line"):
        load(tmp_path, "estimator: remax\nbaseline: {greedy: false}")


NAMED = {"gdpo": ["reward_keys=[correct]"]}


@pytest.mark.parametrize("estimator", [name for name, needs in ESTIMATORS.items() if needs.min_group > 1])
def test_A01_a_group_estimator_with_one_session_per_prompt_is_refused(tmp_path: Path, estimator: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{estimator}' compares at least 2 sessions.*Raise rollout\.n"):
        load(tmp_path, "{}", f"estimator={estimator}", "rollout.n=1", *NAMED.get(estimator, ()))
    load(tmp_path, "{}", "estimator=remax", "rollout.n=1")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("[1, 2]", (), r"run\.yaml: expected a mapping of sections, got a list"),
        ("just text", (), r"run\.yaml: "),
        ("rollout: {n: [", (), r"run\.yaml"),
        ("{}", ("rollout.n",), "argument 'rollout.n': expected key=value, such as"),
        ("{}", ("=3",), "argument '=3': expected key=value"),
        ("recipe: no.such:thing", (), "recipe: 'no.such' cannot be imported"),
        ("recipe: dataflow.config:load_config", (), "is no dataflow Recipe"),
        ("rollout: 3", (), "rollout: .*got 3"),
    ],
)
def test_what_is_no_configuration_is_refused_with_its_place(
    tmp_path: Path, text: str, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text, *overrides)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file '.*none\.yaml'"):
        load_config(tmp_path / "none.yaml", [], tmp_path / "default.yaml")


# The RL recipe


def test_remax_builds_a_join_and_grpo_a_pipeline_without_greedy_rows(tmp_path: Path) -> None:
    remax = build(tmp_path, "estimator=remax")
    assert list(remax.stages) == ["source", "rollout", "reward", "baseline_join", "advantage", "update"]
    assert remax.plans["baseline_join"].granularity == "join"
    assert remax.plans["update"].kinds == {"sampled"}
    assert remax.plans["update"].one_owner
    grpo = build(tmp_path, "estimator=grpo")
    assert list(grpo.stages) == ["source", "rollout", "reward", "advantage", "update"]
    assert (grpo.plans["advantage"].granularity, grpo.plans["advantage"].min_group) == ("group", 2)
    assert grpo.specs[0].options["greedy_baseline"] is False


@pytest.mark.parametrize(
    ("estimator", "column"),
    [("gae", "values"), ("remax_clipped", "ref_log_probs"), ("optimal_token_baseline", "sum_pi_squared")],
)
def test_an_estimator_brings_the_stage_that_writes_what_it_reads(tmp_path: Path, estimator: str, column: str) -> None:
    pipeline = build(tmp_path, f"estimator={estimator}")
    assert pipeline.producers[column] == column
    assert column in pipeline.plans["advantage"].depends_on
    # Greedy sessions are compared with, and looked at by nobody.
    assert pipeline.plans[column].kinds == {"sampled"}
    assert (pipeline.build("update").config.critic is not None) == (column == "values")
    assert "values" not in build(tmp_path, "estimator=grpo").stages


@pytest.mark.parametrize(
    ("change", "reader"),
    [("kl_in_reward={}", "advantage"), ("update.kl_loss={}", "update")],
)
def test_a_penalty_on_the_distance_to_the_initial_policy_brings_its_log_probabilities(
    tmp_path: Path, change: str, reader: str
) -> None:
    pipeline = build(tmp_path, change)
    assert "ref_log_probs" in pipeline.stages[reader].reads
    assert "ref_log_probs" in pipeline.stages
    # With an adapter, the policy without it is the initial one.
    if reader == "update":
        assert "ref_log_probs" not in build(tmp_path, change, "update.lora={}").stages


def test_rae_builds_the_running_means_without_greedy_rows_and_trains_after_them(tmp_path: Path) -> None:
    pipeline = build(tmp_path, "estimator=rae", "baseline.ema_decay=0.5", "max_staleness=2")
    assert list(pipeline.stages) == ["source", "rollout", "reward", "advantage", "return_mean", "update"]
    assert pipeline.plans["return_mean"].depends_on == ("reward", "rollout", "source", "advantage")
    assert "return_mean" in pipeline.plans["update"].depends_on
    assert pipeline.specs[0].options["greedy_baseline"] is False
    advantage = pipeline.stages["advantage"].config
    assert isinstance(advantage, AdvantageConfig)
    assert (advantage.ema_decay, advantage.max_staleness) == (0.5, 2)


def test_the_options_of_the_estimator_reach_the_stage(tmp_path: Path) -> None:
    options = build(tmp_path, "estimator=reinforce_plus_plus", "estimator_options.gamma=0.9").stages["advantage"].config
    assert isinstance(options, AdvantageConfig)
    assert options.options == {"gamma": 0.9}
    named = build(tmp_path, "estimator=gdpo", "reward_keys={correct: 1, format: 0.5}").stages["advantage"].config
    assert isinstance(named, AdvantageConfig)
    assert named.reward_keys == {"correct": 1.0, "format": 0.5}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("estimator=gae", "estimator_options.gama=1"), "estimator_options: unknown name 'gama'; did you mean 'gamma'"),
        (
            ("estimator=gae", "estimator_options.lam=2"),
            r"estimator_options: lam: gae expects a number in \[0, 1\], got 2",
        ),
        (("estimator=gae", "estimator_options.lam=high"), r"estimator_options\.lam: .*number.*, got 'high'"),
        (("estimator=grpo", "estimator_options.gamma=1"), "estimator_options: .*the options of grpo are: none"),
        (("estimator=gdpo",), r"'gdpo' compares named rewards; name them, such as reward_keys=\[correct, format\]"),
        (("estimator=grpo", "reward_keys=[a]"), "'grpo' takes no named rewards; remove reward_keys, or use gdpo"),
        (("estimator=nowhere:mine",), "estimator: 'nowhere' cannot be imported: ModuleNotFoundError"),
        (("estimator=stages.recipes:rl",), r"estimator: 'stages\.recipes:rl' is a Recipe; expected a .*EstimatorNeeds"),
    ],
)
def test_what_does_not_fit_the_estimator_is_refused_under_its_key(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, "{}", *overrides)


def test_an_estimator_of_the_users_own_is_checked_without_its_function(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from stages.algorithms.catalog import EstimatorNeeds\n"
        "estimator = EstimatorNeeds(\n"
        "    'mine', 'group', ('token_rewards', 'mask', 'groups', 'valid', 'ref_log_probs'), 'not.there:it', '',\n"
        "    min_group=3, options={'beta': 0.5}, ranges={'beta': (0, 1)},\n"
        ")\n"
    )
    named = f"estimator={file}:estimator"
    with pytest.raises(ConfigError, match=r"mine\.py:estimator' compares at least 3 sessions"):
        load(tmp_path, "{}", named, "rollout.n=2")
    with pytest.raises(ConfigError, match="estimator_options: beta: mine expects"):
        load(tmp_path, "{}", named, "estimator_options.beta=2")
    assert "ref_log_probs" in build(tmp_path, named).stages


@pytest.mark.parametrize(("prompts", "windows"), [(3, 1), (8, 1), (10, 2), (16, 2), (17, 3)])
def test_D01_every_prompt_is_in_a_window_of_the_epoch(tmp_path: Path, prompts: int, windows: int) -> None:
    pipeline = build(tmp_path, "data.prompts_per_window=8", "epochs=1", prompts=prompts)
    assert pipeline.windows == windows


def test_the_number_of_windows_may_be_given_instead_of_epochs(tmp_path: Path) -> None:
    assert build(tmp_path, "data.prompts_per_window=4", "epochs=3").windows == 9
    assert build(tmp_path, "data.prompts_per_window=4", "epochs=3", "windows=5").windows == 5


def test_the_worst_case_of_a_window_counts_prompt_rows_and_all_sessions(tmp_path: Path) -> None:
    size = "data.prompts_per_window=4"
    # 4 uids x (1 prompt row + 3 sessions); with greedy rows, one more of each.
    assert build(tmp_path, size, "estimator=grpo", "rollout.n=3").rows_per_window == 16
    assert build(tmp_path, size, "estimator=remax", "rollout.n=3").rows_per_window == 24
    # No draw is larger than the data set.
    assert build(tmp_path, size, "estimator=grpo", "rollout.n=3", prompts=2).rows_per_window == 8
    # Further draws count in full, with every row of theirs.
    filtered = ("estimator=grpo", "rollout.n=3", "filter.groups=true", "filter.max_draws=2")
    assert build(tmp_path, size, *filtered).most_rows == 48
    assert build(tmp_path, size, *filtered, "baseline.greedy=true").most_rows == 72


def test_filtered_groups_are_judged_before_the_advantage_and_their_windows_are_refilled(tmp_path: Path) -> None:
    pipeline = build(tmp_path, "estimator=grpo", "filter.groups=true", "data.prompts_per_window=4", prompts=10)
    assert list(pipeline.stages) == ["source", "rollout", "reward", "filter_groups", "advantage", "update"]
    plan = pipeline.plans["filter_groups"]
    assert (plan.granularity, plan.filters, plan.min_group) == ("group", True, 2)
    assert "filter_groups" in pipeline.plans["advantage"].depends_on
    assert (pipeline.prompts, pipeline.prompts_per_window, pipeline.epochs, pipeline.further_draws) == (10, 4, 1, 3)
    assert pipeline.windows == 3
    assert build(tmp_path, "estimator=grpo", "filter.groups=true", "windows=7").epochs is None


def test_without_a_filter_nothing_is_drawn_again(tmp_path: Path) -> None:
    pipeline = build(tmp_path, "estimator=grpo")
    assert (pipeline.further_draws, pipeline.most_rows) == (0, pipeline.rows_per_window)


def test_a_stage_of_the_users_own_that_filters_is_refilled_for_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataflow import Stage\n"
        "class Keep(Stage):\n    name = 'keep'\n    reads = ('response_text',)\n    filters = True\n"
    )
    pipeline = build(tmp_path, f'stages=[{{use: "{file}:Keep"}}]', "filter.max_draws=2")
    assert (pipeline.further_draws, pipeline.most_rows) == (2, 3 * pipeline.rows_per_window)


@pytest.mark.parametrize("estimator", ["remax", "reinforce"])
def test_B07_a_filter_is_refused_where_groups_without_spread_teach_something(tmp_path: Path, estimator: str) -> None:
    with pytest.raises(ConfigError, match=rf"{estimator!r} learns from them: .*choose one of: grpo, dr_grpo, rloo"):
        load(tmp_path, "filter: {groups: true}", f"estimator={estimator}")


def test_R18_a_buffer_longer_than_the_response_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"reward\.overlong\.buffer_tokens: 120 is more than rollout\.max_tokens, 100"
    ):
        load(tmp_path, "reward: {overlong: {buffer_tokens: 120}}", "rollout.max_tokens=100")
    load(tmp_path, "reward: {overlong: {buffer_tokens: 100}}", "rollout.max_tokens=100")


def test_C04_with_a_penalty_on_length_the_filter_compares_the_rewards_without_it(tmp_path: Path) -> None:
    def compared(*more: str) -> str | None:
        pipeline = build(tmp_path, "estimator=grpo", "filter.groups=true", *more)
        by = {spec.where: spec.options for spec in pipeline.specs}["filter_groups"]["by"]
        assert by is None or isinstance(by, str)
        return by

    assert compared() is None
    assert compared("reward.overlong.buffer_tokens=2") == "task_reward"
    assert compared("reward.overlong.buffer_tokens=2", "filter.by=return") == "return"


def test_refilled_windows_are_reproducible_only_where_they_are_synchronous(tmp_path: Path) -> None:
    filtered = ("estimator=grpo", "filter.groups=true")
    assert build(tmp_path, *filtered).irreproducible == ""
    assert "no spread" in build(tmp_path, *filtered).drops_by_rule
    late = build(tmp_path, *filtered, "max_staleness=1").irreproducible
    assert late == "max_staleness is 1, so that timing decides which prompts refill a window"


def test_D02_a_file_without_the_prompt_column_is_refused_with_those_found_and_the_key_that_maps_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "gsm8k.parquet"
    pq.write_table(pa.table({"question": ["1+1?"], "answer": ["2"]}), path)
    config = load(tmp_path, "{}", f"data.train={path}")
    _, recipe = load_config(tmp_path / "run.yaml", [], tmp_path)
    with pytest.raises(ConfigError) as caught:
        recipe.build(config)
    message = str(caught.value)
    assert str(path) in message
    assert "'prompt'" in message
    assert "question" in message
    assert "answer" in message
    assert "data.columns" in message


def test_a_misspelt_key_of_data_columns_is_refused_with_all_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.columns: .*its keys are prompt, ground_truth, prompt_id"):
        build(tmp_path, "data.columns.promt=question")


def test_an_unknown_reward_is_refused_with_all_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"exact_mach.*exact_match"):
        build(tmp_path, "reward.function=exact_mach")


def test_stages_of_the_users_own_are_part_of_the_graph(tmp_path: Path) -> None:
    file = tmp_path / "count.py"
    file.write_text(
        "import pyarrow as pa\nfrom dataflow import Column, stage\n"
        "@stage(reads=['response_text'], writes=[Column('words', pa.int32())])\n"
        "def count_words(batch):\n    return {'words': [0] * len(batch)}\n"
    )
    pipeline = build(tmp_path, f'stages=[{{use: "{file}:count_words", workers: 2, max_attempts: 1}}]')
    plan = pipeline.plans["count_words"]
    assert (plan.depends_on, plan.max_attempts) == (("rollout",), 1)
    assert plan.kinds == {"sampled", "baseline"}
    assert pipeline.stages["count_words"].workers == 2


def test_a_stage_can_be_given_a_process_of_its_own_from_the_configuration(tmp_path: Path) -> None:
    processes = build(tmp_path, "settings.reward.placement=graders").processes()
    assert processes["graders"] == [("reward-0", "reward")]
    assert ("reward-0", "reward") not in processes["light"]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # a dependency of reasoning-gym, when it is first compiled
@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_builds(tmp_path: Path, path: Path) -> None:
    # A configuration that leaves the prompts to the user gets some.
    own = [] if "train.parquet" not in path.read_text() else [f"data.train={prompt_file(tmp_path, 40)}"]
    config, recipe = load_config(path, own, path)
    pipeline = recipe.build(config)
    pipeline.check()
    assert pipeline.windows >= 1
    assert set(pipeline.stages) >= {"source", "rollout", "reward", "advantage", "update"}

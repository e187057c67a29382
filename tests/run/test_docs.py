"""The documents say what is true: examples run, generated pages are fresh, every key is explained and used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dataflow.config import known_keys, load_config
from dataflow.run import _default_config
from dataflow.testing import run_stage
from schemas.catalog import CATALOG, catalog_markdown
from stages.advantage import Advantage, AdvantageConfig
from stages.algorithms.catalog import (
    AGGREGATIONS,
    CORRECTION_LEVELS,
    CORRECTION_MODES,
    ESTIMATORS,
    KL_KINDS,
    LOSSES,
    REJECTION_KINDS,
    REJECTION_LEVELS,
)
from stages.recipes import RLConfig, rl
from tests.run.conftest import COUNT_STAGE

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str = "python") -> list[str]:
    """The examples of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_readmes_stage_is_the_one_that_the_runs_use() -> None:
    assert COUNT_STAGE.split() == blocks("README.md")[0].split()


def test_the_examples_of_write_a_stage_run() -> None:
    space: dict[str, Any] = {}
    for example in blocks("docs/write_a_stage.md"):
        exec(example, space)
    space["test_words_are_counted"]()
    stage = space["StartsWith"](space["PrefixConfig"](prefix="Answer:"))
    rows = run_stage(stage, [{"response_text": "Answer: 3"}, {"response_text": "3"}])
    assert [row["starts_well"] for row in rows] == [True, False]


def test_the_examples_of_baselines_run(tmp_path: Path) -> None:
    (example,) = blocks("docs/baselines.md")
    exec(example, {})
    (settings,) = blocks("docs/baselines.md", "yaml")
    path = tmp_path / "baselines.yaml"
    path.write_text(settings, encoding="utf-8")
    config, _ = load_config(path, [], path)
    assert isinstance(config, RLConfig)
    assert config.baseline.on_missing == ("leave_one_out", "ema", "drop")


def test_the_page_of_algorithms_has_every_estimator_with_its_options_and_what_it_reads() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = {}
    for line in page.partition("## Advantage estimators")[2].partition("\n## ")[0].splitlines():
        if line.startswith("| `") and not line.startswith("| `estimator`"):
            name, _, _, said, options = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name.strip("`")] = (said, options)
    assert set(rows) == set(ESTIMATORS)
    for name, needs in ESTIMATORS.items():
        said, options = rows[name]
        declared = ", ".join(f"`{option}` {default:g}" for option, default in needs.options.items())
        assert options == (declared or ("`baseline.ema_decay`" if needs.running_mean else ""))
        assert ("greedy sessions" in said) == needs.greedy_baseline
        for column in ("values", "ref_log_probs", "sum_pi_squared"):
            assert (f"`{column}`" in said) == (column in needs.inputs)
        if needs.granularity != "row":
            assert f"the {needs.granularity}" in said


def test_the_estimator_of_the_page_of_algorithms_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("docs/algorithms.md")
    Path("mine.py").write_text(example, encoding="utf-8")
    rows = [
        {"uid": "a", "response_mask": [1], "reward": reward, "reward_semantics": "trajectory", "reward_status": "ok"}
        for reward in (5.0, 0.0, 1.0)
    ]
    stage = Advantage(AdvantageConfig(estimator="mine.py:estimator"))
    written = run_stage(stage, [row | {"token_rewards": None} for row in rows])
    assert [one["advantages"].tolist() for one in written] == [[1.0], [-1.0], [-1.0]]  # 3, -2 and -1, cut


def test_the_page_of_columns_is_fresh() -> None:
    assert (ROOT / "docs" / "columns.md").read_text(encoding="utf-8") == catalog_markdown()


def test_the_correction_of_the_page_of_algorithms_is_accepted(tmp_path: Path) -> None:
    (settings,) = blocks("docs/algorithms.md", "yaml")
    path = tmp_path / "correction.yaml"
    path.write_text(settings, encoding="utf-8")
    config, _ = load_config(path, [], path)
    assert isinstance(config, RLConfig)
    assert config.update.correction is not None
    assert len(config.update.correction.reject) == 2


@pytest.mark.parametrize("name", LOSSES)
def test_the_page_of_algorithms_has_every_loss_with_its_defaults(name: str) -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    row = re.findall(rf"^\| `{name}` \| .*\|$", page, re.MULTILINE)[0]
    options = row.rsplit("|", 2)[1]
    shown = [
        f"`{option}`" + ("" if value is None else f" {value:g}") for option, value in LOSSES[name].all_options.items()
    ]
    assert re.findall(r"`\w+`(?: [\d.e-]+)?", options) == shown


@pytest.mark.parametrize(
    "names", [AGGREGATIONS, KL_KINDS, CORRECTION_LEVELS, CORRECTION_MODES, REJECTION_KINDS, REJECTION_LEVELS]
)
def test_the_page_of_algorithms_has_every_name(names: dict[str, object]) -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in page and f": {name}`" not in page] == []


def test_every_column_says_what_it_is_and_who_writes_it() -> None:
    assert all(column.doc and column.producer for column in CATALOG)
    assert len({column.name for column in CATALOG}) == len(CATALOG)


def test_every_relative_link_of_the_documents_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_key_is_explained() -> None:
    assert [key for key, meaning in known_keys(RLConfig).items() if not meaning] == []


# What each key of the recipe is set to, to see that it changes what is built.
OTHER_VALUES = {
    "estimator": "rloo",
    "estimator_options": "{gamma: 0.5}",
    "reward_keys": "[format]",
    "engine": "hf",
    "windows": "7",
    "epochs": "3",
    "max_staleness": "2",
    "colocate": "true",
    "data.train": "arithmetic",
    "data.columns": "{data_source: data_source}",
    "data.require_ground_truth": "false",
    "data.prompts_per_window": "5",
    "data.max_prompt_tokens": "11",
    "data.overlong": "error",
    "data.shuffle": "false",
    "model.path": "smollm2",
    "model.dtype": "bfloat16",
    "model.device": "cuda",
    "model.gpu_share": "1",
    "rollout.n": "3",
    "rollout.temperature": "0.5",
    "rollout.top_p": "0.5",
    "rollout.top_k": "5",
    "rollout.max_tokens": "5",
    "rollout.max_sequences": "5",
    "rollout.kv_cache_mib": "5",
    "rollout.replicas": "2",
    "rollout.deadline_s": "5",
    "rollout.max_attempts": "5",
    "rollout.probe_bound": "0.5",
    "reward.function": "numeric_match",
    "reward.options": "{ignore_case: true}",
    "reward.semantics": "step",
    "reward.timeout_s": "5",
    "reward.processes": "2",
    "reward.memory_mib": "512",
    "reward.overlong.buffer_tokens": "2",
    "reward.overlong.penalty": "0.5",
    "filter.groups": "true",
    "filter.by": "accuracy",
    "filter.min_mean": "0.1",
    "filter.max_mean": "0.9",
    "filter.max_draws": "1",
    "baseline.greedy": None,  # only one value is consistent with each estimator; see test_config
    "baseline.on_missing": "fail",
    "baseline.ema_decay": "0.5",
    "update.loss": "policy_gradient",
    "update.loss_options": "{clip_low: 0.1}",
    "update.entropy_coef": "0.01",
    "update.kl_loss": "{coef: 0.01, kind: k3+}",
    "update.old_log_probs": "recomputed",
    "update.correction": "{reject: [{kind: k3, level: seq_mean, high: 0.1}]}",
    "update.aggregation": "token-sum",
    "update.lr": "0.5",
    "update.betas": "[0.5, 0.5]",
    "update.weight_decay": "0.5",
    "update.grad_clip": "0.5",
    "update.mini_batches": "5",
    "update.epochs": "5",
    "update.micro_batch_tokens": "5",
    "update.threads": "2",
    "update.lora": "{rank: 4}",
    "critic.lr": "0.1",
    "critic.epochs": "2",
    "critic.clip": "0.1",
    "critic.grad_clip": "0.1",
    "kl_in_reward": "{coef: 0.1}",
    "update.deadline_s": "5",
    "run.save_model": "false",
    "limits.max_rows": "100000",
    "limits.max_bytes": "100000000000",
    "stages": '[{use: "stages.rewards:resolve"}]',
    "settings": "{reward: {placement: alone}}",
}
# What a key has no effect without.
FILTERED = ["estimator=grpo", "filter.groups=true"]
TOGETHER_WITH = {
    "epochs": ["windows=null"],
    **{key: ["estimator=gae"] for key in ("critic.lr", "critic.epochs", "critic.clip", "critic.grad_clip")},
    "reward.overlong.penalty": ["reward.overlong.buffer_tokens=2"],
    "filter.groups": FILTERED[:1],
    "filter.by": FILTERED,
    "filter.min_mean": FILTERED,
    "filter.max_mean": FILTERED,
    "filter.max_draws": FILTERED,
    "estimator_options": ["estimator=reinforce_plus_plus"],
    "reward_keys": ["estimator=gdpo", "reward_keys=[correct]"],
}
# Read by the runtime itself, and changed in effect by the tests of runs and of the coordinator.
OF_THE_RUNTIME = {
    "recipe",
    "run.name",
    "run.dir",
    "run.seed",
    "cluster.address",
    "cluster.start_timeout_s",
    "cluster.max_restarts",
    "faults",
    "queue.storage_units",
    "queue.timeout_s",
    "limits.lease_s",
    "limits.warn_s",
    "limits.stall_s",
    "limits.max_failures",
    "limits.max_empty_windows",
}


def test_C02_every_documented_key_is_known_to_this_test() -> None:
    assert set(known_keys(RLConfig)) == set(OTHER_VALUES) | OF_THE_RUNTIME


@pytest.mark.parametrize("key", [key for key, value in OTHER_VALUES.items() if value is not None])
def test_C02_every_key_of_the_recipe_changes_the_pipeline(key: str) -> None:
    default = _default_config()
    extra = TOGETHER_WITH.get(key, [])
    before, _ = load_config(None, extra, default)
    after, _ = load_config(None, [*extra, f"{key}={OTHER_VALUES[key]}"], default)
    assert rl.build(before) != rl.build(after)


@pytest.mark.parametrize("key", sorted(OF_THE_RUNTIME))
def test_C02_every_key_of_the_runtime_is_read_somewhere(key: str) -> None:
    sources = "".join(path.read_text() for path in (ROOT / "dataflow").glob("*.py"))
    assert re.search(rf"\.{key.rpartition('.')[2]}\b|\"{key}\"", sources)

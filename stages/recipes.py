"""The RL recipe: from one typed configuration to a pipeline. Imports neither torch nor an engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from dataflow.config import Recipe, RunConfig, Section
from dataflow.draws import windows_per_epoch
from dataflow.errors import ConfigError
from dataflow.pipeline import Pipeline, StageSpec
from schemas.prompts import PromptColumns, PromptFileError, check_prompts
from stages.advantage import KlInRewardConfig
from stages.algorithms.catalog import ESTIMATORS
from stages.algorithms.fallback import OF_SIBLINGS
from stages.baseline_join import MissingBaselineConfig
from stages.datasets import prompts_path
from stages.estimators import RewardKeys, check_reward_keys, resolve
from stages.filter_groups import BY_RULE, FilterConfig
from stages.models import MODELS, fetch_model, resolve_model
from stages.names import known
from stages.reward import TASK_REWARD, GradingConfig, OverlongConfig
from stages.rewards import resolve as resolve_reward
from stages.rollout import ENGINES, SamplingConfig
from stages.source import PromptConfig
from stages.summary import summarise
from stages.training import CriticConfig, TrainingConfig

TOKEN_BYTES = 4 + 1 + 4 * 6  # response id, mask, three log-probabilities or values, advantage, return, and one to spare
ROW_BYTES = 2048  # keys, texts and scalars of one row, generously


class DataSection(PromptConfig, Section):
    """Prompts."""

    train: str | list[str] = "tiny"
    """Prompt files (.parquet, .jsonl), or a built-in data set: `tiny`, `arithmetic`."""
    prompts_per_window: int = Field(32, ge=1)
    """Prompts per update; without refilling (filter), the last window of an epoch may have fewer."""


class ModelSection(Section):
    """The policy."""

    path: str = "tiny"
    """Model directory, hub id, or a built-in model: `tiny`, `smollm2`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in engine and learner; float32 on a CPU."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where engine and learner run."""
    gpu_share: float = Field(0.5, gt=0)
    """Share of a GPU that the learner takes, and each engine; 1 gives each a GPU of its own."""


class RolloutSection(SamplingConfig, Section):
    """Generation."""

    n: int = Field(8, ge=1)
    """Sampled sessions per prompt."""
    replicas: int = Field(1, ge=1)
    """Engines."""
    deadline_s: float = Field(900.0, gt=0)
    """Longest time for the sessions of one claim, in seconds."""
    max_attempts: int = Field(2, ge=1)
    """Failures of one session before it is given up."""


class OverlongSection(OverlongConfig, Section):
    """The penalty on responses that come near the limit of their length."""


class RewardSection(GradingConfig, Section):
    """The reward."""

    overlong: OverlongSection | None = None
    """Takes a penalty from the rewards of responses that come near the limit of their length; none is off."""


class FilterSection(FilterConfig, Section):
    """Which groups are trained on, and how often a window is refilled in their place."""

    groups: bool = False
    """Leave out prompts whose sessions all came to the same, which teach a group estimator nothing."""
    max_draws: int = Field(3, ge=0)
    """Most further draws of prompts for a window, in place of groups that were left out or lost."""


class BaselineSection(MissingBaselineConfig, Section):
    """The greedy baseline, for estimators that want one."""

    greedy: bool | None = None
    """Whether each prompt gets a greedy session; default as the estimator needs."""


class UpdateSection(TrainingConfig, Section):
    """Training."""

    deadline_s: float = Field(3600.0, gt=0)
    """Longest time of one update, in seconds."""


class CriticSection(CriticConfig, Section):
    """The critic, for estimators that need values."""


class RLConfig(RunConfig):
    """Configuration of the RL recipe."""

    estimator: str = "remax"
    """Advantage estimator: a name of docs/algorithms.md, such as remax, grpo, rloo, gae, or an import path."""
    estimator_options: dict[str, float] = {}
    """Options of the estimator, such as `gamma`."""
    reward_keys: RewardKeys = []
    """For gdpo: the named rewards that it compares, a list, or a mapping to their weights."""
    engine: str = "vllm"
    """Rollout engine: vllm, hf, or an import path."""
    windows: int | None = Field(None, ge=1)
    """How many windows to train on; default: as many as `epochs` has."""
    epochs: int = Field(1, ge=1)
    """Passes over the data, where `windows` is not set."""
    max_staleness: int = Field(0, ge=0)
    """0: synchronous, on-policy. k: rollout may run k updates ahead."""
    colocate: bool = False
    """Engine and learner share one device and take turns; the one that waits frees its memory."""
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    filter: FilterSection = FilterSection()
    baseline: BaselineSection = BaselineSection()
    update: UpdateSection = UpdateSection()
    critic: CriticSection = CriticSection()
    kl_in_reward: KlInRewardConfig | None = None
    """Penalty on the distance to the initial policy, in the reward of each token: {coef, kind}."""

    @field_validator("estimator")
    @classmethod
    def _known_estimator(cls, value: str) -> str:
        resolve(value)
        return value

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str) -> str:
        return value if ":" in value else known(value, ENGINES, "engines")

    @model_validator(mode="after")
    def _consistent(self) -> RLConfig:
        needs = resolve(self.estimator)
        try:
            needs.check(self.estimator_options)
        except ValueError as error:
            raise ValueError(f"estimator_options: {error}") from error
        check_reward_keys(needs, self.reward_keys)
        if needs.greedy_baseline and self.baseline.greedy is False:
            raise ValueError(
                f"estimator {self.estimator!r} compares with a greedy session of each prompt, but baseline.greedy is "
                "false; remove that line, or choose an estimator without a baseline (grpo, rloo, reinforce)"
            )
        if self.rollout.n < needs.min_group:
            raise ValueError(
                f"estimator {self.estimator!r} compares at least {needs.min_group} sessions of a prompt, but rollout.n "
                f"is {self.rollout.n}; every advantage would be 0. Raise rollout.n, or use remax or reinforce"
            )
        overlong, longest = self.reward.overlong, self.rollout.max_tokens
        if overlong is not None and overlong.buffer_tokens > longest:
            raise ValueError(
                f"reward.overlong.buffer_tokens: {overlong.buffer_tokens} is more than rollout.max_tokens, {longest}, "
                "so that every response would be penalised; make it smaller"
            )
        if self.filter.groups and needs.granularity != "group":
            fit = ", ".join(name for name, other in ESTIMATORS.items() if other.granularity == "group")
            raise ValueError(
                f"filter.groups leaves out prompts whose sessions all have the same return, but estimator "
                f"{self.estimator!r} learns from them: it does not compare within the group alone. Remove that line, "
                f"or choose one of: {fit}"
            )
        alone = [policy for policy in self.baseline.on_missing if policy in OF_SIBLINGS and self.rollout.n < 2]
        if needs.greedy_baseline and alone:
            raise ValueError(
                f"baseline.on_missing: {alone[0]!r} compares a session with others of its prompt, but rollout.n is "
                f"{self.rollout.n}; it would never apply. Raise rollout.n, or leave {alone[0]!r} out"
            )
        return self

    @property
    def greedy(self) -> bool:
        """Whether each prompt gets a greedy session."""
        chosen = self.baseline.greedy
        return resolve(self.estimator).greedy_baseline if chosen is None else chosen


def build(config: RLConfig) -> Pipeline:
    """Make the pipeline of an RL run.

    Raises:
        ConfigError: If the prompt files, the reward function or the sizes cannot work.
    """
    files = _prompt_files(config)
    try:
        summary = check_prompts(
            files, PromptColumns(**config.data.columns), require_ground_truth=config.data.require_ground_truth
        )
    except TypeError as error:
        raise ConfigError(
            f"data.columns: {error}; its keys are prompt, ground_truth, prompt_id, data_source"
        ) from error
    except PromptFileError as error:
        raise ConfigError(str(error)) from error
    resolve_reward(config.reward.function, config.reward.options)
    per_epoch = windows_per_epoch(summary.rows, config.data.prompts_per_window)
    drawn = min(config.data.prompts_per_window, summary.rows)
    rows = 1 + config.rollout.n + 2 * config.greedy  # of a prompt: its own, its sessions', and both of the greedy one
    tokens = config.data.max_prompt_tokens + config.rollout.max_tokens
    return Pipeline(
        specs=(*_stages(config, files, summary.rows), *config.own_stages()),
        windows=config.windows or per_epoch * config.epochs,
        rows_per_window=drawn * rows,
        bytes_per_row=ROW_BYTES + TOKEN_BYTES * tokens,
        max_staleness=config.max_staleness,
        max_rows=config.limits.max_rows,
        max_bytes=config.limits.max_bytes,
        settings=config.changes(),
        irreproducible=_irreproducible(config),
        drops_by_rule=BY_RULE,
        prompts=summary.rows,
        prompts_per_window=config.data.prompts_per_window,
        epochs=None if config.windows else config.epochs,
        max_draws=config.filter.max_draws,
    )


def _irreproducible(config: RLConfig) -> str:
    """The first setting under which a second run may differ in its last bits; see docs/model.md."""
    alone = config.engine == "vllm" or (config.engine == "hf" and config.rollout.max_sequences == 1)
    causes = {
        f"max_staleness is {config.max_staleness}, so that timing decides which prompts refill a window": (
            config.max_staleness > 0 and config.filter.groups and config.filter.max_draws > 0
        ),
        f"max_staleness is {config.max_staleness}": config.max_staleness > 0,
        f"model.device is {config.model.device}": config.model.device != "cpu",
        f"model.dtype is {config.model.dtype}": config.model.dtype != "float32",
        f"update.threads is {config.update.threads}": config.update.threads > 1,
        f"engine {config.engine!r} computes what arrives together in one batch": not alone,
    }
    return next((cause for cause, holds in causes.items() if holds), "")


def _prompt_files(config: RLConfig) -> list[str]:
    names = [config.data.train] if isinstance(config.data.train, str) else config.data.train
    return [str(prompts_path(name)) for name in names]


def _stages(config: RLConfig, files: list[str], prompts: int) -> list[StageSpec]:
    model = resolve_model(config.model.path)
    needs = resolve(config.estimator)
    data, rollout = config.data, config.rollout
    specs = [
        _spec(
            "source",
            "stages.source:Source",
            files=files,
            model=model,
            prompts=prompts,
            rollout_n=rollout.n,
            greedy_baseline=config.greedy,
            **data.model_dump(include=set(PromptConfig.model_fields)),
        ),
        _spec(
            "rollout",
            "stages.rollout:Rollout",
            {
                "workers": rollout.replicas,
                "deadline_s": rollout.deadline_s,
                "max_attempts": rollout.max_attempts,
            },
            engine=config.engine,
            model=model,
            dtype=config.model.dtype,
            device=config.model.device,
            gpu_share=config.model.gpu_share,
            max_model_len=data.max_prompt_tokens + rollout.max_tokens + 1,
            colocate=config.colocate,
            **rollout.model_dump(include=set(SamplingConfig.model_fields)),
        ),
        _spec("reward", "stages.reward:Reward", **config.reward.model_dump(), max_tokens=rollout.max_tokens),
        _spec(
            "advantage",
            "stages.advantage:Advantage",
            estimator=config.estimator,
            options=config.estimator_options,
            reward_keys=config.reward_keys,
            ema_decay=config.baseline.ema_decay,
            max_staleness=config.max_staleness,
            filtered=config.filter.groups,
            kl_in_reward=config.kl_in_reward and config.kl_in_reward.model_dump(),
        ),
        _spec(
            "update",
            "stages.update:Update",
            {"deadline_s": config.update.deadline_s},
            learner={
                "model": model,
                "dtype": config.model.dtype,
                "device": config.model.device,
                "temperature": rollout.temperature,
                "horizon": rollout.max_tokens,
                "seed": config.run.seed,
                **config.update.model_dump(exclude={"deadline_s"}),
            },
            critic=config.critic.model_dump() if "values" in needs.inputs else None,
            save_model=config.run.save_model,
            gpu_share=config.model.gpu_share,
            colocate=config.colocate,
        ),
        *_scores(config, model),
    ]
    if config.filter.groups:
        rule = config.filter.model_dump(include=set(FilterConfig.model_fields))
        if rule["by"] is None and config.reward.overlong is not None:
            rule["by"] = TASK_REWARD
        specs.insert(
            3, _spec("filter_groups", "stages.filter_groups:FilterGroups", {"min_group": needs.min_group}, **rule)
        )
    if needs.greedy_baseline:
        join = _spec(
            "baseline_join",
            "stages.baseline_join:BaselineJoin",
            **config.baseline.model_dump(include=set(MissingBaselineConfig.model_fields)),
            max_version_gap=config.max_staleness,
            max_staleness=config.max_staleness,
        )
        specs.insert(3, join)
    if needs.running_mean or (needs.greedy_baseline and "ema" in config.baseline.on_missing):
        specs.append(_spec("return_mean", "stages.return_mean:ReturnMean"))
    return specs


def _scores(config: RLConfig, model: str) -> list[StageSpec]:
    """The stages that look at responses with a model of their own, as far as the estimator or the loss needs them."""
    inputs, update = resolve(config.estimator).inputs, config.update
    reference = "ref_log_probs" in inputs or config.kl_in_reward or (update.kl_loss and update.lora is None)
    wanted = {
        "ref_log_probs": ("stages.scores:RefLogProbs", reference),
        "values": ("stages.scores:Values", "values" in inputs),
        "sum_pi_squared": ("stages.scores:SumPiSquared", "sum_pi_squared" in inputs),
    }
    options: dict[str, Any] = {
        "model": model,
        "dtype": config.model.dtype,
        "device": config.model.device,
        "gpu_share": config.model.gpu_share,
        "micro_batch_tokens": update.micro_batch_tokens,
        "temperature": config.rollout.temperature,
        "threads": update.threads,
    }
    return [_spec(name, use, **options) for name, (use, needed) in wanted.items() if needed]


def _spec(name: str, use: str, settings: dict[str, Any] | None = None, **options: Any) -> StageSpec:
    return StageSpec(use, options, settings or {}, name)


def prepare(config: RLConfig, say: Callable[[str], None]) -> None:
    """Make or fetch the model that the configuration names, if it is not there yet.

    A built-in model is made in a process of its own, so that the driver stays free of torch.

    Raises:
        ConfigError: If it could not be had.
    """
    name = config.model.path
    if name not in MODELS:
        if not Path(resolve_model(name)).is_dir():
            say(f"fetching the model {name!r} from the hub")
            fetch_model(name)
        return
    model = MODELS[name]
    if model.is_made:
        return
    say(f"making the model {name!r} (once; it is kept in {model.directory()})")
    if subprocess.run([sys.executable, "-m", model.maker], check=False).returncode:
        raise ConfigError(f"model.path: the model {name!r} could not be made; the reason is above")


rl = Recipe(RLConfig, build, prepare, summarise)

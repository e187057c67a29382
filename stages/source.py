"""The source: fills each window with prompt rows, tagged with how many sessions and how they are decoded."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from dataflow.batch import Batch
from dataflow.errors import ConfigError, Drop
from dataflow.stage import Stage, StageConfig, StageContext
from schemas.catalog import columns
from schemas.prompts import PromptColumns, PromptFileError, PromptRecord, read_prompts
from stages.models import local_model
from stages.text import load_tokenizer, prompt_ids

log = logging.getLogger(__name__)

TOO_LONG = "prompt too long"


class PromptConfig(StageConfig):
    """What a user sets of the prompts."""

    columns: dict[str, str] = {}
    """What your files call the columns prompt, ground_truth, prompt_id and data_source."""
    require_ground_truth: bool = True
    """Refuse prompts without a right answer; set it to false for rewards that need none."""
    max_prompt_tokens: int = Field(256, ge=1)
    """Longest prompt, in tokens."""
    overlong: Literal["drop", "cut_left", "cut_right", "error"] = "drop"
    """What happens to a longer prompt: drop it, keep its last or first tokens, or stop the run."""
    shuffle: bool = True
    """Whether each epoch has an order of its own, drawn from run.seed."""


class SourceConfig(PromptConfig):
    """Options of the source."""

    files: list[str]
    """Prompt files, .parquet or .jsonl."""
    model: str
    """Model whose tokenizer and chat template are used: a directory, or a hub id that is on this machine."""
    prompts: int
    """How many prompts the files have."""
    rollout_n: int
    """Sampled sessions per prompt."""
    greedy_baseline: bool
    """Whether each uid gets a greedy row beside the sampled one."""


class Source(Stage):
    """Writes the prompt rows of a draw: a slice of an epoch's order, whoever asks and however often.

    An estimator that wants a greedy baseline gets a second prompt row per uid in the same put, so that sampled and
    greedy sessions go through one rollout stage in one batch.
    """

    Config = SourceConfig
    name = "source"
    granularity = "source"
    writes = columns(
        "uid",
        "prompt_id",
        "epoch",
        "window",
        "draw",
        "__rollout_n__",
        "__do_sample__",
        "prompt",
        "prompt_ids",
        "ground_truth",
        "data_source",
        "extra",
    )
    config: SourceConfig

    def setup(self, context: StageContext) -> None:
        """Read the prompts and the tokenizer.

        Raises:
            ConfigError: If a prompt file is wrong or has changed, or a prompt is too long and `overlong` is "error".
        """
        self._seed = context.seed
        try:
            self._records = list(
                read_prompts(
                    self.config.files,
                    PromptColumns(**self.config.columns),
                    require_ground_truth=self.config.require_ground_truth,
                )
            )
        except PromptFileError as error:
            raise ConfigError(str(error)) from error
        if len(self._records) != self.config.prompts:
            raise ConfigError(
                f"data.train: {', '.join(self.config.files)} had {self.config.prompts} prompts when the run was "
                f"checked, and {len(self._records)} now; start it again"
            )
        self._tokenizer = load_tokenizer(local_model(self.config.model))
        if not getattr(self._tokenizer, "chat_template", None):
            for row, record in enumerate(self._records):
                if not isinstance(record.prompt, str):
                    raise ConfigError(
                        f"data.train: prompt {row} (id {record.prompt_id!r}) is a list of messages, but the tokenizer "
                        f"of {self.config.model} has no chat template; give text, or choose a chat model"
                    )
        if self.config.overlong == "error":
            for row, record in enumerate(self._records):
                self._encode(record, row)

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Make the prompt rows of the batch's draw. Rows with a `Drop` are counted, not written."""
        draw = batch.draw
        assert draw is not None
        rows: dict[str, list[Any]] = {column.name: [] for column in self.writes}
        for index in self._order(draw.epoch)[draw.first : draw.first + draw.count]:
            record = self._records[index]
            ids = self._encode(record, index)
            for sample in (True, False) if self.config.greedy_baseline else (True,):
                rows["uid"].append(f"{draw.epoch}-{record.prompt_id}")
                rows["prompt_id"].append(record.prompt_id)
                rows["epoch"].append(draw.epoch)
                rows["window"].append(batch.window)
                rows["draw"].append(draw.number)
                rows["__rollout_n__"].append(self.config.rollout_n if sample else 1)
                rows["__do_sample__"].append(sample)
                prompt = record.prompt
                rows["prompt"].append(prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False))
                rows["prompt_ids"].append(ids)
                rows["ground_truth"].append(record.ground_truth)
                rows["data_source"].append(record.data_source)
                rows["extra"].append(record.extra)
        return rows

    def _order(self, epoch: int) -> list[int]:
        """The prompts in the order of an epoch."""
        total = len(self._records)
        if not self.config.shuffle:
            return list(range(total))
        return [int(index) for index in np.random.default_rng([self._seed, epoch]).permutation(total)]

    def _encode(self, record: PromptRecord, row: int) -> list[int] | Drop:
        ids = prompt_ids(self._tokenizer, record.prompt)
        limit = self.config.max_prompt_tokens
        if len(ids) <= limit:
            return ids
        if self.config.overlong == "cut_left":
            return ids[-limit:]
        if self.config.overlong == "cut_right":
            return ids[:limit]
        if self.config.overlong == "error":
            raise ConfigError(
                f"data: prompt {row} (id {record.prompt_id!r}) has {len(ids)} tokens, data.max_prompt_tokens is "
                f"{limit}; raise it, or set data.overlong to drop, cut_left or cut_right"
            )
        log.warning("prompt dropped row=%d id=%s tokens=%d limit=%d", row, record.prompt_id, len(ids), limit)
        return Drop(TOO_LONG)

"""Every column that the built-in stages read or write, declared once."""

from __future__ import annotations

import pyarrow as pa

from schemas.column import Column

TOKENS = pa.list_(pa.int32())
FLOATS = pa.list_(pa.float32())
MASK = pa.list_(pa.int8())

CATALOG: tuple[Column, ...] = (
    # Identity: written by the source on prompt rows, and repeated on every row a worker writes.
    Column("uid", pa.string(), "One draw of a prompt: `{epoch}-{prompt_id}`.", producer="source"),
    Column("prompt_id", pa.string(), "Stable id of the prompt in its data set.", producer="source"),
    Column("epoch", pa.int32(), "How often the data set was read before this draw.", "passes", producer="source"),
    Column("window", pa.string(), "Name of the window (the partition).", producer="source"),
    Column("draw", pa.int32(), "Which draw of its window the prompt came with; those after 0 replace lost groups.",
           producer="source"),
    Column("__rollout_n__", pa.int32(), "How many sessions the prompt row asks for.", "sessions", producer="source"),
    Column("__do_sample__", pa.bool_(), "False asks for greedy decoding.", producer="source"),
    Column("prompt", pa.string(), "The prompt: plain text, or messages as JSON text.", producer="source"),
    Column("prompt_ids", TOKENS, "Token ids given to the engine.", shape="[P]", producer="source"),
    Column("ground_truth", pa.string(), "The right answer as JSON text; null if there is none.",
           nullable=True, producer="source"),
    Column("data_source", pa.string(), "Which data set the prompt came from.", producer="source"),
    Column("extra", pa.string(), "The data set's remaining columns as JSON text.", producer="source"),
    # Rollout.
    Column("response_ids", TOKENS, "Token ids that the engine returned, stop token included.",
           shape="[T]", producer="rollout"),
    Column("response_mask", MASK, "1 = the policy drew the token, 0 = a tool or the environment wrote it.",
           shape="[T]", producer="rollout"),
    Column("rollout_log_probs", FLOATS, "Log-probability of each token under the policy that drew it.",
           "nats", "[T]", producer="rollout"),
    Column("response_text", pa.string(), "The response as the reward sees it: end and pad tokens removed.",
           producer="rollout"),
    Column("finish_reason", pa.string(), "Why generation ended: `stop`, `length` or `abort`.", producer="rollout"),
    Column("sampling", pa.string(), "JSON text of the effective sampling parameters, seed included.",
           producer="rollout"),
    Column("engine", pa.string(), "Which engine replica answered.", producer="rollout"),
    Column("policy_version_min", pa.int32(), "Oldest policy version that drew a token of the row.",
           "updates", producer="rollout"),
    Column("policy_version_max", pa.int32(), "Newest policy version that drew a token of the row.",
           "updates", producer="rollout"),
    # Reward.
    Column("reward", pa.float32(), "Task reward; null when it could not be determined.",
           nullable=True, producer="reward"),
    Column("reward_semantics", pa.string(),
           "`trajectory`: once per session; `step`: summed over turns; `token`: see token_rewards.",
           producer="reward"),
    Column("token_rewards", FLOATS, "Reward of each token, under `token` semantics.",
           shape="[T]", nullable=True, producer="reward"),
    Column("reward_status", pa.string(), "`ok`, `timeout`, `error` or `abstain`.", producer="reward"),
    Column("reward_info", pa.string(), "JSON text: what else the scorer said, or why it failed.", producer="reward"),
    # Models beside the policy.
    Column("ref_log_probs", FLOATS, "Log-probability of each token under the reference model.",
           "nats", "[T]", nullable=True, producer="ref_log_probs"),
    Column("values", FLOATS, "What the critic expects of the return from each token on.",
           shape="[T]", nullable=True, producer="values"),
    Column("sum_pi_squared", FLOATS, "Sum over the vocabulary of the squared probabilities at each token.",
           shape="[T]", nullable=True, producer="sum_pi_squared"),
    # Filter, baseline join, advantage, update.
    Column("group_spread", pa.float32(), "Largest minus smallest of what the filter compared in the group.",
           producer="filter_groups"),
    Column("baseline", pa.float32(), "Total return of the uid's greedy session, or what stood in for it.",
           producer="baseline_join"),
    Column("baseline_source", pa.string(),
           "Where the baseline came from: `greedy`, or `leave_one_out`, `group_mean`, `ema`, `zero`.",
           producer="baseline_join"),
    Column("advantages", FLOATS, "Advantage of each token; 0 where the mask is 0.", shape="[T]", producer="advantage"),
    Column("returns", FLOATS, "Return of each token, as the estimator defines it.", shape="[T]",
           producer="advantage"),
    Column("trained_version", pa.int32(), "Policy version that the update of this row produced.",
           "updates", producer="update"),
)  # fmt: skip

_BY_NAME = {column.name: column for column in CATALOG}


def column(name: str) -> Column:
    """Look a catalogued column up by name.

    Raises:
        KeyError: If the catalogue has no such column.
    """
    return _BY_NAME[name]


def columns(*names: str) -> list[Column]:
    """Look several catalogued columns up."""
    return [_BY_NAME[name] for name in names]


def catalogued(name: str) -> Column | None:
    """Return the catalogued column of that name, or None."""
    return _BY_NAME.get(name)


def is_reserved(name: str) -> bool:
    """Whether a user's column may not have this name: it begins with ``__`` or is catalogued."""
    return name.startswith("__") or name in _BY_NAME


def catalog_markdown() -> str:
    """The catalogue as a Markdown page; `docs/columns.md` is this text."""
    lines = [
        "# Columns",
        "",
        "Made from `schemas/catalog.py` by `scripts/columns`.",
        "",
        "| column | type | shape | unit | null | producer | meaning |",
        "|---|---|---|---|---|---|---|",
    ]
    for item in CATALOG:
        null = "yes" if item.nullable else ""
        cells = (f"`{item.name}`", f"`{item.type}`", item.shape, item.unit, null, item.producer, item.doc)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"

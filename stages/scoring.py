"""Rows as padded micro-batches, and what a model says about their response tokens.

Learner, critic, reference and values stages all look at rows in this one way, so their log-probabilities differ by
weights alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class TokenRow:
    """One trajectory row.

    Attributes:
        prompt_ids: ``[P] int``.
        response_ids: ``[T] int``.
        mask: ``[T]``, 1 = policy token.
        values: Name -> ``[T]`` numbers, one per response token.
        group: What a mini-batch must not split (the uid).
        session: What a micro-batch must not split: the turns of one session are one sequence.
        current: Whether the tokens were drawn by the weights that the learner holds now.
    """

    prompt_ids: NDArray[Any]
    response_ids: NDArray[Any]
    mask: NDArray[Any]
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    group: str = ""
    session: str = ""
    current: bool = True

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def with_values(self, **values: NDArray[Any]) -> TokenRow:
        """The same row with more numbers per token, or others."""
        return replace(self, values={**self.values, **values})


@dataclass(frozen=True)
class MicroBatch:
    """Padded rows.

    Attributes:
        indices: Place of each row in the sequence that was composed.
        rows: The B rows.
        input_ids: ``[B, P+T] int64``, prompt and response, zeros behind.
        attention: ``[B, P+T] int64``, 1 = a token.
        targets: ``[B, T] int64``, the response.
        place: ``[B, T] int64``, position whose output belongs to a response token: the one before it.
        mask: ``[B, T] float32``, 1 = policy token.
        values: Name -> ``[B, T] float32``, zeros behind.
        sequences: ``[B] int64``, equal for the rows of one session.
    """

    indices: Sequence[int]
    rows: Sequence[TokenRow]
    input_ids: Tensor
    attention: Tensor
    targets: Tensor
    place: Tensor
    mask: Tensor
    values: Mapping[str, Tensor]
    sequences: Tensor


def count_tokens(rows: Iterable[TokenRow]) -> int:
    """Policy tokens of rows."""
    return int(sum(np.count_nonzero(row.mask) for row in rows))


def count_sequences(rows: Iterable[TokenRow]) -> int:
    """Sessions among rows."""
    return len({_sequence(index, row) for index, row in enumerate(rows)})


def number_sequences(rows: Sequence[TokenRow]) -> Tensor:
    """``[N] int64``, equal for the rows of one session."""
    numbers: dict[Any, int] = {}
    for index, row in enumerate(rows):
        numbers.setdefault(_sequence(index, row), len(numbers))
    return torch.tensor([numbers[_sequence(index, row)] for index, row in enumerate(rows)], dtype=torch.long)


def micro_batches(rows: Sequence[TokenRow], most_tokens: int, device: str = "cpu") -> list[MicroBatch]:
    """Compose micro-batches by length, so that padding is small and the split depends on content alone.

    Args:
        rows: With the same names in `values`; all rows of a session, or the session is cut.
        most_tokens: Most tokens in one micro-batch, padding included. A session that is longer has one of its own.
        device: Where the tensors go.
    """
    sessions: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        sessions.setdefault(_sequence(index, row), []).append(index)
    lots: list[list[int]] = []
    for session in sorted(sessions.values(), key=lambda session: max(len(rows[index]) for index in session)):
        width = max(len(rows[index]) for index in session)
        if lots and width * (len(lots[-1]) + len(session)) <= most_tokens:
            lots[-1] += session
        else:
            lots.append(list(session))
    return [_pad(lot, [rows[index] for index in lot], device) for lot in lots]


def unpad(parts: Iterable[tuple[MicroBatch, Tensor]], count: int) -> list[NDArray[np.float32]]:
    """Cut ``[B, T]`` results of micro-batches into one ``[T] float32`` per row, in the order of the rows."""
    found: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * count
    for micro, result in parts:
        for index, row, values in zip(micro.indices, micro.rows, result.detach().float().cpu().numpy(), strict=True):
            found[index] = values[: len(row.response_ids)].copy()
    return found


def response_logits(model: Any, micro: MicroBatch, temperature: float) -> Tensor:
    """Logits ``[B, T, V] float32`` that the response tokens were drawn from, divided by the temperature."""
    logits: Tensor = model(micro.input_ids, attention_mask=micro.attention, use_cache=False).logits
    picked = logits.gather(1, micro.place[:, :, None].expand(-1, -1, logits.shape[-1]))
    return picked.float() / temperature


def chosen_log_probs(logits: Tensor, micro: MicroBatch) -> Tensor:
    """Log-probabilities ``[B, T] float32``, nats, of the response tokens under `response_logits`."""
    return torch.log_softmax(logits, dim=-1).gather(-1, micro.targets[:, :, None]).squeeze(-1)


def precision(device: str, dtype: str) -> Any:
    """The arithmetic of a forward pass.

    The weights stay float32, since AdamW's small steps would round away in bfloat16; they are cast when published.
    """
    return torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32")


def _sequence(index: int, row: TokenRow) -> Any:
    return row.session or index  # a row that names no session is one


def _pad(indices: Sequence[int], rows: Sequence[TokenRow], device: str) -> MicroBatch:
    width, length = max(len(row) for row in rows), max(len(row.response_ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.zeros(len(rows), length, dtype=torch.long)
    place = torch.zeros(len(rows), length, dtype=torch.long)
    numbers = {name: torch.zeros(len(rows), length) for name in ("mask", *rows[0].values)}
    for row_number, row in enumerate(rows):
        prompt, count = len(row.prompt_ids), len(row.response_ids)
        tokens = np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64)
        ids[row_number, : prompt + count] = torch.from_numpy(tokens)
        attention[row_number, : prompt + count] = 1
        targets[row_number, :count] = torch.from_numpy(row.response_ids.astype(np.int64))
        # The output at a token is about the next one.
        place[row_number, :count] = torch.arange(prompt - 1, prompt - 1 + count)
        for name, values in {"mask": row.mask, **row.values}.items():
            numbers[name][row_number, :count] = torch.from_numpy(values.astype(np.float32))
    on_device = {name: tensor.to(device) for name, tensor in numbers.items()}
    mask = on_device.pop("mask")
    return MicroBatch(
        indices,
        rows,
        ids.to(device),
        attention.to(device),
        targets.to(device),
        place.to(device),
        mask,
        on_device,
        number_sequences(rows).to(device),
    )

"""Prompt files: what a user's parquet or jsonl file must hold, and how it becomes prompt records.

Files are streamed, never loaded whole. Every fault is refused with the file, the row, the column, what
was expected, what came and what to do. Rows are counted from 0, without blank lines.

Ids are text from here on. A row without an id gets ``{file stem}:{row}``; where two files share a stem,
the end of the path that tells them apart stands in its place. Ids are free text, separators included,
because nothing downstream parses a key to find an identity. Two rows of equal id are refused, so a
generated id never hides a given one.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.catalog import is_reserved
from schemas.prompt_values import (
    PromptValueError,
    ground_truth_text,
    id_text,
    json_text,
    plain,
    prompt_value,
    show,
    source_text,
)

_BATCH_ROWS = 1024
_BOM = b"\xef\xbb\xbf"


class PromptFileError(ValueError):
    """Raised when a prompt file cannot be used as it is. The message names the place and the remedy."""


_KEYS = ("prompt", "ground_truth", "prompt_id", "data_source")


@dataclass(frozen=True)
class PromptColumns:
    """Names that the four prompt columns have in the user's files (config: ``data.columns``).

    Only `prompt` must be there. The other three are optional in a file, but a name that was changed from
    its default must be found in at least one file.
    """

    prompt: str = "prompt"
    ground_truth: str = "ground_truth"
    prompt_id: str = "prompt_id"
    data_source: str = "data_source"


@dataclass(frozen=True)
class PromptRecord:
    """One prompt of a data set.

    Attributes:
        prompt_id: Unique among all files that are read together.
        prompt: Text, or messages: dicts that have at least a `role` and a `content`, both text.
        ground_truth: The right answer as JSON text, its type kept; None if there is none. A list means
            that any of its entries is right.
        data_source: Which data set it came from; the file's stem if the file does not say.
        extra: All remaining columns as one JSON object; nulls and NaN are left out.
    """

    prompt_id: str
    prompt: str | list[dict[str, Any]]
    ground_truth: str | None
    data_source: str
    extra: str


@dataclass(frozen=True)
class PromptSummary:
    """What `check_prompts` found.

    Attributes:
        rows: Prompts in all files together.
        files: The files, in reading order.
        columns_found: Column names of all files, in order of appearance.
    """

    rows: int
    files: tuple[str, ...]
    columns_found: tuple[str, ...]


def read_prompts(
    paths: Sequence[str | Path], columns: PromptColumns, *, require_ground_truth: bool
) -> Iterator[PromptRecord]:
    """Stream the records of prompt files, in file order and row order.

    That the files exist and have a known extension is checked at the call, the rest while reading: use
    `check_prompts` first to find every fault before any work begins.

    Args:
        paths: ``.parquet`` and ``.jsonl`` files (config: ``data.train``).
        columns: Names of the prompt columns in the files.
        require_ground_truth: Whether a row without a right answer is an error.

    Raises:
        PromptFileError: If a file or a row cannot be used.
    """
    return _Reader(paths, columns, require_ground_truth).records()


def check_prompts(paths: Sequence[str | Path], columns: PromptColumns, *, require_ground_truth: bool) -> PromptSummary:
    """Read everything once, keep nothing but the ids, and say what is there.

    Args:
        paths: As in `read_prompts`.
        columns: As in `read_prompts`.
        require_ground_truth: As in `read_prompts`.

    Raises:
        PromptFileError: At the first fault of any file.
    """
    reader = _Reader(paths, columns, require_ground_truth)
    rows = sum(1 for _ in reader.records())
    return PromptSummary(rows, tuple(str(path) for path in reader.paths), tuple(reader.found))


class _Reader:
    def __init__(self, paths: Sequence[str | Path], columns: PromptColumns, require_ground_truth: bool) -> None:
        self.paths = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        self.found: dict[str, None] = {}
        self._columns = columns
        self._mapped = dict(zip(_KEYS, astuple(columns), strict=True))
        self._required = ["prompt", "ground_truth"] if require_ground_truth else ["prompt"]
        self._ids: dict[str, int] = {}  # prompt id -> running row number over all files
        self._starts: list[int] = []  # running row number of each file's first row
        for key, name in self._mapped.items():
            if not name or name.startswith("__"):
                raise PromptFileError(
                    f"data.columns.{key}: expected the name of a column, got {name!r}. Names that begin with "
                    "'__' are reserved: rename the column in the file."
                )
        _check_paths(self.paths)
        self._labels = [_label(path, self.paths) for path in self.paths]

    def records(self) -> Iterator[PromptRecord]:
        row_count = 0
        for path, label in zip(self.paths, self._labels, strict=True):
            self._starts.append(row_count)
            rows = self._parquet(path) if path.suffix.lower() == ".parquet" else self._jsonl(path)
            for row, values in enumerate(rows):
                yield self._record(path, label, row, values)
                row_count += 1
            if row_count == self._starts[-1]:
                raise PromptFileError(f"{path}: expected at least one row, got none. Remove it from data.train.")
        self._check_renamed()

    def _parquet(self, path: Path) -> Iterator[dict[str, Any]]:
        try:
            with pq.ParquetFile(path) as file:
                names = list(file.schema_arrow.names)
                twice = sorted({name for name in names if names.count(name) > 1})
                if twice:
                    raise PromptFileError(f"{path}: column {twice[0]!r} is there more than once. Rename one of them.")
                self._admit(path, names)
                self._check_present(path, names)
                for batch in file.iter_batches(_BATCH_ROWS):
                    yield from batch.to_pylist()
        except PromptFileError:
            raise
        except (pa.ArrowException, OSError, ValueError) as cause:  # ValueError: a value Python cannot hold
            raise PromptFileError(
                f"{path}: expected a parquet file with plain values, got: {cause}. Write the file named by "
                "data.train again."
            ) from cause

    def _jsonl(self, path: Path) -> Iterator[dict[str, Any]]:
        first = True
        with path.open("rb") as file:
            # A binary file splits at \n alone; str.splitlines would also cut at U+2028, U+2029 and U+0085,
            # which may stand inside a JSON string.
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(_BOM) if number == 1 else line
                if not text.strip():
                    continue
                values = _json_object(path, number, text)
                self._admit(path, values)
                if first:
                    self._check_present(path, values)
                    first = False
                yield values

    def _admit(self, path: Path, names: Sequence[str] | Mapping[str, object]) -> None:
        """Note new column names, and refuse those that the pipeline uses itself."""
        for name in names:
            if name in self.found:
                continue
            if is_reserved(name) and name not in self._mapped.values():
                now = self._mapped.get(name)
                hint = f", or map it with data.columns.{name} (now {now!r})" if now else ""
                raise PromptFileError(
                    f"{path}: column {name!r} is reserved: expected no name that begins with '__' or that "
                    f"the pipeline writes itself. Rename the column in the file named by data.train{hint}."
                )
            self.found[name] = None

    def _check_present(self, path: Path, names: Sequence[str] | Mapping[str, object]) -> None:
        missing = [key for key in self._required if self._mapped[key] not in names]
        if missing:
            wanted = ", ".join(repr(self._mapped[key]) for key in missing)
            keys = " and ".join(f"data.columns.{key}" for key in missing)
            raise PromptFileError(
                f"{path}: expected column {wanted}, got columns {', '.join(map(repr, names)) or 'none'}. "
                f"Set {keys} to the name that the file has, or name another file in data.train."
            )

    def _check_renamed(self) -> None:
        """A changed name that no file has is a misspelling, and would otherwise pass as an absent column."""
        default = dict(zip(_KEYS, astuple(PromptColumns()), strict=True))
        for key, name in self._mapped.items():
            if name != default[key] and name not in self.found:
                raise PromptFileError(
                    f"data.columns.{key}: expected a column that one of the files in data.train has, got "
                    f"{name!r}; found {', '.join(map(repr, self.found))}. Correct the name."
                )

    def _record(self, path: Path, label: str, row: int, values: dict[str, Any]) -> PromptRecord:
        columns, key = self._columns, ""
        try:
            key = columns.prompt
            prompt = prompt_value(values.get(key))
            key = columns.ground_truth
            ground_truth = ground_truth_text(values.get(key))
            if ground_truth is None and "ground_truth" in self._required:
                raise PromptValueError("a right answer", None, "Fill it in, or drop the row: the reward needs it.")
            key = columns.prompt_id
            prompt_id = id_text(values.get(key))
            key = columns.data_source
            data_source = source_text(values.get(key))
            extra = {}
            for key in values:
                if key not in self._mapped.values() and (kept := plain(values[key])) is not None:
                    extra[plain(key)] = kept
        except PromptValueError as unfit:
            setting = next((f"data.columns.{k}" for k, name in self._mapped.items() if name == key), None)
            which = f"data.train, {setting}" if setting else "data.train"
            raise PromptFileError(f"{path}, row {row}, column {key!r}: {unfit} (config: {which})") from unfit
        given = prompt_id is not None
        prompt_id = prompt_id if prompt_id is not None else f"{label}:{row}"
        self._check_unique(path, row, prompt_id, given)
        return PromptRecord(prompt_id, prompt, ground_truth, data_source or path.stem, json_text(extra))

    def _check_unique(self, path: Path, row: int, prompt_id: str, given: bool) -> None:
        earlier = self._ids.setdefault(prompt_id, self._starts[-1] + row)
        if earlier != self._starts[-1] + row:
            file = bisect_right(self._starts, earlier) - 1
            holder = f"{self.paths[file]}, row {earlier - self._starts[file]}"
            raise PromptFileError(
                f"{path}, row {row}, column {self._columns.prompt_id!r}: expected an id of its own, got "
                f"{prompt_id!r} ({'given' if given else 'generated'}), which {holder} has already. Ids are "
                "compared as text (7 and '7' are the same): change one of them, or remove the column from "
                "the files in data.train to have ids generated (config: data.columns.prompt_id)."
            )


def _check_paths(paths: Sequence[Path]) -> None:
    if not paths:
        raise PromptFileError("data.train: expected at least one .parquet or .jsonl file, got none.")
    seen: set[Path] = set()
    for path in paths:
        suffix = path.suffix.lower()
        if suffix == ".json":
            raise PromptFileError(
                f"{path}: expected .parquet or .jsonl, got .json. Write one JSON object per line, name the "
                "file .jsonl and set data.train to it."
            )
        if suffix not in (".parquet", ".jsonl"):
            raise PromptFileError(
                f"{path}: expected .parquet or .jsonl, got {suffix or 'no extension'}. Convert the file and "
                "set data.train to the new one."
            )
        if not path.is_file():
            what = "a folder" if path.is_dir() else "nothing of that name"
            raise PromptFileError(f"{path}: expected a file, got {what}. Correct the path in data.train.")
        if path.resolve() in seen:
            raise PromptFileError(f"{path}: expected each file once, got it twice. Remove one from data.train.")
        seen.add(path.resolve())


def _label(path: Path, paths: Sequence[Path]) -> str:
    """Name a file in generated ids: its stem, or as much of the end of its path as tells it apart.

    Not the whole path, so that ids do not depend on where the data lies.
    """
    if sum(other.stem == path.stem for other in paths) == 1:
        return path.stem
    depth = 1
    while sum(other.parts[-depth:] == path.parts[-depth:] for other in paths) > 1:
        depth += 1
    return "/".join(path.parts[-depth:])


def _json_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as cause:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise PromptFileError(
            f"{path}:{number}: expected one JSON object per line in UTF-8, got {show(line)}: {cause}. "
            "Correct the line in the file named by data.train."
        ) from cause
    if not isinstance(values, dict):
        raise PromptFileError(
            f"{path}:{number}: expected a JSON object with one entry per column, got {show(values)}. "
            "Correct the line in the file named by data.train."
        )
    return values

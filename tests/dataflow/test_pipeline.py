"""The graph of stages: what is derived from the columns they name, and what is refused before anything starts."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dataflow.errors import ConfigError
from dataflow.pipeline import Pipeline, StageSpec
from dataflow.stage import Stage, StageConfig, import_object, stage
from schemas.catalog import column, columns
from schemas.column import Column


def col(name: str) -> Column:
    return Column(name, pa.float32())


class Plain(Stage):
    """A stage of which only the declarations matter."""

    def __init__(self, name: str, reads: Sequence[str], writes: Sequence[Column], **attributes: Any) -> None:
        super().__init__(StageConfig())
        self.name, self.reads, self.writes = name, reads, writes
        for attribute, value in attributes.items():
            setattr(self, attribute, value)


@dataclass(frozen=True)
class Given(StageSpec):
    stage: Stage = field(default_factory=lambda: Plain("", (), ()))

    def build(self) -> Stage:
        return self.stage


def source() -> Stage:
    return Plain("source", (), columns("uid", "__rollout_n__", "__do_sample__", "prompt"), granularity="source")


def rollout() -> Stage:
    return Plain("rollout", ["prompt"], columns("response_text"), expands=True, workers=2, placement=None)


def pipeline(*own: Stage, **options: Any) -> Pipeline:
    """A pipeline of a source, a rollout and the given stages."""
    return of(source(), rollout(), *own, **options)


def of(*stages: Stage, **options: Any) -> Pipeline:
    specs = tuple(Given(use="a test", stage=one, where=f"stages[{n}]") for n, one in enumerate(stages))
    return Pipeline(specs, **{"windows": 1, "rows_per_window": 100, **options})


def refused(match: str, *own: Stage, **options: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        pipeline(*own, **options).check()


# The graph


def keep(**attributes: Any) -> Stage:
    return Plain("keep", ["response_text"], [col("kept")], **{"granularity": "group", "filters": True, **attributes})


def test_a_stage_of_whole_windows_and_the_one_owner_come_after_the_stage_that_filters() -> None:
    graph = pipeline(
        keep(),
        Plain("mean", ["response_text"], [col("m")], granularity="window"),
        Plain("u", ["response_text"], [col("t")], one_owner=True),
        Plain("beside", ["response_text"], [col("b")]),
    )
    graph.check()
    assert graph.plans["mean"].depends_on == ("rollout", "keep")
    assert "keep" in graph.plans["u"].depends_on
    assert graph.plans["beside"].depends_on == ("rollout",)
    assert [name for name, plan in graph.plans.items() if plan.filters] == ["keep"]
    assert "  keep [group, filters] after rollout" in graph.render()


def test_two_stages_that_filter_are_refused() -> None:
    more = Plain("more", ["response_text"], [col("m")], filters=True)
    refused(r"at most one stage that filters; these are: \['keep', 'more'\]", keep(), more)


@pytest.mark.parametrize("attributes", [{"granularity": "window"}, {"one_owner": True}])
def test_a_stage_that_filters_and_needs_windows_to_be_whole_is_refused(attributes: dict[str, Any]) -> None:
    refused("stage 'keep' filters, and .*make it row, join, group or group_join", keep(**attributes))


def test_stages_are_ordered_by_their_columns_whatever_the_order_they_are_given_in() -> None:
    last = Plain("last", ["b"], [col("c")])
    first = Plain("first", ["response_text"], [col("b")])
    graph = of(last, first, rollout(), source())
    graph.check()
    assert list(graph.stages) == ["source", "rollout", "first", "last"]
    assert graph.plans["last"].depends_on == ("first", "rollout")
    assert graph.producers["b"] == "first"


def test_a_stage_that_reads_prompt_columns_alone_comes_after_rollout_which_makes_its_rows() -> None:
    graph = pipeline(Plain("difficulty", ["prompt"], [col("d")]))
    assert graph.plans["difficulty"].depends_on == ("source", "rollout")
    assert graph.plans["rollout"].depends_on == ("source",)


def test_a_stage_that_reads_nothing_comes_after_rollout() -> None:
    assert pipeline(Plain("clock", [], [col("t")])).plans["clock"].depends_on == ("rollout",)


def test_a_join_and_all_that_follows_it_apply_to_sampled_units_alone() -> None:
    graph = pipeline(
        Plain("grade", ["response_text"], [col("g")]),
        Plain("join", ["g"], [col("b")], granularity="join"),
        Plain("after", ["b", "g"], [col("a")]),
    )
    kinds = {name: set(plan.kinds) for name, plan in graph.plans.items()}
    both = {"sampled", "baseline"}
    assert kinds == {
        "source": both,
        "rollout": both,
        "grade": both,
        "join": {"sampled"},
        "after": {"sampled"},
    }


def test_what_the_coordinator_needs_is_taken_from_the_stage() -> None:
    plan = pipeline(
        Plain(
            "u", ["response_text"], [col("t")], granularity="window", batch_rows=7, deadline_s=9.0,
            max_attempts=4, min_group=3, one_owner=True,
        )
    ).plans["u"]  # fmt: skip
    assert (plan.granularity, plan.max_units, plan.deadline_s, plan.max_attempts) == ("window", 7, 9.0, 4)
    assert (plan.min_group, plan.one_owner, plan.expands) == (3, True, False)


def test_stages_of_equal_placement_share_a_process_and_others_have_their_own() -> None:
    graph = pipeline(Plain("grade", ["response_text"], [col("g")], placement="light"))
    assert graph.processes() == {
        "light": [("source-0", "source"), ("grade-0", "grade")],
        "rollout-0": [("rollout-0", "rollout")],
        "rollout-1": [("rollout-1", "rollout")],
    }


def test_a_pipeline_travels_as_specifications_without_its_built_stages(own: Path) -> None:
    specs = (Given("a test", stage=source()), Given("a test", stage=rollout()), StageSpec(f"{own}:Count"))
    graph = Pipeline(specs, windows=1, rows_per_window=1)
    graph.check()
    travelled = pickle.loads(pickle.dumps(graph))
    assert sorted(vars(travelled)) == sorted(vars(Pipeline(specs, windows=1, rows_per_window=1)))
    assert travelled.plans == graph.plans


def test_the_graph_is_drawn_with_its_columns() -> None:
    text = pipeline(Plain("grade", ["response_text"], [col("g")])).render()
    assert text.splitlines()[-3:] == [
        "  grade [row] after rollout",
        "      reads  response_text",
        "      writes g",
    ]


# What is refused


def test_a_column_that_nobody_writes_is_refused_with_the_nearest_one() -> None:
    refused(
        "stage 'grade' reads column 'respose_text', which no stage writes; did you mean 'response_text'",
        Plain("grade", ["respose_text"], [col("g")]),
    )


def test_a_column_that_is_near_no_other_is_refused_with_all_there_are() -> None:
    refused(
        "reads column 'zzz', which no stage writes; the columns are: __do_sample__, .*uid",
        Plain("grade", ["zzz"], [col("g")]),
    )


def test_a_column_of_a_built_in_stage_that_is_not_there_is_refused_under_its_owner() -> None:
    refused(
        "reads column 'baseline', which no stage writes; it is written by stage 'baseline_join', which this "
        "pipeline does not have",
        Plain("grade", ["baseline"], [col("g")]),
    )


def test_a_column_of_two_writers_is_refused_by_the_names_of_both() -> None:
    refused(
        "column 'words' has two writers, the stages 'a' and 'b'; rename the column",
        Plain("a", ["response_text"], [col("words")]),
        Plain("b", ["response_text"], [col("words")]),
    )


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (col("__mine__"), "writes column '__mine__', a reserved name; choose another name"),
        (col("reward"), "writes column 'reward', a reserved name that belongs to stage 'reward'"),
        (column("prompt"), "writes column 'prompt', a reserved name that belongs to stage 'source'"),
    ],
)
def test_a_reserved_name_is_refused_with_its_owner(written: Column, message: str) -> None:
    refused(message, Plain("mine", ["response_text"], [written]))


def test_a_column_that_steers_the_pipeline_is_refused_to_every_reader() -> None:
    refused(
        "stage 'mine' reads '__rollout_n__'; columns that begin with '__' steer the pipeline",
        Plain("mine", ["__rollout_n__"], [col("x")]),
    )


def test_a_cycle_is_refused_by_the_names_in_it() -> None:
    refused(
        "the stages a, b wait for each other's columns in a cycle",
        Plain("a", ["y"], [col("x")]),
        Plain("b", ["x"], [col("y")]),
    )


def test_a_stage_between_source_and_rollout_is_refused_as_a_cycle() -> None:
    with pytest.raises(ConfigError, match="rewrite, rollout wait for each other"):
        of(
            source(),
            Plain("rewrite", ["prompt"], [col("rewritten")]),
            Plain("rollout", ["rewritten"], columns("response_text"), expands=True),
        ).check()


def test_two_stages_of_one_name_are_refused() -> None:
    refused(
        r"stages\[3\]: there are two stages named 'a'",
        Plain("a", ["response_text"], [col("x")]),
        Plain("a", ["response_text"], [col("y")]),
    )


def test_a_pipeline_has_exactly_one_source_and_one_stage_that_expands() -> None:
    with pytest.raises(ConfigError, match="exactly one stage that expands"):
        of(source()).check()
    second = Plain("again", ["response_text"], [col("x")], expands=True)
    refused("cycle|exactly one stage that expands", second)
    refused("exactly one stage of granularity 'source'", Plain("more", (), [col("x")], granularity="source"))


def test_a_credit_limit_below_one_window_is_refused_with_what_is_enough() -> None:
    refused("limits.max_rows: 99 is smaller than .* 100 rows.*set it to at least 100", max_rows=99)
    refused("limits.max_bytes: 999 .*set it to at least 1000", max_bytes=999, bytes_per_row=10)
    pipeline(max_rows=100, max_bytes=1000, bytes_per_row=10).check()


def test_a_credit_limit_below_a_window_with_all_its_draws_is_refused_with_both_remedies() -> None:
    remedies = "set it to at least {} or make windows smaller, or allow fewer further draws"
    refused(f"worst case of 400 rows with 3 further draws.*{remedies.format(400)}", keep(), max_rows=399, max_draws=3)
    refused(f"4000 bytes with 3 .*{remedies.format(4000)}", keep(), max_bytes=3999, bytes_per_row=10, max_draws=3)
    pipeline(keep(), max_rows=400, max_draws=3).check()
    pipeline(max_rows=100, max_draws=3).check()  # without a filter there are no further draws


# From a specification to a stage

OWN_STAGE = """\
import pyarrow as pa
from pydantic import Field
from dataflow import Column, Stage, stage
from dataflow.stage import StageConfig

class CountConfig(StageConfig):
    minimum: int = Field(0, ge=0)
    mode: str = "words"

class Count(Stage):
    Config = CountConfig
    name = "count"
    reads = ("response_text",)
    writes = (Column("words", pa.int32()),)

@stage(reads=["response_text"], writes=[Column("words", pa.int32())], batch_rows=5)
def count(batch):
    return {"words": [0] * len(batch)}

nothing = 7
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN_STAGE)
    return path


def test_a_function_in_a_file_of_the_users_is_a_stage(own: Path) -> None:
    built = StageSpec(f"{own}:count", settings={"workers": 3, "batch_rows": None, "deadline_s": 5.0}).build()
    assert (built.name, built.workers, built.batch_rows, built.deadline_s) == ("count", 3, 5, 5.0)


def test_options_reach_the_stages_own_config(own: Path) -> None:
    built: Any = StageSpec(f"{own}:Count", {"minimum": 2}).build()
    assert (built.config.minimum, built.config.mode) == (2, "words")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minimum": "many"}, r"stages\[0\]\.options\.minimum: .*integer.*; the options of count are: minimum, mode"),
        ({"minimum": -1}, r"stages\[0\]\.options\.minimum: .*greater than or equal to 0"),
        ({"minimun": 1}, r"stages\[0\]\.options\.minimun: .*; the options of count are: minimum, mode"),
    ],
)
def test_a_wrong_option_is_refused_under_its_full_name(own: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StageSpec(f"{own}:Count", options, where="stages[0]").build()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("own", r"stages\[0\]\.use: expected 'package\.module:name' or 'folder/file\.py:name', got 'own'"),
        ("no.such.module:x", r"stages\[0\]\.use: 'no\.such\.module' cannot be imported: ModuleNotFoundError"),
        ("none.py:x", r"stages\[0\]\.use: 'none\.py' cannot be imported: FileNotFoundError: there is no file"),
        ("{own}:cuont", r"has no 'cuont'; it has: .*count"),
        ("{own}:nothing", r"is no stage; decorate the function with @stage or subclass Stage"),
    ],
)
def test_a_wrong_import_path_is_refused_where_it_was_written(own: Path, use: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StageSpec(use.format(own=own), where="stages[0]").build()


def test_an_error_inside_the_users_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import no_such_package\n")
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"broken\.py' cannot be imported: ModuleNotFoundError: .*no_such_package"
        ):
            import_object(f"{path}:x", "stages[0].use")


def test_a_decorated_function_keeps_its_name_its_doc_and_what_it_declares() -> None:
    @stage(reads=["response_text"], writes=[col("n")], workers=2, max_attempts=5, placement="own")
    def count_words(batch: Any) -> dict[str, Any]:
        """Count."""
        return {"n": [1.0] * len(batch)}

    built = count_words(StageConfig())
    assert (built.name, built.reads, built.workers, built.max_attempts) == ("count_words", ("response_text",), 2, 5)
    assert (built.placement, built.__doc__, [c.name for c in built.writes]) == ("own", "Count.", ["n"])


def test_the_update_comes_after_every_stage_that_does_not_read_what_it_writes() -> None:
    from dataflow.config import load_config
    from dataflow.run import _default_config
    from stages.recipes import rl

    config, _ = load_config(None, ['stages=[{use: "tests.dataflow.test_pipeline:Side"}]'], _default_config())
    plans = rl.build(config).plans
    assert "side" in plans["update"].depends_on
    assert "update" not in plans["side"].depends_on


class Side(Stage):
    """A stage beside the road to the update."""

    name = "side"
    reads = ("response_text",)
    writes = (Column("side", pa.int32()),)

from __future__ import annotations

from typing import Any, Literal

import pytest

from attnbench.core.errors import SpecError
from attnbench.core.files import dump_yaml, parse_yaml
from attnbench.experiment.axes import with_budgets
from attnbench.experiment.document import read_document
from attnbench.experiment.grid import expand, only
from attnbench.experiment.grid_file import write_grid
from attnbench.models.base import ModelSpec, models

HEAD = """\
name: some/grid
task: {kind: translation, dataset: demo}
model:
  kind: transformer
  tie: decoder
  attention:
    default:
      transform:
        kind: topk
        k: 8
"""


def cells(bench: Any, text: str, *overrides: str, seeds: tuple[int, ...] = ()) -> Any:
    return expand(read_document(bench.write(HEAD + text), overrides), seeds=seeds).cells


def fault(bench: Any, text: str, *overrides: str) -> list[str]:
    """The lines of the error, the folder of the spec taken off."""
    with pytest.raises(SpecError) as caught:
        cells(bench, text, *overrides)
    return str(caught.value).replace(f"{bench.folder}/", "").splitlines()


GRID = """\
grid:
  seeds: [3, 1]
  axes:
    model.norm: [pre, post]
    train.max_steps: [10, 20]
"""


def test_axes_multiply_in_the_order_written_and_seeds_run_fastest(bench: Any):
    found = cells(bench, GRID)
    assert [(cell.label, cell.seed) for cell in found[:5]] == [
        ("pre max_steps-10", 3), ("pre max_steps-10", 1), ("pre max_steps-20", 3), ("pre max_steps-20", 1),
        ("post max_steps-10", 3),
    ]  # fmt: skip
    assert len(found) == 8
    assert found[0].axes == {"model.norm": "pre", "train.max_steps": 10}
    assert (found[0].spec.model.norm, found[0].spec.train.max_steps, found[0].spec.seed) == ("pre", 10, 3)
    assert len({cell.digest for cell in found}) == 8


def test_every_cell_has_the_same_seeds(bench: Any):
    by_label: dict[str, list[int]] = {}
    for cell in cells(bench, GRID):
        by_label.setdefault(cell.label, []).append(cell.seed)
    assert set(map(tuple, by_label.values())) == {(3, 1)}
    assert {cell.seed for cell in cells(bench, GRID, seeds=(7,))} == {7}
    assert [cell.seed for cell in cells(bench, "seed: 5\n")] == [5]


def test_some_entries_may_have_seeds_of_their_own(bench: Any):
    text = "grid: {seeds: [1], more_seeds: {10: [1, 2], pre: [4]}, axes: {model.norm: [pre, post], "
    text += "train.max_steps: [10, 20]}}\n"
    found = [(cell.label, cell.seed) for cell in cells(bench, text)]
    assert found == [
        ("pre max_steps-10", 4), ("pre max_steps-20", 4), ("post max_steps-10", 1), ("post max_steps-10", 2),
        ("post max_steps-20", 1),
    ]  # fmt: skip
    assert {cell.seed for cell in cells(bench, text, seeds=(9,))} == {9}


def test_a_grid_without_axes_is_one_cell(bench: Any):
    (cell,) = cells(bench, "")
    assert (cell.label, cell.seed, dict(cell.axes)) == ("run", 1, {})
    assert cell.folder == f"run-s1-{cell.digest[:8]}"


@pytest.mark.parametrize(
    ("entry", "label", "axis"),
    [
        ("{label: Some label, kind: topk, k: 2}", "Some label", "Some label"),
        ("{kind: topk, k: 2}", "topk-k-2", "topk-k-2"),
        ("sparsemax", "sparsemax", "sparsemax"),
        ("{kind: topk, k: 4, ties: index}", "topk-k-4-index", "topk-k-4-index"),
        ("{kind: entmax, alpha: 1.7}", "entmax-alpha-1.7", "entmax-alpha-1.7"),
        ("{kind: entmax, alpha: learned}", "entmax-learned", "entmax-learned"),
    ],
)
def test_labels_of_mappings_and_names(bench: Any, entry: str, label: str, axis: str):
    (cell,) = cells(bench, f"grid: {{axes: {{model.attention.default.transform: [{entry}]}}}}\n")
    assert cell.label == label
    assert cell.axes == {"model.attention.default.transform": axis}
    assert cell.entry()["row"] == {"label": label, "model.attention.default.transform": axis}


@pytest.mark.parametrize(
    ("entry", "label", "axis"),
    [("8", "budget-8", 8), (".inf", "budget-inf", "inf"), ("inf", "budget-inf", "inf"), ("{label: x}", "x", "x")],
)
def test_labels_of_numbers_carry_the_name_of_the_axis(bench: Any, entry: str, label: str, axis: object):
    text = HEAD.replace("        k: 8\n", "") + f"grid: {{axes: {{model.attention.default.budget: [{entry}]}}}}\n"
    if entry.startswith("{"):
        text = text.replace("default.budget", "default").replace("{label: x}", "{label: x, budget: 3}")
    (cell,) = expand(read_document(bench.write(text))).cells
    assert cell.label == label
    assert list(cell.axes.values()) == [axis]


def test_an_infinite_budget_is_dense_attention_however_it_is_written(bench: Any):
    text = HEAD.replace("        k: 8\n", "")
    digests = {
        expand(read_document(bench.write(f"{text}grid: {{axes: {{model.attention.default.budget: [{entry}]}}}}\n")))
        .cells[0]
        .digest
        for entry in (".inf", "inf")
    }
    dense = text.replace("kind: topk", "kind: softmax")
    assert digests == {expand(read_document(bench.write(dense))).cells[0].digest}


def test_a_mapping_is_merged_into_the_node_it_names(bench: Any):
    text = """\
grid:
  axes:
    model:
      - {label: small, layers: 2, width: 64}
    model.attention.default:
      - {label: window of keys, score: scaled_dot, transform: {ties: index}}
      - {label: other, transform: {kind: entmax, alpha: 1.7}}
"""
    first, second = cells(bench, text)
    assert (first.spec.model.layers, first.spec.model.width, first.spec.model.tie) == (2, 64, "decoder")
    transform = first.spec.model.attention.cross.transform
    assert (transform.kind, transform.k, transform.ties) == ("topk", 8, "index")
    assert second.spec.model.attention.cross.transform.dump() == {"kind": "entmax", "alpha": 1.7}
    assert first.label == "small window of keys"
    assert first.folder.startswith("small-window-of-keys-s1-")


WITHIN = "model.attention.cross.transform: [softmax, {kind: topk, k: 2}]"
WHOLE = "model: [{label: GRU, kind: gru, layers: 1, width: 32}, {label: T, dropout: 0.3}]"
PIECES = "cell: [{label: a, model: {shared_norm: true}}, {label: b, train: {clip: 1.0}}]"


@pytest.mark.parametrize(("whole", "count"), [(WHOLE, 4), (PIECES, 4)])
def test_what_is_within_lies_over_the_whole_in_whatever_order(bench: Any, whole: str, count: int):
    """Or rows would be called by a mechanism that they do not run."""
    one, other = (
        cells(bench, f"grid:\n  axes:\n    {first}\n    {second}\n")
        for first, second in ((whole, WITHIN), (WITHIN, whole))
    )
    assert {cell.digest for cell in one} == {cell.digest for cell in other}
    assert len({cell.digest for cell in one}) == count
    for cell in (*one, *other):
        found = cell.spec.model.attention.cross.transform.kind
        assert found == ("topk" if cell.axes["model.attention.cross.transform"] == "topk-k-2" else "softmax")
    assert [*other[0].axes] == ["model.attention.cross.transform", whole.partition(":")[0]]  # as they are written
    assert other[-1].label.startswith("topk-k-2 ")


def test_a_fault_where_entries_meet_names_the_cell(bench: Any):
    """The line is the model's, where nothing is wrong."""
    (said,) = fault(bench, "grid: {axes: {model.heads: [2, 4], model.width: [32, 42]}}\n")
    assert "width 42 cannot be split over 4 heads" in said
    assert said.endswith(" (in the cell 'heads-4 width-42')")
    axes = "grid:\n  axes:\n    model.norm: [pre]\n    train.clip: [1.0, 2.0]\n"
    for base in ("train: {select: bleu}\n", "train: {max_stepz: 5}\n"):  # the base is at fault
        (said,) = fault(bench, base + axes)
        assert "in the cell" not in said
    entry = "    train:\n      - {label: a,\n         max_stepz: 5}\n"  # it says where, on the second of its lines
    (said,) = fault(bench, axes + entry)
    assert said.startswith("spec.yaml:17: train.max_stepz: ")
    assert "in the cell" not in said


def test_a_kind_that_a_piece_of_a_cell_takes_away_is_told(bench: Any):
    """Or a row would be called lstm that is a Transformer."""
    pieces = "cell: [{label: a, model: {kind: gru, layers: 1, width: 8}}, {label: b, train: {clip: 1.0}}]"
    for first, second in (("model: [lstm]", pieces), (pieces, "model: [lstm]")):
        (said,) = fault(bench, f"grid:\n  axes:\n    {first}\n    {second}\n")
        assert (
            "grid.axes.model: 'lstm' gives way to the kind 'gru', which an entry of another axis names; leave" in said
        )
    same = cells(bench, f"grid:\n  axes:\n    model: [{{label: G, kind: gru, dropout: 0.3}}]\n    {pieces}\n")
    assert [cell.spec.model.dropout for cell in same] == [0.3, 0.3]


def test_a_bare_name_is_a_mapping_with_that_kind(bench: Any):
    """The one of the node's own kind takes nothing away from it."""
    text = (
        "search: {kind: beam, size: 4, max_ratio: 2.0}\ngrid: {axes: {search: [greedy, beam, {kind: beam, size: 2}]}}\n"
    )
    greedy, own, smaller = (cell.spec.search for cell in cells(bench, text))
    assert (greedy.kind, greedy.max_ratio) == ("greedy", 1.2)  # one of another kind begins anew
    assert (own.kind, own.size, own.max_ratio) == ("beam", 4, 2.0)
    assert (smaller.size, smaller.max_ratio) == (2, 2.0)
    model = "grid: {axes: {model.attention: [{default: {transform: topk}}, {default: {transform: softmax}}]}}\n"
    kept, other = (cell.spec.model.attention.cross.transform for cell in cells(bench, model))
    assert (kept.k, other.kind) == (8, "softmax")


def test_a_cell_does_not_depend_on_its_neighbours(bench: Any):
    both = cells(bench, "grid: {axes: {model.attention.default: [{transform: {ties: index}}, {sparsify: train}]}}\n")
    alone = cells(bench, "grid: {axes: {model.attention.default: [{sparsify: train}]}}\n")
    assert both[1].digest == alone[0].digest


def test_a_table_whose_axis_the_command_line_took_away_has_the_labels_as_rows(bench: Any):
    text = "grid: {axes: {model.norm: [pre, post], train.accumulate: [1, 2]}}\ntable: {rows: norm, cols: accumulate}\n"
    assert expand(read_document(bench.write(HEAD + text))).table.rows == "norm"
    for taken in (["grid.axes={}"], ["grid={axes: {train.clip: [1.0, 2.0]}}"], ["grid.axes={train.clip: [1.0]}"]):
        experiment = expand(read_document(bench.write(HEAD + text), taken))
        assert (experiment.table.rows, experiment.table.cols) == ("label", None)
        write_grid(bench.runs, experiment, "")
        assert expand(read_document(bench.runs / "spec.yaml")).table == experiment.table
    with pytest.raises(SpecError, match="unknown axis 'nrom'"):
        expand(read_document(bench.write(HEAD + text), ["table.rows=nrom", "grid.axes={train.clip: [1.0]}"]))


ONE, OTHER = "model.attention.cross.sparsify", "model.attention.encoder_self.sparsify"
CROSSED = f"grid: {{axes: {{{ONE}: [train, both], {OTHER}: [train, both]}}}}\n"


@pytest.mark.parametrize(("table", "words"), [
    ("rows: sparsify", f"table.rows: 'sparsify' may be {ONE} or {OTHER}; write the whole path"),
    (f"rows: {ONE}, cols: sparsify", "table.cols: 'sparsify' may be"),
    (f"rows: {ONE}, cols: {ONE}", "table.cols: the rows are of that axis"),
    ("cols: label", "table.cols: a label is no axis"),
])  # fmt: skip
def test_a_table_whose_rows_or_columns_are_not_one_axis_is_refused(bench: Any, table: str, words: str):
    """It would show the numbers of one axis under the names of another."""
    (line,) = fault(bench, f"{CROSSED}table: {{{table}}}\n")
    assert line.startswith("spec.yaml:12: ")
    assert words in line


def test_a_seed_that_is_none_is_told_though_the_grids_seeds_take_its_place(bench: Any):
    (line,) = fault(bench, "seed: [1, 2]\ngrid: {seeds: [3], axes: {model.norm: [pre, post]}}\n")
    assert line.startswith("spec.yaml:11: seed: input should be a valid integer")


def test_the_spec_of_a_run_folder_gives_its_seeds_again(bench: Any):
    text = f"{HEAD}grid: {{seeds: [1, 2], more_seeds: {{pre: [7, 8]}}, axes: {{model.norm: [pre, post]}}}}\n"
    for seeds in ((5, 6), ()):
        experiment = expand(read_document(bench.write(text)), seeds=seeds)
        write_grid(bench.runs, experiment, "")
        again = expand(read_document(bench.runs / "spec.yaml"))
        assert [(cell.label, cell.seed) for cell in again.cells] == [
            (cell.label, cell.seed) for cell in experiment.cells
        ]


@pytest.mark.parametrize("rows", ["budget", "model.attention.default.budget"])
@pytest.mark.parametrize("attention", [
    "{cross: {transform: topk}}", "{encoder_self: {pattern: window}, cross: {transform: topk}}",
])  # fmt: skip
def test_a_table_of_budgets_waits_for_a_sweep(bench: Any, attention: str, rows: str):
    model = f"{{kind: transformer, tie: decoder, attention: {attention}}}"
    text = f"name: g\ntask: {{kind: translation, dataset: demo}}\nmodel: {model}\n"
    document = read_document(bench.write(f"{text}table: {{rows: {rows}}}\n"))
    for budgets in (None, [1, 2]):
        assert expand(with_budgets(document, budgets)).table.rows in (rows, "label")


def test_labels_name_and_table_are_no_part_of_the_digest(bench: Any):
    one = cells(bench, "grid: {axes: {model.norm: [{label: x, kind: pre}]}}\n".replace("{label: x, kind: pre}", "pre"))
    text = (
        HEAD.replace("some/grid", "another") + "table: {rows: model}\ngrid: {axes: {model: [{label: x, norm: pre}]}}\n"
    )
    other = expand(read_document(bench.write(text))).cells
    assert one[0].digest == other[0].digest
    assert one[0].folder != other[0].folder


def test_a_resolved_cell_read_back_is_the_same_cell(bench: Any):
    for cell in cells(bench, GRID):
        back = type(cell.spec).model_validate(parse_yaml(dump_yaml(cell.spec.dump()))[0])
        assert back == cell.spec
        assert back.digest() == cell.digest


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("trian: {}\n", "spec.yaml:11: trian: ", "did you mean 'train'?"),
        ("train:\n  max_stepz: 3\n", "spec.yaml:12: train.max_stepz: ", "did you mean 'max_steps'?"),
        ("train:\n  max_steps: many\n", "spec.yaml:12: train.max_steps: ", "integer"),
        ("grid:\n  axis: {}\n", "spec.yaml:12: grid.axis: ", "did you mean 'axes'?"),
        ("grid:\n  axes:\n    modle.norm: [pre]\n", "spec.yaml:13: grid.axes.modle.norm: ", "did you mean 'model'?"),
        ("grid:\n  axes:\n    model.norm: []\n", "spec.yaml:13: grid.axes.model.norm: ", "'model.norm' has no values"),
        ("grid:\n  axes:\n    model.norm: pre\n", "spec.yaml:13: grid.axes.model.norm: ", "list"),
        ("grid:\n  axes:\n    seed: [1]\n", "spec.yaml:13: grid.axes.seed: ", "grid.seeds"),
        ("grid:\n  seeds: [1, 1]\n", "spec.yaml:12: grid.seeds: ", "different"),
        ("grid:\n  seeds: []\n", "spec.yaml:12: grid.seeds: ", "no seed stands here"),
        ("grid:\n  seeds: [-1]\n", "spec.yaml:12: grid.seeds: ", "from 0 on"),
        ("grid:\n  seeds: [1]\n  more_seeds:\n    8: [1]\n", "spec.yaml:14: grid.more_seeds: ", "unknown label '8'"),
        ("grid:\n  more_seeds:\n    8: []\n", "spec.yaml:12: grid.more_seeds: ", "the cells of '8' would have no seed"),
        ("table:\n  vlaue: x\n", "spec.yaml:12: table.vlaue: ", "did you mean 'value'?"),
        ("table:\n  omit: [speed]\n", "spec.yaml:12: table.omit.0: ", "known: attended, entropy"),
        ("table: {omit: [attended], extra: [attended/cross]}\n", "spec.yaml:11: table", "extra asks for attended"),
        (
            "grid:\n  axes:\n    model.norm:\n      - pre\n      - psot\n",
            "spec.yaml:15: model.norm: ", "did you mean 'post'?",
        ),
        (
            "grid:\n  axes:\n    model.attention.default.transform:\n      - softmax\n      - sofmax\n",
            "spec.yaml:15: model.attention.default.transform.kind: ", "did you mean 'softmax'?",
        ),
        (
            "grid:\n  axes:\n    model.attention.default:\n      - label: a\n        transform:\n          k: -1\n",
            "spec.yaml:16: model.attention.default.transform.k: ", "greater than or equal to 0",
        ),
        (
            "grid:\n  axes:\n    model.attention.default:\n      - {label: a, sparsify: train}\n      - {label: b,\n"
            "         sparsify: never}\n",
            "spec.yaml:16: model.attention.default.sparsify: ", "unknown choice 'never'",
        ),
        (
            "grid:\n  axes:\n    model.attention.default:\n      - {label: a, transform: {kind: softmax, k: 8}}\n",
            "spec.yaml:14: model.attention.default.transform.k: ", "unknown key 'k'",
        ),
        ("grid:\n  axes:\n    model.norm.x:\n      - 1\n", "spec.yaml:14: model.norm: ", ""),
        (
            "grid:\n  axes:\n    train.clip.x: [1]\ntrain: {clip: 1.0}\n",
            "spec.yaml:13: grid.axes.train.clip.x.0: ", "not a mapping",
        ),
        (
            "grid:\n  axes:\n    model.norm:\n      - pre\n      - pre\n",
            "spec.yaml:15: grid.axes.model.norm: ", "two entries are called 'pre'",
        ),
        (
            "grid:\n  axes:\n    train:\n      - {label: a, clip: 1}\n      - {label: a, clip: 2}\n",
            "spec.yaml:15: grid.axes.train: ", "two entries are called 'a'",
        ),
        ("train: {select: bleu}\n", "spec.yaml:", "validate_bleu"),
        (
            "grid: {axes: {model.norm: [pre]}}\ntable:\n  rows: nrom\n",
            "spec.yaml:13: table.rows: ", "did you mean 'norm'?",
        ),
        ("grid: {axes: {model.norm: [pre]}}\ntable: {cols: seed}\n", "spec.yaml:12: table.cols: ", "unknown axis"),
        ("table:\n  value: []\n", "spec.yaml:12: table.value", "at least 1"),
    ],
)  # fmt: skip
def test_a_fault_is_told_at_its_file_line_and_path(bench: Any, text: str, place: str, words: str):
    found = fault(bench, text)
    assert found[0].startswith(place), found
    assert words in found[0]
    assert len(found) == 1


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("train.max_stepz=5", "--set train.max_stepz=5: train.max_stepz: unknown key"),
        ("trian.max_steps=5", "--set trian.max_steps=5: trian: unknown key"),
        ("train.max_steps=many", "--set train.max_steps=many: train.max_steps: "),
        ("model.attention.default.transform=sofmax", "--set model.attention.default.transform=sofmax: model.attention"),
        ("model.attention.default.transform.k=-1", "--set model.attention.default.transform.k=-1: model.attention.de"),
        ("grid.axes.model.norm=[pre, psot]", "--set grid.axes.model.norm=[pre, psot]: model.norm: "),
        ("grid.axes.model.norm=pre", "--set grid.axes.model.norm=pre: grid.axes.model.norm: "),
        ("train.max_steps", "--set train.max_steps: write it as key.path=value"),
        ("=5", "--set =5: write it as key.path=value"),
        ("train.max_steps=[1", "--set train.max_steps=[1:1: this is not valid YAML"),
        ("model.norm.x=5", "--set model.norm.x=5: model.norm: "),
        ("train.clip.x.y=1", "--set train.clip.x.y=1: "),
    ],
)
def test_a_fault_of_an_override_is_told_as_such(bench: Any, override: str, place: str):
    found = fault(bench, "train: {clip: 1.0}\n", override)
    assert found[0].startswith(place), found


def test_faults_beside_an_override_keep_their_lines(bench: Any):
    (line,) = fault(bench, "train:\n  max_stepz: 3\n", "train.clip=1.0")
    assert line.startswith("spec.yaml:12: train.max_stepz: ")


def test_overrides_are_yaml_and_the_last_one_wins(bench: Any):
    (cell,) = cells(bench, "", "train.clip=1e-1", "train.max_steps=7", "train.max_steps=8", "grid.seeds=[4]")
    assert (cell.spec.train.clip, cell.spec.train.max_steps, cell.seed) == (0.1, 8, 4)
    assert len(cells(bench, "grid: {axes: {model.norm: [pre, post]}}\n", "grid.axes={}")) == 1
    assert len(cells(bench, "", "grid.axes.model.norm=[pre, post]")) == 2
    some = "grid: {more_seeds: {pre: [1, 2], 30: [4]}, axes: {model.norm: [pre, post], train.max_steps: [30]}}\n"
    assert len(cells(bench, some, "grid.axes={}")) == 1  # their seeds go with the entries
    assert [cell.seed for cell in cells(bench, some, "grid.axes={train.max_steps: [20, 30]}")] == [1, 4]


@pytest.mark.parametrize(
    ("text", "override", "mend"),
    [
        ("grid: {axes: {train.clip: [0.5, 1]}}\n", "train.clip=2", "change the axis"),
        (
            "grid: {axes: {model.attention.default.transform: [softmax, sparsemax]}}\n",
            "model.attention.default.transform.k=4",
            "the axis",
        ),
        ("grid: {axes: {model: [{kind: lstm, width: 8}]}}\n", "model.width=16", "change the axis"),
        ("grid: {seeds: [1, 2]}\n", "seed=5", "--seeds"),
    ],
)
def test_an_override_that_no_cell_keeps_is_an_error(bench: Any, text: str, override: str, mend: str):
    (line,) = fault(bench, text, override)
    assert line.startswith(f"--set {override}: changes nothing")
    assert mend in line


def test_an_override_that_some_cells_keep_is_none(bench: Any):
    axis = "grid: {axes: {train: [{label: a, clip: 0.5}, {label: b, max_steps: 5}]}}\n"
    assert [cell.spec.train.clip for cell in cells(bench, axis, "train.clip=2")] == [0.5, 2]
    assert len(cells(bench, "", "train.clip=3", "grid.axes.train.clip=[0.5, 1]")) == 2  # both are the command line's
    assert [cell.seed for cell in cells(bench, "", "seed=5")] == [5]


@pytest.mark.parametrize(("entry", "said"), [
    ("{label: null, clip: 1}", "a `label` is a text or a number, not None"),
    ("{label: [b, c], clip: 1}", "a `label` is a text or a number, not ['b', 'c']"),
    ("{label: '', clip: 1}", "this entry is called nothing; give it a `label`"),
    ("{label: ' ', clip: 1}", "this entry is called nothing; give it a `label`"),
    ("{}", "this entry is called nothing; give it a `label`"),
])  # fmt: skip
def test_an_entry_is_called_by_what_can_be_read(bench: Any, entry: str, said: str):
    text = f"grid:\n  axes:\n    train:\n      - {{label: a}}\n      - {entry}\n"
    assert fault(bench, text) == [f"spec.yaml:15: grid.axes.train: {said}"]


def test_one_run_under_one_label_is_refused_twice(bench: Any):
    text = "grid: {axes: {train.clip: [{label: a}, 1]}}\n"
    assert "train.clip" in fault(bench, text)[0]
    text = "grid: {axes: {train: [{label: a, clip: 1}], model: [{label: b, norm: pre}, {label: b , norm: pre}]}}\n"
    assert "two entries are called 'b'" in fault(bench, text)[0]


def test_cells_of_other_entries_have_other_labels(bench: Any):
    """As joined: --cell would train both, and a row be of both."""
    text = """\
grid:
  seeds: [1, 2]
  axes:
    train: [{label: a, clip: 1}, {label: a b, clip: 2}]
    model.norm: [pre, post]
    task:
      - {label: b c, drop: true}
      - {label: c, drop: false}
"""
    told = "two cells are called 'a b c', 'a' with 'b c' and 'a b' with 'c'; give one of these entries another `label`"
    both = "model.norm: [pre, post]\n"
    assert fault(bench, text.replace(f"    {both}", "")) == [f"spec.yaml:14: grid.axes: {told}"]
    told = told.replace("a b c", "a b c pre")
    assert fault(bench, text.replace(f"    {both}", "") + f"    {both}") == [f"spec.yaml:14: grid.axes: {told}"]
    assert len(cells(bench, text)) == 16  # 'a pre b c' is no 'a b pre c'


@pytest.fixture
def other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model family `plain` with a field that the Transformer lacks, and none of the Transformer's."""

    class Plain(ModelSpec):
        kind: Literal["plain"] = "plain"
        cells: int = 3

    monkeypatch.setitem(models._members, "plain", Plain)
    models.kinds()


@pytest.mark.usefixtures("other_model")
def test_an_axis_of_whole_models(bench: Any):
    text = """\
grid:
  axes:
    model:
      - {label: Plain, kind: plain, cells: 5}
      - plain
      - {label: Transformer, kind: transformer, norm: pre}
      - {label: As it is}
"""
    found = cells(bench, text)
    assert [cell.label for cell in found] == ["Plain", "plain", "Transformer", "As it is"]
    assert [cell.spec.model.kind for cell in found] == ["plain", "plain", "transformer", "transformer"]
    assert [cell.spec.model.dump() for cell in found[:2]] == [
        {"kind": "plain", "cells": 5}, {"kind": "plain", "cells": 3},
    ]  # fmt: skip
    assert (found[2].spec.model.norm, found[2].spec.model.attention.cross.transform.k) == ("pre", 8)
    assert found[3].spec.model.norm == "post"
    assert found[0].axes == {"model": "Plain"}


@pytest.mark.usefixtures("other_model")
def test_a_key_of_another_family_is_told_at_its_place(bench: Any):
    text = "grid:\n  axes:\n    model:\n      - {label: a, kind: plain}\n      - {label: b, kind: plain, norm: pre}\n"
    assert fault(bench, text) == ["spec.yaml:15: model.norm: unknown key 'norm' (known: kind, cells)"]


CELLS = """\
train: {clip: 1.0, max_steps: 7}
grid:
  axes:
    cell:
      - label: one
        model: {kind: plain, cells: 2}
        train: {max_steps: 9}
      - label: two
        train: {schedule: noam}
    task.dataset: [demo, {kind: demo, pairs: 50}]
"""


@pytest.mark.usefixtures("other_model")
def test_an_axis_of_whole_cells(bench: Any):
    found = cells(bench, CELLS)
    assert [cell.label for cell in found] == ["one demo", "one demo-pairs-50", "two demo", "two demo-pairs-50"]
    specs = [cell.spec for cell in found]
    assert [spec.model.kind for spec in specs] == ["plain", "plain", "transformer", "transformer"]
    assert [spec.train.max_steps for spec in specs] == [9, 9, 7, 7]
    assert [spec.train.schedule.kind for spec in specs] == ["inverse_sqrt"] * 2 + ["noam"] * 2
    assert {spec.train.clip for spec in specs} == {1.0}
    assert found[0].axes == {"cell": "one", "task.dataset": "demo"}


def test_a_bare_name_inside_a_whole_cell_is_a_mapping_with_that_kind(bench: Any):
    text = "grid:\n  axes:\n    cell:\n      - {label: a, task: {dataset: {pairs: 50}}}\n"
    (cell,) = cells(bench, text)
    assert (cell.spec.task.dataset.kind, cell.spec.task.dataset.pairs) == ("demo", 50)
    (same,) = cells(bench, text.replace("{pairs", "{kind: demo, pairs"))
    assert same.digest == cell.digest


@pytest.mark.usefixtures("other_model")
@pytest.mark.parametrize(("old", "new", "words"), [
    ("train: {max_steps: 9}", "train: {max_step: 9}", "spec.yaml:17: train.max_step: unknown key 'max_step'"),
    ("train: {max_steps: 9}", "trian: {max_steps: 9}", "grid.axes.cell.0: unknown key 'trian'; did you mean 'train'"),
    ("train: {max_steps: 9}", "seed: 3", "grid.axes.cell.0: unknown key 'seed'"),
    ("    cell:\n", "    cell:\n      - three\n", "grid.axes.cell.0: an entry of the axis 'cell' is a mapping"),
    ("cells: 2", "cells: x", "spec.yaml:16: model.cells:"),
])  # fmt: skip
def test_faults_in_whole_cells(bench: Any, old: str, new: str, words: str):
    assert words in fault(bench, CELLS.replace(old, new))[0]


def test_one_run_may_stand_under_two_labels(bench: Any):
    one, two = cells(bench, "grid: {axes: {train: [{label: a, clip: 1}, {label: b, clip: 1.0}]}}\n")
    assert one.digest == two.digest
    assert one.folder != two.folder


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/", ".x", "a b", ""])
def test_a_name_that_is_no_folder_is_refused(bench: Any, name: str):
    path = bench.write(HEAD.replace("some/grid", f"'{name}'"))
    with pytest.raises(SpecError, match=r"spec\.yaml:1: name: .*cannot name a folder"):
        expand(read_document(path))


def test_a_vocabulary_that_is_not_shared_cannot_be_tied_to_all(bench: Any):
    (line,) = fault(bench, "", "model.tie=all")
    assert line.startswith("spec.yaml:3: model: tie 'all' shares one table")
    assert "set model.tie: decoder, or take one for both" in line
    assert line.endswith("(as changed by --set model.tie=all)")


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_what_a_model_lacks_for_its_data_is_told_when_read(bench: Any, kind: str):
    text = f"""\
name: some/grid
task: {{kind: translation, dataset: demo}}
model:
  kind: {kind}
  attention: {{cross: {{module: {{kind: fixed_memory, positions: true}}}}}}
"""
    with pytest.raises(SpecError, match=r"spec\.yaml:3: model: attention\.cross: .* give module\.longest"):
        expand(read_document(bench.write(text)))
    (cell,) = expand(read_document(bench.write(text.replace("positions: true", "positions: true, longest: 40")))).cells
    assert cell.spec.model.dump()["attention"]["cross"]["module"]["longest"] == 40


def test_one_cell_of_many_is_chosen_by_its_label(bench: Any):
    experiment = expand(read_document(bench.write(HEAD + GRID)))
    chosen = only(experiment, "post max_steps-20")
    assert [(cell.label, cell.seed) for cell in chosen.cells] == [("post max_steps-20", 3), ("post max_steps-20", 1)]
    with pytest.raises(SpecError, match=r"4 cells; choose one with --cell \(pre max_steps-10, "):
        only(experiment, None)
    with pytest.raises(SpecError, match=r"unknown cell 'post max_step-20'; did you mean 'post max_steps-20'\?"):
        only(experiment, "post max_step-20")
    one = expand(read_document(bench.write(HEAD)))
    assert only(one, None).cells == one.cells


@pytest.mark.parametrize(
    ("task", "metric"),
    [
        ("{kind: translation, dataset: demo}", "test/bleu"),
        ("{kind: document, dataset: ted-doc}", "test/d_bleu"),
    ],
)
def test_a_table_that_names_no_metric_shows_the_task_s_own(bench: Any, task: str, metric: str):
    text = f"name: some/grid\ntask: {task}\nmodel: {{kind: transformer, tie: decoder}}\ntable: "
    assert expand(read_document(bench.write(text + "{rows: seed}\n"))).table.dump()["value"] == metric
    assert expand(read_document(bench.write(text + "{value: valid/loss}\n"))).table.value == "valid/loss"

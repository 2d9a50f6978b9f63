from __future__ import annotations

from typing import Any

import pytest

from attnbench.core.errors import SpecError
from attnbench.experiment.axes import BUDGETS, parse_budgets, require_budgets, with_axis, with_budgets
from attnbench.experiment.document import read_document
from attnbench.experiment.grid import expand

HEAD = "name: x\ntask: {kind: translation, dataset: demo}\nmodel:\n  kind: transformer\n  tie: decoder\n"


def attention(text: str) -> str:
    return f"{HEAD}  attention: {text}\n"


def sites(cell: Any) -> list[str]:
    """What stands at encoder_self, decoder_self and cross of a cell."""
    found = []
    for role in ("encoder_self", "decoder_self", "cross"):
        transform = cell.spec.model.attention.site(role).transform
        k = getattr(transform, "k", None)
        found.append(transform.kind + (f" {k}" if k is not None else ""))
    return found


def swept(bench: Any, text: str, budgets: Any = (2, "inf")) -> list[Any]:
    return list(expand(with_budgets(read_document(bench.write(text)), budgets)).cells)


def test_budgets_of_the_command_line():
    assert parse_budgets("1, 2,16,inf") == [1, 2, 16, "inf"]


@pytest.mark.parametrize("text", ["0", "-1", "1,,2", "two", "1.5", "", "1,1", "inf,inf", "Inf"])
def test_what_is_no_budget_is_refused(text: str):
    with pytest.raises(SpecError, match="--k"):
        parse_budgets(text)


@pytest.mark.parametrize("text", [HEAD, attention("{default: {transform: softmax}}"), attention("{}")])
def test_a_dense_spec_is_swept_with_topk_everywhere(bench: Any, text: str):
    assert [(cell.label, sites(cell)) for cell in swept(bench, text)] == [
        ("budget-2", ["topk 2"] * 3),
        ("budget-inf", ["softmax"] * 3),
    ]
    assert [cell.label for cell in swept(bench, text, None)] == [f"budget-{value}" for value in BUDGETS]


@pytest.mark.parametrize(
    "default", ["topk", "{kind: topk}", "{kind: topk, k: 8}", "{kind: topk, ratio: 0.5}", "{kind: topk, ties: index}"]
)
def test_the_default_site_is_swept(bench: Any, default: str):
    two, dense = swept(bench, attention(f"{{default: {{transform: {default}}}}}"))
    assert sites(two) == ["topk 2"] * 3
    assert sites(dense) == ["softmax"] * 3
    assert two.spec.model.attention.cross.transform.ties == ("index" if "ties" in default else "threshold")
    assert list(two.axes) == ["model.attention.default.budget"]


@pytest.mark.parametrize("own", ["topk", "{kind: topk, k: 8}"])
def test_one_site_alone(bench: Any, own: str):
    two, dense = swept(bench, attention(f"{{cross: {{transform: {own}}}}}"))
    assert sites(two) == ["softmax", "softmax", "topk 2"]
    assert sites(dense) == ["softmax"] * 3
    assert two.label == "budget-2"
    assert list(two.axes) == ["model.attention.cross.budget"]


def test_two_sites_over_a_dense_default(bench: Any):
    two, dense = swept(bench, attention("{encoder_self: {transform: topk}, cross: {transform: topk}}"))
    assert (two.label, sites(two)) == ("budget-2", ["topk 2", "softmax", "topk 2"])
    assert (dense.label, sites(dense)) == ("budget-inf", ["softmax"] * 3)


def test_two_sites_beside_a_dense_one(bench: Any):
    two, dense = swept(bench, attention("{default: {transform: topk}, cross: {transform: softmax}}"))
    assert sites(two) == ["topk 2", "topk 2", "softmax"]
    assert sites(dense) == ["softmax"] * 3
    assert list(two.axes) == ["model.attention.default.budget"]


def test_a_site_that_takes_no_budget_keeps_its_own(bench: Any):
    two, dense = swept(bench, attention("{default: {transform: topk}, cross: {transform: sparsemax}}"))
    assert sites(two) == ["topk 2", "topk 2", "sparsemax"]
    assert sites(dense) == ["softmax", "softmax", "sparsemax"]


def test_nothing_to_sweep_is_told(bench: Any):
    with pytest.raises(SpecError, match=r"spec\.yaml:6: model\.attention: .*'sparsemax' takes a budget"):
        swept(bench, attention("{default: {transform: sparsemax}}"))


def test_a_number_that_cannot_be_is_told_and_not_replaced(bench: Any):
    with pytest.raises(SpecError, match=r"spec\.yaml:\d+: model\.attention\.cross\.transform\.k: .*given: -1"):
        swept(bench, attention("{cross: {transform: {kind: topk, k: -1}}}"))


@pytest.mark.parametrize("text", [
    "model: [transformer]\n", "model: {kind: transformer, attention: [topk]}\n",
    "model: {kind: transformer, attention: {default: [sparsemax]}}\n",
    "model: {kind: transformer, attention: {default: 5}}\n", "model: {kind: transformer, attention: topk}\n",
])  # fmt: skip
def test_attention_that_is_no_mapping_is_told_and_not_replaced(bench: Any, text: str):
    head = "name: g\ntask: {kind: translation, dataset: demo}\n"
    with pytest.raises(SpecError, match=r"spec\.yaml:3: model") as caught:
        swept(bench, head + text)
    assert "unknown key" not in str(caught.value)


OWN = "{default: {transform: topk}}\ngrid:\n  more_seeds: {4: [1, 2], 8: [3]}\n  axes:\n"
OWN += "    model.norm: [pre, post]\n    model.attention.default.budget: [4, 8]\n"


def test_the_budgets_of_the_spec_are_kept_unless_others_are_given(bench: Any):
    text = attention(OWN.rstrip("\n"))
    kept = swept(bench, text, None)
    assert [(cell.label, cell.seed) for cell in kept[:3]] == [
        ("pre budget-4", 1), ("pre budget-4", 2), ("pre budget-8", 3)
    ]  # fmt: skip
    other = swept(bench, text, [4, "inf"])
    assert [(cell.label, cell.seed) for cell in other[:3]] == [
        ("pre budget-4", 1), ("pre budget-4", 2), ("pre budget-inf", 1)
    ]  # fmt: skip


def test_an_axis_of_transforms_is_swept_with_them(bench: Any):
    text = attention("{}\ngrid: {axes: {model.attention.default: [{label: a, transform: topk}]}}")
    assert [cell.label for cell in swept(bench, text)] == ["a budget-2", "a budget-inf"]


@pytest.mark.parametrize("text", ["grid: [1]\n", "grid: {axes: 3}\n", "grid:\n", "gird: {}\n"])
def test_a_grid_that_is_none_is_told_and_nothing_breaks(bench: Any, text: str):
    document = read_document(bench.write(HEAD + text))
    for use in (lambda: with_budgets(document, [1]), lambda: with_axis(document, "transform=topk")):
        with pytest.raises(SpecError, match=r"spec\.yaml:6: "):
            use()


def test_faults_of_the_command_line_are_told_as_such(bench: Any):
    document = read_document(bench.write(attention("{default: {transform: topk}}")))
    with pytest.raises(SpecError, match=r"^--axis transform=sparsemax,sofmax: model\.attention\.default\.transform"):
        expand(with_axis(document, "transform=sparsemax,sofmax"))
    path = bench.write(attention("{default: {transform: topk}}\ngrid: {axes: {model.attention: [{cross: softmax}]}}"))
    with pytest.raises(SpecError, match=r"spec\.yaml:7: model\.attention\.cross: "):
        expand(with_budgets(read_document(path), [2]))


def ablated(bench: Any, text: str, *options: str) -> list[Any]:
    document = read_document(bench.write(text))
    for option in options:
        document = with_axis(document, option)
    return list(expand(document).cells)


def test_ablate_transforms(bench: Any):
    found = ablated(bench, HEAD, "transform=softmax, {kind: topk, k: 8}, entmax15, {kind: entmax, alpha: learned}")
    assert [(cell.label, sites(cell)[0]) for cell in found] == [
        ("softmax", "softmax"), ("topk-k-8", "topk 8"), ("entmax15", "entmax15"), ("entmax-learned", "entmax"),
    ]  # fmt: skip
    assert [cell.label for cell in ablated(bench, HEAD, "transform=[softmax, sparsemax]")] == ["softmax", "sparsemax"]


def test_ablate_sites(bench: Any):
    text = attention("{default: {transform: {kind: topk, k: 8}}, cross: {transform: sparsemax}}")
    found = ablated(bench, text, "site=all,encoder_self,decoder_self,cross,none")
    assert [(cell.label, sites(cell)) for cell in found] == [
        ("all", ["topk 8", "topk 8", "sparsemax"]),
        ("encoder_self", ["topk 8", "softmax", "softmax"]),
        ("decoder_self", ["softmax", "topk 8", "softmax"]),
        ("cross", ["softmax", "softmax", "sparsemax"]),
        ("none", ["softmax"] * 3),
    ]


def test_ablate_sites_under_a_budget(bench: Any):
    text = attention("{default: {transform: topk}}\ngrid: {axes: {model.attention.default.budget: [2, 4]}}")
    found = ablated(bench, text, "site=all,cross")
    assert [(cell.label, sites(cell)) for cell in found] == [
        ("budget-2 all", ["topk 2"] * 3),
        ("budget-2 cross", ["softmax", "softmax", "topk 2"]),
        ("budget-4 all", ["topk 4"] * 3),
        ("budget-4 cross", ["softmax", "softmax", "topk 4"]),
    ]


def test_ablate_sparsify_and_any_path(bench: Any):
    text = attention("{default: {transform: {kind: topk, k: 8}}}")
    found = ablated(bench, text, "sparsify=train,both", "train.label_smoothing=0.0,0.1", "model.norm=[pre, post]")
    assert len(found) == 8
    assert found[0].label == "train label_smoothing-0.0 pre"
    assert found[0].spec.model.attention.cross.sparsify == "train"
    assert found[-1].spec.model.attention.cross.sparsify == "both"


def test_ablate_a_whole_part_or_a_whole_cell(bench: Any):
    parts = ablated(bench, HEAD, "search=greedy,beam")
    assert [cell.spec.search.kind for cell in parts] == ["greedy", "beam"]
    option = "cell=[{label: short, train: {max_steps: 7}}, {label: long, train: {max_steps: 9}}]"
    assert [(cell.label, cell.spec.train.max_steps) for cell in ablated(bench, HEAD, option)] == [
        ("short", 7), ("long", 9),
    ]  # fmt: skip


def test_an_axis_given_takes_the_place_of_the_specs(bench: Any):
    text = attention("{}\ngrid:\n  more_seeds: {pre: [1, 2]}\n  axes: {model.norm: [pre, post], train.clip: [1, 2]}")
    assert [cell.label for cell in ablated(bench, text, "model.norm=post")] == ["post clip-1", "post clip-2"]


def test_labels_of_the_specs_own_axis_are_values(bench: Any):
    entries = "[{label: dense, kind: softmax}, {label: top-k 2, kind: topk, k: 2}, {kind: entmax, alpha: 1.7}]"
    path = "model.attention.default.transform"
    grid = f"grid: {{seeds: [1], more_seeds: {{dense: [1, 2]}}, axes: {{{path}: {entries}}}}}\n"
    document = read_document(bench.write(HEAD + grid))
    whole = {cell.label: cell.digest for cell in expand(document).cells if cell.seed == 1}
    for option in ("transform=[top-k 2, dense, sparsemax]", f"{path}=top-k 2,dense,sparsemax"):
        cells = expand(with_axis(document, option)).cells
        assert [(cell.label, cell.seed) for cell in cells] == [
            ("top-k 2", 1), ("dense", 1), ("dense", 2), ("sparsemax", 1),
        ]  # fmt: skip
        assert [cell.digest for cell in cells[:2]] == [whole["top-k 2"], whole["dense"]]
    (cell,) = expand(with_axis(document, "transform=entmax-alpha-1.7")).cells
    assert cell.digest == whole["entmax-alpha-1.7"]


def test_an_axis_that_does_not_fit_the_specs_own_tells_how_to_leave_those_out(bench: Any):
    text = attention(
        "{default: {transform: topk}}\n"
        "grid: {more_seeds: {2: [1, 2]}, axes: {model.attention.default.budget: [2, 4], model.norm: [pre, post]}}"
    )
    with pytest.raises(SpecError) as caught:
        ablated(bench, text, "transform=softmax,sparsemax")
    told = str(caught.value)
    assert "the budget 2 has no taker" in told
    assert "(model.attention.default.budget, model.norm); to leave those out: --set 'grid.axes={}'" in told
    mended = with_axis(read_document(bench.write(text), ["grid.axes={}"]), "transform=softmax,sparsemax")
    assert [cell.label for cell in expand(mended).cells] == ["softmax", "sparsemax"]
    with pytest.raises(SpecError) as caught:
        ablated(bench, text, "transform=sofmax")  # a fault that this would not mend
    assert "grid.axes={}" not in str(caught.value)


def test_an_unknown_axis_is_told_at_its_option(bench: Any):
    text = attention("{default: {transform: topk}}\ngrid: {axes: {model.attention.default.budget: [2]}}")
    with pytest.raises(SpecError, match=r"^--axis modle\.norm=pre: grid\.axes\.modle\.norm: .*did you mean 'model'"):
        ablated(bench, text, "modle.norm=pre")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("transform", "write it as name=value,value"),
        ("transform=", "write it as"),
        ("=softmax", "write it as"),
        ("transfrom=softmax", "did you mean 'transform'?"),
        ("site=everywhere", "unknown site 'everywhere'"),
        ("site=cros", "did you mean 'cross'?"),
        ("transform=[softmax", "not valid YAML"),
        ("transform=[]", "the values are a list"),
        ("site=cross,cross", "two entries are called 'cross'"),
        ("modle.norm=pre", "did you mean 'model'?"),
    ],
)
def test_an_axis_that_is_none_is_told(bench: Any, option: str, words: str):
    with pytest.raises(SpecError) as caught:
        ablated(bench, HEAD, option)
    assert str(caught.value).startswith(f"--axis {option}:")
    assert words in str(caught.value)


def test_who_names_an_axis_knows_what_it_lays_over_and_nothing_else(bench: Any):
    text = attention("{default: {transform: topk}}\ngrid: {seeds: [1, 2]}")
    document = read_document(bench.write(text), ["model.attention.default.budget=9"])
    assert len(expand(with_axis(document, "budget=4")).cells) == 2
    document = read_document(bench.write(text), ["seed=3"])
    with pytest.raises(SpecError, match="--set seed=3: changes nothing, every cell of the grid has its own"):
        expand(with_axis(document, "budget=4"))


@pytest.mark.parametrize("options", [
    ("budget=1,2", "budget=4"), ("site=cross", "site=all"),
    ("transform=topk", "model.attention.default.transform=softmax"),
])  # fmt: skip
def test_an_axis_that_is_named_twice_is_told(bench: Any, options: tuple[str, str]):
    with pytest.raises(SpecError) as caught:
        ablated(bench, HEAD, *options)
    first, second = options
    said = f"--axis {second}: --axis {first} names the values of this axis already; give all of them in one"
    assert str(caught.value) == said


def recurrent(more: str = "") -> str:
    return f"name: g\ntask: {{kind: translation, dataset: demo}}\nmodel: {{kind: gru, layers: 1, width: 8{more}}}\n"


def test_a_model_with_one_site_is_swept_there(bench: Any):
    cells = swept(bench, recurrent())
    assert [cell.spec.model.attention.cross.transform.kind for cell in cells] == ["topk", "softmax"]
    assert [dict(cell.axes) for cell in cells] == [
        {"model.attention.cross.budget": 2},
        {"model.attention.cross.budget": "inf"},
    ]


def test_a_site_that_the_model_lacks_is_named(bench: Any):
    with pytest.raises(SpecError, match=r"unknown site 'encoder_self' \(known: cross, all, none\)"):
        with_axis(read_document(bench.write(recurrent())), "site=all,encoder_self")


def test_no_attention_cannot_be_swept(bench: Any):
    with pytest.raises(SpecError, match="the module 'none' attends to nothing"):
        swept(bench, recurrent(", readout: state, attention: {cross: {module: none}}"))


@pytest.mark.parametrize(("transforms", "same"), [
    ("[topk, {kind: topk, k: 8}]", "'topk-k-8 budget-2' and 'topk-k-8 budget-inf'"),
    ("[entmax15]", "'entmax15 budget-2' and 'entmax15 budget-inf'"),
    ("[topk]", None),
])  # fmt: skip
def test_budgets_that_reach_nothing_are_refused(bench: Any, transforms: str, same: str | None):
    text = f"{recurrent()}grid: {{seeds: [1, 2], axes: {{model.attention.cross.transform: {transforms}}}}}\n"
    experiment = expand(with_budgets(read_document(bench.write(text)), [2, "inf"]))
    if same is None:
        require_budgets(experiment)
        return
    with pytest.raises(SpecError, match=rf"spec\.yaml:4: {same} are the same run: .* model\.attention\.cross"):
        require_budgets(experiment)


def test_budgets_of_sites_that_take_one_are_no_fault(bench: Any):
    text = attention(
        "{default: {transform: topk}}\ngrid: {axes: {model.attention.cross: [{label: a, transform: softmax}]}}"
    )
    require_budgets(expand(with_budgets(read_document(bench.write(text)), [2, "inf"])))

"""`attnbench prepare`: a corpus by name, by a spec, or your own text."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

OWN = ("--set", "languages=[de,en]", "--set", "tokenizer.vocab=100")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """An empty folder and a cache of its own."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text() -> None:
    rng = random.Random(0)
    words = ["haus", "hund", "katze", "baum", "läuft", "sieht"]
    lines = [" ".join(rng.choices(words, k=5)) + " ." for _ in range(200)]
    Path("a.de").write_text("\n".join(lines) + "\n", encoding="utf-8")
    Path("a.en").write_text("\n".join(line.upper() for line in lines) + "\n", encoding="utf-8")


def own(source: str = "a.de", target: str = "a.en") -> list[str]:
    return [*OWN, "--set", f"train.source={source}", "--set", f"train.target={target}"]


def test_own_text(invoke, text, tmp_path):
    result = invoke("prepare", "parallel", *own())
    folder = Path(result.stdout.strip())
    assert folder.is_relative_to(tmp_path / "cache")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["languages"] == ["de", "en"]
    assert manifest["recipe"]["tokenizer"]["vocab"] == 100
    assert {split: facts["pairs"] for split, facts in manifest["splits"].items()} == {
        "train": 196, "valid": 2, "test": 2,
    }  # fmt: skip
    assert "pairs: train 196, valid 2, test 2" in result.stderr


def test_what_is_prepared_is_left_alone(invoke, text, tree):
    first = invoke("prepare", "parallel", *own())
    folder = Path(first.stdout.strip())
    before = tree(folder)
    again = invoke("prepare", "parallel", *own(), "--json")
    assert "learning the vocabulary" in first.stderr
    assert "learning the vocabulary" not in again.stderr
    (entry,) = json.loads(again.stdout)["prepared"]
    assert entry["path"] == str(folder)
    assert entry["splits"]["train"]["pairs"] == 196
    assert tree(folder) == before


def test_a_folder_may_be_named(invoke, text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "no file" in invoke("prepare", "parallel", *own(), code=4).stderr
    invoke("prepare", "parallel", *own(), "--from", "work")


def test_a_mapping_says_the_same(invoke, text):
    short = invoke("prepare", "parallel", *own()).stdout
    pair = "train={source: a.de, target: a.en}"
    assert invoke("prepare", "parallel", *OWN, "--set", pair).stdout == short


def test_a_spec_prepares_what_its_cells_use(invoke, text):
    Path("spec.yaml").write_text(
        "name: mine\ntask:\n  kind: translation\n"
        "  dataset: {kind: parallel, languages: [de, en], train: {source: a.de, target: a.en}}\n"
        "  tokenizer: {kind: bpe, vocab: 100, joint: true}\n"
        "grid: {axes: {task.lowercase: [false, true]}}\n"
    )
    folders = invoke("prepare", "spec.yaml").stdout.split()
    assert len(folders) == 2
    cells = json.loads(invoke("ablate", "spec.yaml", "--dry-run", "--json").stdout)["cells"]
    assert [cell["data"] for cell in cells] == folders
    assert all(cell["data_ready"] for cell in cells)


def test_overrides_reach_the_corpus_and_the_recipe(invoke):
    result = invoke("prepare", "demo", "--set", "pairs=30", "--set", "held_out=4", "--set", "lowercase=true", "--json")
    (entry,) = json.loads(result.stdout)["prepared"]
    assert entry["splits"]["train"]["pairs"] == 30
    assert json.loads((Path(entry["path"]) / "manifest.json").read_text())["recipe"]["lowercase"] is True


@pytest.mark.parametrize(("arguments", "code", "words"), [
    ([], 2, "name a corpus or a spec"),
    (["paralel"], 2, "unknown dataset 'paralel'; did you mean 'parallel'"),
    (["parallel"], 2, "Give it like this: attnbench prepare parallel --set languages=[de,en]"),
    (["parallel", *OWN], 2, "task.dataset.train: this key is required and absent"),
    (["parallel", "--set", "langauges=[de,en]"], 2, "did you mean 'languages'"),
    (["parallel", *OWN, "--set", "train.sorce=a.de"], 2, "did you mean 'source'"),
    (["demo", "--list"], 2, "--list shows the corpora that are known, and prepares none"),
    (["--list", "--from", "."], 2, "--list shows the corpora that are known, and prepares none"),
    (["demo", "--set", "pairs"], 2, "write it as key.path=value"),
    (["demo", "--set", "pairs=many"], 2, "integer (given: 'many')"),
    (["nowhere.yaml"], 2, "there is no such file"),
    (["parallel", *OWN, "--set", "train={source: a.de, target: gone.en}"], 4, "gone.en"),
    (["multi30k-de-en", "--offline"], 4, "attnbench prepare multi30k-de-en --from DIR"),
    (["multi30k-de-en", "--from", "nowhere"], 4, "no such folder"),
])  # fmt: skip
def test_errors_name_the_mend(invoke, text, arguments, code, words):
    result = invoke("prepare", *arguments, code=code)
    assert words in result.stderr
    assert result.stdout == ""


def test_text_that_is_not_aligned_names_file_and_line(invoke, text):
    with Path("a.en").open("a") as file:
        file.write("ONE TOO MANY\n")
    assert "a.en" in invoke("prepare", "parallel", *own(), code=4).stderr


def test_the_list(invoke):
    text = invoke("prepare", "--list").stdout
    assert "multi30k-de-en" in text
    assert "iwslt14-de-en" in text
    names = [entry["name"] for entry in json.loads(invoke("prepare", "--list", "--json").stdout)]
    assert {"demo", "parallel", "wmt14-en-de"} <= set(names)

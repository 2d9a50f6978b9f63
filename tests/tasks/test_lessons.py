from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from attnbench.core.errors import AttnbenchError, DataError
from attnbench.data.datasets.base import SPLITS
from attnbench.data.prepare import read_manifest
from attnbench.models.base import Sizes, Source
from attnbench.models.fertility.base import Fertility, Lessons
from attnbench.models.fertility.guided import GuidedFertilitySpec
from attnbench.models.fertility.predicted import PredictedFertilitySpec
from attnbench.tasks.lessons import teach

SIZES = Sizes(12, 12, True)
TAGGER = PredictedFertilitySpec(layers=1, embedding=4, width=4, epochs=2)
MANIFEST = {
    "schema_version": 1,
    "recipe": {"dataset": "demo"},
    "files": {},
    "splits": {split: {"pairs": 4, "wide_tokens": 24, "widest": 6} for split in SPLITS},
    "vocabulary": {side: {"file": "word.json", "rows": 12} for side in ("source", "target")},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepared(tmp_path / "data")


def prepared(folder: Path, **manifest: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({**MANIFEST, **manifest}))
    return folder


def lessons() -> tuple[Lessons, Lessons]:
    data = torch.randint(3, 12, (4, 5), generator=torch.Generator().manual_seed(1))
    one = Source(data, torch.ones_like(data, dtype=torch.bool), 1 + (data % 3).float())
    return [one, one], [one]


def taught(spec: GuidedFertilitySpec | PredictedFertilitySpec, folder: Path, seed: int = 1, given=lessons) -> Fertility:
    torch.manual_seed(seed)
    fertility = spec.build(SIZES)
    teach(fertility, folder, read_manifest(folder), seed, given)
    return fertility


def forbidden() -> tuple[Lessons, Lessons]:
    return pytest.fail("asked for lessons that are known")


@pytest.mark.parametrize("spec", [GuidedFertilitySpec(), TAGGER], ids=["guided", "predicted"])
def test_the_second_is_given_what_the_first_has_learned(spec, folder: Path):
    first = taught(spec, folder)
    second = taught(spec, folder, given=forbidden)
    assert first.report() == second.report()
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor)
    source = lessons()[1][0]
    assert torch.equal(first(source), second(source))


def test_what_is_learned_does_not_hang_on_the_weights_at_first(tmp_path: Path):
    """They depend on the model around it; what is kept serves another model, too."""
    first = taught(TAGGER, prepared(tmp_path / "one"))
    torch.manual_seed(99)
    second = TAGGER.build(SIZES)
    teach(second, prepared(tmp_path / "two"), MANIFEST, 1, lessons)
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor)


def test_another_seed_another_spec_and_other_data_learn_anew(folder: Path, tmp_path: Path):
    def counted() -> tuple[Lessons, Lessons]:
        asked.append(1)
        return lessons()

    asked: list[int] = []
    taught(TAGGER, folder, given=counted)
    taught(TAGGER, folder, seed=2, given=counted)
    taught(TAGGER.replace(epochs=1), folder, given=counted)
    taught(GuidedFertilitySpec(), folder, given=counted)
    taught(TAGGER, prepared(tmp_path), given=counted)
    assert len(asked) == 5
    taught(TAGGER, folder, given=counted)
    assert len(asked) == 5


def test_a_damaged_file_is_named(folder: Path):
    taught(TAGGER, folder)
    (path,) = folder.glob("lessons-*.safetensors")
    path.write_bytes(b"x")
    with pytest.raises(AttnbenchError, match=r"lessons-.*remove it and run again"):
        taught(TAGGER, folder)


def test_a_file_is_not_blamed_for_a_full_memory(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise MemoryError

    taught(TAGGER, folder)
    monkeypatch.setattr("attnbench.tasks.lessons.load_file", full)
    with pytest.raises(MemoryError):
        taught(TAGGER, folder)


def test_a_place_where_nothing_can_be_kept_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("attnbench.data.fertility.making", refuse)
    with pytest.raises(DataError, match="ATTNBENCH_CACHE"):
        taught(TAGGER, folder)


def test_what_is_learned_of_older_data_never_lies_beside_newer_ones(folder: Path):
    def meanwhile() -> tuple[Lessons, Lessons]:
        prepared(folder, digest="another")
        return lessons()

    with pytest.raises(DataError, match="the data were prepared anew while they were in use; run again"):
        taught(TAGGER, folder, given=meanwhile)
    assert not list(folder.glob("lessons-*.safetensors"))


def test_what_is_learned_of_newer_data_is_not_taken_for_older_ones(folder: Path):
    prepared(folder, digest="another")
    taught(TAGGER, folder)
    with pytest.raises(DataError, match="the data were prepared anew while they were in use; run again"):
        teach(TAGGER.build(SIZES), folder, MANIFEST, 1, forbidden)

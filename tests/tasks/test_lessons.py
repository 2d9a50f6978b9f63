from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnbench.core.errors import AttnbenchError, DataError
from attnbench.models.base import Sizes, Source
from attnbench.models.fertility.base import Fertility, Lessons
from attnbench.models.fertility.guided import GuidedFertilitySpec
from attnbench.models.fertility.predicted import PredictedFertilitySpec
from attnbench.tasks.lessons import teach

SIZES = Sizes(12, 12, True)
TAGGER = PredictedFertilitySpec(layers=1, embedding=4, width=4, epochs=2)


def lessons() -> tuple[Lessons, Lessons]:
    data = torch.randint(3, 12, (4, 5), generator=torch.Generator().manual_seed(1))
    one = Source(data, torch.ones_like(data, dtype=torch.bool), 1 + (data % 3).float())
    return [one, one], [one]


def taught(spec: GuidedFertilitySpec | PredictedFertilitySpec, folder: Path, seed: int = 1, given=lessons) -> Fertility:
    torch.manual_seed(seed)
    fertility = spec.build(SIZES)
    teach(fertility, folder, seed, given)
    return fertility


def forbidden() -> tuple[Lessons, Lessons]:
    return pytest.fail("asked for lessons that are known")


@pytest.mark.parametrize("spec", [GuidedFertilitySpec(), TAGGER], ids=["guided", "predicted"])
def test_the_second_is_given_what_the_first_has_learned(spec, tmp_path: Path):
    first = taught(spec, tmp_path)
    second = taught(spec, tmp_path, given=forbidden)
    assert first.report() == second.report()
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor)
    source = lessons()[1][0]
    assert torch.equal(first(source), second(source))


def test_what_is_learned_does_not_hang_on_the_weights_at_first(tmp_path: Path):
    """They depend on the model around it; what is kept serves another model, too."""
    first = taught(TAGGER, tmp_path / "one")
    torch.manual_seed(99)
    second = TAGGER.build(SIZES)
    teach(second, tmp_path / "two", 1, lessons)
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor)


def test_another_seed_another_spec_and_other_data_learn_anew(tmp_path: Path):
    def counted() -> tuple[Lessons, Lessons]:
        asked.append(1)
        return lessons()

    asked: list[int] = []
    taught(TAGGER, tmp_path, given=counted)
    taught(TAGGER, tmp_path, seed=2, given=counted)
    taught(TAGGER.replace(epochs=1), tmp_path, given=counted)
    taught(GuidedFertilitySpec(), tmp_path, given=counted)
    taught(TAGGER, tmp_path / "other", given=counted)
    assert len(asked) == 5
    taught(TAGGER, tmp_path, given=counted)
    assert len(asked) == 5


def test_a_damaged_file_is_named(tmp_path: Path):
    taught(TAGGER, tmp_path)
    (path,) = tmp_path.glob("lessons-*.safetensors")
    path.write_bytes(b"x")
    with pytest.raises(AttnbenchError, match=r"lessons-.*remove it and run again"):
        taught(TAGGER, tmp_path)


def test_a_file_is_not_blamed_for_a_full_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise MemoryError

    taught(TAGGER, tmp_path)
    monkeypatch.setattr("attnbench.tasks.lessons.load_file", full)
    with pytest.raises(MemoryError):
        taught(TAGGER, tmp_path)


def test_a_place_where_nothing_can_be_kept_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="ATTNBENCH_CACHE"):
        taught(TAGGER, tmp_path / "file")

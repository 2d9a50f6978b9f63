from __future__ import annotations

from typing import Any

import pytest

from attnbench.core.errors import SpecError
from attnbench.experiment.preparation import prepare_named


def test_a_corpus_is_prepared_by_its_name_or_a_spec(bench: Any):
    (by_spec,) = prepare_named(str(bench.spec()), [], bench.settings())
    assert by_spec["splits"]["train"]["pairs"] == 60
    (by_name,) = prepare_named("demo", ["pairs=60", "held_out=6"], bench.settings())
    assert by_name["path"] == by_spec["path"]
    with pytest.raises(SpecError, match="unknown dataset 'dem'; did you mean 'demo'"):
        prepare_named("dem", [], bench.settings())

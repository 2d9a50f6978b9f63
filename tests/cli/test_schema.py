"""`attnbench schema`: one JSON schema for editors, and the copy of it that the shipped specs name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from attnbench.attention.transforms.base import transforms
from attnbench.cli.schema import schema
from attnbench.data.datasets.base import datasets
from attnbench.experiment.spec import ExperimentSpec

ROOT = Path(__file__).parents[2]
app = typer.Typer()
app.command()(schema)


def refuse(constant: str) -> Any:
    raise ValueError(constant)


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    result = CliRunner().invoke(app, [], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout, parse_constant=refuse)


def test_the_schema_names_every_key_of_a_spec(content: dict[str, Any]):
    assert set(content["properties"]) == set(ExperimentSpec.model_fields)
    assert set(content["required"]) == {"name", "task"}
    assert content["additionalProperties"] is False
    assert content["$schema"].startswith("https://json-schema.org/")


def test_every_reference_leads_somewhere(content: dict[str, Any]):
    def references(node: Any) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*(references(item) for item in node.values()))
        return set().union(*(references(item) for item in node)) if isinstance(node, list) else set()

    found = references(content)
    assert found
    assert {reference.removeprefix("#/$defs/") for reference in found} <= set(content["$defs"])


def test_open_families_list_their_kinds(content: dict[str, Any]):
    def enums(node: Any) -> list[set[Any]]:
        if isinstance(node, dict):
            own = [set(node["enum"])] if isinstance(node.get("enum"), list) else []
            return own + [one for item in node.values() for one in enums(item)]
        return [one for item in node for one in enums(item)] if isinstance(node, list) else []

    found = enums(content)
    assert set(transforms.kinds()) in found
    assert set(datasets.kinds()) in found


def test_fields_say_what_they_are(content: dict[str, Any]):
    assert all(field.get("description") for field in content["properties"].values())


def test_the_committed_schema_is_the_present_one():
    """In a process of its own: other tests may have added mechanisms to this one."""
    command = [sys.executable, "-c", "from attnbench.cli.schema import schema; schema()"]
    now = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    stale = "run: attnbench schema > experiments/schema.json"
    assert json.loads((ROOT / "experiments" / "schema.json").read_text(encoding="utf-8")) == json.loads(now), stale

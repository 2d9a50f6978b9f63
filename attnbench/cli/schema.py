"""`attnbench schema`: the JSON schema of a spec, for editors."""

from __future__ import annotations

from attnbench.cli import common


def schema() -> None:
    """Print the JSON schema of a spec. Editors that know YAML use it to complete and to check.

    Example: attnbench schema > experiments/schema.json
    """
    from attnbench.experiment.spec import ExperimentSpec

    common.emit_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **ExperimentSpec.model_json_schema()})

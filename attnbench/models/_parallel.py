"""What models that see all target positions at once, in training, ask of their attention."""

from __future__ import annotations

from attnbench.attention.spec import Sites


def require_parallel(attention: Sites, model: str) -> None:
    """Raise ValueError for a decoder without attention, and for a stage that looks back at earlier steps.

    model: how messages name it ("the Transformer").
    """
    module = attention.site("cross").module
    if not module.stages:
        raise ValueError(
            f"attention.cross: with the module '{module.kind}' a {model}'s decoder would know nothing of the source; "
            "take another module, or a recurrent model"
        )
    for role in attention.roles:
        stage = attention.site(role).looks_back
        if stage is not None:
            raise ValueError(
                f"attention.{role}: {stage} depends on what was attended before; the "
                f"{model} sees all positions at once, so take a model that decodes step by step in training too"
            )

"""One update: its sums, its clipping, and that it asks nothing of the device it runs on."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import ATTENTION, WORDS, a_batch

from attnbench.attention.transforms import _simplex
from attnbench.core import native
from attnbench.core.ragged import Ragged
from attnbench.models.base import Sizes, models
from attnbench.tasks import pairs
from attnbench.tasks.base import tasks
from attnbench.train.optim import optimizers, set_rate
from attnbench.train.runtime import Runtime
from attnbench.train.step import accumulate, clip

CPU = Runtime(torch.device("cpu"))
ASKING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
PACKAGE = Path(native.__file__).parents[1]


class Watch(TorchDispatchMode):
    """Notes each operation whose result the host waits for, once `on`."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in INDEXING and any(each is not None and each.dtype == torch.bool for each in args[1])
        if self.on and (masks or name in ASKING):
            ours = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(PACKAGE)]
            self.asked.append(f"{name} at " + (f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "elsewhere"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize(
    ("kind", "attention"),
    [*(("transformer", name) for name in ATTENTION), ("convs2s", "softmax"), ("convs2s", "top-k")],
)
def test_an_update_waits_for_nothing(kind: str, attention: str, optimizer: str, monkeypatch: pytest.MonkeyPatch):
    small = {"layers": 2, "width": 16, "heads": 2, "ffn": 16} if kind == "transformer" else {"layers": 2, "width": 16}
    given = ATTENTION[attention]
    model = models.parse({"kind": kind, **small, "attention": given}).build(Sizes(WORDS, WORDS, True, 0)).train()
    task: Any = tasks.parse({"kind": "copying", "dataset": "copy"}).bind()
    steps = optimizers.parse(optimizer).build(model.parameters())
    set_rate(steps, 0.1)
    watch = Watch()

    def arrive(tree: Any, device: torch.device) -> Any:
        watch.on = True  # what comes before is done where the data are
        return tree

    monkeypatch.setattr(pairs, "to_device", arrive)
    monkeypatch.setattr(Ragged, "of", lambda valid: None)  # as off the processor
    monkeypatch.setattr(_simplex, "_answers_at_once", lambda tensor: False)
    with native.off(), watch:
        accumulate(task, model, [a_batch()], 0.1, CPU)
        clip(model, 1.0)
        steps.step()
        steps.zero_grad(set_to_none=True)
    assert watch.on
    assert watch.asked == []


def test_the_watch_sees_what_it_looks_for():
    ones = torch.ones(3)
    with Watch() as watch:
        watch.on = True
        float(ones.sum())
        ones[ones > 0]
        ones.nonzero()
    assert [entry.split()[0] for entry in watch.asked] == ["_local_scalar_dense", "index", "nonzero"]


def loaded(*gradients: list[float]) -> nn.Module:
    model = nn.ParameterList([nn.Parameter(torch.zeros(len(values))) for values in gradients])
    for parameter, values in zip(model, gradients, strict=True):
        parameter.grad = torch.tensor(values)
    return model


def gradients(model: nn.Module) -> list[float]:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]).tolist()


@pytest.mark.parametrize(("limit", "wanted"), [(0.0, [3.0, 0.0, 4.0]), (6.0, [3.0, 0.0, 4.0]), (2.5, [1.5, 0.0, 2.0])])
def test_a_long_gradient_is_made_as_long_as_the_limit(limit: float, wanted: list[float]):
    model = loaded([3.0, 0.0], [4.0])
    assert clip(model, limit).item() == 5.0
    assert gradients(model) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_no_number_stays_as_it_is(strange: float):
    model = loaded([3.0, strange], [4.0])
    assert not clip(model, 1.0).isfinite()
    assert torch.equal(
        torch.tensor(gradients(model)).nan_to_num(7.0), torch.tensor([3.0, strange, 4.0]).nan_to_num(7.0)
    )


@pytest.mark.parametrize(("normalization", "by"), [("tokens", 6), ("sentences", 4)])
def test_sums_are_over_all_batches_and_the_mean_over_what_is_asked_for(toys: Any, normalization: Any, by: int):
    task: Any = toys.Task()
    model = toys.model().eval()
    batches = [toys.rows(seed, 0, 0, count=3) for seed in (1, 2)]
    totals, tokens = accumulate(task, model, batches, 0.5, CPU, normalization)
    whole = torch.stack([(model(batch.x) - batch.y).square().sum() for batch in batches]).sum()
    assert tokens == 6
    assert torch.allclose(totals, torch.stack([0.5 * whole, whole]))
    expected = torch.autograd.grad(0.5 * whole / by, list(model.parameters()))
    assert gradients(model) == pytest.approx(torch.cat([each.flatten() for each in expected]).tolist(), rel=1e-5)

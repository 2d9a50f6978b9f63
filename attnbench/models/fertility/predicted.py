"""Fertility by a tagger that was trained on alignments."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attnbench.attention.history import last_position
from attnbench.models.base import Sizes, Source
from attnbench.models.fertility.base import Fertility, FertilitySpec, Lessons, Needs, fertilities

log = logging.getLogger("attnbench")


class PredictedFertility(Fertility):
    """`sum_f f p_f + slack`, p from a bidirectional LSTM over the source, or `most * sigmoid(w h) + slack`; its weights
    are fixed once it has learned."""

    needs: ClassVar[Needs] = "lessons"

    def __init__(self, spec: PredictedFertilitySpec, rows: int, pad: int) -> None:
        super().__init__(spec)
        self.spec: PredictedFertilitySpec = spec
        self.table = nn.Embedding(rows, spec.embedding, padding_idx=pad)
        self.tagger = nn.LSTM(
            spec.embedding, spec.width, spec.layers, batch_first=True, bidirectional=True,
            dropout=spec.dropout if spec.layers > 1 else 0.0,
        )  # fmt: skip
        self.dropout = nn.Dropout(spec.dropout)
        self.output = nn.Linear(2 * spec.width, 1 if spec.head == "regression" else spec.most)
        self.register_buffer("f1", torch.zeros(()))
        self.register_buffer("accuracy", torch.zeros(()))
        self.f1: Tensor
        self.accuracy: Tensor
        self.requires_grad_(False).train(False)

    def forward(self, source: Source) -> Float[Tensor, "B S"]:
        return self._expected(self._tag(source)) + self.spec.slack

    def train(self, mode: bool = True) -> Self:
        """In eval mode whatever the model does: dropout is for its own training alone."""
        return super().train(False)

    def _tag(self, source: Source) -> Float[Tensor, "B S C"]:
        """Logits of the fertilities 1 to `most`; of a regression, the one number."""
        embedded = self.dropout(self.table(source.data))
        lengths = source.valid.sum(1).clamp(min=1).cpu()  # torch packs no empty row
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        with torch.autocast(embedded.device.type, enabled=False):
            states, _ = self.tagger(packed)
            padded, _ = pad_packed_sequence(states, batch_first=True, total_length=source.data.shape[1])
            return self.output(self.dropout(padded))

    def _expected(self, logits: Float[Tensor, "... C"]) -> Float[Tensor, "..."]:
        if self.spec.head == "regression":
            return self.spec.most * logits[..., 0].sigmoid()
        classes = torch.arange(1, self.spec.most + 1, device=logits.device, dtype=logits.dtype)
        return (logits.softmax(-1) * classes).sum(-1)  # autocast would round a product of matrices

    def _likeliest(self, logits: Float[Tensor, "... C"]) -> Int[Tensor, "..."]:
        """Classes, from 0 on."""
        if self.spec.head == "regression":
            return self._expected(logits).round().long().clamp(1, self.spec.most) - 1
        return logits.argmax(-1)

    def _loss(
        self, logits: Float[Tensor, "N C"], wanted: Int[Tensor, "N"], weights: Float[Tensor, "M"], reduction: str
    ) -> Float[Tensor, ""]:
        if self.spec.head == "regression":
            return mse_loss(self._expected(logits), wanted + 1.0, reduction=reduction)
        return cross_entropy(logits, wanted, weights, reduction=reduction)

    def learn(self, train: Lessons, valid: Lessons, seed: int) -> None:
        """Adam on the negative log-likelihood of the true fertilities, or on squared errors; the epoch of the best F1
        stays, of equal ones that of the least loss."""
        device = self.output.weight.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            torch.manual_seed(seed)
            for part in (self.table, self.tagger, self.output):  # what was drawn so far depends on the model around it
                part.reset_parameters()
            self._fit(train, valid, torch.Generator().manual_seed(seed))

    def _fit(self, train: Lessons, valid: Lessons, order: torch.Generator) -> None:
        weights = torch.ones(self.spec.most, device=self.output.weight.device)
        weights[0] = self.spec.weight_of_one
        self.requires_grad_(True)
        optimizer = torch.optim.Adam(self.parameters(), lr=self.spec.rate)
        best, kept = (-1.0, 0.0), {}
        for epoch in range(self.spec.epochs):
            super().train()
            for number in torch.randperm(len(train), generator=order).tolist():
                source, wanted, words = self._lesson(train[number])
                loss = self._loss(self._tag(source)[words], wanted[words], weights, "mean")
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            f1, accuracy, error = self._judge(valid, weights)
            log.info("fertility tagger, epoch %d: F1 %.3f, accuracy %.3f", epoch + 1, f1, accuracy)
            if (f1, -error) >= best:  # F1 is 0 until a fertility above 1 is dared, or where there is none
                best = f1, -error
                self.f1.fill_(f1)
                self.accuracy.fill_(accuracy)
                kept = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        if best[0] == 0:
            log.warning("fertility tagger: it finds no word of the validation text with a fertility above 1; give it "
                        "more epochs, or another kind of fertility")  # fmt: skip
        self.load_state_dict(kept)
        for parameter in self.parameters():
            parameter.grad = None
        self.requires_grad_(False)

    def _lesson(self, lesson: Source) -> tuple[Source, Int[Tensor, "B S"], Bool[Tensor, "B S"]]:
        """On the tagger's device: the source, the class of each position, and which are words (the sink is none)."""
        assert lesson.fertility is not None  # or it would be no lesson
        device = self.output.weight.device
        source = Source(lesson.data.to(device), lesson.valid.to(device))
        classes = lesson.fertility.to(device).long().clamp(1, self.spec.most) - 1
        return source, classes, source.valid & ~last_position(source.valid)

    @torch.no_grad()
    def _judge(self, lessons: Lessons, weights: Tensor) -> tuple[float, float, float]:
        """F1 of positions whose fertility is not 1 (right where the fertility is), accuracy of all, and the loss."""
        super().eval()
        hits, said, true, right, total, loss = 0, 0, 0, 0, 0, 0.0
        for lesson in lessons:
            source, wanted, words = self._lesson(lesson)
            logits = self._tag(source)
            loss += float(self._loss(logits[words], wanted[words], weights, "sum"))
            found = self._likeliest(logits)
            same = (found == wanted) & words
            hits += int((same & (wanted > 0)).sum())
            said += int(((found > 0) & words).sum())
            true += int(((wanted > 0) & words).sum())
            right += int(same.sum())
            total += int(words.sum())
        return 2 * hits / max(1, said + true), right / max(1, total), loss

    def report(self) -> dict[str, float]:
        return {"f1": self.f1.item(), "accuracy": self.accuracy.item()}


@fertilities.register
class PredictedFertilitySpec(FertilitySpec):
    """A bidirectional LSTM, trained on alignments before the model is, expects the fertility of each source word."""

    kind: Literal["predicted"] = "predicted"
    paper: ClassVar[str] = "Malaviya et al. 2018"

    head: Literal["classes", "regression"] = "classes"
    """What tells the fertility of a state: the chances of 1 to `most`, or one number between 0 and `most`."""
    slack: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Added to the expected fertility."""
    most: int = Field(default=10, ge=2)
    """The largest fertility; larger ones count as it."""
    layers: int = Field(default=2, ge=1)
    """Layers of the tagger."""
    embedding: int = Field(default=256, ge=1)
    """Width of its embeddings."""
    width: int = Field(default=256, ge=1)
    """Units of a layer, in each direction."""
    dropout: float = Field(default=0.2, ge=0, lt=1)
    """On embeddings, between layers, and on the states."""
    rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """Adam's learning rate."""
    weight_of_one: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """How much a word of fertility 1 weighs in the loss; the others weigh 1."""
    epochs: int = Field(default=5, ge=1)
    """Passes over the training text; the one of the best F1 on the validation text is kept, of equal ones the one of
    the least loss."""

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.head == "regression" and self.is_set("weight_of_one"):
            yield "weight_of_one", "squared errors weigh alike, whatever the fertility"

    def build(self, sizes: Sizes) -> PredictedFertility:
        return PredictedFertility(self, sizes.source_vocab, sizes.pad)

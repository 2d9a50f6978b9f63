"""Translation: the loss against a sum by hand, splits decoded in their order and scored, attention measured."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from attnbench.core import native
from attnbench.core.errors import AttnbenchError
from attnbench.data.base import BOS, EOS, PAD, Batch
from attnbench.data.corpus import Data
from attnbench.models.base import Seq2SeqModel, Source
from attnbench.models.fertility.guided import GuidedFertilitySpec
from attnbench.models.transformer import TransformerSpec
from attnbench.search.base import Hypothesis, SpecialIds
from attnbench.search.greedy import GreedySpec
from attnbench.tasks import decoding, translation
from attnbench.tasks import pairs as pair_tasks
from attnbench.tasks.translation import Translation, TranslationSpec

DEMO: dict[str, Any] = {"kind": "demo", "pairs": 1500, "held_out": 23}


def parse(**raw: Any) -> TranslationSpec:
    return TranslationSpec.model_validate({"dataset": DEMO, **raw})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    spec = parse()
    cache = tmp_path_factory.mktemp("cache")
    path = spec.prepare(cache, None, True)
    assert path == spec.data_path(cache)
    return spec.open(path)


def build(spec: TranslationSpec, **raw: Any) -> Seq2SeqModel:
    torch.manual_seed(0)
    small = {"layers": 1, "width": 8, "heads": 2, "ffn": 8, "dropout": 0.0, "tie": "none"}
    return TransformerSpec.model_validate({**small, **raw}).build(spec.model_sizes()).double().eval()


@pytest.fixture
def task() -> Translation:
    return parse().bind()


def some_batch(data: Data) -> Batch:
    return next(data.eval_batches("valid", tokens=120))


class Oracle:
    """A search that knows each source's reference, and says which batches it was asked for."""

    spec = GreedySpec()

    def __init__(self, data: Data, split: str) -> None:
        pairs = data.split(split)
        self.known: dict[str, str] = dict(zip(pairs.source, pairs.target, strict=True))
        self.data = data
        self.seen: list[int] = []

    def __call__(self, model: Seq2SeqModel, source: Source, special: SpecialIds) -> list[list[Hypothesis]]:
        assert special == SpecialIds(BOS, EOS, PAD)
        self.seen.append(len(source.data))
        found = []
        for ids, valid in zip(source.data, source.valid, strict=True):
            assert ids[valid][-1] == EOS
            text = self.data.source_vocabulary.decode(ids[valid].tolist())
            tokens = self.data.target_vocabulary.encode(self.known[text])
            found.append([Hypothesis(tokens, 0.0, 0.0, True), Hypothesis([], -1.0, -1.0, True)])
        return found


def test_a_bleu_with_a_tokeniser_of_its_own_is_refused():
    for kind in ("13a", "13a_lc"):
        with pytest.raises(ValidationError, match=rf"'{kind}' tokenises by itself.*write tok_lc or tok: .*bleu_13a"):
            parse(bleu=kind)
    with pytest.raises(ValidationError, match="tok_lc"):
        parse(bleu="tokk")
    assert [parse(bleu=kind).bleu for kind in ("tok_lc", "tok")] == ["tok_lc", "tok"]


def test_outputs_cut_at_the_length_limit_are_counted(data, task):
    class Cut(Oracle):
        def __call__(self, model: Seq2SeqModel, source: Source, special: SpecialIds) -> list[list[Hypothesis]]:
            found = super().__call__(model, source, special)
            return [[best[0]._replace(finished=bool(line % 3)), best[1]] for line, best in enumerate(found)]

    model = build(task.spec)
    for searcher in (Oracle(data, "valid"), Cut(data, "valid")):
        found = task.evaluate(model, data, "valid", searcher, 60)
        cut = sum(-(-size // 3) for size in searcher.seen) if isinstance(searcher, Cut) else 0
        assert found.values["unfinished"] == cut
        assert found.values["bleu"] == pytest.approx(100)


# ---- loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_sum_over_target_tokens(data, task, smoothing):
    model, batch = build(task.spec), some_batch(data)
    found = task.loss(model, batch, smoothing)
    total = nll = 0.0
    with torch.no_grad():
        for row in range(len(batch.source)):
            source = batch.source[row : row + 1, batch.source_valid[row]]
            length = int(batch.target_valid[row].sum())
            memory = model.encode(Source(source, torch.ones_like(source, dtype=torch.bool)))
            hidden = model.decode(memory, batch.target_in[row : row + 1, :length]).hidden
            log_p = model.logits(hidden)[0].log_softmax(-1)
            for place in range(length):
                own = -log_p[place, batch.target_out[row, place]].item()
                nll += own
                total += (1 - smoothing) * own - smoothing * log_p[place].mean().item()
    assert found.total.item() == pytest.approx(total, rel=1e-9)
    assert found.nll.item() == pytest.approx(nll, rel=1e-9)
    assert found.total.requires_grad
    assert not found.nll.requires_grad


def test_padding_is_not_in_the_loss(data, task):
    model, batch = build(task.spec), some_batch(data)
    wanted = task.loss(model, batch, 0.1).total
    wide = [nn.functional.pad(tensor, (0, 3), value=value) for tensor, value in
            zip(batch[:5], (9, False, 9, 9, False), strict=True)]  # fmt: skip
    torch.testing.assert_close(task.loss(model, Batch(*wide, batch.index), 0.1).total, wanted)


def test_count_is_of_target_tokens_with_eos(data, task):
    batch = some_batch(data)
    assert task.count(batch) == int((batch.target_out != PAD).sum())
    lines = [data.split("valid").target[line] for line in batch.index.tolist()]
    assert task.count(batch) == sum(len(line.split()) + 1 for line in lines)


def test_validate_is_the_mean_over_the_split(data, task):
    model = build(task.spec)
    nats = count = 0.0
    for batch in data.eval_batches("valid", tokens=500):
        nats += task.loss(model, batch, 0.0).nll.item()
        count += task.count(batch)
    for tokens in (60, 500):
        values = task.validate(model, data, "valid", tokens)
        assert values["loss"] == pytest.approx(nats / count, rel=1e-9)
        assert values["ppl"] == pytest.approx(math.exp(nats / count), rel=1e-9)


# ---- decoding and scores --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize("tokens", [40, 4000])
def test_a_perfect_search_scores_100_and_lines_keep_their_order(data, task, split, tokens):
    oracle = Oracle(data, split)
    metrics = task.evaluate(build(task.spec), data, split, oracle, tokens)
    assert (len(oracle.seen) > 1) == (tokens == 40)
    assert sum(oracle.seen) == len(data.split(split)) == metrics.samples["sentences"]
    assert metrics.outputs["txt"] == metrics.outputs["ref.txt"] == list(data.split(split).target)
    assert metrics.outputs["detok.txt"] == list(data.split(split).references)
    for name in ("bleu", "bleu_13a", "chrf"):
        assert metrics.values[name] == pytest.approx(100)
        assert "version:" in metrics.signatures[name]
    words = sum(len(line.split()) + 1 for line in data.split(split).target)
    seconds = metrics.values["decode_seconds"]
    assert metrics.values["decode_tokens_per_s"] == pytest.approx(words / seconds, rel=1e-6)


def test_time_of_decoding_leaves_out_what_is_compiled_meanwhile(data, task, monkeypatch):
    ticks = iter((100.0, 104.0))
    monkeypatch.setattr(native, "clock", lambda: next(ticks))  # it stands while libraries are made
    values = task.evaluate(build(task.spec), data, "valid", Oracle(data, "valid"), 4000).values
    assert values["decode_seconds"] == 4.0


class Small(Oracle):
    """A search on a GPU that has memory for so many sentences."""

    def __init__(self, data: Data, split: str, room: int, error: RuntimeError) -> None:
        super().__init__(data, split)
        self.room, self.error, self.tried = room, error, 0

    def __call__(self, model: Seq2SeqModel, source: Source, special: SpecialIds) -> list[list[Hypothesis]]:
        self.tried += 1
        if len(source.data) > self.room:
            raise self.error
        return super().__call__(model, source, special)


FULL = [torch.cuda.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")]


@pytest.mark.parametrize("error", FULL)
@pytest.mark.parametrize("room", [1, 3])
def test_a_batch_that_memory_is_too_small_for_is_decoded_in_parts(data, task, room, error, caplog):
    small = Small(data, "valid", room, error)
    metrics = task.evaluate(build(task.spec), data, "valid", small, 4000)
    assert max(small.seen) <= room
    assert sum(small.seen) == len(data.split("valid"))
    assert metrics.outputs["txt"] == list(data.split("valid").target)
    assert "memory is too small to decode 23 sentences at once" in caplog.text


def test_what_was_too_large_once_is_not_tried_again(data, task):
    small = Small(data, "valid", 3, FULL[0])
    task.evaluate(build(task.spec), data, "valid", small, 80)
    assert small.tried < 2 * len(small.seen)
    assert small.tried - len(small.seen) <= 3


def test_what_is_timed_is_decoded_as_it_was_asked_for(data, task):
    with pytest.raises(torch.cuda.OutOfMemoryError):
        task.decode(build(task.spec), data.eval_batches("valid", tokens=4000), Small(data, "valid", 3, FULL[0]))


@pytest.mark.parametrize("error", [*FULL, RuntimeError("something else")])
def test_what_no_smaller_batch_mends_is_an_error(data, task, error):
    with pytest.raises(RuntimeError, match=str(error)):
        task.evaluate(build(task.spec), data, "valid", Small(data, "valid", 0, error), 4000)


def test_on_a_gpu_more_is_decoded_at_once(data, task, monkeypatch):
    """A stand-in for the GPU: a model that says that it is there."""
    model = build(task.spec)
    asked: list[int] = []

    def batches(split: str, *, tokens: int, lines: Any = None) -> Any:
        asked.append(tokens)
        return data.eval_batches(split, tokens=tokens, lines=lines)

    watched = SimpleNamespace(**{name: getattr(data, name) for name in dir(data) if not name.startswith("__")})
    watched.eval_batches = batches
    task.evaluate(model, watched, "valid", Oracle(data, "valid"), 60)
    task.sample_bleu(model, watched, Oracle(data, "train"), 60, 5)
    assert asked == [60, 60]
    monkeypatch.setattr(task, "decode", lambda model, *given: type(task).decode(task, build(task.spec), *given))
    there = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]), modules=list)
    task.evaluate(there, watched, "valid", Oracle(data, "valid"), 60)
    task.sample_bleu(there, watched, Oracle(data, "train"), 60, 5)
    task.evaluate(there, watched, "valid", Oracle(data, "valid"), 1 << 20)
    assert asked[2:] == [decoding.ON_A_GPU, decoding.ON_A_GPU, 1 << 20]


def test_a_fertility_that_a_model_does_not_tell_is_no_silent_loss(data, task):
    model = build(task.spec)
    assert task.adapt(model, data, 1, fresh=True) is data
    model.own = GuidedFertilitySpec().build(task.spec.model_sizes())
    with pytest.raises(AttnbenchError, match="Transformer has a fertility and does not tell it"):
        task.adapt(model, data, 1, fresh=True)


def test_speed_counts_the_tokens_that_were_produced(data, task):
    """An output that was cut has no end."""

    class Cut(Oracle):
        def __call__(self, *about):
            return [[best._replace(finished=False)] for best, *_ in super().__call__(*about)]

    metrics = task.evaluate(build(task.spec), data, "test", Cut(data, "test"), 4000)
    words = sum(len(line.split()) for line in data.split("test").target)
    produced = metrics.values["decode_tokens_per_s"] * metrics.values["decode_seconds"]
    assert produced == pytest.approx(words, rel=1e-6)
    assert metrics.values["unfinished"] == len(data.split("test"))


def test_a_wrong_line_lowers_the_score(data, task):
    lines = list(data.split("test").target)
    assert task.score(data, "test", [*lines[1:], lines[0]]).values["bleu"] < 50
    assert task.score(data, "test", [""] * len(lines)).values["bleu"] == 0


def test_the_sink_is_no_word_that_can_be_dropped(data, monkeypatch):
    """The first word and the sink are linked in references, and to nothing in the outputs."""

    class Stub:
        def align(self, source, target):
            sinks = [len(line.split()) - 1 for line in source]
            return [
                [(0, 0), (sink, 1)] if line == "reference" else [] for sink, line in zip(sinks, target, strict=True)
            ]

    monkeypatch.setattr(translation, "word_aligner", lambda *_, **__: Stub())
    size = len(data.split("test"))
    counts = parse(drop=True).bind()._dropped(data, "test", ["output"] * size, ["reference"] * size, lower=False)
    assert counts.tolist() == [[1, 1]] * size


def test_training_sentences_that_are_scored_lie_at_equal_distances(data, task):
    asked = []

    class Watched(Oracle):
        def __call__(self, model, source, special):
            asked.extend(row[valid].tolist() for row, valid in zip(source.data, source.valid, strict=True))
            return super().__call__(model, source, special)

    task.sample_bleu(build(task.spec), data, Watched(data, "train"), 4000, 3)
    ids = data.split("train").ids.source
    lines = [number * len(ids) // 3 for number in range(3)]
    assert sorted(asked) == sorted([*ids[line].tolist(), EOS] for line in lines)


def test_drop_counts_source_words_that_the_output_leaves_out(tmp_path):
    spec = TranslationSpec.model_validate({"dataset": {**DEMO, "pairs": 400}, "drop": True})
    data = Data.open(spec.prepare(tmp_path / "cache", None, offline=True))
    task, lines = spec.bind(), list(data.split("test").target)
    perfect = task.score(data, "test", lines)
    assert perfect.values["drop"] == 0
    shorn = task.score(data, "test", [" ".join(line.split()[:-2]) for line in lines])
    nothing = task.score(data, "test", [""] * len(lines))
    assert 0 < shorn.values["drop"] < nothing.values["drop"] == 100
    assert len(shorn.outputs["drop.txt"]) == len(lines)
    assert "aligner:ibm2" in shorn.signatures["drop"]


def test_rep_follows_the_case_of_bleu_and_keeps_its_counts(data):
    lines = list(data.split("test").target)
    doubled = [f"{lines[0]} Word word", *lines[1:]]
    words = sum(len(line.split()) for line in lines)
    for kind, more in (("tok_lc", 2), ("tok", 0)):
        task = TranslationSpec.model_validate({"dataset": "demo", "bleu": kind}).bind()
        metrics = task.score(data, "test", doubled)
        assert metrics.values["rep"] == pytest.approx(100 * more / words)
        assert metrics.outputs["rep.txt"][0] == f"{more} {len(lines[0].split())}"
        assert len(metrics.outputs["rep.txt"]) == len(lines)


@pytest.mark.parametrize(("fields", "case"), [({}, "lc"), ({"bleu": "tok"}, "mixed")])
def test_bleu_is_of_the_kind_asked_for(data, fields, case):
    task = parse(**fields).bind()
    lines = [line.upper() for line in data.split("test").target]
    metrics = task.score(data, "test", lines)
    assert f"case:{case}" in metrics.signatures["bleu"]
    assert (metrics.values["bleu"] > 99) == (case == "lc")
    assert "case:mixed|eff:no|tok:13a" in metrics.signatures["bleu_13a"]


def test_lower_cased_data_are_scored_lower_cased(data):
    task = parse(lowercase=True).bind()
    metrics = task.score(data, "test", list(data.split("test").target))
    assert "case:lc|eff:no|tok:13a" in metrics.signatures["bleu_13a"]
    assert metrics.values["bleu_13a"] == pytest.approx(100)


def test_what_a_perfect_output_has_is_told_where_tokenisation_cannot_be_undone(data, task, monkeypatch):
    monkeypatch.setattr(type(data), "detokenize", lambda self, lines: [each + "." * (len(each) % 3) for each in lines])
    lines = list(data.split("test").target)
    perfect, bad = (task.score(data, "test", each).values for each in (lines, lines[::-1]))
    assert perfect["bleu"] == pytest.approx(100)
    assert perfect["bleu_13a"] == perfect["bleu_13a_bound"] == bad["bleu_13a_bound"] < 99
    assert bad["bleu_13a"] < 50


def test_compounds_are_split_when_asked_for(data):
    lines = list(data.split("test").target)
    plain = parse().bind().score(data, "test", lines)
    split = parse(compound_split=True).bind().score(data, "test", lines)
    assert split.signatures["bleu"] != plain.signatures["bleu"]
    assert split.values["bleu"] == pytest.approx(100)


def test_translate_keeps_the_order_of_lines(data, task, monkeypatch):
    monkeypatch.setattr(decoding, "SENTENCES", 4)
    oracle, pairs = Oracle(data, "test"), data.split("test")
    lines = list(pairs.source)[:10]
    found = task.translate(build(task.spec), data, lines, oracle)
    assert found == list(pairs.references)[:10]
    assert oracle.seen == [4, 4, 2]


def test_translate_tells_how_many_tokens_are_unknown(data, task, caplog):
    oracle, lines = Oracle(data, "test"), list(data.split("test").source)[:2]
    task.translate(build(task.spec), data, lines, oracle)
    assert "unknown" not in caplog.text
    words = len(lines[0].split())
    oracle.known[f"{lines[0]} <unk> <unk>"] = ""
    task.translate(build(task.spec), data, [f"{lines[0]} \u4e00 \u4e01"], oracle)
    assert f"2 of the {words + 2} tokens of this text are unknown to the vocabulary" in caplog.text


@pytest.mark.parametrize(("spec", "used"), [
    (GreedySpec(quantization="int8"), (True, False)),
    (GreedySpec(precision="bf16"), (False, True)),
    (GreedySpec(), (False, False)),
])  # fmt: skip
def test_searches_multiply_what_their_spec_says(data, task, spec, used, monkeypatch):
    monkeypatch.setattr("attnbench.search.base.multiplies_bfloat16", lambda device: True)
    model, seen, given = build(task.spec).float(), [], spec

    class Watched(Oracle):
        spec = given

        def __call__(self, model: Seq2SeqModel, source: Source, special: SpecialIds) -> list[list[Hypothesis]]:
            forward = vars(model.output).get("forward")
            quantized = forward is not None and forward.dtype == torch.int8
            seen.append((quantized, torch.is_autocast_enabled("cpu")))
            return super().__call__(model, source, special)

    task.evaluate(model, data, "valid", Watched(data, "valid"), 4096)
    task.translate(model, data, list(data.split("test").source)[:3], Watched(data, "test"))
    assert seen == 2 * [used]
    assert not torch.is_autocast_enabled("cpu")
    assert "forward" not in vars(model.output)


def widest(data, split):
    pairs = data.split(split)
    return max(max(len(s.split()), len(t.split())) + 1 for s, t in zip(pairs.source, pairs.target, strict=True))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_pair_longer_than_the_model_is_told_before_training(data, task, split, monkeypatch):
    longest = widest(data, split)
    model = build(task.spec, max_length=longest - 1)
    monkeypatch.setattr(pair_tasks, "SPLITS", (split,))
    mend = rf"the {split} split has {longest} tokens, and the model reads {longest - 1}; raise model.max_length"
    with pytest.raises(AttnbenchError, match=mend) as caught:
        task.check(model, data)
    assert ("task.max_length" in str(caught.value)) == (split == "train")
    task.check(build(task.spec, max_length=longest), data)


def test_a_sentence_longer_than_the_model_names_the_mend(data, task):
    longest = widest(data, "test")
    model = build(task.spec, max_length=longest - 1)
    with pytest.raises(AttnbenchError, match=rf"{longest} tokens.*model\.max_length {longest - 1}.*task\.max_length"):
        task.validate(model, data, "test", 4000)


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [5, 256])
def test_inspect_measures_every_site_on_the_first_sentences(data, task, monkeypatch, sample):
    monkeypatch.setattr(pair_tasks, "SAMPLE", sample)
    site = {"transform": {"kind": "topk", "k": 2, "ties": "index"}}
    model = build(task.spec, attention={"cross": site, "decoder_self": site})
    metrics = task.inspect(model, data, "valid", 200)
    pairs = data.split("valid")
    lengths = [(len(s.split()) + 1, len(t.split()) + 1) for s, t in zip(pairs.source, pairs.target, strict=True)]
    chosen = lengths[:sample]
    assert metrics.samples == {"attended": len(chosen)}
    rows = sum(source for source, _ in chosen)
    assert metrics.values["attended/encoder_self"] == pytest.approx(sum(s * s for s, _ in chosen) / rows)
    queries = sum(target for _, target in chosen)
    assert metrics.values["attended/cross"] == pytest.approx(2)
    assert metrics.values["attended/decoder_self"] == pytest.approx(2 - len(chosen) / queries)  # the first sees itself
    assert 0 < metrics.values["entropy/cross"] <= math.log(2)
    assert metrics.values["entropy/encoder_self"] > metrics.values["entropy/cross"]


# ---- spec -----------------------------------------------------------------------------------------------------------


def test_scores_are_no_part_of_the_data():
    """The prepared folder is the same however outputs are scored, and another when the text is."""
    cache = Path("cache")
    assert parse().data_path(cache) == parse(bleu="tok", compound_split=True).data_path(cache)
    assert parse().data_path(cache) != parse(lowercase=True).data_path(cache)
    assert parse().digest() != parse(bleu="tok").digest()


def test_model_sizes_are_known_without_data():
    sizes = parse(tokenizer={"kind": "word", "source_vocab": 50, "target_vocab": 60}).model_sizes()
    assert (sizes.source_vocab, sizes.target_vocab, sizes.joint, sizes.pad) == (50, 60, False, PAD)
    assert parse(tokenizer={"kind": "bpe", "vocab": 300, "joint": True}).model_sizes().joint

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from torchdefine.context import Transformer, TransformerConfig
from torchdefine.embedding import StandardMap, TokenEmbedding
from torchdefine.errors import MachineError, UserError
from torchdefine.output import FullSoftmax
from torchdefine.tasks.sampling import SamplingOptions, draw_rows
from torchdefine.tasks.translation import Translator
from torchdefine.tasks.translation.beam import BeamConfig, TargetTokens, beam_search, sample_targets

PAD, BOS, EOS = 0, 1, 2
TOKENS = TargetTokens(BOS, EOS, PAD, (PAD, BOS))


@dataclass
class ToyState:
    prefixes: Tensor

    def select(self, rows: Tensor, sources: Tensor | None = None) -> "ToyState":
        return ToyState(self.prefixes[rows])


class ToyModel(nn.Module):
    """Log-probabilities of the next of 5 tokens, drawn once for every prefix; the source's first id picks the world."""

    def __init__(self, tokens: int = 5, sharpness: float = 1.5) -> None:
        super().__init__()
        self.tokens, self.sharpness, self.anywhere = tokens, sharpness, nn.Parameter(torch.zeros(()))

    def log_probs(self, prefix: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash(prefix) % 2**31)
        logits = torch.randn(self.tokens, generator=generator, dtype=torch.float64) * self.sharpness
        return logits.log_softmax(-1)

    def start(self, source: Tensor, hypotheses: int = 1) -> ToyState:
        return ToyState(source[:, :1].repeat_interleave(hypotheses, 0))

    def step(self, ids: Tensor, state: ToyState) -> tuple[Tensor, ToyState]:
        prefixes = torch.cat((state.prefixes, ids.unsqueeze(1)), 1)
        rows = [self.log_probs(tuple(row)) for row in prefixes.tolist()]
        return torch.stack(rows), ToyState(prefixes)


class Diverged(ToyModel):
    def log_probs(self, prefix: tuple[int, ...]) -> Tensor:
        return torch.full((self.tokens,), torch.nan, dtype=torch.float64)


def test_a_model_whose_numbers_are_none_is_named() -> None:
    with pytest.raises(MachineError, match="gives no token a probability"):
        beam_search(Diverged(), [[3], [4, 5]], TOKENS, BeamConfig(size=2))


def every_target(model: ToyModel, world: int, longest: int, options: BeamConfig) -> list[tuple[float, list[int]]]:
    """All targets of up to ``longest`` tokens, <eos> included, by brute force."""
    found = []
    for length in range(longest):
        for target in itertools.product(range(3, model.tokens), repeat=length):
            total, prefix = 0.0, (world, BOS)
            for token in (*target, EOS):
                total += float(model.log_probs(prefix)[token])
                prefix = (*prefix, token)
            found.append((options.score(total, length + 1), list(target)))
    return sorted(found, reverse=True)


def plain_beam(model: ToyModel, world: int, longest: int, options: BeamConfig) -> list[tuple[float, list[int]]]:
    """Beam search by the book: lists, no batch, no tensors."""
    alive, ended = [(0.0, [])], []
    for length in range(1, longest + 1):
        every = []
        for total, target in alive:
            log_probs = model.log_probs((world, BOS, *target)).tolist()
            allowed = [EOS] if length == longest else [EOS, *range(3, model.tokens)]
            every += [(total + log_probs[token], target, token) for token in allowed]
        every.sort(key=lambda item: -item[0])
        ended += [
            (options.score(total, length), target) for total, target, token in every[: options.size] if token == EOS
        ]
        alive = [(total, [*target, token]) for total, target, token in every if token != EOS][: options.size]
        if len(ended) >= options.size or not alive:
            break
    return sorted(ended, reverse=True)[: options.size]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("world", range(6))
def test_a_wide_beam_is_brute_force(world: int, alpha: float) -> None:
    options = BeamConfig(size=40, length_penalty=alpha, max_ratio=0, max_extra=4)
    model = ToyModel()
    wanted = every_target(model, world, 4, options)
    (found,) = beam_search(model, [[world]], TOKENS, options)
    assert [h.ids for h in found] == [target for _, target in wanted]
    assert [h.score for h in found] == pytest.approx([score for score, _ in wanted])


@given(world=st.integers(0, 10_000), size=st.integers(1, 6), longest=st.integers(1, 7), tokens=st.integers(4, 9))
def test_narrow_beams_follow_the_book(world: int, size: int, longest: int, tokens: int) -> None:
    options = BeamConfig(size=size, length_penalty=0.6, max_ratio=0, max_extra=longest)
    model = ToyModel(tokens)
    wanted = plain_beam(model, world, longest, options)
    (found,) = beam_search(model, [[world]], TOKENS, options)
    assert [h.ids for h in found] == [target for _, target in wanted]
    assert [h.score for h in found] == pytest.approx([score for score, _ in wanted])


def test_the_beam_stays_full_when_several_hypotheses_end_at_once() -> None:
    told = {
        (): [0, 0, 0, 0.4, 0.35, 0.25],
        (3,): [0, 0, 0.9, 0.1, 0, 0],  # two of three end here
        (4,): [0, 0, 0.9, 0.1, 0, 0],
        (5,): [0, 0, 0, 0.4, 0.35, 0.25],
        (5, 5): [0, 0, 1, 0, 0, 0],  # and only the third of the others ends at all
    }

    class Told(ToyModel):
        def log_probs(self, prefix: tuple[int, ...]) -> Tensor:
            return torch.tensor(told.get(prefix[2:], [0, 0, 0, 0.4, 0.3, 0.3]), dtype=torch.float64).log()

    model, options = Told(6), BeamConfig(size=3, length_penalty=0, max_ratio=0, max_extra=4)
    (found,) = beam_search(model, [[0]], TOKENS, options)
    assert [h.ids for h in found] == [target for _, target in plain_beam(model, 0, 4, options)] == [[3], [4], [5, 5]]


@given(
    world=st.integers(0, 10_000),
    size=st.integers(1, 6),
    wanted=st.integers(1, 6),
    alpha=st.sampled_from([0.0, 0.6, 2.0]),
)
def test_a_search_that_stops_early_finds_the_same(world: int, size: int, wanted: int, alpha: float) -> None:
    options = BeamConfig(size=size, length_penalty=alpha, max_ratio=0, max_extra=9)
    model, wanted = ToyModel(6), min(wanted, size)
    (whole,), (early,) = (beam_search(model, [[world]], TOKENS, options, count) for count in (None, wanted))
    assert early == whole[:wanted]


def test_any_length_penalty_can_be_searched_with() -> None:
    options = BeamConfig(size=2, length_penalty=1e4, max_ratio=0, max_extra=9)
    (found,) = beam_search(ToyModel(6), [[1]], TOKENS, options)
    assert all(h.score == options.score(h.log_prob, len(h.ids) + 1) for h in found)
    assert all(math.isfinite(h.score) for h in found)


def test_a_search_for_the_best_stops_when_nothing_better_can_come() -> None:
    taken: list[Tensor] = []

    class Counting(ToyModel):
        def step(self, ids: Tensor, state: ToyState) -> tuple[Tensor, ToyState]:
            taken.append(ids)
            return super().step(ids, state)

    model, options, steps = Counting(6), BeamConfig(size=5, length_penalty=0.6, max_ratio=0, max_extra=30), {}
    for wanted in (5, 1):
        taken.clear()
        for world in range(20):
            beam_search(model, [[world]], TOKENS, options, wanted)
        steps[wanted] = len(taken)
    assert steps[1] < 0.9 * steps[5]


@given(world=st.integers(0, 10_000))
def test_beam_1_is_greedy(world: int) -> None:
    model, target, total = ToyModel(8), [], 0.0
    while len(target) < 20:
        log_probs = model.log_probs((world, BOS, *target))
        log_probs[[PAD, BOS]] = -torch.inf
        token = int(log_probs.argmax()) if len(target) < 19 else EOS
        total += float(log_probs[token])
        if token == EOS:
            break
        target.append(token)
    (found,) = beam_search(model, [[world]], TOKENS, BeamConfig(1, 0.6, 0, 20))
    assert [h.ids for h in found] == [target]
    assert found[0].log_prob == pytest.approx(total)


def translator(norm: str = "pre", vocabulary: int = 23) -> Translator:
    torch.manual_seed(3)
    embedding = TokenEmbedding(StandardMap(vocabulary, 16))
    config = TransformerConfig(heads=2, hidden_dim=32, encoder_layers=2, decoder_layers=2, norm=norm, dropout=0.3)
    output = FullSoftmax(16, num_embeddings=vocabulary)
    model = Translator(embedding, embedding, Transformer(16, config), output, PAD).double().eval()
    with torch.no_grad():  # targets that differ, and end before they must
        for layer in model.transformer.decoder:
            layer.across.out.weight.mul_(8)
        output.weight.mul_(2)
        output.bias[EOS] = 1.5
    return model


def sentences(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [[*torch.randint(3, 23, (n,), generator=generator).tolist(), EOS] for n in lengths]


@pytest.mark.parametrize("size", [1, 4])
def test_batch_1_equals_batch_64(size: int) -> None:
    model, sources = translator(), sentences(64)
    together = beam_search(model, sources, TOKENS, BeamConfig(size))
    alone = [beam_search(model, [source], TOKENS, BeamConfig(size))[0] for source in sources]
    assert len({tuple(h.ids) for found in together for h in found}) > 10
    for one, other in zip(alone, together, strict=True):
        assert [h.ids for h in one] == [h.ids for h in other]
        assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-9)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_scores_are_the_teacher_forced_log_probabilities(norm: str) -> None:
    model, sources = translator(norm), sentences(20)
    options = BeamConfig(3, length_penalty=0.6)
    for source, found in zip(sources, beam_search(model, sources, TOKENS, options), strict=True):
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
        for hypothesis in found:
            target = torch.tensor([[*hypothesis.ids, EOS]])
            inputs = torch.tensor([[BOS, *hypothesis.ids]])
            log_prob = -float(model(torch.tensor([source]), inputs, target, reduction="sum")[0].objective.detach())
            assert hypothesis.log_prob == pytest.approx(log_prob, abs=1e-9)
            assert hypothesis.score == pytest.approx(log_prob / ((5 + target.shape[1]) / 6) ** 0.6, abs=1e-9)
            assert target.shape[1] <= options.limit(len(source))


def test_sampling_depends_on_a_sources_seed_alone() -> None:
    model, sources = translator(), sentences(12)
    options, limits = SamplingOptions(temperature=1.2, top_p=0.95), BeamConfig()
    together = sample_targets(model, sources, TOKENS, options, limits, range(12), count=3)
    alone = [sample_targets(model, [s], TOKENS, options, limits, [i], count=3)[0] for i, s in enumerate(sources)]
    assert [[h.ids for h in hs] for hs in alone] == [[h.ids for h in hs] for hs in together]
    others = sample_targets(model, sources, TOKENS, options, limits, range(12, 24), count=3)
    assert [[h.ids for h in hs] for hs in others] != [[h.ids for h in hs] for hs in together]
    for source, drawn in zip(sources, together, strict=True):
        target = torch.tensor([[*drawn[0].ids, EOS]])
        inputs = torch.tensor([[BOS, *drawn[0].ids]])
        log_prob = -float(model(torch.tensor([source]), inputs, target, reduction="sum")[0].objective.detach())
        assert drawn[0].log_prob == pytest.approx(log_prob, abs=1e-9)
        assert [h.log_prob for h in drawn] == sorted((h.log_prob for h in drawn), reverse=True)
        assert all(len(h.ids) < limits.limit(len(source)) for h in drawn)


def test_a_model_in_training_is_searched_without_dropout_and_trains_on() -> None:
    model, sources = translator(), sentences(4)

    def found() -> list:
        drawn = sample_targets(model, sources, TOKENS, SamplingOptions(), BeamConfig(), range(4))
        return [beam_search(model, sources, TOKENS, BeamConfig(2)), drawn]

    expected = found()
    assert not any(part.training for part in model.modules())
    model.train()
    model.source.eval()  # somebody keeps the embedding as it is
    for _ in range(3):
        assert found() == expected
    assert model.training
    assert model.transformer.training
    assert not model.source.training


def test_a_search_that_fails_leaves_the_model_in_training() -> None:
    model = translator().train()
    with torch.no_grad():
        model.output.bias.fill_(torch.nan)
    with pytest.raises(MachineError, match="gives no token a probability"):
        beam_search(model, sentences(2), TOKENS)
    assert model.training


def test_sampling_at_temperature_0_is_greedy() -> None:
    model, sources = translator(), sentences(12)
    drawn = sample_targets(model, sources, TOKENS, SamplingOptions(0), BeamConfig(), range(12))
    assert [h[0].ids for h in drawn] == [h[0].ids for h in beam_search(model, sources, TOKENS, BeamConfig(1))]


def test_what_is_forbidden_is_never_drawn() -> None:
    (drawn,) = sample_targets(ToyModel(), [[0]], TOKENS, SamplingOptions(), BeamConfig(), [1], count=30)
    assert {index for hypothesis in drawn for index in hypothesis.ids} == {3, 4}


def test_draws_have_the_models_frequencies() -> None:
    log_probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    uniform = torch.rand(20_000, dtype=torch.float64)

    def frequencies(options: SamplingOptions) -> list[float]:
        drawn = draw_rows(log_probs.expand(20_000, 4).clone(), options, uniform)
        return (torch.bincount(drawn, minlength=4) / 20_000).tolist()

    assert frequencies(SamplingOptions()) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.015)
    assert frequencies(SamplingOptions(top_k=2)) == pytest.approx([0.625, 0.375, 0, 0], abs=0.015)
    assert frequencies(SamplingOptions(top_p=0.6)) == pytest.approx([0.625, 0.375, 0, 0], abs=0.015)
    assert frequencies(SamplingOptions(forbidden=(0,)))[0] == 0
    squared = (2 * log_probs).softmax(-1).tolist()
    assert frequencies(SamplingOptions(temperature=0.5)) == pytest.approx(squared, abs=0.015)


def test_nothing_gives_nothing() -> None:
    assert beam_search(ToyModel(), [], TOKENS) == []
    assert sample_targets(ToyModel(), [], TOKENS, SamplingOptions(), BeamConfig(), []) == []


def test_a_target_may_grow_with_its_source() -> None:
    assert [BeamConfig().limit(length) for length in (1, 2, 7, 100)] == [11, 13, 20, 160]
    assert BeamConfig(max_ratio=0.29, max_extra=1).limit(100) == 30  # though 0.29 * 100 is less than 29 to a float


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size is 0, but must be at least 1"),
        ({"length_penalty": -1}, "length_penalty is -1, but must be at least 0"),
        ({"length_penalty": float("nan")}, "length_penalty is nan, but must be at least 0"),
        ({"max_ratio": float("inf")}, "max_ratio is inf, but must be at least 0 and below inf"),
        ({"max_ratio": float("nan")}, "max_ratio is nan, but must be at least 0"),
        ({"max_extra": 0}, "max_extra is 0, but must be at least 1"),
    ],
)
def test_bad_options(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        BeamConfig(**arguments)

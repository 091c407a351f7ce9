"""What tokens share beside a row of their own, against a reference written out token by token."""

import copy
import math
from pathlib import Path
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn

from torchdefine import AdaptiveMap, DeFINE, ProjectiveMap, StandardMap
from torchdefine.analysis.correlation import embedding_maps
from torchdefine.embedding import TokenEmbedding, VocabularyFacts
from torchdefine.embedding.features import Features, hashed_pairs, previous_ids
from torchdefine.embedding.token_embedding import embedded
from torchdefine.errors import UserError
from torchdefine.modes import prepare

V, WORDS = 40, [f"{stem}{end}" for stem in ("walk", "talk", "run", "a", "") for end in ("", "s", "ed", "ing")] * 2
FACTS = VocabularyFacts(V, None, WORDS.__getitem__)
MAPS = {
    "standard": lambda: StandardMap(V, 16, padding_idx=2),
    "projective": lambda: ProjectiveMap(V, 8, 16, padding_idx=2),
    "adaptive": lambda: AdaptiveMap(V, 16, (10, 20), padding_idx=2),
    "few rows": lambda: AdaptiveMap(V, 16, (10, 20), padding_idx=2, rows=30),
    "few bands": lambda: AdaptiveMap(V, 16, (10, 20), padding_idx=2, rows=15),
}
PLACES = ("add", "concat", "after")
ALONE = ["characters:50x8:{place}", "frequency:8x8:{place}"]
IDS = torch.tensor([[2, 2, 5, 39, 7, 5], [1, 0, 33, 2, 21, 20]])


def made(place: str, kind: str = "standard", pairs: bool = True) -> DeFINE:
    texts = [text.format(place=place) for text in (*ALONE, *(["bigrams:64x8:{place}"] if pairs else []))]
    embedding = DeFINE.over(MAPS[kind](), 24, expand_dim=64, features=texts, vocabulary=FACTS)
    for part in embedding.features.parts:  # a matrix that is still zero would hide what it lifts
        if part.lift is not None:
            nn.init.normal_(part.lift.weight)
    return embedding.double()


def reference(embedding: DeFINE, ids: Tensor, previous: Tensor | None) -> Tensor:
    """Every token by itself, from the definitions."""

    def row(part: nn.Module, token: int, before: int | None) -> Tensor:
        weight, rows = part.rows.table.weight, len(part.rows.table.weight)
        if type(part.rows).__name__ == "Bigrams":
            mixed = ((before + 2) * 1_103_515_245 + token * 1_597_334_677 + 741_103_597) % (2**31 - 1)
            found = weight[mixed * (mixed + 741_103_597) % (2**31 - 1) % rows]
        elif type(part.rows).__name__ == "Frequency":
            found = weight[min(int(math.log(token + 1) * rows / math.log(V + 1)), rows - 1)]
        else:
            word = f"<{WORDS[token]}>"
            ngrams = [word[i : i + n] for n in (3, 4, 5) for i in range(len(word) - n + 1)]
            hashed = [crc32(ngram.encode()) % (rows - 1) + 1 for ngram in ngrams]
            found = sum((weight[h] for h in hashed), weight.new_zeros(8)) / max(len(hashed), 1) ** 0.5
        return found if part.lift is None else part.lift.weight @ found

    vectors = []
    for place in torch.cartesian_prod(*map(torch.arange, ids.shape)):
        token = int(ids[tuple(place)])
        before = None if previous is None else int(previous[tuple(place)])
        before = -1 if before == embedding.padding_idx else before
        of = {p: [row(part, token, before) for part in embedding.features.parts if part.place == p] for p in PLACES}
        read = torch.cat((embedding.map(torch.tensor(token)) + sum(of["add"]), *of["concat"]))
        finished = embedding.unit(read) + sum(of["after"])
        vectors.append(torch.zeros_like(finished) if token == embedding.padding_idx else finished)
    return torch.stack(vectors).view(*ids.shape, -1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", MAPS)
def test_vectors_and_gradients_are_those_of_the_reference(place: str, kind: str) -> None:
    embedding, previous = made(place, kind), previous_ids(IDS)
    found, expected = embedding(IDS, previous=previous), reference(embedding, IDS, previous)
    torch.testing.assert_close(found, expected)
    weights = list(embedding.parameters())
    grads = [torch.autograd.grad(one.square().sum(), weights, allow_unused=True) for one in (found, expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(
            torch.zeros(1) if ours is None else ours, torch.zeros(1) if theirs is None else theirs
        )
    prepare(embedding)  # equal tokens are computed once, where they may be
    text = torch.randint(V, (4, 50))
    before = previous_ids(text)
    assert embedding.shares is (place == "after")
    torch.testing.assert_close(embedded(embedding, text, previous=before), embedding(text, previous=before))


@pytest.mark.parametrize("place", PLACES)
def test_what_depends_on_the_token_alone_is_cached(place: str) -> None:
    embedding = made(place, pairs=False).eval()
    torch.testing.assert_close(embedding.table(), reference(embedding, torch.arange(V)[None], None)[0])
    torch.testing.assert_close(embedding.cached()(IDS), embedding(IDS))
    torch.testing.assert_close(embedding.finished(), embedding.table())
    embedding.train().finished().sum().backward()
    assert all(part.rows.table.weight.grad is not None for part in embedding.features.parts)


@pytest.mark.parametrize("place", PLACES)
def test_maps_of_dimensions_are_those_of_the_finished_vectors(place: str) -> None:
    embedding = made(place, pairs=False).eval()
    table = embedding.table()
    cosines = nn.functional.normalize(table, dim=0)
    torch.testing.assert_close(embedding_maps(embedding)["finished"].cosines, cosines.T @ cosines)


def test_bigrams_behind_the_unit_are_added_to_cached_vectors() -> None:
    embedding, previous = made("after").eval(), previous_ids(IDS)
    expected, table = embedding(IDS, previous=previous), embedding.table()
    torch.testing.assert_close(table, reference(made_alone(embedding), torch.arange(V)[None], None)[0])
    with torch.no_grad():
        embedding.look_up(table)
    torch.testing.assert_close(embedding(IDS, previous=previous), expected)
    with pytest.raises(UserError, match=r"cannot add bigrams: call look_up\(table\(\)\)"):
        embedding.cached()


def made_alone(embedding: DeFINE) -> DeFINE:
    alone = copy.copy(embedding)
    alone._modules = dict(embedding._modules)
    alone.features = embedding.features.of_tokens_alone()
    return alone


@pytest.mark.parametrize("place", ["add", "concat"])
def test_bigrams_through_the_unit_have_no_table(place: str) -> None:
    embedding = made(place).eval()
    for wanted in (embedding.table, embedding.finished, lambda: embedding.look_up(torch.zeros(V, 24))):
        with pytest.raises(UserError, match="Bigrams go through the unit"):
            wanted()
    with pytest.raises(UserError, match="Bigrams need the token before each"):
        embedding(IDS)


def test_left_padding_changes_no_vector() -> None:
    embedding, text = made("concat"), torch.tensor([[7, 8, 9]])
    padded = torch.cat((torch.full((1, 4), 2), text), dim=1)
    alone = embedding(text, previous=previous_ids(text))
    torch.testing.assert_close(embedding(padded, previous=previous_ids(padded))[:, 4:], alone)


@pytest.mark.parametrize("place", PLACES)
def test_a_model_begins_as_without_features_that_are_lifted(place: str) -> None:
    torch.manual_seed(0)
    features = Features([f"bigrams:64x8:{place}"], FACTS, 16, 24)
    vectors, previous = torch.randn(2, 6, 16), previous_ids(IDS)
    if place == "concat":
        wider = features.before_unit(vectors, IDS, previous)
        assert torch.equal(wider[..., :16], vectors)
        assert wider.shape[-1] == 24
    else:
        assert torch.equal(features.before_unit(vectors, IDS, previous), vectors)
        assert not features.with_pairs(torch.zeros(2, 6, 24), IDS, previous).any()


def test_pairs_fill_the_rows_evenly() -> None:
    """As throws of balls into bins do: the variance of their number is the mean."""
    pairs = torch.cartesian_prod(torch.arange(-1, 1000), torch.arange(100))
    bins = torch.bincount(hashed_pairs(*pairs.T, 1 << 14), minlength=1 << 14).double()
    assert 0.9 < float(bins.var() / bins.mean()) < 1.1
    large = torch.tensor([2**31 - 1])
    assert 0 <= int(hashed_pairs(large, large, 1 << 14)) < 1 << 14


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", MAPS)
def test_saved_and_loaded_bit_by_bit(place: str, kind: str, tmp_path: Path) -> None:
    embedding, previous = made(place, kind).float(), previous_ids(IDS)
    embedding.save(tmp_path)
    loaded = DeFINE.load(tmp_path)
    assert torch.equal(loaded(IDS, previous=previous), embedding(IDS, previous=previous))
    new = loaded.resize(V + 5)(torch.tensor([V + 4]), previous=torch.tensor([3]))
    assert new.isfinite().all()
    assert torch.equal(loaded(IDS, previous=previous), embedding(IDS, previous=previous))


def test_sparse_tables_get_the_same_gradients() -> None:
    dense = made("concat")
    sparse, previous = copy.deepcopy(dense), previous_ids(IDS)
    sparse.map.sparse = sparse.features.sparse = True
    for embedding in (dense, sparse):
        embedding(IDS, previous=previous).square().sum().backward()
    for ours, theirs in zip(sparse.features.parts, dense.features.parts, strict=True):
        assert ours.rows.table.weight.grad.is_sparse
        torch.testing.assert_close(ours.rows.table.weight.grad.to_dense(), theirs.rows.table.weight.grad)


def test_without_a_unit_everything_is_added_behind() -> None:
    table = StandardMap(V, 16)
    features = Features(["bigrams:64x8", "characters:50x8:concat"], FACTS, 16, 16, has_unit=False)
    embedding = TokenEmbedding(table, features=features)
    assert embedding(IDS, previous=previous_ids(IDS)).shape == (2, 6, 16)
    assert not features.through_unit


@pytest.mark.parametrize(
    "text", ["trigrams:64x8", "bigrams:64", "bigrams:64x8:before", "bigrams:0x8", "characters:1x8"]
)
def test_an_unknown_feature_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="The feature"):
        DeFINE(V, 24, map_dim=16, expand_dim=64, features=[text])


def test_strings_are_asked_for_and_counted() -> None:
    sizes = {"map_dim": 16, "expand_dim": 64, "features": ["characters:50x8"]}
    with pytest.raises(UserError, match="reads the tokens' strings"):
        DeFINE(V, 24, **sizes)
    with pytest.raises(UserError, match="There are 2 tokens for 40 rows"):
        DeFINE(V, 24, tokens=["a", "b"], **sizes)
    assert DeFINE(V, 24, tokens=WORDS, **sizes).features.parts[0].rows.ngrams.any()

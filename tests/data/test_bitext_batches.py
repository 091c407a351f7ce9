import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")

from torchdefine.data import IGNORE, Bitext, BitextBatches, BitextConfig, encode_bitext
from torchdefine.data.batches import bucket_bounds
from torchdefine.errors import UserError


@pytest.fixture(scope="module")
def bitext(tmp_path_factory: pytest.TempPathFactory) -> Bitext:
    folder = tmp_path_factory.mktemp("bitext")
    random = np.random.default_rng(0)
    lengths = random.integers(1, 20, 300)
    rows = [" ".join(random.choice(["ab", "cd", "ef"], n)) for n in lengths]
    others = [" ".join(random.choice(["gh", "ij"], max(1, n + int(random.integers(-2, 3))))) for n in lengths]
    (folder / "train.en").write_text("\n".join(rows) + "\n")
    (folder / "train.de").write_text("\n".join(others) + "\n")
    return encode_bitext(folder, BitextConfig(bpe_size=280), folder / "cache")


def batches(bitext: Bitext, tokens: int = 60, seed: int | None = 3) -> BitextBatches:
    return BitextBatches(bitext.splits["train"], bitext.tokenization, tokens, "cpu", seed)


@pytest.mark.parametrize("tokens", [1, 17, 60, 500])
@pytest.mark.parametrize("seed", [None, 3])
def test_every_pair_stands_in_one_batch_of_a_pass(bitext: Bitext, tokens: int, seed: int | None) -> None:
    given = batches(bitext, tokens, seed)
    for epoch in range(2):
        numbers = range(epoch * given.per_epoch, (epoch + 1) * given.per_epoch)
        together = np.concatenate([given.indices(number) for number in numbers])
        assert np.array_equal(np.sort(together), np.arange(len(bitext.splits["train"])))
    for number in range(given.per_epoch):
        batch = given.batch(number)
        rows, longest = len(batch.source), max(batch.source.shape[1], batch.targets.shape[1])
        assert rows * longest <= tokens or rows == 1
        assert batch.tokens == given.tokens(number) == int((batch.targets != IGNORE).sum())


def test_a_batch_depends_on_seed_and_number_alone(bitext: Bitext) -> None:
    given = batches(bitext)
    numbers = [0, 5, given.per_epoch + 2, 3 * given.per_epoch - 1, 1]
    there = {number: given.indices(number) for number in sorted(numbers)}
    for number in numbers:  # in another order, from a fresh object
        assert np.array_equal(batches(bitext).indices(number), there[number])
    first = [given.indices(number).tolist() for number in range(given.per_epoch)]
    second = [given.indices(given.per_epoch + number).tolist() for number in range(given.per_epoch)]
    other_seed = [batches(bitext, seed=4).indices(number).tolist() for number in range(given.per_epoch)]
    assert first != second != other_seed != first
    assert sorted(map(sorted, first)) != sorted(map(sorted, second))  # not only the order of the batches changes


def test_batches_go_from_short_to_long_unless_a_seed_shuffles_them(bitext: Bitext) -> None:
    source_lengths = np.diff(bitext.splits["train"].source_ends, prepend=0)

    def longest_of_each(given: BitextBatches) -> list[int]:
        made = [given.batch(number) for number in range(given.per_epoch)]
        widths = [max(batch.source.shape[1], batch.targets.shape[1]) for batch in made]
        return np.searchsorted(bucket_bounds(max(widths)), widths).tolist()

    in_order = batches(bitext, seed=None)
    assert longest_of_each(in_order) == sorted(longest_of_each(in_order))
    for number in range(in_order.per_epoch):  # beside its like a source pads less
        assert (np.diff(source_lengths[in_order.indices(number)]) >= 0).all()
    shuffled = longest_of_each(batches(bitext))
    assert shuffled != sorted(shuffled)


def test_rows_are_the_sentences(bitext: Bitext) -> None:
    given, pairs, tokenizer = batches(bitext), bitext.splits["train"], bitext.tokenization.source
    for number in range(given.per_epoch):
        batch = given.batch(number)
        for row, index in enumerate(given.indices(number)):
            for ids, file, ends in (
                (batch.source[row], pairs.source, pairs.source_ends),
                (batch.targets[row], pairs.target, pairs.target_ends),
            ):
                sentence = file.tokens[(ends[index - 1] if index else 0) : ends[index]].tolist()
                fill = tokenizer.pad_id if ids is batch.source[row] or file is pairs.source else IGNORE
                assert ids.tolist() == sentence + [fill] * (len(ids) - len(sentence))
            targets = batch.targets[row][batch.targets[row] != IGNORE]
            assert batch.inputs[row, : len(targets)].tolist() == [tokenizer.bos_id, *targets[:-1].tolist()]
        assert torch.equal(batch.targets, torch.from_numpy(batch.host_targets))


def test_buckets_reach_every_length() -> None:
    for longest in (1, 4, 5, 9, 50, 777):
        bounds = bucket_bounds(longest)
        assert (np.diff(bounds) > 0).all()
        assert (np.diff(bounds) <= np.maximum(1, 0.12 * bounds[:-1])).all(), "a pair pads by an eighth at most"
        assert bounds[-1] == max(longest, 4)
        assert len(bounds) < 60


def test_no_tokens_make_no_batch(bitext: Bitext) -> None:
    with pytest.raises(UserError, match="has 0 tokens"):
        batches(bitext, tokens=0)

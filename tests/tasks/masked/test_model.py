"""The encoder beside the classes of transformers, and the loss beside a naive one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torchdefine import UserError, load_recipe
from torchdefine.embedding import VocabularyFacts
from torchdefine.modes import prepare
from torchdefine.recipe import recipe_names
from torchdefine.task import find_task
from torchdefine.tasks.masked import MaskedModel, MaskedTokenizer, build_masked_model
from torchdefine.tasks.masked.text import MASK

SMALL = {
    "embedding": {"map_dim": 8},
    "unit": {"kind": "define", "embedding_dim": 32, "expand_dim": 32, "depth": 2},
    "context": {"layers": 2, "heads": 2, "hidden_dim": 48, "most_places": 40, "dropout": 0.0},
    "train": {"length": 16},
}
STYLES: dict[str, dict[str, Any]] = {
    "BERT": {"norm": "post", "positions": "learned", "gated": False},
    "ModernBERT": {"norm": "pre", "positions": "rotary", "gated": True},
}


@pytest.fixture(scope="module")
def tokens() -> MaskedTokenizer:
    pytest.importorskip("tokenizers")
    from torchdefine.data.tokenizer import train_subwords_on

    return MaskedTokenizer(train_subwords_on([["a small text of few words"] * 9], 280).tokenizer.to_str())


def small_model(size: int, **sections: Any) -> MaskedModel:
    changes = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {*SMALL, *sections}}
    changes["unit"] = sections.get("unit", SMALL["unit"])
    return build_masked_model(load_recipe("masked/laptop", changes), VocabularyFacts(size))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("unit", [SMALL["unit"], {"kind": "projection", "embedding_dim": 32}])
def test_a_stock_class_gives_the_same_and_loads_everywhere(
    style: str, unit: dict[str, Any], tokens: MaskedTokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    from torchdefine.tasks.masked.transformers_folder import STOCK, write_transformers

    model = small_model(len(tokens), context=STYLES[style], unit=unit).eval()
    assert write_transformers(model, tokens, tmp_path / "out", "", STOCK) < 1e-5
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == f"{'Bert' if style == 'BERT' else 'ModernBert'}ForMaskedLM"
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    batch = read([f"a small {MASK}", "few words of a text"], padding=True, return_tensors="pt")
    assert batch["input_ids"][0, 0] == tokens.bos_id
    assert tokens.mask_id in batch["input_ids"][0]
    visible = batch["attention_mask"].bool()
    theirs = loaded(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
    ours = model.output.log_prob(model.head(model.hidden(batch["input_ids"], visible)))
    torch.testing.assert_close(theirs[visible], ours[visible], atol=1e-5, rtol=1e-5)
    encoder = transformers.AutoModel.from_pretrained(tmp_path / "out")
    hidden = encoder(**{name: batch[name] for name in ("input_ids", "attention_mask")}).last_hidden_state
    torch.testing.assert_close(
        hidden[visible], model.hidden(batch["input_ids"], visible)[visible], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("context", "output", "refusal"),
    [
        ({"norm": "pre", "positions": "learned", "gated": True}, {}, "context.positions learned"),
        ({"norm": "post", "positions": "learned", "gated": True}, {}, "context.gated True"),
        (STYLES["BERT"], {"kind": "mixture"}, "one softmax over all tokens, not a MixtureSoftmax"),
    ],
)
def test_what_no_stock_class_has_is_refused(
    context: dict, output: dict, refusal: str, tokens: MaskedTokenizer, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from torchdefine.tasks.masked.transformers_folder import STOCK, write_transformers

    with pytest.raises(UserError, match=refusal):
        write_transformers(
            small_model(len(tokens), context=context, output=output).eval(), tokens, tmp_path / "out", "", STOCK
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "output",
    [{"kind": "full"}, {"kind": "adaptive-table", "cutoffs": [20, 50]}, {"tied": "finished"}, {"tied": "none"}],
)
def test_the_loss_is_that_of_hidden_places_alone(output: dict[str, Any]) -> None:
    model = small_model(90, output=output).double()
    ids, places = torch.randint(90, (3, 16)), torch.stack([torch.randperm(16)[:4] for _ in range(3)])
    targets = torch.randint(90, (3, 4))
    targets[0, 1] = -100
    model.train()
    losses, _ = model(ids, places, targets)
    everywhere = model.output.log_prob(model.head(model.hidden(ids)))  # (B, T, V)
    wanted = [
        -everywhere[b, places[b, k], targets[b, k]] for b in range(3) for k in range(4) if int(targets[b, k]) >= 0
    ]
    naive = torch.stack(wanted).mean()
    torch.testing.assert_close(losses.objective, naive, atol=1e-12, rtol=1e-12)
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours = torch.autograd.grad(losses.objective, parameters, retain_graph=True)
    theirs = torch.autograd.grad(naive, parameters)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("style", STYLES)
def test_padding_is_not_seen(style: str) -> None:
    model = small_model(60, context=STYLES[style]).double().eval()
    ids = torch.randint(60, (2, 12))
    visible = torch.ones(2, 12, dtype=torch.bool)
    visible[1, 7:] = False
    alone = model.hidden(ids[1:, :7])
    padded = model.hidden(ids, visible)
    torch.testing.assert_close(padded[1:, :7], alone, atol=1e-12, rtol=1e-12)
    ids[1, 9] = (ids[1, 9] + 1) % 60
    torch.testing.assert_close(model.hidden(ids, visible)[1, :7], padded[1, :7], atol=0, rtol=0)


@pytest.mark.parametrize("style", STYLES)
def test_a_prepared_model_gives_the_same(style: str) -> None:
    model = small_model(60, context=STYLES[style]).eval()
    ids = torch.randint(60, (8, 16))
    before = model.hidden(ids)
    prepare(model)
    torch.testing.assert_close(model.hidden(ids), before, atol=1e-6, rtol=1e-6)


def test_a_row_with_too_many_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="A row has 41 tokens, but the encoder has places for 40"):
        small_model(60).hidden(torch.zeros(1, 41, dtype=torch.long))
    with pytest.raises(UserError, match=r"train\.length 16 is more than the encoder's places"):
        load_recipe("masked/laptop", {"train": {"length": 16}, "context": {"most_places": 8}})


def test_all_weights_learn() -> None:
    for style in STYLES.values():
        model = small_model(60, context=style, output={"kind": "full"})
        losses, _ = model(torch.randint(60, (4, 16)), torch.randint(16, (4, 3)), torch.randint(60, (4, 3)))
        losses.objective.backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_rotations_go_by_distance() -> None:
    from torchdefine.tasks.masked.encoder import rotations, turned

    query, key = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)
    turns = rotations(12, 8, query)
    q, k = turned(query.expand(1, 1, 12, 8), turns), turned(key.expand(1, 1, 12, 8), turns)
    scores = (q @ k.transpose(-1, -2))[0, 0]  # (12, 12)
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-12, rtol=1e-12)
    assert F.cosine_similarity(scores[0, 1:], scores[1:, 0], dim=0) < 0.999  # before and after are not alike


@pytest.mark.parametrize("family", ["laptop", "wiki78m-8k", "wiki78m-32k", "wiki78m-128k"])
def test_recipes_of_a_family_differ_by_their_tables_alone(family: str) -> None:
    names = [name for name in recipe_names() if name.startswith(f"masked/{family}")]
    assert len(names) == 4
    recipes = [load_recipe(name) for name in names]
    models = [find_task("masked").count(recipe)[0] for recipe in recipes]
    assert len({model.parameters_by_part()["context"] for model in models}) == 1
    assert len({model.parameters_by_part()["total"] for model in models}) == 4
    for section in ("data", "masking", "context", "optim", "schedule", "train", "eval"):
        assert all(getattr(recipe, section) == getattr(recipes[0], section) for recipe in recipes)

"""A model with a trimmed vocabulary does with kept text what it did, through its tables, heads, biases and settings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, trainers

from tests.adapt.tiny_models import FAMILIES, V
from torchdefine.adapt.trimming import Trimmed, trim_vocabulary
from torchdefine.adapt.vocabulary import Coverage, coverage
from torchdefine.errors import UserError

transformers.logging.set_verbosity_error()

WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def words(size: int = V - 3, pad: int = 0) -> Any:
    """A tokenizer of single words; the special ones may come late."""
    special = ["[PAD]", "[UNK]", "[EOS]"]
    names = [f"w{number}" for number in range(pad)] + special
    names += [f"w{number}" for number in range(pad, size - 3)]
    made = tokenizers.Tokenizer(models.WordLevel({name: id_ for id_, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    named = dict(zip(("pad_token", "unk_token", "eos_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **named)


def kept_batch(trimmed: Trimmed) -> tuple[torch.Tensor, torch.Tensor]:
    """The same sentences in old and in new ids."""
    new = torch.randint(len(trimmed.old_ids), (4, 9), generator=torch.Generator().manual_seed(0))
    return torch.tensor(trimmed.old_ids)[new], new


def randomised(model: Any) -> Any:
    """Biases too, which start at zero."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias"):
                tensor.normal_()
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_generation_are_those_of_the_kept_tokens(family: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokenizer = randomised(FAMILIES[family].make(tied)), words()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if family == "marian" and not tied:
        with pytest.raises(UserError, match="one vocabulary for each side"):
            trim_vocabulary(model, tokenizer, range(9))
        return
    trimmed = trim_vocabulary(model, tokenizer, range(20, 50))
    assert trimmed.old_ids == [0, 1, 2, *range(20, 50)]
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())
    assert model.config.vocab_size == V
    trimmed.model.save_pretrained(tmp_path)
    trimmed.tokenizer.save_pretrained(tmp_path)
    loaded = FAMILIES[family].auto_class.from_pretrained(tmp_path).eval()
    old, new = kept_batch(trimmed)
    for one in (trimmed.model, loaded):
        assert one.config.vocab_size == one.get_input_embeddings().num_embeddings == 33
        more = [{}, {}]
        if model.config.is_encoder_decoder:
            more = [{"decoder_input_ids": old[:, :4]}, {"decoder_input_ids": new[:, :4]}]
        wanted, found = model(old, **more[0]).logits, one(new, **more[1]).logits
        torch.testing.assert_close(found, wanted[..., trimmed.old_ids], rtol=1e-5, atol=1e-5)
        if FAMILIES[family].generates:
            dropped = [[id_] for id_ in range(V) if id_ not in trimmed.old_ids]  # what the new model cannot say
            how = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(old)}
            said = model.generate(old, bad_words_ids=dropped, **how)
            again = one.generate(new, **how)
            assert torch.tensor(trimmed.old_ids)[again].tolist() == said.tolist()


def test_named_tokens_in_lists_in_nested_settings_and_of_generation() -> None:
    model = FAMILIES["llama"].make(True)
    model.config.eos_token_id = [60, 61]
    model.config.bos_token_id = 50_256  # of no token: left as it is
    model.generation_config.eos_token_id = 62
    model.generation_config.suppress_tokens = [63, 64]
    trimmed = trim_vocabulary(model, words(), [30])
    assert trimmed.old_ids == [0, 1, 2, 30, 60, 61, 62, 63, 64]
    assert trimmed.model.config.eos_token_id == [4, 5]
    assert trimmed.model.config.bos_token_id == 50_256
    assert trimmed.model.generation_config.eos_token_id == 6
    assert trimmed.model.generation_config.suppress_tokens == [7, 8]
    assert model.config.eos_token_id == [60, 61]
    model.config.pad_token_id = 95  # a row beyond the tokenizer's
    with pytest.raises(UserError, match="names the token 95, which its tokenizer does not have"):
        trim_vocabulary(model, words(), [30])


@pytest.mark.parametrize(("config", "model_class", "pad_after"), [
    (transformers.RobertaConfig, transformers.RobertaForMaskedLM, 7),  # its positions count from there
    (transformers.BertConfig, transformers.BertForMaskedLM, 0),
])  # fmt: skip
def test_a_padding_token_that_positions_are_counted_from(config: Any, model_class: Any, pad_after: int) -> None:
    torch.manual_seed(0)
    made = config(vocab_size=V, pad_token_id=7, bos_token_id=None, eos_token_id=None, **WIDTHS)
    model = randomised(model_class(made))
    trimmed = trim_vocabulary(model, words(pad=7), range(40, 50))
    assert trimmed.model.config.pad_token_id == pad_after
    assert trimmed.model.get_input_embeddings().padding_idx == pad_after
    texts = ["w40 w41 w42", "w43 w44 w45 w46 w39"]
    old, new = (one(texts, padding=True, return_tensors="pt") for one in (words(pad=7), trimmed.tokenizer))
    wanted, found = (one(**{k: v for k, v in given.items() if k != "token_type_ids"}).logits
                     for one, given in ((model, old), (trimmed.model, new)))  # fmt: skip
    torch.testing.assert_close(found, wanted[..., trimmed.old_ids], rtol=1e-5, atol=1e-5)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"has the token 99, but the model's table has 97 rows"):
        trim_vocabulary(FAMILIES["llama"].make(True), words(size=100), [99])


def test_a_tokenizer_without_a_file_is_refused() -> None:
    with pytest.raises(UserError, match=r"A ByT5Tokenizer has no tokenizer\.json"):
        trim_vocabulary(FAMILIES["t5"].make(True), transformers.ByT5Tokenizer(), [1])


def trained(kind: str) -> Any:
    """The tokenizers of transformers that build parts of themselves anew when they are loaded."""
    lines = [" ".join(str(number * factor) for number in range(5, 60)) for factor in range(1, 30)]
    if kind == "gpt2":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer: Any = trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"]
        )
        made.train_from_iterator(lines, trainer)
        model = json.loads(made.to_str())["model"]
        return transformers.GPT2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    made.train_from_iterator(lines, trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>"))
    vocabulary = [tuple(entry) for entry in json.loads(made.to_str())["model"]["vocab"]]
    kinds = {"t5": transformers.T5Tokenizer, "xlm-roberta": transformers.XLMRobertaTokenizer}
    return kinds[kind](vocab=vocabulary)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "xlm-roberta"])
def test_tokenizers_of_transformers(kind: str, tmp_path: Path) -> None:
    tokenizer = trained(kind)
    config = transformers.GPT2Config(vocab_size=len(tokenizer) + 11, n_embd=16, n_layer=1, n_head=2, bos_token_id=0)
    text = ["12 24 36 48", "17 34 51"]
    before = tokenizer(text)["input_ids"]
    trimmed = trim_vocabulary(transformers.GPT2LMHeadModel(config), tokenizer, {id_ for row in before for id_ in row})
    assert len(trimmed.tokenizer) == len(trimmed.old_ids) == trimmed.model.config.vocab_size < len(tokenizer)
    trimmed.tokenizer.save_pretrained(tmp_path)
    for again in (trimmed.tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path)):
        after = again(text)["input_ids"]
        assert [[trimmed.old_ids[id_] for id_ in row] for row in after] == before
        assert again.decode(after[0]) == tokenizer.decode(before[0])
        assert set(again.all_special_tokens) == set(tokenizer.all_special_tokens)


def test_coverage() -> None:
    tokenizer = words()
    trimmed = trim_vocabulary(FAMILIES["llama"].make(True), tokenizer, range(3, 10))
    found = coverage(tokenizer, trimmed.tokenizer, trimmed.old_ids, ["w0 w1 w2 w60", "w1 w2", "w3 w4", "w2 nothing"])
    assert found == Coverage(0.9, 0.75, 0.0, pytest.approx(0.1))
    assert str(found).startswith("90.00% of the old tokens are kept; 75.0% of the sentences have the same tokens")

"""One behaviour suite over five families of models, tied and untied: everything a user of transformers does to them."""

import copy
import json
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from safetensors import safe_open

from tests.adapt.model_identity import model_hash
from tests.adapt.tiny_models import FAMILIES, WIDTH, Family, V, batch, bert, gpt2, llama, marian, t5
from torchdefine import replace_embeddings, restore
from torchdefine.adapt import FitOptions, fit
from torchdefine.adapt.huggingface import MODEL_TYPE, cache_tables, with_define, with_table
from torchdefine.adapt.stand_in import MapHead, SharedStandIn, StandIn, VectorsHead
from torchdefine.embedding import MLPConfig, StandardMap, TokenEmbedding
from torchdefine.errors import UserError
from torchdefine.tables import CompactTable, DenseRows, dense_table, quantised_table, svd_table
from torchdefine.tables.fitted_unit import UnitRows

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {"map_dim": 16, "expand_dim": 48, "depth": 3}
pytestmark = pytest.mark.filterwarnings("ignore:The replacement of")  # the tables are tiny
DOCS = Path(__file__).parents[2] / "docs"
CASES = [(name, tied) for name in FAMILIES for tied in (True, False)]


@pytest.fixture(params=CASES, ids=[f"{name}-{'tied' if tied else 'untied'}" for name, tied in CASES])
def family(request: pytest.FixtureRequest) -> tuple[Family, Any]:
    """A family and one of its models, with DeFINE in it."""
    name, tied = request.param
    return FAMILIES[name], with_define(FAMILIES[name].make(tied).eval(), **SIZES)


def logits(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**given).logits


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_forward_and_backward_are_those_of_the_model_with_finished_tables(name: str, tied: bool) -> None:
    """The reference is the plain model with all finished vectors in its table and the product of map and projection
    in its head: the same logits, and the same gradients for everything between."""
    reference = FAMILIES[name].make(tied).double().eval()
    model = with_define(copy.deepcopy(reference), **SIZES)
    given = batch(model, labels=True)

    replaced = {n: m for n, m in model.named_modules() if isinstance(m, StandIn | SharedStandIn)}
    for place, stand_in in replaced.items():
        source = stand_in.stand_in if isinstance(stand_in, SharedStandIn) else stand_in
        table = reference.get_submodule(place)
        table.weight = torch.nn.Parameter(source.table.table())
    head, old_head = model.get_output_embeddings(), reference.get_output_embeddings()
    if isinstance(head, MapHead):
        matrix = head.stand_in.table.map.table.weight @ head.projection.weight  # (V, n) (n, m)
        old_head.weight = torch.nn.Parameter(matrix.detach())

    ours, theirs = model(**given), reference(**given)
    torch.testing.assert_close(ours.logits, theirs.logits)
    ours.loss.backward()
    theirs.loss.backward()
    compared = 0
    wanted = dict(reference.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        if parameter_name in wanted and parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, wanted[parameter_name].grad)
            compared += 1
    assert compared >= 8
    unused = {n for n, p in wanted.items() if p.grad is None}
    assert {n for n, p in model.named_parameters() if p.grad is None} <= unused


def test_the_new_model_starts_as_large_as_the_old(family: tuple[Family, Any]) -> None:
    _, model = family
    embedding = model.get_input_embeddings()
    old = 1.0 if isinstance(model, transformers.T5ForConditionalGeneration) else 0.02
    assert embedding(torch.arange(3, V)).detach().std().item() == pytest.approx(old, rel=0.25)


def test_generate_gives_the_same_with_and_without_a_cache(family: tuple[Family, Any]) -> None:
    kind, model = family
    if not kind.generates:
        pytest.skip("an encoder does not generate")
    given = {name: batch(model)[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with_cache = model.generate(**given, **options, use_cache=True)
    assert with_cache.shape[1] > 1
    assert torch.equal(with_cache, model.generate(**given, **options, use_cache=False))


@pytest.mark.parametrize("tied", [True, False])
def test_features_of_tokens_are_saved_and_loaded_bit_by_bit(tied: bool, tmp_path: Path) -> None:
    words = [f"token{number}" for number in range(V)]
    model = with_define(gpt2(tied).eval(), **SIZES, features=["characters:50x16:concat", "frequency:8x4"], tokens=words)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    given = batch(model)
    assert torch.equal(logits(loaded, given), logits(model, given))
    cache_tables(loaded)
    torch.testing.assert_close(logits(loaded, given), logits(model, given))
    prompt = given["input_ids"][:, :4]
    assert torch.equal(*(one.generate(prompt, max_new_tokens=5, do_sample=False) for one in (loaded, model)))


def test_saving_and_loading_is_bit_equal(family: tuple[Family, Any], tmp_path: Path) -> None:
    kind, model = family
    given = batch(model)
    model.save_pretrained(tmp_path)
    loaded, info = kind.auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(model, given), logits(loaded, given))
    assert isinstance(loaded, type(model).__mro__[2])  # the plain class
    assert type(loaded) is type(model)
    tables = [m for m in model.modules() if isinstance(m, StandIn)]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        rows = [name for name in file.keys() if V in file.get_slice(name).get_shape()]  # noqa: SIM118
    assert len([name for name in rows if "map.table" in name]) == len(tables)  # a shared table is saved once
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    assert (again / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert (again / "config.json").read_text() == (tmp_path / "config.json").read_text()


def test_tie_weights_changes_nothing(family: tuple[Family, Any]) -> None:
    _, model = family
    given = batch(model)
    before = logits(model, given)
    model.tie_weights()
    assert torch.equal(before, logits(model, given))
    head = model.get_output_embeddings()
    if isinstance(head, MapHead):
        with torch.no_grad():
            head.stand_in.table.map.table.weight[5] += 1.0
        assert not torch.equal(before[..., 5], logits(model, given)[..., 5])


@pytest.mark.parametrize("size", [V + 11, V - 5])
def test_resizing(family: tuple[Family, Any], size: int, tmp_path: Path) -> None:
    kind, model = family
    small = min(size, V)
    given = batch(model, vocabulary=small)
    before = logits(model, given)
    embedding = model.resize_token_embeddings(size)
    assert embedding is model.get_input_embeddings()
    assert model.config.vocab_size == embedding.num_embeddings == size
    after = logits(model, given)
    torch.testing.assert_close(before[..., :small], after[..., :small])
    own_decoder_table = getattr(model.config, "share_encoder_decoder_embeddings", True) is False
    assert own_decoder_table == (after.shape[-1] == V)
    if own_decoder_table:
        model.resize_decoder_token_embeddings(size)
        after = logits(model, given)
    else:
        model(**batch(model, labels=True, vocabulary=size)).loss.backward()
    model.save_pretrained(tmp_path)
    assert torch.equal(after, logits(kind.auto_class.from_pretrained(tmp_path), given))


def test_new_rows_start_at_the_mean_and_sizes_are_rounded_up() -> None:
    model = with_define(llama(True), **SIZES)
    table = model.get_input_embeddings().table.map.table.weight.detach().clone()
    model.resize_token_embeddings(V + 1, pad_to_multiple_of=64)
    assert model.config.vocab_size == 128
    rows = model.get_input_embeddings().table.map.table.weight.detach()
    torch.testing.assert_close(rows[V:], table.mean(0).expand(128 - V, -1))
    assert torch.equal(rows[:V], table)
    assert model.resize_token_embeddings() is model.get_input_embeddings()


def test_lora_on_top(family: tuple[Family, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    kind, model = family
    model.save_pretrained(tmp_path / "base")
    frozen = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(kind.lora_targets)))
    optimiser = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        adapted(**batch(model, labels=True)).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    adapted.eval()
    adapted.save_pretrained(tmp_path / "adapter")
    base = kind.auto_class.from_pretrained(tmp_path / "base")
    for name, parameter in base.named_parameters():
        assert torch.equal(parameter, frozen[name])
    given = batch(model)
    assert not torch.equal(logits(base, given), logits(adapted, given))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(logits(adapted, given), logits(loaded, given))
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged, given), logits(loaded, given), atol=1e-5, rtol=1e-4)


def test_lora_on_a_model_that_was_loaded(family: tuple[Family, Any], tmp_path: Path) -> None:
    """PEFT then reads the configuration in the base's folder, by its class, and warns of sizes that differ."""
    peft = pytest.importorskip("peft")
    kind, model = family
    model.save_pretrained(tmp_path / "base")
    base = kind.auto_class.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=list(kind.lora_targets), init_lora_weights=False)
    adapted = peft.get_peft_model(base, lora).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        adapted.save_pretrained(tmp_path / "adapter")
    again = kind.auto_class.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    given = batch(model)
    assert torch.equal(logits(adapted, given), logits(loaded, given))
    assert not torch.equal(logits(model, given), logits(loaded, given))


def test_a_configuration_reads_its_own_file(family: tuple[Family, Any], tmp_path: Path) -> None:
    _, model = family
    model.save_pretrained(tmp_path)
    read = type(model.config).from_pretrained(tmp_path)
    assert read.torchdefine == model.config.torchdefine
    assert (read.vocab_size, read.model_type) == (V, model.config.model_type)


def test_lora_finds_its_usual_layers_and_may_train_the_table() -> None:
    peft = pytest.importorskip("peft")
    model = with_define(llama(False), **SIZES)
    config = peft.LoraConfig(r=2, modules_to_save=["embed_tokens"])
    adapted = peft.get_peft_model(model, config)
    adapted(**batch(model, labels=True)).loss.backward()
    trained = [name for name, p in adapted.named_parameters() if p.grad is not None]
    assert any("embed_tokens.modules_to_save" in name for name in trained)
    assert any("q_proj.lora_A" in name for name in trained)


class Lines(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(6) * (1 + index % 5)) % (V - 3) + 3
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


@pytest.mark.parametrize(("name", "tied"), [pytest.param(*c, marks=[] if c[1] else pytest.mark.slow) for c in CASES])
def test_trainer_for_20_steps(name: str, tied: bool, tmp_path: Path) -> None:
    """The loss falls, with gradient checkpointing on, and the last checkpoint loads to the trained model."""
    kind = FAMILIES[name]
    model = with_define(kind.make(tied), **SIZES)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=20,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=5,
        save_steps=20,
        gradient_checkpointing=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Lines())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    loaded = kind.auto_class.from_pretrained(tmp_path / "checkpoint-20")
    given = batch(model)
    assert torch.equal(logits(model.eval(), given), logits(loaded, given))


def test_gradient_checkpointing_gives_the_same_gradients(family: tuple[Family, Any]) -> None:
    _, model = family
    given = batch(model, labels=True)
    model(**given).loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model(**given).loss.backward()
    rounding = 2e-6 * max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, parameter in model.named_parameters():
        if name in wanted:
            torch.testing.assert_close(parameter.grad, wanted[name], atol=rounding, rtol=1e-4)


def test_cached_tables_answer_alike_until_training(family: tuple[Family, Any]) -> None:
    _, model = family
    given = batch(model)
    before, names = logits(model, given), set(model.state_dict())
    assert cache_tables(model) == [name for name, m in model.named_modules() if isinstance(m, StandIn)]
    cached = next(module for module in model.modules() if isinstance(module, StandIn))
    assert cached.looked_up is not None
    torch.testing.assert_close(logits(model, given), before)
    assert set(model.state_dict()) == names
    model.train()
    assert cached.looked_up is None


def test_restore_gives_the_old_model_back(family: tuple[Family, Any]) -> None:
    kind, _ = family
    for tied in (True, False):
        model = kind.make(tied)
        before = model_hash(model)
        report = replace_embeddings(model, **SIZES)
        assert model_hash(model) != before
        restore(model, report)
        assert model_hash(model) == before


def test_a_tied_head_can_keep_its_matrix(tmp_path: Path) -> None:
    model = bert(True).eval()
    matrix = model.get_output_embeddings().weight.detach().clone()
    with_define(model, **SIZES, heads="untie")
    assert torch.equal(model.get_output_embeddings().weight, matrix)
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.get_output_embeddings().weight, matrix)
    assert torch.equal(logits(model, batch(model)), logits(loaded, batch(model)))


def test_a_head_can_be_tied_to_the_finished_vectors(tmp_path: Path) -> None:
    model = with_define(bert(True), **SIZES, heads="finished").eval()
    table = model.get_input_embeddings().table
    torch.testing.assert_close(model.get_output_embeddings().weight[3:5], table(torch.arange(3, 5)))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    given = batch(model)
    assert torch.equal(logits(model, given), logits(loaded, given))
    model.resize_token_embeddings(table.num_embeddings + 3)
    assert logits(model, given).shape[-1] == table.num_embeddings


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_a_table_that_lost_nothing_gives_the_old_logits(name: str, tied: bool, tmp_path: Path) -> None:
    model = FAMILIES[name].make(tied).eval()
    given = batch(model)
    before = logits(model, given)
    modules = {m for part in model.modules() if hasattr(part, "get_input_embeddings") for m in [part]}
    tables = {}
    for place, module in model.named_modules(remove_duplicate=False):
        if any(module is part.get_input_embeddings() for part in modules):
            tables.setdefault(id(module.weight), (place, dense_table(module.weight.detach(), "float32")))
    with_table(model, dict(tables.values()))
    torch.testing.assert_close(logits(model, given), before)
    assert isinstance(model.get_output_embeddings(), VectorsHead) == (tied or name == "t5")
    model.save_pretrained(tmp_path)
    loaded = FAMILIES[name].auto_class.from_pretrained(tmp_path)
    assert torch.equal(logits(model, given), logits(loaded, given))


def test_what_fit_gave_goes_straight_in(tmp_path: Path) -> None:
    model = bert(True).eval()
    counts = torch.arange(V, 0, -1)
    fitted = fit(model.get_input_embeddings().weight.detach(), counts, "3KB", options=FitOptions(methods=("svd",)))
    with_table(model, fitted)
    assert model.get_input_embeddings().table is fitted.table
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(logits(model, batch(model)), logits(loaded, batch(model)))


def test_compact_tables_keep_their_number_types_and_grow(tmp_path: Path) -> None:
    model = llama(True).eval()
    with_table(model, quantised_table(model.get_input_embeddings().weight.detach(), bits=4, group_size=16))
    stored = model.get_input_embeddings().table.stored_bytes
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.get_input_embeddings().table.stored_bytes == stored < V * 32 * 2
    given = batch(model)
    before = logits(model, given)
    assert torch.equal(before, logits(loaded, given))
    loaded.resize_token_embeddings(V + 3)
    torch.testing.assert_close(logits(loaded, given)[..., :V], before)
    loaded.save_pretrained(tmp_path / "grown")
    grown = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    assert torch.equal(logits(loaded, given), logits(grown, given))
    with pytest.raises(UserError, match="cannot lose rows"):
        loaded.resize_token_embeddings(V - 3)


def test_rows_that_are_added_to_a_learning_table_learn_too() -> None:
    model = llama(True).to(torch.bfloat16)
    with_table(model, svd_table(model.get_input_embeddings().weight.detach(), 4))
    for learning in (False, True):
        model.get_input_embeddings().table.requires_grad_(learning)
        model.resize_token_embeddings(model.get_input_embeddings().num_embeddings + 3)
        parts = dict(model.get_input_embeddings().table.named_parameters())
        assert {part.requires_grad for part in parts.values()} == {learning}
        assert parts["mean"].dtype == torch.bfloat16
    model(torch.tensor([[1, V + 4]])).logits.float().sum().backward()
    assert all(part.grad is not None for name, part in parts.items() if name != "rows.bands.0.bands.1.weight")


def test_a_model_can_be_pickled_and_copied(family: tuple[Family, Any], tmp_path: Path) -> None:
    _, model = family
    expected = logits(model, batch(model))
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert type(other.config) is type(model.config)
        assert torch.equal(logits(other, batch(model)), expected)
    again.save_pretrained(tmp_path / "saved")
    assert type(pickle.loads(pickle.dumps(model.config))) is type(model.config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_units_in_half_precision_stay_so(dtype: torch.dtype, tmp_path: Path) -> None:
    """A table may compute in another precision than its model: loading keeps both."""
    model = bert(True).to(dtype).eval()
    rows = UnitRows(DenseRows.of(torch.randn(V, 8), "float16"), MLPConfig(embedding_dim=WIDTH, expand_dim=24))
    table = CompactTable(rows.half())
    with_table(model, table)
    assert model.dtype == dtype
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    given = batch(model)
    assert torch.equal(logits(model, given), logits(loaded, given))
    assert {p.dtype for p in loaded.get_input_embeddings().table.rows.parameters()} == {torch.float16}
    assert loaded.dtype == dtype


def test_another_head_on_the_same_base(tmp_path: Path) -> None:
    """An encoder that was saved alone becomes a classifier, or gets its language-modelling head back."""
    model = with_define(transformers.BertModel(bert(True).config).eval(), **SIZES)
    model.save_pretrained(tmp_path)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    ids = batch(model)["input_ids"]
    with torch.no_grad():
        assert torch.equal(classifier.bert(ids).last_hidden_state, model(ids).last_hidden_state)
    masked = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert isinstance(masked.get_output_embeddings(), MapHead)
    masked.save_pretrained(tmp_path / "masked")
    back = transformers.AutoModel.from_pretrained(tmp_path / "masked")
    with torch.no_grad():
        assert torch.equal(back(ids).last_hidden_state, model(ids).last_hidden_state)


def test_half_precision_stays(tmp_path: Path) -> None:
    model = with_define(t5(True).to(torch.bfloat16).eval(), **SIZES)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(logits(model, batch(model)), logits(loaded, batch(model)))
    assert loaded.get_input_embeddings()(torch.tensor([1])).dtype == torch.bfloat16


def test_from_config_builds_the_same_architecture() -> None:
    model = with_define(llama(True), **SIZES)
    fresh = transformers.AutoModelForCausalLM.from_config(model.config)
    assert {n: p.shape for n, p in fresh.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert float(fresh.get_input_embeddings()(torch.arange(3, V)).std()) == pytest.approx(0.02, rel=0.25)


def test_other_models_with_the_same_configuration_keep_it() -> None:
    config = llama(True).config
    one, other = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    before = model_hash(other)
    with_define(one, **SIZES)
    assert model_hash(other) == before
    assert one.model.config is one.config


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOAD_AND_ADD = """
model = transformers.AutoModelForCausalLM.from_pretrained({folder!r})
print("sum", model(torch.tensor([[5, 6, 7]])).logits.double().sum().item())
"""


@pytest.fixture
def saved_llama(tmp_path: Path) -> tuple[Path, float]:
    """A saved model, and a number that it computes."""
    model = with_define(llama(True), **SIZES).eval()
    model.save_pretrained(tmp_path)
    return tmp_path, logits(model, {"input_ids": torch.tensor([[5, 6, 7]])}).double().sum().item()


def test_reload_without_torchdefine_is_refused_and_with_it_exact(saved_llama: tuple[Path, float]) -> None:
    """By an Auto class, by the model's own class, with its own configuration, and when told to ignore wrong shapes."""
    folder, wanted = saved_llama
    attempt = """
config = transformers.LlamaConfig.from_pretrained(folder)
for name in ("AutoModelForCausalLM", "LlamaForCausalLM"):
    for options in ({}, {"ignore_mismatched_sizes": True}, {"config": config, "ignore_mismatched_sizes": True}):
        try:
            getattr(transformers, name).from_pretrained(folder, **options)
        except Exception as error:
            print("refused", " ".join(str(error).split()))
"""
    output = run_python(
        f"import sys, torch, transformers\nfolder = {str(folder)!r}\n{attempt}\n"
        "assert 'torchdefine' not in sys.modules\nimport torchdefine.adapt.huggingface\n"
        f"{LOAD_AND_ADD.format(folder=str(folder))}"
    )
    refusals = [line for line in output.splitlines() if line.startswith("refused")]
    assert len(refusals) == 6
    assert all("torchdefine" in refusal for refusal in refusals)
    note, page = (re.sub(r"\s+", " ", path.read_text()) for path in (folder / "README.md", DOCS / "transformers.md"))
    advice = f"has model type `{MODEL_TYPE}`"
    assert sum(advice in refusal for refusal in refusals) == 2  # what people will search for
    assert advice in note
    assert advice in page
    assert (
        sum("import torchdefine.adapt.huggingface, and load it with an Auto class" in refusal for refusal in refusals)
        == 4
    )
    assert float(output.split("sum ")[1]) == wanted


def test_a_saved_folder_says_how_it_is_loaded(tmp_path: Path) -> None:
    model = with_define(llama(True), **SIZES).eval()
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    note = (folder / "README.md").read_text()
    assert "pip install 'torchdefine[hf]'" in note
    assert "# LlamaForCausalLM with" in note
    (code,) = re.findall(r"```python\n(.*?)\n```", note, re.DOTALL)
    run_python(
        code.replace("path/to/this/folder", str(folder)) + "\nassert model.model.embed_tokens.table.map_dim == 16"
    )


def test_a_readme_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    model = with_define(llama(True), **SIZES)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    model.save_pretrained(tmp_path / "second", is_main_process=False)
    assert not (tmp_path / "second" / "README.md").exists()
    restore_me = llama(True)
    restore(restore_me, replace_embeddings(restore_me, **SIZES))
    restore_me.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "README.md").exists()


def test_torchdefine_imports_transformers_only_where_it_is_asked_for(saved_llama: tuple[Path, float]) -> None:
    folder, wanted = saved_llama
    output = run_python(
        "import sys, torchdefine, torchdefine.adapt\n"
        "assert torchdefine.adapt.fit and not {'transformers', 'peft', 'torchao'} & set(sys.modules)\n"
        f"import torch, torchdefine.adapt.huggingface, transformers\n{LOAD_AND_ADD.format(folder=str(folder))}"
    )
    assert float(output.split("sum ")[1]) == wanted


def test_a_model_whose_table_was_exchanged_again_is_not_saved(tmp_path: Path) -> None:
    model = with_define(llama(False), **SIZES)
    model.set_input_embeddings(torch.nn.Embedding(V, 32))
    with pytest.raises(UserError, match="would be saved wrongly"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with_define(llama(True), **SIZES).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in weights if "expansions" in name)
    save_file({n: t for n, t in weights.items() if n != lost}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="which its table needs"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["torchdefine"]["version"] = 9
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="version 9"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    config["torchdefine"]["own_type"] = "frobnicator"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="knows no such model"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_what_is_no_model_of_transformers_is_refused() -> None:
    with pytest.raises(UserError, match="use replace_embeddings"):
        with_define(torch.nn.Embedding(3, 3))
    model = with_define(llama(True), **SIZES)
    before = model_hash(model)
    with pytest.raises(UserError, match="was replaced already"):
        with_define(model, **SIZES)
    assert model_hash(model) == before


def test_tables_that_could_not_be_saved_are_refused() -> None:
    model = llama(True)
    before = model_hash(model)
    with pytest.raises(UserError, match="cannot be saved with a model of transformers"):
        with_table(model, TokenEmbedding(StandardMap(V, WIDTH)))
    model.lm_words = torch.nn.Embedding(5, 8)
    before = model_hash(model)
    with pytest.raises(UserError, match="lies outside the base model"):
        with_define(model, **SIZES, targets="lm_words")
    assert model_hash(model) == before


def test_a_table_of_the_wrong_size_is_refused() -> None:
    model = marian(False)
    before = model_hash(model)
    table = svd_table(torch.randn(V, 32), rank=4)
    with pytest.raises(UserError, match="give a mapping with one for each"):
        with_table(model, table)
    small = svd_table(torch.randn(V - 1, 32), rank=4)
    with pytest.raises(UserError, match="is 96 × 32, but the model's is 97 × 32"):
        with_table(model, {"model.encoder.embed_tokens": small, "model.decoder.embed_tokens": table})
    with pytest.raises(UserError, match="No table was given for model"):
        with_table(model, {"model.encoder.embed_tokens": table})
    with pytest.raises(UserError, match="which is not to be replaced"):
        with_table(model, {"encoder.nothing": table})
    assert model_hash(model) == before


def test_the_table_that_is_meant_may_be_named_second() -> None:
    model = with_define(bert(False), "position_embeddings", **SIZES)
    replaced = [name for name, module in model.named_modules() if isinstance(module, StandIn)]
    assert [name.rsplit(".", 1)[-1] for name in replaced] == ["position_embeddings"]

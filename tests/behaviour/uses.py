"""What people do with models of transformers. Each use runs on a plain model and on the same with replaced tables.

A use checks that the model agrees with itself (what was saved is what is loaded, say), and gives the tensors in which
the two models must agree when the replacement lost nothing.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.behaviour.models import PAIRED, SPEECH, Case, V
from torchdefine.adapt.huggingface import CompactMixin, cache_tables
from torchdefine.errors import UserError

Use = Callable[[Case, Any, Path], list[Tensor]]


class NotFor(Exception):
    """This use has no meaning for such a model, plain or not."""


class Refused(Exception):
    """A sentence, where the use itself has checked that the model still gives what it gave."""


@contextmanager
def unchanged(case: Case, model: Any) -> Iterator[None]:
    """What is refused within leaves the outputs of a model, which may hold PEFT's layers by now, as they were."""
    before = outputs(case, model)
    try:
        yield
    except UserError as error:
        near(outputs(case, model.eval()), before)
        raise Refused(str(error)) from error


def outputs(case: Case, model: Any, **options: Any) -> Tensor:
    """The first output of a model for its batch: logits, or hidden states."""
    with torch.no_grad():
        return model(**case.batch(model, **options))[0]


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def near(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)


def load(case: Case, folder: Path, **options: Any) -> Any:
    model, info = case.auto_class.from_pretrained(folder, output_loading_info=True, **options)
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["unexpected_keys"], info["unexpected_keys"]
    return model


def loss_of(case: Case, model: Any) -> Tensor:
    """The model's loss, or a number that depends on all its outputs."""
    found = model(**case.batch(model, labels=True))
    loss = getattr(found, "loss", None)
    return found[0].float().square().mean() if loss is None else loss


def train(case: Case, model: Any, steps: int = 2) -> list[Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        losses.append(loss_of(case, model))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses]


def forward(case: Case, model: Any, folder: Path) -> list[Tensor]:
    return [outputs(case, model), loss_of(case, model).detach()]


def backward(case: Case, model: Any, folder: Path) -> list[Tensor]:
    """The gradients of everything but tables and output layers."""
    loss_of(case, model).backward()
    head = model.get_output_embeddings()
    left_out = [id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()]
    left_out += [] if head is None else [id(p) for p in head.parameters()]
    return [p.grad for _, p in sorted(model.named_parameters()) if p.grad is not None and id(p) not in left_out]


def save_and_load(case: Case, model: Any, folder: Path) -> list[Tensor]:
    model.save_pretrained(folder / "one")
    loaded = load(case, folder / "one")
    assert type(loaded) is type(model)
    same(outputs(case, loaded), outputs(case, model))
    loaded.save_pretrained(folder / "two")
    one, two = (folder / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    return [outputs(case, loaded)]


def shards(case: Case, model: Any, folder: Path) -> list[Tensor]:
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    loaded = load(case, folder)
    same(outputs(case, loaded), outputs(case, model))
    return [outputs(case, loaded)]


def half_precision(case: Case, model: Any, folder: Path) -> list[Tensor]:
    model.to(torch.bfloat16).save_pretrained(folder)
    loaded = load(case, folder)
    assert loaded.dtype == torch.bfloat16
    before, after = (dict(one.state_dict()) for one in (model, loaded))
    assert before.keys() == after.keys()
    for name, value in before.items():
        same(value, after[name])
    return []


def weights_alone(case: Case, model: Any, folder: Path) -> list[Tensor]:
    """A state dict, written and read by torch, into a model that was made from the configuration."""
    torch.save(model.state_dict(), folder / "weights.pt")
    other = case.auto_class.from_config(copy.deepcopy(model.config)).eval()
    other.load_state_dict(torch.load(folder / "weights.pt"))
    same(outputs(case, other), outputs(case, model))
    return [outputs(case, other)]


def plain_classes(case: Case, model: Any, folder: Path) -> list[Tensor]:
    """A class that knows nothing of replaced tables refuses what was saved; plain settings can be read."""
    model.save_pretrained(folder)
    settings = transformers.PreTrainedConfig.from_json_file(folder / "config.json")
    assert settings.transformers_version == transformers.__version__
    if not isinstance(model, CompactMixin):
        return []
    own_settings = getattr(transformers, case.config).from_pretrained(folder)
    for options in ({}, {"ignore_mismatched_sizes": True}, {"ignore_mismatched_sizes": True, "config": own_settings}):
        with pytest.raises(Exception, match=r"import torchdefine\.adapt\.huggingface"):
            case.model_class.from_pretrained(folder, **options)
    return []


def other_heads(case: Case, model: Any, folder: Path) -> list[Tensor]:
    """A saved model loads without its head, and what is saved then loads with a new one."""
    model.save_pretrained(folder / "whole")
    base = transformers.AutoModel.from_pretrained(folder / "whole")
    if type(base) is type(model):
        raise NotFor
    base.save_pretrained(folder / "base")
    again = case.auto_class.from_pretrained(folder / "base")
    ids = case.batch(model)["input_ids"] if case.auto != SPEECH else case.batch(model)["decoder_input_ids"]
    for one in (base, again):
        same(one.get_input_embeddings()(ids), model.get_input_embeddings()(ids))
    return [model.get_input_embeddings()(ids).detach()]


def classifier(case: Case, model: Any, folder: Path) -> list[Tensor]:
    """Any saved model that has a classifier's class loads as one."""
    known = transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if model.config.model_type not in known:
        raise NotFor
    model.save_pretrained(folder)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    ids = case.batch(model)["input_ids"]
    same(loaded.get_input_embeddings()(ids), model.get_input_embeddings()(ids))
    return [loaded.get_input_embeddings()(ids).detach()]


def generate(case: Case, model: Any, folder: Path) -> list[Tensor]:
    if not model.can_generate():
        raise NotFor
    given = {name: value for name, value in case.batch(model).items() if name != "decoder_input_ids"}
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    cached = model.generate(**given, **options, use_cache=True)
    same(cached, model.generate(**given, **options, use_cache=False))
    return [cached]


def resize(case: Case, model: Any, folder: Path) -> list[Tensor]:
    before = outputs(case, model)
    model.resize_token_embeddings(V + 9, mean_resizing=False)
    rows = model.get_input_embeddings()(torch.arange(V))
    model.save_pretrained(folder)
    loaded = load(case, folder)
    assert loaded.get_input_embeddings().num_embeddings == V + 9
    same(outputs(case, loaded), outputs(case, model))
    after = outputs(case, model)
    if before.ndim == 3 and before.shape[-1] == V:
        after = after[..., :V]
    near(after, before)
    return [rows.detach(), after]


def ties(case: Case, model: Any, folder: Path) -> list[Tensor]:
    before = outputs(case, model)
    model.tie_weights()
    same(outputs(case, model), before)
    return [before]


def copies(case: Case, model: Any, folder: Path) -> list[Tensor]:
    wanted = outputs(case, model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        same(outputs(case, other), wanted)
        train(case, other, 1)
        same(outputs(case, model), wanted)
    return [wanted]


def read_the_matrix(case: Case, model: Any, folder: Path) -> list[Tensor]:
    """``embedding.weight`` is a matrix to read, and never silently loses what is written to it."""
    embedding = model.get_input_embeddings()
    weight, ids = embedding.weight, torch.tensor([[4, 7], [9, 4]])
    assert tuple(weight.shape) == (V, embedding.embedding_dim)
    assert weight.dtype == embedding(ids).dtype
    factor = getattr(embedding, "embed_scale", 1.0)
    near(weight[ids] * factor, embedding(ids))
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            embedding.weight[4] += 1.0
    except UserError:
        near(embedding.weight * 1, before)
    else:
        near(embedding(ids) - before[ids] * factor, (ids == 4).unsqueeze(-1) * factor * torch.ones_like(before[ids]))
    return [before]


def gradient_checkpointing(case: Case, model: Any, folder: Path) -> list[Tensor]:
    if not model.supports_gradient_checkpointing:
        raise NotFor
    model.train()
    wanted = loss_of(case, model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss = loss_of(case, model)
    near(loss, wanted)
    loss.backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    return [loss.detach()]


class Lines(torch.utils.data.Dataset):
    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index % 2] for name, values in self.batch.items()}


def _trainer(case: Case, model: Any, folder: Path, steps: int) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=2,
        logging_steps=100,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=5,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Lines(case.batch(model, labels=True)))
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def resume(case: Case, model: Any, folder: Path) -> list[Tensor]:
    """Trainer's second half, from a checkpoint, is that of a whole run, byte for byte; and the checkpoint loads."""
    if "labels" not in case.batch(model, labels=True) and "start_positions" not in case.batch(model, labels=True):
        raise NotFor
    other = copy.deepcopy(model)
    _trainer(case, model, folder / "whole", 4).train()
    _trainer(case, other, folder / "again", 4).train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    files = [folder / name / "checkpoint-4" / "model.safetensors" for name in ("whole", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    same(outputs(case, load(case, files[0].parent)), outputs(case, model.eval()))
    return []


def train_on(case: Case, model: Any, folder: Path) -> list[Tensor]:
    """A saved model is loaded, trained and saved: the same seed gives the same bytes."""
    model.save_pretrained(folder / "start")
    losses = []
    for name in ("one", "two"):
        torch.manual_seed(7)
        loaded = load(case, folder / "start").train()
        losses = train(case, loaded, 3)
        loaded.eval().save_pretrained(folder / name)
        same(outputs(case, load(case, folder / name)), outputs(case, loaded))
    one, two = (load_file(folder / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        same(value, two[name])
    assert losses[-1] != losses[0]
    return [losses[0]]


def cached(case: Case, model: Any, folder: Path) -> list[Tensor]:
    wanted = outputs(case, model)
    if isinstance(model, CompactMixin):
        cache_tables(model)
    near(outputs(case, model), wanted)
    return [wanted]


@contextmanager
def peft_model(case: Case, model: Any, folder: Path, config: Any) -> Iterator[Any]:
    """A model with an adapter, trained; afterwards it must load upon the saved base."""
    model.save_pretrained(folder / "base")
    adapted = peft.get_peft_model(model, config)
    train(case, adapted)
    adapted.eval().save_pretrained(folder / "adapter")
    yield adapted
    loaded = peft.PeftModel.from_pretrained(load(case, folder / "base"), folder / "adapter").eval()
    with torch.no_grad():
        given = case.batch(model)
        same(loaded(**given)[0], adapted(**given)[0])


def _lora(case: Case, **options: Any) -> Any:
    return peft.LoraConfig(r=2, task_type=None if case.model == "T5EncoderModel" else case.task, **options)


def _merged(case: Case, adapted: Any, folder: Path) -> Tensor:
    """What a merged model gives; saved and loaded it gives the same."""
    with torch.no_grad():
        wanted = adapted(**case.batch(adapted.base_model.model))[0]
    merged = copy.deepcopy(adapted).merge_and_unload()
    near(outputs(case, merged), wanted)
    merged.save_pretrained(folder / "merged")
    near(outputs(case, load(case, folder / "merged")), outputs(case, merged))
    return wanted


def lora(case: Case, model: Any, folder: Path) -> list[Tensor]:
    with peft_model(case, model, folder, _lora(case, target_modules=list(case.lora))) as adapted:
        return [_merged(case, adapted, folder)]


def embedding_name(model: Any) -> str:
    (name,) = (name for name, module in model.named_modules() if module is model.get_input_embeddings())
    return name


def lora_on_the_embedding(case: Case, model: Any, folder: Path) -> list[Tensor]:
    name = embedding_name(model)
    config = _lora(case, target_modules=rf"{name}|.*\.({'|'.join(case.lora)})", init_lora_weights=False)
    with peft_model(case, model, folder, config) as adapted, torch.no_grad():
        return [adapted(**case.batch(model))[0]]


def merge_into_the_embedding(case: Case, model: Any, folder: Path) -> list[Tensor]:
    names = rf"{embedding_name(model)}|.*\.({'|'.join(case.lora)})"
    adapted = peft.get_peft_model(model, _lora(case, target_modules=names, init_lora_weights=False)).eval()
    with unchanged(case, model):
        adapted.merge_and_unload()
    return []


def trained_tokens(case: Case, model: Any, folder: Path) -> list[Tensor]:
    config = _lora(case, target_modules=list(case.lora), trainable_token_indices={embedding_name(model): [5, 7]})
    with unchanged(case, model), peft_model(case, model, folder, config) as adapted, torch.no_grad():
        return [adapted(**case.batch(model))[0]]


def prompts(case: Case, model: Any, folder: Path) -> list[Tensor]:
    if case.task is None or (case.auto == PAIRED and not hasattr(model, "prepare_decoder_input_ids_from_labels")):
        raise NotFor
    config = peft.PromptTuningConfig(task_type=case.task, num_virtual_tokens=3)
    torch.manual_seed(2)
    model.save_pretrained(folder / "base")
    adapted = peft.get_peft_model(model, config).eval()
    given = case.batch(model, labels=True)
    loss = adapted(**given).loss
    loss.backward()
    adapted.save_pretrained(folder / "adapter")
    loaded = peft.PeftModel.from_pretrained(load(case, folder / "base"), folder / "adapter").eval()
    same(loaded(**given).loss, loss)
    return [loss.detach()]


def whole_embedding(case: Case, model: Any, folder: Path) -> list[Tensor]:
    """The embedding among ``modules_to_save``: it trains as a whole, in the adapter."""
    name = embedding_name(model).rpartition(".")[2]
    config = _lora(case, target_modules=list(case.lora), modules_to_save=[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties, which it parts
        with peft_model(case, model, folder, config):
            return []


def heads(case: Case, model: Any, folder: Path) -> list[Tensor]:
    """The output layer among ``modules_to_save``; merged, it is a part of the model."""
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head]
    if not names or case.auto not in ("AutoModelForCausalLM", PAIRED):
        raise NotFor
    config = _lora(case, target_modules=list(case.lora), modules_to_save=[names[0].rpartition(".")[2]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with peft_model(case, model, folder, config) as adapted, torch.no_grad():
            wanted = adapted(**case.batch(model))[0]
            merged = copy.deepcopy(adapted).merge_and_unload()
            near(outputs(case, merged), wanted)
    return []


def untied_in_settings(case: Case, model: Any, folder: Path) -> list[Tensor]:
    """``tie_word_embeddings`` is switched off, as merging programs do; what is saved loads as it was, or is refused."""
    if not getattr(model.config, "tie_word_embeddings", False) or model.get_output_embeddings() is None:
        raise NotFor
    before = outputs(case, model)
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    same(outputs(case, load(case, folder)), before)
    return [before]


USES: dict[str, Use] = {
    "forward": forward,
    "backward": backward,
    "save, load, save": save_and_load,
    "shards": shards,
    "bfloat16": half_precision,
    "state dict": weights_alone,
    "plain classes": plain_classes,
    "without and with a head": other_heads,
    "as a classifier": classifier,
    "generate": generate,
    "resize": resize,
    "tie_weights": ties,
    "switch ties off": untied_in_settings,
    "copy, pickle": copies,
    "read embedding.weight": read_the_matrix,
    "gradient checkpointing": gradient_checkpointing,
    "Trainer, resume": resume,
    "load, train, save": train_on,
    "cache_tables": cached,
    "LoRA, merge": lora,
    "LoRA on the embedding": lora_on_the_embedding,
    "merge into the embedding": merge_into_the_embedding,
    "trainable tokens": trained_tokens,
    "prompt tuning": prompts,
    "modules_to_save: embedding": whole_embedding,
    "modules_to_save: head": heads,
}

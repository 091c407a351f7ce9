"""Tiny random models of five families of transformers, tied and untied."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

V, WIDTH = 97, 32


def llama(tied: bool) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(tied: bool) -> Any:
    config = transformers.GPT2Config(
        vocab_size=V,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        n_positions=64,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    return transformers.GPT2LMHeadModel(config)


def bert(tied: bool) -> Any:
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        tie_word_embeddings=tied,
    )
    return transformers.BertForMaskedLM(config)


def t5(tied: bool) -> Any:
    config = transformers.T5Config(
        vocab_size=V,
        d_model=WIDTH,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        tie_word_embeddings=tied,
    )
    return transformers.T5ForConditionalGeneration(config)


def marian(tied: bool) -> Any:
    config = transformers.MarianConfig(
        vocab_size=V,
        decoder_vocab_size=V,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=2,
        forced_eos_token_id=None,
        scale_embedding=True,
        dropout=0.0,
        share_encoder_decoder_embeddings=tied,
        tie_word_embeddings=tied,
    )
    return transformers.MarianMTModel(config)


@dataclass(frozen=True)
class Family:
    """How to make a model, which Auto class loads it, and which of its layers LoRA can be put on."""

    make: Callable[[bool], Any]
    auto_class: Any
    lora_targets: tuple[str, ...]
    generates: bool = True


FAMILIES = {
    "llama": Family(llama, transformers.AutoModelForCausalLM, ("q_proj", "v_proj")),
    "gpt2": Family(gpt2, transformers.AutoModelForCausalLM, ("c_attn",)),
    "bert": Family(bert, transformers.AutoModelForMaskedLM, ("query", "value"), generates=False),
    "t5": Family(t5, transformers.AutoModelForSeq2SeqLM, ("q", "v")),
    "marian": Family(marian, transformers.AutoModelForSeq2SeqLM, ("q_proj", "v_proj")),
}


def batch(model: Any, *, labels: bool = False, vocabulary: int = V) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, vocabulary, (2, 7), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if labels:
        return {**given, "labels": ids.clone()}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids[:, :4]
    return given

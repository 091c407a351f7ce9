"""Tiny random models of transformers, as far apart as they come, and a batch for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers

V = 101
_TOKENS = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BODY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
_GROUPED = {**_TOKENS, **_BODY, "num_key_value_heads": 2}
_TIED, _UNTIED = {**_GROUPED, "tie_word_embeddings": True}, {**_GROUPED, "tie_word_embeddings": False}
_ENCODER = {**_TOKENS, **_BODY, **_CALM, "max_position_embeddings": 64}
_GPT2 = {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GPT2 |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
_LAYERS = {"layers": 2, "ffn_dim": 48, "attention_heads": 4}
_PAIR = {**_TOKENS, **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _LAYERS.items()}}
_PAIR |= {"d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 2, **_NO_DROPOUT}
_PAIR |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "forced_eos_token_id": None}
_T5 = {"vocab_size": V, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
_T5 |= {"decoder_start_token_id": 0}
_DISTIL = {"vocab_size": V, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}
_DISTIL |= {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
_MODERN = {**_TOKENS, **_BODY, "cls_token_id": 1, "sep_token_id": 2}
_VISION = {**_BODY, "image_size": 8, "patch_size": 4}
_CLIP_TEXT = {**_ENCODER, "projection_dim": 16}
_QA = {"classifier_dropout": 0.0}
_WHISPER = {**_PAIR, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32}
_WHISPER |= {"begin_suppress_tokens": None, "suppress_tokens": None}
_PROPHET = {"layers": 2, "attention_heads": 4}
_BLIP_TEXT = {**_ENCODER, "encoder_hidden_size": 32, "projection_dim": 16, "sep_token_id": 2}

CAUSAL, MASKED, PAIRED = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
BASE, CLASSES = "AutoModel", "AutoModelForSequenceClassification"
TOKENS, ANSWERS = "AutoModelForTokenClassification", "AutoModelForQuestionAnswering"
SPEECH, IMAGE_TEXT = "AutoModelForSpeechSeq2Seq", "AutoModelForImageTextToText"

_LABELS = {CLASSES: 3, TOKENS: 3}
_TASKS = {CAUSAL: "CAUSAL_LM", PAIRED: "SEQ_2_SEQ_LM", CLASSES: "SEQ_CLS", TOKENS: "TOKEN_CLS", ANSWERS: "QUESTION_ANS"}


@dataclass(frozen=True)
class Case:
    """One class with one configuration."""

    model: str
    auto: str
    config: str
    settings: Mapping[str, Any]
    lora: tuple[str, ...]
    """Layers that LoRA can be put on."""

    @property
    def auto_class(self) -> Any:
        return getattr(transformers, self.auto)

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.model)

    @property
    def task(self) -> str | None:
        """What PEFT calls it."""
        return _TASKS.get(self.auto)

    def make(self) -> Any:
        torch.manual_seed(3)
        return self.model_class(getattr(transformers, self.config)(**self.settings)).eval()

    def batch(self, model: Any, *, labels: bool = False, vocabulary: int = V - 2) -> dict[str, torch.Tensor]:
        """Inputs for the model, with what its loss needs if ``labels``."""
        random = torch.Generator().manual_seed(1)
        ids = torch.randint(3, vocabulary, (2, 6), generator=random)
        ids[:, -1] = 2  # some classifiers look for the end
        given: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        config = model.config
        if self.auto == SPEECH:
            shape = (2, 8, 20) if self.config == "WhisperConfig" else (2, 20, 8)
            given = {"input_features": torch.randn(shape, generator=random)}
            given["labels" if labels else "decoder_input_ids"] = ids
            return given
        if hasattr(config, "vision_config"):
            given["pixel_values"] = torch.randn((2, 3, 8, 8), generator=random)
        if "Llava" in self.model or "PaliGemma" in self.model:
            image = torch.full((2, 4), config.image_token_id)
            given["input_ids"] = torch.cat([image, ids], 1)
            given["attention_mask"] = torch.ones_like(given["input_ids"])
        if labels:
            return {**given, **self._labels(given["input_ids"])}
        if config.is_encoder_decoder and self.auto != "AutoModelForTextEncoding":
            given["decoder_input_ids"] = ids[:, :4]
        if self.model == "BartForSequenceClassification":
            given.pop("decoder_input_ids")
        return given

    def _labels(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.auto == CLASSES:
            few = int(self.settings["num_labels"])
            return {"labels": torch.tensor([0, 1]) if few > 1 else torch.tensor([0.3, -0.2])}
        if self.auto == TOKENS:
            return {"labels": ids % 3}
        if self.auto == ANSWERS:
            return {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
        if self.auto in (CAUSAL, MASKED, PAIRED, IMAGE_TEXT):
            return {"labels": ids.clone()}
        return {}


def _case(auto: str, model: str, config: str, settings: Mapping[str, Any], *lora: str) -> Case:
    own = dict(settings) if auto not in _LABELS else {"num_labels": _LABELS[auto], **settings}
    return Case(model, auto, f"{config}Config", own, lora)


_causal, _masked, _paired = (partial(_case, auto) for auto in (CAUSAL, MASKED, PAIRED))
_ATTENTION, _NAMED = ("q_proj", "v_proj"), ("query", "value")
CASES: dict[str, Case] = {
    # decoders
    "llama-tied": _causal("LlamaForCausalLM", "Llama", _TIED, *_ATTENTION),
    "llama-untied": _causal("LlamaForCausalLM", "Llama", _UNTIED, *_ATTENTION),
    "gpt2": _causal("GPT2LMHeadModel", "GPT2", _GPT2, "c_attn"),
    "gemma2": _causal("Gemma2ForCausalLM", "Gemma2", {**_TIED, "head_dim": 8}, *_ATTENTION),
    "gemma3": _causal("Gemma3ForCausalLM", "Gemma3Text", {**_TIED, "head_dim": 8}, *_ATTENTION),
    "qwen2-tied": _causal("Qwen2ForCausalLM", "Qwen2", _TIED, *_ATTENTION),
    "qwen3": _causal("Qwen3ForCausalLM", "Qwen3", {**_UNTIED, "head_dim": 8}, *_ATTENTION),
    "mistral": _causal("MistralForCausalLM", "Mistral", _UNTIED, *_ATTENTION),
    "mixtral": _causal("MixtralForCausalLM", "Mixtral", {**_UNTIED, "num_local_experts": 2}, *_ATTENTION),
    "phi": _causal("PhiForCausalLM", "Phi", {**_UNTIED, "resid_pdrop": 0.0}, *_ATTENTION),
    "cohere": _causal("CohereForCausalLM", "Cohere", _TIED, *_ATTENTION),
    "olmo2": _causal("Olmo2ForCausalLM", "Olmo2", _UNTIED, *_ATTENTION),
    "falcon": _causal("FalconForCausalLM", "Falcon", {**_TOKENS, **_BODY, "alibi": False}, "query_key_value"),
    "opt": _causal(
        "OPTForCausalLM", "OPT", {**_ENCODER, "ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0}, "q_proj"
    ),
    "bloom": _causal(
        "BloomForCausalLM", "Bloom", {**_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "query_key_value"
    ),
    "gpt-neox": _causal("GPTNeoXForCausalLM", "GPTNeoX", {**_TOKENS, **_BODY}, "query_key_value"),
    "gptj": _causal("GPTJForCausalLM", "GPTJ", {**_GPT2, "rotary_dim": 4}, *_ATTENTION),
    "mamba": _causal("MambaForCausalLM", "Mamba", {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2}, "in_proj"),
    "xlnet": _causal(
        "XLNetLMHeadModel",
        "XLNet",
        {"vocab_size": V, "d_model": 32, "n_layer": 2, "n_head": 4, "dropout": 0.0},
        "layer_1",
    ),
    "biogpt": _causal(
        "BioGptForCausalLM", "BioGpt", {**_ENCODER, "layerdrop": 0.0, "activation_dropout": 0.0}, *_ATTENTION
    ),
    "gpt-neo": _causal(
        "GPTNeoForCausalLM",
        "GPTNeo",
        {
            **_TOKENS,
            **{"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64, "window_size": 8},
            **{"attention_types": [[["global", "local"], 1]], "embed_dropout": 0.0, "resid_dropout": 0.0},
        },
        *_ATTENTION,
    ),
    "openai-gpt": _causal("OpenAIGPTLMHeadModel", "OpenAIGPT", _GPT2, "c_attn"),
    "codegen": _causal("CodeGenForCausalLM", "CodeGen", {**_GPT2, "rotary_dim": 4}, "qkv_proj"),
    "starcoder2": _causal(
        "Starcoder2ForCausalLM", "Starcoder2", {**_TIED, "residual_dropout": 0.0, "embedding_dropout": 0.0}, *_ATTENTION
    ),
    "bert-decoder": _causal("BertLMHeadModel", "Bert", {**_ENCODER, "is_decoder": True}, *_NAMED),
    # classifiers and reward models over decoders
    "llama-classifier": _case(CLASSES, "LlamaForSequenceClassification", "Llama", _UNTIED, *_ATTENTION),
    "qwen2-reward": _case(CLASSES, "Qwen2ForSequenceClassification", "Qwen2", {**_TIED, "num_labels": 1}, *_ATTENTION),
    "gemma2-classifier": _case(
        CLASSES, "Gemma2ForSequenceClassification", "Gemma2", {**_TIED, "head_dim": 8}, *_ATTENTION
    ),
    "gpt2-classifier": _case(CLASSES, "GPT2ForSequenceClassification", "GPT2", _GPT2, "c_attn"),
    "mistral-tokens": _case(
        TOKENS, "MistralForTokenClassification", "Mistral", {**_UNTIED, "classifier_dropout": 0.0}, *_ATTENTION
    ),
    "gpt2-tokens": _case(TOKENS, "GPT2ForTokenClassification", "GPT2", {**_GPT2, "classifier_dropout": 0.0}, "c_attn"),
    "llama-answers": _case(ANSWERS, "LlamaForQuestionAnswering", "Llama", _UNTIED, *_ATTENTION),
    "qwen3-answers": _case(ANSWERS, "Qwen3ForQuestionAnswering", "Qwen3", {**_TIED, "head_dim": 8}, *_ATTENTION),
    # encoders
    "bert-tied": _masked("BertForMaskedLM", "Bert", _ENCODER, *_NAMED),
    "bert-untied": _masked("BertForMaskedLM", "Bert", {**_ENCODER, "tie_word_embeddings": False}, *_NAMED),
    "roberta": _masked("RobertaForMaskedLM", "Roberta", _ENCODER, *_NAMED),
    "distilbert": _masked("DistilBertForMaskedLM", "DistilBert", _DISTIL, "q_lin"),
    "albert": _masked("AlbertForMaskedLM", "Albert", {**_ENCODER, "embedding_size": 16}, *_NAMED),
    "electra": _masked("ElectraForMaskedLM", "Electra", {**_ENCODER, "embedding_size": 16}, *_NAMED),
    "deberta-v2": _masked("DebertaV2ForMaskedLM", "DebertaV2", _ENCODER, "query_proj"),
    "mpnet": _masked("MPNetForMaskedLM", "MPNet", _ENCODER, "q"),
    "modernbert": _masked("ModernBertForMaskedLM", "ModernBert", _MODERN, "Wqkv"),
    "rembert": _masked(
        "RemBertForMaskedLM",
        "RemBert",
        {**_ENCODER, "input_embedding_size": 16, "output_embedding_size": 24, "classifier_dropout_prob": 0.0},
        *_NAMED,
    ),
    "xlm": _masked(
        "XLMWithLMHeadModel",
        "XLM",
        {"vocab_size": V, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0},
        "q_lin",
    ),
    "funnel": _masked(
        "FunnelForMaskedLM",
        "Funnel",
        {
            **{"vocab_size": V, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1]},
            **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
        },
        "q_head",
    ),
    "bert-base": _case(BASE, "BertModel", "Bert", _ENCODER, *_NAMED),
    "bert-pretraining": _case("AutoModelForPreTraining", "BertForPreTraining", "Bert", _ENCODER, *_NAMED),
    "xlm-roberta-classifier": _case(CLASSES, "XLMRobertaForSequenceClassification", "XLMRoberta", _ENCODER, *_NAMED),
    "modernbert-classifier": _case(CLASSES, "ModernBertForSequenceClassification", "ModernBert", _MODERN, "Wqkv"),
    "bert-tokens": _case(TOKENS, "BertForTokenClassification", "Bert", _ENCODER, *_NAMED),
    "electra-answers": _case(ANSWERS, "ElectraForQuestionAnswering", "Electra", _ENCODER, *_NAMED),
    # encoders with decoders
    "t5": _paired("T5ForConditionalGeneration", "T5", _T5, "q", "v"),
    "mt5": _paired("MT5ForConditionalGeneration", "MT5", _T5, "q", "v"),
    "t5-encoder": _case("AutoModelForTextEncoding", "T5EncoderModel", "T5", _T5, "q", "v"),
    "bart": _paired("BartForConditionalGeneration", "Bart", {**_PAIR, "scale_embedding": True}, *_ATTENTION),
    "mbart": _paired("MBartForConditionalGeneration", "MBart", {**_PAIR, "scale_embedding": True}, *_ATTENTION),
    "pegasus": _paired("PegasusForConditionalGeneration", "Pegasus", _PAIR, *_ATTENTION),
    "m2m100": _paired("M2M100ForConditionalGeneration", "M2M100", _PAIR, *_ATTENTION),
    "blenderbot": _paired("BlenderbotForConditionalGeneration", "Blenderbot", _PAIR, *_ATTENTION),
    "umt5": _paired("UMT5ForConditionalGeneration", "UMT5", _T5, "q", "v"),
    "prophetnet": _paired(
        "ProphetNetForConditionalGeneration",
        "ProphetNet",
        {
            **_TOKENS,
            **{f"num_{side}_{what}": n for side in ("encoder", "decoder") for what, n in _PROPHET.items()},
            **{"hidden_size": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64},
            **{"decoder_start_token_id": 2, **_NO_DROPOUT},
        },
        "query_proj",
    ),
    "marian-own-tables": _paired(
        "MarianMTModel",
        "Marian",
        {**_PAIR, "decoder_vocab_size": V, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
        *_ATTENTION,
    ),
    "bart-classifier": _case(
        CLASSES, "BartForSequenceClassification", "Bart", {**_PAIR, "classifier_dropout": 0.0}, *_ATTENTION
    ),
    # speech
    "whisper": _case(SPEECH, "WhisperForConditionalGeneration", "Whisper", _WHISPER, *_ATTENTION),
    "speech-to-text": _case(
        SPEECH,
        "Speech2TextForConditionalGeneration",
        "Speech2Text",
        {
            **_PAIR,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "max_source_positions": 32,
            "max_target_positions": 32,
        },
        *_ATTENTION,
    ),
    # vision and text
    "clip": _case(
        BASE,
        "CLIPModel",
        "CLIP",
        {"text_config": _CLIP_TEXT, "vision_config": _VISION, "projection_dim": 16},
        *_ATTENTION,
    ),
    "siglip": _case(BASE, "SiglipModel", "Siglip", {"text_config": _ENCODER, "vision_config": _VISION}, *_ATTENTION),
    "llava": _case(
        IMAGE_TEXT,
        "LlavaForConditionalGeneration",
        "Llava",
        {
            "text_config": transformers.LlamaConfig(**_UNTIED),
            "vision_config": transformers.CLIPVisionConfig(**_VISION),
            "image_token_id": V - 1,
            "image_seq_length": 4,
        },
        *_ATTENTION,
    ),
    "paligemma": _case(
        IMAGE_TEXT,
        "PaliGemmaForConditionalGeneration",
        "PaliGemma",
        {
            "text_config": transformers.GemmaConfig(**_TIED, head_dim=8),
            "vision_config": transformers.SiglipVisionConfig(**_VISION),
            "image_token_id": V - 1,
            "projection_dim": 32,
        },
        *_ATTENTION,
    ),
    "blip": _case(
        IMAGE_TEXT,
        "BlipForConditionalGeneration",
        "Blip",
        {"text_config": _BLIP_TEXT, "vision_config": _VISION},
        *_NAMED,
    ),
}
"""At least one of each family that has token tables."""

QUICK = ("llama-tied", "gpt2", "bert-tied", "t5", "llama-classifier", "whisper")
"""Run by ``make test``."""

"""Twenty-five classes of transformers, as far apart as they come: replaced, saved, loaded bit for bit, resized."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from torchdefine import replace_embeddings

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

V = 101
TOKENS = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BODY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**TOKENS, **BODY, "num_key_value_heads": 2}
ENCODER = {**TOKENS, **BODY, "max_position_embeddings": 64}
PAIR = {
    **TOKENS,
    **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (("layers", 2), ("ffn_dim", 48))},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    "d_model": 32,
    "max_position_embeddings": 64,
}
T5 = {
    "vocab_size": V,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
DISTIL = {"vocab_size": V, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}
CAUSAL, MASKED, PAIRED = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Gemma3ForCausalLM": ("Gemma3TextConfig", CAUSAL, {**GROUPED, "head_dim": 8}),
    "Qwen2ForCausalLM": ("Qwen2Config", CAUSAL, {**GROUPED, "tie_word_embeddings": True}),
    "MistralForCausalLM": ("MistralConfig", CAUSAL, GROUPED),
    "MixtralForCausalLM": ("MixtralConfig", CAUSAL, {**GROUPED, "num_local_experts": 2}),
    "OPTForCausalLM": ("OPTConfig", CAUSAL, {**ENCODER, "ffn_dim": 48, "word_embed_proj_dim": 16}),
    "BloomForCausalLM": ("BloomConfig", CAUSAL, {**TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "MambaForCausalLM": ("MambaConfig", CAUSAL, {**TOKENS, "hidden_size": 32, "num_hidden_layers": 2}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", CAUSAL, {**TOKENS, **BODY}),
    "XLNetLMHeadModel": ("XLNetConfig", CAUSAL, {"vocab_size": V, "d_model": 32, "n_layer": 2, "n_head": 4}),
    "RobertaForMaskedLM": ("RobertaConfig", MASKED, ENCODER),
    "DistilBertForMaskedLM": ("DistilBertConfig", MASKED, DISTIL),
    "AlbertForMaskedLM": ("AlbertConfig", MASKED, {**TOKENS, **BODY, "embedding_size": 16}),
    "ElectraForMaskedLM": ("ElectraConfig", MASKED, {**TOKENS, **BODY, "embedding_size": 16}),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", MASKED, {**TOKENS, **BODY}),
    "MPNetForMaskedLM": ("MPNetConfig", MASKED, ENCODER),
    "ModernBertForMaskedLM": ("ModernBertConfig", MASKED, {**TOKENS, **BODY, "cls_token_id": 1, "sep_token_id": 2}),
    "XLMRobertaForSequenceClassification": ("XLMRobertaConfig", "AutoModelForSequenceClassification", ENCODER),
    "BertModel": ("BertConfig", "AutoModel", ENCODER),
    "BertForPreTraining": ("BertConfig", "AutoModelForPreTraining", ENCODER),
    "BartForConditionalGeneration": ("BartConfig", PAIRED, {**PAIR, "scale_embedding": True}),
    "MBartForConditionalGeneration": ("MBartConfig", PAIRED, {**PAIR, "scale_embedding": True}),
    "PegasusForConditionalGeneration": ("PegasusConfig", PAIRED, PAIR),
    "M2M100ForConditionalGeneration": ("M2M100Config", PAIRED, PAIR),
    "MT5ForConditionalGeneration": ("MT5Config", PAIRED, T5),
    "T5EncoderModel": ("T5Config", "AutoModelForTextEncoding", T5),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The replacement of")  # the tables are tiny
@pytest.mark.parametrize("name", MODELS)
def test_replaced_saved_loaded_and_resized(name: str, tmp_path: Path) -> None:
    config_class, auto_class, settings = MODELS[name]
    model = getattr(transformers, name)(getattr(transformers, config_class)(**settings)).eval()
    replace_embeddings(model, map_dim=8, expand_dim=16, depth=2)
    ids = torch.randint(3, V, (2, 7))
    given = {"input_ids": ids}
    if auto_class == PAIRED:
        given["decoder_input_ids"] = ids
    with torch.no_grad():
        before = model(**given)[0]
        model.save_pretrained(tmp_path)
        loaded = getattr(transformers, auto_class).from_pretrained(tmp_path)
        assert type(loaded) is type(model)
        assert torch.equal(before, loaded(**given)[0])
        loaded.resize_token_embeddings(V + 7)
        after = loaded(**given)[0]
    torch.testing.assert_close(after[..., : before.shape[-1]], before, atol=1e-5, rtol=1e-4)

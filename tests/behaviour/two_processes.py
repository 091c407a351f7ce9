"""Run by two processes: a saved language model, split between them, gives the logits and gradients of the whole one.

Arguments: how it is split, the Auto class, the folder.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

import torchdefine.adapt.huggingface


def sharded(auto: Any, folder: str, how: str) -> Any:
    """By FSDP2: everything as one unit, the table as one of its own, or with its output layer."""
    model = auto.from_pretrained(folder)
    table = model.get_input_embeddings()
    if how == "unit":
        fully_shard(table)
    if how == "pair":
        fully_shard([table, model.get_output_embeddings()])
    for module in model.modules():
        if "Block" in type(module).__name__ or "DecoderLayer" in type(module).__name__:
            fully_shard(module)
    return fully_shard(model)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main(how: str, auto_class: str, folder: str) -> None:
    transformers.logging.set_verbosity_error()
    auto = getattr(transformers, auto_class)
    if how == "tp":
        model = auto.from_pretrained(folder, tp_plan="auto")
    else:
        dist.init_process_group("gloo")
        model = sharded(auto, folder, how)
    alone = auto.from_pretrained(folder)
    ids = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        ours, wanted = model(input_ids=ids, labels=ids), alone(input_ids=ids, labels=ids)
        torch.testing.assert_close(ours.logits, wanted.logits, atol=1e-5, rtol=1e-4)
        ours.loss.backward()
        wanted.loss.backward()
        gradients = dict(alone.named_parameters())
        compared = 0
        for name, parameter in model.named_parameters():
            if gradients[name].grad is not None:
                torch.testing.assert_close(whole(parameter.grad), gradients[name].grad, atol=1e-5, rtol=1e-4)
                compared += 1
        assert compared > 10
        for one in (model, alone):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            optimizer.step()
            optimizer.zero_grad()
    if how == "tp":
        model.save_pretrained(f"{folder}/saved")
        dist.barrier()
        again = auto.from_pretrained(f"{folder}/saved")
        torch.testing.assert_close(again(input_ids=ids, labels=ids).logits, alone(input_ids=ids, labels=ids).logits)
    print("alike")
    dist.destroy_process_group()


if __name__ == "__main__":
    assert torchdefine.adapt.huggingface
    main(*sys.argv[1:])

"""How to run an exported program without torchdefine: the Python of the model card, which a test executes."""

from __future__ import annotations

from torchdefine.data import Tokenization, TokenizerPair
from torchdefine.data.tokenizer import SOURCE_FILE, TARGET_FILE, TOKENIZER_FILE
from torchdefine.data.vocabulary import VOCABULARY_FILE
from torchdefine.inference.export_programs import Program

WORDS = f"""words = [line.split("\\t")[0] for line in open("{VOCABULARY_FILE}", encoding="utf-8")][1:]"""
SUBWORDS = f"""tokenizer = Tokenizer.from_file("{TOKENIZER_FILE}")"""


def code_for(program: Program, file: str, tokenization: Tokenization | TokenizerPair) -> str:
    """Python of ten lines or so, to be run in the folder of the export."""
    onnx = file.endswith(".onnx")
    if program.name == "embedding":
        return _embedding(file, onnx)
    if isinstance(tokenization, TokenizerPair):
        if program.name == "encoder":
            return _encoder(file, onnx, tokenization)
        return _decoder(program, file, onnx, tokenization)
    return _step(program, file, onnx, tokenization)


def _embedding(file: str, onnx: bool) -> str:
    if onnx:
        return f"""import numpy, onnxruntime

embedding = onnxruntime.InferenceSession("{file}")
ids = numpy.array([[1, 2, 3], [4, 5, 6]])
(vectors,) = embedding.run(None, {{"ids": ids}})
print(vectors.shape)"""
    return f"""import torch

embedding = torch.export.load("{file}").module()
ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
(vectors,) = embedding(ids)
print(vectors.shape)"""


def _step(program: Program, file: str, onnx: bool, tokenization: Tokenization) -> str:
    """The most probable continuation of the start of a line."""
    words = tokenization.kind == "words"
    setup = WORDS if words else f"from tokenizers import Tokenizer\n\n{SUBWORDS}"
    shown = "words[ids.item()]" if words else "tokenizer.id_to_token(ids.item())"
    by_token = len(program.inputs[0].shape) == 1
    first = f"[{tokenization.eos_id}]" if by_token else f"[[{tokenization.eos_id}]]"
    best = "log_probs.argmax(-1)" if by_token else "log_probs.argmax(-1)[:, None]"
    if onnx:
        return f"""import numpy, onnxruntime
{setup}
step = onnxruntime.InferenceSession("{file}")
types = {{"tensor(float)": "float32", "tensor(int64)": "int64"}}
state = {{i.name: numpy.zeros([1, *i.shape[1:]], types[i.type]) for i in step.get_inputs()[1:]}}
ids = numpy.array({first})  # a line begins after the end of another
for _ in range(10):
    log_probs, *after = step.run(None, {{"ids": ids, **state}})
    state, ids = dict(zip(state, after)), {best}
    print({shown}, end=" ")"""
    return f"""import torch
{setup}
step = torch.export.load("{file}").module()
state = {_empty_state(program)}
ids = torch.tensor({first})  # a line begins after the end of another
for _ in range(10):
    log_probs, *state = step(ids, *state)
    ids = {best}
    print({shown}, end=" ")"""


def _empty_state(program: Program) -> str:
    shapes = [(1, *port.shape[1:]) for port in program.inputs[1:] if port.dtype == "float32"]
    if any(port.dtype == "int64" for port in program.inputs[1:]):  # a Transformer-XL: all its layers are alike
        return f"[torch.zeros(1, dtype=torch.int64), *[torch.zeros({shapes[0]})] * {len(shapes)}]"
    return f"[torch.zeros(shape) for shape in {shapes}]"


def _encoder(file: str, onnx: bool, tokenization: TokenizerPair) -> str:
    packages, array = ("numpy, onnxruntime", "numpy.array") if onnx else ("torch", "torch.tensor")
    opened = f'onnxruntime.InferenceSession("{file}")' if onnx else f'torch.export.load("{file}").module()'
    called = 'encoder.run(None, {"ids": ids})' if onnx else "encoder(ids)"
    eos, pad = tokenization.source.eos_id, tokenization.source.pad_id
    return f"""import {packages}
from tokenizers import Tokenizer

encoder = {opened}
tokenizer = Tokenizer.from_file("{TOKENIZER_FILE if tokenization.joint else SOURCE_FILE}")
sources = [tokenizer.encode(line, add_special_tokens=False).ids + [{eos}] for line in ("Hello.", "How are you?")]
longest = max(map(len, sources))
ids = {array}([source + [{pad}] * (longest - len(source)) for source in sources])
encoded, visible, *source_keys_and_values = {called}
print(encoded.shape, visible)"""


def _decoder(program: Program, file: str, onnx: bool, tokenization: TokenizerPair) -> str:
    """Greedy search for the sources of the encoder's code."""
    own = [port for port in program.inputs if port.name.startswith(("key_", "value_"))]
    _, heads, _, width = own[0].shape
    bos, eos = tokenization.target.bos_id, tokenization.target.eos_id
    if onnx:
        start = f"""# goes on from the code of the encoder
decoder = onnxruntime.InferenceSession("{file}")
names = [i.name for i in decoder.get_inputs()]
own = [numpy.zeros((len(ids), {heads}, 0, {width}), "float32")] * {len(own)}
last, found = numpy.full(len(ids), {bos}), []"""
        called = "decoder.run(None, dict(zip(names, [last, visible, *source_keys_and_values, *own])))"
    else:
        start = f"""# goes on from the code of the encoder
decoder = torch.export.load("{file}").module()
own = [torch.zeros(len(ids), {heads}, 0, {width})] * {len(own)}
last, found = torch.full((len(ids),), {bos}), []"""
        called = "decoder(last, visible, *source_keys_and_values, *own)"
    return f"""{start}
for _ in range(50):
    log_probs, *own = {called}
    last = log_probs.argmax(-1)
    found.append(last.tolist())
tokenizer = Tokenizer.from_file("{TOKENIZER_FILE if tokenization.joint else TARGET_FILE}")
print([tokenizer.decode([*line, {eos}][: [*line, {eos}].index({eos})]) for line in zip(*found)])"""

"""The file formats of exported programs: how one is written, and how one is opened again to be run.

``torch-export`` is a .pt2 of torch.export, which needs torch and nothing else; ``onnx`` is made from the same traced
program by torch's exporter and runs in onnxruntime (extra ``export``).
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.embedding import LooksUp
from torchdefine.errors import UserError
from torchdefine.export.program import Port, Program, Runner, sampled
from torchdefine.files import atomic_file
from torchdefine.spelling import did_you_mean

TRACED_AT = {"batch": 3, "length": 4, "source_length": 5, "target_length": 6}
"""Any sizes work; different ones cannot be mistaken for each other."""
OLDEST_TORCH = (2, 11)
"""The version programs were tried with; 2.6 and 2.9 cannot trace some models, or load what they saved."""
LARGEST_ONNX_FILE = 1 << 30
"""Bytes of weights in one file; larger weights go to a second one, since protobuf takes no file of 2 GiB."""


class TorchExport:
    suffix = ".pt2"
    packages: tuple[str, ...] = ()
    """What it needs beside torch."""
    runs_in = library = "torch"
    """The library that the card's code makes arrays with."""
    opening = """import torch

def opened(name):
    return torch.export.load(f"{name}.pt2").module()"""
    """Python for the card: ``opened(name)`` is a program, called with its inputs in order."""

    def check_installed(self) -> None:
        check_torch()

    def write(self, program: Program, traced: torch.export.ExportedProgram, path: Path) -> None:
        whole = io.BytesIO()  # if torch wrote the file itself, a full disk would end the process
        with quiet():
            torch.export.save(traced, whole)
        with atomic_file(path) as file:
            file.write(whole.getbuffer())

    def open(self, path: Path, inputs: Sequence[Port]) -> Runner:
        with quiet():
            module = torch.export.load(path).module()
        return lambda tensors: list(module(*tensors))


class Onnx:
    suffix = ".onnx"
    packages: tuple[str, ...] = ("onnx", "onnxruntime", "onnxscript")
    runs_in, library = "onnxruntime", "numpy"
    opening = """import numpy
import onnxruntime

def opened(name):
    session = onnxruntime.InferenceSession(f"{name}.onnx")
    names = [port.name for port in session.get_inputs()]
    return lambda *arrays: session.run(None, dict(zip(names, arrays)))"""

    def check_installed(self) -> None:
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            raise UserError(f"ONNX needs {', '.join(missing)} too: pip install 'torchdefine[export]'.")

    def write(self, program: Program, traced: torch.export.ExportedProgram, path: Path) -> None:
        with quiet():
            made: Any = torch.onnx.export(
                traced,
                (),
                dynamo=True,
                verbose=False,
                input_names=[port.name for port in program.inputs],
                output_names=[port.name for port in program.outputs],
            )
            graph = made.model.graph
            for values, ports in ((graph.inputs, program.inputs), (graph.outputs, program.outputs)):
                for value, port in zip(values, ports, strict=True):
                    value.shape = type(value.shape)(port.shape)  # names the sizes as our ports do
            save_onnx(made, path, (*traced.state_dict.values(), *traced.constants.values()))

    def open(self, path: Path, inputs: Sequence[Port]) -> Runner:
        return open_onnx(path, [port.name for port in inputs])


def save_onnx(made: Any, path: Path, weights: Iterable[Any]) -> None:
    """Write what torch's exporter made, without its notes; large weights go to a second file."""
    for node in made.model.graph:
        node.metadata_props.clear()
    size = sum(weight.nbytes for weight in weights if isinstance(weight, Tensor))
    made.save(path, external_data=size > LARGEST_ONNX_FILE)


def open_onnx(path: Path, names: Sequence[str]) -> Runner:
    """A program that takes the inputs of these names, in this order."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        given = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, given)]

    return run


ProgramFormat = TorchExport | Onnx
"""A way to keep programs in files."""
FORMATS: dict[str, ProgramFormat] = {"torch-export": TorchExport(), "onnx": Onnx()}


def check_torch() -> None:
    """Refuse a torch whose exporter is too old."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        raise UserError(f"Programs need torch {needed} or newer, but this is {torch.__version__}: upgrade torch.")


def program_format(name: str) -> ProgramFormat:
    if name not in FORMATS:
        raise UserError(f"The format {name!r} is unknown{did_you_mean(name, FORMATS)}")
    return FORMATS[name]


class _Module(nn.Module):
    """A program's call as a module, which is what torch traces."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.model, self.call = program.model, program.call
        # Registered here, so that a table in which both ends of a model look is one weight of the program.
        looking = (part.looked_up for part in self.model.modules() if isinstance(part, LooksUp))
        self.tables = nn.ModuleList(table for table in looking if table is not None)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.call(*tensors))


@torch.no_grad()
def trace(program: Program) -> torch.export.ExportedProgram:
    """The program as a graph of torch's own operations, with the weights that it uses and no others."""
    free = {name: torch.export.Dim(name) for port in program.inputs for name in port.shape if isinstance(name, str)}
    shapes = tuple(
        {place: free[name] for place, name in enumerate(port.shape) if isinstance(name, str)} for port in program.inputs
    )
    example = tuple(sampled(program.inputs, TRACED_AT, seed=0))
    with quiet():
        traced = torch.export.export(_Module(program), example, dynamic_shapes=(shapes,), strict=False)
    specs = traced.graph_signature.input_specs
    nodes = {node.name: node for node in traced.graph.nodes if node.op == "placeholder"}
    for spec in list(specs):  # a trace keeps every weight of its module, also those that another program uses
        if spec.target is not None and not nodes[spec.arg.name].users:
            specs.remove(spec)
            traced.graph.erase_node(nodes[spec.arg.name])
            traced.state_dict.pop(spec.target, None)
            traced.constants.pop(spec.target, None)
    traced.graph_module.recompile()
    for node in traced.graph.nodes:  # the file and line of everything must not leave with the program
        for note in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn"):
            node.meta.pop(note, None)
    return traced


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters warn about their own internals and log every step; what matters is checked afterwards."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)

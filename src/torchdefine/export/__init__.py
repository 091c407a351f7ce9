"""Programs that run without torchdefine: their formats, checks against the model, record, card and reader."""

from torchdefine.export.card import ExportedFrom
from torchdefine.export.folder import LoadedExport, LoadedProgram, check_export, export_model, load_export, on_the_cpu
from torchdefine.export.program import Exportable, Port, Program

__all__ = [
    "Exportable",
    "ExportedFrom",
    "LoadedExport",
    "LoadedProgram",
    "Port",
    "Program",
    "check_export",
    "export_model",
    "load_export",
    "on_the_cpu",
]

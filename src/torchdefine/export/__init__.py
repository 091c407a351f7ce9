"""Programs that run without torchdefine: their formats, checks against the model, record, card and reader."""

from torchdefine.export.program import Exportable, Port, Program
from torchdefine.export.read import LoadedExport, LoadedProgram, check_export, load_export
from torchdefine.export.write import ExportedFrom, export_model, on_the_cpu

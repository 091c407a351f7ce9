"""What a trained model is turned into: programs that run without torchdefine."""

from torchdefine.inference.exported import LoadedExport, check_export, load_export

__all__ = ["LoadedExport", "check_export", "load_export"]

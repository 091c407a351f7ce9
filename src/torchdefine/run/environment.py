"""What a result depends on beside its recipe: code, versions, hardware."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import torchdefine


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Commit, versions and hardware, for the head of a log and for a result."""
    cudnn = torch.backends.cudnn
    versions = {
        "torchdefine": torchdefine.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(cudnn.version()) if cudnn.is_available() else None,
    }
    hardware: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "system": platform.platform(terse=True),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30, 1)}
    return {"commit": _commit(), "versions": versions, "hardware": hardware}


def code_sha256() -> str:
    """A hash of this package's code, for processes that must run the same."""
    folder, digest = Path(torchdefine.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def _commit() -> str | None:
    """The commit of the checkout this package runs from, marked where files were changed; None for an installed one.

    TORCHDEFINE_COMMIT overrides it, for a copy of a checkout without its history.
    """
    if told := os.environ.get("TORCHDEFINE_COMMIT"):
        return told
    folder = Path(torchdefine.__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or _git(folder, "ls-files", "__init__.py") != "__init__.py":
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", ".")
    return f"{commit}-changed" if changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())

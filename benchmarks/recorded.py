"""Any work on a GPU as one CUDA graph."""

from __future__ import annotations

import torch

from benchmarks.measuring import Work


def recorded(work: Work) -> Work:
    """The first call records what ``work`` starts on the device, memory counted; later ones replay it."""
    replay: list[Work] = []

    def call() -> object:
        if not replay:  # ``work`` stays, and with it the weights that the recording reads
            replay.append(_recording(work))
        return replay[0]()

    return call


def _recording(work: Work) -> Work:
    """Replays into the same memory; gives what ``work`` gave when it was recorded."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):  # what is chosen or allocated once must not be part of the recording
            work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()

    def replay() -> object:
        graph.replay()
        return kept

    return replay

"""Any work on a GPU as one CUDA graph."""

from __future__ import annotations

import torch

from benchmarks.measuring import Work


def recorded(work: Work) -> Work:
    """Replays what ``work`` started on the device, into the same memory; gives what it gave when it was recorded."""
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

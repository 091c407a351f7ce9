"""How the tests of this room break a training off."""

import os
import signal

from torchdefine.training.progress import QuietReporter


class StopAt(QuietReporter):
    """Asks this process to end when a log line of a step comes."""

    def __init__(self, step: int) -> None:
        self.step = step

    def trained(self, record: dict) -> None:
        if record["step"] >= self.step:
            self.step = 10**9
            os.kill(os.getpid(), signal.SIGTERM)

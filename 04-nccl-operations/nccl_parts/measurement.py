"""What bandwidth_test.py and pairwise_scan.py measure alike: sizes, rates, and until when."""

import atexit
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

import torch

from legacy_common import cli, measure, runtime

CLOCK_S = 5e-7  # what a CUDA event can tell apart: a time of 0 is shorter than this
# Shorter than the 30 s after which torchrun kills a process that it has passed the signal on to.
GRACE_S = 20.0


def refuse_size(flag: str, size: int, world: runtime.World, device: torch.device) -> None:
    """Refuse two buffers of `size` bytes that do not fit into a rank's memory. A collective."""
    sharing = world.local_world_size if device.type == "cpu" else 1  # ranks of a machine
    most = int(0.9 * min(runtime.gather(measure.available_memory(device) // sharing))) // 2
    if size > most:
        why = "two buffers of it do not fit into a rank's memory"
        raise cli.UsageError(f"{flag} {size}: {why}; at most {flag} {most // 2**20}M does")


def gb_per_s(nbytes: float, seconds: float) -> float:
    """Return a rate that is finite also where the clock is too coarse for the time."""
    return nbytes / max(seconds, CLOCK_S) / 1e9


class StopEarly:
    """Within the `with` block Ctrl-C is a request, which `agreed` makes known to all ranks.

    A rank that waits in a collective runs no Python, so no signal handler either: a thread calls
    `conclude` GRACE_S after the first Ctrl-C, or at the second, and ends with exit code 130.
    """

    def __init__(self, say: Callable[[str], None], conclude: Callable[[], object]) -> None:
        self.say, self.conclude = say, conclude
        self.requested = self.stopped = False
        self.during = ""  # what is being measured, for the one who interrupts it
        self.lock = threading.Lock()

    def __enter__(self) -> "StopEarly":
        reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)  # as set_wakeup_fd demands
        self.handler = signal.signal(signal.SIGINT, self._note)
        signal.set_wakeup_fd(self.writer.fileno())  # written to even while Python waits
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGINT, self.handler)
            self.writer.close()  # ends the thread

    def agreed(self) -> bool:
        """Say whether any rank got Ctrl-C; the same on all. A collective, between measurements."""
        self.stopped = self.stopped or any(runtime.gather(self.requested))
        return self.stopped

    def _note(self, *_: object) -> None:
        self.requested = True

    def _watch(self, reader: socket.socket) -> None:
        if not reader.recv(1):
            return
        self.requested = True
        self.say("# Ctrl-C: stopping after this measurement; once more: at once")
        reader.settimeout(GRACE_S)
        with contextlib.suppress(TimeoutError):
            if not reader.recv(1):
                return
        with self.lock:
            try:
                self.say(f"# did not end: {self.during}")
                self.conclude()
            finally:
                atexit._run_exitfuncs()
                os._exit(cli.INTERRUPTED)

"""Ctrl-C in a long measurement: keep what was measured, on all ranks together, even in a hang."""

import atexit
import os
import signal
import socket
import threading
from collections.abc import Callable

from dist_common import cli, runtime

# Shorter than the 30 s after which torchrun kills a process that it has passed the signal on to.
GRACE_S = 20.0


class StopEarly:
    """Within the `with` block Ctrl-C is a request, which `agreed` makes known to all ranks.

    A rank that waits in a collective runs no Python, so no signal handler either. A thread of its
    own does: GRACE_S after the first Ctrl-C, or at the second, it calls `conclude` and ends the
    process with exit code 130.
    """

    def __init__(self, say: Callable[[str], None], conclude: Callable[[], object]) -> None:
        self.say, self.conclude = say, conclude
        self.requested = self.stopped = False
        self.during = ""  # what is being measured, for the one who interrupts it
        self.lock = threading.Lock()

    def __enter__(self) -> "StopEarly":
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)  # as set_wakeup_fd demands
        self.handler = signal.signal(signal.SIGINT, self._note)
        signal.set_wakeup_fd(self.writer.fileno())  # written to even while Python waits
        threading.Thread(target=self._watch, args=(self.reader,), daemon=True).start()
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
        try:
            if not reader.recv(1):
                return
        except TimeoutError:
            pass
        with self.lock:
            try:
                self.say(f"# did not end: {self.during}")
                self.conclude()
            finally:
                atexit._run_exitfuncs()
                os._exit(cli.INTERRUPTED)

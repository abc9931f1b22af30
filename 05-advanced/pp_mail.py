"""Send activations and gradients between the ranks of a pipeline so that none waits for ever."""

from collections import deque

import torch
import torch.distributed as dist

from pp_schedules import needs


def open_channels(p):
    """Return a process group for each (source, destination) of a ring of p ranks.

    A group per direction: NCCL carries out the sends and receives of a group one after the other.
    In one group for both directions two ranks that send to each other would both wait.
    """
    pairs = {pair for r in range(p) for pair in ((r, (r + 1) % p), ((r + 1) % p, r))}
    return {pair: dist.new_group(list(pair)) for pair in sorted(pairs) if pair[0] != pair[1]}


class Mail:
    """Send results without waiting; receive them in the order in which each rank sends them."""

    def __init__(self, schedule, channels, shape, device):
        self.rank = dist.get_rank()
        self.p = len(schedule)
        self.channels = channels
        self.shape = shape
        self.device = device
        self.last_stage = max(i.stage for rank in schedule for i in rank)
        self.expected = [
            deque(i for i in rank if self.goes_to(i) == self.rank) for rank in schedule
        ]
        self.arriving = {}
        self.sending = []

    def goes_to(self, instruction):
        """Return the rank whose stage needs the result; None if it stays on this stage."""
        step = {"F": 1, "B": -1, "I": -1, "W": 0}[instruction.kind]
        stage = instruction.stage + step
        return stage % self.p if step and 0 <= stage <= self.last_stage else None

    def send(self, instruction, result):
        to = self.goes_to(instruction)
        if to == self.rank:  # one rank that holds both stages
            self.arriving[instruction] = (result, None)
        elif to is not None:
            work = dist.isend(result, to, self.channels[self.rank, to])
            self.sending.append((work, result))  # kept until it is sent

    def wait_for(self, instruction):
        """Return what a neighbouring stage has to send before this instruction can start."""
        for other in needs(instruction, self.last_stage):
            if other.stage != instruction.stage:
                return self.receive(other)

    def receive(self, instruction):
        """Wait for the result of an instruction of another stage. Shape: (B, T, D)."""
        source = instruction.stage % self.p
        while instruction not in self.arriving:
            # A message has no name: the first one received is the first one that was sent.
            first = self.expected[source].popleft()
            buffer = torch.empty(self.shape, device=self.device)
            work = dist.irecv(buffer, source, self.channels[source, self.rank])
            self.arriving[first] = (buffer, work)
        buffer, work = self.arriving.pop(instruction)
        if work:
            work.wait()
        return buffer

    def finish(self):
        for work, _ in self.sending:
            work.wait()

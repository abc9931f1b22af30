"""Count the samples that all ranks read from a stream of 8."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
dist.init_process_group()


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(8)


loader = DataLoader(Stream(), batch_size=None, num_workers=2)
count = torch.tensor(len(list(loader)))
dist.all_reduce(count)
print(f"{count} samples per epoch", flush=True)

dist.destroy_process_group()

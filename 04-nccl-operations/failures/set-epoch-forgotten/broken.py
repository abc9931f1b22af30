"""Show the order in which each rank reads its samples, epoch by epoch."""

import torch.distributed as dist
from torch.utils.data import DistributedSampler

dist.init_process_group()
sampler = DistributedSampler(range(12))

orders = set()
for epoch in range(2):
    order = tuple(sampler)
    print(f"epoch {epoch}: {order}", flush=True)
    orders.add(order)
print(f"different orders: {len(orders)} in 2 epochs", flush=True)

dist.destroy_process_group()

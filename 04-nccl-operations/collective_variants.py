"""Collectives that collective_ops.py runs beside its own: no tensor, several ones, objects."""

import functools
import time
import warnings

import torch.distributed as dist

from collective_definitions import text_of


def barrier(mine):
    arrived = functools.partial(dist.group.WORLD.get_group_store().add, "collective_ops/arrived")
    time.sleep(0.05 * dist.get_rank())  # the ranks arrive one after the other
    arrived(1)
    dist.barrier()
    return arrived(0)  # how many had arrived when the barrier let this rank through


def all_reduce_coalesced(mine):
    other = mine.flip(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its name is to go, and gloo has no other one yet
        dist.all_reduce_coalesced([mine, other])
    return mine + other


def all_reduce_scaled(mine):
    dist.all_reduce(mine, op=dist._make_nccl_premul_sum(0.5))
    return mine


def broadcast_object_list(mine):
    box = [text_of(mine)]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_gather_object(mine):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, text_of(mine))
    return found


def gather_object(mine):
    found = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(text_of(mine), found, dst=0)
    return found


def scatter_object_list(mine):
    box = [None]
    dist.scatter_object_list(box, text_of(mine).split(), src=0)
    return box[0]


VARIANTS = {
    "barrier": barrier,
    "all_reduce PREMUL_SUM": all_reduce_scaled,
    "all_reduce_coalesced": all_reduce_coalesced,
    "broadcast_object_list": broadcast_object_list,
    "all_gather_object": all_gather_object,
    "gather_object": gather_object,
    "scatter_object_list": scatter_object_list,
}

"""Many tensors as few messages: neighbours of one format and device are joined, up to some megabytes at a time.

Ranks as a table, a row for every host: sums that leave a host once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gangline.worker.process_group import ProcessGroup

AT_ONCE_BYTES = 32 << 20


def in_buckets(tensors: Iterable[torch.Tensor], *, at_once_bytes: int = AT_ONCE_BYTES) -> Iterator[list[torch.Tensor]]:
    """The tensors in their order. A bucket ends where it has that many bytes, or what follows has another format."""
    bucket: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if bucket and (
            num_bytes >= at_once_bytes or (tensor.dtype, tensor.device) != (bucket[0].dtype, bucket[0].device)
        ):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


def named_buckets(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The same with their names."""
    names = iter(tensors)
    for bucket in in_buckets(tensors.values()):
        yield {next(names): tensor for tensor in bucket}


def split_large(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of it that are no larger than what is sent at once: a table may have gigabytes."""
    return tensor.view(-1).split(AT_ONCE_BYTES // tensor.element_size())


def joined(bucket: Sequence[torch.Tensor]) -> torch.Tensor:
    """One bucket as one row of numbers: a copy."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in bucket])


@torch.no_grad()
def spread(row: torch.Tensor, bucket: Sequence[torch.Tensor]) -> None:
    """`joined` undone, in place."""
    for tensor, part in zip(bucket, row.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))


def send_to(message: torch.Tensor, receivers: Sequence[int]) -> None:
    """Send a tensor to some ranks, all at once."""
    for work in [dist.isend(message, dst=rank) for rank in receivers]:
        assert work is not None
        work.wait()


def send_json(content: Any, receivers: Sequence[int]) -> None:
    """Send JSON of any length to some ranks, which `receive_json`."""
    data = bytearray(json.dumps(content).encode())
    send_to(torch.tensor([len(data)]), receivers)
    send_to(torch.frombuffer(data, dtype=torch.uint8), receivers)


def receive_json(source: int) -> Any:
    """The JSON that a rank sends."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, src=source)
    data = torch.zeros(int(length.item()), dtype=torch.uint8)
    dist.recv(data, src=source)
    return json.loads(data.numpy().tobytes())


def send_tensors(tensors: Iterable[torch.Tensor], receivers: Sequence[int]) -> None:
    """Send tensors of any device, bucket by bucket, to ranks that `receive_tensors` of the same shapes and formats."""
    for bucket in in_buckets(tensors):
        send_to(joined(bucket).cpu(), receivers)


def receive_tensors(tensors: Iterable[torch.Tensor], source: int) -> None:
    """Fill tensors in place with those that a rank sends."""
    for bucket in in_buckets(tensors):
        row = torch.empty(sum(tensor.numel() for tensor in bucket), dtype=bucket[0].dtype)
        dist.recv(row, src=source)
        spread(row, bucket)


@torch.no_grad()
def sum_gradients(
    parameters: Iterable[torch.nn.Parameter], add_up: Callable[[torch.Tensor], None], *, sent_as: torch.dtype | None
) -> None:
    """Sum the gradients of these weights in place; one that has none, for want of work in this step, counts as zero.

    add_up: sums a row of numbers over some ranks, in place. sent_as: the format that rows travel in, where they are
    wider; None: the one they have.
    """
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    for bucket in in_buckets(part for gradient in gradients for part in split_large(gradient)):
        row = joined(bucket)
        sent = row.to(sent_as) if sent_as is not None and sent_as.itemsize < row.dtype.itemsize else row
        add_up(sent)
        spread(sent, bucket)


ACROSS, INSIDE = "replicate", "shard"
"""Ranks of the same place on all hosts; ranks of one host."""


def by_host(world: ProcessGroup) -> DeviceMesh:
    """[hosts, ranks of each], which is the same number on all of them; collective to make."""
    ranks = torch.arange(world.size).view(len(world.gang.hosts), -1)
    return DeviceMesh(world.device.type, ranks, mesh_dim_names=(ACROSS, INSIDE))


def sum_over(flat: torch.Tensor, mesh: DeviceMesh) -> None:
    """In place, over all ranks. Of two dimensions: each rank of a host sums a part of it across hosts."""
    if mesh.ndim == 1:
        dist.all_reduce(flat, group=mesh.get_group())
        return
    inside, size = mesh.get_group(INSIDE), mesh.size(1)
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % size)])
    part = torch.empty_like(padded[: len(padded) // size])
    dist.reduce_scatter_tensor(part, padded, group=inside)
    if mesh.size(0) > 1:
        dist.all_reduce(part, group=mesh.get_group(ACROSS))
    dist.all_gather_into_tensor(padded, part, group=inside)
    flat.copy_(padded[: len(flat)])

"""Tensors between the CPU and a GPU, which is waited for as seldom as possible."""
import contextlib
import copy

import torch

PACKED = 2 ** 26    # bytes that cross together; packing takes as many on the GPU
SMALL = 2 ** 20     # bytes of a tensor whose crossing takes less time than the wait for it


def to_device(x, device):
    """x on the device. It crosses from pinned memory, so that a GPU is not waited for."""
    if torch.device(device).type == "cuda":
        with contextlib.suppress(RuntimeError):     # no memory left to pin: then it waits
            x = x.pin_memory()
    return x.to(device, non_blocking=True)


def to_host(tensors):
    """[the tensors on the CPU]. Those that are there already stay as they are.

    Those of a GPU are packed: it is waited for once for every PACKED bytes. Tensors that share
    memory, such as tied weights, become one.
    """
    far = {address(x): x for x in tensors if x.device.type != "cpu"}
    near = {}
    for piece in bundles(far.values()):
        near |= zip(map(address, piece), copies_of(piece))
    return [near.get(address(x), x) for x in tensors]


def small_to_host(content):
    """Nested dicts with their tensors of at most SMALL bytes on the CPU. The others stay where they
    are, so that the CPU need not have room for all of them at once."""
    small = [x for x in tensors_in(content) if x.device.type != "cpu" and x.nbytes <= SMALL]
    if not small:
        return content
    near = dict(zip(map(address, small), to_host(small)))
    return exchanged(content, near)


def address(x):
    """What two tensors share only if they are the same numbers in the same memory."""
    return x.device, x.data_ptr(), x.dtype, x.shape, x.stride()


def bundles(tensors):
    """Lists of tensors with at most PACKED bytes together. A larger tensor is alone."""
    piece = []
    size = 0
    for x in tensors:
        if piece and size + x.nbytes > PACKED:
            yield piece
            piece = []
            size = 0
        piece.append(x)
        size += x.nbytes
    if piece:
        yield piece


def copies_of(piece):
    """Copies of tensors on the CPU, each with memory of its own."""
    if len(piece) == 1:
        return [piece[0].detach().cpu()]
    packed = torch.cat([x.detach().contiguous().flatten().view(torch.uint8) for x in piece]).cpu()
    parts = packed.split([x.nbytes for x in piece])
    return [part.clone().view(x.dtype).view(x.shape) for part, x in zip(parts, piece)]


def tensors_in(content):
    """The tensors in nested dicts."""
    if torch.is_tensor(content):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from tensors_in(value)


def exchanged(content, near):
    """Nested dicts with the tensors of near {address: tensor} in place of their own."""
    if torch.is_tensor(content):
        return near.get(address(content), content)
    if not isinstance(content, dict):
        return content
    other = copy.copy(content)      # keeps what a state_dict has besides its entries
    for name, value in content.items():
        other[name] = exchanged(value, near)
    return other

"""Small whole numbers packed into bytes: one, two or four bits each."""

import numpy as np
import torch
from torch import Tensor


def packed_bits(bits: Tensor) -> Tensor:
    """A tensor of truth values, eight to a byte."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    return packed(bits.to(torch.uint8), 1)


def unpacked_bits(data: Tensor, count: int) -> Tensor:
    """The first `count` truth values of packed ones."""
    if data.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(data.numpy(), count=count, bitorder="little")).view(torch.bool)
    return unpacked(data, 1, count).to(torch.bool)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes from 0 to 2**bits - 1, of type uint8, with 8 / bits of them in a byte; bits: 1, 2, 4 or 8."""
    each = 8 // bits
    if each == 1:
        return codes
    short = -codes.numel() % each
    if short:
        codes = torch.cat((codes, codes.new_zeros(short)))
    rows = codes.view(-1, each)
    data = rows[:, 0].clone()
    for place in range(1, each):
        data |= rows[:, place] << (bits * place)
    return data


def unpacked(data: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of packed ones."""
    each = 8 // bits
    if each == 1:
        return data[:count]
    mask = (1 << bits) - 1
    return torch.stack([(data >> (bits * place)) & mask for place in range(each)], dim=1).view(-1)[:count]


def bits_for(values: int) -> int:
    """The bits of a code with this number of values."""
    return next(bits for bits in (1, 2, 4, 8) if values <= 1 << bits)

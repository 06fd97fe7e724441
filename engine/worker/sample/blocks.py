"""Row maxima by blocks of the vocabulary.

A maximum over 64 contiguous floats runs at memory speed, an argmax or a top-k over a whole row does not. The maxima of
the blocks find the argmax of a row by looking into one block, and bound the k-th largest value from below:

    row    |  block 0  |  block 1  |  block 2  | …          the k-th largest of the block maxima is at most
    maxima      7.1         9.3         2.0                  the k-th largest element of the row
"""

import torch
from torch import Tensor

BLOCK = 64


def block_max(x: Tensor) -> Tensor:
    """[R, ceil(V / 64)] maxima of the blocks of `x` [R, V]. NaN wins, so a row's maximum tells if it holds one."""
    vocab = x.shape[1]
    whole = vocab // BLOCK * BLOCK
    if whole == vocab:
        return x.unflatten(1, (-1, BLOCK)).amax(-1)
    tail = x[:, whole:].amax(-1, keepdim=True)
    if not whole:
        return tail
    return torch.cat((x[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1), tail), 1)


def block_ids(blocks: Tensor, vocab: int) -> Tensor:
    """int64 [..., 64] token ids of `blocks`; past the vocabulary's end the last id repeats."""
    return (blocks.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=blocks.device)).clamp_(max=vocab - 1)


def argmax(x: Tensor, maxima: Tensor | None = None) -> Tensor:
    """int64 [R] index of the largest element of each row of `x` [R, V]; of equal ones the lowest."""
    maxima = block_max(x) if maxima is None else maxima
    ids = block_ids(maxima.argmax(-1), x.shape[1])
    return ids.gather(1, x.gather(1, ids).argmax(-1, keepdim=True)).squeeze(1)

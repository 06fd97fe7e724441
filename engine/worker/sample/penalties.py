"""Changes to single logits: bias, banned tokens, penalties. In place, and never more work than the tokens they name.

Everything works on one flat NumPy view of the logits [B, V]: token t of row i stands at i·V + t.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def apply_repetition(flat: Floats, where: Ints, penalty: Floats) -> None:
    """Divide positive and multiply negative logits by `penalty` (Keskar et al. 2019, CTRL, as in Hugging Face).

    `where` holds the place of every known token, prompt and output, and may repeat a place: each repeat writes the same
    value. `penalty` has one entry for each of `where`.
    """
    old = flat[where]
    flat[where] = np.where(old < 0, old * penalty, old / penalty)


def apply_frequency_presence(flat: Floats, vocab: int, where: Ints, frequency: Floats, presence: Floats) -> None:
    """Subtract frequency · count + presence for each token that the output holds (OpenAI's definition).

    `where` holds the place of every output token; `frequency` and `presence` have one entry a row of the logits.
    """
    places, count = np.unique(where, return_counts=True)
    row = places // vocab
    flat[places] -= frequency[row] * count.astype(np.float32)
    flat[places] -= presence[row]


def token_places(
    token_ids: NDArray[np.int32], rows: Ints, batch: Ints, start: Ints, stop: Ints, vocab: int
) -> tuple[Ints, Ints]:
    """Places of tokens start[i]..stop[i]-1 of each row, one after another, and which i each belongs to.

    `token_ids` [num_rows, max_len] is indexed by state row `rows[i]`; `batch[i]` is the row of the logits.
    """
    length = np.maximum(stop - start, 0)
    owner = np.repeat(np.arange(len(rows)), length)
    first = np.cumsum(length) - length
    column = np.arange(len(owner)) - (first - start)[owner]
    return batch[owner] * vocab + token_ids[rows[owner], column], owner

"""How kernels for Hopper cut a GEMM among their programs. The kernels themselves run in tests/gpu."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.gemm.packed import block_wgmma

H100 = 132  # multiprocessors


def busiest(rows: list[int], across: int, programs: int) -> int:
    """The most rows that a program multiplies, if each takes the next tile of its own in turn."""
    tiles = [height for height in rows for _ in range(across)]
    return max(sum(tiles[program::programs]) for program in range(programs))


@given(rows=st.integers(1, 20_000), blocks=st.integers(1, 160), programs=st.integers(1, 150))
def test_row_blocks_cover_all_rows_and_the_busiest_program_has_least_to_do(rows, blocks, programs):
    outputs = 128 * blocks
    across = -(-outputs // 256)
    tiles = block_wgmma._tiles(rows, outputs, programs)
    heights = [192] * tiles.high + [128] * tiles.low
    assert sum(heights) >= rows > sum(heights) - min(heights)
    assert busiest(heights, across, programs) == 64 * tiles.parts <= busiest([192] * -(-rows // 192), across, programs)


@pytest.mark.parametrize(("outputs", "parts"), [(34_816, 134), (16_384, 63), (14_336, 55), (5_120, 20)])
def test_a_prompt_of_27b(outputs, parts):
    """With high tiles only: 135, 63, 57 and 21."""
    assert block_wgmma._tiles(8192, outputs, H100).parts == parts

"""Rows are moved on by one launch as by torch's operations."""

import pytest
import torch

pytest.importorskip("triton")

from forerun.engine.graphs import CaptureSize, StaticBatch
from forerun.engine.moving_kernel import move_rows
from forerun.engine.pack import Moved, Placed
from forerun.engine.pages import PageShape, PageTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

EACH, SEQUENCES = 3, 4


def table(lanes=5, size=8, count=40, seed=0):
    """Pages of lanes in any order."""
    made = PageTable(lanes, 48, PageShape(count, size), DEVICE)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for index, page in enumerate(order[: made.starts_LP.size].tolist()):
        made.set(*divmod(index, made.per_lane), page)
    made.to_device()
    return made


def held(own, source):
    """Rows of four sequences in fixed memory, in other lanes each, and rows that pad."""
    size = CaptureSize(rows=16, reads=4, tiles=8, height=4, splits=1, by_section=False)
    fixed = StaticBatch(size, own, DEVICE)
    rows = SEQUENCES * EACH
    lane_T = torch.tensor([4, 0, 3, 1]).repeat_interleave(EACH).to(DEVICE)
    position_T = torch.tensor([0, 5, 14, 20]).repeat_interleave(EACH) + torch.arange(rows) % EACH
    position_T = position_T.to(DEVICE)
    numbers_7T = fixed._rows_7T
    numbers_7T[0, :rows] = torch.arange(rows)
    numbers_7T[1, :rows] = position_T
    numbers_7T[2:5, :rows] = position_T + torch.tensor([[1], [7], [9]], device=DEVICE)
    numbers_7T[6] = own.padding
    numbers_7T[6, :rows] = lane_T * own.per_lane
    fixed._bounds_6N[:, :SEQUENCES] = torch.arange(6 * SEQUENCES).view(6, -1)
    fixed._sequence_T[:] = size.rows
    fixed._sequence_T[:rows] = torch.arange(SEQUENCES).repeat_interleave(EACH)
    fixed._sequence_N[:] = size.rows
    fixed._sequence_N[:SEQUENCES] = torch.arange(SEQUENCES)
    fixed.sources_T[:] = source.scratch_slot  # what is made of nothing stays so
    fixed.sources_T[:rows:2] = 1
    return fixed, rows


PLACED = {
    "no tokens": lambda: None,
    "the last of each": lambda: Placed(2, torch.tensor([50, 51, 52, 53], device=DEVICE)),
    "all": lambda: Placed(
        0,
        torch.tensor([50, 51, 52, 53], device=DEVICE),
        torch.tensor([[60, 61], [-1, 63], [64, 65], [66, -1]], device=DEVICE),
    ),
}


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("has_sources", [False, True])
@pytest.mark.parametrize("more", [0, 1])
def test_one_launch_moves_rows_as_torch_does(placed, has_sources, more):
    own, source = table(), table(size=16, count=25, seed=1)
    steps_B = torch.tensor([0, 3, 9, 1], device=DEVICE)
    moved, tokens = Moved(steps_B, 9, more), PLACED[placed]()
    expected, rows = held(own, source)
    found, _ = held(own, source)
    assert torch.equal(expected._device, found._device)
    before = found._device.clone()
    if tokens is not None:
        expected._place(tokens, rows)
    expected._steps_S[:SEQUENCES] = steps_B + more
    expected._move_by_steps(source if has_sources else None)
    move_rows(
        found._rows_7T,
        found._bounds_6N,
        found.sources_T,
        (found._sequence_T, found._sequence_N),
        own,
        source if has_sources else None,
        moved,
        tokens,
        rows,
    )
    assert torch.equal(expected._device, found._device)
    assert not torch.equal(before, found._device)

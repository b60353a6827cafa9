"""What followed the last tokens of texts where they stood before: the drafts of
`drafters/lookup.py`, found on the device. On a GPU a kernel does it in one launch.

B texts, T tokens of the longest, K tokens of a draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.probability.transfer import HAS_TRITON


def copies_after(
    tokens_BT: Tensor, end_B: Tensor, token_B: Tensor, longest_run: int, count: int
) -> Tensor:
    """So many tokens that followed the latest earlier occurrence of the longest known run of each
    text's last tokens, [B, count]; -1 if even the last one is new. A text is the first `end` tokens
    of its row, and `token` behind them."""
    if tokens_BT.is_cuda and HAS_TRITON:
        from forerun.engine.copies_kernel import find_copies

        return find_copies(tokens_BT, end_B, token_B, longest_run, count)
    return plain_copies(tokens_BT, end_B, token_B, longest_run, count)


def plain_copies(
    tokens_BT: Tensor, end_B: Tensor, token_B: Tensor, longest_run: int, count: int
) -> Tensor:
    """The same by torch's operations."""
    end_B1, token_B1 = end_B[:, None], token_B[:, None]
    tokens_BT = tokens_BT.scatter(1, end_B1, token_B1)
    place_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    same_BT = (tokens_BT == token_B1) & (place_T < end_B1)
    agree_BT = same_BT.long()  # how many tokens up to a place are those at the end of the text
    for back in range(1, longest_run):
        last_B1 = tokens_BT.gather(1, (end_B1 - back).clamp(min=0))
        same_BT = same_BT & (tokens_BT.roll(back, 1) == last_B1) & (place_T >= back)
        agree_BT += same_BT
    score_BT = torch.where(agree_BT > 0, agree_BT * len(place_T) + place_T, -1)
    best_B1 = score_BT.amax(1, keepdim=True)
    found_B1 = best_B1.clamp(min=0) % len(place_T)
    # A copy that reaches the end of the text goes on with what it has copied.
    on_BK = torch.arange(count, device=tokens_BT.device) % (end_B1 - found_B1).clamp(min=1)
    copied_BK = tokens_BT.gather(1, found_B1 + 1 + on_BK)
    return torch.where(best_B1 >= 0, copied_BK, -1)

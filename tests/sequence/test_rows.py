import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.cache import Memo
from forerun.engine.pack import Segment, visible
from forerun.engine.pages import PagePool, PageShape, PageTable
from forerun.families.causal import Causal
from forerun.sequence.rows import HI, HORIZON, POSITION, Plan, causal_rows, reusable


def plan(tokens, read=None, stored=None):
    rows = causal_rows(np.array(tokens, np.int32))
    return Plan(
        rows,
        [np.array([len(tokens) - 1 if read is None else read])],
        len(tokens) if stored is None else stored,
    )


def held(tokens):
    return causal_rows(np.array(tokens, np.int32))


def test_equal_leading_rows_are_kept():
    assert reusable(held([1, 2, 3]), plan([1, 2, 3, 4])) == 3


def test_rows_are_kept_only_up_to_the_first_that_differs():
    assert reusable(held([1, 9, 3]), plan([1, 2, 3, 4])) == 1


def test_the_first_row_that_is_read_need_not_be_named_first():
    rows = held([1, 2, 3, 4])
    reads = [np.array([3, 1]), np.array([], np.int64), np.array([2])]
    assert Plan(rows, reads, 4).first_read == 1
    assert reusable(rows, Plan(rows, reads, 4)) == 1


def test_a_row_that_is_read_runs_again():
    assert reusable(held([1, 2, 3, 4]), plan([1, 2, 3, 4])) == 3


def test_nothing_is_kept_of_an_empty_memo():
    assert reusable(held([]), plan([1, 2])) == 0


def test_at_most_what_may_be_stored_is_kept():
    assert reusable(held([1, 2, 3]), plan([1, 2, 3, 4], stored=1)) == 1


def test_a_moved_position_is_a_different_row():
    old = held([1, 2, 3])
    old[POSITION, 1] = 7
    assert reusable(old, plan([1, 2, 3, 4])) == 1


def block_rows(tokens, size):
    rows = held(tokens)
    rows[HORIZON] = np.minimum((np.arange(len(tokens)) // size + 1) * size, len(tokens))
    return rows


def test_a_block_is_kept_only_whole():
    old = block_rows([1, 2, 3, 4, 5, 6], 3)
    new = block_rows([1, 2, 3, 4, 9, 6], 3)
    assert reusable(old, Plan(new, [np.array([5])], 6)) == 3


def test_rows_that_see_ahead_through_their_second_range_are_kept_only_whole():
    rows = held([1, 2, 3, 4])
    rows[HI, 0] = 3  # row 0 sees slots [0, 3) as well
    assert reusable(rows, Plan(rows, [np.array([2])], 4)) == 0
    assert reusable(rows, Plan(rows, [np.array([3])], 4)) == 3


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
    st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_kept_rows_saw_nothing_but_kept_rows(old, new, size):
    rows = block_rows(new, size)
    kept = reusable(block_rows(old, size), Plan(rows, [np.array([len(new) - 1])], len(new)))
    assert (rows[HORIZON, :kept] <= kept).all()
    assert old[:kept] == new[:kept] and kept <= len(new) - 1


def lone_memo(slots):
    """The memo of one lane, with a page for each slot."""
    pool = PagePool(PageTable(1, slots, PageShape(slots, 1)), lambda *_: None, copies=False)
    return Memo(slots, pool, 0)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_memo_finds_what_comparing_all_rows_finds(data):
    """Whatever plans ran before: plain text, text with tails, rows that see ahead, rows that are
    trusted."""
    memo, tokens = lone_memo(16), st.lists(st.integers(0, 1), min_size=1, max_size=6)
    for _ in range(4):
        text = np.array(data.draw(tokens), np.int32)
        kind = data.draw(st.sampled_from(["text", "tails", "blocks", "trusted"]))
        if kind in ("text", "tails"):
            p = Causal.after(
                text, [data.draw(tokens), *([data.draw(tokens)] if kind == "tails" else [])]
            )
        else:
            trusted = len(text) - 1 if kind == "trusted" else 0
            p = Plan(
                block_rows(text.tolist(), 2),
                [np.array([len(text) - 1])],
                len(text),
                trusted=trusted,
            )
        start = memo.start(p)
        assert start == reusable(memo.held, p)
        memo.claim(start, p.stored)
        memo.ran(p, start)


def test_causal_rows_see_themselves_and_what_is_before():
    mask = visible(Segment(0, Causal.after(np.array([5, 6], np.int32), [[7]]), 1, 0))
    assert mask.tolist() == [[True, True, False], [True, True, True]]


def test_a_branch_sees_the_text_and_itself_but_no_other_branch():
    p = Causal.after(np.array([5, 6], np.int32), [[7, 8], [9, 4]])
    assert visible(Segment(0, p, 0, 0)).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]
    assert p.rows[POSITION].tolist() == [0, 1, 2, 3, 2, 3]
    assert [r.tolist() for r in p.reads] == [[1, 2, 3], [1, 4, 5]]
    assert p.stored == 4  # branches are never remembered


def test_a_window_hides_what_lies_too_far_back():
    s = Segment(0, Causal.after(np.arange(4, dtype=np.int32), [()]), 3, 0)
    assert visible(s, window=2).tolist() == [[False, False, True, True]]

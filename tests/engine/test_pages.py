"""Slots in pages: shared, waited for and taken back, with the same texts as if there were room for
all."""

import resource
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

import forerun
from forerun.engine.cache import Memo, Slots, SlotShape
from forerun.engine.costs import ROWS, StepCosts
from forerun.engine.engine import Engine
from forerun.engine.pace import Pace
from forerun.engine.pages import PagePool, PageShape, PageTable
from forerun.engine.turns import FEW, beginning, last_closed
from forerun.errors import BadOption, NoRoom
from forerun.sequence.rows import Plan, causal_rows
from tests import kernels_in_torch
from tests.helpers import fresh, stepped

SYSTEM = list(range(50, 90))
HOW = dict(max_tokens=20, ignore_eos=True, method="ar")


def paged(slots=None, copies=False, lanes=4, chunk=None, page=8):
    """A model with small pages, held together as on a GPU."""
    m = stepped(fresh(dtype=torch.float64, lanes=lanes))
    m.engine.page = page
    m.engine.slots = slots
    m.engine.chunk = chunk
    m.host.pool.copies = copies
    return m


def alone(prompt, **how):
    return fresh(dtype=torch.float64, lanes=1).generate(prompt, **{**HOW, **how}).token_ids


def checked(m):
    for host in m.engine.hosts:
        host.pool.check([memo.pages for memo in host.memos])
    return m.host.pool


@pytest.mark.parametrize("copies", [False, True])
def test_a_common_beginning_is_computed_once_and_found_by_whoever_has_it(copies):
    m = paged(copies=copies)
    prompts = [[*SYSTEM, 3 + i] for i in range(4)]
    jobs = [m.submit(prompt, **HOW) for prompt in prompts]
    m.engine.run()
    assert [job.results()[0].token_ids for job in jobs] == [alone(p) for p in prompts]
    pool = checked(m)
    # The first reads the 40 tokens that all have; the others find them one forward later.
    assert pool.stats.found_rows == 3 * 40 and m.host.work.rows == 41 + 3 + 4 * 19
    assert bool(pool.stats.copied) == copies
    # and so does whoever comes later
    rows = m.host.work.rows
    m.generate([*SYSTEM, 99], **{**HOW, "max_tokens": 1})
    assert m.host.work.rows == rows + 1


def test_lanes_with_a_common_beginning_hold_the_same_pages():
    m = paged()
    jobs = [m.submit([*SYSTEM, 3 + i], **HOW) for i in range(4)]
    for _ in range(8):
        m.engine.step()
    lists = [memo.pages for memo in m.host.memos]
    assert len({tuple(pages[:5]) for pages in lists}) == 1 and len({p[5] for p in lists}) == 4
    assert checked(m).in_use == 5 + 4
    for job in jobs[1:]:
        job.cancel()
    m.engine.run()
    assert jobs[0].results()[0].token_ids == alone([*SYSTEM, 3])
    m.host.forget()
    assert checked(m).in_use == 0 and m.host.pool.kept == 0


def test_a_text_is_read_to_its_end_from_pages_that_hold_all_of_it():
    """Its last row is read, so it runs again: in a page of its own."""
    m = paged()
    jobs = [m.submit(SYSTEM, **HOW, temperature=1.0, seed=i) for i in range(3)]
    m.engine.run()
    for i, job in enumerate(jobs):
        assert job.results()[0].token_ids == alone(SYSTEM, temperature=1.0, seed=i)
    assert checked(m).stats.copied


@pytest.mark.parametrize("method", ["ar", "jacobi", "speculative"])
def test_where_pages_run_out_the_youngest_is_computed_again(method):
    how = dict(HOW, method=method, temperature=1.0, max_tokens=40)
    if method == "speculative":
        how |= dict(draft=fresh(dtype=torch.float64, seed=1), k=3)
    m = paged(slots=12 * 8, chunk=4)
    prompts = [[*range(9 * i, 9 * i + 22)] for i in range(5)]
    jobs = [m.submit(prompt, **how, seed=i) for i, prompt in enumerate(prompts)]
    waited = 0
    while m.engine.busy:
        m.engine.step()
        checked(m)
        waited += bool(m.engine.queue and m.engine.free_lanes)
    for i, job in enumerate(jobs):
        assert job.results()[0].token_ids == alone(prompts[i], **how, seed=i)
    assert waited and m.host.pool.stats.taken_back and m.host.pool.stats.evicted


def test_what_was_let_go_longest_ago_goes_first():
    pool = PagePool(PageTable(2, 64, PageShape(4, 8)), lambda *_: None, copies=False)
    memos = [Memo(64, pool, lane) for lane in range(2)]

    def read(memo, *tokens):
        rows = causal_rows(np.array(tokens, np.int32).repeat(8))
        plan = Plan(rows, [np.array([rows.shape[1] - 1])], rows.shape[1], causal=rows.shape[1])
        start = memo.find(plan)
        memo.claim(start, plan.stored)
        memo.ran(plan, start)
        return start

    for tokens in ([1, 2], [3], [1, 2, 4]):  # the first is used again before there is no room
        read(memos[0], *tokens)
        memos[0].release()
    assert pool.kept == 4
    read(memos[0], 5)  # takes the page of 3
    memos[0].release()
    assert read(memos[1], 1, 2, 4) == 23 and pool.stats.evicted == 1
    memos[1].release()
    assert read(memos[0], 3) == 0 and pool.stats.evicted == 2
    pool.check([memo.pages for memo in memos])


def test_a_page_is_found_by_what_its_rows_saw():
    pool = PagePool(PageTable(2, 64, PageShape(16, 8)), lambda *_: None, copies=False)
    memos = [Memo(64, pool, lane) for lane in range(2)]
    causal = causal_rows(np.arange(24, dtype=np.int32))
    whole = causal.copy()
    whole[2] = np.arange(24) // 8 * 8 + 8  # every row sees its block of 8
    open_ended = whole.copy()
    open_ended[2] = 24  # and here all of the text
    reads = [np.array([23])]
    for rows in (whole, open_ended):
        memos[0].begin(np.zeros(0, np.int32))
        memos[0].claim(0, 24)
        memos[0].ran(Plan(rows, reads, 24), 0)
    assert memos[1].find(Plan(whole, reads, 24)) == 16
    memos[1].release()
    for rows in (causal, open_ended):
        assert memos[1].find(Plan(rows, reads, 24)) == 0
    trusted = Plan(causal, reads, 24, trusted=8)
    memos[0].begin(np.zeros(0, np.int32))
    memos[0].claim(0, 24)
    memos[0].ran(trusted, 0)  # what came of a row that was only trusted is nobody else's
    assert memos[1].find(Plan(causal, reads, 24, causal=24)) == 0


@pytest.mark.parametrize("chunk", [3, 16])
def test_a_long_prompt_is_read_between_the_steps_of_others(chunk):
    m = paged(chunk=chunk)
    stream = m.submit([7, 8], **HOW)
    while stream.jobs[0].seq.known < 5:
        m.engine.step()
    rows = []
    forward = m.backbone.forward

    def noted(batch, slots):
        rows.append([segment.rows for segment in batch.segments])
        return forward(batch, slots)

    m.backbone.forward = noted
    long = [*range(100)]
    reader = m.submit(long, **{**HOW, "max_tokens": 5})
    m.engine.run()
    assert stream.results()[0].token_ids == alone([7, 8])
    assert reader.results()[0].token_ids == alone(long, max_tokens=5)
    beside = [counts for counts in rows if counts[0] == 1 and len(counts) == 2]
    assert len(beside) >= min(16, 100 // chunk) and max(sum(c) for c in beside) <= 1 + chunk + FEW
    assert reader.results()[0].stats.forwards == 5, "chunks are no forwards of a method"


def test_rows_that_see_each_other_are_not_cut_apart():
    rows = causal_rows(np.arange(24, dtype=np.int32))
    plain = Plan(rows, [np.array([23])], 24, causal=24)
    assert last_closed(plain, 3, 10) == 10 and last_closed(plain, 3, 99) == 24
    rows = rows.copy()
    rows[2] = np.arange(24) // 8 * 8 + 8
    blocks = Plan(rows, [np.array([23])], 24)
    assert last_closed(blocks, 0, 15) == 8 and last_closed(blocks, 8, 15) is None
    part = beginning(blocks, 16)
    assert part.stored == 16 and part.rows.shape == (5, 16) and part.first_read == 15


@pytest.mark.parametrize("method", ["ar", "jacobi", "speculative"])
def test_rows_that_the_device_moves_on_find_their_pages(method, monkeypatch):
    """Over fixed memory, as captured forwards have it: a row that crosses into another page."""
    pytest.importorskip("triton")
    kernels_in_torch.use(monkeypatch)
    monkeypatch.setattr(Engine, "prefetches", True)
    monkeypatch.setattr("forerun.engine.prefetch.LEAST_COST", 0)
    how = dict(max_tokens=30, ignore_eos=True, method=method)
    texts = []
    for page in (64, 8):
        m = stepped(forerun.load("tiny:llama", lanes=3, max_context=96, graphs=True))
        m.engine.page = page
        m.engine.slots = None if page == 64 else 12 * 9
        m.host.pool.copies = False
        # lanes begin on pages that do not follow one another
        m.generate([[5], [6], [7]], max_tokens=11, ignore_eos=True)
        if method == "speculative":
            how |= dict(draft=forerun.load("tiny:qwen2", max_context=96, graphs=True), k=4)
        asked = m.generate([[10, 20, 30], [9], SYSTEM[:20]], **how)
        texts.append([result.token_ids for result in asked])
        checked(m)
    assert texts[0] == texts[1]


def test_lanes_share_memory():
    size = fresh(lanes=1).backbone.bytes_per_lane(64) / 2**30
    m = forerun.load("tiny:llama", lanes=6, max_context=160, memory=8 * size)
    assert m.host.pool.table.count == 8 and m.lanes == 6
    prompts = [[i, *range(70)] for i in range(6)]
    texts = [r.token_ids for r in m.generate(prompts, max_tokens=8, ignore_eos=True)]
    plain = forerun.load("tiny:llama", lanes=6, max_context=160)
    assert texts == [
        plain.generate(prompt, max_tokens=8, ignore_eos=True).token_ids for prompt in prompts
    ]
    with pytest.raises(NoRoom, match=r"memory=.*max_context=160"):
        forerun.load("tiny:llama", max_context=160, memory=2 * size)
    with pytest.raises(BadOption, match="memory=-1"):
        forerun.load("tiny:llama", memory=-1)


CURVES = {  # seconds of a forward by the rows that are written and read, and by where it reads
    "a row costs a row": lambda writing, reading, place: 1 + writing + reading,
    "most of it is the weights": lambda writing, reading, place: 10 + (writing + reading) / 60,
    "flat, then steep": lambda writing, reading, place: 5 + max(0, writing + reading - 64) / 16,
    "flat, then steeper": lambda writing, reading, place: 5 + max(0, writing + reading - 64) / 9,
    "long texts cost": lambda writing, reading, place: 10 + reading * (0.02 + place / 1e5),
}


KINKED = [curve for name, curve in CURVES.items() if name.startswith("flat")]


@pytest.mark.parametrize("curve", CURVES.values(), ids=list(CURVES))
@pytest.mark.parametrize("writing", [3, 31])
@pytest.mark.parametrize("measured", [True, False])
def test_no_step_takes_twice_the_usual_time_beside_a_long_prompt(curve, writing, measured):
    costs = StepCosts()
    if measured or curve in KINKED:  # what lies behind a kink only a measured curve can know
        costs.curve = {rows: curve(rows, 0, 0) for rows in ROWS}
    pace = Pace(costs)
    usual = curve(writing, 0, 0)
    for _ in range(5):
        pace.stepped(usual, writing, 0)
    place = steps = 0
    longest = 0.0
    while place < 8192:
        reading = pace.budget(writing)
        seconds = curve(writing, reading, place)
        pace.stepped(seconds, writing, reading)
        longest = max(longest, seconds)
        place += reading
        steps += 1
    assert longest <= 2 * usual
    # and the prompt takes no more steps than it must, give or take a power of two and the beginning
    fits = next(n for n in range(4096, 0, -1) if curve(writing, n, 8192) <= 2 * usual)
    assert steps <= 4 * 8192 / fits + 12


def test_chunks_do_not_shrink_where_prompts_never_end():
    """Where every step reads, what further writers cost must not be taken for the price of reading:
    a step of a new size reads nothing first."""
    pace = Pace(StepCosts())
    budgets = []
    for step in range(300):
        writing = min(64, 1 + step // 2)  # more write, and there is always something to read
        reading = pace.budget(writing)
        pace.stepped(28 + 11.8 * (writing + reading), writing, reading)
        budgets.append(reading)
    assert min(filter(None, budgets[200:])) >= 32
    assert sum(not reading for reading in budgets) < 30


def test_chunks_do_not_shrink_where_reading_at_all_is_what_takes_time():
    """As on a GPU, where one long text holds up attention however few of its rows are read."""
    costs = StepCosts("cuda")
    costs.curve = {rows: 4.2 + 0.02 * rows for rows in ROWS}
    pace = Pace(costs)
    budgets = []
    for _ in range(60):
        reading = pace.budget(31)
        pace.stepped(7.0 + (6.0 + 0.02 * reading if reading else 0.0), 31, reading)
        budgets.append(reading)
    assert min(budgets[30:]) >= 32, "each of four rows would take nearly as long"


@pytest.mark.parametrize("late", [False, True])
def test_more_rows_are_tried_where_reading_at_all_is_what_takes_time(late):
    """As measured on a GPU: up to 128 rows take as long as 32, more take longer. A step that was
    begun ahead is counted as the next one now and then."""

    def added(rows):
        return 1.7 + 0.0025 * rows + 0.015 * max(0, rows - 128) if rows else 0.0

    pace = Pace(StepCosts("cuda"))
    pace.rows = pace._first = 32
    budgets = [0]
    for step in range(400):
        reading = pace.budget(5)
        seconds = 1.9 + added(budgets[-1] if late and step % 10 == 0 else reading)
        pace.stepped(seconds, 5, reading)
        budgets.append(reading)
    later = [reading for reading in budgets[100:] if reading]
    assert statistics.median(later) == 128
    assert max(later) <= 256 and later.count(256) < 0.06 * len(later)


def test_where_most_wait_their_prompts_are_not_read_by_the_row():
    """Few write, many wait: a step is compared with one of the whole company."""
    curve = {rows: 1.0 + 0.1 * rows for rows in ROWS}
    for known in (None, curve):
        costs = StepCosts()
        if known is not None:
            costs.curve = known
        pace = Pace(costs)
        for _ in range(12):
            reading = pace.budget(3, company=24)
            pace.stepped(1.0 + 0.1 * (3 + reading), 3, reading)
        assert pace.rows == 32, "more than three rows, which they would be beside three alone"
        assert 1.0 + 0.1 * (3 + pace.rows) <= 2 * (1.0 + 0.1 * 24)


def test_whoever_names_the_rows_of_a_chunk_gets_them():
    pace = Pace(StepCosts(), 7)
    for reading in (0, 7, 7, 7):
        pace.stepped(1.0 + 9 * reading, 3, reading)
    assert pace.budget(3) == 7, "whoever named a number gets it"


def test_beside_text_that_comes_at_once_a_chunk_may_take_as_long_as_a_launch():
    """Else prompts would wait for many launches, each of which reads a few rows."""
    rows = {}
    for at_once in (1, 16):
        costs = StepCosts("cuda")
        costs.curve = {rows: 1.0 + rows / 64 for rows in ROWS}
        costs.at_once = at_once
        pace = Pace(costs)
        for _ in range(20):
            reading = pace.budget(8)
            step = max(at_once * costs.forward(8), costs.forward(8 + reading))
            pace.stepped(step, 8, reading)
        rows[at_once] = pace.rows
    assert rows[16] >= 8 * rows[1]


def test_slots_take_no_memory_before_they_are_written():
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("the system does not say what memory is used")

    def pages():
        return int(statm.read_text().split()[1])

    before = pages()
    slots = Slots(SlotShape(4, 8, 8192, 2, 64), torch.bfloat16, torch.device("cpu"))
    sizes = [tensor.nbytes for pair in map(slots.flat, range(4)) for tensor in pair]
    assert sum(sizes) >= 4 * 8 * 8192 * 2 * 2 * 64 * 2
    assert (pages() - before) * resource.getpagesize() < sum(sizes) / 10
    slots.add_features([1], 64)
    for tensor in (*slots.flat(0), slots.features[1]):
        assert tensor.dtype == torch.bfloat16 and tensor.data_ptr() % 64 == 0
        assert not tensor[-1].any() and not tensor[0].any()

"""What the pages show runs: the Python of the README, of the first page and of the serving page."""

import re

import pytest

from tests.helpers import ROOT

PAGES = ["README.md", "docs/start.md", "docs/serving.md"]
NEEDS_MORE = ("smollm", "tensor_parallel")  # weights or processes that are not here


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    names = {}
    for block in blocks:
        if not any(word in block for word in NEEDS_MORE):
            exec(compile(block, page, "exec"), names)

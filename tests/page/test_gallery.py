"""The gallery has a replay of every method, and each holds a whole trace."""

import json

import pytest

from forerun import registry
from tests.helpers import ROOT

GALLERY = ROOT / "docs" / "gallery"
METHODS = sorted(registry.BUILT_IN["methods"])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_replay(method):
    text = (GALLERY / f"{method}.html").read_text()
    trace = text.split('id="trace">')[1].split("</script>")[0]
    lines = [json.loads(line) for line in trace.splitlines()]
    assert lines[0]["kind"] == "start" and lines[0]["method"] == method
    assert lines[-1]["kind"] == "end" and lines[-1]["finish_reason"] == "length"


def test_the_index_lists_them_all():
    index = (GALLERY / "index.md").read_text()
    assert all(f"[{method}]({method}.html)" in index for method in METHODS)
    assert sorted(file.stem for file in GALLERY.glob("*.html")) == METHODS

"""Set up before any test is imported. What tests share lives in `tests/helpers.py`."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What forwards cost is measured in every run, and kept for it alone.
os.environ["FORERUN_CACHE"] = tempfile.mkdtemp(prefix="forerun-tests-")

import pytest
import torch

if not torch.cuda.is_available():
    # Our kernels run without a GPU too; Triton reads this when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"

from forerun.api import Model
from tests.helpers import model

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", help="save pictures of the page in this folder")


@pytest.fixture
def tiny_model() -> Model:
    return model()

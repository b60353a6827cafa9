"""Set up before any test is imported. What tests share lives in `tests/helpers.py`."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["FORERUN_CACHE"] = "off"  # tests that need one name a folder of their own

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

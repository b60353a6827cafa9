"""A small corpus that all training tests use."""

import pytest

from forerun import zoo
from forerun.train.data import tokenise


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    for i in range(120):
        (folder / f"f{i}.py").write_text(
            "\n".join(f"def f{i}_{j}(x):\n    return x + {j * i}\n" for j in range(6))
        )
    return tokenise(str(folder), zoo.tokenizer(), tmp_path_factory.mktemp("run") / "tokens.npz")

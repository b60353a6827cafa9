"""Options that nobody knows are refused with those that the method has."""

import pytest

from forerun.errors import BadOption
from forerun.requests.request import parse_request


@pytest.mark.parametrize(
    "method, name, says",
    [
        ("lookup", "window", "it takes adapt, k, ngram (`forerun methods lookup`)"),
        ("ar", "window", "it takes no options of its own"),
        ("lookup", "ngrams", "did you mean 'ngram'"),
        ("lookup", "temprature", "did you mean 'temperature'"),
    ],
)
def test_an_unknown_option_names_those_that_there_are(method, name, says):
    with pytest.raises(BadOption) as refused:
        parse_request(method, None, {name: 3})
    assert says in str(refused.value)

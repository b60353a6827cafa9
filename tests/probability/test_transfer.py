"""Copies between the host and a device that do not wait."""

import torch
from torch import Tensor

from forerun.probability.transfer import send


class PlaceOnDevice:
    """A device that is behind: it has noted what it will copy, and copies it later."""

    is_cuda = True

    def copy_(self, numbers: Tensor, non_blocking: bool) -> None:
        assert non_blocking, "the host would wait"
        self.noted = numbers


def test_numbers_may_be_written_anew_before_the_device_has_copied_them(monkeypatch):
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)  # which needs a GPU
    place = PlaceOnDevice()
    numbers = torch.arange(4)
    send(numbers, place)
    numbers.zero_()  # for the next program
    assert place.noted.tolist() == [0, 1, 2, 3]


def test_on_a_cpu_it_is_a_plain_copy():
    place = torch.zeros(4, dtype=torch.long)
    send(torch.arange(4), place)
    assert place.tolist() == [0, 1, 2, 3]

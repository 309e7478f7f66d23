import pytest

pytest.importorskip("torch")

from dataclasses import asdict

from drafter_cases import tiny_shape

from draftflow.drafter.model import Drafter
from draftflow.training.memory import drafter_parameters


def test_the_parameters_that_the_bound_counts_are_those_of_the_drafter():
    shape = tiny_shape()
    assert drafter_parameters(asdict(shape)) == sum(value.numel() for value in Drafter(shape).parameters())

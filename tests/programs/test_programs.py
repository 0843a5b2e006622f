"""A short set of random programs; `make test-all` runs many more (`run_programs.py`)."""

import pytest
from program_runs import NOT_ON_DEVICES, Options, run_seeds

from ranks import run_ranks
from simulated_device.worlds import run_on_devices

SEEDS = 8


@pytest.mark.parametrize("mode", ["any", "c10d", "shared_memory"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_programs_equal_the_plain_model(world: int, mode: str) -> None:
    assert run_ranks(world, run_seeds, 0, SEEDS, Options(mode)) == [SEEDS] * world


def test_programs_on_a_grid_equal_the_plain_model() -> None:
    assert run_ranks(4, run_seeds, 0, SEEDS, Options("hybrid")) == [SEEDS] * 4


@pytest.mark.long
@pytest.mark.timeout(600)
def test_programs_on_the_simulated_device_equal_the_plain_model() -> None:
    options = Options("any", NOT_ON_DEVICES, device="sim")
    assert run_on_devices(2, run_seeds, 0, SEEDS, options, timeout_s=300) == [SEEDS] * 2

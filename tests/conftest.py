"""Settings of the whole test session; the tools for tests on several ranks are in ranks.py."""

import os

# One thread, as on the ranks: sums cut differently for other thread counts, and tests compare bits.
# Before torch is imported, hence above the imports.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

import ranks
import search

torch.set_num_threads(1)

# No deadline: two cores are shared with other work. What is random in `search` only.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    max_examples=100 * search.TIMES,
    derandomize=not search.IS_RANDOM,
    print_blob=True,
)
hypothesis.settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """Let the first test on ranks find torch loaded."""
    ranks.start_early = not config.option.collectonly


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, or CI has no time for, with the reason."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if item.get_closest_marker("long") and not os.environ.get("SHARDWISE_LONG"):
            item.add_marker(pytest.mark.skip(reason="SHARDWISE_LONG=1, as make test-all sets it"))


def pytest_sessionfinish() -> None:
    """Leave no process behind."""
    ranks.close_all()

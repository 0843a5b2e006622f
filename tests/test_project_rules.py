"""tools/project_rules.py finds what it is for, and leaves alone what looks like it."""

from pathlib import Path

import pytest

from project_rules import breaches_of

ENGINE = Path("src/shardwise/engine/core/unit.py")
TEST = Path("tests/test_unit.py")

BROKEN = [
    (ENGINE, "import torch._dynamo", "private torch name torch._dynamo"),
    (
        ENGINE,
        "from torch.distributed.tensor._dtensor_spec import DTensorSpec",
        "_dtensor_spec.DTensorSpec",
    ),
    (ENGINE, "from torch.utils import _pytree as pytree", "torch.utils._pytree"),
    (
        ENGINE,
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "distributed_c10d._world",
    ),
    (
        ENGINE,
        "from torch.distributed.tensor import DTensor\nDTensor._op_dispatcher",
        "DTensor._op_dispatcher",
    ),
    (ENGINE, "import importlib\nimportlib.import_module('torch._inductor')", "torch._inductor"),
    (ENGINE, "from torch.distributed.fsdp import fully_shard", "only install.py may import it"),
    (ENGINE, "import torch\ntorch.distributed.fsdp.fully_shard", "only install.py may import it"),
    (
        Path("src/shardwise/bench/trainers.py"),
        "from torch.distributed.fsdp import fully_shard",
        "only install.py may import it",
    ),
    (ENGINE, "from shardwise.bench.peers import fsdp2", "nothing is built on it"),
    (ENGINE, "import shardwise.bench.peers.fsdp2", "nothing is built on it"),
    (ENGINE, "x = 1  # TO" + "DO", "finish it"),
    (ENGINE, "# good enough for" + " now", "finish it"),
    (ENGINE, "def gather(self): ...", "gather is empty"),
    (ENGINE, "raise NotImplementedError", "needs a text"),
    (TEST, "@pytest.mark.skip\ndef test_x(): assert 1", "pytest.mark.skip without a reason"),
    (TEST, "@pytest.mark.skipif(True)\ndef test_x(): assert 1", "skipif without a reason"),
    (TEST, "pytest.skip()", "pytest.skip without a reason"),
]

ALLOWED = [
    (ENGINE, "import torch\nprint(torch.__version__, self._torch._x, torch.ops.aten._softmax)"),
    (ENGINE, "class Seam(Protocol):\n    def gather(self): ..."),
    (ENGINE, "@overload\ndef gather(self): ..."),
    (ENGINE, "def close(self):\n    '''Nothing is open.'''"),
    (ENGINE, "raise NotImplementedError('views of views; clone first')"),
    (Path("src/shardwise/_torch_compat.py"), "import torch._dynamo"),
    (Path("src/shardwise/install.py"), "from torch.distributed.fsdp import fully_shard"),
    (
        Path("src/shardwise/bench/peers/fsdp2.py"),
        "from torch.distributed.fsdp import fully_shard",
    ),
    (TEST, "from torch.distributed.fsdp import fully_shard\nimport torch._dynamo"),
    (
        TEST,
        "pytest.skip('why')\nexcept pytest.skip.Exception as e: 1".replace(
            "except", "try: 1\nexcept"
        ),
    ),
    (TEST, "@pytest.mark.skipif(True, reason='why')\ndef test_x(): assert 1"),
]


@pytest.mark.parametrize(("path", "source", "part"), BROKEN)
def test_breach_is_found(path, source, part):
    found = breaches_of(source, path)
    assert len({line for line, _ in found}) == 1
    assert part in found[0][1] + found[-1][1]


@pytest.mark.parametrize(("path", "source"), ALLOWED)
def test_lookalike_is_left_alone(path, source):
    assert breaches_of(source, path) == []

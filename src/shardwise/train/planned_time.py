"""How long a job's step takes on CPU ranks whose machine `shardwise doctor --save` measured."""

from __future__ import annotations

from shardwise.plan.measured import Rates
from shardwise.plan.model import PlannedModel
from shardwise.plan.ranks import Stepping, ranks_step_time, why_unknown
from shardwise.plan.simulate import StepTime
from shardwise.train.config import Config
from shardwise.train.optimizer_keys import OF_WHOLES
from shardwise.train.planned import Traces
from shardwise.train.wire_keys import is_wired


def time_on_ranks(
    plan: PlannedModel, traces: Traces, config: Config, ranks: int, rates: Rates
) -> StepTime | str:
    """Of one optimizer step of each rank; or why nobody can say."""
    if config.mesh.tensor > 1:
        return "no time: the tensor axis (mesh.tensor) has not been measured"
    if is_wired(config):
        return "no time: what is rounded on the wire has not been measured"
    if config.optim.kind in OF_WHOLES:
        return f"no time: optim.kind = {config.optim.kind!r} has not been measured"
    if "nvme" in (config.offload.optimizer, config.offload.parameters):
        return "no time: [offload] to files has not been measured"
    if why := why_unknown(plan, rates):
        return why
    trace, is_known = traces.of(plan, config)
    if not is_known:
        return "no time: this model's forward tells nothing without values"
    batches = max(1, config.train.global_batch // (config.train.micro_batch * ranks))
    how = Stepping(micro_batches=batches, clips=bool(config.train.grad_clip))
    return ranks_step_time(plan, trace, rates, how)

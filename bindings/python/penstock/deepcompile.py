"""Record the communication of a training step, compile it, and run steps by what was compiled.

    with deepcompile.record():
        loss = model(batch)
        loss.backward()
        optimizer.step()
    plan = deepcompile.compile(recorded_ops=deepcompile.get_recorded_ops(), zero_stage=3)
    for batch in data:
        with plan.execute():
            ...

The model is one that `penstock.shard` made. It does all of this by itself as well: this is for
looking at a recording, and for other ways of gathering ahead.
"""

from penstock._plan import Operation, Plan, compile, get_recorded_ops, record

__all__ = ["Operation", "Plan", "compile", "get_recorded_ops", "record"]

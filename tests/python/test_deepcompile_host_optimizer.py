"""DeepSpeed's optimizer offload: what the runtime reduced gets to the optimizer on the host.

The optimizers here stand for DeepSpeed's: they have what penstock touches of it, by its names.
"""

import sys
from types import ModuleType, SimpleNamespace

import fake_deepspeed
import penstock.deepspeed
import pytest
import torch
from fake_deepspeed import DeepSpeedZeroOptimizer_Stage3, declarations
from models import Net, batch, make
from penstock import _host_optimizer
from torch.autograd.variable import Variable


class Partitioned:
    """ZeRO-1 or 2 with one group: this rank owns the end of parameter 7, and parameter 8."""

    cpu_offload = True

    def __init__(self, gradients, checks=False):
        self.params_in_partition = [[7, 8]]
        self.grad_position = {7: [0, 3, 0, 2], 8: [0, 0, 2, 4]}
        self.averaged_gradients = {0: gradients}
        self.all_grad_tensors = {0: gradients}
        self.single_partition_of_fp32_groups = [SimpleNamespace(grad=torch.full((8,), 9.0))]
        self.norm_for_param_grads = {}
        self.check_grad_overflow = checks
        self.released, self.tracked = [], []

    def get_param_id(self, parameter):
        return parameter

    def update_offload_overflow_tracker(self, gradient):
        self.tracked.append(gradient)

    def _release_preflattened_grad_buffers(self, group):
        self.released.append(group)


def gradients():
    """Of the two parameters, and padding."""
    flat = torch.arange(8, dtype=torch.bfloat16)
    return [flat[:2], flat[2:6].view(2, 2), flat[6:]]


@pytest.mark.parametrize("checks", [False, True])
def test_partitions_get_to_the_optimizer_with_their_norms(checks):
    given = gradients()
    optimizer = Partitioned(given, checks)
    _host_optimizer.deliver(optimizer)
    grad = optimizer.single_partition_of_fp32_groups[0].grad
    assert grad.tolist() == [0, 1, 2, 3, 4, 5, 9, 9]
    norms = {number: round(float(n) ** 2) for number, n in optimizer.norm_for_param_grads.items()}
    assert norms == {7: 1, 8: 4 + 9 + 16 + 25}
    assert [id(g) for g in optimizer.tracked] == [id(g) for g in given[:2] if checks]


def test_partitions_are_released_once_they_are_delivered():
    optimizer = Partitioned(gradients())
    _host_optimizer.deliver(optimizer)
    assert optimizer.released == [0]
    assert optimizer.averaged_gradients == optimizer.all_grad_tensors == {0: None}
    _host_optimizer.deliver(optimizer)  # nothing is left to deliver
    assert optimizer.released == [0]


def test_parameters_without_elements_have_no_gradient():
    optimizer = Partitioned(gradients())
    optimizer.params_in_partition = [[7, 9, 8]]
    optimizer.grad_position[9] = [0, 0, 2, 0]
    _host_optimizer.deliver(optimizer)
    assert optimizer.single_partition_of_fp32_groups[0].grad.tolist() == [0, 1, 2, 3, 4, 5, 9, 9]
    assert set(optimizer.norm_for_param_grads) == {7, 8}


def test_an_optimizer_on_the_device_is_left_alone():
    optimizer = SimpleNamespace(cpu_offload=False, averaged_gradients={0: gradients()})
    _host_optimizer.keep_gradients_on_device(optimizer)
    _host_optimizer.deliver(optimizer)
    assert len(optimizer.averaged_gradients[0]) == 3


class Sharded(DeepSpeedZeroOptimizer_Stage3):
    """ZeRO-3 with two parameters."""

    offload_optimizer = True

    def __init__(self):
        super().__init__()
        self.grad_partitions_flat_buffer = torch.zeros(6)
        first, second = self.grad_partitions_flat_buffer.split([2, 4])
        self.set_partitions({3: first, 4: second})
        self.fp16_groups = [[SimpleNamespace(ds_id=3)], [SimpleNamespace(ds_id=4)]]
        self.inf_or_nan_tracker = torch.zeros(1, dtype=torch.bool)
        self.finished = []

    def _finalize_offload_gradient_accumulation(self):
        self.finished.append(set(self._offload_boundary_param_ids))


@pytest.fixture
def unpinned(monkeypatch):
    """A module `deepspeed.accelerator` of the CPU; what was unpinned."""
    found = []
    accelerator = SimpleNamespace(current_device_name=lambda: "cpu", unpin_memory=found.append)
    module = ModuleType("deepspeed.accelerator")
    module.get_accelerator = lambda: accelerator
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", module)
    return found


def test_shards_of_gradients_move_to_the_device_together(unpinned):
    optimizer = Sharded()
    on_host = optimizer.grad_partitions_flat_buffer
    _host_optimizer.keep_gradients_on_device(optimizer)
    partitions = getattr(optimizer, _host_optimizer.GRADIENT_PARTITIONS)
    partitions[3].fill_(1)
    partitions[4].fill_(2)
    assert optimizer.grad_partitions_flat_buffer.tolist() == [1, 1, 2, 2, 2, 2]
    assert on_host.tolist() == [0] * 6
    assert len(unpinned) == 1 and unpinned[0] is on_host


def test_deepspeed_delivers_the_shards_of_all_parameters_group_by_group():
    optimizer = Sharded()
    _host_optimizer.deliver(optimizer)
    assert optimizer.finished == [{3}, {4}]


def offloaded(folder, accumulation):
    """An engine with such an optimizer, and what is delivered: the gradients' sum at each time."""
    deepspeed = fake_deepspeed.put(folder, source=declarations())
    penstock.deepspeed.install()
    engine = deepspeed.runtime.engine.DeepSpeedEngine(make(Net), stage=2, accumulation=accumulation)
    delivered = []

    def finalize():
        sums = [g.abs().sum() for g in engine.memory.gradients() if g is not None]
        delivered.append(float(sum(sums)))

    engine.compile()
    engine.optimizer.offload_optimizer = True
    engine.optimizer.fp16_groups = [[]]
    engine.optimizer._finalize_offload_gradient_accumulation = finalize
    return engine, delivered


def deliver_at_boundaries(folder):
    """Two micro-batches, and a step: what the first one left is not delivered."""
    engine, delivered = offloaded(folder, accumulation=2)
    counts = []
    for number in range(4):
        engine.backward(engine(batch(number, 0)).sum())
        counts.append(len(delivered))
        engine.step()
    engine.destroy()
    fake_deepspeed.remove()
    assert counts == [0, 1, 1, 2]


def test_gradients_are_delivered_where_an_accumulation_ends(fresh_world, tmp_path):
    fresh_world(1).run(deliver_at_boundaries, tmp_path)


def deliver_in_autograd(folder):
    """DeepSpeed's epilogue is queued before the runtime's end, of a graph without end_backward."""
    engine, delivered = offloaded(folder, accumulation=1)
    trainable = engine.memory.trainable
    engine.handle().register_graph_z2(1, [parameter.param_id for parameter in trainable])

    def backward(_):
        Variable._execution_engine.queue_callback(engine._backward_epilogue)
        engine._backward_prologue()
        for parameter in trainable:
            torch.ops.dc.reduce_grad.default(torch.ones_like(parameter), 1, parameter.param_id)

    start = torch.ones(1, requires_grad=True)
    start.register_hook(backward)
    start.sum().backward()
    elements = sum(parameter.numel() for parameter in trainable)
    engine.destroy()
    fake_deepspeed.remove()
    assert delivered == [elements]


def test_gradients_are_delivered_behind_the_end_of_a_backward(fresh_world, tmp_path):
    fresh_world(1).run(deliver_in_autograd, tmp_path)


def compile_twice(folder):
    """The second time changes nothing, so gradients stay where the runtime knows them."""
    deepspeed = fake_deepspeed.put(folder, source=declarations())
    moved = []
    _host_optimizer.keep_gradients_on_device = moved.append
    penstock.deepspeed.install()
    engine = deepspeed.runtime.engine.DeepSpeedEngine(make(Net), stage=1)
    engine.compile()
    engine.compile()
    engine.destroy()
    fake_deepspeed.remove()
    assert moved == [engine.optimizer]


def test_gradients_move_once(fresh_world, tmp_path):
    fresh_world(1).run(compile_twice, tmp_path)

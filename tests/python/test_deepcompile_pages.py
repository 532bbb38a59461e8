"""The usage examples of DeepCompile's pages, made complete and nothing else.

What the pages leave out (process group, model, data) stands around the examples; in them, `cuda`
became the device of the tests, and a module is imported from where Penstock has it.
"""

import pytest
import torch
import torch.distributed as dist
from equality import assert_close
from models import DEVICE, Net, batch, loss_of, make

# ---- the page on the principle: record, compile, execute ----------------------------------------


def record_compile_execute():
    import penstock
    from penstock import deepcompile

    rank = dist.get_rank()
    plain, model = make(Net), penstock.shard(make(Net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataloader = [batch(step, rank) for step in range(1, 4)]
    losses = []

    # Phase 1: Record communication pattern (warmup)
    with deepcompile.record():
        loss = model(batch(0, rank)).square().mean()
        loss.backward()
        optimizer.step()

    # Phase 2: Build optimized graph
    compiled_graph = deepcompile.compile(
        recorded_ops=deepcompile.get_recorded_ops(),
        zero_stage=3,
        prefetch_ahead=2,
    )

    # Phase 3: Execute with compiled graph
    penstock.stats(model, reset=True)
    optimizer.zero_grad()
    for inputs in dataloader:
        with compiled_graph.execute():
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    figures = penstock.stats(model)
    assert figures.planned_passes == 3 and figures.deviations == 0 and figures.prefetches > 0
    penstock.close(model)
    assert losses == pytest.approx(_unsharded_losses(plain), rel=1e-5)


def _unsharded_losses(plain):
    """Of this rank; gradients are means over ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        for other in range(world):
            value = loss_of(plain, step, other)
            (value / world).backward()
            if other == rank:
                losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses[1:]


def test_the_example_of_the_principle(worlds):
    worlds(2).run(record_compile_execute)


# ---- the page on the runtime --------------------------------------------------------------------


def part_of(tensor):
    """This rank's part of a flat, padded tensor."""
    world, rank = dist.get_world_size(), dist.get_rank()
    flat = tensor.detach().flatten()
    elements = -(-flat.numel() // world)
    padded = torch.cat([flat, flat.new_zeros(elements * world - flat.numel())])
    return padded[rank * elements :][:elements].clone()


class Layers(torch.nn.Module):
    """Linear layers of the registered parameters, gathered by hand."""

    def __init__(self, shards, shapes):
        super().__init__()
        self.shards = torch.nn.ParameterList(shards)
        self.shapes = shapes

    def forward(self, x):
        for i, shard in enumerate(self.shards):
            weight = torch.ops.dc.allgather_param(shard, graph_id=0, ds_id=i)
            weight = torch.ops.dc.wait_allgather(weight, graph_id=0, ds_id=i)
            assert weight.shape == self.shapes[i]
            x = torch.nn.functional.linear(x, weight)
        return x


def run_the_runtime():
    from penstock import dc
    from penstock.dc import register_graph_z3, register_z3_param

    whole = _weights()
    shapes = [weight.shape for weight in whole]
    param_shards = [torch.nn.Parameter(part_of(weight)) for weight in whole]
    grad_buffers = [torch.zeros_like(shard) for shard in param_shards]
    plain = torch.nn.Sequential(*(_linear(weight) for weight in whole))
    model = Layers(param_shards, shapes)
    optimizer = torch.optim.SGD(param_shards, lr=0.1)
    rank = dist.get_rank()
    dataloader = [batch(step, rank) for step in range(3)]
    sample_batch = batch(7, rank)

    # Configure DeepCompile
    config = {
        "symmetric_memory": False,
        "double_buffer": True,  # Pipeline reduce communication
        "free_activation_threshold": 10_000_000,  # Free activations > 10M elements
        "sync_before_reduce": False,
        "sync_after_reduce": False,
        "sync_before_allgather": False,
        "sync_after_allgather": False,
    }

    # Initialize runtime with process group
    pg = dist.new_group()
    dc.init(pg, config, initial_reduce_bucket_size=100_000)

    # Register model parameters (ZeRO-3 example)
    model_params = []
    for i, (shape, grad_buf) in enumerate(zip(shapes, grad_buffers, strict=True)):
        register_z3_param(
            ds_id=i,
            ds_shape=shape,
            ds_tensor=param_shards[i].data,
            grad_buffer=grad_buf,
            persistent=False,
        )
        model_params.append(i)

    # Register compiled graph
    register_graph_z3(graph_id=0, ds_ids=model_params)

    # Training loop with lifecycle management
    num_epochs = 2
    for _epoch in range(num_epochs):
        for inputs in dataloader:
            # Forward pass lifecycle
            dc.start_forward()
            outputs = model(inputs)
            dc.end_forward()

            # Backward pass lifecycle
            loss = outputs.square().mean()
            dc.start_backward(update=True)  # update=True for optimizer step
            loss.backward()
            dc.end_backward(graph_id=0)

            # Optimizer step
            for shard, grad_buf in zip(param_shards, grad_buffers, strict=True):
                shard.grad = grad_buf
            optimizer.step()
            optimizer.zero_grad()

    assert not dc.is_profiling()
    after = [shard.detach().clone() for shard in param_shards]

    # Profiling mode (dry run without communication)
    dc.enable_profiling(True, dry=True)
    assert dc.is_profiling()
    dc.start_forward()
    _ = model(sample_batch)  # Profile without actual allgather
    dc.end_forward()
    dc.enable_profiling(False)

    # Free large activations manually
    act1, act2, act3 = (torch.ones(size, device=DEVICE) for size in (3, 5, 7))
    activations = [act1, act2, act3]
    dc.free_tensors(activations)  # Frees if size > threshold
    assert act1.numel() == 3

    # Cleanup options
    dc.reset()  # Clear graph executors (e.g., before recompilation)
    dc.cleanup()  # Full teardown (end of training)

    _train_unsharded(plain, num_epochs, len(dataloader))
    for shard, linear in zip(after, plain, strict=True):
        assert_close("parameter", shard, part_of(linear.weight), 1e-5)


def _weights():
    torch.manual_seed(3)
    return [torch.randn(*shape, device=DEVICE) / 2 for shape in ((7, 5), (9, 7), (3, 9))]


def _linear(weight):
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(weight.clone())
    return linear


def _train_unsharded(plain, epochs, steps):
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    world = dist.get_world_size()
    for _ in range(epochs):
        for step in range(steps):
            for rank in range(world):
                (plain(batch(step, rank)).square().mean() / world).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_the_example_of_the_runtime(worlds):
    worlds(2).run(run_the_runtime)


# ---- the page on ZeRO-3 -------------------------------------------------------------------------


def run_zero3(offload):
    from penstock import dc

    torch._dynamo.reset()
    torch.manual_seed(3)
    weights = [torch.randn(6, 5, device=DEVICE), torch.randn(5, 3), torch.randn(7)]
    model_params = [(part_of(weight), torch.zeros_like(part_of(weight))) for weight in weights]
    param_shards = [torch.nn.Parameter(shard) for shard, _ in model_params]
    inputs = torch.ones(4, 6, device=DEVICE) + dist.get_rank()

    def model(inputs, param_0):
        return torch.tanh(inputs @ param_0)

    # Initialize DeepSpeed DeepCompile
    config = {
        "symmetric_memory": False,
        "double_buffer": True,
        "free_activation_threshold": 1024 * 1024,
        "sync_before_reduce": False,
        "sync_after_reduce": False,
        "sync_before_allgather": False,
        "sync_after_allgather": False,
    }

    process_group = dist.new_group(ranks=list(range(dist.get_world_size())))
    dc.init(process_group, config, initial_reduce_bucket_size=100_000)

    # Register ZeRO-3 partitioned parameters
    for param_id, (param_shard, grad_buffer) in enumerate(model_params):
        dc.register_z3_param(
            ds_id=param_id,
            ds_shape=weights[param_id].shape,
            ds_tensor=param_shard,  # Partitioned tensor on this rank
            grad_buffer=grad_buffer,
            persistent=False,  # Set True for frequently used params
        )

    # Register compiled graph
    dc.register_graph_z3(graph_id=0, ds_ids=list(range(len(model_params))))

    # Mark persistent parameters (stays gathered in memory)
    dc.set_persistent(ds_id=0)  # First layer kept resident

    # Compiled forward/backward with DeepCompile ops
    @torch.compile(backend="deepspeed")
    def training_step(inputs):
        dc.start_forward()

        # Prefetch parameters before module execution
        torch.ops.dc.prefetch_params_fused(
            graph_id=0,
            params=[torch.empty(0) for _ in range(3)],
            ids=[0, 1, 2],
            dtypes=[torch.float16, torch.float16, torch.bfloat16],
        )

        # Allgather parameter for computation
        param_0 = torch.ops.dc.allgather_param(
            param_shards[0], graph_id=0, ds_id=0, dtype=torch.float16
        )
        param_0 = torch.ops.dc.wait_allgather(param_0, graph_id=0, ds_id=0)

        # Forward computation
        output = model(inputs.half(), param_0)

        # Release parameter memory after use
        dummy = torch.empty(0)
        dummy = torch.ops.dc.release_param(dummy, graph_id=0, ds_id=0, n_users=1)

        dc.end_forward()

        # Backward pass
        dc.start_backward(update=True)
        loss = output.sum()
        loss.backward()

        # Gradient reduce happens automatically via hooks
        torch.ops.dc.end_backward(graph_id=0)

        return loss

    loss = training_step(inputs)

    plain = weights[0].half().requires_grad_()
    wanted = torch.zeros_like(plain)
    for rank in range(dist.get_world_size()):
        x = torch.ones(4, 6, device=DEVICE).half() + rank
        value = model(x, plain).sum()
        (gradient,) = torch.autograd.grad(value, plain)
        wanted += gradient / dist.get_world_size()
        if rank == dist.get_rank():
            assert_close("loss", loss.detach(), value.detach(), 1e-2)
    assert_close("gradient", model_params[0][1], part_of(wanted).float(), 1e-2)

    if offload:
        # Optional: Offload activations to CPU
        activation = torch.randn(1024, 1024, device=DEVICE)
        kept = activation.clone()
        offloaded = torch.ops.dc.offload_tensor(activation, graph_id=0, id=100)
        offloaded = torch.ops.dc.wait_offload(offloaded, graph_id=0, id=100)

        # Reload when needed
        reloaded = torch.ops.dc.reload_tensor(offloaded, graph_id=0, id=100)
        reloaded = torch.ops.dc.wait_reload(reloaded, graph_id=0, id=100)
        assert torch.equal(reloaded, kept)

    # Cleanup
    dc.cleanup()


def test_the_example_of_zero3(worlds):
    worlds(2).run(run_zero3, offload=True)

"""What a correct runtime does where DeepCompile's own does not. Each raises AssertionError else."""

from __future__ import annotations

import torch
from surface import Surface

GRAPH = 1
OTHER_GRAPH = 2


def numbers(surface: Surface, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values that bfloat16 holds exactly, equal on all ranks."""
    return (torch.arange(count, device=surface.device) % 251).to(dtype)


def spoil_free_memory(surface: Surface, like: torch.Tensor) -> None:
    """Leave memory of that size behind that holds no numbers."""
    stale = torch.full_like(like, float("nan"))
    surface.join()
    del stale


def expect(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare type and bits, after the device has done all."""
    assert found.dtype == wanted.dtype, f"{found.dtype} where {wanted.dtype} was asked for"
    wrong = (found.flatten() != wanted.flatten()).sum().item()
    assert wrong == 0, f"{wrong} of {wanted.numel()} elements are wrong"


def cast_of_a_prefetched_parameter_waits_for_its_gather(surface: Surface) -> None:
    """C1: a prefetch without types, then a gather in another type."""
    surface.open()
    whole = numbers(surface, 1 << 26)
    surface.register(0, whole)
    surface.dc.register_graph_z3(GRAPH, [0])
    for _ in range(3):
        spoil_free_memory(surface, whole)
        surface.operators.prefetch_params_fused.default(GRAPH, [surface.shards[0]], [0])
        found = surface.gather(GRAPH, 0, torch.bfloat16)
        surface.join()
        expect(found, whole.to(torch.bfloat16))
        surface.release(found, GRAPH, 0)


def reused_memory_of_a_kept_parameter_has_the_asked_type(surface: Surface) -> None:
    """C2: a persistent parameter, stale after an update, gathered in another type."""
    surface.open()
    whole = numbers(surface, 1 << 10)
    surface.register(0, whole)
    surface.dc.register_graph_z3(GRAPH, [0])
    surface.dc.set_persistent(0)
    expect(surface.gather(GRAPH, 0), whole)
    surface.backward(GRAPH, {0: torch.ones_like(whole)})
    found = surface.gather(GRAPH, 0, torch.bfloat16)
    surface.join()
    expect(found, whole.to(torch.bfloat16))


def gradients_of_a_parameter_in_two_graphs_add_up(surface: Surface) -> None:
    """C3: weights tied over a graph break."""
    surface.open()
    whole = numbers(surface, 64)
    surface.register(0, whole)
    for graph in (GRAPH, OTHER_GRAPH):
        surface.dc.register_graph_z3(graph, [0])
    surface.dc.start_backward(True)
    for graph in (OTHER_GRAPH, GRAPH):
        surface.reduce(whole * graph, graph, 0)
        surface.end_backward(graph)
    surface.join()
    expect(surface.gradients[0], surface.shard(whole * (GRAPH + OTHER_GRAPH)))


def whole_gradients_of_a_parameter_in_two_graphs_add_up(surface: Surface) -> None:
    """C3 in stage 1."""
    surface.open()
    whole = numbers(surface, 64)
    mine = torch.zeros(64 if surface.rank == 0 else 0, device=surface.device)
    surface.dc.register_param(0, [64], whole, mine, 0)
    for graph in (GRAPH, OTHER_GRAPH):
        surface.dc.register_graph_z1(graph, [0])
    surface.dc.start_backward(True)
    for graph in (OTHER_GRAPH, GRAPH):
        surface.reduce(whole * graph, graph, 0)
        surface.end_backward(graph)
    surface.join()
    expect(mine, (whole * (GRAPH + OTHER_GRAPH))[: mine.numel()])


def padding_of_a_gradient_is_zero(surface: Surface) -> None:
    """C4: a parameter whose elements the ranks do not divide, in a bucket that held others."""
    surface.open()
    odd = numbers(surface, 32 * surface.ranks + 1)
    sevens = torch.full((1 << 10,), 7.0, device=surface.device)
    surface.register(0, odd)
    surface.register(1, sevens)
    surface.dc.register_graph_z3(GRAPH, [0, 1])
    for _ in range(2):  # both buckets
        surface.backward(GRAPH, {1: sevens})
    surface.backward(GRAPH, {0: odd})
    surface.join()
    expect(surface.gradients[0], surface.shard(odd))


def parameters_cast_in_one_prefetch_keep_their_values(surface: Surface) -> None:
    """C5: several parameters, cast and gathered at once."""
    surface.open()
    wholes = [numbers(surface, 1 << 20) + number for number in range(4)]
    for number, whole in enumerate(wholes):
        surface.register(number, whole)
    surface.dc.register_graph_z3(GRAPH, list(range(4)))
    surface.operators.prefetch_params_fused.default(
        GRAPH, list(surface.shards.values()), list(range(4)), dtypes=[torch.bfloat16] * 4
    )
    for number, whole in enumerate(wholes):
        found = surface.gather(GRAPH, number, torch.bfloat16)
        surface.join()
        expect(found, whole.to(torch.bfloat16))


def dropping_a_reloaded_shard_leaves_the_host_alone(surface: Surface) -> None:
    """C6: the optimizer writes the shard on the host while its copy is on the device."""
    surface.open()
    whole = numbers(surface, 1 << 10).cpu()
    surface.register(0, whole)
    surface.dc.register_graph_z3(GRAPH, [0])
    surface.operators.reload_parameter.default(surface.shards[0], GRAPH, 0)
    surface.join()
    surface.shards[0].fill_(3.0)
    surface.operators.offload_parameter.default(surface.shards[0], GRAPH, 0)
    surface.join()
    expect(surface.shards[0], torch.full_like(surface.shards[0], 3.0))


def parameter_registered_as_persistent_is_gathered(surface: Surface) -> None:
    """C7: a second use must find the whole parameter, not the shard."""
    surface.open()
    whole = numbers(surface, 1 << 10)
    surface.register(0, whole, persistent=True)
    surface.dc.register_graph_z3(GRAPH, [0])
    for _ in range(2):
        found = surface.gather(GRAPH, 0)
        surface.join()
        expect(found, whole)


def error_in_a_reduction_leaves_no_silent_damage(surface: Surface) -> None:
    """C9: after a gradient of a type that cannot be sent, a gather is right or an error."""
    surface.open()
    whole = numbers(surface, 1 << 10)
    surface.register(0, whole)
    surface.dc.register_graph_z3(GRAPH, [0])
    try:
        surface.backward(GRAPH, {0: whole.to(torch.complex64)})
        surface.join()
    except RuntimeError as error:
        print(f"refused, as it should be: {error}")
    else:
        raise AssertionError("a complex gradient was taken")
    spoil_free_memory(surface, whole)
    try:
        found = surface.gather(GRAPH, 0)
        surface.join()
    except RuntimeError:
        return
    expect(found, whole)


def ending_one_engine_leaves_another_alone(surface: Surface) -> None:
    """C10: two engines side by side; the second ends."""
    surface.open()
    whole = numbers(surface, 1 << 10)
    surface.register(0, whole)
    surface.dc.register_graph_z3(GRAPH, [0])
    surface.open()
    kept = surface.shards[0]
    surface.register(0, whole + 1)
    surface.dc.register_graph_z3(OTHER_GRAPH, [0])
    expect(surface.gather(OTHER_GRAPH, 0), whole + 1)
    surface.dc.cleanup()
    surface.shards[0] = kept
    found = surface.gather(GRAPH, 0)
    surface.join()
    expect(found, whole)


CASES = {
    case.__name__: case
    for case in (
        cast_of_a_prefetched_parameter_waits_for_its_gather,
        reused_memory_of_a_kept_parameter_has_the_asked_type,
        gradients_of_a_parameter_in_two_graphs_add_up,
        whole_gradients_of_a_parameter_in_two_graphs_add_up,
        padding_of_a_gradient_is_zero,
        parameters_cast_in_one_prefetch_keep_their_values,
        dropping_a_reloaded_shard_leaves_the_host_alone,
        parameter_registered_as_persistent_is_gathered,
        error_in_a_reduction_leaves_no_silent_damage,
        ending_one_engine_leaves_another_alone,
    )
}

"""DeepSpeed's optimizers on the device: fewer passes, the same steps.

`Sharded` has what penstock touches of DeepSpeed's, by its names, and does as that does.
"""

import functools
import os
import time
from types import SimpleNamespace

import fake_deepspeed
import penstock.deepspeed
import pytest
import torch
from fake_deepspeed import declarations
from models import DEVICE, Net, make
from penstock import _device_optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

SIZES = ((130, 7), (64, 33, 1))  # of the shards of two groups


class Sharded:
    """Two groups, each with a flat master, a flat copy and gradients within one buffer of both."""

    offload_optimizer = False
    model_parallel_rank = 0
    torch_autocast_gradscaler = None

    def __init__(self, optimizer, clip_grad=0.0, loss_scale=1, dtype=torch.bfloat16):
        self.clip_grad, self.loss_scale = clip_grad, loss_scale
        self.sub_group_to_group_id = {0: 0, 1: 0}
        self.own = []  # the steps that were its own, by group
        generator = torch.Generator().manual_seed(0)
        self.fp32_partitioned_groups_flat, self.fp16_partitioned_groups_flat = [], []
        for sizes in SIZES:
            master = torch.randn(sum(sizes), generator=generator, dtype=torch.float32).to(DEVICE)
            self.fp32_partitioned_groups_flat.append(master.requires_grad_())
            self.fp16_partitioned_groups_flat.append(master.detach().to(dtype, copy=True))
        self.optimizer = optimizer(self.fp32_partitioned_groups_flat)
        self.buffer = torch.zeros(sum(map(sum, SIZES)), dtype=dtype, device=DEVICE)
        parts = list(self.buffer.split([size for sizes in SIZES for size in sizes]))
        self.gradients = [parts[:2], parts[2:]]
        self.unflattened = []

    def step(self):
        """Step as DeepSpeed does: norms first, then group by group. Returns the whole norm."""
        self.averaged_gradients = {0: self.gradients[0], 1: self.gradients[1]}
        groups = range(len(SIZES))
        norms = [self.get_grad_norm_direct(self.averaged_gradients[i], [None] * 3) for i in groups]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        for group in groups:
            self._prepare_fp32_grad_for_sub_group(group)
            assert self.averaged_gradients[group] is None
            self.unscale_and_clip_grads(group, norm)
            self._optimizer_step(group)
            self._reassign_or_swap_out_partitioned_parameters(group)
        return norm

    def get_grad_norm_direct(self, gradients, parameters, norm_type=2):
        pairs = zip(gradients, parameters, strict=False)
        norms = [torch.linalg.vector_norm(one.double(), norm_type) for one, _ in pairs]
        return torch.linalg.vector_norm(torch.stack(norms), norm_type)

    def _prepare_fp32_grad_for_sub_group(self, group):
        master = self.fp32_partitioned_groups_flat[group]
        master.grad = torch.cat(self.averaged_gradients[group]).to(master.dtype)
        self.averaged_gradients[group] = None

    def unscale_and_clip_grads(self, group, norm):
        scale = self.loss_scale
        if self.clip_grad > 0:
            scale = scale * max(1.0, (float(norm) / self.loss_scale + 1e-6) / self.clip_grad)
        self.fp32_partitioned_groups_flat[group].grad /= scale

    def _optimizer_step(self, group):
        self.own.append(group)
        self.optimizer.param_groups[0]["params"] = [self.fp32_partitioned_groups_flat[group]]
        self.optimizer.step()
        self.optimizer.param_groups[0]["params"] = []

    def _reassign_or_swap_out_partitioned_parameters(self, group):
        master = self.fp32_partitioned_groups_flat[group]
        master.grad = None
        self.fp16_partitioned_groups_flat[group].copy_(master.detach())
        self._unflatten_partitioned_parameters(group)

    def _unflatten_partitioned_parameters(self, group):
        self.unflattened.append(group)

    def zero_grad(self, set_to_none):
        assert set_to_none


def adamw(**options):
    return lambda parameters: torch.optim.AdamW(
        parameters, **{"lr": 1e-2, "weight_decay": 0.1, **options}
    )


def step_both(optimizer, steps=4, **options):
    """Step one that passes less, and one as it is; return them. Their gradients are the same."""
    seed = int(os.environ.get("PST_SEED", time.time_ns() % 2**32))
    print(f"PST_SEED={seed}")
    torch.manual_seed(seed)
    less, plain = (Sharded(optimizer, **options) for _ in range(2))
    _device_optimizer.pass_less(less)
    for _ in range(steps):
        less.buffer.normal_().mul_(less.loss_scale)
        plain.buffer.copy_(less.buffer)
        torch.testing.assert_close(less.step(), plain.step(), rtol=1e-6, atol=0)
    return less, plain


def assert_same(less, plain):
    for ours, theirs in zip(
        less.fp32_partitioned_groups_flat, plain.fp32_partitioned_groups_flat, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        kept, wanted = (
            one.optimizer.state.get(parameter, {})
            for one, parameter in ((less, ours), (plain, theirs))
        )
        assert kept.keys() == wanted.keys()
        for name in kept:
            torch.testing.assert_close(kept[name], wanted[name], rtol=1e-4, atol=1e-6)
    for ours, master in zip(
        less.fp16_partitioned_groups_flat, less.fp32_partitioned_groups_flat, strict=True
    ):
        assert torch.equal(ours, master.to(ours.dtype))
    assert less.unflattened == plain.unflattened


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options", [{}, {"clip_grad": 0.5}, {"loss_scale": 128}, {"clip_grad": 0.5, "loss_scale": 128}]
)
def test_the_kernel_updates_as_deepspeed_does(dtype, options):
    less, plain = step_both(adamw(), dtype=dtype, **options)
    assert less.own == [0, 1] and plain.own == [0, 1] * 4  # the first step makes the states
    assert_same(less, plain)


@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"maximize": True},
        {"lr": torch.tensor(1e-2)},
        {"foreach": True},  # counts its steps on the host
        {"fused": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_kernel_has_adamws_options(options):
    less, plain = step_both(adamw(**options))
    assert less.own == [0, 1]
    assert_same(less, plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_of_no_matter(dtype):
    torch.set_default_dtype(dtype)
    try:
        less, plain = step_both(adamw(), loss_scale=128)
    finally:
        torch.set_default_dtype(torch.float32)
    assert less.own == [0, 1]
    assert_same(less, plain)


def test_learning_rates_are_those_of_the_step():
    less, plain = (Sharded(adamw()) for _ in range(2))
    _device_optimizer.pass_less(less)
    for lr in (1e-2, 0.0, 3e-2):
        for one in (less, plain):
            one.optimizer.param_groups[0]["lr"] = lr
            one.buffer.fill_(1)
            one.step()
    assert_same(less, plain)


class FusedAdam(torch.optim.Optimizer):
    """DeepSpeed's, which counts its steps by numbers."""

    def __init__(self, parameters, adam_w_mode=1, bias_correction=True):
        defaults = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
        super().__init__(parameters, {**defaults, "bias_correction": bias_correction})
        self.adam_w_mode = adam_w_mode

    def step(self):
        group = self.param_groups[0]
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(parameter.detach())
                state["exp_avg_sq"] = torch.zeros_like(parameter.detach())
            state["step"] += 1
            decays = "adamw" if self.adam_w_mode else "adam"
            count = torch.tensor(state["step"] - 1.0)
            getattr(torch.optim._functional, decays)(
                [parameter.detach()],
                [parameter.grad],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [],
                [count],
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                foreach=False,
            )


def test_deepspeeds_own_adamw_is_updated_by_the_kernel():
    less, plain = step_both(FusedAdam, clip_grad=0.5)
    assert less.own == [0, 1]
    assert_same(less, plain)
    assert [state["step"] for state in less.optimizer.state.values()] == [4, 4]


def hooked(parameters):
    optimizer = adamw()(parameters)

    def hook(*_):
        pass

    hook.__module__ = None  # as functions in C have it
    optimizer.register_step_pre_hook(hook)
    return optimizer


def patched(parameters):
    optimizer = adamw()(parameters)
    optimizer.step = functools.partial(optimizer.step)
    return optimizer


def maximizing(parameters):  # which DeepSpeed's does not know
    optimizer = FusedAdam(parameters)
    optimizer.param_groups[0]["maximize"] = True
    return optimizer


class Foreign:
    """Not one of torch's, and without what they have besides."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]
        self.state = {}

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.detach().sub_(parameter.grad, alpha=1e-2)


@pytest.mark.parametrize(
    "optimizer",
    [
        Foreign,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        lambda parameters: FusedAdam(parameters, adam_w_mode=0),
        hooked,
        patched,
        maximizing,
    ],
    ids=["foreign", "sgd", "adam", "fused-adam", "hooked", "patched", "maximizing"],
)
def test_other_optimizers_stay_deepspeeds(optimizer):
    less, plain = step_both(optimizer, clip_grad=0.5)
    assert less.own == plain.own == [0, 1] * 4
    assert_same(less, plain)


def test_hooks_of_all_optimizers_are_called():
    calls = []
    hook = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        less, plain = step_both(adamw())
    finally:
        hook.remove()
    assert less.own == plain.own and len(calls) == 2 * len(plain.own)


def test_a_scheduler_is_no_hook():
    def scheduled(parameters):
        optimizer = adamw()(parameters)
        torch.optim.lr_scheduler.ConstantLR(optimizer)
        return optimizer

    less, plain = step_both(scheduled)
    assert less.own == [0, 1]
    assert_same(less, plain)


def test_parameters_in_float32_stay_deepspeeds():
    less, plain = step_both(adamw(), dtype=torch.float32)
    assert less.own == plain.own
    assert_same(less, plain)


def test_gradients_that_lie_apart_stay_deepspeeds():
    less, plain = (Sharded(adamw()) for _ in range(2))
    _device_optimizer.pass_less(less)
    for one in (less, plain):
        one.buffer.fill_(1)
        one.gradients[0][1] = torch.full_like(one.gradients[0][1], 2)
    for _ in range(3):
        torch.testing.assert_close(less.step(), plain.step(), rtol=1e-6, atol=0)
    assert less.own == [0, 1, 0, 0]
    assert_same(less, plain)


def test_a_norm_that_is_not_finite_stays_so():
    less, _ = step_both(adamw(), steps=1)
    for value in (float("inf"), float("nan")):
        less.buffer[3] = value
        norm = less.get_grad_norm_direct(less.gradients[0], [None])
        assert not torch.isfinite(norm)


def norm_of(optimizer, norm_type=2, parameters=(None, None)):
    return float(optimizer.get_grad_norm_direct(optimizer.gradients[0], parameters, norm_type))


def test_other_norms_stay_deepspeeds():
    optimizer = Sharded(adamw())
    optimizer.gradients[0][0].fill_(1)
    optimizer.gradients[0][1].fill_(3)
    _device_optimizer.pass_less(optimizer)
    assert norm_of(optimizer, float("inf")) == 3
    first, second = SIZES[0][0], 9 * SIZES[0][1]
    assert norm_of(optimizer) ** 2 == pytest.approx(first + second)
    assert norm_of(optimizer, parameters=[None]) ** 2 == pytest.approx(first)
    # What other ranks of the model count DeepSpeed has to leave out itself.
    optimizer.get_grad_norm_direct.__self__.original["get_grad_norm_direct"] = (
        lambda gradients, parameters, norm_type: gradients is optimizer.gradients[0]
    )
    assert not norm_of(optimizer)
    assert norm_of(optimizer, parameters=[SimpleNamespace(ds_pipe_replicated=True), None])
    optimizer.model_parallel_rank = 1
    assert norm_of(optimizer)


def test_other_stages_have_the_norm_alone():
    optimizer = SimpleNamespace(
        cpu_offload=False,
        model_parallel_rank=0,
        gradients=[[torch.full((3,), 2.0), torch.full((4,), 7.0)]],
        get_grad_norm_direct=lambda gradients, parameters, norm_type: gradients[0].double().norm(),
        _optimizer_step=None,
    )
    _device_optimizer.pass_less(optimizer)
    assert norm_of(optimizer) ** 2 == pytest.approx(3 * 4 + 4 * 49)
    assert norm_of(optimizer, parameters=[None]) ** 2 == pytest.approx(3 * 4)
    assert optimizer._optimizer_step is None


@pytest.mark.parametrize(
    "optimizer",
    [
        None,
        SimpleNamespace(offload_optimizer=True, get_grad_norm_direct=None),
        SimpleNamespace(cpu_offload=True, get_grad_norm_direct=None),
    ],
)
def test_offloaded_optimizers_are_left_alone(optimizer):
    before = dict(vars(optimizer)) if optimizer is not None else {}
    _device_optimizer.pass_less(optimizer)
    assert (dict(vars(optimizer)) if optimizer is not None else {}) == before


def compile_twice(folder):
    deepspeed = fake_deepspeed.put(folder, source=declarations())
    penstock.deepspeed.install()
    engine = deepspeed.runtime.engine.DeepSpeedEngine(make(Net), stage=1)
    engine.optimizer = Sharded(adamw())
    engine.compile()
    steps = engine.optimizer._optimizer_step.__self__
    assert steps.original["_optimizer_step"].__self__ is engine.optimizer
    engine.compile()
    assert engine.optimizer._optimizer_step.__self__ is steps
    engine.destroy()
    fake_deepspeed.remove()


def test_a_compiled_engines_optimizer_passes_less_from_then_on(fresh_world, tmp_path):
    fresh_world(1).run(compile_twice, tmp_path)

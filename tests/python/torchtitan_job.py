"""What the ranks do that test_torchtitan.py starts: torchtitan's model trains as with FSDP2."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import penstock
import pytest
import torch
import torchtitan_train
from penstock import PenstockError
from penstock.torchtitan import convert
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.llama3.infra import parallelize
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan_train import make_trainer, on_bytes

SPEC = on_bytes(get_train_spec("llama3"))
EXACT = ["--debug.seed", "0", "--training.mixed_precision_param", "float32"]
EXACT += ["--training.steps", "4", "--training.global_batch_size", "8"]  # two batches a step


def run(name, *arguments):
    """Train; return the loss and the norm of gradients of each step."""
    trainer = make_trainer(name, [*EXACT, *arguments])
    logged = []

    def log(step, loss, most, norm, **more):
        logged.append((loss, norm))

    trainer.metrics_processor.log = log
    with patch("torchtitan.train.time.sleep", lambda seconds: None):  # 2 s at the end, on rank 0
        trainer.train()
    trainer.close()
    return trainer.model_parts[0], logged


def assert_same(found, wanted, tolerance=1e-5):
    assert len(found) == len(wanted) > 0, (found, wanted)
    for pair in zip(found, wanted, strict=True):
        assert pair[0] == pytest.approx(pair[1], rel=tolerance), pair


def sum_on_gloo(model):
    """Have FSDP2 add gradients up: without factors, which gloo has not."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def train(folder):
    register_train_spec("FSDP2", SPEC)
    register_train_spec("Penstock", convert(SPEC, stage=2))
    recomputed = ["--activation_checkpoint.mode", "full"]
    with patch.object(parallelize, "disable_fsdp_gradient_division", sum_on_gloo):
        _, wanted = run("FSDP2", *recomputed)
    saved = ["--job.dump_folder", folder, "--checkpoint.enable", "--checkpoint.interval", "2"]
    model, found = run("Penstock", *recomputed, *saved, "--training.enable_cpu_offload")
    assert_same(found, wanted)
    assert "stage=2" in repr(model) and "offload=parameters" in repr(model)
    assert penstock.stats(model).reduces > 0
    penstock.close(model)
    refuse()
    Path(folder, "wanted.json").write_text(json.dumps(wanted))


def refuse():
    apply = convert(SPEC).parallelize_fn.__globals__["apply_fsdp"]
    with pytest.raises(PenstockError, match="asks for pipeline_parallel_degree") as caught:
        apply(torch.nn.Linear(2, 2), None, param_dtype=None, reduce_dtype=None, pp_enabled=True)
    assert caught.value.status == "EUNSUPPORTED"
    for function in (torchtitan_train.main, None):
        with pytest.raises(PenstockError, match="calls no 'apply_fsdp'") as caught:
            convert(replace(SPEC, parallelize_fn=function))
        assert caught.value.status == "EMISMATCH"


def resume(folder):
    """Go on with twice as many ranks, which divide layers, too."""
    register_train_spec("Penstock", convert(SPEC))
    wanted = json.loads(Path(folder, "wanted.json").read_text())
    given = ["--job.dump_folder", folder, "--checkpoint.enable", "--checkpoint.load_step", "2"]
    compiled = ["--compile.enable", "--compile.backend", "eager"]
    given += [*compiled, "--parallelism.tensor_parallel_degree", "2"]
    model, found = run("Penstock", *given)
    assert_same(found, wanted[2:], 1e-4)
    assert "stage=3" in repr(model)
    assert model.output.weight.device_mesh.mesh_dim_names == ("fsdp", "tp")
    penstock.close(model)


def run_example(folder):
    arguments = ["--training.steps", "2", "--job.dump_folder", folder]
    with patch("sys.argv", ["torchtitan_train.py", *arguments]):
        torchtitan_train.main()

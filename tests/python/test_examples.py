"""Examples of a few lines: from FSDP2, and saving."""

import re
import sys

import penstock
import pytest
import torch
import torch.distributed.checkpoint as dcp
from equality import assert_same_parameters, whole, world
from launch import EXAMPLES, torchrun
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

sys.path.insert(0, str(EXAMPLES))

import from_fsdp2  # noqa: E402
import saving  # noqa: E402


def numbers_in(line):
    return [float(number) for number in re.findall(r"-?\d+\.\d+", line)]


def test_a_loop_of_fsdp2_trains_alike():
    *_, of_fsdp2, of_penstock = torchrun(2, EXAMPLES / "from_fsdp2.py").splitlines()
    wanted, found = numbers_in(of_fsdp2), numbers_in(of_penstock)
    assert len(wanted) == from_fsdp2.STEPS * from_fsdp2.BATCHES
    assert found == pytest.approx(wanted, rel=1e-2)
    assert found[:2] == wanted[:2]  # before anything was rounded anew


def move_checkpoints(folder):
    models = []
    for shard, seed in ((from_fsdp2.shard_by_fsdp2, 1), (from_fsdp2.shard_by_penstock, 2)):
        models.append(from_fsdp2.build(from_fsdp2.Shape(2, 32, 16), seed))
        shard(models[-1])
    values = [[whole(p) for p in model.parameters()] for model in models]
    for number, (source, target) in enumerate((models, models[::-1])):
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
        path = str(folder / str(number))
        dcp.save(get_model_state_dict(source), checkpoint_id=path)
        state = get_model_state_dict(target)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(target, state)
        for parameter, value in zip(target.parameters(), values[0], strict=True):
            assert torch.equal(whole(parameter), value)
    penstock.close(models[1])


def test_checkpoints_move_from_fsdp2_and_back(worlds, tmp_path):
    worlds(2).run(move_checkpoints, tmp_path)


def save_and_begin(folder):
    torch.manual_seed(world()[0])
    models = saving.main(["--output", str(folder)])
    plain = saving.build()
    plain.load_state_dict(load_file(folder / "model.safetensors"))
    for each in models:
        assert_same_parameters(each, plain, 0)
        penstock.close(each)


def test_what_is_saved_and_exported_is_begun_from(worlds, tmp_path):
    worlds(2).run(save_and_begin, tmp_path)

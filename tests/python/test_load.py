"""Files of weights go to sharded models, whose ranks read their own rows."""

import json
import os

import penstock
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from equality import whole, world
from models import DEVICE, Net, Tied, loss_of, make
from penstock import PenstockError
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors writes the files")


class Buffered(Net):
    """Buffers of several kinds, one in two modules, and a parameter that fills no words."""

    def __init__(self):
        super().__init__()
        self.odd = nn.Parameter(torch.randn(5))
        self.register_buffer("table", torch.randn(3, 4).t())
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("local", torch.tensor(0.5), persistent=False)
        self.norm.register_buffer("mask", self.mask)


KINDS = {"plain": Buffered, "tied": Tied}


def refuses(status, text, function, *args, **kwargs):
    with pytest.raises(PenstockError, match=text) as caught:
        function(*args, **kwargs)
    assert caught.value.status == status


def on_meta(kind, **options):
    with torch.device("meta"):
        model = kind()
    return penstock.shard(model, device=DEVICE, **options)


def state_of(kind, dtype=torch.float32):
    """What a file of the model has: tied parameters once, as transformers saves them."""
    model = make(kind, seed=8).cpu()
    once = {n: p for n, p in (*model.named_parameters(), *model.named_buffers()) if n != "local"}
    return {
        name: (t.to(dtype) if t.is_floating_point() else t).detach().contiguous()
        for name, t in once.items()
    }


def save(folder, state, files=1):
    """Write the state to so many files, with an index where there are several."""
    if files == 1:
        safetensors.save_file(state, folder / "model.safetensors", {"format": "pt"})
        return
    names = {name: f"model-{i % files}.safetensors" for i, name in enumerate(state)}
    for file in set(names.values()):
        part = {name: tensor for name, tensor in state.items() if names[name] == file}
        safetensors.save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def assert_has(model, state):
    """Its state dict is what the file has, in the dtypes of the model."""
    found = model.state_dict()
    for name, value in state.items():
        assert torch.equal(whole(found[name]).cpu(), value.to(found[name].dtype)), name
    for names in ((n for n, _ in model.named_parameters()), (n for n, _ in model.named_buffers())):
        assert {*names} - {"local"} <= {*state}, names


# ---- safetensors ---------------------------------------------------------------------------------


def load_and_train(path, kind, stage, dtype):
    rank, _ = world()
    kind = KINDS[kind]
    model = on_meta(lambda: kind().to(dtype), stage=stage)
    optimizer = penstock.AdamW(model)
    assert penstock.load(model, path) == ([], [], [])
    assert_has(model, safetensors_state(path))
    if kind is Buffered:
        assert model.norm.mask is model.mask and model.local.is_meta
        model.local = torch.tensor(0.5, device=DEVICE)
    if dtype == torch.float32:
        loss = loss_of(model, 0, rank)
        loss.backward()
        optimizer.step()
        assert loss_of(model, 0, rank) < loss
    assert penstock.load(model, path) == ([], [], [])  # values are there already
    assert_has(model, safetensors_state(path))
    penstock.close(model)


def safetensors_state(folder):
    files = [os.path.join(folder, name) for name in os.listdir(folder)]
    parts = [safetensors.load_file(file) for file in files if file.endswith(".safetensors")]
    return {name: tensor for part in parts for name, tensor in part.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case",  # ranks, stage, files, dtypes of files and of the model
    [
        (1, 3, 1, torch.float32, torch.float32),
        (2, 1, 3, torch.bfloat16, torch.float32),
        (2, 2, 2, torch.float32, torch.bfloat16),
        (2, 3, 1, torch.float64, torch.float32),
        (3, 3, 2, torch.float16, torch.float32),
        (3, 1, 1, torch.float32, torch.float32),
    ],
)
def test_a_file_goes_to_the_shards(worlds, tmp_path, kind, case):
    size, stage, files, of_file, of_model = case
    save(tmp_path, state_of(KINDS[kind], of_file), files)
    worlds(size).run(load_and_train, str(tmp_path), kind, stage, of_model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_goes_to_a_model_of_one_process(tmp_path, kind):
    save(tmp_path, state_of(KINDS[kind]))
    load_and_train(str(tmp_path), kind, 3, torch.float32)


def load_same_model_from(paths):
    wanted = state_of(Net)
    for path in paths:
        model = on_meta(Net)
        penstock.load(model, path)
        assert_has(model, wanted)
        penstock.close(model)


def test_a_file_an_index_and_a_folder_can_be_named(tmp_path):
    save(tmp_path, state_of(Net), files=2)
    paths = [tmp_path, str(tmp_path), tmp_path / "model.safetensors.index.json"]
    safetensors.save_file(state_of(Net), tmp_path / "other.safetensors")
    load_same_model_from([*paths, tmp_path / "other.safetensors"])


# ---- what is read --------------------------------------------------------------------------------


class Large(nn.Module):
    """Matrices whose rows no two ranks divide evenly, 24 MB in bf16."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2048, 1001, bias=False) for _ in range(6))


def figure_of(file, name):
    with open(f"/proc/self/{file}") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))


def load_counting(path):
    model = on_meta(Large)
    rows = sum(p.to_local().numel() for p in model.parameters())
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # the peak begins anew
    resident, read = figure_of("status", "VmRSS") << 10, figure_of("io", "rchar")
    penstock.load(model, path)
    grown = (figure_of("status", "VmHWM") << 10) - resident
    read = figure_of("io", "rchar") - read
    penstock.close(model)
    return 2 * rows, read, grown


@pytest.mark.skipif(DEVICE == "cuda", reason="counts what the host's memory holds")
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_reads_its_rows_alone_a_piece_at_a_time(worlds, tmp_path, size):
    save(tmp_path, {n: t.bfloat16() for n, t in Large().state_dict().items()})
    file = (tmp_path / "model.safetensors").stat().st_size
    counted = worlds(size).run(load_counting, str(tmp_path))
    assert sum(rows for rows, _, _ in counted) <= file
    for rows, read, grown in counted:
        assert rows <= read <= rows + (64 << 10)  # and the header
        assert grown < 10 << 20  # a piece has 4 MiB; the shards were there before


# ---- torch.distributed.checkpoint ----------------------------------------------------------------


def save_checkpoint(folder, nested):
    model = penstock.shard(make(Buffered, seed=8))
    state = get_model_state_dict(model)
    optimizer = {"optimizer": {"moment": torch.zeros(3), "step": 5}}
    dcp.save({"model": state, **optimizer} if nested else state, checkpoint_id=folder)
    penstock.close(model)


def load_checkpoint(folder, prefix, dtype):
    model = on_meta(lambda: Buffered().to(dtype))
    assert penstock.load(model, folder, prefix=prefix) == ([], [], [])
    assert_has(model, state_of(Buffered))
    penstock.close(model)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_distributed_checkpoint_goes_to_the_shards(worlds, tmp_path, prefix, size):
    worlds(2).run(save_checkpoint, str(tmp_path), bool(prefix))
    for dtype in (torch.float32, torch.bfloat16):
        worlds(size).run(load_checkpoint, str(tmp_path), prefix, dtype)
    if size == 1:
        load_checkpoint(str(tmp_path), prefix, torch.float32)


# ---- what does not fit ---------------------------------------------------------------------------


def load_unlike(path):
    model = penstock.shard(make(Net))
    before = {name: whole(value).clone() for name, value in model.state_dict().items()}
    text = (
        "does not fit Net: not in the files: norm.weight; not in the model: more; of another shape "
        "or kind: blocks.0.scale, head.weight. Nothing is loaded"
    )
    refuses("EMISMATCH", text, penstock.load, model, path)
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value), before[name]), name
    found = penstock.load(model, path, strict=False)
    assert found.missing == ["norm.weight"] and found.unexpected == ["more"]
    assert found.unlike == ["blocks.0.scale", "head.weight"]
    left = {*found.missing, *found.unlike}
    for name, value in model.state_dict().items():
        same = torch.equal(whole(value), before[name])
        assert same == (name in left or name == "norm.bias"), name  # which is 0 in any model
    penstock.close(model)


def test_what_does_not_fit_is_listed(worlds, tmp_path):
    state = state_of(Net)
    del state["norm.weight"]
    state["more"] = torch.zeros(2)
    state["head.weight"] = torch.zeros(7, 3)
    state["blocks.0.scale"] = torch.ones(1, dtype=torch.int64)
    save(tmp_path, state)
    worlds(2).run(load_unlike, str(tmp_path))


def load_where_one_cannot(folder):
    rank, _ = world()
    model = on_meta(Net)
    path = os.path.join(folder, str(rank), "model.safetensors")
    if rank == 0:
        refuses(
            "EPEER", "rank 1 cannot load .*nothing is loaded.*No such", penstock.load, model, path
        )
    else:
        with pytest.raises(FileNotFoundError):
            penstock.load(model, path)
    refuses("ESTATE", "has no values yet", loss_of, model, 0, rank)
    penstock.load(model, os.path.join(folder, "0"))  # the ranks are still together
    loss_of(model, 0, rank).backward()
    penstock.close(model)
    dist.barrier()


def test_a_rank_that_finds_no_file_is_an_error_on_all(worlds, tmp_path):
    (tmp_path / "0").mkdir()
    save(tmp_path / "0", state_of(Net))
    worlds(2).run(load_where_one_cannot, str(tmp_path))


def test_a_damaged_file_is_an_error(tmp_path):
    model = penstock.shard(make(Net))
    path = tmp_path / "model.safetensors"
    refuses("EINVAL", "has neither 'model.safetensors.index.json'", penstock.load, model, tmp_path)
    save(tmp_path, state_of(Net))
    good = path.read_bytes()
    for bad, text in (
        (b"", "no file of safetensors, or is cut off"),
        (good[:100], "no file of safetensors, or is cut off"),
        (good[:-4], "is not all there"),
        (good[:8] + b"[" + good[9:], "its header is none of safetensors"),
        (good.replace(b"F32", b"F99"), "has the dtype F99"),
    ):
        path.write_bytes(bad)
        refuses("EINVAL", text, penstock.load, model, path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    refuses("EINVAL", "it is no index of safetensors", penstock.load, model, tmp_path)
    penstock.close(model)
    refuses("ESTATE", "Net was closed", penstock.load, model, tmp_path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"path": 5}, "path=5"),
        ({"path": ".", "strict": 1}, "strict=1"),
        ({"path": ".", "prefix": None}, "prefix=None"),
    ],
)
def test_arguments_are_checked(options, text):
    model = penstock.shard(make(Net))
    refuses("EINVAL", text, penstock.load, model, **options)
    penstock.close(model)
    refuses("ESTATE", "not sharded", penstock.load, make(Net), ".")

"""What the ranks do that test_accelerate.py starts: what trains with DDP trains alike sharded."""

import json
from functools import partial
from pathlib import Path

import accelerate.accelerator
import hf_accelerate
import hf_trainer
import penstock
import penstock.accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

Plugin = partial(FullyShardedDataParallelPlugin, fsdp_version=2)
OF_FSDP2 = accelerate.accelerator.fsdp2_prepare_model


def anew():
    """Forget the accelerator, but not the process group."""
    AcceleratorState._reset_state(reset_partial_state=True)


def losses_of(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_trained_alike(found, wanted, **tolerance):
    """Compare losses, norms of gradients, and an evaluation."""
    for name in ("loss", "grad_norm", "eval_loss"):
        assert losses_of(found, name) == pytest.approx(losses_of(wanted, name), **tolerance), name


def assert_same_files(found, wanted):
    dist.barrier()  # rank 0 writes them
    found, wanted = load_file(found), load_file(wanted)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=1e-3, atol=1e-5), name


def train_by_trainer(folder):
    plain = hf_trainer.train(f"{folder}/ddp")
    plain_lora = hf_trainer.train(f"{folder}/ddp lora", lora=True, gradient_checkpointing=True)
    anew()
    penstock.accelerate.install()
    sharded = hf_trainer.train(f"{folder}/trainer", steps=6)
    assert_trained_alike(sharded, plain, rel=1e-5)
    assert hf_trainer.generate(sharded) == hf_trainer.generate(plain)
    assert_reduced_once_a_step(sharded.model, losses=6)
    anew()
    evaluated = hf_trainer.make_trainer(f"{folder}/evaluated", steps=2)
    evaluated.evaluate()  # which shards, before there is an optimizer
    evaluated.train()
    assert losses_of(evaluated) == pytest.approx(losses_of(plain)[:2], rel=1e-5)
    anew()
    lora = hf_trainer.train(f"{folder}/lora", lora=True, gradient_checkpointing=True)
    assert_trained_alike(lora, plain_lora, rel=1e-5)
    assert hf_trainer.generate(lora) == hf_trainer.generate(plain_lora)
    model, adapter = "model/model.safetensors", "model/adapter_model.safetensors"
    assert_same_files(f"{folder}/trainer/{model}", f"{folder}/ddp/{model}")
    assert_same_files(f"{folder}/lora/{adapter}", f"{folder}/ddp lora/{adapter}")
    exported = LlamaForCausalLM.from_pretrained(f"{folder}/trainer/model")
    assert exported.num_parameters() == plain.model.num_parameters()
    anew()
    return losses_of(sharded), losses_of(lora)


def assert_reduced_once_a_step(model, losses):
    """Not behind each of the batches whose gradients add up."""
    stats = penstock.stats(model)
    groups = stats.reduces / losses
    assert stats.backwards == losses * hf_trainer.BATCHES // dist.get_world_size()
    assert groups == int(groups) <= 6


def train_in_bf16(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate.accelerator, "fsdp2_prepare_model", OF_FSDP2)
        wanted = hf_trainer.train(f"{folder}/fsdp2", bf16=True, steps=3)
    anew()
    found = hf_trainer.train(f"{folder}/bf16", bf16=True, steps=3)
    assert all(parameter.dtype == torch.float32 for parameter in found.model.parameters())
    assert_trained_alike(found, wanted, rel=1e-2)
    assert losses_of(found)[0] == losses_of(wanted)[0]
    anew()


def in_shards():
    return Plugin(
        cpu_offload=True,
        reshard_after_forward=False,
        activation_checkpointing=True,
        state_dict_type="SHARDED_STATE_DICT",
    )


def train_by_accelerate(folder):
    penstock.accelerate.uninstall()
    wanted = hf_accelerate.train(f"{folder}/accelerate by ddp")
    anew()
    penstock.accelerate.install()
    hf_accelerate.main(["--output", f"{folder}/accelerate"])
    anew()
    found = hf_accelerate.train(f"{folder}/accelerate in shards", fsdp_plugin=in_shards())
    assert found == pytest.approx(wanted, rel=1e-5)
    for name in ("accelerate", "accelerate in shards"):
        file = "model/model.safetensors"
        assert_same_files(f"{folder}/{name}/{file}", f"{folder}/accelerate by ddp/{file}")
    anew()
    return wanted


def generate_by_an_encoder_and_a_decoder():
    """Lengths differ by rank, and parts of the model are called without its forward."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=32, d_model=16, d_ff=32, d_kv=4, num_layers=2, num_heads=4,
        decoder_start_token_id=0, eos_token_id=5,
    )  # fmt: skip
    plain = T5ForConditionalGeneration(config).eval()
    rank = dist.get_rank()
    tokens = torch.full((1, 4 + rank), 7 + rank)
    wanted = plain.generate(tokens, max_new_tokens=3 + 4 * rank)
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters()))
    assert model.generate(tokens, max_new_tokens=3 + 4 * rank).tolist() == wanted.tolist()
    anew()


def prepare_what_is_sharded(file):
    """A model that its ranks have never had whole, and whose optimizer was built behind that."""
    with torch.device("meta"):
        model = hf_accelerate.build()
    with pytest.raises(penstock.PenstockError, match="is on the meta device"):
        Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters()))
    anew()
    penstock.shard(model, device="cpu")
    penstock.load(model, file)
    plain = hf_accelerate.build()
    plain.load_state_dict(load_file(file))
    accelerator = Accelerator(cpu=True)
    sgd = partial(torch.optim.SGD, lr=0.1)
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    for each, its_optimizer in ((model, optimizer), (plain, sgd(plain.parameters()))):
        accelerator.backward(each(torch.ones(2, 16)).square().mean())
        its_optimizer.step()
    for name, value in accelerator.get_state_dict(model).items():  # on rank 0
        assert torch.allclose(value, plain.get_parameter(name), atol=1e-6), name
        assert not torch.equal(value, load_file(file)[name]), name
    anew()


def prepare(cpu=True, **plugin):
    model = torch.nn.Linear(2, 2)
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=Plugin(**plugin))
    return accelerator.prepare(model, torch.optim.SGD(model.parameters()))


def refuse():
    with pytest.raises(penstock.PenstockError, match="asks for ignored_modules"):
        prepare(ignored_modules=[])
    anew()
    with pytest.raises(penstock.PenstockError, match="fsdp_version=1 asks for FSDP1"):
        prepare(fsdp_version=1)
    anew()
    with pytest.raises(penstock.PenstockError, match=r"2 processes were started.*cpu=True"):
        prepare(cpu=False)
    anew()
    penstock.accelerate.install(stage=4)
    with pytest.raises(penstock.PenstockError, match="stage=4"):
        prepare()
    anew()
    refuse_another_accelerate()
    penstock.accelerate.install()


def refuse_another_accelerate():
    penstock.accelerate.uninstall()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(accelerate.accelerator, "fsdp2_apply_ac")
        with pytest.raises(penstock.PenstockError, match="'fsdp2_apply_ac' in this Accelerate"):
            penstock.accelerate.install()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate, "__version__", "1.150")
        with pytest.warns(UserWarning, match=r"proved with Accelerate 1\.15, and this is 1\.150"):
            penstock.accelerate.install()
    assert accelerate.accelerator.fsdp2_prepare_model is not OF_FSDP2


def train(folder):
    """Train in every way; what is to be gone on with lies in the folder."""
    by_trainer, by_lora = train_by_trainer(folder)
    train_in_bf16(folder)
    wanted = {"trainer": by_trainer, "lora": by_lora, "accelerate": train_by_accelerate(folder)}
    prepare_what_is_sharded(f"{folder}/accelerate by ddp/model/model.safetensors")
    generate_by_an_encoder_and_a_decoder()
    refuse()
    if dist.get_rank() == 0:
        Path(folder, "wanted.json").write_text(json.dumps(wanted))


def resume(folder):
    """Go on as if nothing had been between."""
    wanted = json.loads(Path(folder, "wanted.json").read_text())
    penstock.accelerate.install()
    for name in ("trainer", "lora"):
        again = hf_trainer.train(
            f"{folder}/{name}",
            lora=name == "lora",
            resume=f"{folder}/{name}/checkpoint-3",
        )
        assert losses_of(again) == pytest.approx(wanted[name], rel=1e-5)
        anew()
    hf_trainer.main(["--output", f"{folder}/trainer", "--resume", "--steps", "7"])  # behind six
    anew()
    for name, plugin in (("accelerate", None), ("accelerate in shards", in_shards())):
        losses = hf_accelerate.train(f"{folder}/{name}", resume=True, fsdp_plugin=plugin)
        assert losses == pytest.approx(wanted["accelerate"][2:], rel=1e-5)
        anew()

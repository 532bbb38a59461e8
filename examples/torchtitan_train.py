"""Train torchtitan's debug model on bytes, sharded: the line is what converts its train spec.

torchrun --standalone --nproc-per-node 2 examples/torchtitan_train.py --training.steps 20

Arguments are torchtitan's own. Without a GPU it trains on CPUs.
"""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpt.text import standard_library
from torch.utils.data import IterableDataset

ARGUMENTS = """--model.flavor debugmodel --training.seq_len 64 --training.local_batch_size 2
    --lr_scheduler.warmup_steps 2 --metrics.log_freq 1 --comm.trace_buf_size 0"""


def import_for_cpus():
    """Import torchtitan, which knows accelerators only, with what it asks of one."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    of_gpus = {
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "get_device_name": lambda device: "CPU",
        "get_device_properties": lambda device: SimpleNamespace(total_memory=pages),
        "memory_stats": lambda device: {},
        "reset_peak_memory_stats": lambda: None,
    }
    device = SimpleNamespace(**vars(torch.cpu) | of_gpus)
    with (
        patch("torch._utils._get_available_device_type", lambda: "cpu"),
        patch("torch._utils._get_device_module", lambda kind: device),
    ):
        import torchtitan.tools.utils  # noqa: F401


if not torch.cuda.is_available():
    import_for_cpus()

from penstock.torchtitan import convert  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402


class Bytes(IterableDataset):
    """The standard library's sources, of which each rank reads other parts."""

    def __init__(self, rank, ranks, length):
        self.place, self.ranks, self.length = rank, ranks, length
        self.text = torch.frombuffer(bytearray(standard_library(1 << 20)), dtype=torch.uint8)

    def __iter__(self):
        while True:
            part = self.text[self.length * self.place :][: self.length + 1].long()
            self.place = (self.place + self.ranks) % (len(self.text) // self.length)
            yield {"input": part[:-1]}, part[1:]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def read(dp_world_size, dp_rank, tokenizer, job_config):
    training = job_config.training
    data = Bytes(dp_rank, dp_world_size, training.seq_len)
    size = training.local_batch_size
    return ParallelAwareDataloader(data, dp_rank, dp_world_size, batch_size=size)


def on_bytes(spec):
    return replace(spec, build_tokenizer_fn=None, build_dataloader_fn=read)


def make_trainer(name, arguments):
    """Make torchtitan's trainer of a model that is registered under that name."""
    given = ["--model.name", name, *ARGUMENTS.split(), *arguments]
    return Trainer(ConfigManager().parse_args(given))


def main():
    init_logger()
    register_train_spec("llama3", convert(on_bytes(get_train_spec("llama3"))))
    trainer = make_trainer("llama3", sys.argv[1:])
    trainer.train()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

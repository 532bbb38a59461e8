"""A strategy of Lightning's that shards the module, which is written as for any other strategy.

    from penstock.lightning import PenstockStrategy
    trainer = Trainer(strategy=PenstockStrategy(), ...)

It was proved with Lightning 2.6.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from penstock._engine import is_sharded
from penstock._errors import PenstockError
from penstock._shard import no_sync, shard

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class PenstockStrategy(ModelParallelStrategy):
    """Train a LightningModule whose parameters `penstock.shard` has sharded.

    Lightning's strategy for FSDP2 does what models of DTensors need; this one shards the module by
    itself, before optimizers are configured, and its steps count as forwards. All ranks begin with
    the values of rank 0. A module of the meta device gets its values from a checkpoint, or in
    ``on_fit_start``, as by `penstock.load`. What ``configure_model`` has sharded already stays so:
    parts of a module that optimizes by hand (``automatic_optimization = False``) have to be.

    Parameters
    ----------
    save_distributed_checkpoint : bool
        Whether a checkpoint is a folder, to which each rank writes its rows; else it is one file
        that rank 0 writes, as with any other strategy. Both are resumed on any number of ranks from
        two on; a process alone goes on with ``strategy="auto"``.
    process_group_backend : str, optional
        Of ``torch.distributed``; left out: gloo, and NCCL besides on GPUs.
    process_group_timeout : timedelta
        For operations of ``torch.distributed`` that are not Penstock's.
    **options
        Of `shard`. With ``precision="bf16-mixed"``, ``param_dtype=torch.bfloat16`` halves the bytes
        that are gathered.
    """

    model: Any

    def __init__(
        self,
        *,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        process_group_timeout: timedelta = timedelta(minutes=30),
        **options: Any,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=process_group_timeout,
        )
        more = options.get("forward_methods", ())
        methods = (*_STEPS, *([more] if isinstance(more, str) else more))
        self._options = {"broadcast": True, **options, "forward_methods": methods}

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        self._data_parallel_size = self.world_size

    def _get_process_group_backend(self) -> str:
        default = "cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo"
        return self._process_group_backend or default

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, and have its optimizers configured where it is fitted."""
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._shard(self.lightning_module)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: LightningModule) -> None:
        options = dict(self._options)
        if any(parameter.is_meta for parameter in module.parameters()):
            options.setdefault("device", self.root_device)
        else:
            module.to(self.root_device)
        if any(is_sharded(part) for part in module.modules()):
            return
        if not module.automatic_optimization:
            raise PenstockError(
                "EUNSUPPORTED",
                f"{type(module).__name__} optimizes by hand, and a backward within training_step "
                "comes before the end of what counts as a forward: call penstock.shard on its "
                "networks in configure_model",
            )
        shard(module, **options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, as Lightning does it for DTensors; which a rank alone has not."""
        if self.world_size == 1:
            raise PenstockError(
                "EUNSUPPORTED",
                "a process alone has nothing sharded to load a checkpoint into: go on with "
                "Trainer(strategy='auto'), which takes the same files",
            )
        return super().load_checkpoint(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Have backwards add up on each rank, for a while."""
        with ExitStack() as parts:
            for part in filter(is_sharded, self.model.modules()):
                parts.enter_context(no_sync(part))
            yield

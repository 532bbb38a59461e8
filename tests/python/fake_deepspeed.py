"""A package `deepspeed` with the modules and names that penstock.deepspeed touches, and an engine
behind its entry points. It stands where DeepSpeed cannot be installed."""

import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

from deepcompile_engine import Engine

OPERATORS = [
    "allgather_param(Tensor a, int graph_id, int id, ScalarType? dtype = None) -> Tensor",
    "prefetch_params_fused(int graph_id, Tensor[] params, int[] ids,"
    " ScalarType[]? dtypes = None) -> ()",
    "wait_allgather(Tensor(a) a, int graph_id, int id) -> Tensor(a)",
    "release_param(Tensor(a) a, int graph_id, int id, int n_users) -> Tensor(a)",
    "reduce_grad(Tensor a, int graph_id, int id) -> Tensor",
    "free_tensors(Tensor[] a) -> ()",
    "offload_tensor(Tensor a, int id, int id) -> Tensor",
    "reload_tensor(Tensor a, int id, int id) -> Tensor",
    "wait_offload(Tensor a, int id, int id) -> Tensor",
    "wait_reload(Tensor a, int id, int id) -> Tensor",
    "offload_parameter(Tensor a, int id, int id) -> ()",
    "reload_parameter(Tensor a, int id, int id) -> ()",
    "end_backward(Any deps, int graph_id, bool release_reduce_buckets) -> ()",
    "test_call(Tensor a) -> Tensor",
]
FUNCTIONS = [
    "set_persistent",
    "enable_profiling",
    "is_profiling",
    "init",
    "cleanup",
    "register_param",
    "update_param_grad_buffer",
    "register_graph_z1",
    "register_graph_z2",
    "register_z3_param",
    "register_graph_z3",
    "start_forward",
    "end_forward",
    "start_backward",
    "reset",
    "invalidate_gathered_param",
    "clear_all_gathered_params",
]


def declarations(operators: list[str] = OPERATORS, functions: list[str] = FUNCTIONS) -> str:
    """The file in which DeepSpeed declares its operators; long literals are in pieces there."""
    lines = [f'    m.def("{o[:40]}"\n          "{o[40:]}");' for o in operators]
    lines += [f'    m.def("{f}", &dc::{f}, "What it does");' for f in functions]
    lines += ['    m.impl("allgather_param", &dc::allgather_param);']
    return "TORCH_LIBRARY(dc, m)\n{\n" + "\n".join(lines) + "\n}\n"


class GraphOrder:
    def __init__(self) -> None:
        self.frames: OrderedDict[int, Any] = OrderedDict()


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module
    return module


def put(folder: Path, *, version: str = "0.19.6", source: str | None = None) -> ModuleType:
    """Make `import deepspeed` find the package; `source` is written below folder. Returns it."""
    if source is not None:
        path = folder / "csrc/compile/init.cpp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    package = _module("deepspeed", __version__=version)
    for name in ("compile", "compile.passes", "ops", "ops.op_builder", "runtime", "runtime.zero"):
        _module(f"deepspeed.{name}")

    class OpBuilder:
        _loaded_ops: dict[str, Any] = {}

        def deepspeed_src_path(self, path: str) -> str:
            return str(folder / path)

    class DeepCompileBuilder(OpBuilder):
        pass

    _module("deepspeed.ops.op_builder.builder", OpBuilder=OpBuilder)
    _module("deepspeed.ops.op_builder.dc", DeepCompileBuilder=DeepCompileBuilder)
    util = _module(
        "deepspeed.compile.util", dc_handle=None, pre_backward_hooks=[], post_backward_hooks=[]
    )
    _module(
        "deepspeed.compile.backend",
        remaining_schedule=None,
        next_pass_step=-1,
        next_passes=None,
        current_passes=None,
        graph_order_with_frame_id=GraphOrder(),
        profiling_results={},
        param_manager={},
    )
    _module("deepspeed.compile.passes.zero3_compile", fast_free_schedule=lambda graph: graph)
    package.runtime = sys.modules["deepspeed.runtime"]
    _module(
        "deepspeed.runtime.zero.partition_parameters", GatheredParameters=_gathered_parameters()
    )
    package.runtime.engine = _module(
        "deepspeed.runtime.engine",
        DeepSpeedEngine=_engine(util),
        deepcompile_backward_prologue=_backward_prologue(util),
    )
    package.compile = sys.modules["deepspeed.compile"]
    package.compile.util = util
    package.compile.backend = sys.modules["deepspeed.compile.backend"]
    package.ops = sys.modules["deepspeed.ops"]
    return package


def remove() -> None:
    """Forget the package."""
    for name in [n for n in sys.modules if n == "deepspeed" or n.startswith("deepspeed.")]:
        del sys.modules[name]


def _gathered_parameters() -> type:
    class GatheredParameters:
        """Only its modifying rank's end: `write(rank)` stands for the partitioning."""

        def __init__(self, write: Any, modifier_rank: int | None) -> None:
            self.write, self.src_rank, self.enabled = write, modifier_rank, True

        def __enter__(self) -> None:
            pass

        def __exit__(self, *reason: Any) -> None:
            self.write()

    return GatheredParameters


class DeepSpeedZeroOptimizer_Stage3:  # noqa: N801
    """Where each parameter's gradient lies: a name of DeepSpeed's that the class's is part of."""

    def __init__(self) -> None:
        self.persistent_parameters: list[Any] = []

    def set_partitions(self, partitions: dict[int, Any]) -> None:
        self.__param_id_to_grad_partition = partitions


def _backward_prologue(util: ModuleType) -> Any:
    def deepcompile_backward_prologue(boundary: bool) -> None:
        for hook in util.pre_backward_hooks:
            hook(boundary)
        util.dc_handle.start_backward(boundary)

    return deepcompile_backward_prologue


def _engine(util: ModuleType) -> type[Engine]:
    class DeepSpeedEngine(Engine):
        """Its hooks run in every engine's backward, as DeepSpeed's do."""

        def __init__(self, module: Any, **options: Any) -> None:
            super().__init__(module, handle=lambda: util.dc_handle, **options)
            self.compiles = True  # by DeepCompile
            self.is_compiled = False
            self.optimizer = DeepSpeedZeroOptimizer_Stage3()

        def compile(self) -> None:
            if self.is_compiled or not self.compiles:
                return
            self.is_compiled = True
            super().compile()
            util.pre_backward_hooks.append(
                lambda boundary: self.memory.before_backward(self.handle(), boundary)
            )
            sys.modules["deepspeed.compile.backend"].remaining_schedule = [self]

        def forward(self, *inputs: Any) -> Any:
            return super().forward(*inputs)

        def _backward_prologue(self) -> None:
            sys.modules["deepspeed.runtime.engine"].deepcompile_backward_prologue(self.boundary())

        def _backward_epilogue(self) -> None:
            for hook in util.post_backward_hooks:
                hook()

        def step(self) -> None:
            super().step()

        def is_deepcompile_enabled(self) -> bool:
            return self.compiles

        def is_gradient_accumulation_boundary(self) -> bool:
            return self.boundary()

        def load_checkpoint(self, load: Any) -> None:
            load()

        def reload_states(self, reload: Any) -> None:
            reload()

        def destroy(self) -> None:
            super().destroy()

    return DeepSpeedEngine

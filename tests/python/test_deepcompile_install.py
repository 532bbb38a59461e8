"""penstock.deepspeed.install: in place, refused, warned of, taken back."""

import importlib.util
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import fake_deepspeed
import penstock.deepspeed
import pytest
import torch
from fake_deepspeed import FUNCTIONS, OPERATORS, declarations
from models import Net, batch, make
from penstock import PenstockError

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Puts a package `deepspeed` in place and takes it away again."""
    monkeypatch.setenv(CONNECTIONS, "1")  # so that nothing that is set outlives the test

    def put(**changes):
        return fake_deepspeed.put(tmp_path, **{"source": declarations(), **changes})

    yield put
    if "deepspeed" in sys.modules:
        penstock.deepspeed.uninstall()
        fake_deepspeed.remove()


def test_without_deepspeed_the_import_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=r"pip install deepspeed==0\.19\.6"):
        penstock.deepspeed.install()


def test_deepspeed_finds_the_runtime_where_it_looks(put):
    deepspeed = put()
    penstock.deepspeed.install()
    handle = deepspeed.compile.util.dc_handle
    assert handle.__name__ == "penstock._dc"
    builder = sys.modules["deepspeed.ops.op_builder.builder"].OpBuilder
    assert builder._loaded_ops["dc"] is handle


def test_a_second_install_changes_nothing(put):
    deepspeed = put()
    penstock.deepspeed.install()
    forward = deepspeed.runtime.engine.DeepSpeedEngine.forward
    penstock.deepspeed.install()
    assert deepspeed.runtime.engine.DeepSpeedEngine.forward is forward


@pytest.mark.parametrize("given", [None, "1"])
def test_cuda_gets_more_queues_before_it_starts_unless_the_user_has_chosen(put, monkeypatch, given):
    if given is None:
        monkeypatch.delenv(CONNECTIONS)
    put()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    penstock.deepspeed.install()
    assert os.environ.get(CONNECTIONS) == given
    penstock.deepspeed.uninstall()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    penstock.deepspeed.install()
    assert os.environ[CONNECTIONS] == (given or "32")


def test_uninstall_gives_the_entry_points_back(put):
    deepspeed = put()
    engine = deepspeed.runtime.engine.DeepSpeedEngine
    names = ("compile", "forward", "_backward_prologue", "step", "destroy")
    before = [getattr(engine, name) for name in names]
    penstock.deepspeed.install()
    assert all(getattr(engine, n) is not f for n, f in zip(names, before, strict=True))
    penstock.deepspeed.uninstall()
    assert all(getattr(engine, n) is f for n, f in zip(names, before, strict=True))
    assert deepspeed.compile.util.dc_handle is None


def test_the_version_it_was_proved_with_gives_no_warning(put):
    put(version="0.19.6+abc")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        penstock.deepspeed.install()


def test_another_version_gets_a_warning_that_says_so(put):
    put(version="0.20.0")
    with pytest.warns(UserWarning, match=r"proved with DeepSpeed 0\.19\.6, and this is 0\.20\.0"):
        penstock.deepspeed.install()


def test_deepspeeds_own_operators_loaded_before_are_refused(put):
    put()
    sys.modules["deepspeed.ops.op_builder.builder"].OpBuilder._loaded_ops["dc"] = object()
    with pytest.raises(PenstockError, match="loaded its own operators"):
        penstock.deepspeed.install()


def install_behind_a_foreign_library():
    """A process of its own: a library of operators stays for ever."""
    foreign = torch.library.Library("dc", "DEF")
    foreign.define(OPERATORS[0])
    with pytest.raises(PenstockError, match="can hold one library of that name"):
        penstock.deepspeed._operators.load()


def test_a_foreign_library_of_the_namespace_is_refused(fresh_world):
    fresh_world(1).run(install_behind_a_foreign_library)


@pytest.mark.parametrize(
    "change",
    [
        ("release_param(Tensor(a) a", "release_param(Tensor a"),
        ("int n_users) -> Tensor(a)", "int n_users, bool last) -> Tensor(a)"),
        ("wait_reload(Tensor a, int id, int id) -> Tensor", "wait_all(Tensor a) -> Tensor"),
        ("ScalarType? dtype = None) -> Tensor", "ScalarType? dtype) -> Tensor"),
    ],
    ids=["alias", "argument", "name", "default"],
)
def test_an_operator_that_differs_is_an_error_with_both_schemas(put, change):
    before, after = change
    operators = [o.replace(before, after) for o in OPERATORS]
    (changed,) = (o for o in operators if o not in OPERATORS)
    name = changed.split("(")[0]
    deepspeed = put(source=declarations(operators=operators))
    with pytest.raises(PenstockError, match=f"operator dc::{name}: ") as error:
        penstock.deepspeed.install()
    assert error.value.status == "EMISMATCH"
    assert str(torch._C.parse_schema(f"dc::{changed}")) in str(error.value)
    ours = getattr(torch.ops.dc, name, None)
    assert (str(ours.default._schema) if ours else "no such operator") in str(error.value)
    assert deepspeed.compile.util.dc_handle is None


def test_a_function_that_is_missing_is_an_error_at_install(put):
    put(source=declarations(functions=[*FUNCTIONS, "gather_everything"]))
    with pytest.raises(PenstockError, match="'gather_everything'"):
        penstock.deepspeed.install()


def test_an_entry_point_that_is_missing_leaves_nothing_in_place(put, monkeypatch):
    deepspeed = put()
    engine = deepspeed.runtime.engine.DeepSpeedEngine
    forward = engine.forward
    monkeypatch.delattr(deepspeed.runtime.engine, "deepcompile_backward_prologue")
    for _ in range(2):
        with pytest.raises(PenstockError, match="no 'deepcompile_backward_prologue' in this Deep"):
            penstock.deepspeed.install()
        assert deepspeed.compile.util.dc_handle is None and engine.forward is forward


def test_operators_that_cannot_be_compared_are_warned_of(put):
    put(source=None)
    with pytest.warns(UserWarning, match=r"init\.cpp is not there"):
        penstock.deepspeed.install()


def test_an_engine_without_deepcompile_is_left_alone(put):
    deepspeed = put()
    penstock.deepspeed.install()
    engine = deepspeed.runtime.engine.DeepSpeedEngine(make(Net), stage=3)
    engine.compiles = False
    engine.compile()
    assert "_penstock_state" not in engine.__dict__


def write_between_forwards(folder, way):
    """Shards are written through .data, as DeepSpeed does it, which torch does not count."""
    deepspeed = fake_deepspeed.put(folder, source=declarations())
    penstock.deepspeed.install()
    engine = deepspeed.runtime.engine.DeepSpeedEngine(make(Net), stage=3)
    engine.compile()

    def zero():
        for shard in engine.memory.shards:
            shard.data.zero_()

    with torch.no_grad():
        for _ in range(3):
            assert engine.forward(batch(0, 0), 0).abs().sum() > 0
        if way == "GatheredParameters":
            parameters = sys.modules["deepspeed.runtime.zero.partition_parameters"]
            with parameters.GatheredParameters(zero, modifier_rank=0):
                pass
        else:
            getattr(engine, way)(zero)
        assert engine.forward(batch(0, 0), 0).abs().sum() == 0
    engine.destroy()
    fake_deepspeed.remove()


@pytest.mark.parametrize("way", ["load_checkpoint", "reload_states", "GatheredParameters"])
def test_what_deepspeed_writes_to_shards_is_gathered(fresh_world, tmp_path, way):
    fresh_world(1).run(write_between_forwards, tmp_path, way)


def reload_gradients(folder):
    deepspeed = fake_deepspeed.put(folder, source=declarations())
    penstock.deepspeed.install()
    engine = deepspeed.runtime.engine.DeepSpeedEngine(make(Net), stage=3)
    engine.compile()
    engine.optimizer.set_partitions({})

    def train():
        engine.backward(engine.forward(batch(0, 0), 0).sum())
        return [gradient.clone() for gradient in engine.memory.buffers]

    def reload():
        engine.memory.buffers = [torch.full_like(b, torch.nan) for b in engine.memory.buffers]
        engine.optimizer.set_partitions(
            {
                parameter.ds_id: buffer
                for parameter, buffer in zip(
                    engine.memory.parameters, engine.memory.buffers, strict=True
                )
                if parameter.requires_grad
            }
        )

    expected = train()
    engine.reload_states(reload)
    for got, wanted in zip(train(), expected, strict=True):
        assert torch.equal(got, wanted)
    engine.destroy()
    fake_deepspeed.remove()


def test_gradients_follow_the_partitions_that_are_reloaded(fresh_world, tmp_path):
    fresh_world(1).run(reload_gradients, tmp_path)


def leave_persistent_parameters_partitioned(folder):
    """Those that are gathered after a step although no graph has them; others stay."""
    deepspeed = fake_deepspeed.put(folder, source=declarations())
    penstock.deepspeed.install()
    for persists in (False, True):
        engine = deepspeed.runtime.engine.DeepSpeedEngine(make(Net), stage=1)
        parameters = [SimpleNamespace(ds_persist=persists)] * 3
        engine.optimizer.persistent_parameters = parameters
        engine.compile()
        assert engine.optimizer.persistent_parameters == (parameters if persists else [])
        engine.destroy()
    fake_deepspeed.remove()


def test_no_parameter_is_gathered_after_a_step_in_vain(fresh_world, tmp_path):
    fresh_world(1).run(leave_persistent_parameters_partitioned, tmp_path)


def keep_hooks_apart(folder):
    """Hooks and schedule are each engine's own, and go with it."""
    deepspeed = fake_deepspeed.put(folder, source=declarations())
    penstock.deepspeed.install()
    util, backend = deepspeed.compile.util, deepspeed.compile.backend
    first, second = (
        deepspeed.runtime.engine.DeepSpeedEngine(make(Net), stage=stage) for stage in (1, 2)
    )
    first.compile()
    assert len(util.pre_backward_hooks) == 1 and backend.remaining_schedule == [first]
    second.compile()
    assert len(util.pre_backward_hooks) == 1 and backend.remaining_schedule == [second]
    contexts = {each._penstock_state.context for each in (first, second)}
    assert len(contexts) == 2 and 0 not in contexts
    first._backward_epilogue()
    assert backend.remaining_schedule == [first]
    assert util.dc_handle.current() == first._penstock_state.context
    second.destroy()
    assert util.pre_backward_hooks == []
    first._backward_epilogue()
    assert backend.remaining_schedule == [first] and len(util.pre_backward_hooks) == 1
    first.destroy()
    assert util.dc_handle.current() == 0
    fake_deepspeed.remove()


def test_each_engine_has_its_own_hooks_schedule_and_context(fresh_world, tmp_path):
    fresh_world(1).run(keep_hooks_apart, tmp_path)


def test_importing_the_package_loads_no_operators(fresh_world):
    assert fresh_world(1).run(_is_loaded_after_import) == [False]


def _is_loaded_after_import():
    import penstock.dc
    import penstock.deepcompile
    import penstock.deepspeed

    assert penstock.shard and penstock.deepcompile.record
    return "penstock._dc" in sys.modules or any(
        name.startswith("dc::") for name in torch._C._dispatch_get_all_op_names()
    )


_WITH_DEEPSPEED = """
import penstock.deepspeed
penstock.deepspeed.install()
import deepspeed
from deepspeed.compile import util
from deepspeed.ops.op_builder.dc import DeepCompileBuilder
assert util.get_deepcompile_handle().__name__ == "penstock._dc"
assert DeepCompileBuilder().load() is util.get_deepcompile_handle()
forward = deepspeed.DeepSpeedEngine.forward
penstock.deepspeed.install()
assert deepspeed.DeepSpeedEngine.forward is forward
"""


def test_deepspeed_itself_takes_the_runtime():
    if not importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is not installed")
    subprocess.run([sys.executable, "-c", _WITH_DEEPSPEED], check=True, timeout=90)

"""launch/plan.py: comparison with real training steps, collectives, times, bad input."""

import dataclasses
import functools
import json
import pathlib
import runpy
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cirag_jax import sharding
from cirag_jax.commands import plan
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.models.encoder import Encoder
from cirag_jax.models.io import pretrained, pretrained_decoder, tensor_files
from cirag_jax.models.io.folders import shape_folder
from cirag_jax.training import aligner_batches, mfu
from cirag_jax.training.rehearsal import Rehearsal, collectives
from experiments.benchmarks import scaling
from tests import tiny, tiny_decoder

pytestmark = pytest.mark.slow

WIDTH = 32  # width of the encoder
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_EXTEND = runpy.run_path(str(_ROOT / "launch/plan.py"))["extend"]


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of tiny models; one of them has only a config.json."""
    folder = tmp_path_factory.mktemp("plan")
    tiny.model_folder(folder / "encoder", d_model=WIDTH)
    tiny_decoder.folder(folder / "decoder")
    (folder / "shape").mkdir()
    shutil.copy(folder / "decoder/config.json", folder / "shape")
    return folder


@pytest.fixture(scope="module")
def planned(folders):
    """Returns a cached function that plans a component with some settings."""
    return functools.cache(
        lambda component, *overrides: plan.plan(configured(folders, component, *overrides))
    )


# Settings of each component for a tiny step that has several parts.
TINY = {
    "aligner": ("batch_size=8", "num_negatives=3", "query_max_length=64", "unit_max_length=64"),
    "cross_encoder": ("targets_per_step=4", "max_length=32"),
    "integrator": ("length=64", "buckets=(32,)", "batch_size=6", "rows_per_device=1", "chunk=64"),
    "grpo": ("length=64", "buckets=(32,)", "questions_per_step=1", "group_size=2"),
    "reader": ("length=64", "buckets=(32,)", "batch_size=2", "model.dtype=bfloat16"),
}


def configured(folders, component, *overrides):
    encoder = component in ("aligner", "cross_encoder")
    spec = folders / ("encoder" if encoder else "decoder")
    settings = [f"model.spec={spec}", *TINY[component], *overrides]
    if component == "cross_encoder":
        settings.insert(0, f"encoder.model={spec}")
    path = str(_ROOT / f"configs/{component}.py")
    return load_config(path, [f"--config.{setting}" for setting in settings], _EXTEND)


class Arrays(Rehearsal):
    """Runs the step on real arrays; measures the memory in use before each call."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self._before = _live()

    def shape(self, like, placed):
        if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(0), placed)
        value = like if isinstance(like, np.ndarray) else jnp.zeros(like.shape, like.dtype)
        return jax.device_put(value, placed)

    def __call__(self, function, *arguments):
        if not hasattr(function, "lower"):
            return function(*arguments)
        self.update_peak(self.program(function, arguments), _live() - self._before)
        return function(*arguments)


def _live() -> int:
    """Returns the bytes of all arrays on the first device. Shared buffers are counted once."""
    first, sizes = jax.devices()[0], {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device == first:
                sizes[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(sizes.values())


def test_plan_of_grpo_counts_the_engine_and_the_rollouts(planned):
    parts = planned("grpo")["bytes_per_device"]
    base = parts["base"]
    assert parts["engine"] > base  # its own weights, and its keys and values
    more = planned("grpo", "group_size=4")["bytes_per_device"]
    assert more["batch"] == 2 * parts["batch"] and more["engine"] == parts["engine"]


CASES = [
    ("aligner", 1, "chunk_tokens=512"),
    ("cross_encoder", 1, "model.dropout=0.1"),
    ("integrator", 2, "mesh.fsdp=2"),
    ("integrator", 2, "mesh.fsdp=2 full_parameters=true"),
    ("reader", 1, "full_parameters=true"),
]


@pytest.mark.parametrize(("component", "devices", "setting"), CASES)
def test_plan_peak_equals_compiled_step(folders, planned, monkeypatch, component, devices, setting):
    settings = f"mesh.devices={devices}", *setting.split()
    wanted = planned(component, *settings)
    monkeypatch.setattr(plan, "Rehearsal", Arrays)
    real = plan.plan(configured(folders, component, *settings))
    assert wanted["collective_bytes"] == real["collective_bytes"]
    # They differ by a few bytes of batches that the step places itself.
    assert abs(wanted["peak_bytes"] / real["peak_bytes"] - 1.0) < 0.01, (wanted, real)
    assert sum(wanted["bytes_per_device"].values()) == wanted["peak_bytes"]


@pytest.fixture(scope="module")
def reader(folders):
    """The plan of a reader on two devices. Its base model is only a config."""
    shape = f"model.spec={folders / 'shape'}"
    flags = ("mesh.devices=2", "gpu=A100-80", "memory_gib=0.0005", "examples=100", "peak_share=0.5")
    return plan.plan(configured(folders, "reader", shape, *flags))


def test_plan_gradients_are_exchanged_once(reader):
    sums = reader["collective_bytes"]["all-reduce"]
    assert 0 <= sums - reader["bytes_per_device"]["gradients"] < 1000  # and a few numbers


def test_plan_mpnet_needs_only_its_config(planned, tmp_path):
    folder = tiny.model_folder(tmp_path / "mpnet", d_model=WIDTH, kind="mpnet")
    size = sum(array.nbytes for _, _, array in tensor_files.read_tensors(folder))
    (folder / "model.safetensors").unlink()
    result = planned("aligner", "mesh.devices=1", f"model.spec={folder}")
    assert result["bytes_per_device"]["parameters"] == size


EXCHANGES = {
    "aligner": ("chunk_tokens=64", "keep_activations=true"),
    "aligner, embedding twice": ("chunk_tokens=64", "keep_activations=false"),
    "cross_encoder": ("chunk_rows=8", "targets_per_step=8"),
    "integrator": ("batch_size=24",),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_plan_chunks_do_not_repeat_gradient_exchange(folders, monkeypatch, name):
    """On a data mesh, chunks add no exchanges beyond gradients and the aligner's embeddings."""
    component, made = name.partition(",")[0], []

    def rehearsal(*arguments, **settings):
        made.append(Rehearsal(*arguments, **settings))
        return made[0]

    monkeypatch.setattr(plan, "Rehearsal", rehearsal)
    config = configured(folders, component, *EXCHANGES[name], "mesh.devices=8")
    planned = plan.plan(config)
    *chunks, _ = made[0].programs.values()
    assert max(program.calls for program in chunks) > 1
    assert not [program.name for program in chunks if "all-reduce" in program.collectives]
    embeddings = 0
    if component == "aligner":
        layout = aligner_batches.make_layout(config, made[0].mesh)
        embeddings = (layout.num_queries + layout.num_candidates) * WIDTH * 4
    theory = planned["bytes_per_device"]["gradients"] + embeddings
    assert 1.0 <= sum(planned["collective_bytes"].values()) / theory < 1.1, (
        planned["collective_bytes"],
        theory,
    )


@pytest.mark.parametrize("component", ["aligner", "integrator", "cross_encoder"])
def test_plan_exchange_follows_from_shapes(component):
    """On a mesh that splits everything, the exchanged bytes match the benchmark's formulas."""
    row = scaling.compile_step(component, scaling.Mesh(2, 2, 2))
    assert 1.0 <= row["ratio"] < 1.001, row


@pytest.mark.parametrize("component", ["aligner", "cross_encoder"])
def test_plan_weights_are_gathered_in_compute_dtype(component):
    row = scaling.compile_step(component, scaling.Mesh(1, 2, 1), "bfloat16")
    assert 1.0 <= row["ratio"] < 1.001, row


def test_plan_exchange_of_real_processes_is_the_same(capfd):
    flags = ["--components=cross_encoder", "--meshes=2x1x1", "--processes=2"]
    assert scaling.main(flags) == 0
    (row,) = json.loads(capfd.readouterr().out.splitlines()[-1])["rows"]
    assert row["processes"] == 2 and 1.0 <= row["ratio"] < 1.001, row


def test_plan_takes_steps_from_epochs_and_dtype_from_gpu(reader):
    assert reader["dtype"] == "bfloat16"
    assert reader["steps"] == 100  # two epochs, two rows per step
    on = reader["gpus"]["A100-80"]
    assert on["step_seconds"] > 0
    assert on["run_hours"] == pytest.approx(100 * on["step_seconds"] / 3600)


def test_plan_time_uses_peak_share(folders):
    gpu, config = mfu.GPUS["L40S"], configured(folders, "reader", "peak_share=0.25")
    rehearsal = Rehearsal(sharding.make_mesh(2, devices=jax.devices()[:2]))
    step = plan.RehearsedStep(rehearsal, {}, "bfloat16", 1, gpu.flops, 1800)
    on = plan.on_gpu(gpu, config, step, traffic=int(gpu.bandwidth))
    assert on == {"memory_gib": 48, "fits": True, "step_seconds": 3.0, "run_hours": 1.5}
    step = dataclasses.replace(step, dtype="float32")
    assert plan.on_gpu(gpu, config, step, traffic=1)["step_seconds"] is None


def test_plan_too_large_step_does_not_fit(reader, planned):
    assert reader["peak_bytes"] > 0.0005 * 2**30
    assert not reader["fits"] and not reader["gpus"]["A100-80"]["fits"]
    # Any component would do; this plan is already cached.
    roomy = planned("aligner", "mesh.devices=1", "chunk_tokens=512")
    assert "fits" not in roomy and roomy["gpus"].keys() == mfu.GPUS.keys()
    assert all(on["fits"] for on in roomy["gpus"].values())
    assert roomy["steps"] is None


HLO = """
%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%a, %b)
}

%layer (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %all-reduce.1 = (f32[8]{0}, /*index=1*/bf16[2,3]{1,0}) all-reduce(%x, %y), to_apply=%sum
}

%chunk (p: (s32[])) -> (s32[]) {
  %all-gather.1 = s32[4]{0} all-gather(%x), dimensions={0}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w.1 = (s32[], f32[8]) while(%t), condition=%c, body=%layer, backend_config={"known_trip_count":{"n":"5"}}
  %w.2 = (s32[]) while(%t), condition=%c, body=%chunk
  %y.1 = f32[16]{0} add(%a, %b)
  %reduce-scatter.1 = f32[2]{0} reduce-scatter(%y.1), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
  %all-reduce.3 = f32[9]{0} all-reduce(%x), replica_groups={{0},{1}}, to_apply=%sum
  %all-reduce.4 = f32[9]{0} all-reduce(%x), replica_groups=mesh['data'=1,'fsdp'=2] {'data'}, to_apply=%sum
  %all-reduce.5 = f32[3]{0} all-reduce(%x), replica_groups=mesh['data'=1,'fsdp'=2] {'data','fsdp'}, to_apply=%sum
  %all-reduce.6 = f32[5]{0} all-reduce(%x), replica_groups=mesh['a'=8] {'a':(2)4}, to_apply=%sum
  ROOT %all-reduce-start.2 = f32[] all-reduce-start(%z), to_apply=%sum
}
"""  # noqa: E501


def test_plan_collectives_in_loop_count_per_iteration():
    assert collectives(HLO, loops=3) == {
        "all-reduce": (5 + 1 + 2, 5 * (32 + 12) + 4 + 12 + 20),
        "all-gather": (3, 3 * 16),
        "reduce-scatter": (1, 64),
    }
    assert collectives("") == {}


@pytest.mark.parametrize(
    ("component", "settings", "message"),
    [
        ("reader", "mesh.devices=4 mesh.data=3", "mesh sizes .* do not fit 4 devices"),
        ("reader", "mesh.devices=3", "config.batch_size=2 must be a multiple of 3"),
        # Training also refuses these, before it opens the model.
        ("aligner", "data.units=word model.spec=nobody", "config.data.units='word' is not one of"),
        ("aligner", "head.rounds=1 head.steps=0 model.spec=nobody", "config.head.steps=0 must be"),
        (
            "aligner",
            "batch_size=12 negatives=in_batch negative_groups=2 model.spec=nobody",
            "cannot be divided into 2 groups",
        ),
        ("aligner", "mesh.devices=3 mesh.tensor=3", "config.mesh.tensor=3 does not divide .* 4 h"),
        ("reader", "gpu=H1000", "config.gpu='H1000' is not one of null, B200, "),
        ("reader", "memory_gib=-1", "config.memory_gib=-1.0 must not be negative"),
        ("reader", "peak_share=0", "config.peak_share=0.0 must be above 0"),
        ("reader", "num_epochs=0", "config.num_epochs or config.num_steps must be above 0"),
        (
            "reader",
            "model.spec=nobody/nothing",
            "the shape of model 'nobody/nothing' is unknown",
        ),
    ],
)
def test_plan_bad_input_is_refused(folders, component, settings, message):
    with pytest.raises(UserError, match=message):
        plan.plan(configured(folders, component, *settings.split()))


@pytest.mark.parametrize("component", ["aligner", "cross_encoder", "reader"])
def test_plan_tokens_beyond_table_are_refused(folders, tmp_path, component):
    kind = "decoder" if component == "reader" else "encoder"
    shutil.copytree(folders / kind, tmp_path / kind)
    tiny.add_words(tmp_path / kind, "zyx")
    with pytest.raises(UserError, match="tokens without a row in the embedding table.*'zyx'"):
        plan.plan(configured(tmp_path, component))


def test_plan_config_without_training_is_refused():
    with pytest.raises(UserError, match="--config is not a training config"):
        plan.plan(load_config(str(_ROOT / "configs/retrieval.py"), [], _EXTEND))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),  # rounded as in their model cards
        ("meta-llama/Meta-Llama-3-8B-Instruct", 8_030_261_248),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("intfloat/e5-large-v2", 334_092_288),
        ("BAAI/bge-m3", 566_705_152),
        ("BAAI/bge-reranker-v2-m3", 566_705_152),
    ],
)
def test_plan_known_shapes_have_known_parameter_counts(name, count):
    folder = shape_folder(name)
    if name.startswith(("intfloat", "BAAI")):
        config, _ = pretrained.read_config(folder)
        state = nnx.state(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))
        assert sum(leaf.size for leaf in jax.tree.leaves(state)) == count
    else:
        config, _ = pretrained_decoder.read_decoder_config(folder)
        assert tiny_decoder.parameter_count(config) == count


def test_plan_command_uses_requested_devices(command, folders, tmp_path):
    flags = [
        "--config=configs/aligner.py",
        *(f"--config.{setting}" for setting in TINY["aligner"]),
        f"--config.model.spec={folders / 'encoder'}",
        "--config.mesh.devices=2",
        f"--workdir={tmp_path / 'plan'}",
    ]
    done = command("plan.py", *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mesh"] == {"data": 2, "fsdp": 1, "tensor": 1}
    assert "| peak " in done.stderr and "These are estimates" in done.stderr
    done = command("plan.py", *flags, "--config.gpu=abacus")
    assert done.returncode == 2 and done.stderr.count("\n") == 1

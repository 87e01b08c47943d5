"""What goes wrong outside of us: errors of the backend, memory that runs out, a device that is lost. Typed errors, state as before, and a retry."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import wgattn
from tests import child
from tests.attention.test_pipeline import History
from tests.faults import Faults
from tests.llm.make_gguf import write_llama_gguf
from tests.watch import live_objects
from wgattn import AttentionPipeline, CapacityError, Device, DeviceError, FusedAttention, FusedMLP, Llama, Rope
from wgattn.gpu import Arena, Readback
from wgattn.gpu import device as device_module

TINY = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vocab": 262}


@pytest.fixture
def faults(device, monkeypatch) -> Faults:
    return Faults(device, monkeypatch)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("failures") / "tiny.gguf"
    write_llama_gguf(path, **TINY, kinds="Q8_0", seed=1)
    return path


def nothing(thing: Any) -> None:
    """To check where there is no state."""


# ---- errors of the backend


def test_every_use_that_fails_raises_our_error_and_can_be_tried_again(device, faults):
    numbers = itertools.count(1000)
    data = np.arange(6, dtype=np.float32)
    tensor = device.tensor(data)
    ones = np.ones((3, 1, 1, 3, 4), np.float32)
    states = [np.ones((2, 4), np.float32), np.ones(2, np.float32)] * 2
    calls: dict[str, Callable[[], Any]] = {
        "buffer": lambda: device.buffer(64),
        "tensor": lambda: device.tensor(data),
        "uniform": lambda: device.uniform(next(numbers).to_bytes(16, "little")),
        "arena": lambda: Arena(device, 1 << 10).tensor(data),
        "read": lambda: tensor.numpy(),
        "readback": lambda: Readback(tensor),
        "wait": lambda: device.wait() or True,
        "kernel": lambda: device.kernel("parts/pack_f16", WORKGROUP=next(numbers) % 256 + 1).pipeline,
        "profile": lambda: Device().profile,
        "sdpa": lambda: wgattn.sdpa(*ones, device=device),
        "merge": lambda: wgattn.merge_state(*states, device=device),
    }
    for name, call in calls.items():
        for turn in range(len(faults.errors)):
            assert faults.each(lambda: None, lambda _, call=call: call(), nothing), name
            faults.errors.append(faults.errors.pop(0))
            if name == "profile" and turn:
                break
    np.testing.assert_array_equal(tensor.numpy(), data)


def test_a_failed_write_writes_nothing(device, faults):
    tensor = device.tensor(np.zeros(6))
    assert faults.fail(0, faults.errors[0], lambda: tensor.write(np.ones(6))) is None
    assert not tensor.numpy().any()
    tensor.write(np.ones(6))
    assert tensor.numpy().all()


def test_an_error_that_is_not_the_backends_stays_what_it_is(device):
    for error in (KeyError("mine"), ValueError("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)), device.guard("do something"):
            raise error
    with pytest.raises(CapacityError, match="to do something"), device.guard("do something"):
        raise MemoryError("host memory")
    assert not device.lost


# ---- pipelines


def small(device: Device, **options: Any) -> AttentionPipeline:
    return AttentionPipeline(4, 2, 8, **{"capacity": 16, "growth": 8, "device": device, **options})


@pytest.mark.parametrize("length", [6, 16], ids=["room", "growth"])
@pytest.mark.parametrize("act", ["decode", "prefill", "masked", "keep", "fork", "tensors"])
def test_pipelines_keep_their_state_and_go_on(device, rng, faults, act, length):
    """Whatever use of the backend fails, the sequence is as before, and the same call then gives the bits that it gives to a twin."""
    pipe = small(device)
    history = History(rng, pipe)
    given, prompt, mask = history.draw(1), history.draw(3), rng.random((3, length + 3)) < 0.5
    tensors = [device.tensor(a) for a in given]
    begun = history.draw(length)
    calls: dict[str, Callable[[AttentionPipeline], Any]] = {
        "decode": lambda p: p.decode(*given),
        "prefill": lambda p: p.prefill(*prompt),
        "masked": lambda p: p.prefill(*prompt, mask),
        "keep": lambda p: p.keep([(0, 1), (3, 2)]) or p,
        "fork": lambda p: p.fork(),
        "tensors": lambda p: p.decode(*tensors),
    }
    call = calls[act]

    def outcome(result: Any) -> np.ndarray:
        result = result.decode(*given) if isinstance(result, AttentionPipeline) else result
        return result if isinstance(result, np.ndarray) else result.numpy()

    def prepare() -> AttentionPipeline:
        made = small(device)
        made.prefill(*begun)
        return made

    pipe = prepare()
    keys, values = pipe.cache.k(length), pipe.cache.v(length)
    wanted = outcome(call(pipe))

    def check(made: AttentionPipeline) -> None:
        assert made.length == length
        np.testing.assert_array_equal(made.cache.k(length), keys)
        np.testing.assert_array_equal(made.cache.v(length), values)
        np.testing.assert_array_equal(outcome(call(made)), wanted)

    failures = faults.each(prepare, call, check, step=1 if length == 6 else 3)
    assert failures >= 3


def test_a_pipeline_that_cannot_be_made_leaves_nothing_behind(device, faults):
    kept = small(device)
    before = live_objects()
    assert faults.each(lambda: None, lambda _: small(device), nothing) >= 6
    assert live_objects() == before
    assert kept.length == 0


# ---- blocks


@pytest.mark.parametrize("act", ["decode", "prefill"])
def test_blocks_keep_their_state_and_go_on(device, rng, faults, act):
    E, H, KV, D = 32, 4, 2, 8
    shapes = {"norm": (E,), "wq": (H * D, E), "wk": (KV * D, E), "wv": (KV * D, E), "wo": (E, H * D)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    def make() -> FusedAttention:
        return FusedAttention(weights, num_heads=H, num_kv_heads=KV, head_dim=D, rope=Rope(dim=D), capacity=16, device=device)

    x = rng.standard_normal((9, E)).astype(np.float32)
    block, twin = make(), make()
    for made in (block, twin):
        made.prefill(x[:4])
    keys = twin.cache.k()
    new = x[4:5] if act == "decode" else x[4:]
    wanted = getattr(twin, act)(new)

    def check(made: FusedAttention) -> None:
        assert made.length == 4
        np.testing.assert_array_equal(made.cache.k(), keys)

    def call(made: FusedAttention) -> np.ndarray:
        y = getattr(made, act)(new)
        np.testing.assert_array_equal(y, wanted)
        made.truncate(4)
        return y

    assert faults.each(lambda: block, call, check) >= 5
    mlp = FusedMLP({"norm": weights["norm"], **{n: rng.standard_normal((E, E)) for n in ("gate", "up", "down")}}, device=device)
    wanted_mlp = mlp(new)
    assert faults.each(lambda: mlp, lambda m: m(new), lambda m: np.testing.assert_array_equal(m(new), wanted_mlp)) >= 5


# ---- models


@pytest.mark.parametrize("act", ["prefill", "decode", "greedy", "sampled"])
def test_models_keep_their_state_and_go_on(device, faults, tiny, act):
    """Generation that fails ends, with the tokens in the sequence that it has given out; the sequence can be gone on with."""
    model = Llama.from_gguf(tiny, kv_dtype="f32", capacity=160, device=device)
    prompt = list(range(70))  # two chunks on a CPU
    options = {"temperature": 0.0} if act == "greedy" else {"temperature": 1.0, "seed": 3}
    calls: dict[str, Callable[[list], Any]] = {
        "prefill": lambda _: model.prefill(prompt),
        "decode": lambda _: model.decode(9),
        "greedy": lambda found: [found.append(t) or t for t in model.generate([3], 40, stop_ids=(), **options)],
        "sampled": lambda found: [found.append(t) or t for t in model.generate([3], 5, stop_ids=(), **options)],
    }

    def prepare() -> list[int]:
        model.reset()
        model.prefill([5, 6, 7])
        return []

    prepare()
    wanted = calls[act]([])
    model.reset()
    model.prefill([5, 6, 7])
    after = model.decode(11)

    def check(found: list[int]) -> None:
        if act in ("greedy", "sampled") and model.length > 3:
            assert found == wanted[: len(found)]
            assert len(found) == model.length - 3
        else:
            assert (model.length, found) == (3, [])
            np.testing.assert_array_equal(model.decode(11), after)

    step = {"decode": 1, "greedy": 5}.get(act, 3)
    assert faults.each(prepare, calls[act], check, first=0, step=step) >= 5
    assert faults.each(prepare, calls[act], check, first=1, step=step) >= 5


def test_a_model_that_cannot_be_loaded(device, faults, tiny, rng):
    """Any use of the backend may fail while it is loaded; the next attempt works."""
    wanted = Llama.from_gguf(tiny, capacity=16, device=device).prefill([1, 2])
    faults.uses.clear()
    Llama.from_gguf(tiny, capacity=16, device=device)
    uses = len(faults.uses)
    assert uses > 30
    for number in (0, *rng.integers(1, uses // 2, 5).tolist()):  # later ones depend on which uniforms others hold
        assert faults.fail(number, faults.errors[number % 4], lambda: Llama.from_gguf(tiny, capacity=16, device=device)) is None
    np.testing.assert_array_equal(Llama.from_gguf(tiny, capacity=16, device=device).prefill([1, 2]), wanted)


def test_a_kernel_that_does_not_compile_today(rng, monkeypatch):
    """Compiling fails when a pipeline is made, and when another way to attend is first needed: nothing has changed, and later it works."""
    device = Device()
    attempts = []

    def fail(self: Any, gpu: Any, text: str, label: str, checked: bool) -> Any:
        attempts.append(label)
        raise device.api.GPUValidationError(f"injected: {label} does not compile")

    assert device.profile
    with monkeypatch.context() as patched:
        patched.setattr(type(device.backend), "create_module", fail)
        with pytest.raises(DeviceError, match="injected"):
            small(device)
    pipe = small(device)
    history = History(rng, pipe)
    history.check(3)
    mask = rng.standard_normal((2, 5)).astype(np.float32)
    with monkeypatch.context() as patched:
        patched.setattr(type(device.backend), "create_module", fail)
        with pytest.raises(DeviceError, match=r"could not compile attention/.*injected"):
            pipe.prefill(*history.draw(2), mask)
    assert len(attempts) >= 2
    history.check_state()
    history.check(2, mask)


def test_a_device_that_does_not_open(device, monkeypatch):
    for error in (device.api.GPUError("injected"), RuntimeError("injected")):

        def refuse(*args: Any, error: Exception = error, **kwargs: Any) -> Any:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(type(device.backend), "request_device", refuse)
            with pytest.raises(DeviceError, match=r"refuses to open a device: injected"):
                Device()
    with monkeypatch.context() as patched:
        patched.setattr(type(device.backend), "adapters", lambda self: [])
        with pytest.raises(DeviceError, match="No WebGPU adapter was found"):
            Device()
    assert Device().tensor(np.ones(3)).numpy().all()


def test_a_process_that_is_not_the_backends(device, monkeypatch):
    """As in a fork: told before anything waits for threads that stayed behind."""
    pipe = small(device)
    with monkeypatch.context() as patched:
        patched.setattr(device.backend, "_process", 1)
        for call in (lambda: device.tensor(np.ones(3)), pipe.reset, Device, wgattn.list_adapters):
            with pytest.raises(DeviceError, match=r"process 1, of which this one is a fork"):
                call()
    pipe.reset()


# ---- memory that really runs out


def test_memory_that_runs_out_is_a_capacity_error_and_the_device_goes_on():
    """In a process that may have little more than it has."""
    printed = child.check("""
import gc, resource
import numpy as np
import wgattn

device = wgattn.default_device()
one = device.tensor(np.ones(8))
pipe = wgattn.AttentionPipeline(1, 1, 64, capacity=4, growth=400_000, device=device)
q = np.ones((1, 4, 1, 64), np.float32)
first = pipe.prefill(q, q, q)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), used + (300 << 20)))
held = []
try:
    while len(held) < 100:
        held.append(device.empty((8 << 20,)))
    raise SystemExit("there is memory without end")
except wgattn.CapacityError as error:
    print(len(held), "tensors, then:", error)
try:
    pipe.decode(q[:, :1], q[:, :1], q[:, :1])
    raise SystemExit("the cache grew")
except wgattn.CapacityError as error:
    print("growth:", error)
assert (pipe.length, pipe.capacity) == (4, 4) and pipe.cache.k(4).all()
assert one.numpy().all() and not device.lost
held.clear()
gc.collect()
pipe.growth = 4
print(pipe.decode(q[:, :1], q[:, :1], q[:, :1]).max())
""")
    assert "33554432 bytes" in printed
    assert "growth: " in printed
    assert printed.splitlines()[-1] == "1.0"


# ---- a device that is lost

LOST = r"(?s)is lost, and all that was on it.* Make a new Device"


def test_a_lost_device_says_so_in_every_call_and_others_go_on(tiny, rng, monkeypatch):
    device = Device()
    pipe, model, tensor = small(device), Llama.from_gguf(tiny, capacity=32, device=device), device.tensor(np.ones(3))
    given = [rng.standard_normal((1, 1, heads, 8)).astype(np.float32) for heads in (4, 2, 2)]
    pipe.prefill(*given)
    model.prefill([1])
    generator = model.generate([2], 20, stop_ids=())
    next(generator)
    assert not device.lost
    device.gpu.destroy()
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: next(generator),
        "decode": lambda: pipe.decode(*given),
        "prefill": lambda: pipe.prefill(*given),
        "fork": lambda: pipe.fork(),
        "model": lambda: model.decode(1),
        "read": lambda: tensor.numpy(),
        "write": lambda: tensor.write(np.ones(3)),
        "make": lambda: device.tensor(np.ones(3)),
        "sdpa": lambda: wgattn.sdpa(*given, layout="bshd", device=device),
        "wait": lambda: device.wait(),
        "pipeline": lambda: small(device),
    }
    for name, call in rng.permutation(list(calls.items())):
        with pytest.raises(DeviceError, match=LOST):
            call()
        assert device.lost, name
    assert (pipe.length, model.length) == (1, 2)

    monkeypatch.setattr(device_module, "_default", device)
    fresh = wgattn.default_device()
    assert fresh is not device
    assert wgattn.default_device() is fresh
    history = History(rng, small(fresh))
    history.check(3)
    history.check(1)




LOSING = """
import numpy as np
import pytest
from tests.faults import Faults
from wgattn import AttentionPipeline, Device, DeviceError

given = [np.ones((1, 1, heads, 8), np.float32) for heads in (4, 2, 2)]
number, uses = 0, []
while number == 0 or number < len(uses):
    device = Device()
    pipe = AttentionPipeline(4, 2, 8, capacity=4, growth=4, device=device)
    pipe.prefill(*(np.repeat(a, 4, 1) for a in given))
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(device, patch)
        if not uses:
            pipe.decode(*given)
            uses = list(faults.uses)
            continue
        faults.arm(number, device.gpu.destroy)
        print(number, uses[number], flush=True)
        if uses[number] != "queue.submit":
            with pytest.raises(DeviceError, match="is lost"):
                pipe.decode(*given)
            assert device.lost and pipe.length == 4
    number += 1 if uses[number].startswith(("queue", "buffer", "encoder")) else 2
print("all", len(uses))
"""


def test_a_device_that_is_lost_between_any_two_uses_ends_no_process():
    """Whatever is next, it raises. (A device that a driver loses inside a submit still ends the process: that is how wgpu-native reports it.)"""
    printed = child.check(LOSING)
    assert "queue.submit" in printed
    assert "buffer.read_mapped" in printed
    assert int(printed.split()[-1]) > 20

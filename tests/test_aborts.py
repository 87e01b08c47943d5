"""wgpu-native ends the process where it ought to raise: on submitting a command buffer twice, a buffer that is destroyed or mapped, or to a lost
device; and on shader text that was freed. No public call comes that far: the source shows it, and processes that try go on."""

import ast
from pathlib import Path

import pytest

import wgattn
from tests import child

SOURCES = sorted(Path(wgattn.__file__).parent.rglob("*.py"))


def calls_of(name: str) -> list[tuple[str, ast.Call]]:
    """(file, call) of every call of a method of that name in the package."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
                found.append((path.name, node))
    return found


def test_work_is_submitted_in_one_place_and_only_what_has_just_been_finished():
    (place,) = calls_of("submit")
    assert place[0] == "device.py"
    assert ast.unparse(place[1]) == "self.gpu.queue.submit([encoder.finish()])"
    assert [name for name, call in calls_of("create_command_encoder")] == ["device.py"]


def test_nothing_is_destroyed_and_only_readbacks_are_mapped():
    assert calls_of("destroy") == []
    assert [name for name, _ in calls_of("map_async") + calls_of("unmap")] == ["staging.py"] * 2
    assert calls_of("map_sync") + calls_of("read_buffer") == []


def test_nothing_is_made_in_the_backend_without_a_guard():
    """Every call of `create_...` and of the queue stands in a `with device.guard(...)` or `device.commands()` block."""
    names = {"write_buffer", "read_buffer", "submit", "map_async"}
    bare = []
    for path in SOURCES:
        if path.name == "webgpu.py":  # the backend itself
            continue
        guarded: set[int] = set()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.With) and any(ast.unparse(i.context_expr).split("(")[0].endswith((".guard", ".commands")) for i in node.items):
                guarded |= {id(inner) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ".gpu." in ast.unparse(node.func)
            if called and (node.func.attr.startswith("create_") or node.func.attr in names) and id(node) not in guarded:
                bare.append(f"{path.name}:{node.lineno} {node.func.attr}")
    assert bare == []


START = """
import gc, os, sys, threading
import numpy as np
import wgattn
from wgattn import AttentionPipeline, Device, DeviceError, Llama
from tests.llm.make_gguf import write_llama_gguf

rng = np.random.default_rng()

def draw(pipe, S=1):
    heads = pipe.num_heads, pipe.num_kv_heads, pipe.num_kv_heads
    return [rng.standard_normal((1, S, h, pipe.head_dim)).astype(np.float32) for h in heads]

def make(device, **options):
    pipe = AttentionPipeline(4, 2, 8, **{"capacity": 8, "growth": 8, "device": device, **options})
    pipe.prefill(*draw(pipe, 5))
    pipe.decode(*draw(pipe))
    return pipe

def model(path=sys.argv[1], **options):
    if not os.path.exists(path):
        write_llama_gguf(path, layers=2, dim=32, heads=2, kv_heads=1, ffn=64, vocab=262, kinds="Q4_0")
    return Llama.from_gguf(path, **{"capacity": 300, **options})
"""

SCENARIOS = {
    "the device is dropped before what is on it": """
device = Device()
pipe, tensor = make(device), device.tensor(np.arange(4.0))
del device
gc.collect()
fork = pipe.fork()
del pipe
gc.collect()
out = fork.decode(*(tensor.device.tensor(a) for a in draw(fork)))
del fork
gc.collect()
assert np.isfinite(out.numpy()).all()
assert tensor.numpy().tolist() == [0, 1, 2, 3]
""",
    "parts of the backend are dropped in any order": """
for turn in range(5):
    device = Device()
    pipe, tensor = make(device), device.tensor(np.ones(4))
    parts = [device.gpu, device.gpu.queue, device.adapter, tensor.buffer, pipe._decode, pipe._readback, pipe.cache.keys, device._kernels, device._uniforms]
    del device, pipe, tensor
    gc.collect()
    for i in rng.permutation(len(parts)):
        parts[i] = None
        gc.collect()
""",
    "garbage is collected all the time": """
gc.set_threshold(1, 1, 1)
device = Device()
pipe = make(device, capacity=8)
for _ in range(15):
    pipe.decode(*draw(pipe))
    assert np.isfinite(wgattn.sdpa(*np.ones((3, 1, 1, 2, 4), np.float32), device=device)).all()
""",
    "shaders are compiled while garbage is collected": """
gc.set_threshold(1, 1, 1)
device = Device()
for workgroup in range(1, 60):
    device.kernel("parts/pack_f16", WORKGROUP=workgroup).pipeline
    bytearray(5000)
""",
    "what a step uses is dropped while it runs": """
device = Device()
for _ in range(30):
    pipe = make(device)
    pipe.decode(*(device.tensor(a) for a in draw(pipe)))
    pipe.prefill(*(device.tensor(a) for a in draw(pipe, 3)))
    pipe.cache = pipe._out = pipe._input = None
    del pipe
    gc.collect()
device.wait()
""",
    "an exception leaves a pass open": """
device = Device()
pipe = make(device)
class Mine(Exception): pass
for _ in range(5):
    try:
        with device.commands() as encoder:
            compute_pass = encoder.begin_compute_pass()
            pipe._recording().encode(compute_pass)
            raise Mine
    except Mine:
        pass
    gc.collect()
    pipe.decode(*draw(pipe))
""",
    "a read is given up half way": """
device = Device()
pipe = make(device)
buffer = type(pipe._readback._staging._buffer)
promise = type(pipe._readback._staging._buffer.map_async("READ_NOSYNC"))
def always(self):  # wgpu-py waits only for what is not there yet, and on a busy machine the copy may be
    self._sync_wait()
    return self._resolve()
promise.sync_wait = always
for kind, name in ((buffer, "map_async"), (promise, "sync_wait"), (promise, "_sync_wait"), (buffer, "read_mapped"), (buffer, "unmap")):
    for before in (True, False):
        original = getattr(kind, name)
        def interrupted(self, *args, **kwargs):
            setattr(kind, name, original)
            if not before:
                original(self, *args, **kwargs)
            raise KeyboardInterrupt
        length = pipe.length
        setattr(kind, name, interrupted)
        try:
            pipe.decode(*draw(pipe))
            raise SystemExit("not interrupted")
        except KeyboardInterrupt:
            assert pipe.length == length
        pipe.decode(*draw(pipe))
        assert pipe.length == length + 1
        setattr(kind, name, interrupted)
        try:
            pipe.cache.k(3)
            raise SystemExit("not interrupted")
        except KeyboardInterrupt:
            assert np.isfinite(pipe.cache.k(3)).all()
""",
    "a pipeline is used after reset, truncate, keep and growth, and its forks outlive it": """
device = Device()
pipe = make(device)
forks = [pipe.fork() for _ in range(4)]
tensors = [device.tensor(a) for a in draw(pipe)]
outs = [f.decode(*tensors) for f in forks]
pipe.reset(); pipe.decode(*tensors)
for turn in range(40):
    fork = forks[turn % 4]
    fork.decode(*(outs[turn % 4] if fork.num_heads == 2 else a for a in tensors))
    if turn % 7 == 0: fork.truncate(fork.length // 2)
    if turn % 5 == 0: fork.keep([(1, 1), (3, fork.length - 3)] if fork.length > 3 else [])
    if turn == 20:
        del pipe
        gc.collect()
old = forks[0]._out
forks[0].prefill(*draw(forks[0], 20))
assert np.isfinite(old.numpy()).all()
""",
    "generators are left open, dropped and overtaken": """
one = model()
for turn in range(10):
    one.reset()
    generator = one.generate([1, 2], 60, stop_ids=(), temperature=float(turn % 2))
    for _ in range(3 + turn):
        next(generator)
    if turn % 3 == 0: generator.close()
    if turn % 3 == 1: del generator
    one.decode(3)
    list(one.generate([4], 9, stop_ids=()))
left = one.generate([1], 60, stop_ids=())
next(left)
next(left)
""",
    "threads share a pipeline and a model": """
device = Device()
pipe, shared = make(device, capacity=4, growth=3), model()
failures = []
def work(number):
    try:
        for turn in range(25):
            if number % 2: pipe.decode(*draw(pipe))
            else: shared.decode(turn)
            if turn % 9 == 0: pipe.fork().decode(*draw(pipe))
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
for t in threads: t.start()
for t in threads: t.join()
assert not failures, failures
assert (pipe.length, shared.length) == (6 + 50, 50)
""",
    "a process forks": """
import signal
if hasattr(os, "fork"):
    device = wgattn.default_device()
    pipe, tensor = make(device), device.tensor(np.ones(3))
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        for call in (tensor.numpy, lambda: pipe.decode(*draw(pipe)), Device, lambda: wgattn.sdpa(*np.ones((3, 1, 1, 2, 4), np.float32))):
            try:
                call()
                os._exit(1)
            except DeviceError as error:
                assert "fork" in str(error)
        del pipe, tensor, device
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    pipe.decode(*draw(pipe))
""",
}


@pytest.mark.parametrize("part", range(3))
def test_the_process_goes_on(tmp_path, part):
    """A third of the scenarios in one process; what it printed last is the one that ended it."""
    code = START + "".join(f"print({name!r}, flush=True)\ngc.set_threshold(700, 10, 10)\n{text}" for name, text in list(SCENARIOS.items())[part::3])
    printed = child.check(code + "\nprint('through')", str(tmp_path / "model.gguf"))
    assert printed.splitlines()[-1] == "through"


def test_the_scenarios_would_notice(device):
    """What these tests are about exists: wgpu-native does end a process that submits a mapped buffer. (Dawn raises.)"""
    code = (
        START
        + """
device = Device()
pipe = make(device)
pipe._readback._staging._buffer.map_sync("READ_NOSYNC")
encoder = device.gpu.create_command_encoder()
encoder.copy_buffer_to_buffer(pipe._out.buffer, 0, pipe._readback._staging._buffer, 0, 16)
device.gpu.queue.submit([encoder.finish()])
"""
    )
    assert (child.run(code, "none").returncode < 0) == (device.backend.name == "wgpu")

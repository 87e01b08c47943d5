"""Ctrl-C at any moment: the device stays usable, and a sequence holds exactly what was taken in."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests import child
from tests.llm.make_gguf import write_llama_gguf
from wgattn import AttentionPipeline
from wgattn.gpu import Turn, let_interrupt_in
from wgattn.gpu.guard import Waiting

TINY = {"layers": 2, "dim": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vocab": 262}

posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("interrupts") / "tiny.gguf"
    write_llama_gguf(path, **TINY, kinds="Q4_0", seed=2)
    return path


# ---- holding Ctrl-C back


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_a_use(device):
    done = []

    def work() -> None:
        with device.guard("work"):
            with device.guard("work inside"):
                press()
                done.append("inner")
            done.append("outer")
        done.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with device.guard("work"):
        pass


def test_a_wait_can_be_interrupted(device):
    """Also by what came before it; the wait's end holds interrupts back again."""
    done = []

    def work(early: bool) -> None:
        with device.guard("work"):
            if early:
                press()
            done.append("begun")
            with Waiting():
                press()
                done.append("never")

    for early in (True, False):
        with pytest.raises(KeyboardInterrupt):
            work(early)
    assert done == ["begun", "begun"]

    def calm() -> None:
        with device.guard("work"):
            with Waiting():
                done.append("waited")
            press()
            done.append("held")
            let_interrupt_in()
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        calm()
    assert done[2:] == ["waited", "held"]
    with Waiting():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    let_interrupt_in()


def test_the_handler_of_others_is_called_once_and_stays(device):
    seen = []

    def mine(number, frame) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, mine)
    try:
        with device.guard("work"):
            press()
            assert seen == []
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is mine
        for quiet in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGINT, quiet)
            with device.guard("work"):
                assert signal.getsignal(signal.SIGINT) is quiet
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_hold_nothing_back(device):
    seen = []

    def work() -> None:
        with device.guard("work"):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_other_threads_do_not_take_what_is_held(device):
    """The interrupt is the main thread's, even when another one asks for interrupts first."""
    raised = []

    def work() -> None:
        try:
            let_interrupt_in()
        except BaseException as error:
            raised.append(error)

    def hold() -> None:
        with device.guard("work"):
            press()
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

    with pytest.raises(KeyboardInterrupt):
        hold()
    assert raised == []


def test_an_error_and_an_interrupt_together(device):
    """The interrupt is not lost, and the error is behind it."""

    def work() -> None:
        with device.guard("work"):
            press()
            raise ValueError("mine")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, ValueError)


def test_waiting_for_a_turn_can_be_interrupted(device):
    """Another thread is busy with the pipeline, for longer than anybody wants to wait."""
    pipe = AttentionPipeline(1, 1, 4, capacity=4, device=device)
    taken, leave = threading.Event(), threading.Event()

    def busy() -> None:
        with Turn(pipe):
            taken.set()
            leave.wait(60)

    thread = threading.Thread(target=busy)
    thread.start()
    taken.wait()
    timer = threading.Timer(0.2, press)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pipe.reset()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        leave.set()
        thread.join()
    pipe.reset()


# ---- at random moments, in a process of its own

LIBRARY = """
import os, random, signal, sys, threading, time
import numpy as np
from wgattn import AttentionPipeline, FusedAttention, Llama, Rope, default_device

seed, rounds = int(sys.argv[2]), int(sys.argv[3])
random.seed(seed)
rng = np.random.default_rng(seed)
model, twin = (Llama.from_gguf(sys.argv[1], kv_dtype="f32", capacity=400) for _ in range(2))
for m in (model, twin):
    m.warm_up()
pipe, other = (AttentionPipeline(4, 2, 8, capacity=4, growth=3) for _ in range(2))
E = 32
weights = {"norm": np.ones(E), **{n: rng.standard_normal((s, E)) for n, s in (("wq", 32), ("wk", 16), ("wv", 16), ("wo", 32))}}
block = FusedAttention(weights, num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(dim=8), capacity=64)
counts = {"in time": 0, "late": 0}


def interrupted(call, times=1):
    '''Make the call, with Ctrl-C somewhere in it or soon after; whether it was through.'''
    begin = time.perf_counter()
    delay = random.random() * interrupted.seconds
    def hit():
        time.sleep(delay)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=hit)
    through = False
    try:
        thread.start()
        call()
        through = True
        interrupted.seconds = 0.9 * interrupted.seconds + 0.1 * (time.perf_counter() - begin)
        thread.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        pass
    while thread.is_alive():
        try:
            thread.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass
    counts["late" if through else "in time"] += 1
    return through
interrupted.seconds = 0.02


def generates(turn):
    prompt = rng.integers(0, 262, random.choice([1, 3, 80])).tolist()
    found = []
    options = {"temperature": 1.0, "seed": turn} if turn % 3 == 0 else {}
    def call():
        for token in model.generate(prompt, 30, stop_ids=(), **options):
            found.append(token)
    through = interrupted(call, times=2 if turn % 5 == 0 else 1)
    taken = (prompt + found)[: model.length]
    possible = {len(prompt) + 29} if through else {0, len(prompt) + len(found) - 1, len(prompt) + len(found)}
    assert model.length in possible, (model.length, len(prompt), len(found))
    twin.reset()
    if taken:
        twin.prefill(taken[: len(prompt)])
        for token in taken[len(prompt) :]:
            twin.decode(token)
    np.testing.assert_array_equal(model.decode(7), twin.decode(7))
    model.reset()
    np.testing.assert_array_equal(model.prefill(prompt), (twin.reset(), twin.prefill(prompt))[1])
    model.reset()


def pipes(turn):
    steps = [[rng.standard_normal((1, S, h, 8)).astype(np.float32) for h in (4, 2, 2)] for S in (1, 3, 1, 1, 3, 1)]
    for p in (pipe, other):
        p.reset()
        p.cache.keys.write(np.zeros(p.cache.keys.shape))
    taken = []
    def call():
        for step in steps:
            taken.append(step)
            (pipe.decode if step[0].shape[1] == 1 else pipe.prefill)(*step)
            if len(taken) == 4:
                taken.append("keep")
                pipe.keep([(1, 2), (4, 2)])
    interrupted(call)
    for step in taken:
        before = other.length
        if step == "keep":
            if pipe.length == 6:
                break
            other.keep([(1, 2), (4, 2)])
        elif step is not taken[-1] or before + step[0].shape[1] == pipe.length:
            (other.decode if step[0].shape[1] == 1 else other.prefill)(*step)
    assert pipe.length == other.length, (pipe.length, other.length, len(taken))
    for copy, same in ((pipe.cache.k, other.cache.k), (pipe.cache.v, other.cache.v)):
        np.testing.assert_array_equal(copy(pipe.length), same(pipe.length))
    np.testing.assert_array_equal(pipe.decode(*steps[0]), other.decode(*steps[0]))


def blocks(turn):
    x = rng.standard_normal((40, E)).astype(np.float32)
    block.reset()
    def call():
        for part in (x[:5], x[5:6], x[6:30], x[30:31]):
            (block.decode if len(part) == 1 else block.prefill)(part)
    interrupted(call)
    assert block.length in (0, 5, 6, 30, 31)
    length = block.length
    got = block.decode(x[39:])
    block.reset()
    if length:
        block.prefill(x[:length])
    np.testing.assert_allclose(got, block.decode(x[39:]), rtol=1e-4, atol=1e-4)


for turn in range(rounds):
    for job in (generates, pipes, blocks):
        job(turn)
print(counts)
assert counts["in time"] >= rounds // 2, counts
"""


def library(path, rounds: int, timeout: float) -> None:
    seed = random.randrange(1 << 30)
    done = child.run(LIBRARY, str(path), str(seed), str(rounds), timeout=timeout)
    assert done.returncode == 0, f"seed {seed}, exit code {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    assert "ignored" not in done.stderr, f"seed {seed}: {done.stderr}"


@posix
def test_the_library_at_random_moments(tiny):
    library(tiny, 8, 120)


@posix
@pytest.mark.slow
def test_the_library_at_many_random_moments(tiny):
    for _ in range(4):
        library(tiny, 100, 900)


def command(path, delay: float | None) -> tuple[int, bytes]:
    """(exit code, text) of `wgattn generate`; with a delay, interrupted so long after its first output."""
    line = [sys.executable, "-m", "wgattn", "generate", "--model", str(path), "--tokens", "1500", "--ignore-eos", "--capacity", "1600", "xyz"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=child.ROOT) as process:
        first = process.stdout.read(1)
        if delay is not None:
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert b"Traceback" not in err, err.decode()
    assert b"ignored" not in err, err.decode()
    return process.returncode, first + out


def commands(path, rounds: int) -> None:
    code, whole = command(path, None)
    assert code == 0
    codes = []
    for _ in range(rounds):
        code, text = command(path, random.random() * 0.3)
        codes.append(code)
        assert code in (0, 130) or (code == -2 and len(text) >= len(whole))  # when all is done, Python no longer handles signals
        shown = text.decode(errors="replace").removesuffix("\n").rstrip("\ufffd")  # a character that was cut is shown as that
        assert whole.decode(errors="replace").startswith(shown)
    assert 130 in codes, "all were through: nothing was interrupted"


@posix
@pytest.mark.slow
def test_the_command_at_many_random_moments(tiny):
    commands(tiny, 30)

"""Section "gemm": projections of many tokens (products of matrices) and of one (a matrix by a vector), in the kinds that weights have."""

from __future__ import annotations

import numpy as np

from wgattn.block.linear import Matrix, half_fits, padded, record_linear
from wgattn.block.quant import format_of
from wgattn.cases.weights import random_matrix
from wgattn.gpu import Recording, StepState

from .records import Bench, Case, Work, arithmetic_of
from .weights import linear_error

# (tokens, rows, columns) and kinds, by the size of the device; the first line is what --quick takes.
_MANY = {
    "cpu": [((64, 1536, 576), ("F32", "Q4_1")), ((128, 2048, 2048), ("F16", "Q8_0", "Q4_0", "Q4_K"))],
    "small": [((256, 2048, 2048), ("F32", "Q4_0")), ((512, 4096, 4096), ("F16", "Q8_0", "Q4_0", "Q4_K"))],
    "large": [((512, 4096, 4096), ("F16", "Q4_0")), ((2048, 8192, 2048), ("F32", "F16", "Q8_0", "Q4_0", "Q4_K"))],
}
_ONE = {
    "cpu": [((1, 1536, 576), ("Q4_1",)), ((1, 4096, 2048), ("F32", "F16", "Q8_0", "Q4_0", "Q4_K"))],
    "small": [((1, 4096, 4096), ("Q4_0",)), ((1, 8192, 2048), ("F16", "Q8_0", "Q4_0", "Q4_K"))],
    "large": [((1, 4096, 4096), ("F16", "Q4_0")), ((1, 16384, 2048), ("F16", "Q8_0", "Q4_0", "Q4_K")), ((1, 2048, 8192), ("F16", "Q4_0"))],
}


def cases(bench: Bench) -> list[Case]:
    """Every problem in each kind and in each arithmetic that is possible."""
    found = []
    for problems in (_MANY[bench.size], _ONE[bench.size]):
        for sizes, kinds in problems[:1] if bench.quick else problems:
            for kind in kinds:
                for arithmetic in _arithmetics(bench, kind, sizes[0]):
                    problem = f"{'x'.join(map(str, sizes))} {kind}"
                    build = lambda b, s=sizes, k=kind, a=arithmetic: projection(b, *s, k, a)  # noqa: E731
                    found.append(Case("gemm", problem, arithmetic, build, 1.0 if bench.quick else 3.0))
    return found


def _arithmetics(bench: Bench, kind: str, tokens: int) -> list[str]:
    """Exact, int8 where weights are quantised, and half where there are matrix units."""
    possible = {"exact": True, "int8": format_of(kind).quantised, "half": half_fits(bench.device.profile, tokens)}
    return [name for name, is_so in possible.items() if is_so]


def projection(bench: Bench, tokens: int, rows: int, columns: int, kind: str, arithmetic: str) -> Work:
    """y (tokens, rows) = x (tokens, columns) . W^T."""
    device, rng = bench.device, bench.rng()
    weights = random_matrix(rng, rows, columns, kind)
    x = rng.standard_normal((tokens, columns), np.float32)
    given = device.tensor(np.pad(x, ((0, 0), (0, padded(columns) - columns))))
    state = StepState(device)
    state.place(0, tokens)
    outputs = []

    def record() -> Recording:
        recording, y = Recording(device), device.empty((tokens, rows))
        to = {"output": "store", "outputs": {"y": y}, "y_stride": rows}
        record_linear(recording, Matrix(device, weights), step=state.step, x=given, tokens=tokens, arithmetic=arithmetic, **to)
        outputs.append(y)
        return recording

    nbytes = weights.nbytes + 4 * (x.size + tokens * rows)
    recordings = [record() for _ in range(bench.copies(nbytes))]
    ceiling = arithmetic_of(recordings[0])

    def check():
        recordings[-1].replay()
        return linear_error(x, weights, outputs[-1].numpy(), {"f32": 1e-5, "dot4": 5e-4**0.5, "matrix": 2e-3}[ceiling])

    return Work(
        recordings,
        flops=2 * tokens * rows * columns,
        nbytes=nbytes,
        ceiling="copy" if tokens == 1 else ceiling,
        check=check,
        working_set=nbytes * len(recordings),
    )

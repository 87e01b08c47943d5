"""How long to look: every property is tried quickly in the default run, and thoroughly with `-m slow`."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from hypothesis.strategies import SearchStrategy

from wgattn import WgattnError

both_depths = pytest.mark.parametrize("depth", ["quick", pytest.param("thorough", marks=pytest.mark.slow)])


def _settings(examples: int, **more: Any) -> settings:
    """Without deadlines: machines differ, and a shader may have to be compiled in between."""
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), **more)


def explore(check: Callable[..., None], *strategies: SearchStrategy, depth: str, quick: int, thorough: int) -> None:
    """Call `check` with as many examples of the strategies as the depth says; a failing one is shrunk and printed."""

    def tried(example: tuple) -> None:
        check(*example)

    _settings(quick if depth == "quick" else thorough)(given(st.tuples(*strategies))(tried))()


def explore_states(machine: Callable[[], Any], *, depth: str, quick: tuple[int, int], thorough: tuple[int, int]) -> None:
    """Run a state machine so many times, with so many steps each at most."""
    runs, steps = quick if depth == "quick" else thorough
    run_state_machine_as_test(machine, settings=_settings(runs, stateful_step_count=steps))


def refusal(call: Callable[[], Any]) -> str | None:
    """The message of the error of ours that a call raises; None when it is through. Any other error fails the test."""
    try:
        call()
    except WgattnError as error:
        return str(error)
    return None

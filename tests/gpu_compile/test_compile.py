"""Every kernel compiled for six GPUs, every stage for three: what they use stays in limits.

With GPU_COMPILE_SHAPES=one in the environment only at one shape, for one GPU, without the cases
that are variants of others (those compiled for one GPU anyway).
"""

from __future__ import annotations

import os

import pytest

from tests.gpu_compile.cases import Case
from tests.gpu_compile.records import broken, compile_case
from tests.gpu_compile.registry import CASES
from tests.gpu_compile.targets import why_not

REASON = why_not()
ONE_SHAPE = os.environ.get("GPU_COMPILE_SHAPES") == "one"
CHOSEN = [case for case in CASES if not ONE_SHAPE or len(case.targets) > 1]
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.mark.parametrize("case", CHOSEN, ids=[case.name for case in CHOSEN])
def test_within_limits(case: Case) -> None:
    problems = []
    for shape, record in compile_case(case, one_shape=ONE_SHAPE):
        problems += broken(case, shape, record)
    assert not problems, "\n".join(problems)

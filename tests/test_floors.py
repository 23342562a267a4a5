"""Floors: bytes and operations of a decode step, by hand for one case."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.floors import main, step_floor
from kvdrive_jax.models.presets import LLAMA_3_8B_GRADIENT_1048K
from kvdrive_jax.plan import work as floors
from kvdrive_jax.plan.hardware import HARDWARE

TARGETS = Path(__file__).parent / "gpu_compile" / "targets"
CASE = floors.Case(model=LLAMA_3_8B_GRADIENT_1048K, context=131072, batch=8)
H200 = HARDWARE["h200"]


@pytest.mark.parametrize("name", HARDWARE)
def test_bandwidth_is_that_of_the_compile_target(name: str) -> None:
    text = (TARGETS / f"{name}.txtpb").read_text()
    bandwidth = re.search(r"memory_bandwidth: (\d+)", text)
    assert bandwidth is not None
    assert float(bandwidth[1]) == pytest.approx(HARDWARE[name].hbm, rel=1e-3)
    memory = re.search(r"device_memory_size: (\d+)", text)
    assert memory is not None
    assert int(memory[1]) == HARDWARE[name].memory
    assert HARDWARE[name].source


def test_bytes_by_hand() -> None:
    # 8 sessions x 8 kv heads; (2,048 selected + 4 + 64 + 128 near) tokens of 512 bytes.
    assert floors.sparse_attention(CASE).hbm_bytes == 64 * (2048 + 196) * 512
    assert floors.full_attention(CASE).hbm_bytes == 64 * 131072 * 512
    # 51.2 of 512 chunks missed, 2,048 bytes each, read and written.
    assert floors.page_write(CASE).hbm_bytes == pytest.approx(2 * 64 * 51.2 * 2048)
    assert floors.fetch(CASE).pcie_bytes == pytest.approx(64 * 51.2 * 2048)
    assert floors.weights_per_layer(CASE.model) == 218_103_808


def test_the_longer_of_bytes_and_operations() -> None:
    work = floors.Work(name="x", part="model", times=1, hbm_bytes=4800e9, tensor_ops=2 * 989.4e12)
    assert work.seconds(H200) == pytest.approx(2.0)
    assert replace(work, tensor_ops=0).seconds(H200) == pytest.approx(1.0)


def test_fetch_hides_behind_the_rest_until_it_is_longer() -> None:
    hidden = step_floor(floors.decode_works(CASE), H200)
    assert hidden.fetch < hidden.compute == hidden.total
    bound = step_floor(floors.decode_works(replace(CASE, hit_rate=0.5)), H200)
    assert bound.compute < bound.fetch == bound.total


def test_smaller_indexes_cost_less() -> None:
    times = [
        floors.scoring(replace(CASE, index=index, scan_one_in=scan)).seconds(H200)
        for index, scan in (("moments:8", 1), ("moments:4", 1), ("moments:2", 1), ("moments:2", 4))
    ]
    assert times == sorted(times, reverse=True)


def test_share_of_selection_and_attention() -> None:
    """What the aim of 15 % comes to: attention alone takes most of it at this batch."""
    step = step_floor(floors.decode_works(CASE), H200)
    assert 0.09 < step.share("attend") < 0.11
    assert step.share("select", "attend") == pytest.approx(
        step.share("select") + step.share("attend")
    )
    alone = replace(CASE, batch=1)
    assert step_floor(floors.decode_works(alone), H200).share("select", "attend") < 0.15


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "qwen3-14b", "--context", "32K", "--gpu", "a100"]) == 0
    out = capsys.readouterr().out
    assert "32,768 tokens" in out
    assert "sparse attention" in out
    assert "A100" in out
    assert main(["--index", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [{"hit_rate": 1.5}, {"batch": 0}])
def test_bad_values(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        replace(CASE, **bad)

"""Traces that the window figures are made from: recorded once, kept in a folder, read again.

Every text of `index_texts` with its given answer, and two answers that the model makes itself; by
the rules that the paper compares, each in the geometry of its system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.index_texts import all_texts, prose
from benchmarks.probes import forced_tokens
from kvdrive_jax.config import KVDriveConfig, RetrievalConfig
from kvdrive_jax.engine import Engine
from kvdrive_jax.models.tokenizer import Tokenizer
from kvdrive_jax.pipeline.recorder import TraceRecorder
from kvdrive_jax.window.trace import Trace, read_traces, write_traces

STEPS = 224
"""Decoded after each prompt. The first `SKIP` are not counted: they show the warm-up."""
SKIP = 16
TOKENS = 6600
BUDGET = 512
"""Tokens attended to while recording; a replay may take another budget."""

TEXTS = ("licence", "needle", "needles", "code", "chat", "copying", "summary", "explain")
RULES = {
    "KVDrive, moments": RetrievalConfig(budget=BUDGET, index="moments"),
    "KVDrive, clusters": RetrievalConfig(budget=BUDGET, index="clusters"),
    "Quest, bounds of 16": RetrievalConfig(budget=BUDGET, index="bounds:bf16", chunk_size=16),
    "ShadowKV, means of 8": RetrievalConfig(budget=BUDGET, index="chunks:bf16", chunk_size=8),
}
"""Selection rules of paper table 3; the first is this project's default."""
DEFAULT_RULE = "KVDrive, moments"


@dataclass(frozen=True)
class Wanted:
    """One trace: a rule of `RULES`, a text of `TEXTS`, about so many prompt tokens."""

    text: str
    rule: str = DEFAULT_RULE
    tokens: int = TOKENS
    steps: int = STEPS

    @property
    def file(self) -> str:
        """Its name in the folder."""
        rule = "".join(c if c.isalnum() else "-" for c in self.rule)
        return f"{rule}-{self.text}-{self.tokens}-{self.steps}.npz"


def traces(wanted: list[Wanted], folder: Path) -> dict[Wanted, Trace]:
    """Every trace wanted, from the folder or recorded now with the bundled model."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [want for want in wanted if not (folder / want.file).exists()]
    for rule in dict.fromkeys(want.rule for want in missing):
        of_rule = [want for want in missing if want.rule == rule]
        config = KVDriveConfig(retrieval=RULES[rule], batch_size=1)
        with Engine.from_pretrained("demo", config) as engine:
            for want in of_rule:
                start = time.perf_counter()
                write_traces([_record(engine, want)], folder / want.file)
                print(f"recorded {want.file} in {time.perf_counter() - start:.0f} s", flush=True)
    return {want: read_traces(folder / want.file)[0] for want in wanted}


def _record(engine: Engine, want: Wanted) -> Trace:
    prompt, answer = _text(engine.tokenizer, want)
    recorder = TraceRecorder("demo")
    with _given(answer):
        for event in engine.stream_ids(
            [prompt], max_new_tokens=want.steps, ignore_eos=True, recorder=recorder
        ):
            if event.generation is not None and event.generation.error is not None:
                raise RuntimeError(f"{want.file}: {event.generation.error}")
    trace = recorder.take()[0]
    return dataclasses.replace(trace, info=dataclasses.replace(trace.info, text=want.text))


def _given(answer: list[int] | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if answer is None else forced_tokens(answer)


def _text(tokenizer: Tokenizer, want: Wanted) -> tuple[list[int], list[int] | None]:
    """Prompt and answer; no answer where the model makes it."""
    tasks = {
        "summary": "Summarise the text above in your own words, section by section.",
        "explain": "Explain to a beginner how to use what is described above, with examples.",
    }
    if want.text not in tasks:
        found = {text.name: text for text in all_texts(tokenizer, want.tokens, want.steps + 1)}
        return found[want.text].prompt, found[want.text].answer
    start = 3000 if want.text == "summary" else 12000
    ids = tokenizer.encode(prose())[start : start + want.tokens - 100]
    return tokenizer.encode_chat(f"{tokenizer.decode(ids)}\n\n{tasks[want.text]}"), None


def each(wanted: list[Wanted], folder: Path) -> Iterator[tuple[Wanted, Trace]]:
    """As `traces`, one in memory at a time."""
    for want in wanted:
        yield from traces([want], folder).items()

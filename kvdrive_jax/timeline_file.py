"""A timeline as a file that ui.perfetto.dev and chrome://tracing open (trace event format, JSON).

One process; a thread "steps" with one mark per decode step, and the lanes below it. Within a thread
a viewer takes spans that overlap for a call stack, so a lane gets as many threads as it has spans
at one time, and no two spans of a thread overlap.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvdrive_jax.files import whole_file
from kvdrive_jax.timeline import LANES, Lane, Span, Timeline

_PROCESS = 1
_STEPS = 1  # thread; those of lane i begin at 1000 * (i + 1)
_THREADS = 1000

Event = dict[str, object]


def write_timeline(timeline: Timeline, path: str, about: Mapping[str, object]) -> int:
    """Write what a timeline kept; ``about`` is told in the file. Returns how many spans."""
    spans, steps = timeline.spans(), timeline.steps
    head: dict[str, object] = {**about, "spans": len(spans), "spans_dropped": timeline.dropped}
    with whole_file(path) as file:
        file.write('{"displayTimeUnit": "ms",\n"otherData": ' + json.dumps(head))
        file.write(',\n"traceEvents": [\n')
        for number, event in enumerate(events(spans, steps, head)):
            file.write(("" if number == 0 else ",\n") + json.dumps(event))
        file.write("\n]}\n")
    return len(spans)


def events(
    spans: Sequence[Span], steps: Sequence[tuple[float, float]], about: Mapping[str, object]
) -> Iterator[Event]:
    """Trace events: names of process and threads, what the run was, steps, spans by thread.

    spans, steps: seconds; of a thread in order of time, the first of all at 0 us.
    """
    zero = min([span.start for span in spans] + [start for start, _ in steps], default=0.0)

    def at(time: float) -> int:
        return round((time - zero) * 1e9)

    yield _named("process_name", 0, name="kvdrive_jax")
    yield from _thread(_STEPS, "steps", 0)
    yield {
        "ph": "i", "name": "configuration", "s": "p", "ts": 0.0, "pid": _PROCESS, "tid": _STEPS,
        "args": dict(about),
    }  # fmt: skip
    for number, (start, end) in enumerate(steps):
        yield _complete("step", f"step {number}", at(start), at(end), _STEPS, {"step": number})
    for order, lane in enumerate(LANES):
        mine = sorted((span for span in spans if span.lane == lane), key=lambda span: span.start)
        threads = _threads(mine, at)
        first = _THREADS * (order + 1)
        many = max(threads, default=0)
        for thread in range(many + 1 if mine else 0):
            name = f"{lane} {thread + 1}" if many else lane
            yield from _thread(first + thread, name, first + thread)
        for span, thread in zip(mine, threads, strict=True):
            yield _complete(
                lane, span.name, at(span.start), at(span.end), first + thread, _told(span)
            )


def _threads(spans: Sequence[Span], at: Callable[[float], int]) -> list[int]:
    """For spans in order of start, the lowest thread that is free then."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    chosen = []
    for span in spans:
        while busy and busy[0][0] <= at(span.start):
            heapq.heappush(free, heapq.heappop(busy)[1])
        thread = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (at(span.end), thread))
        chosen.append(thread)
    return chosen


def _told(span: Span) -> dict[str, int]:
    """What a span says, without what does not apply to it."""
    numbers = {
        "layer": span.layer,
        "micro_batch": span.micro_batch,
        "cohort": span.cohort,
        "bytes": span.nbytes or -1,
        "hits": span.hits,
        "misses": span.misses,
    }
    return {name: number for name, number in numbers.items() if number >= 0}


def _complete(
    category: Lane | str, name: str, start: int, end: int, thread: int, args: Mapping[str, int]
) -> Event:
    """An event from ``start`` to ``end`` in ns; the format counts in us."""
    # Viewers cut numbers to whole ns, and drop what then overlaps the one before by a single one.
    took = max(0, end - start - 2)
    return {
        "ph": "X", "cat": category, "name": name, "ts": start / 1000, "dur": took / 1000,
        "pid": _PROCESS, "tid": thread, "args": dict(args),
    }  # fmt: skip


def _thread(thread: int, name: str, order: int) -> Iterator[Event]:
    yield _named("thread_name", thread, name=name)
    yield _named("thread_sort_index", thread, sort_index=order)


def _named(kind: str, thread: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": args}

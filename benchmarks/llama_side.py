"""llama.cpp's side of ``benchmarks.decode_cpu``, run by the interpreter that has llama-cpp-python.

    PYTHON benchmarks/llama_side.py MODEL.gguf THREADS SECONDS CONTEXT[,CONTEXT...] < TOKENS

TOKENS: a JSON list, the text that fills the cache, repeated as needed. Contexts are filled one
after another for about SECONDS; each that is reached is timed. Prints one JSON object. Imports
nothing of this project.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from importlib.metadata import version

STEPS = 12
PIECE = 512
CHECK_TOKENS, CHECK_STEPS = 200, 8


def main() -> None:
    """Times one token after each context, and the first tokens of an answer."""
    import numpy as np
    from llama_cpp import Llama

    path, threads, limit, contexts = sys.argv[1:5]
    wanted = sorted(int(part) for part in contexts.split(","))
    text = json.load(sys.stdin)
    model = Llama(
        path,
        n_ctx=wanted[-1] + PIECE,
        n_batch=PIECE,
        n_ubatch=PIECE,
        n_threads=int(threads),
        n_threads_batch=int(threads),
        flash_attn=True,
        verbose=False,
    )

    def best() -> int:
        logits = model._ctx.get_logits_ith(-1)
        return int(np.ctypeslib.as_array(logits, shape=(model.n_vocab(),)).argmax())

    model.eval(text[:CHECK_TOKENS])
    answer = [best()]
    for _ in range(CHECK_STEPS - 1):
        model.eval(answer[-1:])
        answer.append(best())
    model.reset()

    began, found = time.perf_counter(), {}
    held = 0
    for context in wanted:
        while held < context and time.perf_counter() - began < float(limit):
            count = min(PIECE, context - held)
            model.eval([text[(held + i) % len(text)] for i in range(count)])
            held += count
        if held < context:
            break
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            model.eval(text[:1])
            seconds.append(time.perf_counter() - start)
        held += STEPS
        found[context] = statistics.median(seconds[2:])
    print(json.dumps({"version": version("llama_cpp_python"), "answer": answer, "seconds": found}))


if __name__ == "__main__":
    main()

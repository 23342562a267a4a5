"""The two sides of a comparison with transformers: one interface, each in a process of its own.

Both are float32 on the CPU, one sequence, greedy. ``open`` ends after the prompt, at the first new
token; every ``step`` then is one token through the whole model, the choice of the next one
included, in seconds. Nothing is imported before a side is made, so that a worker can limit its CPUs
first.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import peak_bytes, reset_peak, resident_bytes


class Memory:
    """Memory of the process that a side lives in."""

    def resident(self) -> int:
        """Bytes held now."""
        return resident_bytes()

    def reset_peak(self) -> int:
        """Bytes held now, from which the peak is counted anew."""
        return reset_peak()

    def peak(self) -> int:
        """Most bytes held since."""
        return peak_bytes()


class Ours(Memory):
    """This project's engine.

    model: as the command takes it; config: of the engine, nested plain values; positions: a longer
    context than the model was made for, where only speed matters.
    """

    def __init__(self, model: str, config: dict[str, Any], positions: int | None = None) -> None:
        from benchmarks.probes import OneLetterTokenizer
        from kvdrive_jax import Engine
        from kvdrive_jax.config import config_from_dict
        from kvdrive_jax.models.weights import load_pretrained

        loaded = load_pretrained(model, "float32")
        if positions is not None:
            longer = replace(loaded.config, max_positions=positions)
            loaded = replace(loaded, static=replace(loaded.static, config=longer))
        memory = 2**40  # limits are not what is measured: what does not fit shows as peak memory
        tiers = {"hbm_budget": memory, "dram_budget": memory}
        settings = config_from_dict(
            {
                "dtype": "float32",
                "batch_size": 1,
                **config,
                "tiers": tiers | config.get("tiers", {}),
            }
        )
        tokenizer: Any = OneLetterTokenizer()
        self._engine = Engine(loaded, tokenizer, settings)
        self._stream: Iterator[Any] | None = None

    def prefill(self, ids: list[int]) -> float:
        """Seconds from a prompt to its KV where it belongs, index built and pages offloaded."""
        start = time.perf_counter()
        list(self._engine.stream_ids([ids], max_new_tokens=0))
        return time.perf_counter() - start

    def answer(self, ids: list[int], new_tokens: int) -> tuple[list[int], np.ndarray[Any, Any]]:
        """New tokens, and the logits [new_tokens, V] each was chosen from."""
        from benchmarks.probes import recorded_logits

        with recorded_logits() as seen:
            stream = self._engine.stream_ids([ids], max_new_tokens=new_tokens, ignore_eos=True)
            done = _generation(stream)
        return list(done.token_ids), np.stack(seen)

    def open(self, ids: list[int], steps: int, synthetic: bool) -> dict[str, Any]:
        """A prompt, real or with random KV, ready for ``steps`` steps; says where its KV lives."""
        from benchmarks.probes import synthetic_prefill

        # One token comes of the prompt; the last one, with which the session ends, is not timed.
        new_tokens = steps + 2
        plan = self._engine.plan([len(ids)], new_tokens)
        start = time.perf_counter()
        with synthetic_prefill() if synthetic else nullcontext():
            self._stream = self._engine.stream_ids(
                [ids], max_new_tokens=new_tokens, ignore_eos=True
            )
            next(self._stream)
        return {
            "open_s": time.perf_counter() - start,
            "everything_in_hbm": plan.resident,
            "window": plan.window,
            "planned_bytes": {tier: plan.used(tier) for tier in ("hbm", "dram")},
        }

    def steps(self, count: int) -> list[float]:
        """Seconds of each of ``count`` steps."""
        assert self._stream is not None
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            next(self._stream)
            seconds.append(time.perf_counter() - start)
        return seconds

    def pace(self, count: int) -> float:
        """Seconds a token, over the whole bursts within ``count`` tokens."""
        from benchmarks.probes import recorded_bursts

        assert self._stream is not None
        start = time.perf_counter()
        with recorded_bursts() as bursts:
            for _ in range(count):
                next(self._stream)
        if len(bursts) < 2:  # no bursts, or a long one
            return (time.perf_counter() - start) / count
        steps = sum(steps for _, steps in bursts[:-1])
        return (bursts[-1][0] - bursts[0][0]) / steps

    def end(self) -> dict[str, Any]:
        """Ends the session; its tokens and figures."""
        assert self._stream is not None
        done = _generation(self._stream)
        stats = self._engine.stats()
        return {
            "tokens": list(done.token_ids),
            "hit_rate": done.stats["hit_rate"],
            "attended_tokens_mean": done.stats["attended_tokens_mean"],
            "bytes": stats["bytes"],
            "stage_s": stats["stage_s"],
        }


def _generation(stream: Iterator[Any]) -> Any:
    """What a stream ends with."""
    *_, last = stream
    return last.generation


class Theirs(Memory):
    """transformers with torch: sdpa attention and a DynamicCache. folder: Hugging Face format."""

    def __init__(self, folder: str, threads: int, dtype: str = "float32") -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        ).eval()
        # The argument was renamed; the old name warns where the new one is known.
        known = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._cache: Any = None
        self._token = 0
        self._tokens: list[int] = []

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def _logits(self, ids: list[int], cache: Any) -> Any:
        with self._torch.inference_mode():
            out = self._model(
                input_ids=self._torch.tensor([ids]),
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: cache},
            )
        return out.logits[0, -1].float()

    def prefill(self, ids: list[int]) -> float:
        """Seconds from a prompt to its KV in the cache."""
        start = time.perf_counter()
        self._logits(ids, self._new_cache())
        return time.perf_counter() - start

    def logits(self, ids: list[int], tokens: list[int]) -> np.ndarray[Any, Any]:
        """Logits [N, V] after the prompt and after each of N - 1 tokens fed to it."""
        cache = self._new_cache()
        rows = [self._logits(ids, cache)] + [self._logits([token], cache) for token in tokens]
        return np.stack([row.numpy() for row in rows])

    def open(self, ids: list[int], steps: int, synthetic: bool) -> dict[str, Any]:
        """A prompt, real or with random KV."""
        start = time.perf_counter()
        self._cache, self._tokens = self._new_cache(), []
        if synthetic:
            self._fill(len(ids))
            self._token = ids[-1]
        else:
            self._choose(self._logits(ids, self._cache))
        return {"open_s": time.perf_counter() - start, "everything_in_hbm": True}

    def _fill(self, length: int) -> None:
        config = self._model.config
        size = (1, config.num_key_value_heads, length, config.head_dim)
        for layer in range(config.num_hidden_layers):
            keys, values = (self._torch.randn(size, dtype=self._model.dtype) for _ in range(2))
            self._cache.update(keys, values, layer)

    def _choose(self, logits: Any) -> None:
        self._token = int(logits.argmax())
        self._tokens.append(self._token)

    def steps(self, count: int) -> list[float]:
        """Seconds of each of ``count`` steps."""
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            self._choose(self._logits([self._token], self._cache))
            seconds.append(time.perf_counter() - start)
        return seconds

    def end(self) -> dict[str, Any]:
        """Ends the session; its tokens."""
        self._cache = None
        return {"tokens": self._tokens, "hit_rate": None}


class Conversion:
    """Makes folders that transformers opens quickly and without extra memory.

    transformers reads a GGUF file itself: tensors, their names and the row order of Q and K. Sizes
    and RoPE are those of the file's own settings.
    """

    def shape(self, name: str, layers: int, vocabulary: int, folder: str) -> None:
        """Writes ``folder`` with random weights: ``layers`` layers of a model's shape, and an
        embedding that is the head."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from benchmarks.stack_model import stack_config

        torch.manual_seed(0)
        sizes = stack_config(name, layers, 8192)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            rms_norm_eps=sizes.rms_norm_eps,
            max_position_embeddings=sizes.max_positions,
            tie_word_embeddings=True,
        )
        LlamaForCausalLM(config).save_pretrained(folder)

    def convert(self, path: str, folder: str) -> None:
        """Writes ``folder`` from ``path``."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        config = AutoConfig.from_pretrained(str(Path(path).parent), gguf_file=path)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
        missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
        if unexpected or not set(missing) <= {"lm_head.weight"}:
            raise RuntimeError(f"transformers read {path} in part: {missing}, {unexpected}")
        model.tie_weights()
        model.save_pretrained(folder)

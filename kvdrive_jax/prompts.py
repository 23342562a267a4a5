"""Prompts from a flag, a file, stdin, or one JSON object a line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from kvdrive_jax.cli_options import GenerateConfig


@dataclass(frozen=True)
class Prompt:
    """One prompt, or why there is none.

    index: its place among the prompts, from 0; line: of the input file, from 1; text is empty
    where error says why, or where a saved session goes on without a prompt.
    """

    index: int
    line: int
    text: str = ""
    error: str | None = None


def read_prompts(generate: GenerateConfig) -> list[Prompt]:
    """The prompts of one run.

    A line of --input-jsonl that holds no prompt becomes a Prompt with an error, for that line
    alone; blank lines are skipped. Raises ValueError when there is no prompt at all, when the one
    prompt is empty, or when its file cannot be read.
    """
    if generate.input_jsonl is not None:
        text = _read(generate.input_jsonl, "--input-jsonl")
        prompts: list[Prompt] = []
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                prompts.append(_from_json(line, len(prompts), number))
        if not prompts:
            raise ValueError(f"--input-jsonl: {generate.input_jsonl} holds no line")
        return prompts
    if generate.prompt_file is not None:
        text = _read(generate.prompt_file, "--prompt-file")
        where = f"--prompt-file: {generate.prompt_file}"
    elif generate.prompt is not None:
        text, where = generate.prompt, "--prompt"
    elif generate.load_session is not None:
        return [Prompt(index=0, line=1)]
    else:
        raise ValueError("give a prompt: --prompt TEXT, --prompt-file FILE or --input-jsonl FILE")
    if not text.strip():
        raise ValueError(
            f"{where} is empty: a prompt needs at least one character that is no blank"
        )
    return [Prompt(index=0, line=1, text=text)]


def _from_json(line: str, index: int, number: int) -> Prompt:
    def bad(what: str) -> Prompt:
        return Prompt(index=index, line=number, error=f"line {number}: {what}")

    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return bad(f"is not JSON: {error.msg} (column {error.colno})")
    except RecursionError:
        return bad("is nested too deeply")
    if not isinstance(value, dict):
        return bad(f"must be an object with a key 'prompt', got {_kind(value)}")
    if "prompt" not in value:
        return bad(f"has no key 'prompt'; its keys: {', '.join(value) or 'none'}")
    prompt = value["prompt"]
    if not isinstance(prompt, str):
        return bad(f"'prompt' must be a text, got {_kind(prompt)}")
    if not prompt.strip():
        return bad("'prompt' is empty")
    if any("\ud800" <= char <= "\udfff" for char in prompt):
        return bad("'prompt' holds half of a character (a lone surrogate)")
    return Prompt(index=index, line=number, text=prompt)


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _read(path: str, flag: str) -> str:
    """A file, or stdin for ``-``, as text. ValueError when it cannot be read or is not UTF-8."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{flag}: cannot read {path}: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{flag}: {path} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}"
        ) from error

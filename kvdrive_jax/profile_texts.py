"""Long prompts of several kinds to profile a model with, made of what is installed.

Python's language reference (prose), this package's source (code) and a few lines of our own. What
matters is that a model attends as it does to its users' texts: users who know theirs give files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from kvdrive_jax.models.tokenizer import Tokenizer

FACT = "The special magic number for the harbour is 7402916. Remember it."


@dataclass(frozen=True)
class Prompt:
    """A named prompt, as token ids."""

    name: str
    ids: list[int]


def built_in(tokenizer: Tokenizer, tokens: int) -> list[Prompt]:
    """Prompts of about so many tokens: a question, a summary, copying, chat and free generation."""
    prose, code = _prose(), _code()
    half, third = len(prose) // 2, len(prose) // 3

    def hidden(body: str) -> str:
        lines = body.splitlines()
        lines.insert(len(lines) // 3, FACT)
        return "\n".join(lines)

    return [
        _prompt(
            tokenizer,
            "question",
            hidden,
            prose,
            "What is the special magic number for the harbour? Then say what the text is about.",
            tokens,
        ),
        _prompt(tokenizer, "summary", str, prose[half:], "Summarise the text above.", tokens),
        _prompt(
            tokenizer,
            "copying",
            str,
            prose[third:],
            "Write down the first paragraphs of the text above, word for word.",
            tokens,
        ),
        _prompt(tokenizer, "code", str, code, "Explain what this code does.", tokens),
        Prompt("free", tokenizer.encode(prose[len(prose) // 4 :])[:tokens]),
    ]


def from_file(tokenizer: Tokenizer, path: str, tokens: int) -> Prompt:
    """A file as a prompt, its end left off beyond so many tokens.

    Raises ValueError for a file that cannot be read or holds nothing.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text {path} cannot be read: {error}") from error
    if not text.strip():
        raise ValueError(f"text {path} is empty")
    return _prompt(tokenizer, Path(path).name, str, text, "", tokens)


def _prose() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 2000)


def _code() -> str:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def _prompt(
    tokenizer: Tokenizer, name: str, make: type[str] | object, filler: str, ask: str, tokens: int
) -> Prompt:
    """So much of ``filler``, through ``make``, that with the question it has about ``tokens``."""
    assert callable(make)

    def encode(body: str) -> list[int]:
        text = f"{make(body)}\n\n{ask}" if ask else make(body)
        return tokenizer.encode_chat(text) if tokenizer.has_template else tokenizer.encode(text)

    room = max(1, tokens - len(encode("")))
    # Characters enough for any tokenizer, so that a long file is not encoded whole.
    ids = tokenizer.encode(filler[: room * 8])
    return Prompt(name, encode(tokenizer.decode(ids[:room])))

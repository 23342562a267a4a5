"""A long prompt from this repository's own text, with a number hidden in it and asked for.

Needs nothing but Python, so that it can run before anything is installed:

    python benchmarks/long_prompt.py --tokens 7000 --depth 0.5 > prompt.txt
    python benchmarks/long_prompt.py --answer

The length in tokens is an estimate, right within a few percent for byte-pair vocabularies of about
50,000 entries; ``--plan`` of the command shows the exact count.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ANSWER = "7402916"
NEEDLE = f"The special magic number for the harbour is {ANSWER}. Remember it."
QUESTION = "What is the special magic number for the harbour? Answer with the number only."

# Prose first, then code: a short prompt is all prose.
SOURCES = ("README.md", "docs/*.md", "CHANGELOG.md", "kvdrive_jax/*.py", "kvdrive_jax/*/*.py")

# Roughly what one token of such a vocabulary covers: a short word or a piece of a long one, one
# digit, a run of punctuation, a run of blanks.
_PIECES = re.compile(r" ?[A-Za-z]{1,8}|\d| ?[^\sA-Za-z\d]{1,2}|\n+|[ \t]+(?=[ \t]|\S)|[ \t]+")


def estimate_tokens(text: str) -> int:
    """About how many tokens ``text`` is."""
    return len(_PIECES.findall(text))


def repository_text(root: Path = ROOT) -> str:
    """Documentation, then source, in a fixed order."""
    files = [path for pattern in SOURCES for path in sorted(root.glob(pattern))]
    return "\n\n".join(path.read_text(encoding="utf-8").strip() for path in files)


def long_prompt(text: str, tokens: int, depth: float = 0.5) -> str:
    """About ``tokens`` tokens of ``text`` with the needle at ``depth`` (0 start, 1 end) of it.

    Cut at line ends; a text that is too short is repeated. Raises ValueError for a length that
    does not hold needle and question, for a depth outside 0 to 1, and for an empty text.
    """
    room = tokens - estimate_tokens(NEEDLE) - estimate_tokens(QUESTION) - 4
    if room < 0:
        raise ValueError(f"tokens must be at least {tokens - room}, got {tokens}")
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must be between 0 and 1, got {depth}")
    lines = [(line, estimate_tokens(line) + 1) for line in text.splitlines()]
    if not any(line.strip() for line, _ in lines):
        raise ValueError("text must not be empty")
    kept: list[str] = []
    used, needle_at, index = 0, None, 0
    while True:
        if needle_at is None and used >= depth * room:
            needle_at = len(kept)
        line, cost = lines[index % len(lines)]
        if used + cost > room:
            break
        kept.append(line)
        used += cost
        index += 1
    kept.insert(len(kept) if needle_at is None else needle_at, NEEDLE)
    return "\n".join(kept) + f"\n\n{QUESTION}\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=7000, help="about how many (default: 7000)")
    parser.add_argument("--depth", type=float, default=0.5, help="of the needle (default: 0.5)")
    parser.add_argument("--answer", action="store_true", help="print the hidden number and exit")
    args = parser.parse_args()
    if args.answer:
        print(ANSWER)
        return 0
    try:
        sys.stdout.write(long_prompt(repository_text(), args.tokens, args.depth))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Text to token ids and back, for Hugging Face folders and GGUF files, without torch and without a
network.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ADVICE_SWITCH = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


def quiet_transformers() -> ModuleType:
    """Imports transformers without its notice that there is no torch. The one place that does."""
    before = os.environ.get(_ADVICE_SWITCH)
    os.environ[_ADVICE_SWITCH] = "1"
    try:
        import transformers
    finally:
        if before is None:
            del os.environ[_ADVICE_SWITCH]
        else:
            os.environ[_ADVICE_SWITCH] = before
    return transformers


class Tokenizer:
    """The tokenizer of one model.

    Decoding is per token: every token stands for some bytes whatever its neighbours, and the text
    is those bytes read as UTF-8, broken sequences replaced. So a stream of tokens can be read as it
    comes (`kvdrive_jax.text.TextStream`) and gives the same text as `decode` of all of it.

    Attributes:
        has_template: the model comes with a chat template, so `encode_chat` works.
        eos_token_ids: every id that ends a turn.
        vocab_size: one more than the highest id this tokenizer knows.
        drops_first_space: the text of a sequence loses one leading space (SentencePiece puts one
            there).
    """

    def __init__(self, inner: PreTrainedTokenizerBase, eos_token_ids: Iterable[int] = ()) -> None:
        """Wraps a transformers tokenizer; ``eos_token_ids`` are added to the tokenizer's own."""
        self._inner = inner
        known = set(eos_token_ids)
        if inner.eos_token_id is not None:
            known.add(int(inner.eos_token_id))
        self.eos_token_ids = frozenset(known)
        self.has_template = bool(inner.chat_template)
        self._added = {int(i): token.content for i, token in inner.added_tokens_decoder.items()}
        self._special = frozenset(int(i) for i in inner.all_special_ids) | {
            int(i) for i, token in inner.added_tokens_decoder.items() if token.special
        }
        self.vocab_size = max(len(inner), 1 + max(self._added, default=-1))
        alone = self._ids("", add_special_tokens=True)
        self._bos = inner.bos_token_id if alone[:1] == [inner.bos_token_id] else None
        reader = _PieceReader(inner)
        self._read = reader.read
        self.drops_first_space = reader.drops_first_space
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_pretrained(cls, path: str) -> Tokenizer:
        """Loads ``"demo"``, a ``.gguf`` file, or a Hugging Face folder.

        Raises:
            ValueError: nothing there, or no tokenizer that can be read.
        """
        if path == "demo" or path.endswith(".gguf"):
            from kvdrive_jax.models.gguf import demo_path
            from kvdrive_jax.models.gguf_file import open_gguf

            return cls.from_gguf_metadata(
                open_gguf(demo_path() if path == "demo" else path).metadata
            )
        if not os.path.isdir(path):
            raise ValueError(
                f"model: expected 'demo', a .gguf file or a model folder, got {path!r}"
            )
        try:
            inner = quiet_transformers().AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as err:
            found = ", ".join(sorted(entry.name for entry in Path(path).iterdir())[:20])
            raise ValueError(
                f"path: expected a tokenizer (tokenizer.json, tokenizer_config.json) in {path}, "
                f"got a folder with {found}: {err}"
            ) from err
        return cls(inner, _folder_eos(Path(path)))

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer of an open GGUF file from its metadata; see
        `gguf_tokenizer.build_tokenizer`.
        """
        from kvdrive_jax.models.gguf_tokenizer import build_tokenizer, end_token_ids

        return cls(build_tokenizer(metadata), end_token_ids(metadata))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of plain text, after one BOS if the model's tokenizer puts one there."""
        ids = self._ids(text, add_special_tokens=False)
        return ids if self._bos is None or ids[:1] == [self._bos] else [self._bos, *ids]

    def encode_chat(self, prompt: str, system: str | None = None) -> list[int]:
        """Returns the ids of a user's turn in the model's chat template, up to where the assistant
        begins.

        The template writes BOS itself, so none is added.

        Raises:
            ValueError: there is no template, it fails (with its message), or it writes BOS twice.
        """
        if not self.has_template:
            raise ValueError(
                "chat: expected a model with a chat template, got one without; "
                "give the prompt as plain text"
            )
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt})
        try:
            text = self._inner.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except ImportError:
            raise
        except (
            Exception
        ) as err:  # whatever a template's own code raises: its message is for the user
            raise ValueError(
                f"chat: the model's template refused this conversation: {err}"
            ) from err
        ids = self._ids(str(text), add_special_tokens=False)
        bos = self._inner.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise ValueError(
                f"chat: expected at most one {self._inner.bos_token!r} at the start, "
                "got two from the template"
            )
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of the ids. Bytes that are not UTF-8 become U+FFFD."""
        raw = b"".join(self.piece(int(i), skip_special_tokens) for i in ids)
        if self.drops_first_space and raw.startswith(b" "):
            raw = raw[1:]
        return raw.decode("utf-8", "replace")

    def piece(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """Returns the bytes that one token stands for; none for a special token and for an id
        without a token.
        """
        if skip_special_tokens and token_id in self._special:
            return b""
        found = self._pieces.get(token_id)
        if found is None:
            added = self._added.get(token_id)
            found = added.encode() if added is not None else self._read(token_id)
            self._pieces[token_id] = found
        return found

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return [
            int(i)
            for i in self._inner(text, add_special_tokens=add_special_tokens, verbose=False)[
                "input_ids"
            ]
        ]


def _folder_eos(path: Path) -> set[int]:
    """Reads the end tokens of the model and of its generation settings: either may be one id or a
    list.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = path / name
        if file.is_file():
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            found.update([value] if isinstance(value, int) else value or ())
    return found


def _byte_alphabet() -> dict[int, str]:
    """Byte to the printable character that byte-level BPE writes for it: itself, or the next free
    one from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + i) for i, byte in enumerate(others)
    }


class _PieceReader:
    """Token id to bytes, by the way the tokenizer's decoder puts tokens together.

    Byte-level BPE and SentencePiece are read off the vocabulary. For any other decoder a token is
    what it adds to the text of the token before it.
    """

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        self._inner = inner
        self._byte_of = {char: byte for byte, char in _byte_alphabet().items()}
        steps = _decoder_steps(inner)
        kinds = {str(step.get("type")) for step in steps}
        self.drops_first_space = False
        if kinds == {"ByteLevel"}:
            self.read = self._byte_level
        elif kinds & {"ByteFallback", "Metaspace"}:
            self.read = self._sentencepiece
            self.drops_first_space = any(_strips_first_space(step) for step in steps)
        else:
            self.read = self._after_another
            self._before = next(
                i
                for i in range(len(inner))
                if self._decode([i]).strip() and i not in inner.all_special_ids
            )
            self.drops_first_space = self.read(self._before).startswith(b" ")

    def _byte_level(self, token_id: int) -> bytes:
        text = self._text(token_id)
        known = self._byte_of
        return (
            bytes(known[char] for char in text)
            if all(char in known for char in text)
            else text.encode()
        )

    def _sentencepiece(self, token_id: int) -> bytes:
        text = self._text(token_id)
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE_MARK, " ").encode()

    def _after_another(self, token_id: int) -> bytes:
        before, both = self._decode([self._before]), self._decode([self._before, token_id])
        if not both.startswith(before):
            raise NotImplementedError(
                "tokenizer: its decoder rewrites text when a token follows, so text cannot stream"
            )
        return both[len(before) :].encode()

    def _text(self, token_id: int) -> str:
        if (
            not 0 <= token_id < len(self._inner)
        ):  # rows of the embedding beyond the vocabulary stand for nothing
            return ""
        return str(self._inner.convert_ids_to_tokens(token_id) or "")

    def _decode(self, ids: list[int]) -> str:
        return str(self._inner.decode(ids, clean_up_tokenization_spaces=False))


def _decoder_steps(inner: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return list(decoder.get("decoders", [decoder]))


def _strips_first_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme") != "never")
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"] == 1)

"""The tokenizer inside a GGUF file, rebuilt with the ``tokenizers`` package.

Two kinds are known: byte-level BPE (``tokenizer.ggml.model`` "gpt2": GPT-2, Llama-3, Qwen, SmolLM)
and the SentencePiece BPE of Llama-2 and Phi-3 ("llama"), whose merges are not in the file and
follow from the scores. The text is cut as llama.cpp cuts it; Qwen2 also gets the NFC normalisation
that it was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Values of tokenizer.ggml.token_type.
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6

_SPACE_MARK: Final = "\u2581"  # SentencePiece writes a space as this

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# How the text is cut before the merges, by tokenizer.ggml.pre: each expression cuts what the one
# before left.
_PRE_TOKENIZERS: Final[dict[str, tuple[str, ...]]] = {
    "smollm": (r"\p{N}", _GPT2),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_WHOLE_WORDS_FIRST: Final = frozenset(
    {"llama-bpe", "llama3", "llama-v3"}
)  # a word in the vocabulary is not merged up to
_COMPOSED: Final = frozenset({"qwen2", "deepseek-r1-qwen"})

# A turn may end with another token than the file's eos; chat models name it one of these.
_END_OF_TURN: Final = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}
)


def build_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Builds the tokenizer that the metadata of a GGUF file describes, chat template included.

    Raises:
        ValueError: no vocabulary in the metadata, a kind or a ``pre`` that is not supported, or a
            damaged vocabulary.
    """
    from kvdrive_jax.models.tokenizer import quiet_transformers

    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model: expected gpt2 or llama, got {kind!r}")
    tokens: list[str] = list(metadata.get("tokenizer.ggml.tokens", ()))
    vocab = {token: i for i, token in enumerate(tokens)}
    if not tokens or len(vocab) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.tokens: expected distinct tokens, got {len(tokens)} "
            f"of which {len(vocab)} differ"
        )
    types = [int(t) for t in metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))]
    if len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.token_type: expected {len(tokens)} entries, got {len(types)}"
        )

    def named(key: str, default: int | None = None) -> str | None:
        i = metadata.get(f"tokenizer.ggml.{key}_token_id", default)
        return tokens[i] if i is not None and 0 <= i < len(tokens) else None

    if kind == "gpt2":
        backend = _byte_level(metadata, vocab)
        bos, unk = named("bos"), None
    else:
        unk = named("unknown", 0)
        bos = named("bos", 1)
        backend = _sentencepiece(metadata, vocab, types, unk)
    added = [
        AddedToken(token, normalized=False, special=t == _CONTROL)
        for token, t in zip(tokens, types, strict=True)
        if t in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_special_tokens([t for t in added if t.special])
    backend.add_tokens([t for t in added if not t.special])
    if bos is not None and _adds_bos(metadata, kind):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocab[bos])]
        )
    built: PreTrainedTokenizerFast = quiet_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=named("eos", 2 if kind == "llama" else None),
        unk_token=unk,
        pad_token=named("padding"),
        clean_up_tokenization_spaces=False,
        chat_template=metadata.get("tokenizer.chat_template"),
    )
    return built


def end_token_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Returns every token that ends a turn: eos, end of turn and end of message, and what chat
    models call these.
    """
    found = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    types = metadata.get("tokenizer.ggml.token_type", ())
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    found |= {
        i
        for i, (token, t) in enumerate(zip(tokens, types, strict=False))
        if t == _CONTROL and token in _END_OF_TURN
    }
    return frozenset(int(i) for i in found if i is not None)


def _adds_bos(metadata: Mapping[str, Any], kind: str) -> bool:
    by_default = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    return bool(metadata.get("tokenizer.ggml.add_bos_token", by_default))


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre: expected one of {', '.join(_PRE_TOKENIZERS)}, got {pre!r}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    if not merges or any(len(pair) != 2 for pair in merges):
        raise ValueError(
            "tokenizer.ggml.merges: expected pairs divided by a space, got none or an entry "
            "without a space"
        )
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    )
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PRE_TOKENIZERS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int], unk: str | None
) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    if not merges:
        merges = _merges_from_scores(vocab, types, metadata.get("tokenizer.ggml.scores", ()))
    backend = Tokenizer(
        models.BPE(
            vocab=vocab, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=_BYTE in types
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    mark_spaces = normalizers.Replace(" ", _SPACE_MARK)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE_MARK), mark_spaces] if prefix else [mark_spaces]
    )
    steps: list[Any] = [
        decoders.Replace(_SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges_from_scores(
    vocab: dict[str, int], types: list[int], scores: Any
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best-scored result first, as SentencePiece
    would join them.
    """
    if len(scores) != len(vocab):
        raise ValueError(f"tokenizer.ggml.scores: expected {len(vocab)} entries, got {len(scores)}")
    pieces = {piece for piece, i in vocab.items() if types[i] == _NORMAL}
    ranked = sorted(
        (-float(scores[vocab[piece]]), vocab[piece], cut, (piece[:cut], piece[cut:]))
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    )
    return [pair for *_, pair in ranked]

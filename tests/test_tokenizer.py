"""Tokenizers from GGUF metadata and Hugging Face folders, without torch and without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from kvdrive_jax.models.gguf_file import open_gguf
from kvdrive_jax.models.gguf_tokenizer import build_tokenizer, end_token_ids
from kvdrive_jax.models.tokenizer import Tokenizer, quiet_transformers
from kvdrive_jax.text import TextStream

AWKWARD = [
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "two  spaces\n\n\nnewlines\t\ttabs \r\n end",
    "1234567 12 3.14 \uff13\uff14 \u00bd \u2167",
    "\u65e5\u672c\u8a9e\u306e\u6587\u3001\u4e2d\u6587\u3002\ud55c\uad6d\uc5b4",
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7",
    "don't I'LL they're",
    "x = {'a': 1}; // c++ <<= !== \n    return 0;",
    "e\u0301 and \u00e9, \u00a0nbsp, null \x00 byte",
]
TEXT = (
    "The cat sat on the mat. The dog's 7 dogs sat on 9 cats! "
    "\u00e9\u00e8 caf\u00e9s\n\tand that's that. "
)
CHAT = (
    "{{ bos_token }}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def demo(demo_gguf: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(str(demo_gguf))


def byte_level(cuts: list[Any]) -> tokenizers.Tokenizer:
    """A small byte-level BPE trained here, to be written as GGUF metadata and built again."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    trained.train_from_iterator([TEXT], trainer)
    return trained


def metadata_of(trained: tokenizers.Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i < 4 else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    } | {f"tokenizer.{key}": value for key, value in more.items()}


GPT2_CUTS = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
SMOLLM_CUTS = [pre_tokenizers.Digits(individual_digits=True), *GPT2_CUTS]


@pytest.mark.parametrize(("pre", "cuts"), [("gpt-2", GPT2_CUTS), ("smollm", SMOLLM_CUTS)])
def test_byte_level_bpe_is_what_it_was_written_from(pre: str, cuts: list[Any]) -> None:
    trained = byte_level(cuts)
    built = Tokenizer.from_gguf_metadata(metadata_of(trained, pre))
    for text in [TEXT, *AWKWARD]:
        ids = built.encode(text)
        assert ids == trained.encode(text).ids
        assert built.decode(ids) == text
        assert built.decode(ids) == trained.decode(ids)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "default"])
def test_every_way_to_cut_keeps_the_text(pre: str) -> None:
    built = Tokenizer.from_gguf_metadata(metadata_of(byte_level(GPT2_CUTS), pre))
    for text in AWKWARD:
        if pre == "qwen2" and "e\u0301" in text:
            continue
        assert built.decode(built.encode(text)) == text
    composed = built.decode(built.encode("e\u0301"))
    assert composed == ("\u00e9" if pre == "qwen2" else "e\u0301")


def test_digits_are_grouped_as_each_model_groups_them() -> None:
    trained = byte_level(GPT2_CUTS)
    pieces = {}
    for pre in ("smollm", "llama-bpe", "qwen2", "gpt-2"):
        metadata = metadata_of(trained, pre)
        # Numbers as whole tokens, each reached by merges, so that only the cut decides.
        for a, b in (("1", "2"), ("12", "3"), ("123", "4")):
            metadata["tokenizer.ggml.tokens"].append(a + b)
            metadata["tokenizer.ggml.token_type"].append(1)
            metadata["tokenizer.ggml.merges"].append(f"{a} {b}")
        built = Tokenizer.from_gguf_metadata(metadata)
        pieces[pre] = [built.decode([i]) for i in built.encode("1234") if i]
    assert pieces == {
        "smollm": ["1", "2", "3", "4"],
        "qwen2": ["1", "2", "3", "4"],
        "llama-bpe": ["123", "4"],
        "gpt-2": ["1234"],
    }


def sentencepiece(**more: Any) -> dict[str, Any]:
    """A Llama-2-like vocabulary: three special tokens, 256 bytes, and a few scored pieces."""
    pieces = [
        "\u2581",
        "e",
        "t",
        "h",
        "a",
        "s",
        "\u2581t",
        "he",
        "\u2581the",
        "at",
        "\u2581s",
        "sat",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    # Better the longer and the earlier, like the ranks that SentencePiece gives.
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    metadata = sentencepiece()
    built = Tokenizer.from_gguf_metadata(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    spelled = [tokens[i] for i in built.encode("the sat Z\u00e9")]
    # "he" (better scored than "the") before "the"; what no piece covers is spelled in bytes.
    assert spelled == ["<s>", "\u2581the", "\u2581s", "at", "\u2581", "<0x5A>", "<0xC3>", "<0xA9>"]
    for text in AWKWARD[1:]:
        assert built.decode(built.encode(text)) == text
    assert built.drops_first_space
    assert built.eos_token_ids == {2}


def test_sentencepiece_without_prefix_space_and_without_bos() -> None:
    built = Tokenizer.from_gguf_metadata(sentencepiece(add_bos_token=False, add_space_prefix=False))
    assert not built.drops_first_space
    for text in AWKWARD:
        ids = built.encode(text)
        assert 1 not in ids
        assert built.decode(ids) == text


def test_demo_ids_are_those_of_the_model(demo: Tokenizer) -> None:
    # As transformers' tokenizer for the model and llama.cpp give them.
    assert demo.encode("Hello world") == [19556, 905]
    assert demo.encode(" 12 3.14\n\n\n") == [216, 33, 34, 216, 35, 30, 33, 36, 16506]
    assert demo.encode("<|im_start|>user") == [1, 4093]
    for text in AWKWARD:
        ids = demo.encode(text)
        assert demo.decode(ids) == text
    assert demo.vocab_size == 49152
    assert demo.eos_token_ids == {0, 2}


def test_demo_chat(demo: Tokenizer) -> None:
    assert demo.has_template
    ids = demo.encode_chat("What is 2 + 2?", system="Be brief.")
    assert demo.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert demo.decode(ids) == "system\nBe brief.\nuser\nWhat is 2 + 2?\nassistant\n"
    assert demo.encode_chat("hi") != demo.encode_chat("hi", system="")


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), stop=st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_demo_stream_equals_decode(demo: Tokenizer, text: str, stop: list[str]) -> None:
    ids = demo.encode(text.encode("utf-8", "ignore").decode())
    text = demo.decode(ids)  # less than was encoded where the vocabulary lacks a byte
    stream = TextStream(demo, ())
    assert "".join([*map(stream.feed, ids), stream.finish()]) == text
    stopped = TextStream(demo, stop)
    shown = "".join([*map(stopped.feed, ids), stopped.finish()])
    assert text.startswith(shown)
    assert not any(s in shown for s in stop)


def test_ids_that_stand_for_nothing_decode_to_nothing(demo: Tokenizer) -> None:
    assert demo.decode([19556, 60000, 905]) == "Hello world"
    assert demo.decode([0, 19556, 2]) == "Hello"


def save(folder: Path, backend: tokenizers.Tokenizer, **settings: Any) -> str:
    inner = quiet_transformers().PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    inner.save_pretrained(folder)
    return str(folder)


def adding_bos() -> tokenizers.Tokenizer:
    backend = byte_level(GPT2_CUTS)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return backend


def test_folder_adds_one_bos_and_no_eos(tmp_path: Path) -> None:
    path = save(tmp_path, adding_bos(), bos_token="<s>", eos_token="</s>")
    loaded = Tokenizer.from_pretrained(path)
    ids = loaded.encode("the cat")
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert 1 not in ids
    assert loaded.encode("<s>the cat") == ids
    assert loaded.encode("") == [0]
    assert loaded.decode(ids) == "the cat"
    assert not loaded.has_template
    with pytest.raises(ValueError, match="chat: expected a model with a chat template"):
        loaded.encode_chat("hi")


def test_chat_has_one_bos_where_template_and_tokenizer_both_write_it(tmp_path: Path) -> None:
    path = save(tmp_path, adding_bos(), bos_token="<s>", eos_token="</s>", chat_template=CHAT)
    ids = Tokenizer.from_pretrained(path).encode_chat("the cat", "sat")
    assert ids.count(0) == 1
    assert 1 not in ids


def test_a_template_that_writes_bos_twice_is_refused(tmp_path: Path) -> None:
    template = "{{ bos_token }}" + CHAT
    path = save(tmp_path, adding_bos(), bos_token="<s>", eos_token="</s>", chat_template=template)
    with pytest.raises(ValueError, match="chat: expected at most one '<s>'"):
        Tokenizer.from_pretrained(path).encode_chat("the cat")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{% for m in messages %}{{ m.content }}", "end of template"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_fails_says_why(template: str, message: str, tmp_path: Path) -> None:
    path = save(tmp_path, byte_level(GPT2_CUTS), chat_template=template)
    with pytest.raises(ValueError, match=rf"chat: the model's template refused.*{message}"):
        Tokenizer.from_pretrained(path).encode_chat("hi", system="be brief")


def test_folder_eos_is_the_union_of_all_that_name_one(tmp_path: Path) -> None:
    path = save(tmp_path, byte_level(GPT2_CUTS), eos_token="</s>")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5, 7]}')
    assert Tokenizer.from_pretrained(path).eos_token_ids == {1, 3, 5, 7}


def test_a_tokenizer_with_another_decoder_streams_too(tmp_path: Path) -> None:
    words = {"<unk>": 0, "the": 1, "cat": 2, "sat": 3}
    plain = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    pieces = {"[UNK]": 0, "the": 1, "cat": 2, "##s": 3}
    wordpiece = tokenizers.Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    wordpiece.pre_tokenizer = pre_tokenizers.Whitespace()
    wordpiece.decoder = decoders.WordPiece(cleanup=False)
    for name, backend, text in (("w", plain, "the cat sat"), ("p", wordpiece, "the cats")):
        loaded = Tokenizer.from_pretrained(save(tmp_path / name, backend))
        ids = loaded.encode(text)
        assert len(ids) == 3
        stream = TextStream(loaded)
        assert "".join(map(stream.feed, ids)) == loaded.decode(ids) == text


def test_missing_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model: expected 'demo', a .gguf file or a model folder"):
        Tokenizer.from_pretrained(str(tmp_path / "none"))
    (tmp_path / "readme.txt").write_text("nothing here")
    with pytest.raises(ValueError, match=r"path: expected a tokenizer .*readme.txt"):
        Tokenizer.from_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="path: expected a GGUF file"):
        Tokenizer.from_pretrained(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.model": "bert"}, "tokenizer.ggml.model: expected gpt2 or llama, got 'bert'"),
        ({"ggml.pre": "tekken"}, "tokenizer.ggml.pre: expected one of smollm, .* got 'tekken'"),
        ({"ggml.tokens": []}, "tokenizer.ggml.tokens: expected distinct tokens, got 0"),
        ({"ggml.tokens": ["a", "a"]}, "got 2 of which 1 differ"),
        ({"ggml.token_type": [1]}, "tokenizer.ggml.token_type: expected [0-9]+ entries, got 1"),
        ({"ggml.merges": []}, "tokenizer.ggml.merges: expected pairs"),
        ({"ggml.merges": ["ab"]}, "tokenizer.ggml.merges: expected pairs"),
    ],
)
def test_vocabularies_that_cannot_be_built_are_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(metadata_of(byte_level(GPT2_CUTS), "gpt-2", **change))


def test_scores_of_the_wrong_number_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.scores: expected 271 entries, got 1"):
        build_tokenizer(sentencepiece(scores=[0.0]))


def test_end_tokens_of_a_file_include_the_end_of_turn() -> None:
    metadata = metadata_of(byte_level(GPT2_CUTS), "gpt-2", **{"ggml.eot_token_id": 9})
    assert end_token_ids(metadata) == {1, 3, 9}  # </s>, <|im_end|>, eot


def test_demo_metadata_builds_the_same_tokenizer(demo_gguf: Path, demo: Tokenizer) -> None:
    again = Tokenizer.from_gguf_metadata(open_gguf(demo_gguf).metadata)
    assert again.encode(TEXT) == demo.encode(TEXT)


def test_nothing_is_said_about_missing_torch() -> None:
    code = "from kvdrive_jax.models.tokenizer import quiet_transformers as q; q().AutoTokenizer"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRANSFORMERS_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"USE_TORCH": "0", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout + done.stderr == ""

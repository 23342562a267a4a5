"""Profile files: what is written comes back, and what is none is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from kvdrive_jax.window.profile import merge, profile_path, read_profile, write_profile
from tests.test_window_layout import KEY, profile


def test_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "p.json"
    made = profile()
    write_profile(made, path)
    found = read_profile(path)
    np.testing.assert_array_equal(found.hits, made.hits)
    assert dataclasses.replace(found, hits=made.hits).__dict__ == made.__dict__
    assert [item.name for item in path.parent.iterdir()] == ["p.json"]


def test_place_depends_on_everything_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    places = {profile_path(KEY)}
    for field in dataclasses.fields(KEY):
        value = getattr(KEY, field.name)
        places.add(profile_path(dataclasses.replace(KEY, **{field.name: value * 2})))
    assert len(places) == 1 + len(dataclasses.fields(KEY))
    assert all(place.startswith("/cache/kvdrive_jax/profiles/") for place in places)


def test_merge_weighs_by_steps() -> None:
    one, two = profile(1), profile(2)
    two = dataclasses.replace(two, texts=(dataclasses.replace(two.texts[0], steps=27),))
    made = merge([one, two])
    np.testing.assert_allclose(made.hits, 0.25 * one.hits + 0.75 * two.hits)
    assert len(made.texts) == 2
    other = dataclasses.replace(two, key=dataclasses.replace(KEY, budget=44))
    with pytest.raises(ValueError, match="of one key"):
        merge([one, other])
    wider = dataclasses.replace(two, hits=np.concatenate([two.hits, two.hits], axis=1))
    with pytest.raises(ValueError, match=r"hits \[3, 2, 7\] and .*hits \[3, 4, 7\]"):
        merge([one, wider])
    with pytest.raises(ValueError, match="no profile"):
        merge([])


def test_files_that_are_no_profile_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with pytest.raises(ValueError, match=r"p.json: No such file"):
        read_profile(path)
    write_profile(profile(), path)
    whole = path.read_text()
    values = json.loads(whole)

    def without(name: str) -> dict[str, object]:
        return {key: value for key, value in values.items() if key != name}

    key = values["key"]
    for text, why in (
        (whole[: len(whole) // 2], "cannot be used"),
        ("[]", "version must be 1, got None"),
        (json.dumps({**values, "version": 2}), "version must be 1, got 2"),
        (json.dumps(without("hits")), "has no 'hits'"),
        (json.dumps({**values, "hits": [[1.0]]}), r"hits must be \[layers, kv_heads, 7\]"),
        (json.dumps({**values, "hits": [[["x"] * 7]]}), "cannot be used"),
        (json.dumps({**values, "hits": [[[float("nan")] * 7]]}), "finite and at least 0"),
        (json.dumps({**values, "hits": [[[-1.0] * 7]]}), "finite and at least 0"),
        (json.dumps({**values, "multiples": [1, 2, 3, 4, 5, 6, 7]}), "must ascend from 0"),
        (json.dumps({**values, "selected": float("inf")}), "must be finite"),
        (json.dumps({**values, "key": {**key, "budget": "40"}}), "budget must be int"),
        (json.dumps({**values, "key": {**key, "budget": True}}), "budget must be int"),
        (json.dumps({**values, "version": True}), "version must be 1, got True"),
        (json.dumps({**values, "key": [1]}), "key must be dict"),
        (json.dumps({**values, "model": None}), "model must be str, got None"),
        (json.dumps({**values, "hits": [[["1"] * 7]]}), "hits must be int or float, got '1'"),
        (json.dumps({**values, "hits": [[[True] * 7]]}), "hits must be int or float, got True"),
        (json.dumps({**values, "hits": [[[1.0] * 7], [[1.0] * 6]]}), "cannot be used"),
        (json.dumps({**values, "multiples": "0123456"}), "multiples must be list"),
        (json.dumps({**values, "multiples": [0, 0.5, 2, 3, 4, 5, 6]}), "at least 1, got 0.5"),
        (json.dumps({**values, "selected": "10"}), "selected must be int or float, got '10'"),
        (json.dumps({**values, "selected": -1}), "selected must be above 0, got -1"),
        (json.dumps({**values, "texts": []}), "at least one text, got none"),
        (json.dumps({**values, "texts": [{"name": "t", "tokens": 9, "steps": 0}]}), "steps"),
        (json.dumps({**values, "texts": [{"name": "t", "tokens": -9, "steps": 1}]}), "tokens"),
        ("[" * 100_000, "cannot be used"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=why) as error:
            read_profile(path)
        assert "p.json" in str(error.value)
    path.write_bytes(b"{" + b" " * (64 << 20))
    with pytest.raises(ValueError, match="are more than"):
        read_profile(path)


def test_a_pipe_is_read_no_further_than_the_limit() -> None:
    with pytest.raises(ValueError, match="are more than"):
        read_profile("/dev/zero")


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.json"
    write_profile(profile(1), path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_profile(profile(2), path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["p.json"]


def test_require_says_which_part_of_the_key_differs() -> None:
    made = profile()
    made.require(KEY, "p.json")
    for field in dataclasses.fields(KEY):
        value = getattr(KEY, field.name)
        wanted = dataclasses.replace(KEY, **{field.name: value * 2})
        with pytest.raises(ValueError, match=r"p\.json is for") as error:
            made.require(wanted, "p.json")
        assert f"{field.name} {value}, this run has {value * 2}" in str(error.value)

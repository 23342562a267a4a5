"""The demo model against transformers on the same GGUF file: 500 positions of text, float32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvdrive_jax.models import gguf
from kvdrive_jax.models.model import Leaves, ModelDef
from kvdrive_jax.models.rope import inverse_frequencies
from kvdrive_jax.models.tokenizer import Tokenizer

torch = pytest.importorskip("torch", reason="parity extra not installed")

POSITIONS = 500
TEXT = """
The harbour at Lindholm froze in the second week of December, three weeks early, and the ferry
from the mainland stopped. For the first days nobody minded. There was flour enough for 40 loaves
a day, the school kept its hours, and the doctor, who had meant to leave on the 9th, unpacked his
two bags again in the room above the post office.

"How thick is it?" asked Marta, who was eleven and wanted to know the numbers of things.
"Eighteen centimetres at the pier," said the postmaster. "At 25 they let a sledge on it."
"And a horse?"
"A horse is between the two, but a horse has opinions."

By the 20th the ice bore a man's weight as far as the lighthouse, and two brothers walked there
with a rope between them to see whether the keeper needed anything. He needed paraffin, coffee,
and the newspaper of any day whatever. They came back after dark, following the beam until it was
behind them and then their own footprints. One of them said later that the ice had spoken the
whole way: not cracks, but long low notes, like somebody moving furniture in a house across the
street.

Engineers explain the sound so: a sheet of ice is a plate, and waves in a plate travel faster the
shorter they are. A crack a kilometre away sends out all lengths at once; the short ones arrive
first, then longer and longer ones, so that the ear hears a pitch that falls, from perhaps 2,000
Hz to 200 Hz in a tenth of a second. The same law, f = c / L with c itself depending on L, governs
the ringing of a struck beam. The brothers had not read any of this. They knew that the notes were
lower where the ice was thicker, and they walked where the notes were low.

On the last day of the year the postmaster opened the sack that had been waiting since the ferry
stopped. It held 212 letters, 31 parcels and one wooden box with holes in its lid, addressed to
the school. Inside, in straw, was a barometer. Marta was allowed to hang it by the window. It fell
all afternoon; by evening the wind had gone round to the south-west, and in the night the whole
harbour began to speak at once.
""".strip()


def transformers_logits(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """transformers' own reading of the file, row order of Q and K included, in torch: [T, V]."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with no_init_weights():
        model = LlamaForCausalLM(config).eval()
    path = gguf.demo_path()
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()


@functools.partial(jax.jit, static_argnums=0)
def dense_layer(
    static: ModelDef, leaves: Leaves, hidden: jax.Array, inv_freq: jax.Array
) -> jax.Array:
    """One layer with full causal attention: [T, E] to [T, E]."""
    layer = static.merge_layer(leaves)
    q, k, v = layer.attention_inputs(hidden, jnp.arange(hidden.shape[0]), inv_freq, 1.0)
    attended = jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)
    return layer.after_attention(hidden, attended[0])


def our_logits(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The file as this project reads it: [T, V]."""
    model = gguf.load_gguf(gguf.demo_path(), "float32")
    inv_freq, factor = inverse_frequencies(model.config.rope, len(tokens))
    assert factor == 1.0
    ends = model.merge_ends(model.ends)
    hidden = ends.embed(jnp.asarray(tokens))
    for leaves in model.layers:
        hidden = dense_layer(model.static, leaves, hidden, jnp.asarray(inv_freq))
    return np.asarray(ends.logits(hidden))


def test_same_top_1_at_500_positions_and_close_logits() -> None:
    tokens = np.asarray(Tokenizer.from_pretrained("demo").encode(TEXT)[:POSITIONS], np.int32)
    assert len(tokens) == POSITIONS

    ours, theirs = our_logits(tokens), transformers_logits(tokens)

    np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))
    assert np.abs(ours - theirs).max() < 1e-3
    # The text is understood, not merely read the same way twice: a mistake that both readings share
    # would show here as a perplexity in the thousands.
    chosen = jax.nn.log_softmax(ours[:-1])[np.arange(POSITIONS - 1), tokens[1:]]
    assert float(jnp.exp(-chosen.mean())) < 100

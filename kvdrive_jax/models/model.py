"""A decoder split for use: hashable structure on one side, flat tuples of arrays on the other.

Compiled functions close over the structure (`Model.static`) and take the leaves as arguments:

    @functools.partial(jax.jit, static_argnums=0)
    def step(static: ModelDef, layer_leaves: Leaves, hidden: jax.Array) -> ...:
        layer = static.merge_layer(layer_leaves)

All layers have one structure, so one compiled function serves every layer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.decoder import Decoder, DecoderLayer, Ends

Leaves = tuple[jax.Array, ...]


@dataclass(frozen=True)
class ModuleDef:
    """Structure of one module: enough to put it together again from its leaves.

    Attributes:
        graph: the nnx graph definition.
        tree: how the leaves nest in the module's state.
        names: attribute name of each leaf, in the order of the leaves.
    """

    graph: Any
    tree: Any
    names: tuple[str, ...]

    def merge(self, leaves: Leaves) -> Any:
        """The module with these leaves. Call it inside a compiled function."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))


def split_module(module: nnx.Module) -> tuple[ModuleDef, Leaves]:
    """Structure and leaves of a module whose parameters are its own; leaves may be abstract."""
    graph, state = nnx.split(module)
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    names = tuple(str(path[0].key) for path, _ in paths)
    return ModuleDef(graph, tree, names), tuple(leaf for _, leaf in paths)


@dataclass(frozen=True)
class ModelDef:
    """The hashable half of a model, which compiled functions close over or take as static."""

    config: ModelConfig
    layer_def: ModuleDef
    ends_def: ModuleDef
    dtype: np.dtype[Any]

    def __hash__(self) -> int:
        # Every dispatch hashes its static arguments; hashing the graphs anew took 20 us each time.
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.config, self.layer_def, self.ends_def, self.dtype))

    def merge_layer(self, leaves: Leaves) -> DecoderLayer:
        """A layer from its leaves, inside a compiled function."""
        layer: DecoderLayer = self.layer_def.merge(leaves)
        return layer

    def merge_ends(self, leaves: Leaves) -> Ends:
        """Embedding, final norm and head (`embed`, `logits`), inside a compiled function."""
        ends: Ends = self.ends_def.merge(leaves)
        return ends


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded model. Compared and hashed by identity.

    Attributes:
        static: configuration and structure.
        layers: L tuples of leaves.
        ends: leaves of embedding, final norm and head.
        digest: identifies configuration and weights; stable between machines and runs.
    """

    static: ModelDef
    layers: tuple[Leaves, ...]
    ends: Leaves
    digest: str

    @property
    def config(self) -> ModelConfig:
        """Shape and settings."""
        return self.static.config

    @property
    def layer_def(self) -> ModuleDef:
        """Structure shared by all layers."""
        return self.static.layer_def

    @property
    def ends_def(self) -> ModuleDef:
        """Structure of embedding, final norm and head."""
        return self.static.ends_def

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of weights, activations and KV."""
        return self.static.dtype

    @property
    def parameter_count(self) -> int:
        """Number of stored parameters; a tied embedding counts once."""
        return sum(leaf.size for leaves in (self.ends, *self.layers) for leaf in leaves)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(_nbytes(leaf) for leaves in (self.ends, *self.layers) for leaf in leaves)

    def merge_layer(self, leaves: Leaves) -> DecoderLayer:
        """A layer from its leaves, inside a compiled function."""
        return self.static.merge_layer(leaves)

    def merge_ends(self, leaves: Leaves) -> Ends:
        """Embedding, final norm and head from their leaves, inside a compiled function."""
        return self.static.merge_ends(leaves)


def _nbytes(leaf: Any) -> int:
    abstract = isinstance(leaf, jax.ShapeDtypeStruct)
    return int(leaf.size * leaf.dtype.itemsize if abstract else leaf.nbytes)


def define(config: ModelConfig, dtype: Any) -> tuple[ModelDef, Leaves, Leaves]:
    """Structure of a model without any memory for weights.

    Returns:
        the structure, and the abstract leaves (`jax.ShapeDtypeStruct`) of one layer and of the
        ends.
    """
    kind = jnp.dtype(dtype)
    layer_def, layer = split_module(nnx.eval_shape(lambda: DecoderLayer(config, kind)))
    ends_def, ends = split_module(nnx.eval_shape(lambda: Ends(config, kind)))
    return ModelDef(config, layer_def, ends_def, kind), layer, ends


def abstract_model(config: ModelConfig, dtype: Any = jnp.bfloat16) -> Model:
    """A model of `jax.ShapeDtypeStruct` leaves: for plans and compiling ahead, at zero memory."""
    static, layer, ends = define(config, dtype)
    return Model(static, (layer,) * config.num_layers, ends, digest="")


def split(decoder: Decoder, *, digest: str = "") -> Model:
    """Splits a decoder, once. Its layers share one structure by construction."""
    ends_def, ends = split_module(decoder.ends)
    parts = [split_module(layer) for layer in decoder.layers]
    static = ModelDef(decoder.config, parts[0][0], ends_def, np.dtype(ends[0].dtype))
    return Model(static, tuple(leaves for _, leaves in parts), ends, digest)

"""A model's parameters as the compiled programs take them, and filling them from a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jkv.errors import UnsupportedModelError
from jkv.kernels.cpu_product import Encoding, PanelWeight
from jkv.kernels.mesh import DeviceMesh, shardings, tp_of
from jkv.models.config import ModelConfig
from jkv.models.decoder import DecoderLayer
from jkv.models.panels import Encodings, read_panels, stored_encoding
from jkv.models.sharding import place, tensor_sharding, widened, widened_tensor
from jkv.models.source import TensorSource

_EMBED, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Buffers that some checkpoints carry and that jkv computes from the config.
_DERIVED = ("rotary_emb.inv_freq",)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Params:
    """All weights. `layers` is a list of layer states, or one state whose leaves are stacked over layers for
    scan. Weights of products may be PanelWeights, on CPU.
    """

    embed: Any  # [vocab, hidden]
    layers: Any
    norm: Any  # [hidden]
    head: Any  # [vocab, hidden]; None when tied to `embed`

    def head_only(self) -> Params:
        """What `logits` needs, without the rest: a tied head is in `embed`."""
        embed = self.embed if self.head is None else None
        return Params(embed=embed, layers=None, norm=None, head=self.head)


def layer_definition(config: ModelConfig, dtype: DTypeLike) -> tuple[nnx.GraphDef, Any]:
    """The layer's graph definition and its state as ShapeDtypeStructs; nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: DecoderLayer(config, dtype)))


def abstract_params(
    config: ModelConfig,
    dtype: DTypeLike,
    *,
    stacked: bool,
    mesh: DeviceMesh | None = None,
    whole_experts: bool = False,
    panels: Encodings | None = None,
) -> Params:
    """Shapes, dtypes and, with a mesh, shardings of every parameter (see `jkv.models.sharding`); `panels` are
    for layers that are not stacked, on one device.
    """
    panels = panels or {}
    assert not panels or not (stacked or mesh)
    config = widened(config, tp_of(mesh))
    _, layer = layer_definition(config, dtype)

    def struct(
        name: str, shape: tuple[int, ...], *, stacked: bool = False
    ) -> jax.ShapeDtypeStruct | PanelWeight:
        if name in panels:
            return PanelWeight.abstract(shape, panels[name])
        sharding = tensor_sharding(name, shape, mesh, stacked=stacked, whole_experts=whole_experts)
        whole = (config.num_layers, *shape) if stacked else shape
        return jax.ShapeDtypeStruct(whole, dtype, sharding=sharding)

    def layer_struct(
        i: int, path: tuple[Any, ...], x: jax.ShapeDtypeStruct
    ) -> jax.ShapeDtypeStruct | PanelWeight:
        return struct(_tensor_name(i, path), x.shape, stacked=stacked)

    layers = [
        jax.tree.map_with_path(partial(layer_struct, i), layer)
        for i in range(1 if stacked else config.num_layers)
    ]
    vocab = (config.vocab_size, config.hidden_size)
    return Params(
        embed=struct(_EMBED, vocab),
        layers=layers[0] if stacked else layers,
        norm=struct(_NORM, (config.hidden_size,)),
        head=None if config.tie_embeddings else struct(_HEAD, vocab),
    )


def load_params(
    config: ModelConfig,
    source: TensorSource,
    dtype: DTypeLike,
    *,
    stacked: bool,
    workers: int,
    mesh: DeviceMesh | None = None,
    whole_experts: bool = False,
    panels: Encodings | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> Params:
    """Reads a checkpoint into device arrays, several tensors at once; with a mesh, each device only gets its
    part of them. `panels` as in `abstract_params`.

    Raises:
        UnsupportedModelError: a tensor is missing, has the wrong shape, or is not one this model has.
    """
    names = _parameter_shapes(config, dtype)
    _refuse_unknown(tensor_names(config, dtype), source, config)
    held = frozenset(source.names())
    panels = panels or {}
    done, lock = 0, threading.Lock()

    def read_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        _check(name, shape, source, held)
        array = np.asarray(source.read(name), dtype=jnp.dtype(dtype))
        return widened_tensor(name, array, config, tp_of(mesh))

    def read_whole(name: str) -> np.ndarray | PanelWeight:
        if name in panels:
            _check(name, names[name], source, held)
            return read_panels(source, name, panels[name])
        parts = [read_tensor(*part) for part in _tensors(name, names[name]).items()]
        return np.stack([part.T for part in parts]) if _of_experts(name) else parts[0]

    def read(name: str) -> np.ndarray | PanelWeight:
        nonlocal done
        value = read_whole(name)
        with lock:  # the share never goes back
            done += 1
            progress(done / len(names))
        return value

    def read_placed(name: str) -> jax.Array | PanelWeight:
        array = read(name)
        if isinstance(array, PanelWeight):
            return jax.device_put(array)
        return place(array, tensor_sharding(name, array.shape, mesh, whole_experts=whole_experts))

    # Stacked leaves are assembled on the host first: the device never holds a layer twice.
    get = read if stacked else read_placed
    with ThreadPoolExecutor(max_workers=workers) as pool:
        arrays = dict(zip(names, pool.map(get, names), strict=True))
    _, layer = layer_definition(config, dtype)
    layers = [
        jax.tree.map_with_path(lambda path, _, i=i: arrays[_tensor_name(i, path)], layer)
        for i in range(config.num_layers)
    ]
    params = Params(
        embed=arrays[_EMBED],
        layers=jax.tree.map(lambda *leaves: np.stack(leaves), *layers) if stacked else layers,
        norm=arrays[_NORM],
        head=None if config.tie_embeddings else arrays[_HEAD],
    )
    if mesh is None:
        return jax.block_until_ready(jax.device_put(params))
    abstract = abstract_params(config, dtype, stacked=stacked, mesh=mesh, whole_experts=whole_experts)
    places = shardings(abstract)
    return jax.block_until_ready(jax.tree.map(place, params, places) if stacked else params)


def panel_encodings(config: ModelConfig, source: TensorSource | None) -> Encodings:
    """How each weight of a product lies in panels: as the checkpoint has it, or without one in float32. Not
    those of experts, which have their own products, nor an embedding that is no head.
    """
    held = frozenset() if source is None else frozenset(source.names())

    def encoding(name: str, inputs: int) -> Encoding:
        if source is None or name not in held:
            return "float32"
        return stored_encoding(source, name, inputs)

    return {
        name: encoding(name, shape[1])
        for name, shape in _parameter_shapes(config, jnp.float32).items()
        if len(shape) == 2 and (name != _EMBED or config.tie_embeddings)
    }


def tensor_names(config: ModelConfig, dtype: DTypeLike) -> dict[str, tuple[int, ...]]:
    """Every tensor the model reads, by Hugging Face name, with its shape."""
    return {
        tensor: part
        for name, shape in _parameter_shapes(config, dtype).items()
        for tensor, part in _tensors(name, shape).items()
    }


def _parameter_shapes(config: ModelConfig, dtype: DTypeLike) -> dict[str, tuple[int, ...]]:
    """Every parameter by the name of its tensor, with its shape on one device."""
    _, layer = layer_definition(config, dtype)
    leaves = jax.tree_util.tree_leaves_with_path(layer)
    names = {_EMBED: (config.vocab_size, config.hidden_size), _NORM: (config.hidden_size,)}
    if not config.tie_embeddings:
        names[_HEAD] = names[_EMBED]
    for i in range(config.num_layers):
        names |= {_tensor_name(i, path): leaf.shape for path, leaf in leaves}
    return names


def _tensor_name(layer: int, path: tuple[Any, ...]) -> str:
    parts = [str(k.key) for k in path if hasattr(k, "key")]
    return f"model.layers.{layer}." + ".".join(parts)


def _of_experts(name: str) -> bool:
    return ".experts." in name


def _tensors(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """What a parameter is made of: the tensor of its name, or one of `[out, in]` for each expert."""
    if not _of_experts(name):
        return {name: shape}
    module, projection = name.split(".experts.")
    return {f"{module}.experts.{i}.{projection}": shape[:0:-1] for i in range(shape[0])}


def _check(name: str, shape: tuple[int, ...], source: TensorSource, held: Container[str]) -> None:
    if name not in held:
        raise UnsupportedModelError(f"tensor {name} of shape {list(shape)} is missing from the checkpoint")
    if source.shape(name) != shape:
        raise UnsupportedModelError(
            f"tensor {name} has shape {list(source.shape(name))}; its config says {list(shape)}"
        )


def _refuse_unknown(names: dict[str, tuple[int, ...]], source: TensorSource, config: ModelConfig) -> None:
    allowed = {*names, _HEAD} if config.tie_embeddings else set(names)
    unknown = [n for n in source.names() if n not in allowed and not n.endswith(_DERIVED)]
    if unknown:
        raise UnsupportedModelError(
            f"{config.architecture} has no tensor {unknown[0]} ({len(unknown)} unknown in all); "
            "jkv does not implement what it is for"
        )

"""The model of the demo: a small Llama with random weights, or one that mlx-lm loads."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from click import ClickException

from veloxquant_exporters.interrupts import interrupts_held

__all__ = ["DemoModel", "load_model", "tiny_llama"]


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model to be served.

    Attributes:
        model: The model, of a class of mlx-lm.
        n_vocab: Its token ids are 0..n_vocab-1.
        n_layers: Layers whose caches a pool tracks.
        title: What to call it on the screen.
        note: What to know of it, or "".
    """

    model: Any
    n_vocab: int
    n_layers: int
    title: str
    note: str = ""


def tiny_llama(seed: int) -> DemoModel:
    """A Llama of three layers by mlx-lm's own class, with random weights; 1 MB.

    A token takes 3 KB of KV cache: 3 layers, keys and values, 2 heads of 64 floats of 4 bytes.
    """
    llama = _loaded("mlx_lm.models.llama")
    mx.random.seed(seed)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            head_dim=64,
            num_hidden_layers=3,
            intermediate_size=128,
            num_attention_heads=2,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=512,
            tie_word_embeddings=False,
        )
    )
    mx.eval(model.parameters())
    return DemoModel(
        model,
        512,
        _n_layers(model),
        "tiny random Llama",
        "the text is noise, the memory behaviour is real",
    )


def load_model(name: str) -> DemoModel:
    """The model in a folder, or of a Hugging Face id, as `mlx_lm.load` finds it.

    Raises:
        ClickException: It is not there or does not load; one line says why.
    """
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1
    path = Path(name).expanduser()
    if looks_local or path.exists():
        if not (path / "config.json").is_file():
            raise ClickException(
                f"no model in {name}: --model takes a folder with a config.json and weights, as "
                "mlx_lm.convert writes it, or a Hugging Face id like owner/name"
            )
        name = str(path)
    load = _loaded("mlx_lm").load
    try:
        model, tokenizer = load(name)
    except Exception as error:  # the hub, transformers and mlx-lm each have their own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ClickException(f"cannot load the model {name}: {reason}") from error
    n_layers = _n_layers(model)
    if not n_layers:
        raise ClickException(f"a pool tracks no cache of the model {name}: none is a plain KVCache")
    return DemoModel(model, int(tokenizer.vocab_size), n_layers, path.name)


def _n_layers(model: Any) -> int:
    cache = _loaded("mlx_lm.models.cache")

    def count(caches: Any) -> int:
        return sum(
            count(c.caches) if isinstance(c, cache.CacheList) else type(c) is cache.KVCache
            for c in caches
        )

    return count(cache.make_prompt_cache(model))


def _loaded(module: str) -> Any:
    with interrupts_held():
        return import_module(module)

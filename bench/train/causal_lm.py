"""Models of `transformers`, by type or by config.json, with random weights."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from model import Model, next_token_loss
from torch import nn

Fields = dict[str, Any]

# config.json of Qwen/Qwen3-8B on Hugging Face
QWEN3_8B: Fields = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
NAMED = {"qwen3-8b": QWEN3_8B}


class CausalLM(Model):
    """A causal language model of `transformers`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        self.model = model
        self.vocabulary = config.vocab_size
        self.attention_width = heads * (
            getattr(config, "head_dim", None) or config.hidden_size // heads
        )

    def blocks(self) -> list[nn.Module]:
        """Return the first list of modules in the decoder: its layers."""
        return list(next(x for x in self.model.get_decoder().children() if is_list(x)))

    def beside(self) -> list[list[nn.Module]]:
        """Return the embedding, and the head with the norm; one that is tied goes with the rest."""
        embedding = self.model.get_input_embeddings()
        head = self.model.get_output_embeddings()
        if head.weight is embedding.weight:
            return []
        children = list(self.model.get_decoder().children())
        after = children[[is_list(x) for x in children].index(True) + 1 :]
        return [[embedding], [*(x for x in after if any(True for _ in x.parameters())), head]]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        scores = self.model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        return next_token_loss(scores, tokens)


def is_list(module: nn.Module) -> bool:
    """Tell whether it holds the layers."""
    return isinstance(module, nn.ModuleList)


def build_causal_lm(
    name: str, fields: Fields, seed: int, device: torch.device, dtype: torch.dtype
) -> CausalLM:
    """Make it on the device, the same on all ranks.

    The name is one of NAMED, a type of model such as "qwen3" or the path of a config.json, whose
    fields are replaced by those given.
    """
    transformers = load_transformers()
    config = configuration(transformers, name, fields)
    torch.manual_seed(seed)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention_of(transformers, config)
        )
    return CausalLM(model)


def load_transformers() -> Any:
    """Import the package, which only these models need."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise SystemExit(f"--model wants the package transformers: {error}") from error


def configuration(transformers: Any, name: str, fields: Fields) -> Any:
    """Return transformers' own object."""
    of_name = NAMED.get(name, {"model_type": name})
    if name.endswith(".json"):
        of_name = json.loads(Path(name).read_text(encoding="utf-8"))
    merged = {**of_name, **fields, "use_cache": False}
    make = partial(transformers.AutoConfig.for_model, merged.pop("model_type"))
    unknown = [field for field in fields if not hasattr(make(), field)]
    if unknown:
        raise SystemExit(f"the configuration of --model {name} has no field {', '.join(unknown)}")
    if merged.get("layer_types") and "num_hidden_layers" in fields:
        merged["layer_types"] = merged["layer_types"][: fields["num_hidden_layers"]]
    return make(**merged)


def attention_of(transformers: Any, config: Any) -> str:
    """Return how its attention is to be computed: by torch's scaled_dot_product_attention.

    Under the name "sdpa" transformers makes a mask in each forward: it looks for packed sequences
    on the host, which waits for the device, and under a capture the mask is an explicit one. An
    implementation of another name gets no mask and is causal by itself, which is what is wanted
    where no layer has a window.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(text, "sliding_window", None):
        return "sdpa"
    sdpa = importlib.import_module("transformers.integrations.sdpa_attention")
    transformers.AttentionInterface.register("causal_sdpa", sdpa.sdpa_attention_forward)
    return "causal_sdpa"

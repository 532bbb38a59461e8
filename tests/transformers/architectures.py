"""Architectures of transformers, in sizes that train in a second: configurations, and batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

WORDS, LENGTH, BATCH = 64, 12, 2
PIXELS, CLASSES = 32, 3
SAMPLES = 800  # of a wave
FRAMES, BINS = 40, 16  # of a spectrogram
IMAGE_TOKEN = WORDS - 1

Batch = dict[str, torch.Tensor]
Fields = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How to build one, and what it is trained on.

    Attributes
    ----------
    auto : str
        The class of transformers that builds it from a configuration.
    draw : callable
        Makes a batch, from a generator.
    fields : dict
        Of its configuration, where they differ from transformers' own.
    parts : dict of str and tuple
        Configurations within it: a type of model each, and fields.
    """

    auto: str
    draw: Callable[[torch.Generator], Batch]
    fields: Fields
    parts: dict[str, tuple[str, Fields]] = field(default_factory=dict)

    def build(self, kind: str, seed: int) -> torch.nn.Module:
        """Build a model of this type, in training mode, with random weights."""
        make = transformers.AutoConfig.for_model
        parts = {name: make(of, **fields) for name, (of, fields) in self.parts.items()}
        config = make(kind, **self.fields, **parts)
        torch.manual_seed(seed)
        return getattr(transformers, self.auto).from_config(config).train()


# ---- batches -------------------------------------------------------------------------------------


def words(generator: torch.Generator) -> Batch:
    """Text that a model goes on with, or fills in."""
    tokens = torch.randint(5, WORDS - 2, (BATCH, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def two_texts(generator: torch.Generator) -> Batch:
    """A text, and another one that is made of it."""
    tokens = torch.randint(5, WORDS - 2, (2, BATCH, LENGTH), generator=generator)
    return {"input_ids": tokens[0], "labels": tokens[1]}


def image(generator: torch.Generator) -> Batch:
    """Pictures and their classes."""
    pixels = torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator)
    return {"pixel_values": pixels, "labels": _classes(generator)}


def image_and_words(generator: torch.Generator) -> Batch:
    """A picture's patches stand in the text; its tokens are the first ones."""
    batch = words(generator)
    patches = (PIXELS // 8) ** 2
    places = torch.full((BATCH, patches), IMAGE_TOKEN)
    pixels = torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator)
    tokens = torch.cat([places, batch["input_ids"]], dim=1)
    labels = torch.cat([places.fill_(-100), batch["labels"]], dim=1)
    return {"input_ids": tokens, "labels": labels, "pixel_values": pixels}


def image_or_words(generator: torch.Generator) -> Batch:
    """Pictures and texts that belong together."""
    pixels = torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator)
    tokens = words(generator)["input_ids"]
    return {"input_ids": tokens, "pixel_values": pixels, "return_loss": True}


def spectrogram(generator: torch.Generator) -> Batch:
    """Sound, as a spectrogram, and what is said."""
    sound = torch.randn(BATCH, BINS, FRAMES, generator=generator)
    return {"input_features": sound, "labels": words(generator)["labels"]}


def wave(generator: torch.Generator) -> Batch:
    """Sound, as it is recorded, and its classes."""
    sound = torch.randn(BATCH, SAMPLES, generator=generator)
    return {"input_values": sound, "labels": _classes(generator)}


def _classes(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(CLASSES, (BATCH,), generator=generator)


# ---- sizes ---------------------------------------------------------------------------------------

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **SPECIAL,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {
    **GROUPED,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "output_router_logits": True,
}
NARROW = {
    "vocab_size": WORDS,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    **SPECIAL,
}
TWO = {  # an encoder and a decoder
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    **SPECIAL,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
VISION = {
    "image_size": PIXELS,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_labels": CLASSES,
}
STATES = {  # recurrent layers
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "use_mamba_kernels": False,
}


def _causal(**fields: Any) -> Architecture:
    return Architecture("AutoModelForCausalLM", words, {**GROUPED, **fields})


def _masked(**fields: Any) -> Architecture:
    return Architecture("AutoModelForMaskedLM", words, {**TEXT, **fields})


def _narrow(**fields: Any) -> Architecture:
    return Architecture("AutoModelForCausalLM", words, {**NARROW, **fields})


def _two_texts(fields: Fields) -> Architecture:
    return Architecture("AutoModelForSeq2SeqLM", two_texts, fields)


def _image(**fields: Any) -> Architecture:
    return Architecture("AutoModelForImageClassification", image, {**VISION, **fields})


ARCHITECTURES = {
    "llama": _causal(),
    "mistral": _causal(sliding_window=8),
    "mixtral": _causal(num_local_experts=4, output_router_logits=True),
    "qwen2": _causal(),
    "qwen2_moe": _causal(**EXPERTS),
    "qwen3": _causal(tie_word_embeddings=True),
    "qwen3_moe": _causal(**EXPERTS),
    "gemma": _causal(),
    "gemma2": _causal(sliding_window=8),
    "gemma3_text": _causal(sliding_window=8),
    "phi": _causal(),
    "phi3": _causal(),
    "olmo2": _causal(),
    "cohere": _causal(),
    "stablelm": _causal(),
    "starcoder2": _causal(),
    "falcon": Architecture("AutoModelForCausalLM", words, TEXT),
    "gpt_neox": _causal(),
    "deepseek_v3": _causal(
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
    ),
    "gpt2": _narrow(),
    "gptj": _narrow(rotary_dim=4),
    "bloom": _narrow(hidden_size=32),
    "opt": _causal(ffn_dim=48, word_embed_proj_dim=32),
    "mamba": _causal(state_size=8),
    "mamba2": _causal(state_size=8, num_heads=8, n_groups=2, chunk_size=4),
    "zamba2": _causal(
        **STATES,
        mamba_ngroups=1,
        n_mamba_heads=8,
        chunk_size=4,
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        num_mem_blocks=1,
        adapter_rank=4,
        attention_hidden_size=64,
        attention_head_dim=16,
        num_key_value_heads=4,
    ),
    "jamba": _causal(
        **STATES,
        mamba_dt_rank=4,
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
    ),
    "bert": _masked(),
    "albert": _masked(embedding_size=16),
    "electra": _masked(embedding_size=16),
    "deberta-v2": _masked(relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "t5": _two_texts(T5),
    "bart": _two_texts(TWO),
    "vit": _image(),
    "swin": Architecture(
        "AutoModelForImageClassification",
        image,
        {
            "image_size": PIXELS,
            "patch_size": 4,
            "window_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "num_labels": CLASSES,
        },
    ),
    "resnet": _image(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    "whisper": Architecture(
        "AutoModelForSpeechSeq2Seq",
        spectrogram,
        {
            **TWO,
            "num_mel_bins": BINS,
            "max_source_positions": FRAMES // 2,
            "max_target_positions": 64,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "wav2vec2": Architecture(
        "AutoModelForAudioClassification",
        wave,
        {
            **TEXT,
            "conv_dim": [8, 8],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 4],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "num_labels": CLASSES,
            "classifier_proj_size": 8,
            "layerdrop": 0.0,  # ranks would leave different layers out
            "apply_spec_augment": False,  # which draws from numpy's generator
        },
    ),
    "clip": Architecture(
        "AutoModel",
        image_or_words,
        {"projection_dim": 16},
        {"text_config": ("clip_text_model", TEXT), "vision_config": ("clip_vision_model", VISION)},
    ),
    "llava": Architecture(
        "AutoModelForImageTextToText",
        image_and_words,
        {"image_token_index": IMAGE_TOKEN, "vision_feature_layer": -1},
        {"text_config": ("llama", GROUPED), "vision_config": ("clip_vision_model", VISION)},
    ),
}

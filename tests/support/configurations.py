"""Tiny configurations of the architectures that transformers offers, and inputs for each.

Everything is read off the library: which architectures there are, what their configurations call
a width, and what their forward takes. The tables below say what cannot be guessed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto import modeling_auto

from support.zoo import byte_ids, padding_mask

# Tasks, the first that lists an architecture decides which of its models is built.
TASKS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
)

# Sizes by the names that configurations use for them.
SIZES: dict[int, str] = {
    32: """
        hidden_size d_model n_embd embed_dim dim emb_dim embedding_size embedding_dim
        input_embedding_size output_embedding_size word_embed_proj_dim decoder_hidden_size
        encoder_hidden_size hidden_size_global cross_hidden_size pooler_output_size
        pooler_hidden_size lru_width linear_head_dim image_size crop_size
        max_source_positions num_mel_bins entity_emb_size pronunciation_embed_dim shape_embed_dim
        audio_hidden_size projector_hidden_size feature_projection_input_dim input_feat_per_channel
        pred_hidden_size d_latents output_dim centroid_intermediate_top_k
        """,
    64: """
        intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner dff dim_ff
        ffn_hidden_size feed_forward_size d_inner moe_intermediate_size intermediate_size_mlp
        shared_expert_intermediate_size hidden_dim decoder_intermediate_size mlp_dim
        expert_ffn_hidden_size shared_intermediate_size dense_intermediate_size
        moe_shared_expert_intermediate_size shared_experts_intermediate_size
        attention_hidden_size num_centroids swa_intermediate_size
        max_encoder_position_embeddings max_decoder_position_embeddings max_target_positions
        conv_channels rel_extent num_codevectors_per_group prompt_mid_dim
        """,
    2: """
        num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers
        num_decoder_layers num_encoder_layers decoder_num_hidden_layers encoder_num_hidden_layers
        num_key_value_heads decoder_num_key_value_heads encoder_num_key_value_heads
        num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts
        full_attention_interval sliding_window_pattern _sliding_window_pattern
        global_attn_every_n_layers no_rope_layer_interval attn_layer_period layer_group_size
        num_spatial_layers num_temporal_layers num_auxiliary_layers
        pred_num_hidden_layers num_self_attends_per_block num_timestamp_prediction_layers
        speech_encoder_layers t2u_encoder_layers t2u_decoder_layers num_blocks
        linear_num_key_heads swa_num_key_value_heads
        """,
    4: """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads
        decoder_attention_heads decoder_num_attention_heads encoder_num_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads num_self_attention_heads
        num_cross_attention_heads pred_num_attention_heads speech_encoder_attention_heads
        t2u_encoder_attention_heads t2u_decoder_attention_heads swa_num_attention_heads
        num_local_experts num_experts n_routed_experts moe_num_experts num_routed_experts
        index_n_heads index_topk linear_num_heads linear_num_value_heads sliding_window
        sliding_window_size attention_window_size local_attention attention_window chunk_size
        attention_chunk_size num_frames frames_per_clip zero_expert_num patch_size
        local_attention_window_len num_landmarks num_latents
        """,
    8: """
        head_dim d_kv d_head attention_head_size kv_channels q_lora_rank kv_lora_rank
        qk_nope_head_dim qk_rope_head_dim v_head_dim qk_head_dim swa_head_dim linear_key_head_dim
        linear_value_head_dim global_head_dim hidden_size_per_layer_input laurel_rank
        adapter_rank d_rel global_block_size local_radius num_conv_pos_embeddings
        """,
    16: "index_head_dim state_size ssm_state_size mamba_d_state time_step_rank",
    384: """
        vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size t2u_vocab_size char_vocab_size
        entity_vocab_size pronunciation_vocab_size shape_vocab_size vocab_size_per_layer_input
        unit_hifi_gan_vocab_size encoder_hash_byte_group_vocab
        """,
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}

# The same for sizes that are given once for each stage, with what stands in each place.
STAGES: dict[str, int] = {
    **dict.fromkeys("depths depth num_block_repeats stage_num_blocks n_attn_blocks".split(), 1),
    **dict.fromkeys("hidden_sizes embed_dim embed_dims conv_dim tdnn_dim".split(), 32),
    **dict.fromkeys("num_heads num_attention_heads".split(), 2),
}

# Special tokens. Others than these get numbers that no text has.
TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "blank_token_id": 0,
}

NO_GQA = {"num_key_value_heads": 4}
SPEECH_MASK = {"mask_time_length": 2}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA3N = {
    "intermediate_size": 64,
    "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": [0.95, 0.0],
    **SLIDING,
}
QWEN4 = {
    **LINEAR,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}
WINDOW = {"image_size": 64, "patch_size": 2, "window_size": 4}

# What cannot be guessed from names, by architecture.
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": {"n_group": 2, "topk_group": 1},
    "bailing_hybrid": {"n_group": 2, "topk_group": 1},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "bit": {"num_groups": 2},
    "blt": {"num_hidden_layers": 2},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "cvt": {"depth": [1, 2, 3], "embed_dim": [32, 32, 32]},
    "data2vec-audio": SPEECH_MASK,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v3": {"n_group": 2, "topk_group": 1},
    "deepseek_v32": {"n_group": 2, "topk_group": 1},
    "donut-swin": WINDOW,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"text_config": NO_GQA},
    "dots3_note_text": NO_GQA,
    "efficientnet": {
        "hidden_dim": 1280,
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
    },
    "esm": {"vocab_size": 384, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": NO_GQA,
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3n": {"text_config": GEMMA3N},
    "gemma3n_text": GEMMA3N,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64},
    "gptj": {"rotary_dim": 8},
    "granite_speech5_ctc": {"encoder_config": NO_GQA},
    "granitemoehybrid": {**MAMBA, **LINEAR},
    "hgnet_v2": {"hidden_sizes": [32, 64, 128, 2048]},
    "hiera": {"image_size": [64, 64], "patch_size": [7, 7], "embed_dim": 16},
    "hubert": SPEECH_MASK,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_offset": 1},
    "kimi_linear": LINEAR,
    "levit": {"image_size": 64, "hidden_sizes": [32, 64, 64], "patch_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "ministral": {"head_dim": 8},
    "mobilevitv2": {"image_size": 128, "patch_size": 2},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "moonshine_streaming": NO_GQA,
    "nemotron": {"num_key_value_heads": 2},
    "neomme": {"head_dim": 16},
    "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 12},
    "perceiver": {"max_position_embeddings": 12},
    "qwen3_5": {"text_config": LINEAR},
    "qwen3_5_moe": {"text_config": LINEAR},
    "qwen3_next": LINEAR,
    "qwen4_exp": {"text_config": QWEN4},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [3, 4],
        "axial_pos_embds_dim": [16, 16],
        "max_position_embeddings": 12,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
    },
    "rwkv": {"attention_hidden_size": 32},
    "sew": SPEECH_MASK,
    "sew-d": SPEECH_MASK,
    "shieldgemma2": {"yes_token_index": 10, "no_token_index": 11},
    "siglip2": {"vision_config": {"num_patches": 16}},
    "speech-encoder-decoder": {"encoder": SPEECH_MASK},
    "speecht5": SPEECH_MASK,
    "swin": WINDOW,
    "swinv2": WINDOW,
    "textnet": {"stem_out_channels": 32},
    "unispeech": SPEECH_MASK,
    "unispeech-sat": SPEECH_MASK,
    "wav2vec2": SPEECH_MASK,
    "wav2vec2-bert": {"vocab_size": 384, **SPEECH_MASK},
    "wav2vec2-conformer": {"vocab_size": 384, **SPEECH_MASK},
    "wavlm": SPEECH_MASK,
    "xlstm": {"use_cache": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}

# Architectures without a healthy run here, by reason.
SKIPPED: dict[str, str] = {
    "needs the library timm": "timm_wrapper gemma3n",
    "needs the library natten": "dinat",
    "reads the keys of another model": "gemma4_assistant gemma4_unified_assistant",
    "its audio codec has no small configuration": "kyutai_speech_to_text vibevoice vibevoice_asr",
    "takes audio and text of one length only": "voxtral_realtime",
}


@dataclass(frozen=True)
class Architecture:
    """One model class of transformers."""

    name: str
    task: str
    model: str

    def model_class(self) -> type[nn.Module]:
        return getattr(transformers, self.model)

    def offers(self, attention: str) -> bool:
        """Whether the model has this implementation of attention."""
        attribute = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}
        return attention == "eager" or getattr(self.model_class(), attribute[attention])

    def masks(self, kind: str) -> bool:
        """Whether its inputs are hidden or weighted like this."""
        if self.task.startswith(("IMAGE", "VIDEO")) or not takes(
            self.model_class(), "attention_mask"
        ):
            return False
        if kind == "right":
            return self.name not in NO_MASK
        return self.task == "CAUSAL_LM" and (kind == "left" or self.name not in NO_SCORES)

    def config(self) -> PreTrainedConfig:
        """A tiny configuration; of the text part alone where the model is that part."""
        config_class, overrides = CONFIG_MAPPING[self.name], OVERRIDES.get(self.name, {})
        for name, part in config_class.sub_configs.items():
            if part is self.model_class().config_class:
                config_class, overrides = part, overrides.get(name, {})
        return tiny(config_class, overrides)


def architectures() -> dict[str, Architecture]:
    """Every model class once, under the first name that the library has for it."""
    found: dict[str, Architecture] = {}
    for task in TASKS:
        for name, models in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            model = models if isinstance(models, str) else models[0]
            if name not in found and all(other.model != model for other in found.values()):
                found[name] = Architecture(name, task, model)
    return found


ARCHITECTURES = architectures()


def tiny(config_class: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    """A configuration of this class that is as small as the tables say."""
    arguments: dict[str, Any] = {}
    special = 300
    default = config_class()
    for name, value in vars(default).items():
        own = overrides.get(name)
        if isinstance(value, PreTrainedConfig):
            arguments[name] = tiny(type(value), own or {})
        elif own is not None:
            arguments[name] = own
        elif name in STAGES and isinstance(value, (list, tuple)):
            arguments[name] = [STAGES[name]] * len(value)
        elif name == "num_key_value_heads" and hasattr(default, "kv_lora_rank"):
            arguments[name] = SMALL["num_attention_heads"]  # one for each head
        elif name in SMALL and isinstance(value, int):
            arguments[name] = SMALL[name]
        elif name in SMALL and isinstance(value, (list, tuple)) and name.endswith("size"):
            arguments[name] = [SMALL[name]] * len(value)
        elif name.endswith(("token_id", "token_index")) and value is not None:
            special += 1
            arguments[name] = TOKENS.get(name, special)
    return config_class(**{**overrides, **arguments})


# Inputs


def takes(model: nn.Module | type[nn.Module], name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def size_of(config: PreTrainedConfig, name: str, default: int) -> int:
    size = getattr(config, name, None)
    size = size[0] if isinstance(size, (list, tuple)) else size
    return size or default


def image(config: PreTrainedConfig) -> Tensor:
    side = size_of(config, "image_size", size_of(config, "crop_size", 32))
    channels = size_of(config, "num_channels", 3)
    return noise(2, channels, side, side)


def video(config: PreTrainedConfig) -> Tensor:
    frames = size_of(config, "num_frames", size_of(config, "frames_per_clip", 4))
    return image(config).unsqueeze(1).repeat(1, frames, 1, 1, 1)


def features(config: PreTrainedConfig) -> Tensor:
    """A spectrogram, time before frequency."""
    names = "num_mel_bins feature_projection_input_dim input_feat_per_channel input_dim".split()
    bins = next((getattr(config, name) for name in names if getattr(config, name, None)), 32)
    return noise(2, 64, bins)


def mask_of(kind: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Padding on the right or left as ones and zeros, or a causal mask to be added to scores."""
    if kind == "right":
        return padding_mask(ids)
    if kind == "left":
        return padding_mask(ids).flip(1)
    length = ids.shape[1]
    hidden = -torch.inf if kind == "infinite" else torch.finfo(dtype).min
    mask = torch.full((length, length), hidden, dtype=dtype).triu(1)
    return mask.expand(len(ids), 1, length, length).contiguous()


def siglip2(config: PreTrainedConfig) -> dict[str, Tensor]:
    """An image as a row of patches."""
    return {
        "pixel_values": noise(2, 16, 3 * 4 * 4),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
    }


# Inputs that cannot be guessed from the name of the main one.
EXTRA: dict[str, Callable[[PreTrainedConfig], dict[str, Tensor]]] = {
    "siglip2": siglip2,
    "granite_speech5_ctc": lambda config: {"input_features": noise(2, 64, 128)},
    "audio-spectrogram-transformer": lambda config: {
        "input_values": noise(2, config.max_length, config.num_mel_bins)
    },
    "musicgen": lambda config: {"input_ids": byte_ids(2 * config.num_codebooks)},
    "musicgen_melody": lambda config: {"input_ids": byte_ids(2 * config.num_codebooks)},
    "dia": lambda config: {"decoder_input_ids": byte_ids().unsqueeze(2).repeat(1, 1, 9)},
    "speech-encoder-decoder": lambda config: {"input_values": noise(2, 3200)},
}

# These take a mask and have no use for it.
NO_MASK = frozenset({"audio-spectrogram-transformer"})

# Their masks hide padding; a mask that is added to the scores of attention they do not take.
NO_SCORES = frozenset(
    "bloom falcon_mamba mamba openai-gpt opt prophetnet reformer rwkv xlm xlnet".split()
)

# These compute a loss of something else, or of more than their labels.
NO_LABELS = frozenset(
    """
    dia git granite_speech5_ctc lasr_ctc musicgen musicgen_melody parakeet_ctc perceiver
    shieldgemma2
    """.split()
)


def inputs_of(
    architecture: Architecture, model: nn.Module, dtype: torch.dtype, mask: str, labels: bool
) -> dict[str, Tensor]:
    """What the model's forward takes; of a spectrogram or an image only the numbers are random."""
    config, name, ids = model.config, model.main_input_name, byte_ids()
    batch: dict[str, Tensor] = {}
    if name == "input_ids" or architecture.task in TASKS[:2]:
        batch["input_ids"] = ids
    elif name == "pixel_values":
        batch[name] = (video if architecture.task.startswith("VIDEO") else image)(config)
    elif name == "pixel_values_videos":
        batch[name] = video(config)
    elif name == "input_values":
        batch[name] = noise(2, 3200)
    elif name == "input_features":
        batch[name] = features(config)
    if architecture.task.endswith("CLASSIFICATION"):
        target = torch.tensor([0, 1])
    else:
        target = ids
        if takes(model, "decoder_input_ids"):
            batch["decoder_input_ids"] = ids
    if architecture.task == "CTC":
        target = ids[:, :3]  # shorter than what is heard
    if labels and takes(model, "labels") and architecture.name not in NO_LABELS:
        batch["labels"] = target
    if mask:
        first = next(iter(batch.values()))
        steps = ids if "input_ids" in batch else torch.ones(first.shape[:2], dtype=torch.long)
        batch["attention_mask"] = mask_of(mask, steps, dtype)
    if architecture.name in EXTRA:
        batch |= EXTRA[architecture.name](config)
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}

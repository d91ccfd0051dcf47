"""Small pipelines with random weights, saved as any diffusers checkpoint is: real classes, real files, no download."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

AnyT5Config = TypeVar("AnyT5Config", T5Config, UMT5Config)
TEXT_WIDTH = 16
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def save_blockless(path: Path) -> Path:
    """A FLUX whose denoiser has no blocks."""
    return save_tiny_flux(path, num_double=0, num_single=0)


def save_tiny_flux(path: Path, *, num_double: int = 2, num_single: int = 3) -> Path:
    """A FLUX with a few double and single blocks; it draws from 16x16 pixels on."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=num_double,
        num_single_layers=num_single,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1,
        scaling_factor=0.4,
    )
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=CLIPTextModel(clip_config(clip)),
        tokenizer=clip,
        text_encoder_2=T5EncoderModel(t5_config(T5Config, t5)),
        tokenizer_2=t5,
        transformer=transformer,
    )
    return save(pipeline, path)


def save_tiny_wan(path: Path) -> Path:
    """A Wan with 3 blocks; it draws videos from 16x16 pixels and 5 frames on."""
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_WIDTH,
        freq_dim=16,
        ffn_dim=32,
        num_layers=3,
        rope_max_seq_len=32,
    )
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    t5 = t5_tokenizer()
    pipeline = WanPipeline(
        tokenizer=t5,
        text_encoder=UMT5EncoderModel(t5_config(UMT5Config, t5)),
        vae=vae,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=transformer,
    )
    return save(pipeline, path)


def save(pipeline: FluxPipeline | WanPipeline, path: Path) -> Path:
    pipeline.save_pretrained(path, safe_serialization=True)
    return path


def clip_tokenizer() -> CLIPTokenizer:
    """Byte-level BPE without merges: every byte is a token, alone or at the end of a word."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=[], model_max_length=77)


def clip_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=32,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5_tokenizer() -> T5Tokenizer:
    """Unigram over single letters."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return T5Tokenizer(vocab=[*special, *((letter, -2.0) for letter in f"▁{LETTERS}")], extra_ids=0)


def t5_config(config_class: type[AnyT5Config], tokenizer: T5Tokenizer) -> AnyT5Config:
    return config_class(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )

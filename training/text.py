"""Tokenizers and text encoders of the classes that the pipelines expect, small and trainable.

Every word of a caption is one token; other words fall apart into characters. Vocabularies are
built from sorted lists, so two builds are identical. Knows nothing of images.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tokenizers import pre_tokenizers
from transformers import (
    BatchEncoding,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

__all__ = [
    "clip_encoder",
    "clip_tokenizer",
    "t5_encoder",
    "t5_tokenizer",
    "tokenize",
    "umt5_encoder",
]

_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"


def _merge(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Apply byte-pair merges to a word in order of rank."""
    parts = [*word[:-1], word[-1] + "</w>"]
    while True:
        pairs = list(itertools.pairwise(parts))
        known = [(ranks[pair], k) for k, pair in enumerate(pairs) if pair in ranks]
        if not known:
            return parts
        k = min(known)[1]
        parts[k : k + 2] = [parts[k] + parts[k + 1]]


def clip_tokenizer(words: Sequence[str], *, length: int) -> CLIPTokenizer:
    """A byte-level BPE tokenizer in which each of the words is one token.

    Merges are added word by word with falling priority, so an earlier word keeps its merge path.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # its own order is random per call
    tokens = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(c + "</w>" for c in alphabet)]
    vocab = {token: k for k, token in enumerate(tokens)}
    ranks: dict[tuple[str, str], int] = {}
    for word in words:
        while len(parts := _merge(word, ranks)) > 1:
            ranks[parts[0], parts[1]] = len(ranks)
            vocab.setdefault(parts[0] + parts[1], len(vocab))
    return CLIPTokenizer(vocab=vocab, merges=list(ranks), model_max_length=length)


def t5_tokenizer(words: Sequence[str], *, length: int) -> T5Tokenizer:
    """A unigram tokenizer of whole words, with single characters for the rest."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [("\u2581" + word, -3.0) for word in words]
    pieces += [(c, -10.0) for c in _CHARACTERS]
    return T5Tokenizer(
        vocab=pieces, extra_ids=0, additional_special_tokens=[], model_max_length=length
    )


def tokenize(tokenizer: CLIPTokenizer | T5Tokenizer, captions: Sequence[str]) -> BatchEncoding:
    """Token ids and their mask, padded to the tokenizer's length as the pipelines pad them."""
    return tokenizer(
        list(captions),
        padding="max_length",
        max_length=tokenizer.model_max_length,
        truncation=True,
        return_tensors="pt",
    )


def clip_encoder(tokenizer: CLIPTokenizer, *, width: int) -> CLIPTextModel:
    """A two-layer CLIP text encoder; pooled is the last hidden state at the end token."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _t5_sizes(tokenizer: T5Tokenizer, width: int) -> dict[str, int | float]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": width,
        "d_kv": width // 4,
        "d_ff": 2 * width,
        "num_layers": 2,
        "num_heads": 4,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "dropout_rate": 0.0,
    }


def t5_encoder(tokenizer: T5Tokenizer, *, width: int) -> T5EncoderModel:
    """A two-layer T5 encoder."""
    return T5EncoderModel(T5Config(**_t5_sizes(tokenizer, width)))


def umt5_encoder(tokenizer: T5Tokenizer, *, width: int) -> UMT5EncoderModel:
    """A two-layer UMT5 encoder."""
    return UMT5EncoderModel(UMT5Config(**_t5_sizes(tokenizer, width)))

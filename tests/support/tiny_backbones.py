"""Tiny random models of transformers, saved to folders as the hub has them."""

import json
from pathlib import Path

import torch

KINDS = ("vit", "dinov2", "clip", "clip_vision_model", "convnext", "resnet")
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
WORDS = ("good great fine happy bad poor sad awful the film was a and not very").split()


def save_images(kind: str, folder: Path, seed: int = 0, **processor: object) -> Path:
    """A model of images of 16 x 16 pixels."""
    import transformers as t

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(seed)
    if kind == "vit":
        net = t.ViTModel(t.ViTConfig(**small, image_size=16, patch_size=8))
    elif kind == "dinov2":
        del small["intermediate_size"]
        net = t.Dinov2Model(t.Dinov2Config(**small, image_size=16, patch_size=8))
    elif kind == "clip_vision_model":
        net = t.CLIPVisionModel(t.CLIPVisionConfig(**small, image_size=16, patch_size=8))
    elif kind == "clip":
        text = t.CLIPTextConfig(**small, vocab_size=20, max_position_embeddings=16)
        vision = t.CLIPVisionConfig(**small, image_size=16, patch_size=8)
        net = t.CLIPModel(t.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8))
    elif kind == "convnext":
        net = t.ConvNextModel(t.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=16))
    else:
        net = t.ResNetModel(t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"))
    net.save_pretrained(folder)
    facts = {"size": {"height": 16, "width": 16}, "resample": 2, **IMAGENET, **processor}
    (folder / "preprocessor_config.json").write_text(json.dumps(facts))
    return folder


def save_texts(folder: Path, seed: int = 0) -> Path:
    """An encoder of texts of `WORDS`."""
    import transformers as t
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(("[PAD]", "[UNK]", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=128
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = t.BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    t.BertModel(config).save_pretrained(folder)
    return folder


def reviews(count: int, seed: int = 0) -> tuple[list[str], list[int]]:
    """Made-up texts of two classes and different lengths; two words of five are of the class, the others of both."""
    rng = torch.Generator().manual_seed(seed)
    texts, labels = [], []
    for i in range(count):
        own = WORDS[:4] if i % 2 else WORDS[4:8]
        length = int(torch.randint(3, 50, (), generator=rng))
        draws = torch.randint(4 * 7, (length, 2), generator=rng).tolist()
        words = [own[a % 4] if b < 11 else WORDS[8 + a % 7] for a, b in draws]
        texts.append(" ".join(words))
        labels.append(i % 2)
    return texts, labels

"""Small images, and model folders that say how to prepare them."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any, Final

from PIL import Image

from quire.compute.models.source import ModelFolder
from quire.engine.images.reader import ImageReader
from quire.engine.text.tokenizer import Tokenizer
from support.tiny_tokenizer import byte_level, write_tokenizer

VOCAB_SIZE: Final = 512
SMOLVLM: Final = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""The chat template of SmolVLM: it writes nothing of a content that is a text."""

LLAVA: Final = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' '}}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
PIXTRAL: Final = (
    "<s>{% for message in messages %}{% if message['role'] == 'user' %}[INST]{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for block in message['content'] %}{% if block['type'] == 'text' %}"
    "{{ block['text'] }}{% elif block['type'] in ['image', 'image_url'] %}[IMG]{% endif %}{% endfor %}{% endif %}"
    "[/INST]{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
)
GEMMA3: Final = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for item in m.content %}{% if item.type == 'image' %}<start_of_image>{% else %}{{ item.text | trim }}"
    "{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA4: Final = (
    "{% for m in messages %}<|turn>{{ m.role }}\n{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for item in m.content %}{% if item.type in ['image', 'image_url'] %}<|image|>{% else %}"
    "{{ item.text | trim }}{% endif %}{% endfor %}{% endif %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
QWEN2_VL: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' or 'image' in c or 'image_url' in c %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INTERNVL: Final = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}{{ '<IMG_CONTEXT>\n' }}{% elif c.type == 'text' %}{{ c.text }}"
    "{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GLM4V: Final = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for item in m.content %}{% if item.type == 'image' or 'image' in item %}"
    "<|begin_of_image|><|image|><|end_of_image|>{% elif item.type == 'text' %}{{ item.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CONTENT_AS_TEXT: Final = "{% for message in messages %}<|im_start|>{{ message.content }}<end_of_utterance>{% endfor %}"

FOLDERS: Final[dict[str, dict[str, Any]]] = {
    "SmolVLM": {
        "template": SMOLVLM,
        "control": ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"]
        + [f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 7)],
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 256},
            "max_image_size": {"longest_edge": 64},
            "do_image_splitting": True,
            "resample": 1,
        },
        "processor_config.json": {"image_seq_len": 5, "processor_class": "Idefics3Processor"},
    },
    "LLaVA": {
        "template": LLAVA,
        "control": ["<image>", "</s>"],
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "do_center_crop": True,
            "resample": 3,
        },
        "processor_config.json": {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "processor_class": "LlavaProcessor",
        },
    },
    "LLaVA-NeXT": {
        "template": LLAVA,
        "control": ["<image>", "</s>"],
        "preprocessor_config.json": {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
            **{"do_center_crop": True, "do_pad": True, "resample": 3},
        },
        "processor_config.json": {
            **{"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
            "processor_class": "LlavaNextProcessor",
        },
    },
    "Pixtral": {
        "template": PIXTRAL,
        "control": ["<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "preprocessor_config.json": {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 128},
            "patch_size": {"height": 16, "width": 16},
            "resample": 3,
        },
        "processor_config.json": {"patch_size": 8, "spatial_merge_size": 2, "processor_class": "PixtralProcessor"},
    },
    "Gemma 3": {
        "template": GEMMA3,
        "control": ["<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<image_soft_token>", "<end_of_image>"],
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 56, "width": 70},
            "do_pan_and_scan": None,
            "resample": 2,
        },
        "processor_config.json": {"image_seq_length": 20, "processor_class": "Gemma3Processor"},
    },
    "Gemma 4": {
        "template": GEMMA4,
        "control": ["<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>"],
        "preprocessor_config.json": {
            "image_processor_type": "Gemma4ImageProcessor",
            **{"do_normalize": False, "image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]},
            **{"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 3, "resample": 3},
        },
        "processor_config.json": {"processor_class": "Gemma4Processor"},
    },
    "GLM-4V": {
        "template": GLM4V,
        "control": [
            *("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|image|>"),
            *("<|begin_of_image|>", "<|end_of_image|>"),
        ],
        "preprocessor_config.json": {
            "image_processor_type": "Glm4vImageProcessor",
            "size": {"shortest_edge": 12_544, "longest_edge": 90_000},
            **{"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2},
        },
        "processor_config.json": {"processor_class": "Glm4vProcessor"},
    },
    "InternVL": {
        "template": INTERNVL,
        "control": ["<|im_start|>", "<|im_end|>", "<img>", "<IMG_CONTEXT>", "</img>"],
        "preprocessor_config.json": {
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "crop_to_patches": False,
            "size": {"height": 56, "width": 56},
            **{"min_patches": 1, "max_patches": 12, "resample": 3},
        },
        "processor_config.json": {"image_seq_length": 4, "processor_class": "InternVLProcessor"},
    },
    "LFM2-VL": {
        "template": SMOLVLM,
        "control": ["<|im_start|>", "<end_of_utterance>", "<image>", "<|image_start|>", "<|image_end|>"]
        + ["<|img_thumbnail|>"]
        + [f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)],
        "preprocessor_config.json": {
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "encoder_patch_size": 16,
            "downsample_factor": 2,
            "tile_size": 64,
            "min_image_tokens": 4,
            "max_image_tokens": 16,
            "min_tiles": 2,
            "max_tiles": 10,
        },
        "processor_config.json": {"processor_class": "Lfm2VlProcessor"},
    },
    "Qwen2-VL": {
        "template": QWEN2_VL,
        "control": ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"],
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 3136,
            "max_pixels": 50_000,
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
        },
        "processor_config.json": {},
    },
}
"""The settings of each family: the names of two files, and what is in them."""


def write_folder(folder: Path, family: str, **changes: Any) -> None:
    """Write the tokenizer and the settings for images of a family; `changes` are of the settings of images."""
    made = FOLDERS[family] | ({"template": changes.pop("template")} if "template" in changes else {})
    write_tokenizer(folder, byte_level(control=made["control"]), {"chat_template": made["template"]})
    for name in ("preprocessor_config.json", "processor_config.json"):
        settings = made[name] | (changes if name == "preprocessor_config.json" else {})
        (folder / name).write_text(json.dumps(settings))


def open_tokenizer(folder: Path, max_tokens: int = 4096) -> Tokenizer:
    """Return the tokenizer of a folder, which reads images."""
    files = ModelFolder(folder)
    reader = ImageReader.open(files, max_tokens=max_tokens)
    return Tokenizer.open(files, vocab_size=VOCAB_SIZE, max_tokens=max_tokens, images=reader)


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Return an image of random colours, in areas and with noise."""
    draw = random.Random(seed)
    small = Image.frombytes("RGBA", (4, 4), draw.randbytes(64)).resize((width, height), Image.Resampling.BICUBIC)
    noise = Image.frombytes("RGBA", (width, height), draw.randbytes(4 * width * height))
    return Image.blend(small, noise, 0.2).convert(mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes) -> str:
    """Return a file as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def asked_about(*images: Any, text: str = "What is this?") -> list[dict[str, Any]]:
    """Return a conversation with images and then a text; the images are the values of parts in Python's form."""
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]

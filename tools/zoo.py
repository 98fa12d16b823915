"""Which way the gradients of well-known model families go: every layer by a rule, some by vmap, or all row by row.

    python tools/zoo.py [--only NAME ...] [--json FILE] [--markdown FILE]

Random weights, nothing is downloaded; the smallest member of each family, on small images or short texts. A family is
*fast* if a rule serves every parameter, *vmap* if `torch.func` serves some of them (which are named), and *by row* if
only plain autograd, one row at a time, has the right answer. With `--json` a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.gradients import Engine

ROWS = 4
Case = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]

TIMM = {
    "BEiT": "beit_base_patch16_224",
    "CaiT": "cait_xxs24_224",
    "CoaT": "coat_lite_tiny",
    "CoAtNet": "coatnet_nano_rw_224",
    "ConViT": "convit_tiny",
    "ConvMixer": "convmixer_768_32",
    "ConvNeXt": "convnext_atto",
    "ConvNeXt V2": "convnextv2_atto",
    "CrossViT": "crossvit_tiny_240",
    "DaViT": "davit_tiny",
    "DeiT": "deit_tiny_patch16_224",
    "DeiT III": "deit3_small_patch16_224",
    "DenseNet": "densenet121",
    "EdgeNeXt": "edgenext_xx_small",
    "EfficientFormer": "efficientformer_l1",
    "EfficientNet": "efficientnet_b0",
    "EfficientViT": "efficientvit_m0",
    "EVA-02": "eva02_tiny_patch14_224",
    "FastViT": "fastvit_t8",
    "FocalNet": "focalnet_tiny_srf",
    "GhostNet": "ghostnet_050",
    "Hiera": "hiera_tiny_224",
    "InceptionNeXt": "inception_next_atto",
    "LeViT": "levit_128s",
    "MambaOut": "mambaout_femto",
    "MaxViT": "maxvit_pico_rw_256",
    "MLP-Mixer": "mixer_s32_224",
    "MobileNet V3": "mobilenetv3_small_050",
    "MobileViT": "mobilevit_xxs",
    "MViT V2": "mvitv2_tiny",
    "NesT": "nest_tiny",
    "NFNet": "eca_nfnet_l0",
    "PiT": "pit_ti_224",
    "PoolFormer": "poolformer_s12",
    "PVT V2": "pvt_v2_b0",
    "RegNet": "regnety_002",
    "RepViT": "repvit_m0_9",
    "ResMLP": "resmlp_12_224",
    "ResNet": "resnet18",
    "ResNet V2": "resnetv2_50",
    "SAM": "samvit_base_patch16_224",
    "Swin": "swin_tiny_patch4_window7_224",
    "Swin V2": "swinv2_cr_tiny_ns_224",
    "TinyViT": "tiny_vit_5m_224",
    "TNT": "tnt_s_legacy_patch16_224",
    "Twins": "twins_svt_small",
    "ViT": "vit_tiny_patch16_224",
    "ViT, relative positions": "vit_relpos_small_patch16_224",
    "VOLO": "volo_d1_224",
    "XCiT": "xcit_nano_12_p16_224",
}

ATTEMPTS: list[dict[str, Any]] = [
    {"img_size": 64, "depth": 2},
    {"img_size": 64, "num_blocks": 2},
    {"img_size": 64, "depths": (1, 1, 1, 1)},
    {"depths": (1, 1, 1, 1)},
    {"img_size": 64},
    {},
]
TEXT = """
albert bert big_bird bart bloom camembert codegen convbert deberta deberta-v2 distilbert electra ernie esm falcon fnet
funnel gemma gpt2 gpt_neo gpt_neox gptj ibert llama longformer marian mbart megatron-bert mistral mixtral mobilebert
mpnet nystromformer olmo opt pegasus phi qwen2 qwen2_moe rembert roberta roformer squeezebert starcoder2 t5 xlm-roberta
xlnet yoso
"""
# Every family has its own words for the same few sizes; those that it does not know are attributes that nobody reads.
SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embedding_size": 32,
    "input_embedding_size": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "head_dim": 8,
    "d_kv": 8,
    "d_head": 8,
    "intermediate_size": 64,
    "d_ff": 64,
    "d_inner": 64,
    "ffn_dim": 64,
    "n_inner": 64,
    "hidden_dim": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "rotary_dim": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_labels": 3,
    "pad_token_id": 1,
    "attention_window": 8,
    "block_sizes": [1, 1],
    "ffn_dim_hidden": 64,
    "word_embed_proj_dim": 32,
}
OWN: dict[str, dict[str, Any]] = {
    "funnel": {"architectures": ["FunnelModel"]},  # the one with a decoder; there are two
    "big_bird": {"attention_type": "original_full"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    out = out[0] if isinstance(out, tuple | list) else out
    out = out.flatten(2).mean(2) if out.dim() > 2 else out
    return F.cross_entropy(out, batch[1], reduction="none")


def image_case(name: str) -> Case:
    """The smallest form that can be built and run: few blocks, small images."""
    import timm

    for options in ATTEMPTS:
        try:
            model = timm.create_model(name, pretrained=False, num_classes=10, **options).eval()
        except (TypeError, AssertionError, RuntimeError, ValueError, IndexError, KeyError):
            continue
        for size in (64, model.default_cfg["input_size"][-1]):
            images = torch.randn(ROWS, 3, size, size)
            try:
                with torch.no_grad():
                    model(images)
            except (AssertionError, RuntimeError, ValueError, IndexError, TypeError):
                continue
            return model, (images, torch.arange(ROWS) % 10), image_loss
    raise ValueError(f"{name} cannot be built.")


def text_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(input_ids=batch[0], return_dict=True)
    hidden = out[0]
    return (hidden.float() ** 2).flatten(1).mean(1) + hidden.float().flatten(1).mean(1)


def two_sided_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    hidden = model(input_ids=batch[0], decoder_input_ids=batch[0], return_dict=True)[0]
    return (hidden.float() ** 2).flatten(1).mean(1) + hidden.float().flatten(1).mean(1)


def text_case(name: str) -> Case:
    from transformers import AutoConfig, AutoModel

    known = {}
    for key, value in SIZES.items():
        blank = AutoConfig.for_model(name)
        try:
            if hasattr(blank, key):
                setattr(blank, key, value)
                known[key] = value
        except (AttributeError, NotImplementedError):  # follows from others
            continue
    config = AutoConfig.for_model(name, **known, **OWN.get(name, {}))
    model = AutoModel.from_config(config).eval()
    loss = two_sided_loss if getattr(config, "is_encoder_decoder", False) else text_loss
    tokens = torch.randint(3, 50, (ROWS, 16), generator=torch.Generator().manual_seed(0))
    return model, (tokens, torch.arange(ROWS)), loss


def families() -> dict[str, tuple[str, Callable[[], Case]]]:
    images = {name: ("timm", lambda each=each: image_case(each)) for name, each in TIMM.items()}
    texts = {name: ("transformers", lambda each=name: text_case(each)) for name in TEXT.split()}
    return images | texts  # type: ignore[return-value]


def judge(case: Case) -> tuple[str, str]:
    """The way that this model's gradients go, and what does not go by a rule."""
    model, batch, loss = case
    unused = _unused(model, batch, loss)
    for name, parameter in model.named_parameters():
        if name in unused:
            parameter.requires_grad_(False)
    engine = Engine(model, loss, clip=1.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine(batch)
    served = engine.served
    if engine.by_row:
        notes = [str(w.message) for w in said if "row by row" in str(w.message)]
        return "by row", notes[0].split(";")[0] if notes else ""
    slow = sorted({rule for rule in served.values() if rule.startswith("torch.func")})
    return ("vmap", ", ".join(slow)) if slow else ("fast", "")


def _unused(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]) -> set[str]:
    """Parameters that this loss does not reach (poolers, masks for pretraining)."""
    loss(model, batch).sum().backward()
    unused = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    model.zero_grad(set_to_none=True)
    return unused


PAGE = """# Which models are fast

Made by `python tools/zoo.py --markdown docs/model-families.md`. The smallest member of each family, with few blocks
where it can be built so, random weights and all parameters trained (those that the loss does not reach are frozen;
BatchNorm in evaluation mode). *Fast*: a rule serves every parameter. *vmap*: `torch.func` serves those that are named.
*By row*: only plain autograd, one row at a time. *Refused*: the error says why, before anything is charged. The result
is the same in each case; what differs is the time.
"""


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = [PAGE]
    for library in ("timm", "transformers"):
        mine = {name: row for name, row in found.items() if row["library"] == library}
        ways = [row["way"] for row in mine.values()]
        kinds = ("fast", "vmap", "by row", "refused", "not built")
        counts = ", ".join(f"{ways.count(kind)} {kind}" for kind in kinds if kind in ways)
        lines += [f"## {library}: {len(mine)} families", "", f"{counts}.", "", "| family | way | what has no rule |"]
        lines.append("|---|---|---|")
        lines += [f"| {name} | {row['way']} | {row['note']} |" for name, row in sorted(mine.items(), key=_by_way)]
        lines.append("")
        if missing := [name for name, (whose, _) in families().items() if whose == library and name not in found]:
            lines += [f"In the list of the script but not run for this page: {', '.join(missing)}.", ""]
    return "\n".join(lines)


def _by_way(item: tuple[str, dict[str, Any]]) -> tuple[str, str]:
    return item[1]["way"], item[0].lower()


def look(library: str, make: Callable[[], Case]) -> dict[str, Any]:
    start = time.process_time()
    torch.manual_seed(0)
    try:
        case = make()
    except Exception as error:
        way, note = "not built", f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    else:
        try:
            way, note = judge(case)
        except Exception as error:
            way, note = "refused", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return {"library": library, "way": way, "note": note, "seconds": round(time.process_time() - start, 1)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some families")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results, written after each family and read again")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="docs/model-families.md")
    options = parser.parse_args(argv)
    found = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for name, (library, make) in families().items():
        if (options.only and name not in options.only) or (name in found and not options.only):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = look(library, make)
        print(f"{name}: {found[name]['way']} {found[name]['note']} ({found[name]['seconds']} s)", flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    if options.markdown:
        options.markdown.write_text(table(found).rstrip() + "\n")


if __name__ == "__main__":
    sys.exit(main())

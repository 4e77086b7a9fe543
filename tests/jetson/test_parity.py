"""Our graphs give the logits that transformers gives: every family, prompts, single tokens and trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from starsd_edge.bundle import Bundle
from starsd_edge.decoding.tree import DraftTree
from starsd_jetson import embedded
from starsd_jetson.export import ExportSettings, export
from starsd_jetson.graph.gguf_source import GGUF_LAYER_NAMES, GGUF_MODEL_NAMES
from starsd_jetson.graph.plausible import tensor_names
from starsd_jetson.graph.sources import open_source
from starsd_jetson.onnx_target import OnnxTarget

FAMILIES = [
    "llama grouped",
    "llama ungrouped, tied",
    "llama 1",
    "llama 2",
    "llama 3",
    "llama 3.1",
    "llama 3.2",
    "vicuna 16k",
    "tinyllama",
    "smollm2",
    "mistral",
    "qwen2",
    "qwen2.5",
    "qwen3",
    "qwen3, tied",
]
TOLERANCE = 2e-4  # logits; both sum in float32, in different orders


def reference(model: Any, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits [L, V] and the final norm's output [L, H]."""
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    return out.logits[0].numpy(), out.hidden_states[-1][0].numpy()


def random_tree(rng: np.random.Generator, size: int, base_len: int) -> DraftTree:
    parents = [-1, *(int(rng.integers(max(0, node - 3), node)) for node in range(1, size))]
    tokens = rng.permutation(150)[:size].astype(np.int32)
    return DraftTree(tokens, np.array(parents, np.int32), base_len)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_the_tensors_that_transformers_gives_it(family: str, tiny: Callable[[str], Any]) -> None:
    """They are looked for before any is read."""
    model = tiny(family)
    theirs = dict(model.reference.named_parameters())  # tied ones once
    assert set(theirs) == set(tensor_names(open_source(model.folder).shape))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_equal_transformers(
    family: str, tiny: Callable[[str], Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    """A prompt in two parts, then a tree whose every path is checked, then the kept path goes on."""
    model = tiny(family)
    target = model.export(tmp_path / "bundle", quant="fp32")
    prompt = rng.integers(3, 150, 40).astype(np.int32)

    first = target.prefill(prompt[:25])
    second = target.prefill(prompt[25:])
    logits, features = reference(model.reference, prompt.tolist())
    np.testing.assert_allclose(second.logits[0], logits[-1], atol=TOLERANCE)
    np.testing.assert_allclose(np.concatenate([first.features, second.features]), features, atol=TOLERANCE)

    tree = random_tree(rng, 9, len(prompt) + 1)
    out = target.forward(tree)
    for node in range(len(tree)):
        path = tree.path(node)
        logits, features = reference(model.reference, [*prompt.tolist(), *tree.tokens[path].tolist()])
        np.testing.assert_allclose(out.logits[node], logits[-1], atol=TOLERANCE)
        np.testing.assert_allclose(out.features[node], features[-1], atol=TOLERANCE)

    target.keep(path)
    committed = [*prompt.tolist(), *tree.tokens[path].tolist()]
    assert target.kv_len == len(committed)
    out = target.forward(DraftTree.root_only(5, len(committed) + 1))
    np.testing.assert_allclose(
        out.logits[0], reference(model.reference, [*committed, 5])[0][-1], atol=TOLERANCE
    )


@pytest.mark.parametrize("family", ["llama grouped", "llama ungrouped, tied"])
@pytest.mark.parametrize("quant", ["int8", "int4", "int4-exact"])
def test_quantised_logits_stay_close(
    quant: str, family: str, tiny: Callable[[str], Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    model = tiny(family)
    target = model.export(tmp_path / "bundle", quant=quant)
    prompt = rng.integers(3, 150, 40).astype(np.int32)
    expected = reference(model.reference, prompt.tolist())[0][-1]
    found = target.prefill(prompt).logits[0]
    assert np.corrcoef(expected, found)[0, 1] > (0.999 if quant == "int8" else 0.95)


@pytest.mark.parametrize(
    ("family", "product"),
    [("llama grouped", "MatMulIntegerToFloat"), ("llama ungrouped, tied", "MatMulNBits")],
)
def test_the_lm_head_is_int4_only_where_it_is_the_embedding(
    family: str, product: str, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    """Elsewhere a draft head reads its rows, and it is a small part of the model."""
    bundle = export(tiny(family).folder, tmp_path / "bundle", ExportSettings(quant="int4"))
    graph = onnx.load(bundle.graph_path, load_external_data=False).graph
    assert [product] == [node.op_type for node in graph.node if "head" in node.input]
    assert bundle.lm_head(np.array([3, 5])).shape == (2, bundle.manifest.shapes.hidden_size)


def read_embedded() -> Any:
    """The embedded model in transformers, read from its file without our reader."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(embedded.gguf_path()).tensors}
    layers, heads, kv_heads = 30, 9, 3
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    names = {ours: theirs for ours, theirs in GGUF_MODEL_NAMES.items() if theirs in tensors}
    for layer in range(layers):
        for ours, theirs in GGUF_LAYER_NAMES.items():
            if f"blk.{layer}.{theirs}" in tensors:
                names[f"model.layers.{layer}.{ours}"] = f"blk.{layer}.{theirs}"
    state = {}
    for ours, theirs in names.items():
        values = gguf.quants.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in ours:  # its rotary pairs are interleaved
                values = values.reshape(count, 32, 2, 576).transpose(0, 2, 1, 3).reshape(-1, 576)
        state[ours] = torch.from_numpy(np.array(values))
    model = LlamaForCausalLM(config)
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"])  # which is the embedding
    return model.eval()


@pytest.mark.model
def test_the_embedded_model_is_the_one_that_transformers_runs(rng: np.random.Generator) -> None:
    target = OnnxTarget.load(Bundle.open(embedded.bundle_path("fp32")), 2)
    model = read_embedded()
    prompt = rng.integers(3, 49000, 24).astype(np.int32)
    tolerance = 2e-3  # thirty layers, and logits of up to 30
    found = target.prefill(prompt)
    logits, features = reference(model, prompt.tolist())
    np.testing.assert_allclose(found.logits[0], logits[-1], atol=tolerance)
    np.testing.assert_allclose(found.features, features, atol=tolerance)
    tree = random_tree(rng, 6, len(prompt) + 1)
    out = target.forward(tree)
    for node in (3, 5):
        path = tree.path(node)
        logits, _ = reference(model, [*prompt.tolist(), *tree.tokens[path].tolist()])
        np.testing.assert_allclose(out.logits[node], logits[-1], atol=tolerance)

"""Heads on disk: what is written is read back, and whatever is wrong is named in one line."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from starsd_edge.errors import BundleError, UsageError
from starsd_edge.protocol.greeting import Identity, projection_hash
from starsd_server.cli_convert import command as convert_command
from starsd_server.heads.checkpoint import EMBEDDED_HEAD, HeadManifest, load_head, read_manifest, save_head
from starsd_server.heads.convert import convert
from starsd_server.heads.head import EagleHead, HeadKind
from starsd_server.heads.target import open_target_rows

from .heads import random_head, small_config

GOLDEN = Path(__file__).parent / "golden" / "eagle"
TARGET = GOLDEN / "targets" / "mha-8"


def manifest_of(head: EagleHead, target_hash: str = "00") -> HeadManifest:
    config = head.config
    identity = Identity(
        target="toy",
        target_hash=target_hash,
        vocab_size=config.vocab_size,
        tokenizer_hash="11",
        hidden_size=config.hidden_size,
        feature_size=config.hidden_size,
        projection=projection_hash(head.fc.weight.detach().half().float().numpy())
        if config.kind is HeadKind.EAGLE3
        else msgspec.UNSET,
    )
    return HeadManifest(name="small", head=config, identity=identity)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    head = random_head(HeadKind.EAGLE1)
    save_head(head, manifest_of(head), tmp_path / "head")
    return tmp_path / "head"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STARSD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", list(HeadKind))
@pytest.mark.parametrize("draft_vocab", [256, 512])
def test_what_is_written_is_read_back(kind: HeadKind, draft_vocab: int, tmp_path: Path) -> None:
    """In half precision, but for the draft vocabulary, which a head of the whole one need not store."""
    head = random_head(kind, config=small_config(kind, draft_vocab))
    save_head(head, manifest_of(head), tmp_path)
    again = load_head(tmp_path)
    assert read_manifest(tmp_path) == manifest_of(head)
    for name, tensor in head.state_dict().items():
        if name == "draft_to_target":
            expected = tensor if draft_vocab < 512 else torch.arange(512)
        else:
            expected = tensor.half().float()
        assert torch.equal(expected, again.state_dict()[name]), name
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert ("draft_to_target" in load_file(tmp_path / "head.safetensors")) == (draft_vocab < 512)


def test_what_belongs_to_the_target_is_made_once_and_kept(tmp_path: Path, own_cache: Path) -> None:
    """As for the head that ships with the package, whose folder has no target.safetensors and may not be
    writable."""
    head = random_head(HeadKind.EAGLE1)
    rows = open_target_rows(TARGET)
    head.embedding = torch.from_numpy(rows.embedding())
    head.lm_head.data = torch.from_numpy(rows.lm_head(head.draft_to_target.numpy()))
    save_head(head, manifest_of(head, rows.hash), tmp_path / "head")
    (tmp_path / "head" / "target.safetensors").unlink()
    with pytest.raises(BundleError, match=r"no target\.safetensors; name the target once"):
        load_head(tmp_path / "head")
    made = load_head(tmp_path / "head", TARGET)
    kept = load_head(tmp_path / "head")  # needs the target no more
    assert [file.name for file in own_cache.rglob("*.safetensors")] == ["target.safetensors"]
    for loaded in (made, kept):
        torch.testing.assert_close(loaded.lm_head, head.lm_head, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(loaded.embedding, head.embedding, atol=1e-3, rtol=1e-3)


def test_a_head_of_another_target_is_refused(folder: Path) -> None:
    (folder / "target.safetensors").unlink()
    with pytest.raises(BundleError, match="not the target of the head"):
        load_head(folder, TARGET)


def test_missing_extra_and_wrong_tensors_are_all_named(folder: Path) -> None:
    file = folder / "head.safetensors"
    tensors = load_file(file)
    tensors["surplus.weight"] = tensors.pop("down_proj.weight")
    tensors["o_proj.weight"] = tensors["o_proj.weight"][:-1].clone()
    save_file(tensors, file)
    with pytest.raises(BundleError) as caught:
        load_head(folder)
    message = str(caught.value)
    assert "missing: down_proj.weight" in message
    assert "unknown: surplus.weight" in message
    assert "o_proj.weight is [63, 64], not [64, 64]" in message


@pytest.mark.parametrize("ids", [[0] * 256, [*range(255), 512], [*range(255), -1]])
def test_a_draft_vocabulary_outside_the_targets_is_refused(folder: Path, ids: list[int]) -> None:
    file = folder / "head.safetensors"
    save_file(load_file(file) | {"draft_to_target": torch.tensor(ids, dtype=torch.int32)}, file)
    with pytest.raises(BundleError, match="draft_to_target must hold different tokens of 0 to 511"):
        load_head(folder)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not a draft head's configuration"),
        ('{"name": "x"}', "missing required field `head`"),
        ("FORMAT", "format 'starsd-head-9', this version reads 'starsd-head-1'"),
        ("HEADS", "5 heads over 2 KV heads"),
        ("NAME", "is not 1 to 128 printable characters"),
        ("LAYERS", "an identity without feature layers"),
    ],
)
def test_a_damaged_configuration_is_named(folder: Path, text: str, complaint: str) -> None:
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    if text == "FORMAT":
        text = json.dumps(raw | {"format": "starsd-head-9"})
    if text == "NAME":
        text = json.dumps(raw | {"name": "x\x1b[31m"})
    if text == "LAYERS":
        text = json.dumps(raw | {"identity": raw["identity"] | {"feature_layers": []}})
    if text == "HEADS":
        text = json.dumps(raw | {"head": raw["head"] | {"num_heads": 5}})
    file.write_text(text)
    with pytest.raises(BundleError, match=complaint):
        load_head(folder)


def test_a_cut_file_and_a_folder_without_a_head_are_named(folder: Path, tmp_path: Path) -> None:
    file = folder / "head.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(BundleError, match=r"head\.safetensors: cannot be read"):
        load_head(folder)
    with pytest.raises(BundleError, match="not a draft head"):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("part", "key", "value", "complaint"),
    [
        ("head", "num_kv_heads", 0, "num_kv_heads is 0; it must be 1 to"),
        ("head", "num_heads", -4, "num_heads is -4"),
        ("head", "hidden_size", -64, "hidden_size is -64"),
        ("head", "intermediate_size", 2**62, "intermediate_size is"),
        ("head", "vocab_size", 10**30, "not a draft head's configuration"),
        ("head", "head_dim", 0, "head_dim is 0"),
        ("head", "rms_eps", -1, "rms_eps is -1"),
        ("head", "rope_theta", 0, "rope_theta is 0"),
        ("head", "rope_theta", -1, "rope_theta is -1"),
        ("head", "rope_scale", 0, "rope_scale is 0"),
        ("identity", "feature_size", 63, "an identity of 512 tokens and features 63 wide"),
        ("identity", "vocab_size", 511, "an identity of 511 tokens"),
        ("identity", "hidden_size", [[]] * 3, "not a draft head's configuration"),
    ],
)
def test_a_number_that_no_head_has_is_named(
    folder: Path, part: str, key: str, value: object, complaint: str
) -> None:
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    raw[part][key] = value
    file.write_text(json.dumps(raw))
    with pytest.raises(BundleError, match=complaint):
        load_head(folder)


def test_a_deep_configuration_and_a_pipe_are_refused(folder: Path) -> None:
    file = folder / "config.json"
    file.write_bytes(b'{"a":' + b"[" * 200_000)
    with pytest.raises(BundleError, match="not a draft head's configuration"):
        load_head(folder)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(BundleError, match="not a regular file"):
        load_head(folder)


@pytest.mark.parametrize(
    ("file", "name", "value", "complaint"),
    [
        ("head", "fc.weight", math.nan, "fc.weight holds NaN or infinity"),
        ("head", "mlp_norm.weight", -math.inf, "mlp_norm.weight holds NaN or infinity"),
        ("head", "qkv_proj.weight", torch.complex64, "qkv_proj.weight is complex64, not float16, bfloat16"),
        ("head", "qkv_proj.weight", torch.int8, "qkv_proj.weight is int8"),
        ("head", "draft_to_target", torch.float32, "draft_to_target is torch.float32, not int32"),
        ("target", "embedding", math.nan, "embedding holds NaN or infinity; delete it to have it made again"),
        ("target", "embedding", torch.bool, "embedding is bool"),
    ],
)
def test_weights_of_another_kind_and_not_finite_ones_are_named(
    folder: Path, file: str, name: str, value: float | torch.dtype, complaint: str
) -> None:
    path = folder / f"{file}.safetensors"
    tensors = load_file(path)
    if isinstance(value, torch.dtype):
        tensors[name] = tensors[name].to(value)
    else:
        tensors[name].view(-1)[-1] = value
    save_file(tensors, path)
    with pytest.raises(BundleError, match=complaint):
        load_head(folder, dtype=None)


def test_what_cannot_be_loaded_again_is_not_put_in_place(folder: Path) -> None:
    """Neither NaN nor what half precision makes infinite; what was there stays."""
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for value, complaint in ((math.nan, "holds NaN"), (1e9, "holds values beyond float16")):
        head = random_head(HeadKind.EAGLE1, seed=1)
        head.o_proj.weight.data[3, 5] = value
        with pytest.raises(BundleError, match=f"o_proj.weight {complaint}"):
            save_head(head, manifest_of(head), folder)
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}


class Cached:
    """A head without `target.safetensors`, for TARGET, and the cache's file of it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        head = random_head(HeadKind.EAGLE1)
        save_head(head, manifest_of(head, open_target_rows(TARGET).hash), folder)
        (folder / "target.safetensors").unlink()
        load_head(folder, TARGET)
        (self.file,) = cache.rglob("*.safetensors")


@pytest.mark.parametrize("size", [0, 1000])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, own_cache: Path, size: int) -> None:
    cached = Cached(tmp_path / "head", own_cache)
    whole = cached.file.read_bytes()
    os.truncate(cached.file, size)
    with pytest.raises(BundleError, match=r"name the target once .* cannot be read .*; delete it"):
        load_head(cached.folder)
    load_head(cached.folder, TARGET)
    assert whole == cached.file.read_bytes()


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached = Cached(tmp_path / "head", own_cache)
    cached.file.unlink()
    cached.file.mkdir()
    load_head(cached.folder, TARGET)
    assert "cannot be kept" in caplog.text
    assert [cached.file] == list(cached.file.parent.iterdir())
    shutil.rmtree(own_cache)
    own_cache.write_text("a file")
    caplog.clear()
    load_head(cached.folder, TARGET)
    assert "cannot be kept" in caplog.text


class Published:
    """A published head that a test changes before it is converted."""

    def __init__(self, case: str, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.config = json.loads((GOLDEN / "heads" / case / "config.json").read_text())
        self.tensors = torch.load(GOLDEN / "heads" / case / "pytorch_model.bin", weights_only=True)

    def convert(self) -> HeadManifest:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.folder / "model.safetensors")
        return convert(self.folder, TARGET, self.folder / "out")


@pytest.fixture
def eagle1(tmp_path: Path) -> Published:
    return Published("eagle1-bias", tmp_path / "eagle1")


@pytest.fixture
def eagle3(tmp_path: Path) -> Published:
    return Published("eagle3-small-vocab", tmp_path / "eagle3")


def test_eagle1_without_a_bias_key_has_the_bias_its_file_holds(eagle1: Published) -> None:
    assert eagle1.convert().head.fc_bias
    del eagle1.tensors["fc.bias"]
    assert not eagle1.convert().head.fc_bias
    eagle1.config["bias"] = True
    with pytest.raises(BundleError, match=r"missing: fc\.bias"):
        eagle1.convert()


@pytest.mark.parametrize("case", ["eagle1", "eagle3"])
@torch.inference_mode()
def test_heads_of_qwen2_have_biases_on_queries_keys_and_values(
    case: str, request: pytest.FixtureRequest
) -> None:
    """They were called unknown. At position 0 nothing is rotated, and a bias is what it adds."""
    published: Published = request.getfixturevalue(case)
    layer = "layers.0" if case == "eagle1" else "midlayer"
    published.convert()
    plain = attention_inputs(load_head(published.folder / "out"))
    biases = [torch.full((64,), value) for value in (0.5, -1.0, 2.0)]
    for name, bias in zip("qkv", biases, strict=True):
        published.tensors[f"{layer}.self_attn.{name}_proj.bias"] = bias
    assert published.convert().head.qkv_bias
    shifted = attention_inputs(load_head(published.folder / "out"))
    for before, after, bias in zip(plain, shifted, biases, strict=True):
        torch.testing.assert_close(after, before + bias.view_as(before))
    del published.tensors[f"{layer}.self_attn.k_proj.bias"]
    published.config["qkv_bias"] = True
    with pytest.raises(BundleError, match=rf"missing: {layer}\.self_attn\.k_proj\.bias"):
        published.convert()


def attention_inputs(head: EagleHead) -> list[Tensor]:
    """Queries, keys and values of one row at position 0, [1, heads, D] each."""
    seen: list[Tensor] = []

    def attend(*rows: Tensor) -> Tensor:
        seen.extend(rows)
        return rows[2]

    head.forward(torch.tensor([3]), torch.ones(1, 64), torch.tensor([0]), attend)
    return seen


def test_what_is_in_the_way_of_a_converted_head_stays(eagle1: Published) -> None:
    """A trained head, and what was published when --out names its own folder, were written over."""
    out = eagle1.folder / "out"
    eagle1.convert()
    (eagle1.folder / "file").write_text("mine")

    def run(*options: str) -> None:
        convert_command.main([str(eagle1.folder), str(TARGET), *options], standalone_mode=False)

    for place in (eagle1.folder, eagle1.folder / "file"):
        with pytest.raises(UsageError, match="exists and is not a head of ours; choose another --out"):
            run("--out", str(place), "--replace")
    before = (out / "head.safetensors").read_bytes()
    with pytest.raises(UsageError, match="already holds the head 'eagle1'; give --replace"):
        run("--out", str(out), "--dtype", "fp32")
    assert before == (out / "head.safetensors").read_bytes()
    run("--out", str(out), "--dtype", "fp32", "--replace")
    assert before != (out / "head.safetensors").read_bytes()


def test_eagle1_names_its_features_the_final_norms(eagle1: Published) -> None:
    identity = eagle1.convert().identity
    assert (identity.feature_layers, identity.feature_norm, identity.feature_size) == ((-1,), True, 64)


def test_the_contexts_it_was_trained_on_are_kept_and_bound_a_services(eagle1: Published) -> None:
    eagle1.config["max_position_embeddings"] = 1024
    manifest = eagle1.convert()
    assert (1024, 1024, 512) == (manifest.trained_len, manifest.max_len(2048), manifest.max_len(512))
    assert read_manifest(eagle1.folder / "out") == manifest
    del eagle1.config["max_position_embeddings"]
    assert 2048 == eagle1.convert().max_len(2048)
    eagle1.config["max_position_embeddings"] = -1
    with pytest.raises(BundleError, match="max_position_embeddings is -1"):
        eagle1.convert()


def test_eagle3_taps_three_layers_and_sends_them_projected(eagle3: Published) -> None:
    manifest = eagle3.convert()
    assert manifest.head.feature_size == 3 * 64
    identity = manifest.identity
    assert (identity.feature_layers, identity.feature_norm, identity.feature_size) == ((2, 4, 5), False, 64)


def test_another_projection_than_the_named_is_refused(eagle3: Published) -> None:
    eagle3.convert()
    file = eagle3.folder / "out" / "head.safetensors"
    tensors = load_file(file)
    tensors["fc.weight"][0, 0] += 1
    save_file(tensors, file)
    with pytest.raises(BundleError, match=r"fc\.weight is not the one that its config\.json names"):
        load_head(eagle3.folder / "out")


def test_an_eagle3_head_that_does_not_name_its_projection_is_refused(eagle3: Published) -> None:
    """It was taken unseen, and drafted for bundles with any projection, or with none."""
    eagle3.convert()
    file = eagle3.folder / "out" / "config.json"
    config = json.loads(file.read_text())
    del config["identity"]["projection"]
    file.write_text(json.dumps(config))
    with pytest.raises(BundleError, match="does not name its projection"):
        load_head(eagle3.folder / "out")


def test_an_eagle1_head_has_no_projection(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["identity"]["projection"] = "ab"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BundleError, match="an EAGLE-1 head with a projection"):
        load_head(folder)


def test_eagle3_of_the_whole_vocabulary_has_no_table(eagle3: Published) -> None:
    """The reference drops d2t when the sizes are equal, whatever it holds."""
    eagle3.config["draft_vocab_size"] = 512
    eagle3.tensors["lm_head.weight"] = torch.randn(512, 64)
    eagle3.tensors["d2t"] = torch.ones(512, dtype=torch.int64)
    eagle3.convert()
    assert torch.equal(torch.arange(512), load_head(eagle3.folder / "out").draft_to_target)


def test_eagle3_without_its_table_or_with_one_that_leads_astray_is_refused(eagle3: Published) -> None:
    table = eagle3.tensors.pop("d2t")
    with pytest.raises(BundleError, match="missing: d2t"):
        eagle3.convert()
    eagle3.tensors["d2t"] = table + 500
    with pytest.raises(BundleError, match="outside the vocabulary"):
        eagle3.convert()


def test_a_head_that_brings_its_own_embedding_keeps_it(eagle1: Published) -> None:
    eagle1.tensors["embed_tokens.weight"] = torch.full((512, 64), 0.25)
    eagle1.convert()
    assert (load_head(eagle1.folder / "out").embedding == 0.25).all()


def test_missing_and_unknown_tensors_of_a_published_head_are_named(eagle1: Published) -> None:
    eagle1.tensors["layers.0.input_layernorm.weight"] = torch.ones(64)
    del eagle1.tensors["layers.0.mlp.up_proj.weight"]
    with pytest.raises(BundleError) as caught:
        eagle1.convert()
    assert "missing: layers.0.mlp.up_proj.weight" in str(caught.value)
    assert "unknown: layers.0.input_layernorm.weight" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("hidden_act", "gelu", "activation 'gelu'"),
        ("num_hidden_layers", 2, "a head of 2 layers"),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}, "rope_scaling"),
        ("hidden_size", 32, "does not fit its config.json"),
        ("num_attention_heads", 0, "config.json"),
        ("num_attention_heads", -4, "num_heads is -4"),
        ("num_key_value_heads", 0, "num_kv_heads is 0"),
        ("hidden_size", math.inf, "hidden_size is inf, not a whole number"),
        ("intermediate_size", -128, "intermediate_size is -128"),
        ("rope_scaling", "linear", "rope_scaling 'linear' is not supported"),
        ("rope_scaling", [1], "rope_scaling"),
        ("rope_scaling", {"type": "linear"}, "no 'factor'"),
        ("rope_scaling", {"type": "linear", "factor": 0}, "rope_scale is 0"),
        ("rope_theta", "abc", "rope_theta is 'abc', not a number"),
        ("rms_norm_eps", math.nan, "rms_eps is nan"),
        ("max_position_embeddings", True, "max_position_embeddings is True"),
    ],
)
def test_a_published_configuration_that_does_not_fit_is_named(
    eagle1: Published, key: str, value: object, complaint: str
) -> None:
    eagle1.config[key] = value
    with pytest.raises(BundleError, match=complaint):
        eagle1.convert()


def test_a_deep_published_configuration_and_a_pipe_are_refused(eagle1: Published, tmp_path: Path) -> None:
    eagle1.convert()
    file = eagle1.folder / "config.json"
    file.write_bytes(b"[" * 200_000)
    with pytest.raises(BundleError, match="not JSON"):
        convert(eagle1.folder, TARGET, tmp_path / "out")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(BundleError, match="not a regular file"):
        convert(eagle1.folder, TARGET, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("d2t", lambda _: torch.tensor(3), r"d2t is torch.int64 \[\], not int64 \[320\]"),
        ("d2t", lambda d2t: d2t.float(), "d2t is torch.float32"),
        ("midlayer.self_attn.q_proj.weight", lambda _: torch.zeros(5, 3), "not equally wide: .*q_proj"),
        ("midlayer.self_attn.q_proj.weight", lambda _: torch.zeros(5), "not equally wide: .*q_proj"),
        ("fc.weight", lambda fc: fc.to(torch.int8), "fc.weight is int8"),
        ("fc.weight", lambda fc: fc.to_sparse(), "not a plain table of tensors"),
        ("fc.weight", lambda fc: fc.to("meta"), "not a plain table of tensors"),
        ("fc.weight", lambda fc: fc * math.nan, "fc.weight holds NaN or infinity"),
        ("midlayer.mlp.up_proj.weight", lambda up: up.float() * 1e9, "beyond float16; write it in float32"),
        (5, lambda _: torch.zeros(1), "not a plain table of tensors"),
    ],
)
def test_published_tensors_of_another_kind_are_named(
    eagle3: Published, name: str, change: Callable[[Any], Tensor], complaint: str
) -> None:
    eagle3.tensors[name] = change(eagle3.tensors.get(name))
    (eagle3.folder / "config.json").write_text(json.dumps(eagle3.config))
    torch.save(eagle3.tensors, eagle3.folder / "pytorch_model.bin")
    with pytest.raises(BundleError, match=complaint):
        convert(eagle3.folder, TARGET, eagle3.folder / "out")
    assert not list(eagle3.folder.glob("out/*"))


def test_linear_rope_scaling_divides_positions_and_drops_the_base(eagle1: Published) -> None:
    """As the reference does: with rope_scaling it ignores rope_theta."""
    eagle1.config |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    head = eagle1.convert().head
    assert (head.rope_theta, head.rope_scale) == (10000.0, 4.0)


def test_a_pickle_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (str(tmp_path / "ran"),)  # type: ignore[return-value]

    source = tmp_path / "evil"
    source.mkdir()
    (source / "config.json").write_text((GOLDEN / "heads" / "eagle1-bias" / "config.json").read_text())
    torch.save({"fc.weight": Evil()}, source / "pytorch_model.bin")
    with pytest.raises(BundleError, match="cannot be read safely"):
        convert(source, TARGET, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_the_head_that_ships_is_whole_and_small_enough() -> None:
    """Everything but what belongs to the target, which a service takes from the model it is given."""
    manifest = read_manifest(EMBEDDED_HEAD)
    sizes = {file.name: file.stat().st_size for file in EMBEDDED_HEAD.iterdir()}
    assert {"config.json", "head.safetensors", "README.md"} == set(sizes)
    assert sizes["head.safetensors"] <= 16 * 2**20
    assert (manifest.head.draft_vocab_size, manifest.head.vocab_size) == (8192, 49152)
    with pytest.raises(BundleError, match="not the target of the head"):  # all before that was read
        load_head(EMBEDDED_HEAD, TARGET)
    tensors = load_file(EMBEDDED_HEAD / "head.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())

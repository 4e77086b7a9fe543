"""What turns text into tokens, taken from the source: tokenizer.json, chat template, stop tokens.

A Hugging Face folder has them as files. A GGUF file has a vocabulary and merges in its metadata, from which
the same tokenizer is rebuilt; which pre-tokenizer belongs to it, the file says by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starsd_edge.bundle import SamplingDefaults
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.errors import BundleError, MissingDependencyError, UsageError
from starsd_edge.extras import install_hint
from starsd_edge.text.builtin_templates import BUILTIN_TEMPLATES
from starsd_jetson.graph.checked_source import UNUSABLE
from starsd_jetson.graph.folder_source import FolderSource
from starsd_jetson.graph.gguf_source import GgufSource
from starsd_jetson.graph.sources import WeightSource
from starsd_jetson.sentencepiece import Piece, read_pieces, sentencepiece_json

__all__ = ["TextSettings", "read_text_settings"]

# Tokens that end a turn, whatever else the source lists as its end of sequence.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>", "</s>")


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Everything of a bundle that is about text."""

    tokenizer_json: str
    chat_template: str
    bos_token: int
    add_bos: bool
    stop_tokens: tuple[int, ...]
    sampling: SamplingDefaults


def read_text_settings(source: WeightSource) -> TextSettings:
    """Raises BundleError when the source has no tokenizer that can be converted, or says of its tokens or
    its sampling what cannot be."""
    try:
        if isinstance(source, GgufSource):
            text = read_gguf(source)
        else:
            assert isinstance(source, FolderSource)
            text = read_hugging_face(source)
    except (*UNUSABLE, OSError) as error:  # UnicodeDecodeError is a ValueError
        raise BundleError(f"{source.path}: its tokenizer files cannot be used ({error})") from error
    check(text, source)
    return text


def known_template(*names: str) -> str:
    """Vicuna's files carry none; its name is all there is to go by."""
    return BUILTIN_TEMPLATES["vicuna_v1.1"] if "vicuna" in " ".join(names).lower() else ""


def check(text: TextSettings, source: WeightSource) -> None:
    """Raises BundleError."""
    vocab_size = source.shape.vocab_size
    for token in (text.bos_token, *text.stop_tokens):
        if not -1 <= token < vocab_size:
            raise BundleError(f"{source.path}: special token {token} is none of the model's {vocab_size}")
    suggested = text.sampling
    try:
        SamplingParams(
            temperature=suggested.temperature,
            top_k=suggested.top_k,
            top_p=suggested.top_p,
            min_p=suggested.min_p,
            repetition_penalty=suggested.repetition_penalty,
        )
    except UsageError as error:
        raise BundleError(f"{source.path}: its suggested sampling cannot be used: {error}") from error


def import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingDependencyError(
            f"exporting needs the tokenizers package: {install_hint('export')}"
        ) from error
    return tokenizers


# GGUF ------------------------------------------------------------------------------------------------------

GGUF_NAMES = ("general.name", "general.basename", "general.finetune")
CONTROL, USER_DEFINED = 3, 4  # token types of GGUF that are matched before the text is split

# Pre-tokenizers by the name that llama.cpp's converter gave them (tokenizer.ggml.pre).
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def digits_then_bytes(tokenizers: Any) -> Any:
    pre = tokenizers.pre_tokenizers
    return pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])


def split_then_bytes(pattern: str) -> Callable[[Any], Any]:
    def build(tokenizers: Any) -> Any:
        pre = tokenizers.pre_tokenizers
        split = pre.Split(tokenizers.Regex(pattern), behavior="isolated")
        return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


PRE_TOKENIZERS: dict[str, Callable[[Any], Any]] = {
    "smollm": digits_then_bytes,
    **dict.fromkeys(LLAMA3_NAMES, split_then_bytes(LLAMA3_SPLIT)),
    "qwen2": split_then_bytes(QWEN2_SPLIT),
    "gpt-2": lambda tokenizers: tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
}


def read_gguf(source: GgufSource) -> TextSettings:
    kind = source.field("tokenizer.ggml.model", "none")
    if kind not in GGUF_TOKENIZERS:
        known = ", ".join(sorted(GGUF_TOKENIZERS))
        raise BundleError(f"{source.path}: tokenizer '{kind}' is not supported (supported: {known})")
    tokens: list[str] = source.field("tokenizer.ggml.tokens")
    kinds: list[int] = source.field("tokenizer.ggml.token_type")
    ends = {source.field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    ends |= {i for i, t in enumerate(tokens) if kinds[i] == CONTROL and t in END_OF_TURN}
    bos = source.field("tokenizer.ggml.bos_token_id")
    return TextSettings(
        tokenizer_json=GGUF_TOKENIZERS[kind](source, tokens, kinds),
        chat_template=str(source.field("tokenizer.chat_template", ""))
        or known_template(*(str(source.field(key, "")) for key in GGUF_NAMES), source.path.name),
        bos_token=-1 if bos is None else int(bos),
        add_bos=adds_bos(source),
        stop_tokens=tuple(sorted(int(token) for token in ends)),
        sampling=SamplingDefaults(),
    )


def adds_bos(source: GgufSource) -> bool:
    """Whether texts begin with BOS. Files of Llama 3 often do not say: they do."""
    by_kind = source.field("tokenizer.ggml.model") == "llama"
    by_name = source.field("tokenizer.ggml.pre") in LLAMA3_NAMES
    return bool(source.field("tokenizer.ggml.add_bos_token", by_kind or by_name))


def gguf_sentencepiece(source: GgufSource, tokens: list[str], kinds: list[int]) -> str:
    scores = source.field("tokenizer.ggml.scores", [0.0] * len(tokens))
    pieces = [Piece(t, float(s), k) for t, s, k in zip(tokens, scores, kinds, strict=True)]
    return sentencepiece_json(pieces, prepend=bool(source.field("tokenizer.ggml.add_space_prefix", True)))


def gguf_byte_level(source: GgufSource, tokens: list[str], kinds: list[int]) -> str:
    tokenizers = import_tokenizers()
    pre = source.field("tokenizer.ggml.pre", "gpt-2")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise BundleError(f"{source.path}: pre-tokenizer '{pre}' is not supported (supported: {known})")
    merges = [tuple(merge.split(" ", 1)) for merge in source.field("tokenizer.ggml.merges", [])]
    vocabulary = {token: index for index, token in enumerate(tokens)}

    try:
        model = tokenizers.models.BPE(vocabulary, merges, ignore_merges=pre in LLAMA3_NAMES)
    except Exception as error:  # the package raises no class of its own
        raise BundleError(f"{source.path}: its tokenizer is damaged ({error})") from error
    tokenizer = tokenizers.Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre](tokenizers)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    added = tokenizers.AddedToken
    tokenizer.add_special_tokens(
        [added(t, normalized=False, special=True) for t, k in zip(tokens, kinds, strict=True) if k == CONTROL]
    )
    tokenizer.add_tokens(
        [added(t, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == USER_DEFINED]
    )
    bos = source.field("tokenizer.ggml.bos_token_id")
    if bos is not None and adds_bos(source):
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], int(bos))]
        )
    return str(tokenizer.to_str())


GGUF_TOKENIZERS: dict[str, Callable[[GgufSource, list[str], list[int]], str]] = {
    "gpt2": gguf_byte_level,
    "llama": gguf_sentencepiece,
}


# Hugging Face ----------------------------------------------------------------------------------------------


def read_hugging_face(source: FolderSource) -> TextSettings:
    tokenizers = import_tokenizers()
    file = source.tokenizer_path
    config = read_json(source.path / "tokenizer_config.json")
    generation = read_json(source.path / "generation_config.json")
    if file.suffix == ".json":
        text = file.read_text("utf-8")
    else:
        pieces = read_pieces(file)
        text = sentencepiece_json(pieces + added_pieces(source.path, config, len(pieces)), prepend=True)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises bare Exception for every damaged file
        raise BundleError(f"{file}: damaged ({error})") from error

    def token_id(name: str) -> int:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        found = tokenizer.token_to_id(text) if text else None
        fallback = source.config.get(f"{name}_id")
        return int(found) if found is not None else int(fallback) if isinstance(fallback, int) else -1

    ends: set[int] = {token_id("eos_token")}
    for settings in (generation, source.config):
        value = settings.get("eos_token_id")
        ends |= set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    ends |= {tokenizer.token_to_id(token) for token in END_OF_TURN if token in special}
    bos = token_id("bos_token")
    encoded = tokenizer.encode("a").ids
    return TextSettings(
        tokenizer_json=text,
        chat_template=read_chat_template(source.path, config)
        or known_template(source.name, str(source.config.get("_name_or_path", ""))),
        bos_token=bos,
        add_bos=bool(encoded) and encoded[0] == bos,
        stop_tokens=tuple(sorted(token for token in ends if token >= 0)),
        sampling=read_sampling(generation),
    )


def added_pieces(folder: Path, config: dict[str, Any], count: int) -> list[Piece]:
    """Tokens behind the `count` of the SentencePiece model, which a fine-tuned one has in files of its own.

    Raises BundleError where their ids leave a gap."""
    names = read_json(folder / "special_tokens_map.json").values()
    special = {name.get("content") if isinstance(name, dict) else name for name in flattened(names)}
    found = {
        int(index): Piece(str(text), 0.0, CONTROL if text in special else USER_DEFINED)
        for text, index in read_json(folder / "added_tokens.json").items()
    }
    for index, token in config.get("added_tokens_decoder", {}).items():
        kind = CONTROL if token.get("special") else USER_DEFINED
        found[int(index)] = Piece(str(token["content"]), 0.0, kind)
    added = sorted(index for index in found if index >= count)
    if added != list(range(count, count + len(added))):
        raise BundleError(f"{folder}: its added tokens have the ids {added}, behind {count} of its tokenizer")
    return [found[index] for index in added]


def flattened(values: Iterable[Any]) -> Iterator[Any]:
    """Of lists, what is in them."""
    for value in values:
        yield from value if isinstance(value, list) else [value]


def read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise BundleError(f"{path}: not JSON ({error})") from error
    return value if isinstance(value, dict) else {}


def read_chat_template(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    template = config.get("chat_template") or ""
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template", "") for entry in template}
        template = named.get("default", "")
    return str(template)


def read_sampling(generation: dict[str, Any]) -> SamplingDefaults:
    if not generation.get("do_sample"):
        return SamplingDefaults()
    return SamplingDefaults(
        temperature=float(generation.get("temperature") or 1.0),
        top_k=int(generation.get("top_k") or 0),
        top_p=float(generation.get("top_p") or 1.0),
        min_p=float(generation.get("min_p") or 0.0),
        repetition_penalty=float(generation.get("repetition_penalty") or 1.0),
    )

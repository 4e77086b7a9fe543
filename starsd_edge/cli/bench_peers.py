"""Other engines beside ours in `starsd bench e2e`, with the same weights: whatever of them is installed."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from starsd_edge.errors import MissingDependencyError

__all__ = ["PEERS", "Generated", "Generator", "open_peer"]

LOOKUP_TOKENS = 10  # drafted per lookup; transformers' own documentation uses it
# Assisted generation wants a small model with the same tokenizer. The embedded one has none: its own first
# layers assist it (early exit), which it was not trained for.
ASSISTANT_LAYERS = 4


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer to a prompt.

    tokens         committed, a stop token included
    first_token_s  from the call; None where it is not known
    rounds         forwards after the prompt's; 0: not known
    """

    tokens: list[int]
    first_token_s: float | None
    rounds: int = 0


Generator: TypeAlias = Callable[[Sequence[int], int], Generated]
"""(prompt tokens, most new tokens) -> the greedy answer."""


def transformers(gguf: Path, stop: frozenset[int], threads: int | None) -> dict[str, Generator]:
    """PyTorch in float32, with the weights that the GGUF file stands for."""
    torch = importlib.import_module("torch")
    library = importlib.import_module("transformers")
    if threads is not None:
        torch.set_num_threads(threads)
    source = importlib.import_module("starsd_jetson.graph.sources").open_source(gguf)
    shape = source.shape
    model: Any = library.LlamaForCausalLM(
        library.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.ffn_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_len,
            rms_norm_eps=shape.norm_eps,
            rope_theta=shape.rope_theta,
            tie_word_embeddings=shape.tied_embedding,
        )
    ).eval()
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.tensor(source.tensor(name)))

    def generate(prompt: Sequence[int], max_tokens: int, **extra: int) -> Generated:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=sorted(stop),
                pad_token_id=min(stop),
                **extra,
            )
        return Generated(output[0, len(prompt) :].tolist(), None)

    return {
        "transformers": generate,
        "transformers lookup": partial(generate, prompt_lookup_num_tokens=LOOKUP_TOKENS),
        "transformers assisted": partial(generate, assistant_early_exit=ASSISTANT_LAYERS),
    }


def llama_cpp(gguf: Path, stop: frozenset[int], threads: int | None) -> dict[str, Generator]:
    """llama.cpp on the GGUF file as it is; its draft is its own prompt lookup."""
    library = importlib.import_module("llama_cpp")
    speculative = importlib.import_module("llama_cpp.llama_speculative")
    lookup = speculative.LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
    open_model = partial(
        library.Llama, str(gguf), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def generate(model: Any, prompt: Sequence[int], max_tokens: int) -> Generated:
        started_s, first_s, tokens = time.perf_counter(), 0.0, []
        for token in model.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
            first_s = first_s or time.perf_counter() - started_s
            tokens.append(int(token))
            if token in stop or len(tokens) == max_tokens:
                break
        return Generated(tokens, first_s)

    return {
        "llama.cpp": partial(generate, open_model()),
        "llama.cpp lookup": partial(generate, open_model(logits_all=True, draft_model=lookup)),
    }


PEERS: dict[str, tuple[str, Callable[[Path, frozenset[int], int | None], dict[str, Generator]]]] = {
    "transformers": ("transformers", transformers),
    "llama.cpp": ("llama_cpp", llama_cpp),
}


def open_peer(name: str, gguf: Path, stop: frozenset[int], threads: int | None) -> dict[str, Generator]:
    """Its ways to decode, by name. Raises MissingDependencyError where it is not installed."""
    module, build = PEERS[name]
    if importlib.util.find_spec(module) is None:
        raise MissingDependencyError(f"--peer {name} needs the package {module}: it is not installed")
    return build(gguf, stop, threads)

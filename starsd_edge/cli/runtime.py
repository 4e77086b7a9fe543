"""From what a user names (a bundle, a service) to something that speaks. The one place where the command line
reaches the target runtimes; they are products, so they are found by name."""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starsd_edge.bundle import Bundle, Manifest, damaged
from starsd_edge.chat.contexts import Pair
from starsd_edge.chat.reporter import Board, EdgeReporter
from starsd_edge.chat.speaker import Model, Speaker
from starsd_edge.cli.drafts import DraftService, software
from starsd_edge.cli.fit import available_bytes, check_fits, needs_of
from starsd_edge.cli.verified import known_whole, remember_whole
from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.decoder import Exactness
from starsd_edge.decoding.policy import AdaptivePolicy, PlainPolicy
from starsd_edge.decoding.roles import Target
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.errors import BundleError, MissingDependencyError, UsageError
from starsd_edge.extras import install_hint
from starsd_edge.text.prompt import PromptWriter
from starsd_edge.text.template import ChatTemplate
from starsd_edge.text.tokenizer import Tokenizer

__all__ = [
    "EMBEDDED",
    "ModelChoice",
    "default_sampling",
    "measured_curve",
    "open_board",
    "open_bundle",
    "open_speaker",
    "prompt_writer",
    "read_ahead",
    "target_class",
]

EMBEDDED = "embedded"
EMBEDDED_QUANT = "int8"  # the fastest on a CPU, and bitwise the same with and without drafting
PROGRESS_PERCENT = 20  # of an export between two lines of progress
READ_BYTES = 8 << 20
READ_REPORT_S = 2.0  # a model that is there sooner is not talked about
# Without a service only this device's own short drafts are verified, and a chat should begin soon.
LOCAL_SIZES = (1, 2, 4, 8)
LOCAL_BUDGET_S = 0.3
# What stands in for the template of a base model: it continues text and knows no turns.
NO_CHAT = (
    "{{ raise_exception('it was exported as a base model without one; continue text with "
    "/v1/completions of `starsd serve`, or export it with --chat-template') }}"
)


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What the user asked for.

    threads  None: the runtime decides
    context  tokens; None: what the model was made for
    provider "cpu", "cuda" or "tensorrt" of ONNX Runtime; None: the runtime that the bundle was made for
    """

    bundle: str = EMBEDDED
    quant: str | None = None
    threads: int | None = None
    context: int | None = None
    provider: str | None = None


def open_bundle(choice: ModelChoice, report: Callable[[str], None]) -> Bundle:
    """The chosen bundle; the embedded one is fetched and exported on first use.

    Raises BundleError, or MissingDependencyError where the runtime is not installed.
    """
    if choice.bundle != EMBEDDED:
        return Bundle.open(Path(choice.bundle))
    embedded = _product("starsd_jetson.embedded")
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // max(total, 1)
        if percent >= shown:
            report(f"preparing the embedded model, once: {percent}%")
            shown = percent - percent % PROGRESS_PERCENT + PROGRESS_PERCENT

    return Bundle.open(embedded.bundle_path(choice.quant or EMBEDDED_QUANT, progress))


def open_speaker(
    bundle: Bundle,
    choice: ModelChoice,
    service: DraftService | None,
    *,
    report: Callable[[str], None],
    max_contexts: int = 1,
    draft: str = "exact",
) -> Speaker:
    """Load the bundle's model, for as many conversations at once as `max_contexts`.

    draft  "exact", "inexact" or "off", as the command line has it

    Raises ResourceError, before loading, when it does not fit.
    """
    manifest = bundle.manifest
    wanted = min(manifest.max_len, choice.context or manifest.max_len)
    needs = needs_of(manifest, max_contexts)
    max_len = check_fits(str(bundle.path), needs, wanted, available_bytes())
    if (choice.context or 0) > manifest.max_len:
        report(f"--context {choice.context}: the model was made for {manifest.max_len} tokens, and has these")
    if max_len < wanted:
        report(f"memory for {max_len} of {wanted} tokens of context")
    model = Model(
        name=model_name(choice),
        writer=prompt_writer(bundle),
        max_len=max_len,
        stop_tokens=frozenset(manifest.stop_tokens),
        service=service.address if service else "",
    )
    runtime = target_class(manifest, choice.provider)
    read_ahead(bundle, runtime.files_read(bundle), report)
    first = runtime.load(bundle, choice.threads, max_len)
    exactness = Exactness.INEXACT if draft == "inexact" else Exactness.EXACT
    curve = _costs(first, service, exactness, report)
    unused: list[Target] = [first]

    def open_pair() -> Pair:
        # Contexts share the loaded weights; each has its own cache.
        target = unused.pop() if unused else runtime(bundle, first.session, max_len)
        if curve is None:
            return Pair(target, None, PlainPolicy())
        drafter = service.open_drafter(manifest, curve, max_len) if service is not None else None
        return Pair(target, drafter, AdaptivePolicy(curve), exactness)

    board = open_board()

    def end_watching() -> None:
        reporter.close()
        board.close()

    speaker = Speaker(
        model,
        open_pair,
        max_contexts=max_contexts,
        clock=time.monotonic,
        joules=board.joules,
        on_close=end_watching,
    )
    reporter = EdgeReporter(
        lambda: speaker.contexts,
        software=software(),
        plain_tokens_per_s=1 / curve(1) if curve is not None else None,
        board=board,
    )
    reporter.start()
    return speaker


def open_board() -> Board:
    """Readings of this device, its energy among them; the caller closes it."""
    board: Board = _product("starsd_jetson.board.telemetry").BoardTelemetry()
    return board


def read_ahead(
    bundle: Bundle,
    names: Collection[str],
    report: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Bring what a runtime reads of the bundle into the system's cache, saying how far it is once that takes
    long: the runtime says nothing until it is done. What was changed since it was hashed last is hashed.

    Raises BundleError for a file that is not what was exported.
    """
    files = {name: bundle.manifest.files[name] for name in names}
    whole = known_whole(bundle)
    total, done = sum(entry.num_bytes for entry in files.values()), 0
    said_s = clock()
    for name, entry in files.items():
        digest = None if name in whole else hashlib.sha256()
        with (bundle.path / name).open("rb", buffering=0) as file:
            while block := file.read(READ_BYTES):
                if digest is not None:
                    digest.update(block)
                done += len(block)
                if clock() - said_s >= READ_REPORT_S:
                    said_s = clock()
                    report(f"loading {bundle.path.name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")
        if digest is not None and digest.hexdigest() != entry.sha256:
            raise damaged(bundle.path, name)
    if not whole.issuperset(files):
        remember_whole(bundle, whole.union(files))


def _costs(
    target: Target, service: DraftService | None, exactness: Exactness, report: Callable[[str], None]
) -> CostCurve | None:
    """What drafting is decided by; None where no tree may be verified and nobody need be told of it."""
    if service is not None:
        report("measuring this device")
        return measured_curve(target)
    if exactness is Exactness.EXACT and not target.spec.invariance.exact_tree:
        return None
    measure = _product("starsd_jetson.calibrate").measure_costs
    curve = measure(target, budget_s=LOCAL_BUDGET_S, sizes=LOCAL_SIZES)
    assert isinstance(curve, CostCurve)
    return curve


def model_name(choice: ModelChoice) -> str:
    """What the model is called by people and in requests."""
    if choice.bundle == EMBEDDED:
        return str(_product("starsd_jetson.embedded").NAME)
    return Path(os.path.abspath(choice.bundle)).name  # a link keeps its own name


def default_sampling(manifest: Manifest, seed: int) -> SamplingParams:
    """What the model's authors suggest."""
    suggested = manifest.sampling
    return SamplingParams(
        temperature=suggested.temperature,
        top_k=suggested.top_k,
        top_p=suggested.top_p,
        min_p=suggested.min_p,
        repetition_penalty=suggested.repetition_penalty,
        seed=seed,
    )


def measured_curve(target: Target) -> CostCurve:
    """What a forward of n rows costs on this machine."""
    curve = _product("starsd_jetson.calibrate").measure_costs(target)
    assert isinstance(curve, CostCurve)
    return curve


def prompt_writer(bundle: Bundle) -> PromptWriter:
    """The bundle's tokenizer and chat template. Raises BundleError."""
    manifest = bundle.manifest
    try:
        tokenizer = Tokenizer(bundle.tokenizer_path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{bundle.tokenizer_path} cannot be read: {error}") from error
    bos = tokenizer.token_text(manifest.bos_token) if manifest.bos_token >= 0 else ""
    eos = tokenizer.token_text(manifest.stop_tokens[0]) if manifest.stop_tokens else ""
    template = ChatTemplate(manifest.chat_template or NO_CHAT, bos, eos)
    return PromptWriter(tokenizer, template, bos if manifest.add_bos else "")


def target_class(manifest: Manifest, provider: str | None = None) -> Any:
    """The target class for the bundle's flavour, or for a provider of ONNX Runtime.

    Raises UsageError for a bundle whose graph is for ONNX Runtime on a CPU.
    """
    if provider is not None and manifest.flavour == "tensorrt":
        return _product("starsd_jetson.provider_targets").PROVIDER_TARGETS[provider]
    if provider not in (None, "cpu"):
        raise UsageError(
            f"--provider {provider} needs the graph of standard operators: export the model --for tensorrt"
        )
    if manifest.flavour == "tensorrt":
        return _product("starsd_jetson.trt_target").TrtTarget
    return _product("starsd_jetson.onnx_target").OnnxTarget


def _product(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"{name} does not load ({error}): {install_hint('onnx', 'export')}"
        ) from error

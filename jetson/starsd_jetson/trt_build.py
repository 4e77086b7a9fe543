"""Build a TensorRT engine on the device that will run it. No engine can be built for another device.

Written for the Python API that TensorRT 8.6, 10 and 11 share; what only some have is looked for. Not yet
run on a board: `tensorrt-rtx`, which has the same builder and parser, builds the same graphs in the tests.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starsd_edge.bundle import Bundle
from starsd_edge.errors import BundleError, MissingDependencyError, ResourceError
from starsd_jetson.context import MAX_TREE_SIZE
from starsd_jetson.trt_plan import explain

if TYPE_CHECKING:  # every call is checked where its stubs are: `make types`
    import tensorrt

__all__ = [
    "PREFILL_ROWS",
    "ROW_BOUNDS",
    "build_engine",
    "build_plan",
    "past_room",
    "check_room",
    "collecting_logger",
    "import_tensorrt",
]

PREFILL_ROWS = 256
# (fewest, typical, most) rows of the three profiles: a plain step, a tree, a piece of the prompt.
ROW_BOUNDS = ((1, 1, 1), (2, 8, MAX_TREE_SIZE), (2, PREFILL_ROWS, PREFILL_ROWS))
TYPICAL_PAST = 512
# Past rows that a pass is given beyond what is filled, at most: its shapes change once in so many tokens.
PAST_STEP = 256
INT4_SINCE = 10  # major version of TensorRT whose parser takes INT4 weights
DISK_FACTOR = 2.5  # of the weights: graph, engine, timing cache, temporaries
MEMORY_FACTOR = 3.0  # of the weights, while building
WORKSPACE_SHARE = 0.25  # of the free memory, for the builder's trials; the rest is for weights and tactics
TIMING_CACHE = "timing.cache"  # beside the engines: a second build of the same layers skips their trials
PROGRESS_PERCENT = 10
Report = Callable[[str], None]
PER_ROW_INPUTS = ("tokens", "positions")


def build_engine(trt: Any, bundle: Bundle, out: Path, report: Report | None = None) -> None:
    """Build the bundle's engine and put it at `out` when it is complete. `report` hears how far it is.

    Raises ResourceError when memory or disk can't do, BundleError with TensorRT's reason when it refuses.
    """
    check_room(bundle, out.parent)
    bundle.verify()  # a changed byte would be in every engine from now on
    plan = build_plan(trt, bundle, out.with_name(TIMING_CACHE), report)
    part = out.with_suffix(f".part-{os.getpid()}")
    try:
        with part.open("wb") as file:
            file.write(plan)
            file.flush()
            os.fsync(file.fileno())
        part.replace(out)
    except OSError as error:
        raise ResourceError(f"{out.parent}: cannot write the engine ({error.strerror})") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def build_plan(trt: Any, bundle: Bundle, timings: Path | None = None, report: Report | None = None) -> Any:
    """The serialized engine, in memory. `timings` keeps what the builder measured for the next build."""
    check_precision(trt, bundle)
    logger = collecting_logger(trt)
    builder: tensorrt.Builder = trt.Builder(logger)
    network = builder.create_network(network_flags(trt))
    parser: tensorrt.OnnxParser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(bundle.graph_path)):
        errors = "\n".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise BundleError(f"{bundle.path}: TensorRT {trt.__version__} refuses the graph: {explain(errors)}")
    config = builder.create_builder_config()
    if not is_strongly_typed(trt) and bundle.manifest.quantisation != "fp32":
        config.set_flag(trt.BuilderFlag.FP16)  # or it computes the float16 graph in float32
    workspace = int(WORKSPACE_SHARE * available_memory())
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    cache = use_timings(trt, config, timings)
    if report is not None and hasattr(trt, "IProgressMonitor"):  # TensorRT >= 10
        config.progress_monitor = progress_monitor(trt, report)
    for bounds in ROW_BOUNDS:
        config.add_optimization_profile(profile(builder, network, bounds, bundle.manifest.max_len))
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BundleError(f"{bundle.path}: TensorRT cannot build it: {explain(logger.text())}")
    if cache is not None and timings is not None:
        keep_timings(cache, timings)
    return plan


def use_timings(trt: Any, config: tensorrt.IBuilderConfig, path: Path | None) -> tensorrt.ITimingCache | None:
    """The builder's timing cache, filled from an earlier build. One from another device or version is refused
    by TensorRT, and an empty one is used. None for TensorRT for RTX, whose calls do nothing."""
    if path is None or trt.__name__ != "tensorrt":
        return None
    cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
    if cache is None or not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def keep_timings(cache: tensorrt.ITimingCache, path: Path) -> None:
    """Best effort: without it the next build only takes longer."""
    part = path.with_suffix(f".part-{os.getpid()}")
    with contextlib.suppress(OSError):
        part.write_bytes(bytes(cache.serialize()))
        part.replace(path)


def profile(
    builder: tensorrt.Builder,
    network: tensorrt.INetworkDefinition,
    rows: tuple[int, int, int],
    max_len: int,
) -> tensorrt.IOptimizationProfile:
    """Bounds of every input for passes of `rows` rows over any past, none included."""
    made = builder.create_optimization_profile()
    most_past = past_room(max_len)
    past = (0, min(TYPICAL_PAST, most_past), most_past)
    # A prompt's piece asks for one row of logits, a tree for all of its rows.
    asked = (1, rows[1], rows[2]) if rows[2] <= MAX_TREE_SIZE else (1, 1, 1)
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shape: Any = tensor.shape  # Dims: made of a tuple and read like one, which the stubs do not say
        sizes: list[Any]
        if tensor.name in PER_ROW_INPUTS:
            sizes = [(count,) for count in rows]
        elif tensor.name == "logit_rows":
            sizes = [(count,) for count in asked]
        elif tensor.name == "past_mask":
            sizes = [(count,) for count in past]
        elif tensor.name == "mask":
            sizes = [(count, count) for count in rows]
        else:
            sizes = [(count, *tuple(shape)[1:]) for count in past]
        made.set_shape(tensor.name, *sizes)
    return made


def past_room(past: int) -> int:
    """Rows of the cache that a pass over `past` of them is given: a multiple of PAST_STEP."""
    return -(-past // PAST_STEP) * PAST_STEP


def check_precision(trt: Any, bundle: Bundle) -> None:
    """Raises BundleError for weights that this TensorRT cannot read."""
    if bundle.manifest.quantisation == "int4" and major(trt) < INT4_SINCE:
        raise BundleError(
            f"{bundle.path}: int4 needs TensorRT {INT4_SINCE} (JetPack 6.1), this is {trt.__version__}; "
            "export it with --quant fp16"
        )


def major(trt: Any) -> int:
    # TensorRT for RTX counts its own versions, and began with what 10 can do.
    return int(trt.__version__.split(".")[0]) if trt.__name__ == "tensorrt" else INT4_SINCE


def is_strongly_typed(trt: Any) -> bool:
    """Whether a network takes its precisions from the graph: 8.x has no such kind, 11 no other."""
    return hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")


def network_flags(trt: Any) -> int:
    """8.x needs to be told of an explicit batch, which later versions have always."""
    kinds = trt.NetworkDefinitionCreationFlag
    return 1 << int(kinds.STRONGLY_TYPED if is_strongly_typed(trt) else kinds.EXPLICIT_BATCH)


def collecting_logger(trt: Any) -> Any:
    """TensorRT explains failures only in its log: keep the errors."""

    class Logger(trt.ILogger):  # type: ignore[misc, unused-ignore]  # typed by the stubs only
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.lines.append(message)

        def text(self) -> str:
            return "\n".join(self.lines)

    return Logger()


def progress_monitor(trt: Any, report: Report) -> Any:
    """Tells every PROGRESS_PERCENT of the outermost phase; minutes pass between them on a board."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, unused-ignore]  # typed by the stubs only
        def __init__(self) -> None:
            super().__init__()
            self.steps: dict[str, int] = {}
            self.told = 0

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self.steps[phase] = max(steps, 1)

        def step_complete(self, phase: str, step: int) -> bool:
            percent = 100 * step // self.steps[phase] if phase in self.steps else 0
            if percent >= self.told + PROGRESS_PERCENT:
                self.told = percent
                report(f"building the engine, once: {percent}%")
            return True  # go on

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

    return Monitor()


def check_room(bundle: Bundle, folder: Path) -> None:
    """Refuse a build that would end in a full disk or the kernel's out-of-memory killer."""
    weights = sum(entry.num_bytes for entry in bundle.manifest.files.values())
    free = shutil.disk_usage(folder).free
    if free < DISK_FACTOR * weights:
        needed = int(DISK_FACTOR * weights) >> 20
        raise ResourceError(f"{folder}: building needs {needed} MiB of disk, {free >> 20} MiB are free")
    memory = available_memory()
    if memory < MEMORY_FACTOR * weights:
        needed = int(MEMORY_FACTOR * weights) >> 20
        raise ResourceError(
            f"building needs {needed} MiB of memory and swap, {memory >> 20} MiB are free; "
            "add swap, stop programs, or copy an engine from an identical board"
        )


def available_memory() -> int:
    """MemAvailable and SwapFree, in bytes."""
    fields = {}
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields.get("MemAvailable", 0) + fields.get("SwapFree", 0)


def import_tensorrt() -> Any:
    """Raises MissingDependencyError; on a Jetson the package comes with the system, not from pip."""
    try:
        import tensorrt
    except ImportError as error:
        raise MissingDependencyError(
            f"TensorRT does not load ({error}); on a Jetson: apt install python3-libnvinfer, and make the "
            "environment with --system-site-packages"
        ) from error
    return tensorrt

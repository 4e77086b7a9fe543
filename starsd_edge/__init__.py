"""One-for-many speculative decoding: what both ends share, and what runs on every device."""

import os

# ONNX Runtime's wheels report their use to their maker unless told otherwise before they are imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

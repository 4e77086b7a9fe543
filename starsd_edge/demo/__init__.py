"""`starsd demo`: plain against StarSD decoding on real prompts, in real processes."""

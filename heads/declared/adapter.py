"""Where an artifact or a checkpoint keeps its adapter, in peft's own files."""

ADAPTER = "adapter"
ADAPTER_CONFIG = f"{ADAPTER}/adapter_config.json"
ADAPTER_WEIGHTS = f"{ADAPTER}/adapter_model.safetensors"

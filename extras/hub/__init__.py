"""Read and write published models. Only this folder needs these packages."""
from common.errors import optional

with optional("-r extras/hub/requirements.txt"):
    import gguf
    import huggingface_hub
    import jinja2
    import safetensors
    import tokenizers

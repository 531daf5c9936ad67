"""tkq as an attention backend of vLLM (0.33): ``vllm serve MODEL --attention-backend TKQ``.

tkq's entry point in the group ``vllm.general_plugins`` calls `register` in each of vLLM's processes; nothing else of
tkq is loaded until a model asks for the backend. What it takes is in `tkq.integrations.vllm_backend`.
"""
NAME = "TKQ"
BACKEND = "tkq.integrations.vllm_backend.TkqBackend"


def register() -> None:
    """Name the backend to vLLM. May be called more than once.

    Raises:
        ImportError: vLLM is not installed, or has no registry of backends.
    """
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(NAME, BACKEND)

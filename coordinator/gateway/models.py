"""GET /v1/models and /v1/models/{id}: what the fleet can be asked for, from known state."""

from coordinator.errors import Reason, SlackwaterError
from coordinator.tasks_port import ModelInfo, Tasks


def list_models(tasks: Tasks) -> dict[str, object]:
    return {"object": "list", "data": [_model(info) for info in tasks.models()]}


def get_model(tasks: Tasks, name: str) -> dict[str, object]:
    """Return one model.

    Raises:
        SlackwaterError: MODEL_NOT_FOUND.
    """
    for info in tasks.models():
        if info.name == name:
            return _model(info)
    raise SlackwaterError(
        Reason.MODEL_NOT_FOUND,
        f"the model {name[:128]!a} is not served here; GET /v1/models lists what is",
        param="model",
    )


def _model(info: ModelInfo) -> dict[str, object]:
    """Return OpenAI's four fields, and ours after them, which its clients pass over."""
    return {
        "id": info.name,
        "object": "model",
        "created": info.created_at_ms // 1000,
        "owned_by": "slackwater",
        "kind": info.kind.value,
        "revision": info.revision,
        "manifest_digest": info.manifest_digest,
        "licence": info.licence,
        "context_tokens": info.context_tokens,
        "engines_ready": info.engines_ready,
    }

"""The HTTP interface that engines and coordinator agree on: paths and headers."""

__all__ = ["MODEL_CALLS", "PROGRAM_ROUTES", "REPLICA_HEADER", "WAITED_HEADER"]

#: Every endpoint of vLLM whose POST requests reach the engine.
MODEL_CALLS = frozenset(
    {
        "/classify",
        "/cohere/v2/chat",
        "/generative_scoring",
        "/inference/v1/generate",
        "/invocations",
        "/pooling",
        "/rerank",
        "/score",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/v1/systemone",
        "/v2/embed",
        "/v2/rerank",
    }
)

#: Every path about programs is this or starts with it and a slash.
PROGRAM_ROUTES = "/programs"

#: Seconds for which a turn has waited in front of the engine: its order there counts from then.
WAITED_HEADER = "x-program-waited"

#: From one coordinator to another, never to an engine: the URL of the one that passes the request
#: on. It is served where it comes then, and keep-alive comments are left to who passed it on.
REPLICA_HEADER = "x-program-replica"

"""mlx-lm's server as it may become: changes of open pull requests at ml-explore/mlx-lm.

1409: `fetch_nearest_cache` takes one more parameter. 1392: `run` makes its prompt cache through
another function. 1207: one more path that generates, with a handler of its own.
"""

from __future__ import annotations

from types import ModuleType

CHANGES = """
class LRUPromptCache(LRUPromptCache):
    def fetch_nearest_cache(self, model, tokens, *, consume=False):
        return super().fetch_nearest_cache(model, tokens)


def make_lru_prompt_cache(cli_args):
    return LRUPromptCache(cli_args.prompt_cache_size)


def run(
    host,
    port,
    model_provider,
    server_class=ThreadingHTTPServer,
    handler_class=APIHandler,
):
    response_generator = ResponseGenerator(
        model_provider, make_lru_prompt_cache(model_provider.cli_args)
    )
    _run_http_server(host, port, response_generator)


class APIHandler(APIHandler):
    def do_POST(self):
        if self.path != "/v1/answers":
            super().do_POST()
            return
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = CompletionRequest(
            "chat", "", [{"role": "user", "content": self.body["input"]}], None, None
        )
        context, tokens = self.response_generator.generate(
            request,
            GenerationArguments(
                model=ModelDescription("default_model", "default_model", None),
                sampling=SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.0),
                logits=LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
                stop_words=[],
                max_tokens=8,
                num_draft_tokens=3,
                logprobs=False,
                top_logprobs=-1,
                seed=None,
                chat_template_kwargs=None,
            ),
        )
        answer = {"answer": "".join(token.text for token in tokens)}
        answer["cached"] = context.prompt_cache_count
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


_run_http_server.__defaults__ = (ThreadingHTTPServer, APIHandler)
"""


def change(server: ModuleType) -> None:
    """`server`: an imported, unpatched `mlx_lm.server`."""
    exec(CHANGES, vars(server))


if __name__ == "__main__":
    import sys

    import mlx_lm.server as stock

    from mlx_lm_kvpersist._startup import serve

    change(stock)
    serve(sys.argv[1:])

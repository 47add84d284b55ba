"""The server with a plugin, and without. For `tests/` of mlx-lm."""

import sys
import unittest
from types import SimpleNamespace
from unittest.mock import patch

from mlx_lm import server


class Provider(server.ModelProvider):
    pass


class Generator:
    """A ResponseGenerator that starts no thread."""

    def __init__(self, model_provider, prompt_cache):
        self.model_provider, self.prompt_cache = model_provider, prompt_cache


class Handler(server.APIHandler):
    pass


class Cache(server.LRUPromptCache):
    """A prompt cache that could keep its content on disk."""


class Plugin(server.ServerPlugin):
    model_provider_class = Provider
    response_generator_class = Generator
    handler_class = Handler
    closed = False

    def add_arguments(self, parser):
        parser.add_argument("--cache-folder")

    def make_prompt_cache(self, model_provider):
        cache = Cache(model_provider.cli_args.prompt_cache_size)
        cache.folder = model_provider.cli_args.cache_folder
        return cache

    def close(self):
        Plugin.closed = True


def entry_points(group, name):
    known = {("mlx_lm.server", "disk"): Plugin}
    return [SimpleNamespace(load=lambda: known[group, name])] if (group, name) in known else []


class TestServerPlugins(unittest.TestCase):
    def start(self, *options):
        """Return the arguments with which the HTTP server would have been started."""
        with (
            patch.object(sys, "argv", ["mlx_lm.server", *options]),
            patch.object(server, "entry_points", entry_points),
            patch.object(server, "_run_http_server") as started,
        ):
            server.main()
        return started.call_args.args

    def test_a_plugin_provides_the_prompt_cache_and_the_classes(self):
        options = ("--plugin", "disk", "--cache-folder", "/caches", "--port", "1234")
        _, port, generator, _, handler = self.start(*options)
        self.assertEqual((port, handler), (1234, Handler))
        self.assertIsInstance(generator, Generator)
        self.assertIsInstance(generator.model_provider, Provider)
        self.assertIsInstance(generator.prompt_cache, Cache)
        self.assertEqual(generator.prompt_cache.folder, "/caches")
        self.assertEqual(generator.prompt_cache.max_size, 10)
        self.assertTrue(Plugin.closed)

    def test_the_generator_class_names_its_batch_generator(self):
        self.assertIs(server.ResponseGenerator.batch_generator_class, server.BatchGenerator)
        self.assertNotIn("BatchGenerator", server.ResponseGenerator._generate.__code__.co_names)

    def test_without_a_plugin_nothing_changes(self):
        with patch.object(server.ServerPlugin, "response_generator_class", Generator):
            *_, generator, _, handler = self.start()
        self.assertIs(handler, server.APIHandler)
        self.assertIs(type(generator.model_provider), server.ModelProvider)
        self.assertIs(type(generator.prompt_cache), server.LRUPromptCache)

    def test_the_server_does_not_start_with_an_unknown_plugin(self):
        with self.assertRaises(SystemExit):
            self.start("--plugin", "nothing")


if __name__ == "__main__":
    unittest.main()

"""Measurements, each beside a baseline of the same run."""

PARTS = {  # by name: the module that measures, and what
    "attention": ("attention.command", "attention alone, over trees of segments"),
    "throughput": ("throughput.command", "whole engines, in the tables of the papers"),
    "modules": ("modules", "how soon prompts made of modules are answered"),
    "store": ("store", "conversations that come back from below the pool"),
    "truncation": ("truncation", "conversations that outgrow the window"),
    "trace": ("trace", "a trace of requests, replayed with each policy"),
    "serve": ("serve", "load on any OpenAI-compatible server"),
    "overhead": ("overhead", "what answering over HTTP costs"),
    "soak": ("soak", "mixed load on a small server, and whatever goes wrong"),
}

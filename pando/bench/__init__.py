"""Measurements, each beside a baseline of the same run."""

PARTS = {  # what can be measured alone
    "attention": "attention alone, over trees of segments",
    "throughput": "whole engines, in the tables of the papers",
    "modules": "how soon prompts made of modules are answered",
    "store": "conversations that come back from below the pool",
    "truncation": "conversations that outgrow the window",
    "trace": "a trace of requests, replayed with each policy",
    "serve": "load on any OpenAI-compatible server",
    "overhead": "what answering over HTTP costs",
    "soak": "mixed load on a small server, and whatever goes wrong",
}

"""Measurements, each beside a baseline of the same run."""

PARTS = {  # what can be measured alone
    "attention": "attention alone, over trees of segments",
    "throughput": "whole engines, measured as the papers did",
    "modules": "prompts made of modules: time to the first token, and answer quality",
    "store": "conversations that come back from host memory, disk or a remote",
    "truncation": "conversations that outgrow the window",
    "trace": "a trace of requests, replayed with each eviction policy",
    "serve": "load on any OpenAI-compatible server",
    "overhead": "what answering over HTTP costs",
    "soak": "mixed load on a small server, to see whether anything goes wrong",
}

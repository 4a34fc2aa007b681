"""A deterministic model server for tests and demos: it plays a script instead of sampling.

    async with ReplayServer({"turns": [{"text": "Hello."}]}) as server:
        ...  # point an agent at server.url, then read server.log

It serves chat completions, streamed and not, with token ids and logprobs of a toy tokenizer,
on a free port of the loopback.

A script is JSON:

    {"model": "replay",
     "tasks": [{"when": "hello.py",
                "turns": [{"tool": "write", "arguments": {"filePath": "hello.py", "content": "print('hi')"}},
                          {"tools": [{"tool": "bash", "arguments": {"command": "python hello.py"}}]},
                          {"thinking": "It ran.", "text": "Done."}]}],
     "faults": [{"turn": 1, "status": 429, "retry_after": 3}]}

`tasks`   The first task whose `when` is in what the user says before the first answer is played; "" is in all.
          `{"turns": [...]}` alone is one task for all. A request that matches no task is refused (400).
`turns`   `tool` and `arguments`, or `tools` for several calls, `text`, `thinking`. The turn that is played is
          the number of assistant messages after the first user message, so requests may come in any order,
          in parallel, and again. Past the last turn its text is repeated, or "Done.".
          A request without tools, when the task uses tools, is a side call (a title, a summary) and gets a
          short text.
`faults`  The first that applies is played. `when` and `turn` say where, `times` how often in one conversation
          (what the user says first and the session header name it). Once, if left out, and every time if it
          only slows an answer down.
            status, code, message, retry_after    an error instead of an answer
            close: true                           the socket is closed without an answer
            cut_after: N                          the stream ends after N tokens without a finish; an answer
                                                  that is not streamed breaks off
            error_chunk: TEXT                     an error inside the stream, after `cut_after` or one token
            stall_after: N                        nothing more after N tokens; an answer that is not streamed
                                                  never comes
            malformed: true                       an answer that is no JSON, in a stream after `cut_after` tokens
            hang: S                               nothing at all for S seconds
            delay: S, per_token_delay: S          a slow first token, slow tokens
Options   engine            the format of the responses: vllm, sglang, llamacpp, openai (logprobs, no ids), text
          seed              for the logprobs
          max_context       longer prompts are refused with `context_length_exceeded`
          tokens_per_chunk  how many tokens each event of a stream holds
          weight_version    the weight version that an SGLang server reports
          rejects           fields of a request that are refused

A recording is what `paddock trace show ID --json` prints: an object with `calls`. The calls of the agent are
answered again with exactly their ids and logprobs. A file with one object per line may hold several tasks and
recordings, and one object with options.
"""

from paddock.models.replay.script import Script
from paddock.models.replay.server import ReplayServer, ServedRequest

__all__ = ["ReplayServer", "Script", "ServedRequest"]

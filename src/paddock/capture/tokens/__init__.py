"""Token mode: the proxy keeps the token ids of each conversation, renders new messages only, and parses sampled ids.

The proxy uses `conversations.TokenConversations`, which makes a `request.TokenCall` for each model call. `rendering`
wraps a renderer of the package `renderers` (extra `tokens`), `tokenizer` opens a tokenizer, `history` finds the
conversation that a request continues, `streaming` parses sampled ids while they arrive. Heavy packages are imported
when the first rendering is opened.
"""

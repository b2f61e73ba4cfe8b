"""Grammars: an answer's language as arrays that a compiled step can read.

Read in this order: `records` (the result), `vocabulary`, `nodes`, `regex`, `characters`, `automaton`, `minimise`,
`trie`, `masks`, `compile`.
"""

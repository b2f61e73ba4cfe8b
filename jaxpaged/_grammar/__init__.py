"""Grammars: an answer's language as arrays that a compiled step can read. NumPy on the host.

`public` compiles a text in these steps:

1. A regex (`regex`), JSON schema (`json_schema`), list of strings or text (`text`) becomes a syntax tree (`nodes`).
2. The tree becomes a byte automaton (`automaton`), and the smallest one (`minimise`).
3. A walk along the trie of the vocabulary finds the allowed tokens of each state (`masks`).

| file | contents |
|---|---|
| `records` | the compiled grammar |
| `vocabulary`, `trie`, `recent` | the bytes of each token, the same as a trie, the grammars that are kept |
| `nodes`, `characters` | syntax trees; sets of characters and their encodings |
| `json_text`, `numbers`, `formats` | JSON values, bounded numbers and formats of strings as syntax trees |
| `text` | texts that are free in part |
| `alternatives` | whether the options of a `oneOf` exclude each other |
| `compile` | the steps 2 and 3 |
"""

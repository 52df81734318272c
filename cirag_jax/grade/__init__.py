"""GRADE's generation (Lee et al., 2025, sections 3.1 and 3.2): documents to multi-hop questions.

The steps are modules: `documents`, `claims`, `triples`, `clusters`, `equivalence`, `paths`,
`questions`, `database`; `commands.generate_questions` puts them together. Every step that asks a
language model is a program over the journal, and has a form that asks none.
"""

"""Generation of multi-hop questions from documents (GRADE, Lee et al., 2025, sections 3.1 and 3.2).

Each step is a module: `documents`, `claims`, `triples`, `clusters`, `equivalence`, `paths`,
`questions` and `database`. `commands.generate_questions` runs them. A step that uses a language
model is a program of the runtime; it also has a variant without a model.
"""

"""Generation of multi-hop questions from documents (GRADE, Lee et al., 2025, sections 3.1 and 3.2).

The steps are modules: `documents`, `claims`, `triples`, `clusters`, `equivalence`, `paths`,
`questions` and `database`, composed by `commands.generate_questions`. A step with a language model
is a program of the runtime; each also has a variant without one.
"""

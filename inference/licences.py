"""Which licences a model may have at all; an owner may accept fewer."""

# SPDX identifiers that let volunteers run a model and others use its answers.
LICENCES = frozenset({"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "MIT"})
